"""Commands on the whole store: what it holds, what it forgets, and its tables."""
# mypy: allow-untyped-decorators

import json
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from celery import Celery

from celery_idempotent import IdempotencyWarning, Record, Status, StoreMisconfigured
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import StoreWrapper
from tests.support.commands import keep, run, told
from tests.support.deliveries import an_app

DAY = 86_400_000
PAUSE = "celery_idempotent.integration.cli.store.time.sleep"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Knows how it was asked to purge."""
    store = MemoryStore()
    monkeypatch.setattr(store, "purge", Mock(wraps=store.purge))
    return store


@pytest.fixture
def app(store: Any) -> Celery:
    return an_app(idempotency_store=store)


def test_stats_count_by_status_and_task(app: Celery) -> None:
    """With the oldest of each, and what is forgotten apart from what counts."""
    now = app.conf.idempotency_store.now()
    for age in (0, 3_600_000, 0):
        keep(app, task="a", status=Status.IN_PROGRESS, updated_at=now - age)
    for expires_at in (1, 2**33):
        keep(app, task="b", status=Status.COMPLETED, updated_at=now, expires_at=expires_at)

    made, shown = told(app, "stats"), run(app, "stats").stdout

    assert made["by_status"] == {"IN_PROGRESS": 3, "COMPLETED": 1, "FORGOTTEN": 1}
    assert made["by_task"] == {"a": {"IN_PROGRESS": 3}, "b": {"COMPLETED": 1, "FORGOTTEN": 1}}
    assert made["oldest_in_progress"] == made["oldest"]["IN_PROGRESS"] < made["oldest"]["FORGOTTEN"]
    assert made["outbox"] is None
    assert "IN_PROGRESS  3        1 h\n" in shown


def test_stats_tell_what_waits_in_the_outbox(app: Celery, tmp_path: Path) -> None:
    """How many, and for how long the oldest one."""
    app.conf.idempotency_store = store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    assert told(app, "stats")["outbox"] == {"depth": 0, "oldest_age": None}
    transaction = store.begin()
    transaction.enqueue(OutboxMessage("t", "{}", "application/json"))
    transaction.commit()
    made = told(app, "stats")["outbox"]
    assert (made["depth"], made["oldest_age"] >= 0) == (1, True)
    assert "outbox: 1 wait, the oldest for 0 s; " in run(app, "stats").stdout
    store.close()


def test_watch_counts_again_until_it_is_interrupted(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe each look is printed: with --json, by a line."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        keep(app)
        if len(pauses) % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(PAUSE, pause)
    looks = [json.loads(each) for each in run(app, "watch", "--every", "7", "--json").stdout.splitlines()]
    assert [each["by_status"] for each in looks] == [{}, {"IN_PROGRESS": 1}, {"IN_PROGRESS": 2}]
    assert run(app, "watch", "--every", "7").stdout.count("the store's clock") == 3
    assert pauses == [7] * 6


def _outcomes(app: Celery, count: int, age: int = 60) -> list[Record]:
    past = app.conf.idempotency_store.now() // 1000 - age
    return [keep(app, status=Status.COMPLETED, expires_at=past) for _ in range(count)]


def test_purge_deletes_what_is_forgotten_and_nothing_else(app: Celery, store: Any) -> None:
    """Outcomes past their expiry go, in batches until one is empty; what still counts or never expires stays."""
    _outcomes(app, 5)
    kept = [*_outcomes(app, 1, age=-60), *(keep(app, status=each, updated_at=1, lease_until=1) for each in Status)]
    made = told(app, "purge", "--batch", "2")
    assert made == {"store": "memory://", "outcomes": 5, "released": None, "abandoned": None}
    assert (store.purge.mock_calls, list(store.scan())) == ([call(2)] * 4, kept)
    app.conf.idempotency_store = StoreWrapper(store)  # as if it forgot by itself
    assert told(app, "purge")["outcomes"] is None


def test_purge_stops_at_the_maximum(app: Celery, store: Any) -> None:
    """Neither outcomes nor released records are deleted beyond it; a mistyped bound deletes nothing."""
    _outcomes(app, 5)
    for _ in range(5):
        keep(app, status=Status.RELEASED, updated_at=1)

    result = run(app, "purge", "--batch", "2", "--max", "3", "--released-before", "1")

    assert result.stdout == "3 outcomes deleted\n3 released records deleted\n"
    assert (store.purge.mock_calls, len(list(store.scan()))) == ([call(2), call(1)], 4)


def test_released_records_are_deleted_only_when_old(app: Celery, store: Any) -> None:
    """The age counts from the last write, on the store's clock, and only what is RELEASED goes."""
    kept = [keep(app, status=each, updated_at=1) for each in Status if each is not Status.RELEASED]
    kept.append(keep(app, status=Status.RELEASED, updated_at=store.now() - 2 * DAY + 60_000))
    keep(app, status=Status.RELEASED, updated_at=store.now() - 2 * DAY - 1)
    assert run(app, "purge", "--released-before", "2").stdout == "0 outcomes deleted\n1 released records deleted\n"
    assert list(store.scan()) == kept


def test_ddl_prints_the_tables_of_the_store(app: Celery) -> None:
    """Under its names and for its database, to be executed as it is; another on demand. Nothing is connected."""
    app.conf.idempotency_store = "postgresql+psycopg://nobody:secret@127.0.0.1:1/none?table=effects&schema=jobs"

    head, statements = run(app, "ddl").stdout.split("\n", 1)
    made = told(app, "ddl")

    assert re.findall(r"CREATE TABLE (\S+)", statements) == ["jobs.effects", "jobs.effects_outbox"]
    assert 'COLLATE "C"' in statements
    assert head.startswith("-- for postgresql: the tables of postgresql")
    assert "secret" not in head
    assert (made["sql"], made["dialect"]) == (statements, "postgresql")
    assert "VARBINARY(2048)" in run(app, "ddl", "--dialect", "mysql").stdout


@pytest.mark.parametrize("url", ["memory://", None])
def test_ddl_without_an_sql_store_needs_a_dialect(app: Celery, url: str | None) -> None:
    """It prints the default tables."""
    app.conf.idempotency_store = url
    printed = run(app, "ddl", "--dialect", "sqlite").stdout
    assert re.findall(r"CREATE TABLE (\w+)", printed) == ["idempotency_records", "idempotency_outbox"]
    assert run(app, "ddl").exit_code == 2


class Lacking(MemoryStore):
    """Has no table until it is provisioned."""

    is_there = False

    def verify(self) -> None:
        if not self.is_there:
            raise StoreMisconfigured("s", "verify", "no table")

    def provision(self) -> None:
        for _ in range(2):
            warnings.warn("maxmemory-policy=allkeys-lru", IdempotencyWarning, stacklevel=1)
        self.is_there = True


@pytest.mark.filterwarnings("always")
def test_provision_says_what_was_missing(app: Celery) -> None:
    """And nothing where nothing was; what is warned of twice is told once."""
    app.conf.idempotency_store = Lacking()
    first = run(app, "provision")
    assert (first.exit_code, first.stderr) == (0, "Warning: maxmemory-policy=allkeys-lru\n")
    assert told(app, "provision") == {"store": "memory://", "lacked": None}
    app.conf.idempotency_store = Lacking()
    assert told(app, "provision")["lacked"] == "no table"
