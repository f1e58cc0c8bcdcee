"""Records on the page: which a search finds, what one tells of its operation, and how a form judges them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from celery_idempotent.engine.search import FORGOTTEN, Filter, find, reads_all
from celery_idempotent.integration.operating import display, verdicts
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import Action, counts_until, is_erased

PAGE = 50
"""Records on a page, and of one verdict at most."""

STATUSES = ("UNKNOWN", "IN_PROGRESS", "FAILED", "RELEASED", "COMPLETED", FORGOTTEN)
"""In the order in which they need somebody."""

_MOST = {"older": 10**10, "page": 2000}
"""Seconds, 317 years; and a page beyond which a search is narrowed: a store is read from its beginning up to it."""


def search_of(query: Mapping[str, str]) -> dict[str, Any]:
    """What an address asks for, empty or 0 where nothing is; ``ValueError`` with a sentence if it is no search."""
    search: dict[str, Any] = {
        name: query.get(name, "").strip() for name in ("label", "key", "task", "status", "older", "page")
    }
    search["status"] = status = search["status"].upper()
    if status and status not in STATUSES:
        raise ValueError(f"There is no status {status}; there are {', '.join(STATUSES)}.")
    for name, most in _MOST.items():
        text = search[name] or "0"
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and int(text) <= most):
            raise ValueError(f"The {'age' if name == 'older' else name} is a number of at most {most}.")
        search[name] = int(text)
    return {**search, "page": search["page"] or 1}


def answer(store: Store, search: Mapping[str, Any]) -> tuple[list[Record], bool, bool]:
    """The records of the page, the oldest write first; whether there are more behind them, and whether all were read.

    Reads up to the end of the page and no further. A whole key is one request.
    """
    texts = {name: search[name] or None for name in ("status", "task", "label", "key")}
    wanted = Filter(**texts, older_than=search["older"] * 1000 or None)
    record = store.get(search["key"]) if search["key"] else None
    if record is not None:
        return [record] if wanted.matches(record, store.now()) else [], False, False
    first = (search["page"] - 1) * PAGE
    records = list(islice(find(store, wanted), first, first + PAGE + 1))
    return sorted(records[:PAGE], key=lambda each: each.updated_at), len(records) > PAGE, reads_all(store, wanted)


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
        values = {name: each[-1].strip() for name, each in sent.items()}
        action = next((each for each in Action if each == values.get("action")), None)
        by, reason = (one_line(" ".join(values.get(name, "").split())) for name in ("by", "reason"))
        text, checked = values.get("result", ""), values.get("checked") == "yes"
        result, is_json = None, True
        if action is Action.COMPLETED:
            try:
                result = verdicts.json_of(text)
            except ValueError:
                is_json = False
        wanted = (
            ("action", action, "Choose a verdict."),
            ("by", by, "Say who you are."),
            ("reason", reason, "Say why, such as what the receiver told you, or the number of a ticket."),
            ("result", is_json, 'Write JSON: "ch_1" with its quotes, 7, {"id": 7} or null.'),
            ("checked", checked, "Check the receiver first; then say so."),
        )
        errors = {name: sentence for name, value, sentence in wanted if not value}
        return cls(action=action, by=by, reason=reason, text=text, result=result, checked=checked, errors=errors)


class Moment(NamedTuple):
    """Something that happened, or will, at a time in milliseconds; None where no record tells.

    ``kind`` is for its colour: ``claim``, ``step``, ``verdict``, ``later`` or the name of a status.
    """

    at: int | None
    kind: str
    title: str
    details: tuple[str, ...] = ()


def timeline(record: Record, now: int) -> list[Moment]:
    """The moments of ``record``, the oldest first; a step whose end has no time stands behind the last claim."""
    claims = list(_claims(record))
    steps = [_step(name, plain) for name, plain in record.steps.items()]
    ended, begun = [each for each in steps if each.at is None], [each for each in steps if each.at is not None]
    verdict = [_verdict(record.verdict)] if record.verdict else []
    # Sorting keeps the order of what has one time.
    moments = sorted([*claims, *ended, *verdict, *begun], key=lambda each: each.at or claims[-1].at or 0)
    is_announced = record.status is Status.RELEASED and not record.attempts
    if not (is_announced or is_erased(record)):  # which is told already
        error = (record.error,) if record.error else ()
        moments.append(Moment(record.updated_at, str(record.status), _TITLES[record.status], error))
    if record.status is Status.IN_PROGRESS:
        title = "The lease was over" if record.lease_until <= now else "The lease ends, unless renewed"
        moments.append(Moment(record.lease_until, "later", title))
    if (until := counts_until(record)) is not None:
        title = "Forgotten" if until <= now else "The outcome will be forgotten"
        moments.append(Moment(until, "later", title))
    return moments


def _claims(record: Record) -> Iterator[Moment]:
    by_whom = {"on": record.worker, "task id": record.task_id, "process": record.process}
    by = tuple(f"{name} {value}" for name, value in by_whom.items() if value)
    if not record.attempts:
        yield Moment(record.created_at, "claim", "Recorded by a publisher", (f"task id {record.task_id}",))
    elif record.attempts == 1:
        yield Moment(record.created_at, "claim", "Attempt 1 claimed it", by)
    else:
        attempts = "attempt is" if record.attempts == 2 else "attempts are"
        earlier = f"{record.attempts - 1} earlier {attempts} counted, but not kept"
        yield Moment(record.created_at, "claim", "First recorded", (earlier,))
        # A token is the time of its claim, unless a clock went back.
        before = "the attempt" if record.takeovers == 1 else f"the {record.takeovers} attempts"
        how = f"took over: {before} before it never ended" if record.takeovers else "claimed it"
        yield Moment(record.fencing_token, "claim", f"Attempt {record.attempts} {how}", by)


def _step(name: str, plain: Any) -> Moment:
    state = display.step_of(plain)
    at, kind = (state.at, "UNKNOWN") if isinstance(state, Begun) else (None, "step")
    return Moment(at, kind, f"Step {name}", (display.step_state(plain),))


def _verdict(told: Mapping[str, Any]) -> Moment:
    at = told.get("at")
    title = f"Verdict: {told.get('action', '?')}"
    return Moment(at if isinstance(at, int) else None, "verdict", title, (display.verdict(told),))


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
