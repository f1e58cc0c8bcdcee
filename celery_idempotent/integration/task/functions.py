"""Any function as an idempotent operation: claimed, renewed, recorded and replayed as a task is, without a message."""

import inspect
import sys
from collections.abc import Callable
from functools import partial, update_wrapper
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from celery import Celery

from celery_idempotent import clock
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration import binding
from celery_idempotent.integration.task.guard import Guard, check_policy, place_of
from celery_idempotent.protocol.effects import Duration, is_duration, milliseconds
from celery_idempotent.protocol.keys import WHOLE_CALL, CallSignature
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.store import Store

F = TypeVar("F", bound=Callable[..., Any])


def idempotent(
    policy: Policy | None = None,
    *,
    store: str | Store | None = None,
    app: Celery | None = None,
    name: str | None = None,
    wait: Duration = 0,
) -> Callable[[F], F]:
    """Have a function's effect happen once for each idempotency key, wherever and however often it is called::

        @idempotent(Policy("order_id"), store="redis://localhost/0")
        def charge(order_id: str, cents: int) -> str: ...

    The first call claims its key and runs the body; calls with the same key get its result, also in other processes and
    after this one has ended. A heartbeat renews the claim, so a body may take longer than the lease. In the body
    :func:`~celery_idempotent.current_attempt` has steps, commits and transactions. An exception gives the claim back,
    unless the policy remembers it.

    An ``async def`` is awaited by the task that calls it, and the event loop waits for no store. In a method, ``self``
    and ``cls`` are no part of the key, so its policy has to name one.

    The function has ``idempotency_key_for(...)``, ``guarantee()`` and ``name`` beside what it had.

    Args:
        policy: What identifies the effect, and what is promised; default: the app's ``idempotency_policy``.
        store: Where it is recorded: a URL, as :func:`~celery_idempotent.stores.open_store` takes, or a store. Results
            are JSON.
        app: The app whose ``idempotency_*`` settings and result serialiser count; default, without ``store``: the
            current app.
        name: In records, logs and, unless the policy has a scope, in keys; default: module and qualified name. Two
            functions of one name and key are one operation.
        wait: For how long to wait for another call that has the operation in flight, in seconds. The policy's
            ``backoff`` is the shortest pause between two looks.

    Raises:
        PolicyError: At the definition: the policy does not fit the function, or the function is a generator.
        InFlight: From a call, as all that follow: another one is running, and ``wait`` is over. Nothing ran.
        KeyMissing: It has no key. Nothing ran.
        KeyReused: Its key belongs to other arguments. Nothing ran.
        OutcomeUnknown: Nobody can tell whether the effect happened; a person resolves it. Nothing ran.
        ResultLost: The effect has happened; its result could not be kept.
        LeaseLost: Another call took over while this one ran, and its outcome counts: call again to get it.
        StoreUnavailable: The store gave no certain answer: call again; the effect still happens once.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError("policy", repr(policy), "write @idempotent(Policy(...), store=...)")
    if not is_duration(wait):
        raise PolicyError("wait", repr(wait), "must be seconds or a timedelta, not negative")
    where = place_of(store, app)

    def decorated(function: F) -> F:
        refuse_what_is_no_function(function)
        named = name or name_of(function)
        with binding.named(named):
            caller = _Caller(function, Guard(named, policy, where), milliseconds(wait) / 1000)
        return cast(F, caller.wrapper())

    return decorated


class _Caller:
    """What the wrapper of one function does, whether that is awaited or not."""

    def __init__(self, function: Callable[..., Any], gate: Guard, wait: float) -> None:
        self._function, self._gate, self._wait = function, gate, wait
        self._first = 1 if is_method(function) else 0
        signature = inspect.signature(function)
        own = list(signature.parameters.values())[self._first :]
        self._signature = CallSignature(signature.replace(parameters=own))
        policy = gate.declared
        if self._first and (policy is None or policy.key == WHOLE_CALL):
            remedy = "a method's instance is no part of the key, and two may mean two effects; write Policy(key=...)"
            raise PolicyError("key", "all arguments", remedy)
        if policy is not None:
            check_policy(policy, self._signature.signature)

    def wrapper(self) -> Any:
        made: Any = self._awaited() if is_async(self._function) else self._called()
        update_wrapper(made, self._function)
        self._gate.introduce(made, lambda *args, **kwargs: self._gate.identity(self._signature, args, kwargs).key)
        return made

    def _called(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            identity, body, pause_after = self._asked(args, kwargs)
            while isinstance(found := self._gate.call(identity, body), Conflict):
                clock.sleep(pause_after(found))
            return found.value

        return call

    def _awaited(self) -> Callable[..., Any]:
        import asyncio  # a process without an event loop imports none

        async def call(*args: Any, **kwargs: Any) -> Any:
            identity, body, pause_after = self._asked(args, kwargs)
            while isinstance(found := await self._gate.call_on_loop(identity, body), Conflict):
                await asyncio.sleep(pause_after(found))
            return found.value

        return call

    def _asked(self, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., float]]:
        """A call's identity and body; and after a conflict, the seconds until to ask again, or ``InFlight``."""
        identity = partial(self._gate.identity, self._signature, args[self._first :], kwargs)
        until, conflicts = clock.monotonic() + self._wait, count()

        def pause_after(conflict: Conflict) -> float:
            left = until - clock.monotonic()
            if left <= 0:
                raise conflict.error
            return min(self._gate.pause_after(conflict, next(conflicts)), left)

        return identity, partial(self._function, *args, **kwargs), pause_after


def refuse_what_is_no_function(function: Any) -> None:
    """Refuse to decorate what cannot be called as it stands, and what runs only after its call."""
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise PolicyError("function", f"@{kind}", f"write @{kind} above @idempotent(...), not below")
    if hasattr(function, "apply_async"):
        raise PolicyError("function", repr(function), "a task is protected by base=IdempotentTask")
    if not callable(function) or inspect.isclass(function):
        raise PolicyError("function", repr(function), "must be a function")
    body = _innermost(function)
    while binding.is_a_frame_around(body):
        body = body.__wrapped__
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise PolicyError("function", _described(function), f"a generator {binding.LATE}; {binding.ITERATE}")


def _innermost(function: Any) -> Any:
    """What runs when ``function`` is called: that of a partial, or of an object that can be called."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(_innermost(function))


def is_method(function: Any) -> bool:
    """Whether the first argument is an instance or a class: it was written in a class, and says so by its name."""
    owner = getattr(function, "__qualname__", "").rpartition(".")[0]
    first = next(iter(inspect.signature(function).parameters), "")
    return bool(owner) and not owner.endswith("<locals>") and first in {"self", "cls"}


def name_of(function: Any) -> str:
    """What a function is called in records and keys: its module and qualified name."""
    qualname = getattr(function, "__qualname__", "")
    if not qualname or "<lambda>" in qualname:
        raise PolicyError("name", "None", f"{_described(function)} has no name of its own; write name=...")
    module = function.__module__
    if module == "__main__":  # under the name by which other processes import it: another name is another key
        main = sys.modules["__main__"]
        spec = main.__spec__
        module = spec.name if spec is not None else Path(getattr(main, "__file__", None) or "__main__").stem
    return f"{module}.{qualname}"


def _described(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
