"""What the library adds to the memory of a pool process, by store. Run by itself, it is the worker that is weighed."""

import gc
import subprocess
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import psutil
from celery import Celery

from lab import tether
from lab.benchmarks.report import Goal, Grid, Section
from lab.embedded import EmbeddedPostgres, EmbeddedRedis

if TYPE_CHECKING:
    from lab.benchmarks.environment import Servers  # which brings boto3

_MOST = {"Redis": 2, "PostgreSQL": 12, "DynamoDB": 10}  # MB that the library wants to add at most


def measure(servers: "Servers", tasks: int) -> Section:
    from celery_idempotent.stores import open_store  # a plain worker imports nothing of the library

    with EmbeddedRedis() as redis, EmbeddedPostgres() as postgres:
        urls = {"Redis": redis.url, "PostgreSQL": postgres.url, "DynamoDB": servers.store_url("memory")}
        for url in urls.values():
            open_store(url).provision()
        held = {"plain Celery": _megabytes(tasks, redis.url)}
        held |= {name: _megabytes(tasks, redis.url, url) for name, url in urls.items()}
    added = {name: each - held["plain Celery"] for name, each in held.items()}
    rows = [(each, f"{held[each]:.1f}", f"{added[each]:.1f}") for each in held]
    return Section(
        "10. Memory of a pool process",
        f"USS in the body of the last of {tasks} tasks, of the one process of a worker whose broker is Redis, after a "
        "garbage collection: sooner or later every process has one, and then a copy of what it shared.",
        [Grid("Unique memory", ("", "MB", "added"), rows)],
        [Goal.at_most(f"{name}, added", most, added[name], " MB", digits=1) for name, most in _MOST.items()],
    )


def _megabytes(tasks: int, broker: str, *store: str) -> float:
    worker = tether.start("lab.benchmarks.memory", broker, *store, log=subprocess.PIPE)
    lines: Any = worker.stdout
    try:
        with Celery(broker=broker, set_as_current=False) as app, lines:
            for _ in range(tasks):
                app.send_task("weigh", (time.time_ns(),))
            *_, last = islice((int(line) for line in lines if line.strip().isdigit()), tasks)
            return last / 2**20
    finally:
        tether.stop(worker)


def _work(broker: str, store: str = "") -> None:
    app = Celery("memory", broker=broker, task_cls="celery_idempotent:IdempotentTask" if store else None)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_redirect_stdouts=False)
    app.conf.idempotency_store = store or None

    @app.task(name="weigh", ignore_result=True)
    def weigh(number: int) -> None:
        gc.collect()
        print(psutil.Process().memory_full_info().uss, flush=True)

    app.Worker(pool="prefork", concurrency=1, without_gossip=True, without_mingle=True, loglevel="ERROR").start()


if __name__ == "__main__":
    _work(*sys.argv[1:])
