"""A real worker of a Django project: its prefork processes claim, run and complete on Django's connections."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from celery import Celery
from django.db import connections

from lab import tether
from lab.embedded import EmbeddedRedis
from tests.django.databases import Server, Settings, migrated, postgresql, sqlite
from tests.django.project.shop.models import Charge
from tests.support.waiting import wait_until

WORKER = ("-A", "tests.django.project", "worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "INFO")
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class Shop(NamedTuple):
    """What stands in DATABASES, the URL of a Redis, the queue of this shop alone, and where its log is."""

    database: Settings
    broker: str
    queue: str
    folder: Path

    @contextmanager
    def running(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """``python -m module arguments...`` with the shop's settings, until the end of the block."""
        environment = {
            "DJANGO_SETTINGS_MODULE": "tests.django.project.settings",
            "SHOP_DATABASE": json.dumps(dict(self.database)),
            "SHOP_BROKER": self.broker,
            "SHOP_QUEUE": self.queue,
        }
        with (self.folder / "log").open("ab") as log:
            process = tether.start(module, *arguments, log=log, env=environment)
        try:
            yield process
        finally:
            tether.stop(process)

    def said(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.nightly)])
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


def test_killed_transaction_of_a_duplicate_has_one_effect_and_message(shop: Shop, alias: str, client: Celery) -> None:
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
        result = client.send_task("shop.charge", ("o-1", 2))
        wait_until(lambda: len(server.sessions()) == 1, "the body is connected")
        assert result.get(timeout=60) == "charged o-1"
        wait_until(lambda: not server.sessions(), "nobody is connected", timeout=10)
    server.close()


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_worker_without_its_table_does_not_start(shop: Shop) -> None:
    """It says which command makes the table."""
    with shop.running("celery", *WORKER, *QUIET) as worker:
        assert worker.wait(60) != 0

    assert "python manage.py migrate --database default" in shop.said()
