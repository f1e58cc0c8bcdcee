"""What is checked when a task is defined and bound to its app: the earliest moment there is."""

import inspect
import sys
import warnings
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import CellType, FunctionType
from typing import Any

from celery import Celery, Task

from celery_idempotent.engine.attempt import is_unfinished
from celery_idempotent.errors import IdempotencyWarning, PolicyError, SafeToRetry
from celery_idempotent.integration.settings import SETTINGS, OptionUnknown, cipher_of, refuse_control_flow, runtime_of
from celery_idempotent.integration.versions import comes_back_from_lost_worker
from celery_idempotent.protocol.keys import Conversion
from celery_idempotent.protocol.policy import Mode, Policy


def is_builtin(cls: type[Task]) -> bool:
    """Whether the task is one of Celery's own, or an abstract one without a name."""
    # With task_cls, Celery's own tasks get this base too; running celery.backend_cleanup once a week is no favour.
    return cls.name is None or (cls.name.startswith("celery.") and cls.__module__.startswith("celery."))


def idempotent_tasks(app: Celery) -> list[Any]:
    return [each for each in app.tasks.values() if is_idempotent(each)]


def is_idempotent(task: Any) -> bool:
    cls = type(task)
    return hasattr(cls, "idempotency_policy") and not is_builtin(cls)  # asking the task would work out its policy


def mode_of(task: Any) -> Mode:
    """The mode of the task's policy; that of a task which is not this library's is ``off``."""
    return task.idempotency_policy.mode if is_idempotent(task) else "off"


def is_enforced(task: Any) -> bool:
    """Whether duplicates of the task are suppressed; under ``mode="observe"`` they are only reported."""
    return mode_of(task) == "enforce"


def is_protected(task: Any) -> bool:
    """Whether the task is one of this library's that is not switched off."""
    return mode_of(task) != "off"


@contextmanager
def named(task: str) -> Iterator[None]:
    """Within the block, what is refused names the task: an app has many."""
    try:
        yield
    except PolicyError as error:
        if task in error.remedy:
            raise
        raise type(error)(error.option, error.value, f"{task}: {error.remedy}") from error


def check_class(cls: type, mixin: type) -> None:
    """Refuse a task class that would go around the guard, or whose body or policy cannot be guarded."""
    _refuse_other_caller(cls)
    for base in cls.__mro__[: cls.__mro__.index(mixin)]:
        if issubclass(base, Task) and not issubclass(base, mixin):
            raise PolicyError(
                "base",
                cls.__name__,
                f"{base.__name__} goes before {mixin.__name__}, so nothing would be protected; "
                f"write class {cls.__name__}({mixin.__name__}, {base.__name__})",
            )
    _refuse_unsupported_body(cls)
    _refuse_misplaced_policy(cls)


def check_task(cls: type[Task], app: Celery) -> None:
    """Refuse a bound task, to which ``annotations`` can bring what its class has not, or a setting of its app."""
    # No driver is loaded: publishers bind tasks, too, and have none.
    with named(cls.name):
        _refuse_misplaced_policy(cls)
        _refuse_other_caller(cls)
        _refuse_misplaced_option(cls)
        _refuse_lossy_app(cls, app)
        if cls.idempotent is not None:
            check_policy(cls.idempotent, body_signature(cls))
        _refuse_unknown_settings(app)
        if (large := app.conf.get("idempotency_large_results")) is not None:
            from celery_idempotent.stores.objects import check_setting  # most apps have none

            check_setting(large)
    cipher_of(app)


def _refuse_other_caller(cls: type) -> None:
    """Refuse a class whose bodies are not called as Celery calls them: such a caller goes around the guard."""
    for name in ("Strategy", "__trace__"):
        given = inspect.getattr_static(cls, name)
        if given != getattr(Task, name):
            owner = next(each for each in cls.__mro__ if name in vars(each))
            raise PolicyError(
                "base",
                cls.__name__,
                f"{owner.__name__} runs bodies by itself, by a {name} of its own, so nothing would be protected; take "
                "another base, or make the task a plain one whose body calls an @idempotent function for each message",
            )


def _refuse_lossy_app(cls: type[Task], app: Celery) -> None:
    """Refuse a task whose app drops the headers of its messages, and with them explicit keys and what retries carry."""
    if any(each.__module__.partition(".")[0] == "django_celery_outbox" for each in type(app).__mro__):
        settings = sys.modules["django.conf"].settings
        if cls.name not in getattr(settings, "CELERY_OUTBOX_EXCLUDE_TASKS", ()):
            raise PolicyError(
                "app",
                type(app).__name__,
                "django-celery-outbox drops the headers of messages, so two keys would be one operation, and a retry "
                f"another; add {cls.name!r} to CELERY_OUTBOX_EXCLUDE_TASKS",
            )


def _refuse_misplaced_policy(cls: type) -> None:
    """Refuse an ``idempotent`` that is not a Policy, and a policy under another name: Celery takes any option."""
    remedy = f"must be a Policy: {cls.__name__}(idempotent=Policy(key=...))"
    given = getattr(cls, "idempotent", None)
    if given is not None and not isinstance(given, Policy):
        raise PolicyError("idempotent", repr(given), remedy)
    for name, value in vars(cls).items():
        if isinstance(value, Policy) and name != "idempotent":
            raise _unread(cls, name, "Policy(...)", "the option is called idempotent")
        if name in _POLICY_ALONE and not isinstance(value, property | FunctionType):
            raise _unread(cls, name, repr(value), f"write idempotent=Policy({name}=...)")


def _refuse_misplaced_option(cls: type) -> None:
    """Refuse what ``@app.task`` was given and nothing reads: a field of a policy, or another library's option."""
    given = vars(cls)
    if "_decorated" not in given:
        return  # a class of the author's, which may call its attributes as it likes
    for name in given.keys() - {each for base in cls.__mro__[1:] for each in vars(base)}:
        remedy = f"write idempotent=Policy({name}=...)" if name in _FIELDS else _OF_OTHERS.get(name)
        if remedy is not None:
            raise _unread(cls, name, repr(given[name]), remedy)


def _unread(cls: type, name: str, value: str, remedy: str) -> OptionUnknown:
    return OptionUnknown(name, value, f"{cls.__name__}: nothing reads it; {remedy}")


_OF_OTHERS = {
    "idempotency_key": "it is an option of apply_async; for a key from the arguments write idempotent=Policy(key=...)",
    "once": "it is celery-once's; write idempotent=Policy(key=..., publish='once')",
    "unique_on": "it is celery-singleton's; write idempotent=Policy(key=..., publish='once')",
    "lock_expiry": "it is celery-singleton's; a lease is renewed while the task runs, so leave it out",
    "raise_on_duplicate": "it is celery-singleton's; leave it out: no publisher is refused here",
}
"""By option, what to write instead; of those that a task keeps when it moves to this library."""

_FIELDS = {each.name for each in fields(Policy)}
_POLICY_ALONE = _FIELDS - {"key", "scope", "mode", "effects"}
"""Fields of a policy whose names a task has no other use for."""


def _refuse_unknown_settings(app: Celery) -> None:
    """Refuse a setting that looks like one of ours and is not, as nothing would read it."""
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
            field = name.partition("_")[2]
            if field in _FIELDS:
                raise OptionUnknown(str(found), "...", f"nothing reads this setting; write it in Policy({field}=...)")
            known = ", ".join(f"{prefix}{each}".upper() if prefix else each for each in SETTINGS)
            raise OptionUnknown(str(found), "...", f"nothing reads this setting; there are {known}")


def _refuse_unsupported_body(cls: type) -> None:
    """Refuse a body whose effect would come after its claim was completed: async, or a generator."""
    body: Any = getattr(cls, "run", cls)
    while is_a_frame_around(body):
        body = body.__wrapped__
    code = getattr(body, "__code__", None)  # it is refused wherever its app is used first, so say where it was written
    place = f"{code.co_filename}, line {code.co_firstlineno}: " if code else ""
    for each in (body, getattr(body, "__call__", None)):  # noqa: B004 - an object's own, to look at
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise PolicyError("body", f"async def {cls.__name__}", f"{place}an async body {LATE}; {_AWAIT}")
        if inspect.isgeneratorfunction(each):
            raise PolicyError("body", f"def {cls.__name__}", f"{place}a generator {LATE}; {ITERATE}")


def refuse_unfinished(value: Any, task: str) -> None:
    """Refuse, before anything is recorded, what a body returned that has still to run: nobody would ever run it."""
    # A decorator, a partial, a callable object or "return helper()" may return such a thing from what looks like a
    # plain function. It is closed, so that Python does not warn of it, too. What the body did before has happened.
    if is_unfinished(value):
        remedy = _AWAIT if isinstance(value, Awaitable) else ITERATE
        raise PolicyError("body", task, f"it returned an unfinished {type(value).__name__}, which {LATE}; {remedy}")


LATE = "runs only after its claim was completed, if at all"
_AWAIT = "write def, and asyncio.run(...) in the body"
ITERATE = "return a list"


def is_a_frame_around(body: Any) -> bool:
    """Whether it is a wrapper that changes nothing about when the body runs: one of Celery's, or of contextlib's."""
    return hasattr(body, "__wrapped__") and (_is_celerys(body) or _module_of(body) == "contextlib")


def body_signature(cls: type[Task]) -> inspect.Signature:
    """The signature of the task's body as callers see it: of the outermost wrapper that names its arguments."""
    body = cls.run
    while hasattr(body, "__wrapped__"):
        try:
            names = inspect.signature(body, follow_wrapped=False).parameters.values()
        except ValueError:
            names = None  # a wrapper of C's, such as lru_cache's, names nothing
        if names is not None and _ANYTHING.isdisjoint(each.kind for each in names):
            break
        body = body.__wrapped__
    signature = inspect.signature(body, follow_wrapped=False)
    own = list(signature.parameters.values())[0 if _is_static(cls) else 1 :]
    return signature.replace(parameters=own)


_ANYTHING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def check_policy(policy: Policy, signature: inspect.Signature) -> None:
    """Refuse a policy that cannot be that of a task with this signature."""
    refuse_control_flow(policy)
    for selector in policy.selectors:
        if selector is not None:
            selector.check(signature)


def warn_about_delivery(cls: type[Task], app: Celery) -> None:
    """Warn where settings make the promise weaker than it looks, at the line of the body: binding happens anywhere."""
    problems = list(problems_of_delivery(cls, app))
    told = vars(cls).get("_told", frozenset())
    cls._told = told | {each.text for each in problems}  # Celery binds a task more than once
    code = getattr(inspect.unwrap(cls.run), "__code__", Task.__call__.__code__)
    for problem in problems:
        if problem.text not in told:
            warning = IdempotencyWarning(f"{cls.name}: {problem.text}", problem.option)
            warnings.warn_explicit(warning, None, code.co_filename, code.co_firstlineno, cls.__module__)


def problems_of_delivery(cls: type[Task], app: Celery) -> Iterator[IdempotencyWarning]:
    """How the settings make the promise of an idempotent task weaker than it looks."""
    if cls.idempotent is not None and cls.idempotent.mode == "off":
        return
    # A task's own option counts more than the setting.
    lines = {
        each: f"remove {each}=False from the task" if app.conf[f"task_{each}"] else f"set task_{each}=True"
        for each in ("acks_late", "reject_on_worker_lost")
        if not getattr(cls, each)
    }
    if not cls.acks_late:
        text = f"acks_late is off, so a task whose worker dies is lost; {'; '.join(lines.values())}"
        yield IdempotencyWarning(text, "acks_late")
    elif not comes_back_from_lost_worker(cls):
        text = "reject_on_worker_lost is off, so a task whose pool process is killed is lost"
        yield IdempotencyWarning(f"{text}; {lines['reject_on_worker_lost']}", "acks_late")
    runtime = runtime_of(app)
    policy = cls.idempotent or runtime.default_policy
    timeout = runtime.broker.visibility_timeout
    if timeout is not None and 0 < policy.retain_ms <= timeout * 1000:
        text = (
            f"retain ({policy.retain_ms / 1000:g} s) is not longer than the broker's visibility timeout "
            f"({timeout:g} s), so a redelivery can come after its outcome was forgotten"
        )
        yield IdempotencyWarning(text, "retain")
    autoretried = (each for each in getattr(cls, "autoretry_for", ()) if not issubclass(each, SafeToRetry))
    if policy.on_takeover == "refuse" and any(autoretried):
        text = (
            "autoretry_for turns exceptions into retries, and a retry runs the body again although on_takeover is "
            "'refuse'; list only exceptions that prove that no effect had begun, or raise SafeToRetry and list that"
        )
        yield IdempotencyWarning(text, "autoretry_for")


def conversion(cls: type[Task]) -> Conversion | None:
    """What Celery makes of a call's arguments before it calls the body (``pydantic=True``); None if nothing."""
    wrapper = cls.run
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if not (_is_celerys(wrapper) and "task_fun" in names):
        return None
    # Celery's own wrapper, around a body that gives its arguments back. A second reading of the annotations would
    # convert more, less or other than Celery does, and then the key would not be that of what the body gets.
    closure = tuple(
        CellType(lambda *args, **kwargs: (args, kwargs)) if name == "task_fun" else cell
        for name, cell in zip(names, wrapper.__closure__, strict=True)
    )
    converted = FunctionType(wrapper.__code__, wrapper.__globals__, closure=closure)
    if _is_static(cls):
        return lambda args, kwargs: converted(*args, **kwargs)

    def convert(args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = converted(None, *args, **kwargs)
        return args[1:], kwargs

    return convert


def _is_static(cls: type[Task]) -> bool:
    return isinstance(inspect.getattr_static(cls, "run"), staticmethod)


def _is_celerys(function: Any) -> bool:
    return _module_of(function).startswith("celery.")


def _module_of(function: Any) -> str:
    # Where it was written: functools.wraps gives a wrapper the __module__ of what it wraps.
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
