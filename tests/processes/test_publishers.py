"""Publishers that are processes of their own, on one Redis: they race, and one dies between record and message."""
# mypy: allow-untyped-decorators

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from celery import Celery, Task
from redis import Redis

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Record
from lab.embedded import EmbeddedRedis
from tests.support.waiting import wait_until

LEASE = 2

PUBLISHER = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from celery.signals import after_task_publish, before_task_publish
from tests.processes.test_publishers import task_of

charge = task_of(sys.argv[1])
dies = {"before": before_task_publish, "unconfirmed": after_task_publish}.get(sys.argv[2])
charge.delay("another, for the connections")
if dies:
    dies.connect(lambda **told: os._exit(9), weak=False)
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(10) as threads:
    results = list(threads.map(lambda _: charge.delay("o"), range(10 if sys.argv[2] == "never" else 1)))
print(*(result.id for result in results))
"""


def task_of(server: str) -> Task:
    """The task that all of them publish."""
    app = Celery("shop", broker=f"{server}/0", set_as_current=False)
    app.conf.update(idempotency_store=f"{server}/1", task_acks_late=True, task_reject_on_worker_lost=True)

    @app.task(base=IdempotentTask, name="charge", shared=False, idempotent=Policy("o", publish="once", lease=LEASE))
    def charge(o: str) -> None: ...

    return app.tasks["charge"]


@pytest.fixture
def server(redis_server: EmbeddedRedis) -> str:
    """A Redis for broker and store."""
    return redis_server.url.removesuffix("/0")


@pytest.fixture
def broker(server: str) -> Iterator[Redis]:
    """The broker, with nothing in it, nor in the store."""
    with Redis.from_url(f"{server}/0", decode_responses=True) as client:
        client.flushall()
        yield client


def _publisher(running: ExitStack, server: str, dies: str = "never") -> "subprocess.Popen[str]":
    """A process that is ready to publish."""
    command = [sys.executable, "-c", PUBLISHER, server, dies]
    process = running.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    running.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _record(charge: Task) -> Record:
    record = runtime_of(charge.app).store.get(charge.idempotency_key_for("o"))
    assert record is not None
    return record


def test_fifty_publishers_in_five_processes_send_one_message(server: str, broker: Redis) -> None:
    """All have its id."""
    with ExitStack() as running:
        publishers = [_publisher(running, server) for _ in range(5)]
        broker.delete("celery")
        for each in publishers:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        ids = [task_id for each in publishers for task_id in each.communicate(timeout=60)[0].split()]

    assert len(ids) == 50
    assert ids == [_record(task_of(server)).task_id] * 50
    assert broker.llen("celery") == 1


@pytest.mark.parametrize(("dies", "sent"), [("before", 0), ("unconfirmed", 1)])
def test_publisher_that_was_killed_is_followed_by_the_next_on_its_machine(
    server: str, broker: Redis, dies: str, sent: int
) -> None:
    """At once; whether it had sent the message, nobody can know."""
    charge = _killed(server, broker, dies)
    assert broker.llen("celery") == sent

    again = charge.delay("o")

    assert again.id == charge.delay("o").id == _record(charge).task_id
    assert broker.llen("celery") == sent + 1


def test_publisher_that_has_ended_leaves_a_message_that_counts_for_longer_than_a_lease(
    server: str, broker: Redis
) -> None:
    """As a cron job does."""
    with ExitStack() as running:
        publisher = _publisher(running, server, "when it is done")
        broker.delete("celery")
        (first,) = publisher.communicate("\n", timeout=60)[0].split()
    charge = task_of(server)
    assert not _record(charge).process
    assert _record(charge).lease_until - _record(charge).updated_at > LEASE * 1000

    assert charge.delay("o").id == first
    assert broker.llen("celery") == 1


def test_publisher_that_was_killed_on_another_machine_is_followed_after_the_lease(
    server: str, broker: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there it cannot be seen; until then its word counts, and after that a new message is sent."""
    charge = _killed(server, broker, "before")
    monkeypatch.setattr("celery_idempotent.engine.claim.is_gone", lambda process: False)
    announced = _record(charge)

    def sent() -> str:
        result = charge.delay("o")
        return str(result.id) if broker.llen("celery") else ""

    task_id = wait_until(sent, "a publisher sends")

    assert task_id != announced.task_id
    assert _record(charge).created_at == announced.created_at
    assert _record(charge).updated_at >= announced.updated_at + LEASE * 1000


def _killed(server: str, broker: Redis, dies: str) -> Task:
    """The task, of which one publisher died: right before or right after its message was sent."""
    with ExitStack() as running:
        publisher = _publisher(running, server, dies)
        broker.delete("celery")
        publisher.communicate("\n", timeout=60)
        assert publisher.returncode == 9
    return task_of(server)
