"""Records as people read them, and as programs do."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_idempotent.engine.claim import effect_key
from celery_idempotent.engine.search import FORGOTTEN
from celery_idempotent.integration.display import names_of_effects
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.operation import is_forgotten
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.publishing import shown_status
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Begun, Finished, from_plain
from celery_idempotent.protocol.verdicts import history

Lines = Iterable[tuple[str, object]]
"""Names and what is shown behind them."""


def status_of(record: Record, now: int) -> str:
    """The status as people read it."""
    if is_forgotten(record, now):
        return FORGOTTEN
    return shown_status(record.status, record.owner, record.lease_until, now)


def short(key: str) -> str:
    """As much of a key as names it: the beginning of its hash."""
    hashed = key.rpartition(":")[2]
    return hashed[:_SHORT] if len(hashed) >= _HASHED else key


_SHORT = 12
"""Hexadecimal digits: among a million keys, the odds that two begin alike are 1 in 500."""

_HASHED = 64


# For programs


def brief(record: Record, now: int) -> dict[str, Any]:
    """What a list tells of a record."""
    told = [*map(_verdict, history(record))]
    return {
        "key": record.key,
        "label": record.label,
        "status": status_of(record, now),
        "task": record.task,
        "task_id": record.task_id,
        "worker": record.worker,
        "attempts": record.attempts,
        "created_at": time_text(record.created_at),
        "updated_at": time_text(record.updated_at),
        "error": record.error,
        "verdict": told[-1] if told else None,
    }


def whole(record: Record, now: int, policy: Policy) -> dict[str, Any]:
    """All that is recorded, with the effect keys of its steps and the verdicts on it. Only JSON is decoded."""
    names = names_of_effects(record, policy)
    expires_at = None if record.expires_at is None else time_text(record.expires_at * 1000)
    return {
        **record.to_fields(),
        **brief(record, now),
        "lease_until": time_text(record.lease_until),
        "expires_at": expires_at,
        "content_type": record.content_type,
        "result": _decoded(record.result, record.content_type),
        "steps": {
            name: {**_step(plain), "effect_key": effect_key(record.key, name)} for name, plain in record.steps.items()
        },
        "effect_keys": {name: effect_key(record.key, name) for name in names},
        "history": [*map(_verdict, history(record))],
    }


def _verdict(told: Mapping[str, Any]) -> dict[str, Any]:
    return {**told, "at": time_text(told["at"])} if isinstance(told.get("at"), int) else dict(told)


def _step(plain: Any) -> dict[str, Any]:
    match _state(plain):
        case Begun(at, attempt):
            return {"state": "begun", "begun_at": time_text(at), "attempt": attempt}
        case Finished(Encoded(data, content_type)):
            return {"state": "finished", "content_type": content_type, "result": _decoded(data, content_type)}
        case Finished(None, lost):
            return {"state": "finished", "lost": lost}
        case _:
            return {"state": "damaged"}


def _state(plain: Any) -> Begun | Finished | None:
    try:
        return from_plain(plain)
    except ValueError:
        return None


def _decoded(data: str | bytes | None, content_type: str | None) -> Any:
    """The value of JSON; of other formats, which can run code when they are read, how many bytes there are."""
    if data is None:
        return None
    if content_type == "application/json":
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            pass
    return {"bytes": len(data)}


# For people


def summary(record: Record, now: int, policy: Policy) -> Iterator[tuple[str, object]]:
    """What a person looks at before a verdict: what it is, and what to ask the receiver for."""
    fields = record.to_fields()
    yield "status", status_of(record, now)
    yield "key", record.key
    for name in ("label", "task", "task_id", "worker", "attempts"):
        if fields.get(name):
            yield name, fields[name]
    yield "created_at", time_text(record.created_at)
    yield "updated_at", time_text(record.updated_at)
    if record.error:
        yield "error", record.error
    for name in names_of_effects(record, policy):
        yield "step" if name in record.steps else "effect", f"{name}{_told_of(name, record)}"
        yield "effect key", effect_key(record.key, name)
    for told in history(record):
        yield "verdict", _sentence(told)


def everything(record: Record, now: int, policy: Policy) -> Iterator[tuple[str, object]]:
    """All that is recorded; of the result only its size."""
    yield from summary(record, now, policy)
    for name, value in record.to_fields().items():
        if name not in _IN_SUMMARY:
            yield name, _OTHERWISE.get(name, str)(value)


_IN_SUMMARY = {
    *("status", "key", "label", "task", "task_id", "worker", "attempts"),
    *("created_at", "updated_at", "error", "steps", "verdict"),
}

_OTHERWISE: Mapping[str, Callable[[Any], str]] = {
    "lease_until": lambda value: time_text(value),
    "expires_at": lambda value: time_text(value * 1000),
    "result": lambda value: f"{len(value)} bytes",
}


def _told_of(name: str, record: Record) -> str:
    if name not in record.steps:
        return ": nothing recorded" if record.expires_at is None else ": not known, as an outcome keeps no steps"
    match _state(record.steps[name]):
        case Begun(at, attempt):
            return f": began at {time_text(at)} in attempt {attempt}, and did not end"
        case Finished(None, lost):
            return f": finished; its result is lost: {lost}"
        case Finished():
            return ": finished"
        case _:
            return ": its state cannot be read"


def _sentence(told: Mapping[str, Any]) -> str:
    each = _verdict(told)
    about = f"on {each.get('status')} after attempt {each.get('attempt')}"
    reason, error = each.get("reason"), each.get("error")
    return (
        f"{each.get('at')} {each.get('action')} by {each.get('by') or 'nobody named'}, {about}"
        f"{f', because: {reason}' if reason else ''}{f' (it had said: {error})' if error else ''}"
    )


def time_text(milliseconds: int, precision: str = "milliseconds") -> str:
    """A time on the store's clock, by ISO 8601 in UTC."""
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):  # after the year 9999: a damaged clock, or a test
        return str(milliseconds)
    return f"{moment.isoformat(timespec=precision)}Z"


def duration_text(milliseconds: int) -> str:
    """How long it is, such as ``1 day, 2:03:04``."""
    return str(timedelta(seconds=max(milliseconds, 0) // 1000))


def age_text(milliseconds: int) -> str:
    """How long it is in the two units that matter, such as ``1d 2h``."""
    parts: list[str] = []
    left = max(milliseconds, 0) // 1000
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, seconds)
        if parts or count or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
