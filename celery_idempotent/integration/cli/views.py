"""Records as people read them, and as programs do."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from celery_idempotent.engine.claim import effect_key
from celery_idempotent.integration import display
from celery_idempotent.integration.display import iso, names_of_effects
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Begun, Finished
from celery_idempotent.protocol.verdicts import counts_until

# For programs


def brief(record: Record, now: int) -> dict[str, Any]:
    """What a list tells of a record."""
    return {
        "key": record.key,
        "label": record.label,
        "status": display.status(record, now),
        "task": record.task,
        "task_id": record.task_id,
        "worker": record.worker,
        "attempts": record.attempts,
        "created_at": iso(record.created_at),
        "updated_at": iso(record.updated_at),
        "error": record.error,
        "verdict": {**record.verdict, **_times(record.verdict)} if record.verdict else None,
    }


def whole(record: Record, now: int, policy: Policy) -> dict[str, Any]:
    """All that is recorded, with the effect keys of its steps. Only JSON is decoded."""
    names = names_of_effects(record, policy)
    until = counts_until(record)
    return {
        **record.to_fields(),
        **brief(record, now),
        "lease_until": iso(record.lease_until),
        "expires_at": None if until is None else iso(until),
        "content_type": record.content_type,
        "result": _decoded(record.result, record.content_type),
        "steps": {
            name: {**_step(plain), "effect_key": effect_key(record.key, name)} for name, plain in record.steps.items()
        },
        "effect_keys": {name: effect_key(record.key, name) for name in names},
    }


def _times(verdict: Mapping[str, Any]) -> dict[str, str]:
    return {name: iso(verdict[name]) for name in ("at", "kept_until", "counts_until") if name in verdict}


def _step(plain: Any) -> dict[str, Any]:
    match display.step_of(plain):
        case Begun(at, attempt):
            return {"state": "begun", "begun_at": iso(at), "attempt": attempt}
        case Finished(Encoded(data, content_type)):
            return {"state": "finished", "content_type": content_type, "result": _decoded(data, content_type)}
        case Finished(None, lost):
            return {"state": "finished", "lost": lost}
        case _:
            return {"state": "damaged"}


def _decoded(data: str | bytes | None, content_type: str | None) -> Any:
    """The value of JSON; of other formats, which can run code when they are read, how many bytes there are.

    Of a result that is an object, where that is.
    """
    if data is None:
        return None
    pointer = display.pointer_of(data, content_type)
    if pointer:
        return {"object": pointer.name, "bytes": pointer.size, "sha256": pointer.sha256, "of": pointer.content_type}
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
    yield "status", display.status(record, now)
    yield "key", record.key
    for name in ("label", "task", "task_id", "worker", "attempts"):
        if fields.get(name):
            yield name, fields[name]
    yield "created_at", iso(record.created_at)
    yield "updated_at", iso(record.updated_at)
    if record.error:
        yield "error", record.error
    for name in names_of_effects(record, policy):
        yield "step" if name in record.steps else "effect", f"{name}: {_told_of(name, record)}"
        yield "effect key", effect_key(record.key, name)
    if record.verdict:
        yield "verdict", display.verdict(record.verdict, iso)


def everything(record: Record, now: int, policy: Policy) -> Iterator[tuple[str, object]]:
    """All that is recorded; of the result only its size, or where it is."""
    yield from summary(record, now, policy)
    for name, value in {**record.to_fields(), "expires_at": counts_until(record)}.items():
        if name == "result" and display.pointer_of(value, record.content_type):
            yield name, display.outcome(value, record.content_type)
        elif name not in _IN_SUMMARY and value is not None:
            yield name, _OTHERWISE.get(name, str)(value)


_IN_SUMMARY = {
    *("status", "key", "label", "task", "task_id", "worker", "attempts"),
    *("created_at", "updated_at", "error", "steps", "verdict"),
}

_OTHERWISE: Mapping[str, Callable[[Any], str]] = {
    "lease_until": iso,
    "expires_at": iso,
    "result": lambda value: f"{len(value)} bytes",
}


def _told_of(name: str, record: Record) -> str:
    if name in record.steps:
        return display.step_state(record.steps[name], iso)
    return "nothing recorded" if record.expires_at is None else "not known, as an outcome keeps no steps"
