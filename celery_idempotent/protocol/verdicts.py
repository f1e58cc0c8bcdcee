"""An operator's word on an operation, as its record keeps it: what, who, why, when, and what it was about."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from celery_idempotent.protocol.record import Record


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who decided what, and why."""

    action: Action
    by: str = ""
    reason: str = ""


_MOST_EARLIER = 9
"""Verdicts kept besides the last one; each stands in every later write of the record."""

_MOST_OF_A_NAME = 255
_MOST_OF_A_REASON = 2000
"""Characters; an item of DynamoDB has room for 400 KB."""


def given(verdict: Verdict, seen: Record, now: int) -> Mapping[str, Any]:
    """What the record keeps of ``verdict`` on ``seen``: the status and error judged, too, and the verdicts before."""
    told = {
        "action": str(verdict.action),
        "by": verdict.by[:_MOST_OF_A_NAME],
        "reason": verdict.reason[:_MOST_OF_A_REASON],
        "at": now,
        "status": str(seen.status),
        "attempt": seen.attempts,
        "error": seen.error,
    }
    earlier = history(seen)[-_MOST_EARLIER:]
    return {**told, "earlier": earlier} if earlier else told


def history(record: Record) -> list[Mapping[str, Any]]:
    """The verdicts that the record keeps, the oldest first, each without those before it; what is none is left out."""
    if not record.verdict:
        return []
    earlier = record.verdict.get("earlier")
    kept = [each for each in earlier if isinstance(each, Mapping)] if isinstance(earlier, list) else []
    last = {name: value for name, value in record.verdict.items() if name != "earlier"}
    return [*kept, last]


def is_erased(record: Record) -> bool:
    """Whether nothing is left of the operation but that somebody has forgotten it on purpose.

    A worker of the version before leaves the verdict in an SQL row, where the next operation then has it.
    """
    return record.verdict.get("action") == Action.FORGET and record.verdict.get("at") == record.updated_at


def without_contents(verdict: Mapping[str, Any]) -> Mapping[str, Any]:
    """What may stay of a verdict once the operation is forgotten: no error's text, and nothing of those before."""
    return {name: value for name, value in verdict.items() if name not in {"error", "earlier"}}
