"""What was promised, what was seen of one operation, which rules that breaks, and the sum of many: the one audit."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from celery_idempotent.engine.delivery import Body, Delivery, Outcome
from celery_idempotent.errors import LeaseLost, OutcomeUnknown, ResultLost, StoreUnavailable
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import OnTakeover
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from lab.proof.table import OURS, Row

CODEC = Codec("json", frozenset({"application/json"}))
NO_HEARTBEAT: Any = SimpleNamespace(start=lambda claim: None, stop=lambda claim: None)
"""Renews nothing by real time: bodies renew when their plan says so."""

OUTCOMES = frozenset({Status.COMPLETED, Status.FAILED})
FINAL = OUTCOMES | {Status.UNKNOWN}


class Remembered(Exception):
    """What a body raises when its failure is its outcome."""


@dataclass(frozen=True)
class Promise:
    """A way of using the library, and what it promises: so many effects, once a clean delivery has ended."""

    name: str
    on_takeover: OnTakeover
    most: int | None = None
    keyed: bool = False
    doubtful: bool = False

    @cached_property
    def policy(self) -> Policy:
        return Policy(on_takeover=self.on_takeover, remember=(Remembered,))

    def allows(self, effects: int, *, unknown: bool = True) -> bool:
        """Whether that many effects are within the promise."""
        return effects >= (not (self.doubtful and unknown)) and (self.most is None or effects <= self.most)


PROMISES = {
    each.name: each
    for each in (
        Promise("at least once", "rerun"),
        Promise("at most once", "refuse", most=1, doubtful=True),
        Promise("exactly once", "rerun", most=1, keyed=True),
    )
}


@dataclass(frozen=True, slots=True)
class Told:
    """How a delivery ended; ``"finished"`` and ``"failed"`` are outcomes, all else reports nothing as done."""

    how: str
    value: str | None = None

    @property
    def is_outcome(self) -> bool:
        return self.how in ("finished", "failed")


def operation(key: str, promise: Promise, delivery: int) -> Operation:
    """One delivery of the task with that key."""
    names: dict[str, Any] = {"task": "proof", "task_id": f"delivery {delivery}", "worker": f"worker {delivery}"}
    return Operation(identity=Identity(key, None), policy=promise.policy, **names)


def tell(delivery: Delivery, body: Body) -> Told:
    """Deliver, and put what the caller was told into words; a bug's own exception passes."""
    try:
        outcome = delivery.run(body)
    except Remembered as error:
        return Told("failed", str(error))
    except (LeaseLost, StoreUnavailable, OutcomeUnknown, ResultLost) as error:
        return Told(type(error).__name__)
    return Told("finished", str(outcome.value)) if isinstance(outcome, Outcome) else Told("conflict")


def snapshot(record: Record) -> str:
    return repr(sorted(record.to_fields().items()))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of one operation: its effects, what its deliveries were told, its end, its tokens in their order.

    The clean deliveries came last, past all leases. So many repetitions are excused, or all where that is None.
    """

    promise: Promise
    effects: int
    told: Sequence[Told] = ()
    clean: Sequence[Told] = ()
    status: Status | None
    tokens: Sequence[int] = ()
    excused: int | None = None
    may_be_unknown: bool = True

    @property
    def unknown(self) -> bool:
        return self.status is Status.UNKNOWN

    @property
    def stuck(self) -> bool:
        """Whether a clean delivery could not finish it."""
        return not all(each.is_outcome or self.is_doubt(each) for each in self.clean[:1])

    def is_doubt(self, told: Told) -> bool:
        """Whether somebody was told rightly that nobody knows."""
        return told.how == "OutcomeUnknown" and self.promise.doubtful


def breaches(seen: Seen) -> Iterator[str]:
    """The rules that an operation breaks; empty is good."""
    outcomes = {each for each in seen.told if each.is_outcome}
    if not seen.promise.allows(seen.effects, unknown=seen.unknown):
        yield f"{seen.effects} effects"
    elif seen.excused is not None and seen.effects > 1 + seen.excused:
        yield f"the effect was repeated without a cause: {seen.effects} times, and {seen.excused} were cut off"
    if len(outcomes) > 1:
        yield f"deliveries were told different outcomes: {sorted(map(str, outcomes))}"
    if outcomes and not seen.effects:
        yield "an outcome was reported and there was no effect"
    if outcomes and seen.unknown:
        yield "an outcome was reported and the record says UNKNOWN"
    if any(later <= earlier for earlier, later in itertools.pairwise(seen.tokens)):
        yield f"fencing tokens did not grow: {seen.tokens}"
    if len(set(seen.clean)) > 1 or seen.stuck:
        yield f"clean deliveries were told {seen.clean}"
    if seen.status not in FINAL:
        yield "the operation has no end"
    if seen.unknown and not seen.promise.doubtful:
        yield "UNKNOWN where it may run again"
    elif seen.unknown and not seen.may_be_unknown:
        yield "UNKNOWN without a cause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one operation; ``reached`` says where its faults struck. It may rightly have ``failed``."""

    task: str
    promise: str
    deliveries: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    reached: Mapping[str, int] = field(default_factory=dict)
    effects: int
    unknown: bool = False
    failed: bool = False
    unexplained: bool = False
    stuck: bool = False
    takeovers: int = 0
    problems: tuple[str, ...] = ()

    @property
    def is_faulted(self) -> bool:
        return any(self.faults.values())


_SUMMED = ("deliveries", "takeovers", "unknown", "unexplained", "stuck")


def rows_of(verdicts: Iterable[Verdict], **named: Any) -> list[Row]:
    """One row per promise, with what else a row has."""
    by_promise: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_promise[verdict.promise].append(verdict)
    known = [*PROMISES, *by_promise]
    return [_row(promise, by_promise[promise], named) for promise in sorted(by_promise, key=known.index)]


def _row(promise: str, verdicts: Sequence[Verdict], named: Mapping[str, Any]) -> Row:
    faults, summed = Counter[str](), {name: sum(getattr(each, name) for each in verdicts) for name in _SUMMED}
    for each in verdicts:
        faults.update(each.faults)
    counted: dict[str, Any] = {
        "tasks": len(verdicts),
        "faulted": sum(each.is_faulted for each in verdicts),
        "effects_0": sum(not (each.effects or each.unknown or each.failed) for each in verdicts),
        "effects_1": sum(each.effects == 1 for each in verdicts),
        "effects_2": sum(each.effects > 1 for each in verdicts),
        "violations": sum(bool(each.problems) for each in verdicts),
    }
    common = {"system": OURS, "promise": promise, "faults": dict(faults.most_common())}
    return Row(**{**common, **summed, **counted, **named})


@dataclass(frozen=True, slots=True)
class Result:
    """What a campaign found: a verdict per operation, and their rows."""

    verdicts: Sequence[Verdict]
    rows: list[Row]

    @property
    def problems(self) -> list[Verdict]:
        return [each for each in self.verdicts if each.problems]

    @property
    def reached(self) -> Counter[str]:
        """How often each fault struck, or death came, by place."""
        return sum((Counter(each.reached) for each in self.verdicts), Counter())
