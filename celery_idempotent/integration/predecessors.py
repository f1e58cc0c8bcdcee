"""What to write for the tasks that celery-once or celery-singleton keep unique: each of their options, as ours.

Their classes are known by name, so that neither library is imported.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task

from celery_idempotent.integration.binding import body_signature

SHORT_RETAIN = 61
"""Seconds. Their locks end with the task; the nearest to that is the default lease and a second."""

_LIBRARIES = {
    ("celery_once.tasks", "QueueOnce"): "celery-once",
    ("celery_singleton.singleton", "Singleton"): "celery-singleton",
}

_CAUGHT = "{error} is raised no more: a duplicate's caller gets the first call's AsyncResult, so take the except out"
_TIMEOUT = (
    "{option}={value}: leave it out, as a lease is renewed while the body runs; where messages wait in the queue for "
    "longer than 60 s, set lease and retain to more than that"
)
_UNLOCKED = (
    "unlock_before_run=True: nothing like it; a call that comes while the body runs is to run after it, so it is "
    "another operation: give each call its own key, by an argument or idempotency_key="
)
_NULLABLE = "{name} may be None, which is KeyMissing here: write not_null({name}, '') in its place"
_TICKS = "beat sends it: with all arguments as the key each tick would be an operation of its own, so a key is named"
_OWN_BASE = "{base} is a class of yours: keep it, with IdempotentTask in the place of {theirs} among its bases"


@dataclass(frozen=True, slots=True)
class Translation:
    """What becomes of one task.

    Args:
        task: Its name.
        place: File and line of its body.
        library: Which one keeps it unique now.
        before: Base and options as they are.
        after: What to write instead; None where only a person can tell.
        notes: What has no counterpart, or changes for callers.
    """

    task: str
    place: str
    library: str
    before: str
    after: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Options:
    """What a task says, in the words of neither library."""

    given: dict[str, Any]
    names: tuple[str, ...] | None
    notes: tuple[str, ...]
    unlocks_early: bool = False


def translations(app: Celery) -> list[Translation]:
    """What to write for each task of ``app`` that has a base of theirs, by name."""
    schedule = (app.conf.beat_schedule or {}).values()
    ticking = {entry.get("task") for entry in schedule if isinstance(entry, Mapping)}
    found = ((task, _theirs_among(type(task).__mro__)) for _, task in sorted(app.tasks.items()))
    return [_translated(task, theirs, task.name in ticking) for task, theirs in found if theirs]


def settings_of(app: Celery, libraries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Which settings of the app go, and the lines that come; by name alone, as a URL can hold a password."""
    theirs = {"celery-once": _is_of_once, "celery-singleton": _is_of_singleton}
    kinds = [theirs[each] for each in sorted(libraries)]
    gone = sorted(str(name) for name in app.conf.keys() if any(is_theirs(str(name)) for is_theirs in kinds))  # noqa: SIM118 - iterating over the settings themselves leaves some out
    wanted = {"task_acks_late": "True", "task_reject_on_worker_lost": "True"}
    lines = [f"{name} = {value}" for name, value in wanted.items() if not app.conf[name]]
    if not app.conf.get("idempotency_store"):
        lines.insert(0, 'idempotency_store = "redis://..."')
    return gone, lines


def _is_of_once(name: str) -> bool:
    return name.upper() == "ONCE"


def _is_of_singleton(name: str) -> bool:
    return name.lower().startswith("singleton_")


def _theirs_among(classes: Iterable[type]) -> type | None:
    return next((each for each in classes if _library_of(each)), None)


def _library_of(cls: type) -> str | None:
    return _LIBRARIES.get((cls.__module__, cls.__name__))


def _translated(task: Task, theirs: type, is_ticking: bool) -> Translation:
    library = _LIBRARIES[theirs.__module__, theirs.__name__]
    options = _of_once(task) if library == "celery-once" else _of_singleton(task)
    signature, base = body_signature(type(task)), _base_of(type(task))
    given = "".join(f", {name}={value!r}" for name, value in options.given.items())
    names, notes = options.names, [*options.notes]
    if names is None and is_ticking:
        names = tuple(signature.parameters)
        notes.append(_TICKS)
    nullable = (each for each in names or () if each in signature.parameters)
    notes += [_NULLABLE.format(name=each) for each in nullable if signature.parameters[each].default is None]
    if base is not theirs:
        notes.append(_OWN_BASE.format(base=base.__name__, theirs=theirs.__name__))
    ours = "IdempotentTask" if base is theirs else base.__name__
    return Translation(
        task=task.name,
        place=_place(task),
        library=library,
        before=f"base={base.__name__}{given}",
        after=None if options.unlocks_early else f"base={ours}, idempotent=Policy({_policy(names, signature)})",
        notes=tuple(notes),
    )


def _base_of(cls: type) -> type:
    """The base that its author wrote: Celery makes a class of its own for a decorated body."""
    return cls.__mro__[1] if "_decorated" in vars(cls) else cls


def _policy(names: tuple[str, ...] | None, signature: inspect.Signature) -> str:
    parts = []
    if names == ():
        parts.append(f'key=lambda{" *_, **__" if signature.parameters else ""}: "one"')
    elif names is not None:
        quoted = [f'"{each}"' for each in names]
        parts.append(f"key={quoted[0]}" if len(quoted) == 1 else f"key=({', '.join(quoted)})")
    if names is not None and set(names) != set(signature.parameters):
        parts.append("fingerprint=None")
    return ", ".join([*parts, 'publish="once"', f"retain={SHORT_RETAIN}"])


def _of_once(task: Any) -> _Options:
    once = dict(task.once)
    notes = []
    if once.get("unlock_before_run"):
        notes.append(_UNLOCKED)
    if not once.get("graceful"):
        notes.append(_CAUGHT.format(error="AlreadyQueued"))
    if "timeout" in once:
        notes.append(_TIMEOUT.format(option="timeout", value=once["timeout"]))
    keys = once.get("keys")
    return _Options(
        given={"once": once} if "once" in _said(type(task)) else {},
        names=None if keys is None else tuple(keys),
        notes=tuple(notes),
        unlocks_early=bool(once.get("unlock_before_run")),
    )


def _of_singleton(task: Any) -> _Options:
    said = {name: getattr(task, name) for name in ("unique_on", "lock_expiry", "raise_on_duplicate")}
    said = {name: value for name, value in said.items() if value is not None}
    refuses = said.get("raise_on_duplicate", task.app.conf.get("singleton_raise_on_duplicate"))
    expiry = said.get("lock_expiry", task.app.conf.get("singleton_lock_expiry"))
    notes = []
    if refuses:
        notes.append(_CAUGHT.format(error="DuplicateTaskError"))
    if expiry is not None:
        notes.append(_TIMEOUT.format(option="lock_expiry", value=expiry))
    unique_on = said.get("unique_on") or None
    names = (unique_on,) if isinstance(unique_on, str) else unique_on
    return _Options(given=said, names=None if names is None else tuple(names), notes=tuple(notes))


def _said(cls: type) -> Iterator[str]:
    """The names that the author gave values, and not the library."""
    return (name for each in cls.__mro__ if not _library_of(each) for name in vars(each))


def _place(task: Task) -> str:
    code = getattr(inspect.unwrap(task.run), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(task).__module__
