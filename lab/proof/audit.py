"""What a campaign's evidence proves: ledger, records and nemeses in, a judgement per operation out. Pure.

The ledger says what really happened, the records what the library believes, the nemeses what was done to it.
The rules, by promise:

- every operation has an outcome once the queue is empty, and still one after a further clean delivery;
- all callers that were told a success were told the same, and it is what the record says;
- *exactly once*: one effect. *At least once*: one or more; more than one only where a nemesis hit a delivery
  that had the effect. *At most once*: none or one; none only if the record says UNKNOWN;
- UNKNOWN only under *at most once*, and only where a nemesis hit one of the operation's deliveries.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from celery_idempotent.protocol.record import Record, Status
from lab.demo.ledger import Row

__all__ = [
    "Delivery",
    "Evidence",
    "Judgement",
    "Nemesis",
    "Promise",
    "deliveries",
    "judge",
    "judge_effects",
    "recoveries",
]

_LEARNING = 1.5
"""Seconds. A process knows its clock to be wrong from the first reply whose ``Date`` differs from the last one's."""

_LATE_END = 2.0
"""Seconds by which a nemesis may end late on a busy machine."""


class Promise(StrEnum):
    """How often an effect may happen."""

    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nemesis:
    """One thing done to the workers.

    Args:
        kind: What was done, for people.
        began: Unix time.
        ended: Unix time; the same for what has no duration.
        pids: The processes it hit; None for all of them.
        skewed: The worker whose clock it set, if it did that. Its processes are hit as long as they have not
            seen the server's time since.
    """

    kind: str
    began: float
    ended: float
    pids: frozenset[int] | None = None
    skewed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message in one worker process.

    Args:
        operation: Whose.
        pid: Of the process.
        worker: Of the process.
        began: Unix time.
        ended: Unix time; infinity if it never ended.
        has_effect: Whether its body had its effect.
        quiet_since: Unix time at which the process last heard of the store before; 0 if never.
    """

    operation: str
    pid: int
    worker: str
    began: float
    ended: float
    has_effect: bool
    quiet_since: float

    def is_hit_by(self, nemesis: Nemesis) -> bool:
        """Whether the nemesis can have changed what came of this delivery."""
        if nemesis.skewed:
            unnoticed = self.quiet_since < nemesis.began + _LEARNING
            return nemesis.skewed == self.worker and nemesis.began <= self.ended and unnoticed
        touched = nemesis.pids is None or self.pid in nemesis.pids
        return touched and nemesis.began <= self.ended and self.began <= nemesis.ended + _LATE_END


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a campaign leaves behind.

    Args:
        promises: By operation, what is promised for its effect.
        rows: The ledger.
        nemeses: What was done.
        drained: By operation, its record when the queue had run empty and all leases were over.
        final: By operation, its record after one further, undisturbed delivery.
    """

    promises: Mapping[str, Promise]
    rows: Sequence[Row]
    nemeses: Sequence[Nemesis]
    drained: Mapping[str, Record]
    final: Mapping[str, Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What became of one operation.

    Args:
        operation: Which.
        promise: What was promised.
        effects: How often its effect happened.
        is_faulted: Whether a nemesis hit one of its deliveries.
        is_unknown: Whether its record says UNKNOWN.
        is_unexplained: Whether it says so although nothing hit it.
        is_stuck: Whether even a clean delivery left it without an outcome.
        broken: The rules it breaks, as sentences; empty is good.
    """

    operation: str
    promise: Promise
    effects: int
    is_faulted: bool = False
    is_unknown: bool = False
    is_unexplained: bool = False
    is_stuck: bool = False
    broken: tuple[str, ...] = ()


def deliveries(rows: Iterable[Row]) -> list[Delivery]:
    """The deliveries in a ledger, oldest first."""
    in_order = sorted(rows, key=lambda row: row.time)
    worker = {row.pid: row.task for row in in_order if row.what == "child"}
    by_pid: dict[int, list[Row]] = defaultdict(list)
    for row in in_order:
        by_pid[row.pid].append(row)
    found = [each for pid, of_one in by_pid.items() for each in _deliveries_in(of_one, worker.get(pid, ""))]
    return sorted(found, key=lambda each: each.began)


def _deliveries_in(rows: Sequence[Row], worker: str) -> Iterator[Delivery]:
    """Those of one process, which executes one after the other."""
    begins = [index for index, row in enumerate(rows) if row.what == "delivery"]
    heard = 0.0
    for index, following in pairwise([*begins, len(rows)]):
        first, within = rows[index], rows[index + 1 : following]
        yield Delivery(
            operation=first.order,
            pid=first.pid,
            worker=worker,
            began=first.time,
            ended=next((row.time for row in within if row.what == "returned"), float("inf")),
            has_effect=any(row.what in {"effect", "recognised"} for row in within),
            quiet_since=heard,
        )
        heard = within[-1].time if within else heard


def judge(evidence: Evidence) -> list[Judgement]:
    """What became of every operation."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in evidence.rows:
        rows[row.order].append(row)
    of: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries(evidence.rows):
        of[delivery.operation].append(delivery)
    return [
        _judged(evidence, operation, promise, rows[operation], of[operation])
        for operation, promise in evidence.promises.items()
    ]


def judge_effects(
    promises: Mapping[str, Promise], rows: Iterable[Row], unknown: Collection[str] = ()
) -> list[Judgement]:
    """What became of every operation, by the ledger alone: for systems that keep no records.

    Args:
        promises: By operation, what is promised for its effect.
        rows: The ledger.
        unknown: Operations that ended UNKNOWN.
    """
    effects: dict[str, int] = defaultdict(int)
    for row in rows:
        effects[row.order] += row.what == "effect"
    return [
        Judgement(
            operation=operation,
            promise=promise,
            effects=effects[operation],
            is_unknown=operation in unknown,
            broken=tuple(_too_few(promise, effects[operation], is_unknown=operation in unknown))
            + tuple(_too_many(promise, effects[operation], excused=effects[operation])),
        )
        for operation, promise in promises.items()
    ]


def recoveries(evidence: Evidence, kills: Iterable[Nemesis], task: str) -> Iterator[float]:
    """Seconds from the kill of a process to the outcome of what it was executing, the new body included."""
    outcomes: dict[str, float] = {}
    for row in evidence.rows:
        if row.what in {"completed", "outcome_unknown"} and row.task == task:
            outcomes[row.order] = min(row.time, outcomes.get(row.order, row.time))
    struck = [(kill.began, pid) for kill in kills for pid in kill.pids or ()]
    cut_off = [each for each in deliveries(evidence.rows) if each.ended == float("inf") and each.operation in outcomes]
    for at, pid in struck:
        for delivery in cut_off:
            # An outcome before the kill means that the delivery was only a duplicate.
            if delivery.pid == pid and delivery.began <= at < outcomes[delivery.operation]:
                yield outcomes[delivery.operation] - at


def _judged(
    evidence: Evidence, operation: str, promise: Promise, rows: Sequence[Row], delivered: Sequence[Delivery]
) -> Judgement:
    effects = sum(row.what == "effect" for row in rows)
    record = evidence.final.get(operation)
    hit = [each for each in delivered if any(each.is_hit_by(nemesis) for nemesis in evidence.nemeses)]
    is_unknown = record is not None and record.status is Status.UNKNOWN
    broken = (
        *_too_few(promise, effects, is_unknown=is_unknown),
        *_too_many(promise, effects, excused=_excused(evidence, delivered)),
        *_without_outcome(evidence, operation),
        *_contradictions(record, rows, may_be_unknown=promise is Promise.AT_MOST_ONCE and bool(hit)),
        *_unknowns(promise, is_unknown=is_unknown, is_hit=bool(hit)),
    )
    return Judgement(
        operation=operation,
        promise=promise,
        effects=effects,
        is_faulted=bool(hit),
        is_unknown=is_unknown,
        is_unexplained=is_unknown and not hit,
        is_stuck=not _is_over(record),
        broken=broken,
    )


def _too_few(promise: Promise, effects: int, *, is_unknown: bool) -> Iterator[str]:
    if not effects and not (promise is Promise.AT_MOST_ONCE and is_unknown):
        yield "its effect never happened"


def _too_many(promise: Promise, effects: int, *, excused: int) -> Iterator[str]:
    if effects > 1 and promise is not Promise.AT_LEAST_ONCE:
        yield f"its effect happened {effects} times"
    if effects > 1 + excused and promise is Promise.AT_LEAST_ONCE:
        yield f"its effect happened {effects} times, and only {excused} of its deliveries were hit"


def _excused(evidence: Evidence, delivered: Sequence[Delivery]) -> int:
    """How many repetitions the nemeses account for: an effect cut off, or a clock that let two bodies overlap."""
    return sum(
        any(each.is_hit_by(nemesis) and (each.has_effect or nemesis.skewed) for nemesis in evidence.nemeses)
        for each in delivered
    )


def _without_outcome(evidence: Evidence, operation: str) -> Iterator[str]:
    if not _is_over(evidence.drained.get(operation)):
        yield "the queue ran empty and it had no outcome"
    if not _is_over(evidence.final.get(operation)):
        yield "a clean delivery did not give it an outcome"


def _is_over(record: Record | None) -> bool:
    return record is not None and record.status in {Status.COMPLETED, Status.FAILED, Status.UNKNOWN}


def _contradictions(record: Record | None, rows: Sequence[Row], *, may_be_unknown: bool) -> Iterator[str]:
    told = {row.reference for row in rows if row.what == "told"}
    kept = {json.loads(record.result)} if record and record.result and record.status is Status.COMPLETED else set()
    if len(told | kept) > 1:
        yield f"its callers were told {sorted(told)}, and the record says {sorted(kept)}"
    if told and not kept:
        yield "a caller was told a success, and the record does not say so"
    failures = {row.reference for row in rows if row.what == "told failure"}
    if may_be_unknown:
        failures -= {"OutcomeUnknown"}  # also where its owner, stopped for a while, has recorded an outcome since
    if failures:
        yield f"its callers were told {sorted(failures)}"


def _unknowns(promise: Promise, *, is_unknown: bool, is_hit: bool) -> Iterator[str]:
    if is_unknown and promise is not Promise.AT_MOST_ONCE:
        yield "it ended UNKNOWN, though it may be repeated"
    if is_unknown and not is_hit:
        yield "it ended UNKNOWN, and nothing had hit it"
