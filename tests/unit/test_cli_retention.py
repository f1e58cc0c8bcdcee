"""The command that forgets what is past its retention or was released long ago, and the one that prints a table."""
# mypy: allow-untyped-decorators

import builtins
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotencyWarning, Record, Status, StoreMisconfigured
from celery_idempotent.protocol.store import PurgeableStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from celery_idempotent.testing.contract import a_record
from tests.support.commands import run
from tests.support.deliveries import an_app

DAY = 86_400_000


class Counted(MemoryStore):
    """Knows how it was asked to purge."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    def purge(self, limit: int) -> int:
        self.limits.append(limit)
        return super().purge(limit)


@pytest.fixture
def app() -> Celery:
    app = an_app()
    app.conf.idempotency_store = Counted()
    return app


@pytest.fixture
def store(app: Celery) -> Counted:
    store: Counted = app.conf.idempotency_store
    return store


def keep(store: MemoryStore, **values: Any) -> Record:
    record: Record = replace(a_record(), **values)
    store.swap(record, None)
    return record


def _outcomes(store: MemoryStore, count: int, age: int = 60) -> list[Record]:
    past = store.now() // 1000 - age
    return [keep(store, status=Status.COMPLETED, expires_at=past) for _ in range(count)]


def test_purge_deletes_what_is_forgotten_and_nothing_else(app: Celery, store: Counted) -> None:
    """Outcomes past their expiry go; those that still count and records without an expiry stay."""
    _outcomes(store, 3)
    kept = [
        *_outcomes(store, 1, age=-60),
        *(keep(store, status=status, updated_at=1, lease_until=1) for status in Status),
    ]

    result = run(app, "purge")

    assert result.stdout == "3 outcomes deleted\n"
    assert list(store.scan()) == kept


def test_purge_works_in_batches_until_nothing_is_left(app: Celery, store: Counted) -> None:
    """No batch is larger than asked for, and the end is an empty one."""
    _outcomes(store, 5)

    result = run(app, "purge", "--batch", "2")

    assert result.stdout == "5 outcomes deleted\n"
    assert store.limits == [2, 2, 2, 2]
    assert result.stderr == ""


def test_purge_stops_at_the_maximum(app: Celery, store: Counted) -> None:
    """Neither outcomes nor released records are deleted beyond it."""
    _outcomes(store, 5)
    for _ in range(5):
        keep(store, status=Status.RELEASED, updated_at=1)

    result = run(app, "purge", "--batch", "2", "--max", "3", "--released-before", "1")

    assert result.stdout == "3 outcomes deleted\n3 released records deleted\n"
    assert store.limits == [2, 1]
    assert len(list(store.scan())) == 4


def test_released_records_are_deleted_only_when_old(app: Celery, store: Counted) -> None:
    """The age counts from the last write, on the store's clock, and only what is RELEASED goes."""
    now = store.now()
    young = keep(store, status=Status.RELEASED, updated_at=now - 2 * DAY + 60_000)
    others = [keep(store, status=each, updated_at=1) for each in Status if each is not Status.RELEASED]
    keep(store, status=Status.RELEASED, updated_at=now - 2 * DAY - 1)

    result = run(app, "purge", "--released-before", "2")

    assert result.stdout == "0 outcomes deleted\n1 released records deleted\n"
    assert list(store.scan()) == [young, *others]


def test_released_record_claimed_meanwhile_stays(app: Celery) -> None:
    """A delivery that comes between the look and the deletion keeps its claim."""

    class Claimed(StoreWrapper):
        def scan(
            self, *, status: Status | None = None, task: str | None = None, label: str | None = None
        ) -> Iterator[Record]:
            for record in self.store.scan(status=status, task=task, label=label):
                claimed = replace(record, revision="new", status=Status.IN_PROGRESS)
                assert self.store.swap(claimed, record.revision) == claimed
                yield record

    memory = MemoryStore()
    record = keep(memory, status=Status.RELEASED, updated_at=1)
    app.conf.idempotency_store = Claimed(memory)

    result = run(app, "purge", "--released-before", "1")

    assert "0 released records deleted" in result.stdout
    assert memory.get(record.key) is not None


def test_store_that_forgets_by_itself_is_left_alone(app: Celery) -> None:
    """On such a store the command says so, and deletes released records all the same."""
    memory = MemoryStore()
    keep(memory, status=Status.RELEASED, updated_at=1)
    app.conf.idempotency_store = store = StoreWrapper(memory)
    assert not isinstance(store, PurgeableStore)

    result = run(app, "purge", "--released-before", "0.5")

    assert "deletes outcomes by itself" in result.stdout
    assert "1 released records deleted" in result.stdout


@pytest.mark.parametrize(
    "arguments", [("--batch", "0"), ("--batch", "10001"), ("--max", "0"), ("--released-before", "0")]
)
def test_purge_refuses_what_cannot_be_meant(app: Celery, store: Counted, arguments: tuple[str, str]) -> None:
    """A mistyped bound deletes nothing."""
    result = run(app, "purge", *arguments)

    assert result.exit_code == 2
    assert arguments[0] in result.output
    assert store.limits == []


def test_ddl_prints_the_tables_of_the_store(app: Celery) -> None:
    """Under the names and for the database of the store; another dialect is printed on demand. Nothing is connected."""
    app.conf.idempotency_store = "postgresql+psycopg://nobody@127.0.0.1:1/none?table=effects&schema=jobs"

    assert "CREATE TABLE jobs.effects " in run(app, "ddl").stdout
    assert "CREATE TABLE jobs.effects_outbox " in run(app, "ddl").stdout
    assert 'COLLATE "C"' in run(app, "ddl").stdout
    assert "VARBINARY(2048)" in run(app, "ddl", "--dialect", "mysql").stdout


def test_ddl_says_for_what_it_is(app: Celery) -> None:
    """By a comment, so that it can be executed as it is; for programs in an object."""
    app.conf.idempotency_store = "postgresql+psycopg://nobody:secret@127.0.0.1:1/none?table=effects"

    printed, made = run(app, "ddl").stdout, json.loads(run(app, "ddl", "--json").stdout)

    head, statements = printed.split("\n", 1)
    assert head.startswith("-- for postgresql: the tables of postgresql")
    assert "secret" not in printed
    assert made["sql"] == statements
    assert made["dialect"] == "postgresql"


class Lacking(MemoryStore):
    """Has no table until it is provisioned."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = False

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
    assert first.stdout == "memory:// is ready; what was missing is there now\n"
    app.conf.idempotency_store = Lacking()
    assert json.loads(run(app, "provision", "--json").stdout)["lacked"] == "no table"
    assert first.stderr == "Warning: maxmemory-policy=allkeys-lru\n"
    assert run(app, "provision").stdout == "memory:// is ready; nothing was missing\n"
    assert json.loads(run(app, "provision", "--json").stdout) == {"store": "memory://", "lacked": None}


def test_purge_tells_programs_what_it_did(app: Celery, store: Counted) -> None:
    """What was not asked for, or is not this command's to do, is null."""
    _outcomes(store, 3)
    keep(store, status=Status.RELEASED, updated_at=1)

    assert json.loads(run(app, "purge", "--json").stdout) == {
        "store": "memory://",
        "outcomes": 3,
        "released": None,
        "abandoned": None,
    }
    app.conf.idempotency_store = StoreWrapper(store)
    told = json.loads(run(app, "purge", "--json", "--released-before", "1").stdout)
    assert (told["outcomes"], told["released"]) == (None, 1)


@pytest.mark.parametrize("store", ["memory://", None])
def test_ddl_without_an_sql_store_needs_a_dialect(app: Celery, store: str | None) -> None:
    """It prints the default tables; without a dialect it says which there are."""
    app.conf.idempotency_store = store

    printed = run(app, "ddl", "--dialect", "sqlite").stdout
    assert re.findall(r"CREATE TABLE (\w+)", printed) == ["idempotency_records", "idempotency_outbox"]
    refused = run(app, "ddl")
    assert refused.exit_code == 2
    assert "postgresql, mysql, mariadb, sqlite" in refused.output


def test_ddl_without_sqlalchemy_says_what_to_install(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra has a name."""
    real = builtins.__import__

    def without_sql(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("celery_idempotent.stores.sql"):
            raise ModuleNotFoundError(name="sqlalchemy")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_sql)
    result = run(app, "ddl", "--dialect", "mysql")

    assert result.exit_code == 1
    assert 'pip install "celery-idempotent[sql]"' in result.output
