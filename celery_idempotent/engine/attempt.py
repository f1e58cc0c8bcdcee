"""What a task's body can know and do about its attempt: effects that a crash between two of them does not repeat.

A claim around the body is not enough when the worker dies between an effect and the record of it. Each tool
here closes that gap for one kind of receiver; where no tool can, the author says which error is worse.
"""

import inspect
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar, assert_never

from kombu.exceptions import KombuError

from celery_idempotent.engine.claim import Claim, effect_key
from celery_idempotent.engine.transaction import BodyTransaction, derived_id, signature_of
from celery_idempotent.errors import OutcomeUnknown, PolicyError, ResultLost, SafeToRetry, WriteRefused, are_all
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.contents import ContentLost, Slot, unpack
from celery_idempotent.protocol.effects import Effect
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.steps import Begin, Call, Doubt, Finished, Recall, Step, Terms, decide_step, terms_of
from celery_idempotent.protocol.store import CommittingStore, RecordTooLarge, TransactionalStore, WriteFailed
from celery_idempotent.troubleshooting import with_link

T = TypeVar("T")


class Attempt:
    """What a body can know and do about the attempt that runs it; :func:`current_attempt` gives it.

    A body that no claim protects has an attempt, too: in a direct call, with ``mode="off"``, or in an outage under
    ``on_outage="run"``. There every step is called each time, nothing is recorded, and :meth:`commit` and
    :meth:`transaction` are refused.
    """

    def __init__(self, identity: Callable[[], Identity], outer: "Attempt | None" = None) -> None:
        self._identity = identity
        self._outer: Attempt | Claim | None = outer

    @property
    def key(self) -> str:
        """The idempotency key."""
        return self._identity().key

    @property
    def fencing_token(self) -> int:
        """Larger than that of every earlier attempt; 0 where the body runs unprotected.

        Send it to receivers that check it. It keeps late writers out; by itself it does not make an effect happen once.
        """
        return self._outer.fencing_token if self._outer else 0

    @property
    def number(self) -> int:
        """1 for the operation's first attempt; 0 where the body runs unprotected."""
        return self._outer.number if self._outer else 0

    @property
    def is_takeover(self) -> bool:
        """Whether the attempt before this one never ended, so that its effects may have happened.

        False proves nothing: an earlier attempt may have had its effect, then raised and released its claim.
        """
        return self._outer.is_takeover if self._outer else False

    @property
    def remaining(self) -> float | None:
        """Seconds until the policy's ``deadline``, 0 once it is over, None if there is none; a timeout for requests."""
        return self._outer.remaining if self._outer else None

    def effect_key(self, name: str) -> str:
        """A key for a receiver that honours idempotency keys, 64 hexadecimal digits.

        The same on every attempt of the operation, and different for every other name.
        """
        return effect_key(self.key, name)

    def ensure_owned(self) -> None:
        """Return if this attempt still owns its key, and raise if not; call it right before an effect.

        Ownership can end right after the answer, so this makes a second effect unlikely, not impossible.

        Raises:
            LeaseLost: Another attempt took over. Let it pass: the delivery is postponed.
            DeadlineExceeded: A ``LeaseLost``: the body ran past its deadline. Let it pass.
            StoreUnavailable: The store did not say. Let it pass.
        """
        if self._outer:
            self._outer.ensure_owned()

    def before_effects(self) -> AbstractContextManager[None]:
        """Mark the beginning of the body, in which no effect has begun::

            with current_attempt().before_effects():
                order = load(order_id)
                check(order)

        An exception that leaves the block releases the claim, also under ``on_takeover="refuse"``: this delivery fails,
        and the next one runs. It is a promise of yours, as :exc:`~celery_idempotent.errors.SafeToRetry` is.

        Raises:
            PolicyError: A step or commit was made before the block, or is made in it.
        """
        return nullcontext()

    def step(self, name: str, call: Callable[[Step], T]) -> T:
        """Make ``call`` until it has returned once; from then on, return its recorded result.

        The result is recorded before this returns, and later attempts of the operation get it without a call. If the
        worker dies between the effect and that record, the step is called again with the same key: at least once, and
        exactly once if the receiver honours the key. ``Policy(effects={"text": AtMostOnce()})`` declares another
        promise for a step. An exception of the call passes through; steps that have finished stay recorded.

        Args:
            name: Identifies the step within the operation, also across deployments; steps may change their order.
            call: Has the effect. It gets the step, whose ``key`` and ``fencing_token`` are for the receiver, and
                should return something small that the app's result serialiser can encode.

        Raises:
            OutcomeUnknown: Nobody knows whether the step had its effect. Let it pass: whatever the body raises now, the
                operation ends UNKNOWN, and a person resolves it.
            ResultLost: The step finished in an earlier attempt, and its result could not be kept.
            LeaseLost: Another attempt took over. Let it pass.
            DeadlineExceeded: A ``LeaseLost``: the body ran past its deadline; nothing was called. Let it pass.
            StoreUnavailable: The store did not confirm. Let it pass.
            PolicyError: This attempt has used the name before, the policy's ``effects`` do not name it, or the call
                returned something that must still be awaited or iterated.
        """
        terms_of(name, {})
        return _called(call, Step(name, self.effect_key(name), self.fencing_token))

    async def astep(self, name: str, call: Callable[[Step], Awaitable[T]]) -> T:
        """As :meth:`step`, for a call that is awaited: ``await attempt.astep("charge", lambda step: api.charge(...))``.

        It does not block the event loop. The other tools do: ``await asyncio.to_thread(attempt.commit, ...)``.
        """
        from celery_idempotent.engine.loops import awaited  # a process without an event loop imports none

        _refuse_uncallable(name, call)
        return await awaited(partial(self.step, name), call)

    def fenced_step(
        self, name: str, *, fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
    ) -> T:
        """Have an effect exactly once, on a receiver that checks fencing tokens.

        Args:
            name: As for :meth:`step`.
            fence: Makes the receiver refuse every later write with a smaller token than ``step.fencing_token``.
            probe: Looks for the effect under ``step.key``; returns what ``act`` would have, or None.
            act: Has the effect and stores ``step.key`` with it, in one write that the receiver refuses if it
                has seen a larger token than ``step.fencing_token``.

        Raises as :meth:`step` does. All three are needed: with a token alone, every new attempt passes the check and
        repeats the effect; without a fence, the probe misses an effect that is still on its way.
        """
        return self.step(name, fenced(fence, probe, act))

    def commit(self, result: T, writes: Sequence[Mapping[str, Any]]) -> T:
        """Record ``result`` as the operation's outcome and make ``writes`` in one atomic step: exactly once.

        Call it last: ``return current_attempt().commit(...)``. Whatever the body does after it, this is the outcome.

        Args:
            result: What this delivery and every duplicate return.
            writes: Up to 99 puts, updates, deletes and condition checks in DynamoDB, as boto3's
                ``transact_write_items`` takes them; values may also be plain Python. The tables are in the same
                account and Region as the idempotency table, and no item stands in two writes.

        Returns:
            ``result`` as a replay would return it, if its policy keeps it.

        Raises:
            WriteRefused: A condition of yours failed, or a write is malformed; nothing was written.
            LeaseLost: Another attempt took over, and nothing was written. Let it pass.
            StoreUnavailable: The store did not confirm. Let it pass.
            PolicyError: The store is not DynamoDB.
        """
        raise _without_claim("commit")

    def transaction(self, using: Any = None) -> AbstractContextManager[BodyTransaction]:
        """Open a transaction on the SQL store's database that holds the operation's record, too: exactly once.

        ::

            with current_attempt().transaction() as tx:
                tx.execute(insert(ledger).values(order=order_id, cents=cents))
                tx.send(receipt, order_id)
                return tx.done({"booked": cents})

        The block is committed together with the result given to ``tx.done()``, or not at all: an exception rolls it
        back, and so does a takeover meanwhile. Do it last.

        Args:
            using: A connection or ORM session of your own to the store's database, without a transaction begun on
                it; default: a connection of the store's. It should run at READ COMMITTED: at a stricter level the
                heartbeat's renewals make long transactions fail, to be retried.

        Raises:
            LeaseLost: At the end of the block: another attempt took over, and nothing was committed. Let it pass.
            StoreUnavailable: Nothing was committed, or the store did not confirm. Let it pass.
            PolicyError: The store is not SQL, or the block ended without ``tx.done()``.
        """
        raise _without_claim("transaction")

    def send(self, name: str, task: Any, *args: Any, **kwargs: Any) -> str:
        """Publish a follow-up task in a step of its own: not again once the step is recorded.

        Until then it may be published again, with the same task id. So make the follow-up task idempotent, with a key
        from its arguments, and its effect happens once. To publish if and only if a transaction commits, use
        ``tx.send()``.

        Args:
            name: Name of the step.
            task: A task, or a signature such as ``receipt.s(order_id).set(queue="mail")``.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The task id, which is the same on every attempt.

        Raises as :meth:`step` does, and what publishing raises.
        """
        signature = signature_of(task, args, kwargs)

        def publish(step: Step) -> str:
            task_id = derived_id(step.key)
            signature.apply_async(task_id=task_id)
            return task_id

        return self.step(name, publish)


class ProtectedAttempt(Attempt):
    """The attempt of a body that a claim protects.

    ``nothing_begun`` are exceptions by which a call states that it had no effect.
    """

    def __init__(
        self,
        claim: Claim,
        codec: Codec,
        nothing_begun: tuple[type[BaseException], ...] = (SafeToRetry,),
        effects: Mapping[str, Effect] | None = None,
    ) -> None:
        self._claim = self._outer = claim
        self._codec = codec
        self._nothing_begun = nothing_begun
        self._effects = effects or {}
        self._names: set[str] = set()
        self._naming = threading.Lock()
        self._stretch: Literal["before all", "before effects", "among effects"] = "before all"

    @property
    def key(self) -> str:
        return self._claim.key

    @property
    def is_underway(self) -> bool:
        """Whether its delivery still runs."""
        return self._claim.is_underway()

    @contextmanager
    def before_effects(self) -> Iterator[None]:
        if self._stretch != "before all":
            why = "it is for the beginning of the body, and entered once"
            raise PolicyError("before_effects", "after an effect", why)
        self._stretch = "before effects"
        try:
            yield
        except BaseException as error:
            self._claim.raised_before_effects = error
            raise
        finally:
            self._stretch = "among effects"

    def _begin_effect(self, what: str) -> None:
        if self._stretch == "before effects":
            why = "make it after the block, which says that nothing has begun"
            raise PolicyError(what, "inside before_effects()", why)
        self._stretch = "among effects"
        self._claim.raised_before_effects = None  # an earlier error that is raised again from here on excuses nothing

    def step(self, name: str, call: Callable[[Step], T]) -> T:
        return self._made(name, call, terms_of(name, self._effects))

    def fenced_step(
        self, name: str, *, fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
    ) -> T:
        return self._made(name, fenced(fence, probe, act), terms_of(name, self._effects, is_fenced=True))

    def commit(self, result: T, writes: Sequence[Mapping[str, Any]]) -> T:
        self._begin_effect("commit")
        store = self._claim.store
        if not isinstance(store, CommittingStore):
            why = "commits no writes; attempt.commit() needs a DynamoDB store"
            raise PolicyError("idempotency_store", repr(store), why)
        if self._claim.committed is not None:
            raise PolicyError("commit", "a second time", "an operation commits once; give all writes to one commit()")
        kept = self._codec.keep_outcome(result)
        try:
            self._claim.recorded(kept, lambda each: self._claim.commit(store, each, writes))
        except WriteFailed as error:
            raise WriteRefused(self.key, _described(error.position, writes), error.reason) from error
        value: T = kept.value
        return value

    def transaction(self, using: Any = None) -> BodyTransaction:
        self._begin_effect("transaction")
        store = self._claim.store
        if not isinstance(store, TransactionalStore):
            why = "has no transactions; attempt.transaction() needs an SQL store"
            raise PolicyError("idempotency_store", repr(store), why)
        if self._claim.committed is not None:
            raise PolicyError("transaction", "after a commit", "an operation commits once; do it all in one")
        return BodyTransaction(self._claim, self._codec, store, using)

    def _made(self, name: str, call: Callable[[Step], T], terms: Terms) -> T:
        _refuse_uncallable(name, call)  # before it counts as begun, or a slip of the author's would end UNKNOWN
        self._begin_effect("step")
        step = Step(name, self.effect_key(name), self.fencing_token)
        with self._naming:
            if name in self._names:
                why = "this attempt has made a step of that name; name each step differently"
                raise PolicyError("step", repr(name), why)
            self._names.add(name)
        claim = self._claim
        try:
            match decide_step(name, claim.step_state(name), terms=terms, now=claim.store.now()):
                case Call():
                    claim.ensure_owned()  # no request while the lease runs; a body that stalled begins nothing
                    return self._finished(step, _called(call, step))
                case Begin():
                    return self._begun(step, call)
                case Recall(finished):
                    return self._recalled(step, finished)
                case Doubt(reason):
                    claim.doubt = reason
                    raise OutcomeUnknown(self.key, reason)
                case unreachable:
                    assert_never(unreachable)
        except BaseException:
            self._names.discard(name)  # a body may catch what its call raised, and make the step again
            raise

    def _begun(self, step: Step, call: Callable[[Step], T]) -> T:
        try:
            self._claim.begin_step(step.name)
        except RecordTooLarge as error:
            raise PolicyError("step", repr(step.name), f"the record has no room for it; {_RETURN_LESS}") from error
        try:
            value = _called(call, step)
        except BaseException as error:
            if are_all(error, self._nothing_begun):
                self._claim.finish_step(step.name, None)
            raise
        return self._finished(step, value)

    def _finished(self, step: Step, value: T) -> T:
        claim, name = self._claim, step.name
        kept = claim.uninterrupted(self._codec.keep, value)
        claim.recorded(kept, lambda each: claim.finish_step(name, Finished(each.encoded, each.lost)), name)
        result: T = kept.value
        return result

    def _recalled(self, step: Step, finished: Finished) -> T:  # type: ignore[type-var]
        if finished.result is None:
            raise ResultLost(self.key, f"step {step.name!r}: {finished.lost}; {_RETURN_LESS}")
        slot = Slot(self.key, "result", step.name)
        try:
            result: T = self._codec.decode(unpack(self._claim.store, finished.result, slot))
        except ContentLost as error:
            raise ResultLost(self.key, f"step {step.name!r}: {error}") from error
        except KombuError as error:
            reason = f"step {step.name!r} cannot be decoded here: {self._codec.told(error)}"
            raise ResultLost(self.key, reason) from error
        return result


def _refuse_uncallable(name: str, call: object) -> None:
    if not callable(call):
        raise PolicyError("step", repr(name), f"{call!r} cannot be called; write lambda step: ...")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return  # a function of C's may not tell
    try:
        signature.bind(None)
    except TypeError as error:
        raise PolicyError("step", repr(name), f"its call takes one argument, the step: {error}") from error


def _called(call: Callable[[Step], T], step: Step) -> T:
    """What ``call`` returns, if it has run: a step that is recorded as done is never called again."""
    value = call(step)
    if is_unfinished(value):
        kind = type(value).__name__
        remedy = "write await attempt.astep(...)" if isinstance(value, Awaitable) else "return a list"
        why = f"its call returned an unfinished {kind}, so it has not run; {remedy}"
        raise PolicyError("step", repr(step.name), why)
    return value


def is_unfinished(value: Any) -> bool:
    """Whether it is a call that has still to run; it is closed, so that Python does not warn of it, too."""
    if type(value) in _FINISHED:
        return False  # asking an abstract class takes longer than all else here
    if isinstance(value, Coroutine | Generator):
        with suppress(Exception):
            value.close()
    return isinstance(value, Awaitable | Generator | AsyncGenerator)


_FINISHED = {type(None), bool, int, float, str, bytes, list, tuple, dict}


def _without_claim(option: str) -> PolicyError:
    return PolicyError(
        option,
        "without a claim",
        "this body runs unprotected (a direct call, mode='off', or an outage under on_outage='run'); deliver the task, "
        "or write without it where attempt.number is 0",
    )


def _described(position: int | None, writes: Sequence[Mapping[str, Any]]) -> str:
    if position is None:
        return "writes"
    write = writes[position]
    if not isinstance(write, Mapping) or len(write) != 1:
        return f"writes[{position}]"
    ((action, body),) = write.items()
    return f"writes[{position}] ({action} of {body.get('TableName') if isinstance(body, Mapping) else None})"


def fenced(
    fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
) -> Callable[[Step], T]:
    """A call that shuts out earlier attempts, then looks for their effect, and acts only if there is none."""

    def call(step: Step) -> T:
        _called(fence, step)
        found = _called(probe, step)
        return act(step) if found is None else found

    return call


_RETURN_LESS = "return something small from each step, such as an id"


@dataclass(slots=True, eq=False)
class Execution:
    """One body being executed, within ``outer`` if there is one.

    Kept in a context variable and not in Celery's request: right in threads, in greenlets and in nested calls.

    ``delivery`` is an object that lasts as long as the delivery, or None for a function call. A redelivery has the same
    task id, and would pass for a recursion where a time limit has left an execution behind. ``layer`` is the class
    whose ``__call__`` is being executed; ``item_of`` lasts as long as the delivery of the ``map`` or ``starmap`` that
    it is an item of, or is called within an item of, if any.

    It can be found when it is over: where a context outlives the body that it was copied in, as a task of an event loop
    can; and where a signal struck before the block could be left. Its delivery is over then.
    """

    attempt: Attempt
    task: str
    delivery: object | None
    layer: type
    item_of: object | None
    outer: "Execution | None"
    is_left: bool = False
    process: int = field(default_factory=os.getpid)
    _token: "Token[Execution | None] | None" = None

    def __enter__(self) -> Self:
        """Make it the innermost one."""
        self._token = _executing.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.is_left = True
        assert self._token is not None
        try:  # noqa: SIM105 - every delivery pays for it
            _executing.reset(self._token)
        except ValueError:
            pass  # a coroutine that was dropped is closed in another context than its own

    @property
    def is_over(self) -> bool:
        """Whether nothing runs within it any more."""
        return self.is_left or (isinstance(self.attempt, ProtectedAttempt) and not self.attempt.is_underway)

    def is_of(self, task: str, delivery: object | None) -> bool:
        return self.task == task and self.delivery is delivery

    def is_around(self, task: str, delivery: object | None) -> bool:
        """Whether this or a surrounding execution is that very delivery: the call is then a recursion."""
        return self.is_of(task, delivery) or (self.outer is not None and self.outer.is_around(task, delivery))

    def holds(self, key: str) -> bool:
        """Whether this or a surrounding body is running under a claim of that key: to ask for it would be to wait for
        itself. In a process that was forked in a body nothing tells when that one ends, so it holds nothing."""
        is_running = not self.is_over and self.process == os.getpid()
        holds = is_running and isinstance(self.attempt, ProtectedAttempt) and self.attempt.key == key
        return holds or (self.outer is not None and self.outer.holds(key))


_executing: ContextVar[Execution | None] = ContextVar("celery_idempotent_executing", default=None)


def execution() -> Execution | None:
    """The innermost execution of an idempotent task around the calling code, if there is one."""
    innermost = _executing.get()
    while innermost is not None and innermost.is_over:
        innermost = innermost.outer
    return innermost


def current_attempt() -> Attempt:
    """The attempt that executes the calling code, wherever in the call stack of a task's body it is.

    Raises:
        LookupError: Nothing idempotent is executing in this thread, greenlet or task of an event loop.
    """
    innermost = execution()
    if innermost is None:
        why = "nothing idempotent is executing here; call it from the body of a task or function, in its own context"
        raise LookupError(with_link(why, "errors#no-attempt"))
    return innermost.attempt


def executed_by(
    attempt: Attempt, task: str, delivery: object | None, layer: type, item_of: object | None = None
) -> Execution:
    """Within its block, ``attempt`` is the current attempt."""
    outer = execution()
    return Execution(attempt, task, delivery, layer, item_of or (outer and outer.item_of), outer)


def passing(around: Execution, layer: type) -> Execution:
    """Within its block, the same execution has come to the ``__call__`` of ``layer``."""
    return replace(around, layer=layer)
