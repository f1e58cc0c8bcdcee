"""What the comparison says of publishing: this library, celery-once and celery-singleton on one Redis, run again."""
# mypy: allow-untyped-decorators, allow-subclassing-any

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
from celery import Celery, Task
from kombu.exceptions import OperationalError
from redis import Redis

from celery_idempotent import IdempotentTask, Policy
from lab.embedded import EmbeddedRedis

KILLED = """
import os, sys
from celery.signals import before_task_publish
from tests.docs.test_comparison import PUBLISHERS

task = PUBLISHERS[sys.argv[1]](sys.argv[2])
before_task_publish.connect(lambda **told: os._exit(9), weak=False)
task.delay("o")
"""


def body(order_id: str) -> None:
    """What none of them comes to."""


def _app(server: str) -> Celery:
    app = Celery("peers", broker=f"{server}/0", backend=f"{server}/2", set_as_current=False)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
    return app


def _ours(server: str) -> Task:
    app = _app(server)
    app.conf.idempotency_store = f"{server}/1"
    return app.task(base=IdempotentTask, name="t", shared=False, idempotent=Policy(publish="once"))(body)


def _once(server: str) -> Task:
    from celery_once import QueueOnce

    app = _app(server)
    settings = {"url": f"{server}/1", "default_timeout": 3600}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
    return app.task(base=QueueOnce, name="t", shared=False, once={"graceful": True})(body)


def _singleton(server: str) -> Task:
    from celery_singleton import Singleton

    import_module("celery_singleton.backends")._backend = None  # type: ignore[attr-defined]
    app = _app(server)
    app.conf.singleton_backend_url = f"{server}/1"
    return app.task(base=Singleton, name="t", shared=False)(body)


PUBLISHERS: dict[str, Callable[[str], Task]] = {
    "celery-idempotent": _ours,
    "celery-once": _once,
    "celery-singleton": _singleton,
}


@pytest.fixture
def server(redis_server: EmbeddedRedis) -> str:
    """A Redis for brokers, stores and locks."""
    return redis_server.url.removesuffix("/0")


@pytest.fixture
def broker(server: str) -> Iterator[Redis]:
    """The broker, with nothing in it, nor in the stores."""
    with Redis.from_url(f"{server}/0") as client:
        client.flushall()
        yield client


@pytest.mark.parametrize("library", PUBLISHERS)
def test_second_message_stays_out_of_the_queue(server: str, broker: Redis, library: str) -> None:
    """With all three, while the first is queued; celery-once tells no id."""
    task = PUBLISHERS[library](server)

    first, second = task.delay("o"), task.delay("o")

    assert broker.llen("celery") == 1
    assert (second and second.id) == (None if library == "celery-once" else first.id)


@pytest.mark.parametrize(("library", "sent"), [("celery-idempotent", 1), ("celery-once", 0), ("celery-singleton", 0)])
def test_publisher_that_dies_before_its_message_is_sent(server: str, broker: Redis, library: str, sent: int) -> None:
    """Here the next one sends; with the others the lock stays, and nobody does."""
    killed = subprocess.run([sys.executable, "-c", KILLED, library, server], check=False)
    assert killed.returncode == 9

    PUBLISHERS[library](server).delay("o")

    assert broker.llen("celery") == sent


@pytest.mark.parametrize(("library", "sent"), [("celery-idempotent", 1), ("celery-once", 0), ("celery-singleton", 1)])
def test_message_that_the_broker_refuses(
    server: str, broker: Redis, library: str, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error surfaces everywhere; celery-once keeps the lock."""

    def refuse(*args: object, **options: object) -> None:
        raise OperationalError("no broker")

    task = PUBLISHERS[library](server)
    with monkeypatch.context() as patch:
        patch.setattr(Celery, "send_task", refuse)
        with pytest.raises(OperationalError):
            task.delay("o")

    task.delay("o")

    assert broker.llen("celery") == sent
