"""An operator's word on an operation, as its record keeps it: what, who, why, when, and what it was about."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from celery_idempotent.protocol.record import END_OF_NUMBERS, Record, keepable


class Action(StrEnum):
    """What a person can decide."""

    COMPLETED = "completed"
    """The effect happened; its result is replayed."""
    RERUN = "rerun"
    """The effect did not happen; the next delivery runs the body."""
    RELEASE = "release"
    """The attempt never ended; the next delivery runs the body."""
    FORGET = "forget"
    """What is recorded counts no longer; the next delivery is a new operation."""


_MOST_OF_A_NAME = 255
_MOST_OF_A_REASON = 2000
"""Characters; an item of DynamoDB has room for 400 KB."""


def given(
    action: Action, seen: Record, now: int, *, by: str = "", reason: str = "", keep: int = 0
) -> Mapping[str, Any]:
    """What the record keeps of the verdict ``action`` on ``seen``: who, why, and the status and error judged.

    ``keep``: for how many milliseconds at least the record stays, as the proof of who has decided. Of what is forgotten
    no error's text may stay.
    """
    return {
        "action": str(action),
        "by": keepable(by[:_MOST_OF_A_NAME]),
        "reason": keepable(reason[:_MOST_OF_A_REASON]),
        "at": now,
        "status": str(seen.status),
        "attempt": seen.attempts,
        **({} if action is Action.FORGET else {"error": seen.error}),
        **({_KEPT_UNTIL: now + keep} if keep else {}),
    }


_KEPT_UNTIL = "kept_until"
_COUNTS_UNTIL = "counts_until"


def kept_until(record: Record) -> int:
    """Until when the record stays for the sake of its verdict, in milliseconds; 0 where nothing asks for that."""
    until = record.verdict.get(_KEPT_UNTIL)
    # Whoever can write the store can write any number; of one that no store holds, no outcome could be recorded.
    return until if isinstance(until, int) and until < END_OF_NUMBERS else 0


def counts_until(record: Record) -> int | None:
    """Until when the record's outcome counts, in milliseconds; None: for ever. The record may stay for longer."""
    if record.expires_at is None:
        return None
    until = record.verdict.get(_COUNTS_UNTIL)
    return min(until, record.expires_at * 1000) if isinstance(until, int) else record.expires_at * 1000


def beyond_outcome(record: Record, until: int) -> Mapping[str, Any]:
    """The verdict of an operation whose outcome counts ``until`` then, also where the record stays for longer."""
    return {**record.verdict, _COUNTS_UNTIL: until} if kept_until(record) > until else record.verdict


def carried(seen: Record, now: int) -> Mapping[str, Any]:
    """What the next operation of the key keeps of the verdict on one that no longer counts: it is still the proof."""
    if kept_until(seen) <= now:
        return {}
    return {name: value for name, value in seen.verdict.items() if name != _COUNTS_UNTIL}


def is_erased(record: Record) -> bool:
    """Whether nothing is left of the operation but that somebody has forgotten it on purpose."""
    return record.verdict.get("action") == Action.FORGET
