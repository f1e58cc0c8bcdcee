"""What can happen to an operation, and is told to logs, signals and counters."""

from dataclasses import dataclass
from enum import StrEnum

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import RecordUnreadable


class EventName(StrEnum):
    """What can be observed: the names of the log events and of the signals."""

    CLAIMED = "claimed"
    REPLAYED = "replayed"
    CONFLICTED = "conflicted"
    KEY_REUSED = "key_reused"
    KEY_MISSING = "key_missing"
    TAKEN_OVER = "taken_over"
    COMPLETED = "completed"
    RESULT_DROPPED = "result_dropped"
    RESULT_LOST = "result_lost"
    FAILED = "failed"
    RELEASED = "released"
    LEASE_LOST = "lease_lost"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    OUTCOME_UNKNOWN = "outcome_unknown"
    STORE_UNAVAILABLE = "store_unavailable"
    RECORD_UNREADABLE = "record_unreadable"
    PUBLISH_SKIPPED = "publish_skipped"
    VERDICT_GIVEN = "verdict_given"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an operation; never carries arguments or results, save by the policy's ``label``.

    Args:
        name: What.
        key: The operation's; empty where it has none, or it cannot be told.
        fencing_token: Of the attempt; None where there is none.
        reason: Why, for people.
        label: The operation's; empty where the policy has none.
        is_one_of_many: Whether people have been told already.
        attempt: Which attempt of the operation it is about, from 1; None where there is none.
        done_by: Where the delivery is answered by what is recorded: the task id of the delivery that recorded it.
        trace: Likewise its trace context, where telemetry is on.
        done_in: Likewise the name of the app; empty where it has none.
    """

    name: EventName
    key: str
    fencing_token: int | None
    reason: str
    label: str = ""
    is_one_of_many: bool = False
    attempt: int | None = None
    done_by: str | None = None
    trace: str = ""
    done_in: str = ""


def event_of(error: StoreUnavailable) -> EventName:
    """What happened when the store gave no answer that can be used."""
    return EventName.RECORD_UNREADABLE if isinstance(error, RecordUnreadable) else EventName.STORE_UNAVAILABLE
