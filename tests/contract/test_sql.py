"""The contract on PostgreSQL, MariaDB and SQLite, and the short way of a swap past SQLAlchemy."""

import gc
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from pg8000.core import CoreConnection
from sqlalchemy import event

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.sql import SQLStore, drivers
from celery_idempotent.stores.sql.statement_store import answer
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_claim, a_completion, a_record, a_rival
from tests.support.sql_databases import Database
from tests.support.waiting import wait_until


class TestSQL(StoreContract, PurgeableContract, VerifiableContract):
    """Through psycopg, PyMySQL and Python's module of SQLite."""

    @pytest.fixture
    def store(self, database: Database) -> Iterator[SQLStore]:
        with database.store() as store:
            yield store

    @pytest.fixture
    def misconfigured_store(self, database: Database) -> Iterator[SQLStore]:
        with database.reopened("t_missing") as store:
            yield store

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, SQLStore)
        return SQLStore(store._given or store._url, table=store.table.name)


@pytest.fixture
def hooked(sqlite: Database) -> Iterator[SQLStore]:
    """A store of an engine whose hooks begin transactions, as SQLAlchemy advises for SAVEPOINT on SQLite."""
    with sqlite.engine() as engine:
        event.listen(engine, "connect", lambda link, _: setattr(link, "isolation_level", None))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
        store = SQLStore(engine)
        store.provision()
        yield store


@pytest.mark.nightly
class TestOwnEngineWithHooks(TestSQL):
    """Through an engine of the user's."""

    @pytest.fixture
    def database(self, sqlite: Database) -> Database:
        return sqlite

    @pytest.fixture
    def store(self, hooked: SQLStore) -> SQLStore:
        return hooked


def test_write_by_an_engine_with_hooks_outlives_its_connection(hooked: SQLStore, sqlite: Database) -> None:
    """In the transaction of a hook it would count as won, and be undone where the connection goes back."""
    record = a_claim(hooked)
    transaction = hooked.begin()
    done = a_completion(record)
    transaction.swap(done, record.revision)
    transaction.commit()
    with sqlite.reopened(hooked.table.name) as other:
        assert other.get(record.key) == done


class _AlwaysBegun(sqlite3.Connection):
    """As Python 3.12 has it with ``autocommit=False``: the end of a transaction begins the next."""

    def rollback(self) -> None:
        super().rollback()
        self.execute("BEGIN")


def test_engine_that_cannot_end_its_transactions_is_refused(sqlite: Database) -> None:
    """What nobody commits would count as won."""
    with sqlite.engine(connect_args={"factory": _AlwaysBegun}) as engine:
        store = SQLStore(engine)
        for ask in (lambda: store.swap(a_record(), None), store.begin):
            with pytest.raises(StoreMisconfigured, match="autocommit=False"):
                ask()


_OTHERS = [pytest.param(f"postgresql+{each}", marks=pytest.mark.nightly) for each in ("psycopg2", "pg8000")]
_SERVED = ["postgresql+psycopg", "mysql+pymysql", *_OTHERS]


class TestRefused(OutageContract):
    """Nobody listens."""

    answers_within: ClassVar[float] = 3

    @pytest.fixture(params=_SERVED)
    def unreachable_store(self, request: pytest.FixtureRequest) -> Store:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        return SQLStore(f"{request.param}://app:secret@127.0.0.1:{port}/shop", timeout=0.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestSilent(OutageContract):
    """Connections are taken, and nothing is ever said; pg8000 leaves such a socket to the garbage collector."""

    answers_within: ClassVar[float] = 10

    @pytest.fixture(params=_SERVED)
    def unreachable_store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            yield SQLStore(f"{request.param}://app:secret@127.0.0.1:{port}/shop", timeout=0.5)
        gc.collect()


class TestSQLiteLocked(OutageContract):
    """Another process does not let go of the file."""

    answers_within: ClassVar[float] = 3

    @pytest.fixture
    def unreachable_store(self, sqlite: Database) -> Iterator[Store]:
        with sqlite.store() as provisioned, sqlite.administrator() as other:
            provisioned.close()
            # Readers pass a writer in WAL mode; whoever has the file for himself keeps out both.
            other.exec_driver_sql("PRAGMA journal_mode = DELETE")
            other.exec_driver_sql("BEGIN EXCLUSIVE")
            with sqlite.reopened(provisioned.table.name, timeout=0.2) as store:
                yield store
            other.exec_driver_sql("ROLLBACK")


def _plain(parameters: Any) -> Any:
    """By name or by position, and bytes without what psycopg and psycopg2 put around them."""
    if isinstance(parameters, dict):
        return {name: _plain([value])[0] for name, value in parameters.items()}
    found = [getattr(value, "obj", getattr(value, "adapted", value)) for value in parameters]
    return [bytes(value) if isinstance(value, memoryview) else value for value in found]


def test_both_ways_say_the_same(driven: Database) -> None:
    """An engine of the user's keeps SQLAlchemy's way and its events; statements and parameters do not differ."""
    claimed = replace(a_record(), steps={"a": 1})
    done = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, result=b"\0\xff", expires_at=2**40)
    swaps = [(claimed, None), (done, claimed.revision), (a_rival(claimed), None), (a_rival(claimed), "gone")]
    directly: list[Any] = []
    by_events: list[Any] = []
    with driven.store() as store, driven.engine() as engine:
        a_claim(store)

        def noted(cursor: Any, text: str, told: Any, names: Any) -> Any:
            directly.append((text, _plain(told)))
            return answer(cursor, text, told, names)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("celery_idempotent.stores.sql.store.answer", noted)
            answers = [store.swap(*each) for each in swaps]
        driven.do(f"DELETE FROM {store.table.name}")

        own = SQLStore(engine, table=store.table.name)
        a_claim(own)
        note = lambda _c, _cu, text, told, *_: by_events.append((text, _plain(told)))  # noqa: E731
        event.listen(engine, "before_cursor_execute", note)
        assert [own.swap(*each) for each in swaps] == answers == [claimed, done, done, done]

    assert len(directly) >= len(swaps)
    assert directly == by_events


@pytest.mark.parametrize("is_its_own", [True, False], ids=["server", "pooler"])
def test_nothing_is_prepared_on_a_pooler(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch, is_its_own: bool
) -> None:
    """psycopg does so by itself, with the very statement, which the server then plans once.

    A pooler changes servers at will, and on the next one the name may stand for another client's statement.
    """
    if not is_its_own:
        monkeypatch.setattr(drivers, "has_server_of_its_own", lambda *_: False)
    with postgresql.store() as store:
        known = a_claim(store)
        for number in range(8):
            store.swap(known.but(revision=f"{number}"), None)
        link = store._pool().raw_connection()
        prepared = drivers.of_driver(link).execute("SELECT statement FROM pg_prepared_statements").fetchall()
        store._pool().keep(link)

    assert [text.startswith("WITH written AS \n(INSERT") for (text,) in prepared] == [True] * is_its_own


def test_pg8000_is_refused_behind_a_pooler(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends the values after the statement, and in between the server may have been another client's."""
    told = CoreConnection.handle_BACKEND_KEY_DATA
    with replace(postgresql, url=postgresql.url.replace("psycopg", "pg8000")).store() as store:
        store.close()
        monkeypatch.setattr(
            *(CoreConnection, "handle_BACKEND_KEY_DATA"),
            lambda self, data, context: told(self, b"made" + data[4:], context),
        )
        for ask in (lambda: store.swap(a_record(), None), lambda: store.get("a"), store.begin, store.verify):
            with pytest.raises(StoreMisconfigured, match=r"use postgresql\+psycopg"):
                ask()


def test_kept_connection_is_there_for_everything_else_until_the_store_is_closed(sqlite: Database) -> None:
    """Nobody waits for one that is idle, nor goes on waiting; a store that was closed can be used again."""
    with sqlite.store(pool_size=2, timeout=5) as store, ThreadPoolExecutor() as threads:
        for _ in range(2):
            record, kept = a_claim(store), store._pool()
            pool: Any = kept._engine.pool
            for connection in [kept.connect() for _ in range(2)]:
                connection.close()
            links = [kept.raw_connection() for _ in range(2)]
            asked = threads.submit(store.get, record.key)
            wait_until(lambda: pool._pool.not_empty._waiters, "somebody waits")  # noqa: B023
            for link in links:
                kept.keep(link)
            assert asked.result() == record
            store.close()
            assert pool.checkedout() == pool.checkedin() == 0


def test_kept_connection_is_replaced_for_its_age(sqlite: Database) -> None:
    """The pool replaces what is too old; it cannot look at what never comes back."""
    with sqlite.store() as store:
        a_claim(store)
        link = store._pool().raw_connection()
        link.info[drivers._FIRST_USED] -= drivers._RECYCLE
        aged = drivers.of_driver(link)
        store._pool().keep(link)
        successor = store._pool().raw_connection()
        assert drivers.of_driver(successor) is not aged
        store._pool().keep(successor)
