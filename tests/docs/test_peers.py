"""What the pages say of celery-once and celery-singleton is acted out by both and by this library, on one Redis."""
# mypy: allow-untyped-decorators, allow-subclassing-any

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
SOON = Policy(key="index", publish="once", lease=0.5, retain=0.6)
"""The same, forgetting as soon as a policy can."""

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


def work(server: str, index: str) -> None:
    """Tell that it runs, and do what the test has written down."""
    with Redis.from_url(f"{server}/3") as stage:
        stage.rpush("ran", index)
        match stage.get("fate"):
            case b"wait":
                assert stage.blpop(["go"], timeout=60)
            case b"raise":
                raise ValueError("on purpose")
            case b"die":
                os._exit(9)


def a_task(server: str, base: type, name: str, **options: Any) -> Task:
    def rebuild(index: str) -> None:
        work(server, index)

    return an_app(server).task(base=base, name=name, shared=False, **options)(rebuild)


def an_app(server: str) -> Celery:
    app = Celery("peers", broker=f"{server}/0", backend=f"{server}/2", set_as_current=False)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, idempotency_store=f"{server}/1")
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": f"{server}/1"}}
    app.conf.singleton_backend_url = f"{server}/1"
    for module, cached in (("celery_once.backends.redis", "redis"), ("celery_singleton.backends", "_backend")):
        setattr(import_module(module), cached, None)  # they keep the client of the first app
    return app


TASKS: dict[str, Callable[[str], Task]] = {
    ONCE: partial(a_task, base=QueueOnce, name=ONCE, once={"keys": ["index"]}),
    SINGLETON: partial(a_task, base=Singleton, name=SINGLETON, unique_on="index"),
    HERE: partial(a_task, base=IdempotentTask, name=HERE, idempotent=KEPT),
}


@dataclass
class Stage:
    """A server with a broker, locks and records, and what happened on it."""

    server: str
    client: Redis
    messages: int = 0

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

    @property
    def locks(self) -> int:
        """How many of theirs there are."""
        with Redis.from_url(f"{self.server}/1") as client:
            return sum(1 for each in client.scan_iter() if each.startswith((b"qo_", b"SINGLETONLOCK_")))


@pytest.fixture
def stage(redis_server: EmbeddedRedis, unchanged_celery: None) -> Iterator[Stage]:
    """An empty Redis, on which messages are counted as they are sent."""
    server = redis_server.url.removesuffix("/0")
    with Redis.from_url(f"{server}/3") as client:
        client.flushall()
        stage = Stage(server, client)

        def count(**told: object) -> None:
            stage.messages += 1

        before_task_publish.connect(count)
        yield stage
        before_task_publish.disconnect(count)
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


def ended(stage: Stage, task: Task) -> bool:
    stage.executes(task)
    return stage.again(task)


def forgotten(stage: Stage, task: Task) -> bool:
    soon = a_task(stage.server, IdempotentTask, HERE, idempotent=SOON) if task.name == HERE else task
    stage.executes(soon)
    return wait_until(lambda: stage.again(soon), "sent again")


def raised(stage: Stage, task: Task) -> bool:
    stage.executes(task, "raise")
    return stage.again(task)


def killed(stage: Stage, task: Task) -> bool:
    task.delay("i")
    stage.dies("worker", task.name)
    return stage.again(task)


CELLS = [
    pytest.param(library, act, cell, id=f"{library}: {row[AGAIN]}")
    for row, act in zip(table(PAGE, AGAIN), (queued, running, ended, forgotten, raised, killed), strict=True)
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
        graceful = {"keys": ["index"], "graceful": True}
        assert a_task(stage.server, QueueOnce, ONCE, once=graceful).delay("i").id is None
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


def moved(server: str, task: Task, library: str | None) -> Task:
    """Our task of the same name: plain, or with the page's base for the time of a deploy."""
    app = an_app(server)
    names: dict[str, Any] = {"app": app, "__name__": "page"}
    options: dict[str, Any] = {"base": IdempotentTask}
    if library is not None:
        for line, block in code(PAGE, "python")[: 1 + (library == SINGLETON)]:
            execute_block(PAGE, line, block, names)
        options = {"base": names["Leaving"], "old_keys": names["rebuild"].old_keys}

    def rebuild(index: str) -> None:
        work(server, index)

    # A module would keep its receivers of signals.
    return app.task(name=task.name, shared=False, idempotent=KEPT, page=names, **options)(rebuild)


@pytest.mark.nightly
@pytest.mark.parametrize("library", [ONCE, SINGLETON])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_their_message_is_executed_here(stage: Stage, library: str, is_cleared: bool) -> None:
    """Its lock stays and keeps their publishers from sending, unless the page's base clears it."""
    theirs = TASKS[library](stage.server)
    theirs.delay("i")
    here = moved(stage.server, theirs, library if is_cleared else None)

    with stage.worker(here):
        stage.ran(1)

    assert stage.locks == (0 if is_cleared else 1)
    assert (stage.again(theirs), stage.again(here)) == (is_cleared, False)


@pytest.mark.nightly
@pytest.mark.parametrize("library", [ONCE, SINGLETON])
def test_call_that_both_have_sent_has_one_body_here(stage: Stage, library: str) -> None:
    """The claim makes one operation of the messages, and the lock of a duplicate is cleared like any other."""
    theirs = TASKS[library](stage.server)
    here = moved(stage.server, theirs, library)

    sent = [theirs.delay("i"), here.delay("i")]
    with stage.worker(here):
        for each in sent:
            each.get(timeout=60)
        wait_until(lambda: stage.locks == 0, "unlocked")
        theirs.delay("i").get(timeout=60)
        wait_until(lambda: stage.locks == 0, "unlocked again")

    assert (stage.messages, stage.client.llen("ran")) == (3, 1)
