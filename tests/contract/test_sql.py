"""The contract on PostgreSQL, MariaDB and SQLite, through every driver's own ways to fail."""

import gc
import socket
import sqlite3
from collections.abc import Iterator
from typing import ClassVar

import pytest
from sqlalchemy import event

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_claim, a_completion, a_record
from tests.support.sql_databases import Database


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


class TestOwnEngineWithHooks(TestSQL):
    """Through an engine whose hooks begin transactions, as SQLAlchemy advises for SAVEPOINT on SQLite."""

    @pytest.fixture
    def database(self, sqlite: Database) -> Database:
        return sqlite

    @pytest.fixture
    def store(self, database: Database) -> Iterator[SQLStore]:
        with database.engine() as engine:
            event.listen(engine, "connect", lambda link, _: setattr(link, "isolation_level", None))
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
            store = SQLStore(engine)
            store.provision()
            yield store

    def test_write_outlives_its_connection(self, store: SQLStore, database: Database) -> None:
        """In the transaction of a hook it would count as won, and be undone where the connection goes back."""
        record = a_claim(store)
        transaction = store.begin()
        done = a_completion(record)
        transaction.swap(done, record.revision)
        transaction.commit()
        with database.reopened(store.table.name) as other:
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


_DRIVERS = ["postgresql+psycopg", "postgresql+psycopg2", "postgresql+pg8000", "mysql+pymysql"]


class TestRefused(OutageContract):
    """Nobody listens."""

    answers_within: ClassVar[float] = 3

    @pytest.fixture(params=_DRIVERS)
    def unreachable_store(self, request: pytest.FixtureRequest) -> Store:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        return SQLStore(f"{request.param}://app:secret@127.0.0.1:{port}/shop", timeout=0.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestSilent(OutageContract):
    """Connections are taken, and nothing is ever said; pg8000 leaves such a socket to the garbage collector."""

    answers_within: ClassVar[float] = 10

    @pytest.fixture(params=_DRIVERS)
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
