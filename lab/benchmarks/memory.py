"""What workers hold of memory, connections and threads, by pool and store. Run by itself, it is one that is weighed."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from celery import Celery
from celery.signals import worker_shutting_down

from lab import tether
from lab.benchmarks.report import Goal, Grid, Section
from lab.embedded import EmbeddedPostgres, EmbeddedRedis

if TYPE_CHECKING:
    from lab.benchmarks.environment import DynamoDB  # which brings boto3

_MOST = {"Redis": 2, "PostgreSQL": 12, "DynamoDB": 10}  # MB that the library wants to add at most
_SIZE = 8  # processes or threads of a pool
_WORKERS = 200

_Weight = list[float]
"""Connections to the store, threads and MB."""


def measure(dynamodb: "DynamoDB", tasks: int) -> Section:
    from celery_idempotent.stores import open_store  # a plain worker imports nothing of the library

    with EmbeddedRedis() as broker, EmbeddedRedis() as redis, EmbeddedPostgres() as postgres:
        urls = {"Redis": redis.url, "PostgreSQL": postgres.url, "DynamoDB": dynamodb.store_url("memory")}
        for url in urls.values():
            open_store(url).provision()
        places = [(pool, name) for pool in ("prefork", "threads") for name in ("none", *urls)]
        held = {(pool, name): _weighed(tasks, broker.url, pool, urls.get(name, "")) for pool, name in places}
    added = {name: held["prefork", name][1][2] - held["prefork", "none"][1][2] for name in urls}
    return Section(
        "10. Memory of a pool process",
        f"After {tasks} bodies that outlast a third of their leases, and a garbage collection: sooner or later every "
        f"process has one, and then a copy of what it shared. USS; a pool has {_SIZE} processes or threads.",
        [
            Grid(
                "Connections to the store, threads, MB",
                ("pool and store", "main process", "pool process", f"{_WORKERS} workers"),
                [(", ".join(of), *(", ".join(f"{each:,.0f}" for each in it) for it in held[of])) for of in places],
            )
        ],
        [Goal.at_most(f"{name}, added", most, added[name], " MB", digits=1) for name, most in _MOST.items()],
    )


def _weighed(tasks: int, broker: str, pool: str, store: str) -> tuple[_Weight, _Weight, _Weight]:
    """The main process; the process of the pool that has most, if there is any; and all workers."""
    worker = tether.start("lab.benchmarks.memory", broker, pool, store, log=subprocess.PIPE)
    lines: Any = worker.stdout
    told = (json.loads(line) for line in lines if line.startswith(b"["))
    try:
        with Celery(broker=broker, set_as_current=False) as app, lines:
            for _ in range(tasks):
                app.send_task("weigh", (time.time_ns(),))
            bodies = list(islice(told, tasks))
            worker.terminate()
            pid, *main = next(told)
            most: _Weight = max((each for of, *each in bodies if of != pid), default=[0, 0, 0])
            return main, most, [_WORKERS * (its + _SIZE * each) for its, each in zip(main, most, strict=True)]
    finally:
        tether.stop(worker)


def _work(broker: str, pool: str, store: str) -> None:
    app = Celery("memory", broker=broker, task_cls="celery_idempotent:IdempotentTask" if store else None)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_redirect_stdouts=False)
    app.conf.idempotency_store = store or None
    main, renewed = os.getpid(), threading.Event()
    if store:
        from celery_idempotent import Policy
        from celery_idempotent.engine.events import Timed, listen

        app.conf.idempotency_policy = Policy(lease=1)
        listen(lambda what, *_: renewed.set() if what is Timed.RENEWAL else None)

    def tell(*_: object, **__: object) -> None:
        gc.collect()
        process = psutil.Process()
        ports = [each.raddr.port for each in process.net_connections("tcp") if each.raddr]
        threads = process.num_threads() - (process.pid == main)  # without the laboratory's own
        weight = ports.count(urlsplit(store).port or 0), threads, process.memory_full_info().uss / 2**20
        print(json.dumps((process.pid, *weight)) + "\n", end="", flush=True)  # at once, as others print, too

    @app.task(name="weigh", ignore_result=True)
    def weigh(number: int) -> None:
        if store and renewed.wait(30):
            renewed.clear()
        tell()

    worker_shutting_down.connect(tell)
    app.Worker(pool=pool, concurrency=_SIZE, without_gossip=True, without_mingle=True, loglevel="ERROR").start()


if __name__ == "__main__":
    _work(*sys.argv[1:])
