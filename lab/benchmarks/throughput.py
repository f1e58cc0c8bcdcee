"""How many empty tasks a real worker on SQS finishes per second, with the library on DynamoDB and without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from celery_idempotent.stores import open_store
from lab.benchmarks.environment import Servers
from lab.benchmarks.report import Grid, Section, ratio
from lab.benchmarks.stats import ratios, spread
from lab.benchmarks.worker_app import Kind, Setup
from lab.benchmarks.workers import CONCURRENCY, Worker, sample, standing_by

__all__ = ["measure"]

_TASKS = 200
_TABLE = "benchmark-throughput"


def measure(servers: Servers, rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``rounds`` pairs of rounds, calling ``progress`` after each pair."""
    store = servers.store_url(_TABLE)
    open_store(store).provision()
    setups = {
        Kind.PLAIN: Setup(Kind.PLAIN, servers.sqs_broker),
        Kind.IDEMPOTENT: Setup(Kind.IDEMPOTENT, servers.sqs_broker, store),
    }
    with standing_by({str(kind): setup for kind, setup in setups.items()}) as workers:
        rates = sample(workers, _executed_per_second, rounds, progress)
    plain, ours = rates[Kind.PLAIN], rates[Kind.IDEMPOTENT]
    kept = ratios(ours, plain)
    added_ms = spread([1000 / our - 1000 / other for our, other in zip(ours, plain, strict=True)])
    columns = ("Broker", "plain Task, tasks/s", "IdempotentTask, tasks/s", "ratio per pair", "added per task, ms")
    row = ("SQS", *(f"{spread(each).median:.0f}" for each in (plain, ours)), ratio(kept), f"{added_ms.median:.2f}")
    return Section(
        "4. Throughput of a real worker on AWS",
        f"`celery worker` with prefork and {CONCURRENCY} processes, default prefetch, late acknowledgement, the "
        f"store in DynamoDB; SQS is embedded and polled without pause. {rounds} pairs of rounds of {_TASKS} tasks "
        "after one to warm up, in random order: the worker is stopped while its queue is filled, and the rate is "
        "taken between the first and the last task that end. The task is empty, so this is the worst case. Worker, "
        "broker and DynamoDB share this machine's cores: with a server elsewhere the ratio is another one.",
        [Grid("Empty tasks per second, medians", columns, [row])],
        data={
            "plain_per_s": asdict(spread(plain)),
            "idempotent_per_s": asdict(spread(ours)),
            "ratio": asdict(kept),
            "added_ms_per_task": asdict(added_ms),
        },
    )


def _executed_per_second(worker: Worker) -> float:
    worker.publish(_TASKS)
    return worker.execute().per_second
