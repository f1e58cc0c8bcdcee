"""The contract on PostgreSQL, MariaDB and SQLite, through every driver's own ways to fail."""

import gc
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from sqlalchemy import Engine, create_engine, event

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.store import PurgeableStore, Store, VerifiableStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_completion, a_record
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from tests.support.sql_databases import Database


class _Contract(StoreContract, PurgeableContract, VerifiableContract):
    @pytest.fixture
    def database(self) -> Database:
        raise NotImplementedError

    @pytest.fixture
    def store(self, database: Database) -> Iterator[SQLStore]:
        with database.store() as store:
            yield store

    @pytest.fixture
    def misconfigured_store(self, database: Database) -> Iterator[SQLStore]:
        with database.reopened("t_missing") as store:
            yield store

    def test_says_what_it_can_do(self, store: SQLStore) -> None:
        """The commands and a worker at its start ask the store itself."""
        assert isinstance(store, VerifiableStore)
        assert isinstance(store, PurgeableStore)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, SQLStore)
        return SQLStore(store._given or store._url, table=store.table.name)


class TestPostgreSQL(_Contract):
    """Through psycopg."""

    @pytest.fixture
    def database(self, postgres: EmbeddedPostgres) -> Database:
        return Database(postgres.url, postgres)


class TestMariaDB(_Contract):
    """Through PyMySQL."""

    @pytest.fixture
    def database(self, mariadb: EmbeddedMariaDB) -> Database:
        return Database(mariadb.url, mariadb)


class TestSQLite(_Contract):
    """In a file."""

    @pytest.fixture
    def database(self, tmp_path: Path) -> Database:
        return Database(f"sqlite:///{tmp_path}/records.sqlite")


class TestOwnEngine(_Contract):
    """Through an engine as a user has one, which begins and ends transactions unless it is told not to."""

    @pytest.fixture
    def engine(self, postgres: EmbeddedPostgres) -> Iterator[Engine]:
        engine = create_engine(postgres.url, pool_size=20)
        yield engine
        engine.dispose()

    @pytest.fixture
    def database(self, postgres: EmbeddedPostgres) -> Database:
        return Database(postgres.url, postgres)

    @pytest.fixture
    def store(self, database: Database, engine: Engine) -> Iterator[SQLStore]:
        with database.store() as provisioned:
            yield SQLStore(engine, table=provisioned.table.name)


class TestOwnEngineWithHooks(_Contract):
    """Through an engine whose hooks begin transactions, as SQLAlchemy advises for SAVEPOINT on SQLite."""

    @pytest.fixture
    def database(self, tmp_path: Path) -> Database:
        return Database(f"sqlite:///{tmp_path}/records.sqlite")

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
        record = a_record()
        store.swap(record, None)
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


def test_engine_that_cannot_end_its_transactions_is_refused(tmp_path: Path) -> None:
    """What nobody commits would count as won."""
    with Database(f"sqlite:///{tmp_path}/records.sqlite").engine(connect_args={"factory": _AlwaysBegun}) as engine:
        store = SQLStore(engine)
        with pytest.raises(StoreMisconfigured, match="autocommit=False"):
            store.swap(a_record(), None)
        with pytest.raises(StoreMisconfigured, match="autocommit=False"):
            store.begin()


class _Refused(OutageContract):
    answers_within: ClassVar[float] = 3

    @pytest.fixture
    def unreachable_store(self) -> Store:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        return SQLStore(f"{self.scheme}://app:secret@127.0.0.1:{port}/shop", timeout=0.5)

    scheme: ClassVar[str]


class TestPostgreSQLRefused(_Refused):
    """Nobody listens."""

    scheme = "postgresql+psycopg"


class TestPsycopg2Refused(_Refused):
    """Nobody listens."""

    scheme = "postgresql+psycopg2"


class TestPg8000Refused(_Refused):
    """Nobody listens."""

    scheme = "postgresql+pg8000"


class TestMySQLRefused(_Refused):
    """Nobody listens."""

    scheme = "mysql+pymysql"


class _Silent(_Refused):
    answers_within: ClassVar[float] = 10

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            yield SQLStore(f"{self.scheme}://app:secret@127.0.0.1:{port}/shop", timeout=0.5)


class TestPostgreSQLSilent(_Silent):
    """Connections are taken, and nothing is ever said on them."""

    scheme = "postgresql+psycopg"


class TestPsycopg2Silent(_Silent):
    """The same."""

    scheme = "postgresql+psycopg2"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestPg8000Silent(_Silent):
    """The same; pg8000 leaves the socket of such a connection to the garbage collector."""

    scheme = "postgresql+pg8000"

    @pytest.fixture(autouse=True)
    def collected(self) -> Iterator[None]:
        yield
        gc.collect()


class TestMySQLSilent(_Silent):
    """The same."""

    scheme = "mysql+pymysql"


class TestSQLiteLocked(OutageContract):
    """Another process does not let go of the file."""

    answers_within: ClassVar[float] = 3

    @pytest.fixture
    def unreachable_store(self, tmp_path: Path) -> Iterator[Store]:
        database = Database(f"sqlite:///{tmp_path}/records.sqlite")
        with database.store() as provisioned, database.administrator() as other:
            provisioned.close()
            # Readers pass a writer in WAL mode; whoever has the file for himself keeps out both.
            other.exec_driver_sql("PRAGMA journal_mode = DELETE")
            other.exec_driver_sql("BEGIN EXCLUSIVE")
            with database.reopened(provisioned.table.name, timeout=0.2) as store:
                yield store
            other.exec_driver_sql("ROLLBACK")
