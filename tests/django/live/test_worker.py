"""A real worker of a Django project: its prefork processes claim, run and complete on Django's connections."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult
from django.db import connections

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.record import Status
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedRedis
from tests.django.databases import migrated, postgresql, sqlite
from tests.django.live.shop import Shop
from tests.django.project.shop.models import Charge
from tests.django.server import Server
from tests.support.waiting import wait_until

WORKER = ("-A", "tests.django.project", "worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "INFO")
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request: pytest.FixtureRequest, redis_server: EmbeddedRedis, tmp_path: Path) -> Shop:
    """A shop with an empty database."""
    settings = sqlite(tmp_path / "shop.sqlite3")
    if request.param == "postgresql":
        settings = postgresql(request.getfixturevalue("postgres"))
    return Shop(settings, redis_server.url, f"shop-{uuid4().hex}", tmp_path)


@pytest.fixture
def alias(shop: Shop) -> Iterator[str]:
    """The shop's database with all tables, seen from here."""
    with migrated("worker", shop.database) as alias:
        yield alias


@pytest.fixture
def client(shop: Shop) -> Iterator[Celery]:
    """Publishes to the shop's queue by the names of its tasks."""
    client = Celery("client", broker=shop.broker, backend=shop.broker, set_as_current=False)
    client.conf.task_default_queue = shop.queue
    yield client
    client.close()


def _charge(client: Celery, *arguments: Any) -> AsyncResult:
    return client.send_task("shop.charge", arguments)


def test_killed_transaction_of_a_duplicate_has_one_effect_and_one_message(
    shop: Shop, alias: str, client: Celery
) -> None:
    """SIGKILL in the block: nothing of it is there; the next attempt commits, and a relay publishes the message."""
    with shop.running("celery", *WORKER, *QUIET):
        results = [client.send_task("shop.book", ("o-1", 30)) for _ in range(2)]
        rows = Charge.objects.using(alias)
        wait_until(rows.filter(order_id="begin o-1").exists, "the body begins")
        os.kill(rows.get(order_id="begin o-1").process, signal.SIGKILL)
        assert [each.get(timeout=60) for each in results] == ["booked o-1 by attempt 2"] * 2
        wait_until(rows.filter(order_id="receipt o-1").exists, "the message is published and its task run")

    assert rows.filter(order_id="o-1").count() == rows.filter(order_id="receipt o-1").count() == 1


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
def test_idle_worker_holds_no_connection(shop: Shop, alias: str, client: Celery) -> None:
    """After its check at the start, and after a task whose lease was renewed, nobody of the worker is connected."""
    connections[alias].close()
    server = Server(alias)
    with shop.running("celery", *WORKER, *QUIET):
        result = _charge(client, "o-1", 2)
        wait_until(lambda: len(server.sessions()) == 1, "the body is connected")
        assert result.get(timeout=60) == "charged o-1"
        wait_until(lambda: not server.sessions(), "nobody is connected", timeout=10)
    server.close()


def test_worker_without_its_table_does_not_start(shop: Shop) -> None:
    """It says which command makes the table."""
    with shop.running("celery", *WORKER, *QUIET) as worker:
        assert worker.wait(60) != 0

    assert "python manage.py migrate --database default" in shop.said()


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_command_line_works_on_the_same_store(shop: Shop, alias: str) -> None:
    """``celery -A shop idempotency`` needs no more than Django's settings."""
    store = DjangoStore(alias)
    store.swap(replace(a_record(), key="kept:1", status=Status.UNKNOWN), None)
    for command in ("check", "list"):
        with shop.running("celery", "-A", "tests.django.project", "idempotency", command) as process:
            assert process.wait(60) == 0
    assert "django://default answers and can be used" in shop.said()
    assert "kept:1" in shop.said()


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_shops_own_tests_pass(shop: Shop) -> None:
    """``manage.py test``: a database made by migrations, in memory on SQLite, and claims in its transactions."""
    with shop.running("django", "test", "tests.django.project.shop") as process:
        assert process.wait(60) == 0, shop.said()
    assert "Ran 2 tests" in shop.said()
