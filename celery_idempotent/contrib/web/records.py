"""Records on the page: which a search finds, what one tells of its operation, and how a form judges them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from celery_idempotent.engine.search import FORGOTTEN, Filter, found
from celery_idempotent.integration.operating import display, verdicts
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import Action, counts_until, is_erased

PAGE = 50
"""Records on a page, and of one verdict at most."""

STATUSES = ("UNKNOWN", "IN_PROGRESS", "FAILED", "RELEASED", "COMPLETED", FORGOTTEN)
"""In the order in which they need somebody."""

_LAST_PAGE = 2000
"""Beyond it a search is narrowed: a store is read from its beginning up to the page."""

_OLDEST = 10**10
"""Seconds, 317 years."""

AGES: Mapping[int, str] = {60: "1 minute", 600: "10 minutes", 3600: "1 hour", 86_400: "1 day", 604_800: "7 days"}
"""By seconds, what a form offers; an address may have any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is asked for. Texts are empty where nothing is."""

    label: str = ""
    key: str = ""
    task: str = ""
    status: str = ""
    older: int | None = None
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Search":
        """As an address asks; ``ValueError`` with a sentence where it cannot be understood."""
        status = query.get("status", "").strip().upper()
        if status and status not in STATUSES:
            raise ValueError(f"There is no status {status}; there are {', '.join(STATUSES)}.")
        return cls(
            label=query.get("label", "").strip(),
            key=query.get("key", "").strip(),
            task=query.get("task", "").strip(),
            status=status,
            older=_number("age", query.get("older", ""), _OLDEST),
            page=_number("page", query.get("page", ""), _LAST_PAGE) or 1,
        )

    def query(self, **changes: object) -> dict[str, object]:
        """The same as an address, with ``changes``."""
        asked = {"label": self.label, "key": self.key, "task": self.task, "status": self.status, "older": self.older}
        return {name: value for name, value in {**asked, "page": self.page, **changes}.items() if value}


def _number(name: str, text: str, most: int) -> int | None:
    text = text.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
        raise ValueError(f"The {name} is a number of at most {most}.")
    return int(text)


def answer(store: Store, search: Search) -> tuple[list[Record], bool]:
    """The records of the page, the oldest write first, and whether there are more behind them.

    Reads up to the end of the page and no further. A whole key is one request.
    """
    wanted = Filter(
        status=search.status or None,
        task=search.task or None,
        label=search.label or None,
        key=search.key or None,
        older_than=None if search.older is None else search.older * 1000,
    )
    record = store.get(search.key) if search.key else None
    if record is not None:
        return [record] if wanted.matches(record, store.now()) else [], False
    first = (search.page - 1) * PAGE
    records = list(islice(found(store, wanted), first, first + PAGE + 1))
    return sorted(records[:PAGE], key=lambda each: each.updated_at), len(records) > PAGE


CHOICES: Mapping[Action, tuple[str, str]] = {
    Action.COMPLETED: ("It happened", "Every later delivery is answered with the result that you state."),
    Action.RERUN: ("It did not happen", "The next delivery runs the task. There must be one: publish it again."),
    Action.RELEASE: (
        "Give the claim back",
        "The attempt is gone and had no effect, or may have it again. The next delivery runs the task.",
    ),
    Action.FORGET: (
        "Forget the outcome",
        "The next delivery is a new operation, and runs the task again. Nothing of this one stays.",
    ),
}
"""By verdict, what a person is asked, and what follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a person has filled in; ``errors`` by field, where that cannot be a verdict."""

    action: Action | None = None
    by: str = ""
    reason: str = ""
    text: str = ""
    result: Any = None
    checked: bool = False
    errors: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, sent: Mapping[str, Sequence[str]]) -> "Form":

        def value(name: str) -> str:
            return sent.get(name, [""])[-1].strip()

        action = next((each for each in Action if each == value("action")), None)
        by, reason = (one_line(" ".join(value(name).split())) for name in ("by", "reason"))
        text, checked = value("result"), value("checked") == "yes"
        errors = {
            "action": "" if action else "Choose a verdict.",
            "by": "" if by else "Say who you are.",
            "reason": "" if reason else "Say why, such as what the receiver told you, or the number of a ticket.",
        }
        result = None
        if action is Action.COMPLETED:
            try:
                result = verdicts.json_of(text)
            except ValueError:
                errors["result"] = 'Write JSON: "ch_1" with its quotes, 7, {"id": 7} or null.'
        errors["checked"] = "" if checked else "Check the receiver first; then say so."
        errors = {name: each for name, each in errors.items() if each}
        return cls(action=action, by=by, reason=reason, text=text, result=result, checked=checked, errors=errors)


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
    claims = list(_claims(record))
    steps = [_step(name, plain) for name, plain in record.steps.items()]
    ended = [each for each in steps if each.at is None]
    timed = [*_verdict(record.verdict), *(each for each in steps if each.at is not None)]
    # Sorting keeps the order of what has one time.
    moments = sorted([*claims, *ended, *timed], key=lambda each: each.at or claims[-1].at or 0)
    is_announced = record.status is Status.RELEASED and not record.attempts
    if not (is_announced or is_erased(record)):  # which is told already
        error = (record.error,) if record.error else ()
        moments.append(Moment(record.updated_at, str(record.status), _TITLES[record.status], error))
    if record.status is Status.IN_PROGRESS:
        title = "The lease was over" if record.lease_until <= now else "The lease ends, unless renewed"
        moments.append(Moment(record.lease_until, "later", title))
    until = counts_until(record)
    if until is not None:
        moments.append(Moment(until, "later", "Forgotten" if until <= now else "The outcome will be forgotten"))
    return moments


def _claims(record: Record) -> Iterator[Moment]:
    if not record.attempts:
        yield Moment(record.created_at, "claim", "Recorded by a publisher", (f"task id {record.task_id}",))
        return
    by = _details({"on": record.worker, "task id": record.task_id, "process": record.process}, " ")
    if record.attempts == 1:
        yield Moment(record.created_at, "claim", "Attempt 1 claimed it", by)
        return
    attempts = "attempt is" if record.attempts == 2 else "attempts are"
    earlier = f"{record.attempts - 1} earlier {attempts} counted, but not kept"
    yield Moment(record.created_at, "claim", "First recorded", (earlier,))
    # A token is the time of its claim, unless a clock went back.
    times = "once" if record.takeovers == 1 else f"{record.takeovers} times in a row"
    how = f"took over, as {times} an attempt had not ended" if record.takeovers else "claimed it"
    yield Moment(record.fencing_token, "claim", f"Attempt {record.attempts} {how}", by)


def _details(lines: Mapping[str, Any], between: str = ": ") -> tuple[str, ...]:
    return tuple(f"{name}{between}{value}" for name, value in lines.items() if value)


def _step(name: str, plain: Any) -> Moment:
    match display.step_of(plain):
        case Begun(at, attempt):
            return Moment(at, "UNKNOWN", f"Step {name} began", (f"in attempt {attempt}; no end is recorded",))
        case Finished(result, lost):
            kept = f"lost: {lost}" if result is None else "recorded"
            return Moment(None, "step", f"Step {name} ended", (f"its result is {kept}; it is not made again",))
        case _:
            return Moment(None, "step", f"Step {name}", ("not readable by this version",))


_MEANINGS: Mapping[str, str] = {
    Action.COMPLETED: "it happened",
    Action.RERUN: "it did not happen",
    Action.RELEASE: "the claim is given back",
    Action.FORGET: "forgotten on purpose",
}


def _verdict(told: Mapping[str, Any]) -> Iterator[Moment]:
    if told:
        at, action = told.get("at"), told.get("action", "?")
        judged = f"it was {told.get('status', '?')}, attempt {told.get('attempt', '?')}"
        lines = {"by": told.get("by"), "why": told.get("reason"), "judged": judged, "its error": told.get("error")}
        title = f"Verdict: {_MEANINGS.get(str(action), action)}"
        yield Moment(at if isinstance(at, int) else None, "verdict", title, _details(lines))


_TITLES = {
    Status.IN_PROGRESS: "Last sign of life",
    Status.COMPLETED: "Completed",
    Status.FAILED: "Failed",
    Status.RELEASED: "Given back, to be run by the next delivery",
    Status.UNKNOWN: "Nobody can tell whether the effect happened",
}
"""Where the operation stands since the last write."""


def ago(at: int, now: int) -> str:
    """How long ago, or in how long."""
    length = display.duration(abs(now - at))
    return f"{length} ago" if at <= now else f"in {length}"
