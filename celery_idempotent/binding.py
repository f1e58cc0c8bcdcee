"""What is checked when a task is defined and bound to its app: the earliest moment there is."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import CellType, FunctionType
from typing import Any

from celery import Celery, Task
from celery.utils.imports import symbol_by_name

from celery_idempotent.errors import IdempotencyWarning, PolicyError, SafeToRetry
from celery_idempotent.keys import Conversion
from celery_idempotent.policy import Policy
from celery_idempotent.runtime import runtime_of

__all__ = [
    "body_signature",
    "check_selectors",
    "conversion",
    "is_builtin",
    "refuse_misplaced_policy",
    "refuse_place",
    "refuse_unknown_settings",
    "refuse_unsupported_body",
    "request_class",
    "warn_about_delivery",
]


def is_builtin(name: str | None) -> bool:
    """Whether the task is one of Celery's own, or an abstract one without a name."""
    # With task_cls, Celery's own tasks get this base too; running celery.backend_cleanup once a week is no favour.
    return name is None or name.startswith("celery.")


def refuse_place(cls: type, mixin: type) -> None:
    """Refuse a class in which a base of Celery's goes before the mixin: every delivery would go around the guard.

    Raises:
        PolicyError: The mixin is not first.
    """
    for base in cls.__mro__[: cls.__mro__.index(mixin)]:
        if issubclass(base, Task) and not issubclass(base, mixin):
            raise PolicyError(
                "base",
                cls.__name__,
                f"{base.__name__} goes before {mixin.__name__}, so nothing would be protected; "
                f"write class {cls.__name__}({mixin.__name__}, {base.__name__})",
            )


def refuse_misplaced_policy(cls: type) -> None:
    """Refuse an ``idempotent`` that is no policy, and a policy under another name: Celery takes any option.

    Raises:
        PolicyError: It is misplaced.
    """
    remedy = f"must be a Policy: {cls.__name__}(idempotent=Policy(key=...))"
    given = getattr(cls, "idempotent", None)
    if given is not None and not isinstance(given, Policy):
        raise PolicyError("idempotent", repr(given), remedy)
    for name, value in vars(cls).items():
        if isinstance(value, Policy) and name != "idempotent":
            raise PolicyError(name, "Policy(...)", f"{cls.__name__}: nothing reads it; the option is called idempotent")


SETTINGS = ("idempotency_store", "idempotency_policy", "idempotency_namespace", "idempotency_relay")


def refuse_unknown_settings(app: Celery) -> None:
    """Refuse a setting that looks like one of ours and is none, as nothing would read it.

    Raises:
        PolicyError: There is one; the message has its right name.
    """
    prefix = (getattr(app.conf, "prefix", None) or "").lower()
    for found in app.conf.keys():  # noqa: SIM118 - iterating over the settings themselves leaves some out
        name = str(found).lower()
        if prefix and not name.startswith(prefix):
            # Another library's, unless it has the very name of one of ours.
            is_misplaced = name in SETTINGS and app.conf.get(name) is None
        else:
            name = name.removeprefix(prefix)
            is_misplaced = name.startswith("idempot") and (name not in SETTINGS or (not prefix and found != name))
        if is_misplaced:
            (nearest,) = get_close_matches(name, SETTINGS, 1, 0)
            right = f"{prefix}{nearest}".upper() if prefix else nearest
            raise PolicyError(str(found), "...", f"nothing reads this setting; is it {right}?")


def request_class(cls: type[Task]) -> Any:
    """The class that a worker makes of a message of the task: the task's own, and one that tells its content type."""
    if cls.Request == Task.Request:
        return "celery_idempotent.received:Received"  # by name: publishers need nothing of Celery's worker
    own = symbol_by_name(cls.Request)
    if hasattr(own, "tells_content_type"):
        return cls.Request
    from celery_idempotent.received import TellsContentType

    return type(own.__name__, (TellsContentType, own), {})


def refuse_unsupported_body(cls: type) -> None:
    """Refuse a body whose effect would come after its claim was completed.

    Raises:
        PolicyError: ``run`` is async or a generator.
    """
    body = inspect.unwrap(getattr(cls, "run", cls))
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        reason = "an async body returns before it runs, so its claim would be completed before its effect; use def"
    elif inspect.isgeneratorfunction(body):
        reason = "a generator's body runs when somebody iterates, after its claim was completed; return a list"
    else:
        return
    raise PolicyError("base", cls.__name__, reason)


def body_signature(cls: type[Task]) -> inspect.Signature:
    """The signature of the task's body as callers see it, without ``self``."""
    signature = inspect.signature(cls.run)
    if _is_static(cls):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def check_selectors(policy: Policy, signature: inspect.Signature) -> None:
    """Refuse a policy whose key or fingerprint can select nothing from this signature.

    Raises:
        PolicyError: It names an argument that the task does not have.
    """
    policy.key_selector.check(signature)
    if policy.fingerprint_selector is not None:
        policy.fingerprint_selector.check(signature)


def warn_about_delivery(cls: type[Task], app: Celery) -> None:
    """Warn where Celery's or the broker's settings make the promise weaker than it looks."""
    if cls.idempotent is not None and cls.idempotent.mode == "off":
        return
    problems = []
    if not cls.acks_late:
        problems.append("acks_late is off, so a task whose worker dies is lost")
    elif not (cls.reject_on_worker_lost or cls.retry_on_worker_lost):
        problems.append("reject_on_worker_lost is off, so a task whose pool process is killed is lost")
    runtime = runtime_of(app)
    policy = cls.idempotent or runtime.default_policy
    timeout = runtime.broker.visibility_timeout
    if timeout is not None and policy.retain_ms <= timeout * 1000:
        problems.append(
            f"retain ({policy.retain_ms / 1000:g} s) is not longer than the broker's visibility timeout "
            f"({timeout:g} s), so a redelivery can come after its outcome was forgotten"
        )
    if timeout is not None and policy.lease_ms > timeout * 1000:
        problems.append(
            f"lease ({policy.lease_ms / 1000:g} s) is longer than the broker's visibility timeout ({timeout:g} s), "
            "so a redelivery after a crash has to wait for it"
        )
    autoretried = [each for each in getattr(cls, "autoretry_for", ()) if not issubclass(each, SafeToRetry)]
    if policy.on_takeover == "refuse" and autoretried:
        problems.append(
            "autoretry_for turns exceptions into retries, and a retry runs the body again although on_takeover is "
            "'refuse'; list only exceptions that prove that no effect had begun, or raise SafeToRetry and list that"
        )
    for problem in problems:
        warnings.warn(f"{cls.name}: {problem}", IdempotencyWarning, stacklevel=_OUTSIDE)


_OUTSIDE = 8
"""Stack frames between the warning and the user's ``@app.task``, when a task is bound at once."""


def conversion(cls: type[Task]) -> Conversion | None:
    """What Celery makes of a call's arguments before it calls the body (``pydantic=True``); None if nothing."""
    wrapper = cls.run
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if not (_is_celerys(wrapper) and "task_fun" in names):
        return None
    # Celery's own wrapper, around a body that gives its arguments back. A second reading of the annotations would
    # convert more, less or other than Celery does, and then the key would not be that of what the body gets.
    cells = [
        CellType(_returned) if name == "task_fun" else cell
        for name, cell in zip(names, wrapper.__closure__, strict=True)
    ]
    converted = FunctionType(wrapper.__code__, wrapper.__globals__, closure=tuple(cells))
    if _is_static(cls):
        return lambda args, kwargs: converted(*args, **kwargs)
    return lambda args, kwargs: _without_self(*converted(None, *args, **kwargs))


def _returned(*args: Any, **kwargs: Any) -> tuple[Iterable[Any], Mapping[str, Any]]:
    return args, kwargs


def _without_self(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[Iterable[Any], Mapping[str, Any]]:
    return tuple(args)[1:], kwargs


def _is_static(cls: type[Task]) -> bool:
    return isinstance(inspect.getattr_static(cls, "run"), staticmethod)


def _is_celerys(function: Any) -> bool:
    return bool(getattr(function, "__globals__", {}).get("__name__", "").startswith("celery."))
