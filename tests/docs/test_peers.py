"""What the pages say of celery-once and celery-singleton is acted out by both and by this library, on one Redis."""
# mypy: allow-untyped-decorators, allow-subclassing-any

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from celery.signals import before_task_publish
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton
from kombu.exceptions import OperationalError
from redis import Redis

from celery_idempotent import IdempotentTask, Policy
from lab.embedded import EmbeddedRedis
from tests.support.documents import DOCS, code, execute_block, table
from tests.support.waiting import wait_until

ONCE, SINGLETON, HERE = "celery-once", "celery-singleton", "here"
PAGE, AGAIN = DOCS / "how-to/from-celery-once.md", "the same call again"
KEPT = Policy(key="index", publish="once", retain=61)
"""That of the page."""

pytestmark = pytest.mark.filterwarnings("ignore:.*is not longer than the broker's visibility timeout")

DIES = """
import os, sys
from celery.signals import before_task_publish
from tests.docs.test_peers import TASKS

task = TASKS[sys.argv[2]](sys.argv[3])
if sys.argv[1] == "worker":
    task.app.Worker(pool="solo", concurrency=1, loglevel="ERROR").start()
else:
    before_task_publish.connect(lambda **told: os._exit(9), weak=False)
    task.delay("i")
"""


def a_task(server: str, app: Celery | None = None, **options: Any) -> Task:
    """It tells that it runs, and does what the test has written down."""

    def rebuild(index: str) -> None:
        with Redis.from_url(f"{server}/3") as stage:
            stage.rpush("ran", index)
            match stage.get("fate"):
                case b"wait":
                    assert stage.blpop(["go"], timeout=60)
                case b"raise":
                    raise ValueError("on purpose")
                case b"die":
                    os._exit(9)

    return (app or an_app(server)).task(shared=False, **options)(rebuild)


def an_app(server: str) -> Celery:
    app = Celery("peers", broker=f"{server}/0", backend=f"{server}/2", set_as_current=False)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, idempotency_store=f"{server}/1")
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": f"{server}/1"}}
    app.conf.singleton_backend_url = f"{server}/1"
    for module, cached in (("celery_once.backends.redis", "redis"), ("celery_singleton.backends", "_backend")):
        setattr(import_module(module), cached, None)  # they keep the client of the first app
    return app


TASKS: dict[str, Callable[..., Task]] = {
    ONCE: partial(a_task, base=QueueOnce, name=ONCE, once={"keys": ["index"]}),
    SINGLETON: partial(a_task, base=Singleton, name=SINGLETON, unique_on="index"),
    HERE: partial(a_task, base=IdempotentTask, name=HERE, idempotent=KEPT),
}


class Stage:
    """A server with a broker, locks and records, and what happened on it."""

    def __init__(self, server: str, client: Redis) -> None:
        self.server, self.client, self.messages = server, client, 0

    def count(self, **told: object) -> None:
        self.messages += 1

    def ran(self, times: int) -> None:
        wait_until(lambda: self.client.llen("ran") == times, f"{times} bodies")

    def again(self, task: Task) -> bool:
        """Whether another call of the same sends a message."""
        before = self.messages
        with suppress(AlreadyQueued):
            task.delay("i")
        return self.messages > before

    @contextmanager
    def worker(self, task: Task, fate: str = "") -> Iterator[None]:
        """A worker in a thread of this process."""
        self.client.set("fate", fate)
        with start_worker(task.app, pool="solo", perform_ping_check=False, loglevel="ERROR", shutdown_timeout=60):
            yield

    def executes(self, task: Task, fate: str = "") -> None:
        """A call is sent, executed and over."""
        with self.worker(task, fate), suppress(ValueError):
            task.delay("i").get(timeout=60)

    def dies(self, who: str, library: str) -> None:
        """Let a process that publishes or works be killed in the midst of it."""
        self.client.set("fate", "die")
        dead = subprocess.run([sys.executable, "-c", DIES, who, library, self.server], check=False, timeout=120)
        assert dead.returncode == 9


@pytest.fixture
def stage(redis_server: EmbeddedRedis, unchanged_celery: None) -> Iterator[Stage]:
    """An empty Redis, on which messages are counted as they are sent."""
    server = redis_server.url.removesuffix("/0")
    with Redis.from_url(f"{server}/3") as client:
        client.flushall()
        stage = Stage(server, client)
        before_task_publish.connect(stage.count)
        yield stage
        before_task_publish.disconnect(stage.count)
        client.flushall()


def queued(stage: Stage, task: Task) -> bool:
    task.delay("i")
    return stage.again(task)


def running(stage: Stage, task: Task) -> bool:
    with stage.worker(task, "wait"):
        first = task.delay("i")
        stage.ran(1)
        is_sent = stage.again(task)
        stage.client.rpush("go", 1)
        first.get(timeout=60)
    return is_sent


def ended(stage: Stage, task: Task, fate: str = "") -> bool:
    stage.executes(task, fate)
    return stage.again(task)


def forgotten(stage: Stage, task: Task) -> bool:
    if task.name == HERE:  # forgetting as soon as a policy can
        task = TASKS[HERE](stage.server, idempotent=Policy(key="index", publish="once", lease=0.5, retain=0.6))
    stage.executes(task)
    return wait_until(lambda: stage.again(task), "sent again")


def killed(stage: Stage, task: Task) -> bool:
    task.delay("i")
    stage.dies("worker", task.name)
    return stage.again(task)


ACTS = (queued, running, ended, forgotten, partial(ended, fate="raise"), killed)
CELLS = [
    pytest.param(library, act, cell, id=f"{library}: {row[AGAIN]}")
    for row, act in zip(table(PAGE, AGAIN), ACTS, strict=True)
    for column, cell in row.items()
    for library in TASKS
    if column != AGAIN and (library == HERE) == (column == HERE)
]


@pytest.mark.nightly
@pytest.mark.parametrize(("library", "act", "cell"), CELLS)
def test_same_call_again(stage: Stage, library: str, act: Callable[[Stage, Task], bool], cell: str) -> None:
    """Whether it is sent, as the page says; and what is sent runs."""
    task = TASKS[library](stage.server)

    is_sent = act(stage, task)

    assert is_sent is not cell.startswith("not sent")
    if is_sent:
        ran = stage.client.llen("ran")
        with stage.worker(task):
            stage.ran(ran + 1)


@pytest.mark.parametrize("library", TASKS)
def test_caller_of_a_second_message_is_told(stage: Stage, library: str) -> None:
    """By celery-once with an error, or without an id; by the others with the first one's result."""
    task = TASKS[library](stage.server)
    first = task.delay("i")

    if library == ONCE:
        assert TASKS[ONCE](stage.server, once={"keys": ["index"], "graceful": True}).delay("i").id is None
        with pytest.raises(AlreadyQueued):
            task.delay("i")
    else:
        assert task.delay("i").id == first.id
    assert stage.messages == 1


@pytest.mark.parametrize(("library", "after_death", "after_error"), [(HERE, 1, 1), (ONCE, 0, 0), (SINGLETON, 0, 1)])
def test_call_whose_message_was_not_sent_is_sent_again_here(
    stage: Stage, library: str, after_death: int, after_error: int
) -> None:
    """After its publisher's death or an error of the broker's; with the others a lock may stay, and nobody does."""
    stage.dies("publisher", library)
    assert stage.again(TASKS[library](stage.server)) is bool(after_death)

    stage.client.flushall()
    task = TASKS[library](stage.server)
    with patch.object(Celery, "send_task", side_effect=OperationalError("no broker")), pytest.raises(OperationalError):
        task.delay("i")
    assert stage.again(task) is bool(after_error)


@pytest.mark.nightly
@pytest.mark.parametrize("library", [ONCE, SINGLETON])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_their_message_is_executed_here(stage: Stage, library: str, is_cleared: bool) -> None:
    """Once, also where both have sent it; their lock stays, and they send nothing, unless the page's base clears it."""
    theirs, app = TASKS[library](stage.server), an_app(stage.server)
    names: dict[str, Any] = {"app": app, "__name__": "page"}
    options: dict[str, Any] = {"base": IdempotentTask}
    if is_cleared:
        for line, block in code(PAGE, "python")[: 1 + (library == SINGLETON)]:
            execute_block(PAGE, line, block, names)
        options = {"base": names["Leaving"], "old_keys": names["rebuild"].old_keys}
    # A module would keep its receivers of signals.
    here = a_task(stage.server, app, name=theirs.name, idempotent=KEPT, page=names, **options)

    def is_locked() -> bool:
        with Redis.from_url(f"{stage.server}/1") as client:
            return any(each.startswith((b"qo_", b"SINGLETONLOCK_")) for each in client.scan_iter())

    sent = [theirs.delay("i"), here.delay("i")]
    with stage.worker(here):
        for each in sent:
            each.get(timeout=60)
        if is_cleared:
            wait_until(lambda: not is_locked(), "unlocked")

    assert (stage.client.llen("ran"), is_locked()) == (1, not is_cleared)
    assert (stage.again(theirs), stage.again(here)) == (is_cleared, False)
