"""Moving an operation from one store to another: the mark that it leaves behind.

A mark is a record. Whoever knows nothing of moves sees an operation that somebody is at, and will be for ever: it waits
and runs nothing. Whoever knows looks into the other store. Until what moved is certainly there, the mark holds it.

::

    (none) ─────────────────────────────────▶ empty mark
    record ──▶ mark that holds a record ────▶ empty mark
"""

from collections.abc import Mapping
from typing import Any

from celery_idempotent.protocol.record import Record, Status

_MARK = "celery_idempotent.moved"
_FOR_EVER = 9_999_999_999_999
"""A lease until the year 2286."""

_KEPT = ("status", "revision", "owner", "lease_until", "process", "takeovers", "steps", "expires_at")
"""Fields in whose place the mark has its own; the others, the result among them, stand in it as they are."""


def is_mark(record: Record) -> bool:
    """Whether the operation has moved, or is about to."""
    return record.owner == _MARK


def mark_of(record: Record) -> Record:
    """The mark that holds ``record``."""
    fields = record.to_fields()
    return _mark(record, {name: fields[name] for name in _KEPT if name in fields})


def emptied(mark: Record) -> Record:
    """The mark once the other store has what it held; nothing of the call is left but who and when."""
    return empty_mark_of(mark).but(revision=f"{mark.revision}.")


def empty_mark_of(record: Record) -> Record:
    """The mark of an operation that is nowhere yet, and of which ``record`` will be the first, in the other store."""
    return _mark(record, {}).but(verdict={}, result=None, content_type=None, error=None, label="", trace="")


def held_by(mark: Record) -> Record | None:
    """The record that the mark holds; None if it is empty."""
    held: Mapping[str, Any] = mark.steps.get(_MARK) or {}
    if not held:
        return None
    kept = {"process": "", "takeovers": 0, "steps": {}, "expires_at": None, **held}
    return mark.but(**{**kept, "status": Status(kept["status"])})


def _mark(record: Record, held: Mapping[str, Any]) -> Record:
    # The revision follows from the record's, so that a write that is made again is the same one.
    return record.but(
        status=Status.IN_PROGRESS,
        revision=f"{record.revision}.moved",
        owner=_MARK,
        lease_until=_FOR_EVER,
        process="",
        takeovers=0,
        steps={_MARK: held} if held else {},
        expires_at=None,
    )
