"""The same empty task under every contender, for its worker and for its publisher.

`celery -A lab.benchmarks.worker_app worker`, configured by the environment variables of :class:`Setup`.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Self

from celery import Celery
from celery.signals import task_postrun

from celery_idempotent import IdempotentTask
from lab.embedded import REGION

__all__ = ["FINISHED", "STAMP", "TASK", "Kind", "Setup", "make_app"]

TASK = "empty"

FINISHED = "BENCH_FINISHED"
"""Environment variable with the file that gets a stamp per finished task."""

STAMP = struct.Struct("=q")
"""Nanoseconds of the monotonic clock, which the processes of one machine share."""


class Kind(StrEnum):
    """Under what the task runs."""

    PLAIN = "plain Celery"
    ONCE = "celery-once 3.0.1"
    SINGLETON = "celery-singleton 0.3.1"
    IDEMPOTENT = "celery-idempotent"


@dataclass(frozen=True, slots=True)
class Setup:
    """One contender.

    Args:
        kind: Under what the task runs.
        broker: The broker's URL.
        store: URL of the store or of the Redis for the locks; empty where the kind has none.
        results: URL of Celery's result backend; empty for none.
    """

    kind: Kind
    broker: str
    store: str = ""
    results: str = ""

    def environ(self) -> dict[str, str]:
        """What :meth:`from_environ` reads."""
        names = {"KIND": self.kind, "BROKER": self.broker, "STORE": self.store, "RESULTS": self.results}
        return {f"BENCH_{name}": value for name, value in names.items()}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """The contender that :meth:`environ` described."""
        kind, *urls = (environ[f"BENCH_{name}"] for name in ("KIND", "BROKER", "STORE", "RESULTS"))
        return cls(Kind(kind), *urls)


def _empty(number: int) -> int:
    return number


def make_app(setup: Setup, body: Callable[[int], int] = _empty) -> Celery:
    """An app with the one task :data:`TASK`, which by default does nothing but return its argument."""
    app = Celery("lab.benchmarks.worker_app", broker=setup.broker, backend=setup.results or None, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=not setup.results,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options=_transport_options(setup.broker),
    )
    app.task(name=TASK, shared=False, base=_BASES[setup.kind](app, setup))(body)
    return app


def _plain(app: Celery, setup: Setup) -> Any:
    return app.Task


def _once(app: Celery, setup: Setup) -> Any:
    from celery_once import QueueOnce

    # README, "Usage". Non-blocking is its default; what else it offers costs nothing on distinct keys.
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": setup.store, "default_timeout": 60 * 60},
    }
    return QueueOnce


def _singleton(app: Celery, setup: Setup) -> Any:
    from celery_singleton import Singleton

    # README, "Handling deadlocks": without an expiry a dead worker's lock stays for ever.
    app.conf.update(singleton_backend_url=setup.store, singleton_lock_expiry=60)
    return Singleton


def _idempotent(app: Celery, setup: Setup) -> Any:
    app.conf.idempotency_store = setup.store
    return IdempotentTask


_BASES: Mapping[Kind, Callable[[Celery, Setup], Any]] = {
    Kind.PLAIN: _plain,
    Kind.ONCE: _once,
    Kind.SINGLETON: _singleton,
    Kind.IDEMPOTENT: _idempotent,
}


def _transport_options(broker: str) -> dict[str, Any]:
    if not broker.startswith("sqs:"):
        return {}
    return {
        "region": REGION,
        "is_secure": False,
        "visibility_timeout": 60,
        "wait_time_seconds": 1,
        # kombu's pause when its prefetch window was full; its default of 1 s would be all there is to measure.
        "polling_interval": 0,
    }


@cache
def _finished(pid: int) -> int:
    return os.open(os.environ[FINISHED], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _stamp(**_: Any) -> None:
    os.write(_finished(os.getpid()), STAMP.pack(time.monotonic_ns()))


if FINISHED in os.environ:
    app = make_app(Setup.from_environ(os.environ))
    app.set_current()
    task_postrun.connect(_stamp, weak=False)
