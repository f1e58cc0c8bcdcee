"""What was promised, what became of one task, and the sum of many."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

from celery_idempotent.engine.delivery import Body, Delivery, Outcome
from celery_idempotent.errors import LeaseLost, OutcomeUnknown, StoreUnavailable
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import OnTakeover
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from lab.proof.table import Row

__all__ = [
    "CODEC",
    "COUNTED",
    "FINAL",
    "PROMISES",
    "Promise",
    "Remembered",
    "Result",
    "Tally",
    "Told",
    "Verdict",
    "breaches",
    "ending",
    "operation",
    "snapshot",
    "tell",
]

CODEC = Codec("json", frozenset({"application/json"}))
FINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.UNKNOWN})


class Remembered(Exception):
    """What a body raises when its failure is its outcome."""


@dataclass(frozen=True)
class Promise:
    """A way of using the library, and what it promises.

    Args:
        name: The promise, as the table prints it.
        on_takeover: What the policy says about attempts that never ended.
        keyed: Whether the effect's receiver honours the attempt's effect key.
    """

    name: str
    on_takeover: OnTakeover
    keyed: bool = False

    @cached_property
    def policy(self) -> Policy:
        """The task's policy."""
        return Policy(on_takeover=self.on_takeover, remember=(Remembered,))

    def allows(self, effects: int) -> bool:
        """Whether that many effects are within the promise, once a clean delivery has ended."""
        match self.name:
            case "exactly once":
                return effects == 1
            case "at most once":
                return effects <= 1
            case _:
                return effects >= 1


PROMISES = {
    each.name: each
    for each in (
        Promise("at least once", "rerun"),
        Promise("at most once", "refuse"),
        Promise("exactly once", "rerun", keyed=True),
    )
}


@dataclass(frozen=True, slots=True)
class Told:
    """How a delivery ended.

    Args:
        how: ``"finished"`` and ``"failed"`` are outcomes; everything else reports nothing as done.
        value: What was reported.
    """

    how: str
    value: str | None = None

    @property
    def is_outcome(self) -> bool:
        """Whether something was reported as done."""
        return self.how in ("finished", "failed")


def operation(key: str, promise: Promise, delivery: int) -> Operation:
    """One delivery of the task with that key."""
    return Operation(
        identity=Identity(key, None),
        policy=promise.policy,
        task="proof",
        task_id=f"delivery {delivery}",
        worker=f"worker {delivery}",
    )


def tell(delivery: Delivery, body: Body) -> Told:
    """Deliver, and put what the caller was told into words; a bug's own exception passes."""
    try:
        outcome = delivery.run(body)
    except (LeaseLost, StoreUnavailable, OutcomeUnknown) as error:
        return Told(type(error).__name__)
    except Remembered as failure:
        return Told("failed", str(failure))
    return Told("finished", str(outcome.value)) if isinstance(outcome, Outcome) else Told("conflict")


def snapshot(record: Record) -> str:
    """All of a record, to be compared."""
    return repr(sorted(record.to_fields().items()))


def breaches(promise: Promise, told: Iterable[Told], effects: int, tokens: Iterable[int]) -> Iterator[str]:
    """The rules that an operation breaks, of those that hold whatever was done to it.

    Args:
        promise: What was promised of it.
        told: How its deliveries ended.
        effects: How many it had.
        tokens: The fencing tokens of its claims, in their order.
    """
    outcomes = {each for each in told if each.is_outcome}
    if not promise.allows(effects):
        yield f"{effects} effects"
    if len(outcomes) > 1:
        yield f"deliveries were told different outcomes: {outcomes}"
    if outcomes and not effects:
        yield "an outcome was reported and there was no effect"
    granted = list(tokens)
    if any(later <= earlier for earlier, later in itertools.pairwise(granted)):
        yield f"fencing tokens did not grow: {granted}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one task.

    Args:
        task: What reproduces it.
        promise: Name of its promise.
        group: Under which heading it counts.
        deliveries: How many there were.
        faults: How many of each kind it met.
        effects: How many it had.
        unknown: Whether it ended UNKNOWN.
        unexplained: Whether it did so without an injected fault.
        stuck: Whether a clean delivery past the lease could not finish it.
        takeovers: Claims after an attempt that never ended.
        healed: Lost replies recognised as the sender's own write.
        requests: What the store was asked.
        problems: Every rule that it breaks; empty is good.
    """

    task: str
    promise: str
    group: str = ""
    deliveries: int
    faults: Mapping[str, int]
    effects: int
    unknown: bool = False
    unexplained: bool = False
    stuck: bool = False
    takeovers: int = 0
    healed: int = 0
    requests: int = 0
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a worker reports it."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """As a worker reported it."""
        return cls(**{**values, "problems": tuple(values["problems"])})


@dataclass(slots=True)
class Tally:
    """The sum of many verdicts, by promise."""

    seen: dict[str, list[Counter[str]]] = field(default_factory=dict)
    problems: list[Verdict] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As a worker reports it."""
        return {"seen": self.seen, "problems": [each.to_json() for each in self.problems]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """As a worker reported it."""
        seen = {promise: [Counter(counts), Counter(faults)] for promise, (counts, faults) in values["seen"].items()}
        return cls(seen, [Verdict.from_json(each) for each in values["problems"]])

    def merge(self, other: "Tally") -> int:
        """Count what another has counted; how many tasks of those met a fault."""
        for promise, (counts, faults) in other.seen.items():
            ours = self.seen.setdefault(promise, [Counter(), Counter()])
            ours[0].update(counts)
            ours[1].update(faults)
        self.problems += other.problems
        return sum(counts["faulted"] for counts, _ in other.seen.values())

    def add(self, verdict: Verdict) -> bool:
        """Count one more task; whether it met a fault."""
        is_faulted = any(verdict.faults.values())
        counts, faults = self.seen.setdefault(verdict.promise, [Counter(), Counter()])
        faults.update(verdict.faults)
        counts.update(
            tasks=1,
            faulted=is_faulted,
            deliveries=verdict.deliveries,
            takeovers=verdict.takeovers,
            healed=verdict.healed,
            effects_0=verdict.effects == 0 and not verdict.unknown,
            effects_1=verdict.effects == 1,
            effects_2=verdict.effects >= 2,
            unknown=verdict.unknown,
            unexplained=verdict.unexplained,
            stuck=verdict.stuck,
            requests=verdict.requests,
            violations=bool(verdict.problems),
        )
        if verdict.problems:
            self.problems.append(verdict)
        return is_faulted

    def rows(self, *, store: str, campaign: str, seconds: float, seed: int | None) -> list[Row]:
        """One row per promise."""
        return [
            self._row(promise, store=store, campaign=campaign, seconds=seconds, seed=seed)
            for promise in _known(self.seen)
        ]

    def _row(self, promise: str, *, store: str, campaign: str, seconds: float, seed: int | None) -> Row:
        counts, faults = self.seen[promise]
        requests = counts["requests"] / counts["tasks"]
        plain: dict[str, Any] = {name: counts[name] for name in COUNTED}
        return Row(
            system="celery-idempotent",
            store=store,
            promise=promise,
            campaign=campaign,
            faults=dict(faults.most_common()),
            extra_requests=round(requests - 2, 2),
            seconds=round(seconds, 1),
            seed=seed,
            **plain,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What a campaign found.

    Args:
        tally: The verdicts.
        rows: Their sum, by promise.
        reached: How often each fault struck each operation.
    """

    tally: Tally
    rows: list[Row]
    reached: Mapping[str, int]


COUNTED = (
    "tasks",
    "faulted",
    "deliveries",
    "takeovers",
    "healed",
    "effects_0",
    "effects_1",
    "effects_2",
    "unknown",
    "unexplained",
    "stuck",
    "violations",
)
"""What a row of the table counts of its verdicts."""


def _known(seen: Iterable[str]) -> list[str]:
    found = set(seen)
    return [name for name in PROMISES if name in found]
