"""A worker of the previous version beside one of this version, on one broker, store and queue."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.result import AsyncResult
from redis import Redis
from sqlalchemy import create_engine, text

from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from tests.integration.cluster import (
    IdempotentSetup,
    IdempotentWorker,
    IdempotentWorkerContainer,
    WorkerOptions,
    on_redis,
    record_of,
)
from tests.integration.conftest import worker_container
from tests.integration.rolling_tasks import book, pay, pay_at_most_once, pay_published_once
from tests.support import ledger as ledger_module
from tests.support import previous as previous_module
from tests.support import waiting
from tests.support.ledger import Ledger, Row
from tests.support.previous import Previous
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("CI_RUNTIME", "process") != "process", reason="two versions run as processes of this machine"
    ),
    pytest.mark.timeout(300),
]

SEED = 13
CHILDREN = 4
"""Processes of each worker."""
CROWD = 16
"""Orders of each task before, while and after both versions run."""
STRUCK = ("held-previous", "held-present", "struck-previous", "struck-present")
"""Orders in whose midst a process dies."""
PROVISION = "import sys; from celery_idempotent import open_store; open_store(sys.argv[1]).provision()"


@dataclass(frozen=True)
class Place:
    """A store of its own for one test.

    Args:
        url: Its address for both versions.
        database: Where `book` writes, if anywhere.
    """

    url: str
    database: str | None = None

    def bookings(self) -> list[str]:
        """What `book` has committed."""
        assert self.database is not None
        engine = create_engine(self.database)
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT order_id FROM bookings")).scalars().all()
        engine.dispose()
        return list(rows)


@pytest.fixture(params=["redis", "postgres"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Redis, and PostgreSQL, where there is a table to upgrade."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        yield Place(f"{server.url}?prefix=rolling-{uuid4().hex}:")
        return
    url = request.getfixturevalue("postgres").url
    schema = f"rolling_{uuid4().hex}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
        connection.execute(text(f"CREATE TABLE {schema}.bookings (order_id text)"))  # nothing in it is unique
    engine.dispose()
    own = f"{url}?options=-csearch_path%3D{schema}"
    yield Place(own, own)


@pytest.fixture
def default_worker_container_cls() -> type[IdempotentWorkerContainer]:
    """Workers with tasks that both versions can have."""

    class RollingContainer(IdempotentWorkerContainer):
        @classmethod
        def tasks_modules(cls) -> set[Any]:
            from tests.integration import rolling_tasks

            return {waiting, ledger_module, rolling_tasks}

        @classmethod
        def signals_modules(cls) -> set[Any]:
            from tests.integration import quick_pool

            return {quick_pool}

    return RollingContainer


def command_of(version: str) -> list[str]:
    """The command line of a worker for the queue that all share, and one of its version's own."""
    options = WorkerOptions(concurrency=CHILDREN, queues=f"celery,{version}")
    return IdempotentWorkerContainer.command(*options.arguments())


@pytest.fixture
def default_worker_env(default_worker_env: dict[str, str], previous: Previous) -> dict[str, str]:
    """The first worker, which is there when a test begins, is one of the previous version."""
    own = default_worker_env.get("PYTHONPATH")
    return {**default_worker_env, "PYTHONPATH": os.pathsep.join(filter(None, (str(previous.folder), own)))}


@pytest.fixture
def default_worker_command() -> list[str]:
    """Of the previous version."""
    return command_of("previous")


@pytest.fixture
def present_worker_env(
    default_worker_container_cls: type[IdempotentWorkerContainer], celery_worker_cluster_config: dict[str, Any]
) -> dict[str, str]:
    """The environment of a worker of this version."""
    return dict(default_worker_container_cls.initial_env(celery_worker_cluster_config))


@pytest.fixture
def present_worker_command() -> list[str]:
    """Of this version."""
    return command_of("present")


present_worker_container = worker_container("present")


@pytest.fixture
def store_url(place: Place) -> Callable[[str], str]:
    """The same for everybody: nothing stands between the workers and this store."""
    return lambda address: place.url


@pytest.fixture
def faults() -> Any:
    """None, on no address."""
    return SimpleNamespace(host="", port=0)


@pytest.fixture
def store(place: Place, previous: Previous) -> Iterator[Store]:
    """The store by this version, provisioned by the previous one."""
    previous.run("-c", PROVISION, place.url)
    store = open_store(place.url)
    yield store
    store.close()


@dataclass(frozen=True)
class Mixed:
    """Both versions, as a test drives them.

    Args:
        setup: With the worker of the previous version.
        ledger: What bodies did.
        store: As this version sees it.
        rng: What is random.
        results: Everything that was published, by order.
    """

    setup: IdempotentSetup
    ledger: Ledger
    store: Store
    rng: random.Random
    results: dict[tuple[str, str], list[AsyncResult[Any]]]

    def publish(self, task: Any, order: str, *, gate: str = "", queue: str = "celery") -> None:
        """Publish once more; every message of an order has the same arguments."""
        result = task.apply_async((order,), {"gate": gate} if gate else {}, queue=queue)
        self.results[task.name, order].append(result)

    def crowd(self, tasks: Sequence[Any], phase: str) -> None:
        """Three messages for each of many orders, in a random order."""
        messages = [(task, f"{phase}-{number}") for task in tasks for number in range(CROWD)] * 3
        self.rng.shuffle(messages)
        for task, order in messages:
            self.publish(task, order)

    def hold(self, tasks: Sequence[Any], phase: str, version: str) -> list[Row]:
        """Have one order of each task begin on the worker of that version, and stop in the middle of it."""
        for task in tasks:
            self.publish(task, f"{phase}-{version}", gate=f"{phase}-{version}", queue=version)
        return [self.begun(task, f"{phase}-{version}")[0] for task in tasks]

    def begun(self, task: Any, order: str) -> list[Row]:
        """The attempts at an order, as soon as there is one."""

        def found() -> list[Row]:
            return [row for row in self.ledger.rows("begin", order) if row.details["idempotency_key"] in keys]

        keys = {task.idempotency_key_for(order)}
        return wait_until(found, f"{task.name} of {order} begins")

    def deliver_again(self, tasks: Sequence[Any], phase: str, version: str) -> None:
        """What that version holds, to the worker of the other one."""
        (other,) = {"previous", "present"} - {version}
        for task in tasks:
            self.publish(task, f"{phase}-{version}", gate=f"{phase}-{version}", queue=other)

    def strike(self, tasks: Sequence[Any], worker: IdempotentWorker, version: str) -> None:
        """Under load, kill the processes of a worker that are in the middle of an order."""
        rows = self.hold(tasks, "struck", version)
        self.deliver_again(tasks, "struck", version)
        for row in rows:
            worker.send_signal(row.pid, signal.SIGKILL)

    def results_of(self, task: Any, order: str) -> list[Any]:
        """What every message of an order was answered with.

        kombu loses the message that it is fetching from Redis when its worker is killed. Its publisher sends it again.
        """

        def answer(sent: AsyncResult[Any]) -> Any:
            try:
                return sent.get(timeout=45, propagate=False)
            except CeleryTimeout:
                return task.apply_async((order,)).get(timeout=60, propagate=False)

        return [answer(each) for each in self.results[task.name, order]]


@pytest.fixture
def mixed(celery_setup: IdempotentSetup, ledger: Ledger, store: Store) -> Iterator[Mixed]:
    """The previous version alone, so far."""
    yield Mixed(celery_setup, ledger, store, random.Random(SEED), defaultdict(list))
    runtime_of(celery_setup.app).store.close()  # this process publishes once, and asks it


@on_redis
@pytest.mark.worker(visibility_timeout=3)
def test_upgrade_under_load_and_kills_has_every_effect_once_and_leaves_nothing_stuck(
    mixed: Mixed, place: Place, request: pytest.FixtureRequest
) -> None:
    """Workers of both versions die in the middle of operations; the other version goes on with them."""
    struck = [pay, pay_at_most_once, *([book] if place.database else [])]
    tasks = [*struck, pay_published_once]
    old = mixed.setup.worker
    mixed.crowd(tasks, "before")
    mixed.hold(struck, "held", "previous")
    mixed.store.provision()  # beneath a worker of the previous version
    new = IdempotentWorker(request.getfixturevalue("present_worker_container"), mixed.setup.app)
    mixed.crowd(tasks, "while")
    old.kill()
    mixed.deliver_again(struck, "held", "previous")
    assert taken_over(mixed, "held-previous") == "present"
    old.start_again()
    mixed.crowd(tasks, "struck")
    mixed.strike(struck, old, "previous")
    mixed.strike(struck, new, "present")
    taken_over(mixed, "struck-previous")
    taken_over(mixed, "struck-present")
    mixed.hold(struck, "held", "present")
    new.kill()
    mixed.deliver_again(struck, "held", "present")
    assert taken_over(mixed, "held-present") == "previous"
    new.start_again()
    for task, order in product(struck, STRUCK):
        mixed.results_of(task, order)  # nobody else consumes the queue of the previous version
    mixed.crowd(tasks, "again")
    old.shut_down()
    mixed.crowd(tasks, "after")
    audit(mixed, place, tasks)


def taken_over(mixed: Mixed, order: str) -> str:
    """Who took over an order from its middle: it has paid by the same key, or says that nobody can know."""
    first, second, *_ = mixed.ledger.wait_for("charged", count=2, key=order)
    assert second.details["effect_key"] == first.details["effect_key"]
    assert second.details["idempotency_key"] == first.details["idempotency_key"]
    assert second.attempt == 2
    assert second.token > first.token
    doubtful = pay_at_most_once.idempotency_key_for(order)
    wait_until(lambda: record_of(mixed.store, doubtful).status is Status.UNKNOWN, "nobody can know")
    return version_of(second)


def version_of(row: Row) -> str:
    """Which version has written it."""
    return "present" if row.details["package"].startswith(f"{previous_module.ROOT}/") else "previous"


def audit(mixed: Mixed, place: Place, tasks: Sequence[Any]) -> None:
    """Every message is answered, every order has its effect once, and nothing is in progress."""
    by_name = {task.name: task for task in tasks}
    in_doubt = {record.key for record in mixed.store.scan(status=Status.UNKNOWN)}
    for name, order in mixed.results:
        known = by_name[name].idempotency_key_for(order) not in in_doubt
        expected = f"{'booked' if name == book.name else 'paid'} {order}" if known else "OutcomeUnknown"
        told = mixed.results_of(by_name[name], order)
        assert {type(each).__name__ if isinstance(each, Exception) else each for each in told} == {expected}
    # Under "refuse", what a process died of; and no more than one order for each process that did.
    assert {pay_at_most_once.idempotency_key_for(order) for order in STRUCK} <= in_doubt
    assert {key.partition(":")[0] for key in in_doubt} == {pay_at_most_once.name}
    assert len(in_doubt) <= 2 * CHILDREN + 2
    assert set(Counter(row.key for row in mixed.ledger.rows("effect")).values()) == {1}
    receiver = Counter(
        key
        for key, _ in {
            (row.details["idempotency_key"], row.details["effect_key"]) for row in mixed.ledger.rows("charged")
        }
    )
    assert set(receiver.values()) == {1}
    if place.database:
        orders = {order for name, order in mixed.results if name == book.name}
        assert sorted(place.bookings()) == sorted(orders)  # none twice
    statuses = Counter(record.status for record in mixed.store.scan())
    assert statuses == {Status.COMPLETED: len(mixed.results) - len(in_doubt), Status.UNKNOWN: len(in_doubt)}
    versions = Counter(map(version_of, mixed.ledger.rows("begin")))
    assert min(versions["present"], versions["previous"]) > CROWD, versions
    with contextlib.closing(Redis.from_url(mixed.setup.app.conf.broker_url)) as broker:
        wait_until(lambda: not broker.exists("celery", "previous", "present"), "all queues are empty")
        wait_until(lambda: not broker.exists("unacked"), "every message is acknowledged")
