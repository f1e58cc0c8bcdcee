"""What was promised, what was seen of one operation, which rules that breaks, and the sum of many: the one audit."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

from celery_idempotent.engine.delivery import Body, Delivery, Outcome
from celery_idempotent.errors import LeaseLost, OutcomeUnknown, ResultLost, StoreUnavailable
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import OnTakeover
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from lab.proof.table import Row

CODEC = Codec("json", frozenset({"application/json"}))
FINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.UNKNOWN})


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


def ending(finals: Iterable[Record]) -> Record | None:
    """The one end of an operation of which ``finals`` were seen, in any order.

    UNKNOWN may be left, for what its owner recorded after all. None: it has no end.

    Raises:
        ValueError: A final state was changed otherwise.
    """
    different = {snapshot(each): each for each in finals}
    unknown = [each for each in different.values() if each.status is Status.UNKNOWN]
    outcomes = [each for each in different.values() if each.status is not Status.UNKNOWN]
    if max(len(unknown), len(outcomes), len({each.owner for each in different.values()})) > 1:
        raise ValueError(f"a final state was changed: {list(different)}")
    return next(iter((*outcomes, *unknown)), None)


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
    """What became of one operation."""

    task: str
    promise: str
    group: str = ""
    deliveries: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    effects: int
    unknown: bool = False
    unexplained: bool = False
    stuck: bool = False
    takeovers: int = 0
    healed: int = 0
    problems: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "problems": tuple(values["problems"])})


@dataclass(slots=True)
class Tally:
    """The sum of many verdicts, by promise."""

    seen: dict[str, list[Counter[str]]] = field(default_factory=dict)
    problems: list[Verdict] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"seen": self.seen, "problems": [asdict(each) for each in self.problems]}

    def merge(self, found: Mapping[str, Any]) -> int:
        """Count what a worker has counted; how many tasks of those met a fault."""
        for promise, added in found["seen"].items():
            for ours, theirs in zip(self.seen.setdefault(promise, [Counter(), Counter()]), added, strict=True):
                ours.update(theirs)
        self.problems += map(Verdict.from_json, found["problems"])
        return sum(counts["faulted"] for counts, _ in found["seen"].values())

    def add(self, verdict: Verdict) -> bool:
        """Count one more task; whether it met a fault."""
        is_faulted = any(verdict.faults.values())
        counts, faults = self.seen.setdefault(verdict.promise, [Counter(), Counter()])
        faults.update(verdict.faults)
        summed = ("deliveries", "takeovers", "healed", "unknown", "unexplained", "stuck")
        counts.update({name: int(getattr(verdict, name)) for name in summed})
        counts.update(
            tasks=1,
            faulted=is_faulted,
            effects_0=verdict.effects == 0 and not verdict.unknown,
            effects_1=verdict.effects == 1,
            effects_2=verdict.effects >= 2,
            violations=bool(verdict.problems),
        )
        if verdict.problems:
            self.problems.append(verdict)
        return is_faulted

    def rows(self, **named: Any) -> list[Row]:
        """One row per promise, with what else a row has."""
        known = [*PROMISES, *self.seen]
        return [self._row(promise, named) for promise in sorted(self.seen, key=known.index)]

    def _row(self, promise: str, named: Mapping[str, Any]) -> Row:
        counts, faults = self.seen[promise]
        counted: dict[str, Any] = {each: counts[each] for each in COUNTED}
        common = {"system": "celery-idempotent", "promise": promise, "faults": dict(faults.most_common())}
        return Row(**{**common, **counted, **named})


COUNTED = (
    *("tasks", "faulted", "deliveries", "takeovers", "healed", "effects_0", "effects_1", "effects_2"),
    *("unknown", "unexplained", "stuck", "violations"),
)
"""What a row of the table counts of its verdicts."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a campaign found: the verdicts, their sum by promise, and how often each fault struck or death came."""

    tally: Tally
    rows: list[Row]
    reached: Mapping[str, int]
