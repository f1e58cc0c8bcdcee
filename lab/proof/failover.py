"""A primary is lost with writes that it had acknowledged, its replica takes over, and real workers go on throughout.

In every round the replica is stopped and its connection cut, so that what is acknowledged from then on is with the
primary alone, for certain. Then the primary is killed; or is stopped, and comes back as one that does not know; or goes
on beside its successor. Workers execute the tasks of the soak, each operation published to one side and a while later
to the other. Where a write waits for the replica no promise may break; where it does not, the control, each must.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery

from celery_idempotent import open_store
from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.protocol.record import Record, Status
from lab.demo.queues import queue_length
from lab.demo.settings import Settings
from lab.embedded import EmbeddedRedis
from lab.embedded.pairs import Pair, PostgresPair, RedisPair
from lab.fleet import POLL, Fleet, Timeout, until
from lab.folders import temporary_folder
from lab.ledger import Row as LedgerRow
from lab.ledger import rows_in
from lab.proof.audit import deliveries, verdict_of
from lab.proof.soak import PROMISES, configuration
from lab.proof.table import CONTROL, Row
from lab.proof.verdicts import Seen, Tally, Told

SIDES = ("first", "second")
"""Workers, each with a queue of its own, and with the pair's URL of the same place."""

CHILDREN = 4
RATE, LAG = 6.0, 12
"""Operations per second; so many of them later each is published once more, to the other side."""

LEASE = 30
"""Seconds: longer than an outage, so that nobody is taken over who only waits for the store."""

ENOUGH, DARK = 24, 5.0
"""So many deliveries are told a result while the replica gets nothing, or seconds go by."""

START, PATIENCE = 120.0, 180.0
"""Seconds until the workers have started, and until an operation has its outcome."""

Progress = Callable[[str], None]
"""Told how far it is, in one line."""


class Strike(StrEnum):
    """What becomes of the primary."""

    KILL = "killed"
    STOP = "stopped, comes back"
    SPARE = "not fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A pair of servers, and what becomes of its primary, so many times."""

    name: str
    pair: Callable[[], Pair[Any]]
    strike: Strike
    rounds: int
    is_control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """What came of it: a row per promise, results lost that somebody was told, and seconds until all was well."""

    part: Part
    rows: Sequence[Row]
    lost: int
    different: int
    seconds: Sequence[float]

    def as_json(self) -> dict[str, object]:
        """As the page reads it."""
        return {
            "pair": self.part.name,
            "primary": self.part.strike,
            "promotions": len(self.seconds),
            "operations": sum(row.tasks for row in self.rows),
            "lost": self.lost,
            "twice": {row.promise: row.effects_2 for row in self.rows},
            "different": self.different,
            "stuck": sum(row.stuck for row in self.rows),
            "p50": round(median(self.seconds), 1),
            "max": round(max(self.seconds), 1),
            "seconds": [round(each, 2) for each in self.seconds],
        }


def plan(*, quick: bool) -> Iterator[Part]:
    """Every pair under every strike, without the wait for the replica and with it."""
    rounds = 1 if quick else 10
    for strike in [Strike.KILL] if quick else [Strike.KILL, Strike.STOP]:
        of_valkey = partial(Part, strike=strike, rounds=rounds)
        yield of_valkey(name="Valkey", pair=partial(RedisPair, False), is_control=True)
        yield of_valkey(name="Valkey, wait_replicas=1", pair=partial(RedisPair, True))
    for strike in [Strike.KILL] if quick else [Strike.KILL, Strike.SPARE]:
        of_postgres = partial(Part, strike=strike, rounds=rounds)
        yield of_postgres(name="PostgreSQL, asynchronous", pair=partial(PostgresPair, False), is_control=True)
        yield of_postgres(name="PostgreSQL, synchronous", pair=partial(PostgresPair, True))


def run(parts: Iterable[Part], progress: Progress) -> list[Failover]:
    """Every part, with servers and workers of its own; two at a time, as nearly all of it is waiting."""
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as threads:
        warnings.simplefilter("ignore", IdempotencyWarning)  # that the controls may forget
        return list(threads.map(partial(_run, progress=progress), parts))


def _run(part: Part, progress: Progress) -> Failover:
    with temporary_folder() as folder, EmbeddedRedis() as broker, part.pair() as pair, ExitStack() as stack:
        with closing(open_store(pair.urls[0])) as store:
            store.provision()
        for side, url in zip(SIDES, pair.urls, strict=True):
            settings = Settings(broker_url=broker.url, store_url=url, folder=folder, queue=side, lease=LEASE)
            environ = {"PYTHONWARNINGS": "ignore"} | settings.environ()
            stack.enter_context(Fleet("lab.proof.soak", [side], children=CHILDREN, environ=environ, folder=folder))
        app = stack.enter_context(closing(Celery("failover", set_as_current=False)))
        app.conf.update(configuration(settings))
        return _Trial(part, pair, app, folder, progress).run()


@dataclass
class _Trial:
    """One part while it runs."""

    part: Part
    pair: Pair[Any]
    app: Celery
    folder: Path
    progress: Progress
    _published: list[tuple[str, float]] = field(default_factory=list)
    _lost: set[str] = field(default_factory=set)
    _began: float = field(default_factory=time.time)

    def run(self) -> Failover:
        until(lambda: len(self._rows("ready")) == len(SIDES), "the workers to start", START)
        with self._under_load():
            seconds = [self._fail_over(self.part.strike) for _ in range(self.part.rounds)]
        self._until_quiet()
        for number, (operation, _) in enumerate(self._published):
            self._publish(operation, SIDES[number % 2])
        self._until_quiet()
        return self._judged(seconds)

    @contextmanager
    def _under_load(self) -> Iterator[None]:
        """Operations are published within the block, in a thread."""
        stopped = threading.Event()

        def publish() -> None:
            names = list(PROMISES)
            while not stopped.wait(1 / RATE):
                number = len(self._published)
                self._published.append((f"{names[number % len(names)]}-{number:05}", time.time()))
                self._publish(self._published[number][0], SIDES[number // len(names) % 2])
                if number >= LAG:
                    self._publish(self._published[number - LAG][0], SIDES[(number - LAG) // len(names) % 2 - 1])

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _publish(self, operation: str, side: str) -> None:
        task, number = operation.split("-")
        arguments = {"operation": operation, "seconds": int(number) % 5 / 5}
        self.app.send_task(f"soak.{task}", kwargs=arguments, task_id=uuid.uuid4().hex, queue=side)

    def _fail_over(self, strike: Strike) -> float:
        """One round; seconds from the strike until all that was published before the promotion has its outcome."""
        self._until_told(time.time(), "before")
        self.pair.cut_off_replica()
        self._until_told(time.time(), "the replica has stopped")
        struck = time.time()
        if strike is Strike.KILL:
            self.pair.primary.kill()
        elif strike is Strike.STOP:
            self.pair.stop_primary()
        self.pair.promote()
        promoted = time.time()
        if isinstance(self.pair, PostgresPair) and strike is Strike.SPARE:
            self.pair.move_second()
            self._until_told(time.time(), "two primaries")
        self.pair.rejoin()
        self._lost |= self._forgotten()
        affected = {operation for operation, at in list(self._published) if at < promoted}
        self._show("until all is well")
        with suppress(Timeout):
            until(lambda: affected <= set(self._told()), "every outcome", PATIENCE)
        return max(min(row.time for row in rows) for each, rows in self._told().items() if each in affected) - struck

    def _until_told(self, since: float, when: str) -> None:
        self._show(when)
        with suppress(Timeout):
            until(lambda: sum(row.time > since for row in self._rows("told")) >= ENOUGH, when, DARK)

    def _show(self, what: str) -> None:
        self.progress(f"{self.part.name}, {self.part.strike}: {what}")

    def _forgotten(self) -> set[str]:
        """Operations of which somebody was told a result that is not on record."""
        told, records = self._told(), self._records()  # in this order: what is told is on record before
        return {each for each, rows in told.items() if _results_in(rows) - _results_of(records.get(each))}

    def _until_quiet(self) -> None:
        with suppress(Timeout):
            until(self._is_quiet, "the end of all deliveries", PATIENCE)

    def _is_quiet(self) -> bool:
        broker = self.app.conf.broker_url
        for _ in range(5):  # a message on its way from Redis into a worker is in nobody's books
            if any(queue_length(broker, side) for side in SIDES):
                return False
            time.sleep(POLL)
        return all(each.ended < float("inf") for each in deliveries(rows_in(self.folder)))

    def _records(self) -> Mapping[str, Record]:
        operation = {row.key: row.order for row in rows_in(self.folder) if row.key}
        with closing(open_store(self.pair.primary.url)) as store:
            return {operation[record.key]: record for record in store.scan() if record.key in operation}

    def _judged(self, seconds: Sequence[float]) -> Failover:
        records, told = self._records(), self._told()
        effects, different, tally = Counter(row.order for row in self._rows("effect")), 0, Tally()
        for operation, _ in self._published:
            record, promise = records.get(operation), PROMISES[operation.split("-")[0]]
            results = _results_in(told[operation]) | _results_of(record)
            answers, status = [Told("finished", each) for each in results], record.status if record else None
            seen = Seen(promise=promise, effects=effects[operation], told=answers, status=status, excused=0)
            verdict = verdict_of(operation, seen, 1)
            tally.add(verdict)
            different += len(results) > 1
            if not self.part.is_control:
                for problem in verdict.problems:
                    self.progress(f"BROKEN {operation} ({promise.name}): {problem}")
        named: dict[str, Any] = {"system": CONTROL} if self.part.is_control else {}
        what = f"fail-over, primary {self.part.strike}, {self.part.rounds} times"
        rows = tally.rows(store=self.part.name, campaign=what, seconds=round(time.time() - self._began, 1), **named)
        return Failover(part=self.part, rows=rows, lost=len(self._lost), different=different, seconds=seconds)

    def _told(self) -> dict[str, list[LedgerRow]]:
        told: dict[str, list[LedgerRow]] = defaultdict(list)
        for row in (*self._rows("told"), *self._rows("told failure")):
            told[row.order].append(row)
        return told

    def _rows(self, what: str) -> list[LedgerRow]:
        return [row for row in rows_in(self.folder) if row.what == what]


def _results_in(rows: Iterable[LedgerRow]) -> set[str]:
    return {row.reference for row in rows if row.what == "told"}


def _results_of(record: Record | None) -> set[str]:
    return {json.loads(record.result)} if record and record.status is Status.COMPLETED and record.result else set()
