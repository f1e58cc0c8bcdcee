"""A thousand duplicates of one running body: how often they ask the store, and when they are answered.

Real workers and a real broker; requests are counted on the wire between the worker and the store. A duplicate asks
when it is delivered. Meanwhile it waits in the broker (SQS) or in the worker's memory (Redis).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from celery_idempotent import Policy, open_store
from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.testing.stores import Fault
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import Settings
from lab.embedded import EmbeddedAws, EmbeddedRedis
from lab.fleet import Fleet, until
from lab.folders import temporary_folder
from lab.proof.recovery import Place
from lab.proof.storm_app import POLICY, make_app
from lab.proxy import Proxy

__all__ = ["BROKERS", "CONTROL", "LEASES", "MOST", "WINDOW", "Storm", "run", "steady"]

WORKERS = 4
CHILDREN = 2
"""Of each worker. One worker alone takes no more messages than its one process that fetches them can."""

CONTROL: Mapping[str, Any] = {"lease": 1, "grows": False}
"""Options of a policy whose delays do not grow: the requests that the worker and the servers are able to make."""

LEASES = (1, 60)
MOST = 60
"""Requests per second that a storm stays under in steady state."""

WINDOW = 10
"""Seconds over which requests are counted."""

_SLACK = 0.5
"""Questions. How often a duplicate asks depends on when it came, and on what it drew."""

_PATIENCE = 300.0

_IN_MEMORY = ("--appendonly", "no", "--save", "")
"""Options of a Redis: a disk that is slow would bound the requests."""

Progress = Callable[[str], None]
"""Told how far it is, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """What came of one storm; times are Unix time.

    Args:
        broker: On which broker, and with which store.
        lease: Seconds.
        is_control: Whether delays did not grow, as in :data:`CONTROL`.
        began: When the body began.
        ended: When it ended.
        asked: When each request reached the store.
        questions: How often each duplicate asked, the last time included, when it was told.
        told: When each duplicate was told the result.
        runs: How many bodies there were.
    """

    broker: str
    lease: float
    is_control: bool = False
    began: float
    ended: float
    asked: Sequence[float]
    questions: Sequence[int]
    told: Sequence[float]
    runs: int

    @property
    def per_second(self) -> list[float]:
        """Requests per second while the body ran, in windows of :data:`WINDOW` from its begin; whole windows only."""
        windows = int((self.ended - self.began) // WINDOW)
        counted = Counter(int((each - self.began) // WINDOW) for each in self.asked if each >= self.began)
        return [counted[window] / WINDOW for window in range(windows)]

    @property
    def steady(self) -> float:
        """Requests per second in the last third."""
        return steady(self.per_second)

    @property
    def late(self) -> list[float]:
        """Seconds from the body's end to each answer, in order."""
        return sorted(each - self.ended for each in self.told)

    @property
    def bound(self) -> float:
        """How often a duplicate may ask: twice, and once for every doubling of the time for which the body runs."""
        return 2 + math.log2((self.ended - self.began) * 1000 / Policy().backoff_ms)

    def broken(self) -> Iterator[str]:
        """What it breaks, as sentences."""
        if self.runs != 1:
            yield f"the body ran {self.runs} times"
        if self.steady >= MOST:
            yield f"{self.steady:.1f} requests per second in steady state"
        if fmean(self.questions) > self.bound + _SLACK:
            yield f"{fmean(self.questions):.1f} questions per duplicate"

    def as_json(self) -> dict[str, Any]:
        """As the page reads it."""
        late = self.late
        return {
            "broker": self.broker,
            "lease": self.lease,
            "control": self.is_control,
            "duplicates": len(self.told),
            "body": round(self.ended - self.began, 1),
            "runs": self.runs,
            "per second": [round(each, 1) for each in self.per_second],
            "questions": {"mean": round(fmean(self.questions), 2), "max": max(self.questions)},
            "bound": round(self.bound, 2),
            "late": {
                "p50": round(median(late), 1),
                "p95": round(late[math.ceil(0.95 * len(late)) - 1], 1),
                "max": round(late[-1], 1),
            },
        }


def steady(rates: Sequence[float]) -> float:
    """The mean of the last third of them: once everybody has asked as often as it may early on."""
    return fmean(rates[-math.ceil(len(rates) / 3) :])


def run(
    progress: Progress,
    *,
    duplicates: int = 1000,
    body: float = 120,
    leases: Sequence[float] = LEASES,
    brokers: Sequence[str] = ("redis", "sqs"),
) -> list[Storm]:
    """On each broker a storm for each lease, and on the first one under :data:`CONTROL`.

    Args:
        progress: Told how far it is.
        duplicates: How many messages there are besides the one whose body runs.
        body: Seconds that it runs.
        leases: Of the policy.
        brokers: Which of :data:`BROKERS`.

    Raises:
        Timeout: The worker did not start, or a duplicate was never answered.
    """
    ours: list[Mapping[str, Any]] = [{"lease": lease} for lease in leases]
    policies = {broker: [*ours, CONTROL] if broker == brokers[0] else ours for broker in brokers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdempotencyWarning)  # leases are longer than that timeout
        return [each for broker in brokers for each in _on_broker(broker, policies[broker], duplicates, body, progress)]


@contextlib.contextmanager
def _redis() -> Iterator[Place]:
    with EmbeddedRedis(options=_IN_MEMORY) as queues, EmbeddedRedis(options=_IN_MEMORY) as records:
        yield Place("Redis", queues.url, records.url, records.port)


@contextlib.contextmanager
def _sqs() -> Iterator[Place]:
    with EmbeddedAws() as queues, EmbeddedAws() as records:
        yield Place("SQS", queues.broker_url, records.store_url("storm"), records.port)


BROKERS: Mapping[str, Callable[[], contextlib.AbstractContextManager[Place]]] = {"redis": _redis, "sqs": _sqs}
"""By name: Redis (Valkey), and SQS with DynamoDB (MiniStack); the broker and the store are servers of their own."""


def _on_broker(
    broker: str, policies: Sequence[Mapping[str, Any]], duplicates: int, body: float, progress: Progress
) -> Iterator[Storm]:
    with BROKERS[broker]() as place, temporary_folder() as folder:
        with contextlib.closing(open_store(place.store_url)) as store:
            store.provision()
        for number, options in enumerate(policies):
            own = folder / f"{number}"
            own.mkdir()
            progress(f"{place.label}, {options}")
            yield _storm(place, own, options, duplicates, body)


class _Meter(Proxy):
    """When each request began on its way to the store."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.asked: list[float] = []

    def decide(self, request: bytes, before: bytes) -> Fault:
        """See :meth:`lab.proxy.Proxy.decide`: everything goes through."""
        if not before:
            self.asked.append(time.time())
        return "none"


def _storm(place: Place, folder: Path, options: Mapping[str, Any], duplicates: int, body: float) -> Storm:
    operation = queue = f"storm-{folder.name}"
    found = _Rows(Ledger(folder / "ledger.jsonl"))
    with _Meter(place.store_port) as meter, contextlib.ExitStack() as stack:
        settings = Settings(
            broker_url=place.broker_url, store_url=meter.on_the_way_to(place.store_url), folder=folder, queue=queue
        )
        environ = {**settings.environ(), POLICY: json.dumps(options), "PYTHONWARNINGS": "ignore"}
        names = [f"{queue}-{number}" for number in range(WORKERS)]
        fleet = Fleet("lab.proof.storm_app", names, children=CHILDREN, environ=environ, folder=folder)
        stack.enter_context(fleet)
        task = stack.enter_context(contextlib.closing(make_app(settings, options))).tasks["execute"]
        _until(lambda: len(found.of("ready")) == WORKERS, "the workers")
        first = task.apply_async(kwargs={"operation": operation, "seconds": body}).id
        _until(lambda: bool(found.of("run")), "the body to begin")
        for _ in range(duplicates):
            task.apply_async(kwargs={"operation": operation, "seconds": body})
        _until(lambda: len({row.task_id for row in found.of("told")} - {first}) == duplicates, "the answers")
        asked = list(meter.asked)
    conflicts = Counter(row.task_id for row in found.of("conflicted"))
    told = {row.task_id: row.time for row in found.of("told") if row.task_id != first}
    return Storm(
        broker=place.label,
        lease=options["lease"],
        is_control=options is CONTROL,
        began=found.of("run")[0].time,
        ended=found.of("ended")[0].time,
        asked=asked,
        questions=[conflicts[task_id] + 1 for task_id in told],
        told=list(told.values()),
        runs=len(found.of("run")),
    )


class _Rows:
    """The rows of a ledger by what they say; each is read once, as the proxy shares this process."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._position = 0
        self._found: dict[str, list[Row]] = defaultdict(list)

    def of(self, what: str) -> list[Row]:
        """Those that say so, in order."""
        new, self._position = self._ledger.since(self._position)
        for row in new:
            self._found[row.what].append(row)
        return self._found[what]


def _until(condition: Callable[[], bool], what: str) -> None:
    until(condition, what, _PATIENCE)
