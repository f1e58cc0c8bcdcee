"""Publishers that are processes of their own, on one Redis: they race, and one dies before it confirms its message."""
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

LEASE = 2

PUBLISHER = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from celery.signals import after_task_publish
from tests.processes.test_publishers import task_of

charge, calls = task_of(sys.argv[1]), int(sys.argv[2])
charge.delay("another, for the connections")
if sys.argv[3] == "True":
    after_task_publish.connect(lambda **told: os._exit(9), weak=False)
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(10) as threads:
    results = list(threads.map(lambda _: charge.delay("o"), range(calls)))
print(*(result.id for result in results))
"""


def task_of(server: str) -> Task:
    """The task that all of them publish."""
    app = Celery("shop", broker=f"{server}/0", set_as_current=False)
    app.conf.update(idempotency_store=f"{server}/1", task_acks_late=True, task_reject_on_worker_lost=True)

    @app.task(base=IdempotentTask, name="charge", shared=False, idempotent=Policy("o", publish="once", lease=LEASE))
    def charge(o: str) -> None: ...

    return app.tasks["charge"]


class Street:
    """A broker with nothing in it, nor in the store, and publishers."""

    def __init__(self, server: str, broker: Redis) -> None:
        self.server, self.broker, self.charge = server, broker, task_of(server)

    def publishes(self, processes: int = 1, calls: int = 1, dies: bool = False) -> list[str]:
        """Have processes that are ready publish the call together; the ids that they got."""
        command = [sys.executable, "-c", PUBLISHER, self.server, str(calls), str(dies)]
        with ExitStack() as running:
            publishers = [
                running.enter_context(subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1))
                for _ in range(processes)
            ]
            for each in publishers:
                running.callback(each.kill)
                assert each.stdout is not None
                assert each.stdout.readline() == "ready\n"
            self.broker.delete("celery")
            for each in publishers:
                assert each.stdin is not None
                each.stdin.write("\n")
            ids = [task_id for each in publishers for task_id in each.communicate(timeout=60)[0].split()]
            assert {each.returncode for each in publishers} == {9 if dies else 0}
        return ids

    @property
    def sent(self) -> int:
        return int(self.broker.llen("celery"))

    @property
    def record(self) -> Record:
        record = runtime_of(self.charge.app).store.get(self.charge.idempotency_key_for("o"))
        assert record is not None
        return record


@pytest.fixture
def street(redis_server: EmbeddedRedis) -> Iterator[Street]:
    server = redis_server.url.removesuffix("/0")
    with Redis.from_url(f"{server}/0", decode_responses=True) as broker:
        broker.flushall()
        yield Street(server, broker)


def test_publishers_in_several_processes_send_one_message(street: Street) -> None:
    """All have its id, and it counts for longer than a lease when they have ended."""
    ids = street.publishes(processes=3, calls=10)
    assert ids == [street.record.task_id] * 30
    assert not street.record.process
    assert street.record.lease_until - street.record.updated_at > LEASE * 1000
    assert (street.charge.delay("o").id, street.sent) == (ids[0], 1)


def test_publisher_that_was_killed_is_followed_by_the_next_on_its_machine(street: Street) -> None:
    """At once; whether it had sent the message, nobody can know."""
    street.publishes(dies=True)
    assert street.sent == 1
    again = street.charge.delay("o")
    assert again.id == street.charge.delay("o").id == street.record.task_id
    assert street.sent == 2
