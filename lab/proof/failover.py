"""A primary is lost with writes that it had acknowledged, its replica takes over, and real workers go on throughout.

In every round the replica is stopped and its connection cut, so that what is acknowledged from then on is with the
primary alone, for certain. Then the primary is killed; or is stopped, and comes back as one that does not know; or goes
on beside its successor. Workers execute the tasks of the soak, each operation sent to one side and a while later
to the other. Where a write waits for the replica no promise may break; where it does not, the control, each must.
"""

import itertools
import json
import threading
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Any

from celery import Celery

from celery_idempotent import open_store
from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.protocol.record import Record, Status
from lab.demo.settings import Settings
from lab.embedded import EmbeddedRedis
from lab.embedded.pairs import Pair, PostgresPair, RedisPair
from lab.fleet import Fleet, Timeout, Watch, until
from lab.folders import temporary_folder
from lab.ledger import Row as LedgerRow
from lab.proof.audit import Evidence, Nemesis, judge
from lab.proof.jobs import Progress
from lab.proof.soak import PROMISES, configuration
from lab.proof.table import CONTROL, Row
from lab.proof.verdicts import rows_of

SIDES = ("first", "second")
"""Workers, each with a queue of its own, and with the pair's URL of the same place."""

CHILDREN = 4
RATE, LAG = 6.0, 13
"""Operations per second; so many of them later each is sent once more. The number is odd, so to the other side."""

LEASE = 30  # seconds: longer than an outage, so that nobody is taken over who only waits for the store

ENOUGH, DARK = 24, 5.0
"""So many deliveries are told a result while the replica gets nothing, or seconds go by."""

PATIENCE = 180.0  # seconds until the workers have started, or a message has its answer


class Loss(StrEnum):
    """What becomes of the primary."""

    KILL = "killed"
    STOP = "stopped, comes back"
    SPARE = "not fenced"


PAIRS = (
    ("Valkey", RedisPair, False, Loss.STOP),
    ("Valkey, wait_replicas=1", RedisPair, True, Loss.STOP),
    ("PostgreSQL, asynchronous", PostgresPair, False, Loss.SPARE),
    ("PostgreSQL, synchronous", PostgresPair, True, Loss.SPARE),
)
"""By name: whether a write waits for the replica, and what becomes of the primary that is not killed."""


@dataclass(frozen=True, slots=True)
class Part:
    """A pair of servers whose writes wait for the replica or not, and what becomes of its primary, so many times."""

    name: str
    pair: type[RedisPair | PostgresPair]
    waits: bool
    loss: Loss
    rounds: int


@dataclass(frozen=True, slots=True)
class Failover:
    """What came of it: a row per promise, and figures as the page reads them."""

    rows: Sequence[Row]
    figures: Mapping[str, object]


def plan(*, quick: bool) -> Iterator[Part]:
    """Every pair under every loss, without the wait for the replica and with it."""
    for name, pair, waits, other in PAIRS:
        for loss in (Loss.KILL,) if quick else (Loss.KILL, other):
            yield Part(name, pair, waits, loss, 1 if quick else 6)


def run(parts: Iterable[Part], progress: Progress) -> list[Failover]:
    """Every part, with servers and workers of its own; two at a time, as nearly all of it is waiting."""
    with warnings.catch_warnings(), ThreadPoolExecutor(2) as threads:
        warnings.simplefilter("ignore", IdempotencyWarning)  # that the controls may forget
        return list(threads.map(partial(_run, progress=progress), parts))


def _run(part: Part, progress: Progress) -> Failover:
    with temporary_folder() as folder, EmbeddedRedis() as broker, ExitStack() as stack:
        pair = part.pair(stack, part.waits)
        with closing(open_store(pair.urls[0])) as store:
            store.provision()
        for side, url in zip(SIDES, pair.urls, strict=True):
            settings = Settings(broker_url=broker.url, store_url=url, folder=folder, queue=side, lease=LEASE)
            environ = {"PYTHONWARNINGS": "ignore"} | settings.environ()
            fleet = Fleet("lab.proof.soak", [side], children=CHILDREN, environ=environ, folder=folder)
            stack.enter_context(fleet)
        app = stack.enter_context(closing(Celery("failover", set_as_current=False)))
        app.conf.update(configuration(settings))
        return _Trial(part, pair, app, Watch(fleet), progress).run()


@dataclass
class _Trial:
    """One part while it runs."""

    part: Part
    pair: Pair[Any]
    app: Celery
    watch: Watch
    progress: Progress
    _sent: dict[str, str] = field(default_factory=dict)
    _operations: list[str] = field(default_factory=list)
    _lost: set[str] = field(default_factory=set)
    _losses: list[Nemesis] = field(default_factory=list)

    def run(self) -> Failover:
        until(lambda: len(self._rows("ready")) == len(SIDES), "the workers to start", PATIENCE)
        began = time.monotonic()
        stopped = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            load = thread.submit(self._send_until, stopped)
            try:
                seconds = [self._fail_over(self.part.loss) for _ in range(self.part.rounds)]
            finally:
                stopped.set()
        load.result()
        self._wait_for_answers(self._sent)
        drained = self._records()
        for number, operation in enumerate(self._operations):
            self._send(operation, number)
        self._wait_for_answers(self._sent)
        return self._sum_up(drained, seconds, time.monotonic() - began)

    def _send_until(self, stopped: threading.Event) -> None:
        for number, task in enumerate(itertools.cycle(PROMISES)):
            if stopped.wait(1 / RATE):
                return
            self._operations.append(f"{task}-{number:05}")
            for operation in self._operations[number::-LAG][:2]:
                self._send(operation, number)

    def _send(self, operation: str, place: int) -> None:
        task, number = operation.split("-")
        task_id, arguments = uuid.uuid4().hex, {"operation": operation, "seconds": int(number) % 5 / 5}
        self._sent[task_id] = operation
        self.app.send_task(f"soak.{task}", kwargs=arguments, task_id=task_id, queue=SIDES[place % 2])

    def _fail_over(self, loss: Loss) -> float:
        """One round; seconds from the loss until all that was sent before the promotion has its answer."""
        self._wait_for_results("before")
        began = time.time()
        self.pair.cut_off_replica()
        self._wait_for_results("the replica gets nothing")
        lost_at = time.time()
        if loss is Loss.KILL:
            self.pair.primary.kill()
        elif loss is Loss.STOP:
            self.pair.stop_primary()
        self.pair.promote()
        touched = list(self._sent)
        if isinstance(self.pair, PostgresPair) and loss is Loss.SPARE:
            self.pair.move_second()
            self._wait_for_results("two primaries")
        self.pair.rejoin()
        self._losses.append(Nemesis(kind=loss, began=began, ended=time.time()))
        self._lost |= self._find_lost()
        return self._wait_for_answers(touched) - lost_at

    def _wait_for_results(self, when: str) -> None:
        self.progress(f"{self.part.name}, {self.part.loss}: {when}")
        since = time.time()
        with suppress(Timeout):
            until(lambda: sum(row.time > since for row in self._rows("told")) >= ENOUGH, when, DARK)

    def _wait_for_answers(self, sent: Iterable[str]) -> float:
        """When the last of these messages was; one that never is counts as answered now."""
        wanted = set(sent)
        with suppress(Timeout):
            until(lambda: wanted <= self._answers().keys(), "every answer", PATIENCE)
        answers = self._answers()
        return max(answers.get(each, time.time()) for each in wanted)

    def _answers(self) -> Mapping[str, float]:
        return {row.task_id: row.time for row in reversed(self._rows("told", "told failure"))}

    def _find_lost(self) -> set[str]:
        """Operations of which somebody was told a result that is not on record."""
        told, records = self._results(), self._records()  # in this order: what is told is on record before
        return {each for each, results in told.items() if results - _results_of(records.get(each))}

    def _results(self) -> Mapping[str, set[str]]:
        told: dict[str, set[str]] = defaultdict(set)
        for row in self._rows("told"):
            told[row.order].add(row.reference)
        return told

    def _records(self) -> Mapping[str, Record]:
        with closing(open_store(self.pair.primary.url)) as store:
            return {self._sent[each.task_id]: each for each in store.scan() if each.task_id in self._sent}

    def _rows(self, *what: str) -> list[LedgerRow]:
        self.watch.look()
        return [row for row in self.watch.rows if row.what in what]

    def _sum_up(self, drained: Mapping[str, Record], seconds: Sequence[float], lasted: float) -> Failover:
        verdicts = judge(self._evidence(drained))
        for verdict in verdicts:
            for problem in verdict.problems if self.part.waits else ():
                self.progress(f"BROKEN {verdict.task} ({verdict.promise}): {problem}")
        named: dict[str, Any] = {} if self.part.waits else {"system": CONTROL}
        campaign = f"fail-over, primary {self.part.loss}, {self.part.rounds} times"
        rows = rows_of(verdicts, store=self.part.name, campaign=campaign, seconds=round(lasted, 1), **named)
        figures = {
            "pair": self.part.name,
            "primary": self.part.loss,
            "promotions": len(seconds),
            "operations": len(self._operations),
            "lost": len(self._lost),
            "twice": {row.promise: row.effects_2 for row in rows},
            "different": sum(len(results) > 1 for results in self._results().values()),
            "stuck": sum(row.stuck for row in rows),
            "p50": round(median(seconds), 1),
            "max": round(max(seconds), 1),
            "seconds": [round(each, 2) for each in seconds],
        }
        return Failover(rows, figures)

    def _evidence(self, drained: Mapping[str, Record]) -> Evidence:
        answers = self._answers()
        return Evidence(
            promises={each: PROMISES[each.split("-")[0]] for each in self._operations},
            rows=self.watch.rows,
            nemeses=self._losses,
            drained=drained,
            final=self._records(),
            may_repeat=False,
            unanswered={operation for message, operation in self._sent.items() if message not in answers},
        )


def _results_of(record: Record | None) -> set[str]:
    return {json.loads(record.result)} if record and record.status is Status.COMPLETED and record.result else set()
