"""The app of the throughput benchmark's worker: the same empty task, plain and idempotent."""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from typing import Any

from celery import Celery, Task
from celery.signals import task_postrun

from celery_idempotent import IdempotentTask
from example_project.embedded import REGION

__all__ = ["BROKER", "FINISHED", "STAMP", "STORE", "app", "empty", "empty_idempotent", "transport_options"]

BROKER, STORE, FINISHED = "BENCH_BROKER", "BENCH_STORE", "BENCH_FINISHED"
"""Environment variables with the broker's URL, the store's, and the file that gets a stamp per finished task."""

STAMP = struct.Struct("=q")
"""Nanoseconds of the monotonic clock, which the processes of one machine share."""


def transport_options(broker: str) -> dict[str, Any]:
    """What kombu must be told about ``broker``."""
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


app = Celery("benchmarks.worker_app", broker=os.environ.get(BROKER, "memory://"))
app.conf.update(
    idempotency_store=os.environ.get(STORE, "memory://"),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
)
app.conf.broker_transport_options = transport_options(app.conf.broker_url)


@app.task(base=Task)
def empty(number: int) -> int:
    """Do nothing."""
    return number


@app.task(base=IdempotentTask)
def empty_idempotent(number: int) -> int:
    """Do nothing, once."""
    return number


@task_postrun.connect
def _stamp(**_: Any) -> None:
    if FINISHED in os.environ:
        os.write(_finished(os.getpid()), STAMP.pack(time.monotonic_ns()))


@cache
def _finished(pid: int) -> int:
    return os.open(os.environ[FINISHED], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
