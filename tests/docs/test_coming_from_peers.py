"""The pages on coming from celery-once and celery-singleton are acted out by all three, with workers, on one Redis."""
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

import pytest
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from celery.signals import before_task_publish
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import DuplicateTaskError, Singleton, clear_locks
from redis import Redis

from celery_idempotent import IdempotentTask, Policy
from lab.embedded import EmbeddedRedis
from tests.support.documents import DOCS, code, execute_block, table
from tests.support.waiting import wait_until

pytestmark = pytest.mark.nightly

ONCE, SINGLETON, HERE = "celery-once", "celery-singleton", "here"
PAGES = {ONCE: DOCS / "how-to/from-celery-once.md", SINGLETON: DOCS / "how-to/from-celery-singleton.md"}
KEPT = Policy(key="index", publish="once", retain=61)
"""That of the pages."""
SOON = Policy(key="index", publish="once", lease=0.5, retain=0.6)
"""The same, forgetting as soon as a policy can."""

pytestmark = pytest.mark.filterwarnings("ignore:.*is not longer than the broker's visibility timeout")

KILLED = """
import sys
from tests.docs.test_coming_from_peers import TASKS

TASKS[sys.argv[1]](sys.argv[2]).app.Worker(pool="solo", concurrency=1, loglevel="ERROR").start()
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


def _task(server: str, base: type, name: str, **options: Any) -> Task:
    def rebuild(index: str) -> None:
        work(server, index)

    return _app(server).task(base=base, name=name, shared=False, **options)(rebuild)


def _app(server: str) -> Celery:
    app = Celery("peers", broker=f"{server}/0", backend=f"{server}/2", set_as_current=False)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, idempotency_store=f"{server}/1")
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": f"{server}/1"}}
    app.conf.singleton_backend_url = f"{server}/1"
    for module, cached in (("celery_once.backends.redis", "redis"), ("celery_singleton.backends", "_backend")):
        setattr(import_module(module), cached, None)  # they keep the client of the first app
    return app


def _ours(server: str, policy: Policy) -> Task:
    return _task(server, IdempotentTask, HERE, idempotent=policy)


TASKS: dict[str, Callable[[str], Task]] = {
    ONCE: partial(_task, base=QueueOnce, name=ONCE, once={"keys": ["index"]}),
    SINGLETON: partial(_task, base=Singleton, name=SINGLETON, unique_on="index"),
    HERE: partial(_ours, policy=KEPT),
}


@dataclass
class Stage:
    """A server with a broker, locks and records, and what happened on it."""

    server: str
    client: Redis
    messages: int = 0

    def fate(self, fate: str) -> None:
        self.client.set("fate", fate)

    def ran(self, times: int) -> None:
        wait_until(lambda: self.client.llen("ran") == times, f"{times} bodies")

    def again(self, task: Task) -> bool:
        """Whether another call of the same sends a message."""
        before = self.messages
        with suppress(AlreadyQueued):
            task.delay("i")
        return self.messages > before

    @contextmanager
    def worker(self, task: Task) -> Iterator[None]:
        """A worker in a thread of this process."""
        with start_worker(task.app, pool="solo", perform_ping_check=False, loglevel="ERROR", shutdown_timeout=60):
            yield

    def forget_lock(self) -> None:
        """What the timeout of a lock does, without waiting for it."""
        with Redis.from_url(f"{self.server}/1") as locks:
            (lock,) = (each for each in locks.scan_iter() if each.startswith((b"qo_", b"SINGLETONLOCK_")))
            locks.delete(lock)


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


def _queued(stage: Stage, task: Task) -> bool:
    task.delay("i")
    return stage.again(task)


def _running(stage: Stage, task: Task) -> bool:
    stage.fate("wait")
    with stage.worker(task):
        first = task.delay("i")
        stage.ran(1)
        is_sent = stage.again(task)
        stage.client.rpush("go", 1)
        first.get(timeout=60)
    return is_sent


def _ended(stage: Stage, task: Task) -> bool:
    with stage.worker(task):
        task.delay("i").get(timeout=60)
    return stage.again(task)


def _forgotten(stage: Stage, task: Task) -> bool:
    task = _ours(stage.server, SOON) if task.name == HERE else task
    with stage.worker(task):
        task.delay("i").get(timeout=60)
    return wait_until(lambda: stage.again(task), "sent again")


def _raised(stage: Stage, task: Task) -> bool:
    stage.fate("raise")
    with stage.worker(task), suppress(ValueError):
        task.delay("i").get(timeout=60)
    return stage.again(task)


def _killed(stage: Stage, task: Task) -> bool:
    stage.fate("die")
    task.delay("i")
    worker = subprocess.run([sys.executable, "-c", KILLED, task.name, stage.server], check=False, timeout=120)
    assert worker.returncode == 9
    return stage.again(task)


def _killed_long_ago(stage: Stage, task: Task) -> bool:
    is_sent = _killed(stage, task)
    if is_sent:
        return True
    stage.forget_lock()
    return stage.again(task)


ACTS: dict[str, Callable[[Stage, Task], bool]] = {
    "while the first is queued": _queued,
    "while its body runs": _running,
    "right after it has ended": _ended,
    "after `retain`": _forgotten,
    "after its body raised": _raised,
    "after its worker was killed in the body": _killed,
    "the same, after the timeout of the lock": _killed_long_ago,
}

CELLS = [
    pytest.param(
        library, row["the same call again"], column, cell, id=f"{library}: {row['the same call again']}: {column}"
    )
    for library, page in PAGES.items()
    for row in table(page, "the same call again")
    for column, cell in row.items()
    if column != "the same call again" and not (library == SINGLETON and column == HERE)
]


@pytest.mark.parametrize(("library", "when", "column", "cell"), CELLS)
def test_same_call_again(stage: Stage, library: str, when: str, column: str, cell: str) -> None:
    """Whether it is sent, as the page says; and what is sent runs."""
    task = TASKS[column](stage.server)

    is_sent = ACTS[when](stage, task)

    assert {True: "sent", False: "not sent"}[is_sent] == cell
    if is_sent:
        ran = stage.client.llen("ran")
        stage.fate("")
        with stage.worker(task):
            stage.ran(ran + 1)


def test_pages_have_every_case() -> None:
    """What here is said of us is the same on both pages."""
    rows = {library: table(page, "the same call again") for library, page in PAGES.items()}

    assert all([row["the same call again"] for row in found] == [*ACTS] for found in rows.values())
    assert len({str([row[HERE] for row in found]) for found in rows.values()}) == 1


def test_who_is_told_what(stage: Stage) -> None:
    """celery-once raises, or tells no id; celery-singleton raises if asked to; here it is the first one's result."""
    once, graceful = TASKS[ONCE](stage.server), {"keys": ["index"], "graceful": True}
    once.delay("i")
    with pytest.raises(AlreadyQueued):
        once.delay("i")
    assert _task(stage.server, QueueOnce, ONCE, once=graceful).delay("i").id is None

    singleton = TASKS[SINGLETON](stage.server)
    assert singleton.delay("i").id == singleton.delay("i").id
    with pytest.raises(DuplicateTaskError):
        _task(stage.server, Singleton, SINGLETON, unique_on="index", raise_on_duplicate=True).delay("i")

    here = TASKS[HERE](stage.server)
    assert here.delay("i").id == here.delay("i").id


# -- while both run


def _left(stage: Stage) -> int:
    """How many locks of theirs there are."""
    with Redis.from_url(f"{stage.server}/1") as client:
        return sum(1 for each in client.scan_iter() if each.startswith((b"qo_", b"SINGLETONLOCK_")))


def _moved(server: str, task: Task, library: str | None, policy: Policy = KEPT) -> Task:
    """Our task of the same name: plain, or with what ``library``'s page has for the time of a deploy."""
    app = _app(server)
    names: dict[str, Any] = {"app": app, "__name__": "page"}
    if library is None:
        options: dict[str, Any] = {"base": IdempotentTask}
    else:
        (line, block), *_ = code(PAGES[library], "python")
        execute_block(PAGES[library], line, block, names)
        leaving: Any = names["rebuild"]
        old = {name: getattr(leaving, name) for name in ("old_keys", "old_names") if hasattr(leaving, name)}
        options = {"base": names["Leaving"], **old}

    def rebuild(index: str) -> None:
        work(server, index)

    # A module would keep its receivers of signals.
    return app.task(name=task.name, shared=False, idempotent=policy, page=names, **options)(rebuild)


@pytest.mark.parametrize("library", PAGES)
@pytest.mark.parametrize("is_cleared", [False, True])
def test_their_message_is_executed_here(stage: Stage, library: str, is_cleared: bool) -> None:
    """Its lock stays and keeps their publishers from sending, unless the page's base clears it."""
    theirs = TASKS[library](stage.server)
    theirs.delay("i")
    here = _moved(stage.server, theirs, library if is_cleared else None)

    with stage.worker(here):
        stage.ran(1)

    assert _left(stage) == (0 if is_cleared else 1)
    assert stage.again(theirs) is is_cleared
    assert not stage.again(here), "its outcome is known"


@pytest.mark.parametrize("library", PAGES)
def test_lock_of_a_duplicate_is_cleared_too(stage: Stage, library: str) -> None:
    """Their publisher sends it again after the first has ended; here it is answered, and no body runs."""
    theirs = TASKS[library](stage.server)
    here = _moved(stage.server, theirs, library)

    with stage.worker(here):
        for _ in range(3):
            theirs.delay("i").get(timeout=60)
            wait_until(lambda: _left(stage) == 0, "unlocked")

    assert stage.messages == 3
    assert stage.client.llen("ran") == 1


@pytest.mark.parametrize("library", PAGES)
def test_our_message_is_executed_there(stage: Stage, library: str) -> None:
    """It runs, and leaves neither a lock nor an outcome; here the call goes on to count as queued."""
    theirs = TASKS[library](stage.server)
    here = _moved(stage.server, theirs, None)
    here.delay("i")

    with stage.worker(theirs):
        stage.ran(1)

    assert _left(stage) == 0
    assert not stage.again(here)
    assert stage.again(theirs)


@pytest.mark.parametrize("library", PAGES)
def test_our_message_that_runs_there_is_sent_again(stage: Stage, library: str) -> None:
    """Nobody claims it."""
    theirs = TASKS[library](stage.server)
    here = _moved(stage.server, theirs, None, SOON)
    here.app.conf.idempotency_queued_for = 1
    stage.fate("wait")
    first = here.delay("i")

    with stage.worker(theirs):
        stage.ran(1)
        wait_until(lambda: stage.again(here), "sent again")
        stage.client.rpush("go", 1, 1)
        first.get(timeout=60)


@pytest.mark.parametrize("library", PAGES)
def test_call_that_both_have_sent_has_one_body_here(stage: Stage, library: str) -> None:
    """Nothing keeps their message and ours out of one queue; the claim makes one operation of them."""
    theirs = TASKS[library](stage.server)
    here = _moved(stage.server, theirs, library)

    sent = [theirs.delay("i"), here.delay("i")]

    assert stage.messages == 2
    with stage.worker(here):
        for each in sent:
            each.get(timeout=60)
    assert stage.client.llen("ran") == 1


def test_locks_of_singleton_are_cleared(stage: Stage) -> None:
    """As the page ends the move."""
    theirs = TASKS[SINGLETON](stage.server)
    theirs.delay("i")
    assert _left(stage) == 1

    clear_locks(theirs.app)

    assert _left(stage) == 0
