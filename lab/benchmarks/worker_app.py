"""The same empty task under every contender, for its worker and for its publisher.

`celery -A lab.benchmarks.worker_app worker`, configured by the environment variables of :class:`Setup`.
"""

import os
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

from celery import Celery
from celery.signals import task_postrun

from celery_idempotent import IdempotentTask

TASK = "empty"

FINISHED, QUEUE = "BENCH_FINISHED", "BENCH_QUEUE"
"""Environment variables with the file that gets a stamp per finished task, and with the queue of a worker."""

STAMP = struct.Struct("=q")  # nanoseconds of the monotonic clock, which the processes of one machine share


class Kind(StrEnum):
    """Under what the task runs."""

    PLAIN = "plain Celery"
    ONCE = "celery-once 3.0.1"
    SINGLETON = "celery-singleton 0.3.1"
    IDEMPOTENT = "celery-idempotent"


@dataclass(frozen=True, slots=True)
class Setup:
    """One contender: its broker, its store or the Redis for its locks, and Celery's result backend, if any."""

    kind: Kind
    broker: str
    store: str = ""
    results: str = ""

    def environ(self) -> dict[str, str]:
        urls = " ".join((self.broker, self.store, self.results))
        return {"BENCH_KIND": self.kind, "BENCH_URLS": urls, "PYTHONWARNINGS": "ignore"}


def make_app(setup: Setup) -> Celery:
    """An app with the one task :data:`TASK`, which does nothing but return its argument."""
    app = Celery("lab.benchmarks.worker_app", broker=setup.broker, backend=setup.results or None, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=not setup.results,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
    )

    @app.task(name=TASK, shared=False, base=base_of(app, setup.kind, setup.store))
    def empty(number: int) -> int:
        return number

    return app


def base_of(app: Celery, kind: Kind, store: str) -> Any:
    """The base class of its tasks, when the app is configured for it."""
    match kind:
        case Kind.PLAIN:
            return app.Task
        case Kind.ONCE:
            # README, "Usage". Non-blocking is its default; what else it offers costs nothing on distinct keys.
            settings = {"url": store, "default_timeout": 60 * 60}
            app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
            return import_module("celery_once").QueueOnce
        case Kind.SINGLETON:
            # README, "Handling deadlocks": without an expiry a dead worker's lock stays for ever.
            app.conf.update(singleton_backend_url=store, singleton_lock_expiry=60)
            return import_module("celery_singleton").Singleton
        case Kind.IDEMPOTENT:
            app.conf.idempotency_store = store
            return IdempotentTask


if FINISHED in os.environ:
    app = make_app(Setup(Kind(os.environ["BENCH_KIND"]), *os.environ["BENCH_URLS"].split(" ")))
    app.conf.task_default_queue = os.environ[QUEUE]
    app.set_current()
    finished = os.open(os.environ[FINISHED], os.O_WRONLY | os.O_APPEND)
    task_postrun.connect(lambda **_: os.write(finished, STAMP.pack(time.monotonic_ns())), weak=False)
