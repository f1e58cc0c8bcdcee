"""What the evidence of real workers proves: ledger, records and nemeses in, a verdict per operation out. Pure.

The ledger says what really happened, the records what the library believes, the nemeses what was done to it. Besides
the rules of every audit (:func:`lab.proof.verdicts.breaches`):

- every operation has an outcome once the queue is empty, and still one after a further clean delivery;
- the success that callers were told is what the record says;
- every message is answered;
- an effect is repeated, and an operation ends UNKNOWN, only where a nemesis hit one of its deliveries.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from celery_idempotent.protocol.record import Record, Status
from lab.ledger import Row
from lab.proof.verdicts import FINAL, Promise, Seen, Told, Verdict, breaches

_LATE_END = 2.0  # seconds by which a nemesis may end late on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Nemesis:
    """One thing done to the workers with these pids, or to all, between two moments of Unix time."""

    kind: str
    began: float
    ended: float
    pids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One message in one worker process; it ends at infinity if it never ended."""

    operation: str
    pid: int
    began: float
    ended: float
    has_effect: bool

    def is_hit_by(self, nemesis: Nemesis) -> bool:
        """Whether the nemesis can have changed what came of this delivery."""
        touched = nemesis.pids is None or self.pid in nemesis.pids
        return touched and nemesis.began <= self.ended and self.began <= nemesis.ended + _LATE_END


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a campaign leaves behind; records by operation, when the queue was empty and after one more delivery.

    Where nemeses strike stores alone, no effect ``may_repeat``. An operation is ``unanswered`` if a message of it is.
    """

    promises: Mapping[str, Promise]
    rows: Sequence[Row]
    nemeses: Sequence[Nemesis]
    drained: Mapping[str, Record]
    final: Mapping[str, Record]
    may_repeat: bool = True
    unanswered: Collection[str] = ()


def deliveries(rows: Iterable[Row]) -> list[Delivery]:
    """The deliveries in a ledger, oldest first."""
    by_pid: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.time):
        by_pid[row.pid].append(row)
    return sorted((each for of_one in by_pid.values() for each in _deliveries_in(of_one)), key=lambda each: each.began)


def _deliveries_in(rows: Sequence[Row]) -> Iterator[Delivery]:
    """Those of one process, which executes one after the other."""
    begins = [index for index, row in enumerate(rows) if row.what == "delivery"]
    for index, following in pairwise([*begins, len(rows)]):
        first, within = rows[index], rows[index + 1 : following]
        yield Delivery(
            operation=first.order,
            pid=first.pid,
            began=first.time,
            ended=next((row.time for row in within if row.what == "returned"), float("inf")),
            has_effect=any(row.what in {"effect", "recognised"} for row in within),
        )


def judge(evidence: Evidence) -> list[Verdict]:
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in evidence.rows:
        rows[row.order].append(row)
    delivered: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in deliveries(evidence.rows):
        delivered[delivery.operation].append(delivery)
    return [
        _judge_operation(evidence, operation, promise, rows[operation], delivered[operation])
        for operation, promise in evidence.promises.items()
    ]


def judge_effects(promises: Mapping[str, Promise], rows: Iterable[Row], unknown: Collection[str] = ()) -> list[Verdict]:
    """What became of every operation, by the ledger alone: for systems that keep no records."""
    effects: dict[str, int] = defaultdict(int)
    for row in rows:
        effects[row.order] += row.what == "effect"
    ends = {operation: Status.UNKNOWN if operation in unknown else Status.COMPLETED for operation in promises}
    return [
        verdict_of(operation, Seen(promise=promise, effects=effects[operation], status=ends[operation]))
        for operation, promise in promises.items()
    ]


def verdict_of(operation: str, seen: Seen, hit: int = 0, *problems: str) -> Verdict:
    """Of one operation, so many of whose deliveries were hit by a nemesis; ``problems`` are further ones."""
    return Verdict(
        task=operation,
        promise=seen.promise.name,
        faults={"hit": hit},
        effects=seen.effects,
        unknown=seen.unknown,
        unexplained=seen.unknown and not hit,
        stuck=seen.status not in FINAL,
        problems=(*breaches(seen), *problems),
    )


def _judge_operation(
    evidence: Evidence, operation: str, promise: Promise, rows: Sequence[Row], delivered: Sequence[Delivery]
) -> Verdict:
    record, drained = evidence.final.get(operation), evidence.drained.get(operation)
    hit = [each for each in delivered if any(map(each.is_hit_by, evidence.nemeses))]
    told = [Told("finished", row.reference) for row in rows if row.what == "told"]
    is_completed = record is not None and record.status is Status.COMPLETED
    kept = [Told("finished", json.loads(record.result))] if record and is_completed and record.result else []
    seen = Seen(
        promise=promise,
        effects=sum(row.what == "effect" for row in rows),
        told=[*told, *kept],
        status=record.status if record else None,
        excused=sum(each.has_effect for each in hit) if evidence.may_repeat else 0,
        may_be_unknown=bool(hit),
    )
    failures = {row.reference for row in rows if row.what == "told failure"}
    if promise.doubtful and hit:
        failures -= {"OutcomeUnknown"}  # also where its owner, stopped for a while, has recorded an outcome since
    contradictions = {
        "a message got no answer": operation in evidence.unanswered,
        "the queue ran empty and it had no outcome": drained is None or drained.status not in FINAL,
        "a caller was told a success, and the record does not say so": told and not kept and not seen.unknown,
        f"its callers were told {sorted(failures)}": failures,
    }
    verdict = verdict_of(operation, seen, len(hit), *(each for each, is_so in contradictions.items() if is_so))
    return replace(verdict, stuck=verdict.stuck or operation in evidence.unanswered)
