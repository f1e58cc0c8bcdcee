"""What a record tells of its operation, in the order in which it happened."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery_idempotent.integration import display
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished
from celery_idempotent.protocol.verdicts import Action, counts_until, is_erased


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, or will.

    Args:
        at: When, in milliseconds; None where no record tells.
        kind: For its colour: ``claim``, ``step``, ``verdict``, ``later`` or the name of a status.
        title: What.
        details: More of it, each a line.
    """

    at: int | None
    kind: str
    title: str
    details: tuple[str, ...] = ()


def timeline(record: Record, now: int) -> list[Moment]:
    """The moments of ``record``, the oldest first; a step whose end has no time stands behind the last claim."""
    steps = [_step(name, plain) for name, plain in record.steps.items()]
    timed = [*_verdict(record.verdict), *(each for each in steps if each.at is not None)]
    claims, ended = list(_claims(record)), [each for each in steps if each.at is None]
    # Sorting keeps the order of what has one time.
    keyed = [(each.at or claims[-1].at or 0, each) for each in [*claims, *ended, *timed]]
    ordered = [each for _, each in sorted(keyed, key=lambda pair: pair[0])]
    return [*ordered, *_state(record), *_expected(record, now)]


def _claims(record: Record) -> Iterator[Moment]:
    if not record.attempts:
        yield Moment(record.created_at, "claim", "Recorded by a publisher", (f"task id {record.task_id}",))
        return
    by = tuple(
        f"{name} {value}"
        for name, value in (("on", record.worker), ("task id", record.task_id), ("process", record.process))
        if value
    )
    if record.attempts == 1:
        yield Moment(record.created_at, "claim", "Attempt 1 claimed it", by)
        return
    yield Moment(record.created_at, "claim", "First recorded", _earlier(record.attempts - 1))
    # A token is the time of its claim, unless a clock went back.
    how = f"took over, as {_times(record.takeovers)} an attempt had not ended" if record.takeovers else "claimed it"
    yield Moment(record.fencing_token, "claim", f"Attempt {record.attempts} {how}", by)


def _earlier(count: int) -> tuple[str, ...]:
    return (f"{count} earlier {'attempt is' if count == 1 else 'attempts are'} counted, but not kept",)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"


def _step(name: str, plain: Any) -> Moment:
    match display.step_of(plain):
        case Begun(at, attempt):
            return Moment(at, "UNKNOWN", f"Step {name} began", (f"in attempt {attempt}; no end is recorded",))
        case Finished(result, lost):
            kept = f"lost: {lost}" if result is None else "recorded"
            return Moment(None, "step", f"Step {name} ended", (f"its result is {kept}; it is not made again",))
        case _:
            return Moment(None, "step", f"Step {name}", ("not readable by this version",))


def _verdict(told: Mapping[str, Any]) -> Iterator[Moment]:
    if told:
        at, action = told.get("at"), told.get("action", "?")
        judged = f"it was {told.get('status', '?')}, attempt {told.get('attempt', '?')}"
        lines = {"by": told.get("by"), "why": told.get("reason"), "judged": judged, "its error": told.get("error")}
        yield Moment(
            at if isinstance(at, int) else None,
            "verdict",
            f"Verdict: {_MEANINGS.get(str(action), action)}",
            tuple(f"{name}: {value}" for name, value in lines.items() if value),
        )


_MEANINGS: Mapping[str, str] = {
    Action.COMPLETED: "it happened",
    Action.RERUN: "it did not happen",
    Action.RELEASE: "the claim is given back",
    Action.FORGET: "forgotten on purpose",
}


def _state(record: Record) -> Iterator[Moment]:
    """Where the operation stands since the last write."""
    is_announced = record.status is Status.RELEASED and not record.attempts
    if is_announced or is_erased(record):
        return  # that is told already
    titles = {
        Status.IN_PROGRESS: "Last sign of life",
        Status.COMPLETED: "Completed",
        Status.FAILED: "Failed",
        Status.RELEASED: "Given back, to be run by the next delivery",
        Status.UNKNOWN: "Nobody can tell whether the effect happened",
    }
    error = (record.error,) if record.error else ()
    yield Moment(record.updated_at, str(record.status), titles[record.status], error)


def _expected(record: Record, now: int) -> Iterator[Moment]:
    if record.status is Status.IN_PROGRESS:
        over = record.lease_until <= now
        yield Moment(record.lease_until, "later", "The lease was over" if over else "The lease ends, unless renewed")
    until = counts_until(record)
    if until is not None:
        yield Moment(until, "later", "Forgotten" if until <= now else "The outcome will be forgotten")


def ago(at: int, now: int) -> str:
    """How long ago, or in how long."""
    length = display.duration(abs(now - at))
    return f"{length} ago" if at <= now else f"in {length}"
