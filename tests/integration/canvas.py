"""One set of tasks, two kinds of them: an app and a worker with IdempotentTask, and one whose are published once."""
# mypy: allow-untyped-decorators

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.signals import task_postrun
from celery.states import SUCCESS
from redis import Redis

from lab import tether
from lab.short_delays import ShortDelays
from tests.support.ledger import Ledger, record
from tests.support.waiting import wait_until

KINDS = {"idempotent": (2, 3), "once": (4, 5)}
"""By kind the databases of its broker and of its store."""

HELD = "held"
OTHER = "other"
idempotent_only = pytest.mark.parametrize("canvas", ["idempotent"], indirect=True)
AS_ROOT = {"C_FORCE_ROOT": "1"}  # workers that take pickles refuse to be root, which tests often are


def app_of(kind: str, server: str) -> Celery:
    """The app of one kind; `server` is the URL of a Redis without its database."""
    from tests.integration import canvas_tasks

    url, store = (f"{server}/{number}" for number in KINDS[kind])
    publish: Any = "once" if kind == "once" else "always"
    guarded = "celery_idempotent:IdempotentTask"
    app = Celery("canvas", broker=url, backend=url, task_cls=guarded, set_as_current=False)
    app.conf.update(
        idempotency_store=store,
        idempotency_policy=ShortDelays(**canvas_tasks.QUICK, publish=publish),
        idempotency_grace=0.2,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        accept_content=["json", "pickle"],
    )
    for body, policy, options in canvas_tasks.TASKS:
        own = {} if policy is None else {"idempotent": replace(policy, publish=publish)}
        app.task(name=body.__name__, lazy=False, shared=False, **{"bind": True, **own, **options})(body)
    return app


class Canvas:
    """An app of one kind, seen from its publisher, with a worker that runs its tasks."""

    def __init__(self, kind: str, server: str) -> None:
        self.kind = kind
        self.app = app_of(kind, server)
        self.ledger = Ledger(self.app.conf.result_backend)
        self._broker: Any = Redis.from_url(self.app.conf.broker_url, decode_responses=True)

    def __getattr__(self, name: str) -> Task:
        return self.app.tasks[name]

    def bodies(self, of: str) -> list[dict[str, Any]]:
        """What the bodies recorded that ran for `of`, oldest first."""
        return [row.details for row in self.ledger.rows("ran", of)]

    def wait_for_bodies(self, of: str, count: int) -> list[dict[str, Any]]:
        """As `bodies`, as soon as there are `count` of them."""
        return [row.details for row in self.ledger.wait_for("ran", count, of)]

    def held(self) -> dict[str, Any]:
        """The message that was published to the queue `held`, which no worker consumes."""
        message: dict[str, Any] = json.loads(wait_until(lambda: self._broker.lpop(HELD), "a message is held"))
        return message

    def deliver(self, message: dict[str, Any], copies: int = 1) -> None:
        """Deliver a message that was held, that many times."""
        queue = self.app.conf.task_default_queue
        for _ in range(copies):
            message["properties"]["delivery_tag"] = uuid4().hex
            # A retry goes where its message came from.
            message["properties"]["delivery_info"]["routing_key"] = queue
            self._broker.lpush(queue, json.dumps(message))

    def wait_for_ends(self, task_id: str, count: int) -> None:
        """Wait until so many deliveries of a task have ended with a result; those that were postponed do not count."""
        self.ledger.wait_for("succeeded", count, task_id)

    @contextmanager
    def worker(self, server: str, log: Path) -> Iterator[None]:
        """A worker of this kind, as long as the block lasts."""
        with log.open("wb") as output:
            process = tether.start("tests.integration.canvas", self.kind, server, log=output, env=AS_ROOT)
        try:
            wait_until(lambda: b"ready." in log.read_bytes() or process.poll() is not None, "the worker is ready")
            assert process.poll() is None, log.read_text()
            yield
        finally:
            tether.stop(process)

    def close(self) -> None:
        """Close the connections."""
        # Results that nobody got would otherwise unsubscribe when they are collected, from a server that is gone.
        self.app.backend.result_consumer.subscribed_to.clear()
        self.ledger.close()
        self._broker.close()
        self.app.close()


def ran(canvas: Canvas, of: str) -> list[str]:
    """The names of the tasks whose bodies ran, in alphabetical order."""
    return sorted(body["task"] for body in canvas.bodies(of))


def got(result: Any) -> Any:
    """The result, waited for."""
    return result.get(timeout=60)


@contextmanager
def canvas_of(kind: str, server: str, folder: Path) -> Iterator[Canvas]:
    """A canvas with its worker running."""
    canvas = Canvas(kind, server)
    try:
        with canvas.worker(server, folder / f"{kind}.log"):
            yield canvas
    finally:
        canvas.close()


def witness_end(task_id: str, state: str, **other: Any) -> None:
    """Write down that a delivery ended with a result."""
    if state == SUCCESS:
        record("succeeded", task_id)


def work(kind: str, server: str) -> None:
    """Be the worker."""
    app = app_of(kind, server)
    app.set_default()
    task_postrun.connect(witness_end)
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    app.worker_main(
        ["worker", "-c", "2", "-Q", f"{app.conf.task_default_queue},{OTHER}", "-n", f"{kind}@%h", "-l", "INFO", *quiet]
    )


if __name__ == "__main__":
    work(*sys.argv[1:])
