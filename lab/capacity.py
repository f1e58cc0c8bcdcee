"""What a load asks of a store, without one: a simulation of deliveries under the library's own decisions.

`python -m lab.capacity`, or `make capacity`.

Events follow one another in simulated time. Every decision is the library's own (``decide``, ``settle``,
``conflict_delay_ms``, ``outage_delay_ms``, the circuit breaker); only the world around it is simulated: a queue,
processes that take messages in order, a store that compares and swaps, answers late, or not at all. The same seed gives
the same figures. What real machines add, such as CPU time that runs out, is not in it: docs/explanation/capacity.md
holds its figures against a real run.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, assert_never

from celery_idempotent import Policy, Record, Status
from celery_idempotent.protocol import circuit as circuits
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import (
    GiveUp,
    Mismatch,
    Operation,
    Replay,
    ReplayFailure,
    Run,
    Superseded,
    Unknown,
    Wait,
    Written,
    decide,
    ended,
    renewed,
    settle,
)
from celery_idempotent.stores.dynamodb.items import ATTRIBUTES

__all__ = ["DOLLARS_PER_UNIT", "LOADS", "Load", "Report", "simulate"]

DOLLARS_PER_UNIT = 0.625e-6
"""DynamoDB, on demand, US East (N. Virginia), a write request unit; explanation/capacity.md says where it was read."""

_EPOCH = 1_800_000_000_000
"""Milliseconds; when a simulation begins on the store's clock."""

_LONGEST_DELAY = 900_000
"""As of the library; on Redis with held messages and on SQS with a long visibility timeout there is no other bound."""

_TRIES = 2
"""Requests of a claim that gets no answer: it asks once more, as a reply may have been lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What comes, and what it meets; times are milliseconds.

    Args:
        name: For people.
        arrivals: When each message comes, and of which operation.
        body: How long a body runs.
        policy: Of the task.
        processes: How many there are, each with one delivery at a time.
        outages: From when until when the store gives no answer.
        request: How long a request takes.
        timeout: How long one takes that gets no answer.
        overhead: What a process needs for a delivery besides, such as to publish it again.
    """

    name: str
    arrivals: Sequence[tuple[int, int]]
    body: int
    policy: Policy = field(default_factory=lambda: Policy("operation"))
    processes: int = 8
    outages: Sequence[tuple[int, int]] = ()
    request: int = 2
    timeout: int = 2000
    overhead: int = 5


@dataclass(slots=True)
class Message:
    """A message, and what its headers count."""

    operation: int
    arrived: int
    conflicts: int = 0
    outages: int = 0


@dataclass(slots=True)
class Process:
    """A pool process and its circuit breaker."""

    circuit: circuits.Circuit = circuits.CLOSED


@dataclass(slots=True)
class Attempt:
    """A body that runs: whose it is, and the record that it wrote last."""

    process: Process
    message: Message
    record: Record
    has_ended: bool = False


@dataclass(slots=True)
class Report:
    """What came of a load; counted while it is simulated.

    Args:
        load: Of which.
        requests: When each reached for the store.
        by_kind: How many were claims, renewals and ends, and how many of these had no answer.
        units: DynamoDB's write units of those that were answered.
        waits: From the arrival of each message to its answer.
        questions: How often each message asked or was held back, the last time included.
        bodies: How often each operation's body ran.
        completed: How often each operation's end was written.
        held_back: Claims that the circuit breaker did not send.
    """

    load: Load
    requests: list[int] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)
    units: int = 0
    waits: list[int] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    bodies: Counter[int] = field(default_factory=Counter)
    completed: Counter[int] = field(default_factory=Counter)
    held_back: int = 0

    @property
    def peak(self) -> int:
        """Requests in the busiest second."""
        return max(Counter(each // 1000 for each in self.requests).values())

    @property
    def mean(self) -> float:
        """Requests per second, from the first to the last."""
        return len(self.requests) * 1000 / max(1000, self.requests[-1] - self.requests[0])

    def between(self, begin: int, end: int) -> float:
        """Requests per second from ``begin`` to ``end``."""
        return sum(begin <= each < end for each in self.requests) * 1000 / (end - begin)

    def waited(self, share: float) -> float:
        """The seconds in which that share of messages was answered."""
        return sorted(self.waits)[max(0, math.ceil(share * len(self.waits)) - 1)] / 1000

    @property
    def dollars(self) -> float:
        """On DynamoDB, on demand, for a million messages of this kind."""
        return self.units * DOLLARS_PER_UNIT * 1e6 / len(self.waits)


class _World:
    """One simulation."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.now = 0
        self._rng = random.Random(seed)
        self._numbers = count(1)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._ready: deque[Message] = deque()
        self._free = deque(Process() for _ in range(load.processes))
        self._records: dict[str, Record] = {}
        self._report = Report(load)

    def run(self) -> Report:
        for at, operation in self.load.arrivals:
            self._at(at, self._deliver, Message(operation, at))
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self._report

    def _at(self, when: int, action: Callable[..., None], *args: Any) -> None:
        event: tuple[int, int, Callable[[], None]] = (when, next(self._numbers), partial(action, *args))
        heapq.heappush(self._events, event)

    def _after(self, delay: int, action: Callable[..., None], *args: Any) -> None:
        self._at(self.now + delay, action, *args)

    def _nonce(self) -> str:
        return f"{next(self._numbers):032x}"

    # The broker and the pool

    def _deliver(self, message: Message) -> None:
        self._ready.append(message)
        self._begin()

    def _begin(self) -> None:
        while self._ready and self._free:
            self._after(self.load.request, self._claim, self._free.popleft(), self._ready.popleft())

    def _done(self, process: Process, message: Message) -> None:
        self._report.waits.append(self.now - message.arrived)
        self._report.questions.append(message.conflicts + message.outages + 1)
        self._leave(process)

    def _postpone(self, process: Process, message: Message, delay: int) -> None:
        self._after(delay, self._deliver, message)
        self._leave(process)

    def _leave(self, process: Process) -> None:
        self._after(self.load.overhead, self._rest, process)

    def _rest(self, process: Process) -> None:
        self._free.append(process)
        self._begin()

    # The store

    @property
    def _is_down(self) -> bool:
        return any(begin <= self.now < end for begin, end in self.load.outages)

    def _asked(self, kind: str) -> None:
        self._report.requests.append(self.now)
        self._report.by_kind[kind] += 1

    def _swap(self, kind: str, new: Record, expected: str | None) -> Record | None:
        self._asked(kind)
        stored = self._records.get(new.key)
        wins = (stored.revision if stored else None) == expected
        sizes = [units_of(each) for each in (stored, new if wins else None) if each]
        self._report.units += max(sizes, default=1)  # a condition that fails costs what is stored, or one unit
        if wins:
            self._records[new.key] = new
        return new if wins else stored

    # A delivery

    def _claim(self, process: Process, message: Message) -> None:
        process.circuit, is_sent = circuits.admitted(process.circuit, self.now / 1000)
        if not is_sent:
            self._report.held_back += 1
            self._outage(process, message)
        elif self._is_down:
            is_trial = isinstance(process.circuit, circuits.Open)
            for _ in range(_TRIES):
                self._asked("unanswered claim")
            self._after(_TRIES * self.load.timeout, self._unanswered, process, message, is_trial)
        else:
            process.circuit = circuits.CLOSED
            self._ask(process, message, None, self._nonce())

    def _unanswered(self, process: Process, message: Message, is_trial: bool) -> None:
        draw = self._rng.random()
        process.circuit = circuits.failed(
            process.circuit, self.now / 1000, str(message.operation), is_trial=is_trial, draw=draw
        )
        self._outage(process, message)

    def _outage(self, process: Process, message: Message) -> None:
        delay = self.load.policy.outage_delay_ms(message.outages, bounds=(_LONGEST_DELAY,), draw=self._rng.random())
        message.outages += 1
        self._postpone(process, message, delay)

    def _ask(self, process: Process, message: Message, seen: Record | None, owner: str) -> None:
        policy, now = self.load.policy, _EPOCH + self.now
        key = f"operation:1:{message.operation:064x}"
        operation = Operation(
            identity=Identity(key, "f" * 64), policy=policy, task="operation", task_id="1" * 36, worker="worker@host"
        )
        decision = decide(seen, operation, now, owner=owner, revision=self._nonce())
        match decision:
            case Run(record, expected) | GiveUp(record, expected):
                stored = self._swap("claim again" if seen else "claim", record, expected)
                if isinstance(decision, Run) and stored is record:
                    self._run(Attempt(process, message, record))
                elif seen is None:  # the refusal has brought the record
                    self._ask(process, message, stored, owner)
                else:
                    self._after(self.load.request, self._ask, process, message, stored, owner)
            case Replay() | ReplayFailure() | Unknown() | Mismatch():
                self._done(process, message)
            case Wait(_, retry_after, running_for):
                delay = policy.conflict_delay_ms(
                    message.conflicts, running_for, retry_after, bounds=(_LONGEST_DELAY,), draw=self._rng.random()
                )
                message.conflicts += 1
                self._postpone(process, message, delay)
            case unreachable:
                assert_never(unreachable)

    def _run(self, attempt: Attempt) -> None:
        self._report.bodies[attempt.message.operation] += 1
        self._after(self.load.body, self._end, attempt)
        self._after(self.load.policy.lease_ms // 3, self._renew, attempt)

    def _renew(self, attempt: Attempt) -> None:
        if attempt.has_ended:
            return
        if self._is_down:
            self._asked("unanswered renewal")
        else:
            lease, now = self.load.policy.lease_ms, _EPOCH + self.now
            new = renewed(attempt.record, now, lease, self._nonce())
            if self._swap("renewal", new, attempt.record.revision) is not new:
                return  # its lease is lost; the end finds out
            attempt.record = new
        self._after(self.load.policy.lease_ms // 3, self._renew, attempt)

    def _end(self, attempt: Attempt) -> None:
        if self._is_down:
            self._asked("unanswered end")
            self._after(self.load.timeout, self._end, attempt)
            return
        attempt.has_ended = True
        message, now = attempt.message, _EPOCH + self.now
        outcome = Encoded("null", "application/json")
        new = ended(attempt.record, Status.COMPLETED, now, self.load.policy.retain_ms, self._nonce(), outcome)
        settled = settle(new, self._swap("end", new, attempt.record.revision))
        if isinstance(settled, Written):
            self._report.completed[message.operation] += 1
        if isinstance(settled, Written | Superseded):
            self._done(attempt.process, message)
        else:
            self._outage(attempt.process, message)


def simulate(load: Load, seed: int) -> Report:
    """What comes of ``load``; the same for the same seed."""
    return _World(load, seed).run()


def units_of(record: Record) -> int:
    """DynamoDB's write units of a record: one for each KiB that its names and values begin."""
    named = ((ATTRIBUTES.get(name, "idempotencyKey"), str(value)) for name, value in record.to_fields().items())
    return math.ceil(sum(len(name.encode()) + len(value.encode()) for name, value in named) / 1024)


def plain(seed: int) -> Load:
    """New keys, every tenth delivered twice."""
    rng = random.Random(seed)
    first = [(rng.randrange(100_000), number) for number in range(10_000)]
    again = [(at + 1000, number) for at, number in first if number % 10 == 0]
    return Load(name="new keys, a tenth delivered twice", arrivals=first + again, body=20, processes=32)


def hot_keys(seed: int) -> Load:
    """Few keys get most of the messages: the number of messages of a key falls as its rank grows."""
    rng = random.Random(seed)
    ranks = [1 / (rank + 1) for rank in range(1000)]
    arrivals = [(rng.randrange(60_000), key) for key in rng.choices(range(1000), ranks, k=10_000)]
    return Load(name="hot keys: 10,000 messages of 1,000", arrivals=arrivals, body=500, processes=32)


def storm(seed: int, *, duplicates: int = 1000, body: int = 120_000, **options: float) -> Load:
    """Duplicates of one running body, all at once; ``options`` are the policy's."""
    rng = random.Random(seed)
    arrivals = [(0, 0), *((rng.randrange(1000, 3000), 0) for _ in range(duplicates))]
    policy = Policy("operation", **options)  # type: ignore[arg-type]  # durations
    return Load(name=f"storm: {duplicates:,} duplicates of one body", arrivals=arrivals, body=body, policy=policy)


def outage(seed: int) -> Load:
    """The store gives no answer for a minute, while messages go on coming."""
    rng = random.Random(seed)
    arrivals = [(rng.randrange(120_000), number) for number in range(6000)]
    down = [(20_000, 80_000)]
    return Load(name="the store is away for 60 s", arrivals=arrivals, body=50, processes=16, outages=down)


LOADS: Sequence[Callable[[int], Load]] = (plain, hot_keys, storm, outage)


def main() -> None:
    """Print what comes of each load."""
    parser = argparse.ArgumentParser(prog="make capacity", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    for make in LOADS:
        sys.stdout.write(told(simulate(make(seed), seed)) + "\n")


def told(report: Report) -> str:
    """A report for people."""
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(report.by_kind.items()))
    waits = ", ".join(f"p{share:.0%} {report.waited(share):.2f} s".replace("%", "") for share in (0.5, 0.95, 0.99, 1))
    questions = sum(report.questions) / len(report.questions)
    return (
        f"{report.load.name}\n"
        f"  operations {len(report.completed):,}, messages {len(report.waits):,}, bodies {report.bodies.total():,}\n"
        f"  requests {len(report.requests):,} ({kinds}); per second: mean {report.mean:.1f}, peak {report.peak}\n"
        f"  deliveries per message {questions:.2f}, claims held back {report.held_back:,}\n"
        f"  answered after: {waits}\n"
        f"  DynamoDB: {report.units:,} write units; ${report.dollars:,.2f} on demand for a million such messages\n"
    )


if __name__ == "__main__":
    main()
