"""Whose connections are used, how long they live, and what becomes of broken and inherited ones."""

import sqlite3
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from django.db import connections, transaction
from django.db.backends.signals import connection_created

from celery_idempotent import IdempotentTask, Policy, StoreMisconfigured, StoreUnavailable
from celery_idempotent.contrib.django.store import DjangoStore, _leave_files, _leave_to_parent
from celery_idempotent.stores import forks
from celery_idempotent.testing import StoreContract
from celery_idempotent.testing.contract import a_record
from celery_idempotent.testing.contract.parallel import in_children, race
from lab.embedded import EmbeddedPostgres
from tests.django.databases import Server, configured, migrated, postgresql, sqlite
from tests.support.deliveries import an_app, deliver
from tests.support.processes import complete_in_a_child_after
from tests.support.waiting import wait_until

MARIADB = pytest.param("mariadb", marks=pytest.mark.nightly)
on_servers = pytest.mark.parametrize("database", ["postgresql", MARIADB], indirect=True)


@pytest.fixture
def store(database: str) -> Iterator[DjangoStore]:
    connections[database].close()
    yield DjangoStore(database)
    connections[database].close()


@pytest.fixture
def server(database: str) -> Iterator[Server]:
    server = Server(database)
    yield server
    server.close()


def own_session(alias: str) -> int:
    """The session of this thread's connection, as the server counts them."""
    mysql = connections[alias].vendor == "mysql"
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT connection_id()" if mysql else "SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def test_what_the_store_opens_it_closes_and_what_it_finds_open_stays(store: DjangoStore) -> None:
    """Outside of a task nobody else closes it; and a connection may have somebody's temporary tables and locks."""
    record, connection = a_record(), connections[store.alias]
    for use in (store.verify, lambda: store.swap(record, None), lambda: store.get(record.key), lambda: store.purge(1)):
        use()
        assert connection.connection is None
    connection.ensure_connection()
    found = connection.connection
    store.swap(a_record(), None)
    store.verify()
    assert connection.connection is found


def test_a_task_uses_one_connection(store: DjangoStore) -> None:
    """Claim, body and completion share it; Celery's Django fixup closes it after the task."""
    note, app = Mock(), an_app(idempotency_store=store)

    @app.task(base=IdempotentTask, shared=False, name="t", idempotent=Policy())
    def body() -> str:
        with connections[store.alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        return "done"

    connection_created.connect(note)
    try:
        assert deliver(body).value == "done"
    finally:
        connection_created.disconnect(note)
    assert [each.kwargs["connection"].alias for each in note.call_args_list] == [store.alias]


@on_servers
def test_inherited_connection_is_left_to_the_parent(store: DjangoStore) -> None:
    """A forked child opens its own; the parent's goes on in whatever it was doing."""
    connection = connections[store.alias]
    connection.ensure_connection()
    inherited = connection.connection
    records = [a_record() for _ in range(3)]

    def work(index: int) -> bool:
        return store.swap(records[index], None) == records[index] and connection.connection is not inherited

    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE mine (n INTEGER)")
        assert in_children([partial(work, index) for index in range(3)]) == [True] * 3
        cursor.execute("SELECT n FROM mine")

    assert connection.connection is inherited
    assert [store.get(each.key) for each in records] == records


def test_what_a_child_does_with_what_it_inherits(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    """It keeps connection and pool unused, whose sockets would mix up replies; what no store uses is not touched."""
    settings = postgresql(postgres)

    def work(alias: str, other: str) -> None:
        connection: Any = connections[alias]
        connection.ensure_connection()
        connections[other].ensure_connection()
        inherited, pool = connection.connection, connection.pool

        _leave_files()
        _leave_to_parent()

        assert connection.connection is None
        assert connections[other].connection is not None
        connection.ensure_connection()
        assert connection.pool is not pool
        assert forks.inherited[-2:] == [inherited, pool]
        del forks.inherited[-2:]
        inherited.execute("SELECT 1")
        pool.putconn(inherited)
        pool.close()
        connection.close()
        connection.close_pool()
        connections[other].close()

    pooled = {**settings, "OPTIONS": {**settings["OPTIONS"], "pool": True}}
    with migrated("pooled", pooled) as alias, configured("no_store", sqlite(tmp_path / "other.sqlite3")) as other:
        DjangoStore(alias)
        race([partial(work, alias, other)])  # a thread, which also has connections of its own


def test_child_loses_nothing_when_its_parent_closes_the_file(tmp_path: Path) -> None:
    """SQLite in WAL mode: whoever closes last deletes the log, and a parent must not take itself for the last."""
    with migrated("wal", sqlite(tmp_path / "shop.sqlite3")) as alias:
        store = DjangoStore(alias)
        with connections[alias].cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")
        assert store.get("k") is None
        # In the child it stays open, as in a task.
        complete_in_a_child_after(connections[alias].close, store, connections[alias].ensure_connection)


SERIALIZABLE = psycopg.IsolationLevel.SERIALIZABLE


@pytest.mark.parametrize(
    "options",
    [
        {"pool": {"min_size": 2, "max_size": 8}},
        pytest.param({"isolation_level": SERIALIZABLE}, marks=pytest.mark.nightly),
    ],
    ids=["pool", "isolation_level"],
)
def test_options_of_postgresql_change_nothing(postgres: EmbeddedPostgres, options: dict[str, Any]) -> None:
    """A pool, parameters bound by the server, transactions in series: races, forks and every field."""
    settings = postgresql(postgres)
    with migrated("options", {**settings, "OPTIONS": {**settings["OPTIONS"], **options}}) as alias:
        store, contract = DjangoStore(alias), StoreContract()
        connections[alias].ensure_connection()
        contract.test_calls_at_once_have_one_history(store)
        contract.test_calls_of_processes_have_one_history(store)
        contract.test_answers_as_a_register_does(store)
        if "pool" in options:
            connections[alias].close_pool()  # type: ignore[attr-defined]  # of PostgreSQL's connections only


@on_servers
def test_connection_that_the_server_closed_is_replaced(store: DjangoStore, server: Server) -> None:
    """Restarted servers and idle timeouts are noticed before anything is sent, so no claim is in doubt."""
    session, record = own_session(store.alias), a_record()
    server.hang_up(session)
    assert store.swap(record, None) == record
    assert own_session(store.alias) != session


@on_servers
def test_connection_lost_in_a_write_leaves_doubt_and_nothing_broken(store: DjangoStore, server: Server) -> None:
    """The caller learns that the outcome is unknown, with the driver's error; the next call has a new connection."""
    record = a_record()
    store.swap(record, None)
    session = own_session(store.alias)
    server.ask("BEGIN")
    server.ask("SELECT status FROM idempotency_records WHERE idempotency_key = %s FOR UPDATE", record.key)
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid = %s"
    if connections[store.alias].vendor == "mysql":
        transactions = "information_schema.innodb_trx"
        waiting = f"SELECT 1 FROM {transactions} WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = %s"

    def kill_when_waiting() -> None:
        other = Server(store.alias)
        wait_until(lambda: other.ask(waiting, session), "the write waits for the lock")
        other.hang_up(session)
        other.close()

    killer = threading.Thread(target=kill_when_waiting)
    killer.start()
    with pytest.raises(StoreUnavailable) as raised:
        store.swap(record.but(revision="2"), record.revision)
    killer.join()
    server.ask("ROLLBACK")

    assert type(raised.value.__cause__).__module__.split(".")[0] in {"psycopg", "pymysql", "MySQLdb"}
    assert connections[store.alias].connection is None
    assert store.swap(record.but(revision="2"), record.revision) == record.but(revision="2")


def test_error_inside_a_transaction_leaves_it_open(empty: str) -> None:
    """It is for whoever opened the block to roll it back."""
    store = DjangoStore(empty)
    with transaction.atomic(using=empty):
        with pytest.raises(StoreMisconfigured):
            store.get("no table")
        assert connections[empty].connection is not None
        transaction.set_rollback(True, using=empty)


def test_locked_file_is_an_outage(tmp_path: Path) -> None:
    """SQLite has one writer at a time; whoever waits longer than its timeout is told that nothing is certain."""
    settings = sqlite(tmp_path / "shop.sqlite3")
    with migrated("locked", {**settings, "OPTIONS": {"timeout": 0.05}}) as alias:
        other, record = sqlite3.connect(settings["NAME"], isolation_level=None), a_record()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="database is locked"):
            DjangoStore(alias).swap(record, None)
        other.close()
        assert DjangoStore(alias).swap(record, None) == record
