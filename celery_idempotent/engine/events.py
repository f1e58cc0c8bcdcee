"""What can happen to an operation, and is told to logs, signals and counters; and how long the store takes.

While nobody listens for that, no clock is read.
"""

from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from logging import DEBUG, ERROR, INFO, WARNING
from time import perf_counter
from typing import NamedTuple, Self, TypeVar, TypeVarTuple

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import RecordUnreadable

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Timed(StrEnum):
    """What is timed."""

    CLAIM = "claim"
    RENEWAL = "renewal"


Listener = Callable[[Timed, str, float, str | None], None]
"""Gets what was timed, the name of the task, seconds, and the type of the error that it ended with, if it did."""

_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Have ``listener`` told from now on, in place of any other; None: nobody."""
    global _listener
    _listener = listener


def timed(what: Timed, task: str, act: Callable[[*Args], T], *args: *Args) -> T:
    """``act(*args)``, and tell how long it took."""
    listener = _listener
    if listener is None:
        return act(*args)
    began, error = perf_counter(), None
    try:
        return act(*args)
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        with suppress(Exception):  # who measures is not to end a claim
            listener(what, task, perf_counter() - began, error)


class EventName(StrEnum):
    """What can be observed: the names of the log events, the signals and what is counted.

    Each with the level of its line in the log, and when it is told.
    """

    level: int
    text: str

    def __new__(cls, name: str, level: int, text: str) -> Self:
        """The event, which is its name."""
        event = str.__new__(cls, name)
        event._value_, event.level, event.text = name, level, text
        return event

    CLAIMED = "claimed", DEBUG, "an attempt owns the key; its body runs next"
    COMPLETED = "completed", DEBUG, "the operation is recorded as completed"
    REPLAYED = "replayed", INFO, "a duplicate got the recorded outcome"
    CONFLICTED = "conflicted", INFO, "the operation is running elsewhere"
    PUBLISH_SKIPPED = (
        "publish_skipped",
        INFO,
        'under `publish="once"`: a message was not sent, as the operation is queued, running or done',
    )
    RELEASED = "released", INFO, "the body raised, and the claim was given back"
    FAILED = "failed", INFO, "a failure is recorded as the outcome"
    VERDICT_GIVEN = "verdict_given", WARNING, "a person gave a verdict, by a command, the page, or in Python"
    TAKEN_OVER = "taken_over", WARNING, "the claim follows an attempt that never ended; sent after `claimed`"
    KEY_REUSED = (
        "key_reused",
        WARNING,
        'the key came with other arguments: the delivery fails with `KeyReused`, or runs under `mode="observe"`',
    )
    KEY_MISSING = (
        "key_missing",
        WARNING,
        'the call has no key: the delivery fails with `KeyMissing`, or runs under `mode="observe"`',
    )
    RESULT_DROPPED = (
        "result_dropped",
        WARNING,
        "the operation is completed without its result: too large, not encodable, or its object could not be written",
    )
    RESULT_LOST = (
        "result_lost",
        WARNING,
        "a delivery fails with `ResultLost`: the result was not kept, or cannot be decoded here; sent after `replayed` "
        "or `lease_lost`",
    )
    LEASE_LOST = "lease_lost", WARNING, "somebody took over while the body ran"
    DEADLINE_EXCEEDED = "deadline_exceeded", WARNING, "a body runs for longer than its `deadline`"
    STORE_UNAVAILABLE = "store_unavailable", WARNING, "the store gave no certain answer"
    RECORD_UNREADABLE = (
        "record_unreadable",
        WARNING,
        "a record is damaged or of a newer version: the delivery is postponed; `list`, `purge` and other scans skip "
        "it, with None as sender",
    )
    OUTCOME_UNKNOWN = "outcome_unknown", ERROR, "nobody can tell whether the effect happened"


class Event(NamedTuple):
    """Something that happened to an operation; never carries arguments or results, save by the policy's ``label``."""

    #: What.
    name: EventName
    #: The operation's; empty where it has none, or it cannot be told.
    key: str
    #: Of the attempt; None where there is none.
    fencing_token: int | None
    #: Why, for people.
    reason: str
    #: The operation's; empty where the policy has none.
    label: str = ""
    #: Whether people have been told already.
    is_one_of_many: bool = False
    #: Which attempt of the operation it is about, from 1; None where there is none.
    attempt: int | None = None
    #: Where the delivery is answered by what is recorded: the task id of the delivery that recorded it.
    done_by: str | None = None
    #: Likewise its trace context, where telemetry is on.
    trace: str = ""
    #: Likewise the name of the app; empty where it has none.
    done_in: str = ""


def event_of(error: StoreUnavailable) -> EventName:
    """What happened when the store gave no answer that can be used."""
    return EventName.RECORD_UNREADABLE if isinstance(error, RecordUnreadable) else EventName.STORE_UNAVAILABLE
