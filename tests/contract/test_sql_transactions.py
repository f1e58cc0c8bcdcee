"""Transactions of SQL stores: the user's rows, messages and the record, all or nothing."""

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, create_engine, event, func, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, declarative_base

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.store import SQLTransaction
from celery_idempotent.testing import OutboxContract, TransactionalContract
from celery_idempotent.testing.contract import a_claim, a_completion, a_record
from tests.support.objects import sealed
from tests.support.scene import raising
from tests.support.sql_databases import Database


class Place:
    """A store, and a ledger of the user's in the same database."""

    def __init__(self, url: str) -> None:
        self.store = SQLStore(url, table=f"t_{uuid4().hex}")
        self.store.provision()
        self.engine = create_engine(self.store._url)
        columns = Column("id", Integer, primary_key=True), Column("text", String(100))
        self.ledger = Table(f"ledger_{uuid4().hex}", MetaData(), *columns)
        self.ledger.metadata.create_all(self.engine)

    def count(self) -> int:
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(self.ledger)).scalar_one()

    def insert(self, connection: Any) -> None:
        connection.execute(insert(self.ledger).values(text="booked"))

    def begun(self, using: Any = None) -> tuple[SQLTransaction, Record, Record]:
        """A transaction with a row and the completion of a claim; the claim and its completion."""
        claimed = a_claim(self.store)
        done = a_completion(claimed)
        transaction = self.store.begin(using)
        self.insert(transaction.connection)
        assert transaction.swap(done, claimed.revision) == done
        return transaction, claimed, done

    def found(self, record: Record) -> tuple[int, Record | None]:
        """How many rows everybody sees, and what is recorded."""
        return self.count(), self.store.get(record.key)


@pytest.fixture
def place(database: Database) -> Iterator[Place]:
    place = Place(database.url)
    yield place
    place.store.close()
    place.engine.dispose()


class TestTransactions(TransactionalContract, OutboxContract):
    """What every store with transactions must do."""

    @pytest.fixture
    def store(self, place: Place) -> SQLStore:
        return place.store

    @pytest.fixture
    def rows(self, place: Place) -> Place:
        return place


class TestSealedTransactions(TestTransactions):
    """They are the same where records are encrypted."""

    @pytest.fixture
    def database(self, sqlite: Database) -> Database:
        return sqlite

    @pytest.fixture
    def store(self, place: Place) -> Any:
        return sealed(place.store)


def test_transaction_that_cannot_begin_is_an_outage(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy hands on what a driver says to a new isolation level; taken for an outcome it would be final.

    SQLite has one writer: who does not get the lock in time leaves no connection behind.
    """
    lost = sqlite3.OperationalError("Lost connection to server during query")
    with sqlite.store() as first, sqlite.reopened(first.table.name, timeout=0.1, pool_size=1) as second:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "execution_options", raising(lost))
            with pytest.raises(StoreUnavailable, match="begin"):
                first.begin()
        holding = first.begin()
        with pytest.raises(StoreUnavailable, match="begin"):
            second.begin()
        holding.rollback()
        second.begin().rollback()


@pytest.mark.parametrize("database", ["postgresql", "mysql"], indirect=True)
def test_renewal_in_the_middle_is_met_and_nobody_sees_anything_before_the_commit(place: Place) -> None:
    """The heartbeat renews while a long transaction runs; the swap then expects the renewed revision.

    SQLite has one writer: there a renewal waits, and so would whoever wanted to take over.
    """
    record = a_claim(place.store)
    renewed = replace(record, revision=new_nonce(), lease_until=record.lease_until + 1)
    transaction = place.store.begin()
    place.insert(transaction.connection)
    assert place.store.swap(renewed, record.revision) == renewed

    done = a_completion(renewed)
    assert transaction.swap(done, renewed.revision) == done
    assert place.found(record) == (0, renewed)
    transaction.commit()
    assert place.found(record) == (1, done)


def test_interrupted_commit_ends_the_transaction(place: Place) -> None:
    """A time limit can strike in the middle of it: no lock and no connection stays behind, so the claim can end."""
    transaction, claimed, _ = place.begun()
    engine, strike = place.store._pool()._engine, raising(SoftTimeLimitExceeded())
    event.listen(engine, "commit", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        transaction.commit()
    event.remove(engine, "commit", strike)

    released = replace(claimed, status=Status.RELEASED, revision=new_nonce())
    assert place.store.swap(released, claimed.revision) == released
    assert place.count() == 0


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_connection_lost_in_a_commit_is_an_outage_and_elsewhere_nobodys_error(place: Place) -> None:
    """Of a commit somebody must find out what became of it; a rollback of what the server has undone hides no error."""
    for end in ("commit", "rollback"):
        transaction, claimed, _ = place.begun()
        link: Any = transaction.connection.connection.dbapi_connection
        with place.engine.connect() as connection:
            connection.exec_driver_sql(f"SELECT pg_terminate_backend({link.info.backend_pid}, 10000)")
        with pytest.raises(StoreUnavailable) if end == "commit" else nullcontext() as raised:
            getattr(transaction, end)()
        assert raised is None or raised.value.__cause__ is not None
        assert place.found(claimed) == (0, claimed)


@pytest.mark.parametrize("strikes", [False, True])
def test_connection_lost_after_a_commit_leaves_the_pool(mysql: Database, strikes: bool) -> None:
    """MySQL is told of the end of the transaction's mode when all that counts is done, and may be gone by then."""
    with mysql.store(pool_size=1, timeout=0.5) as store:
        transaction = store.begin()
        transaction.swap(record := a_record(), None)
        link: Any = transaction.connection.connection.dbapi_connection
        commit = link.commit

        def commit_and_lose() -> None:
            commit()
            link._sock.shutdown(socket.SHUT_RDWR)
            if strikes:
                link.autocommit = raising(SoftTimeLimitExceeded())

        link.commit = commit_and_lose
        with pytest.raises(SoftTimeLimitExceeded) if strikes else nullcontext():
            transaction.commit()
        assert store.get(record.key) == record


def test_session_or_connection_of_the_users_takes_part(place: Place) -> None:
    """What a session added is flushed and committed with the record; a connection stays open for its owner."""
    base: Any = declarative_base()

    class Entry(base):
        __table__ = Table(place.ledger.name, base.metadata, *(column._copy() for column in place.ledger.columns))

    record = a_claim(place.store)
    with Session(place.engine) as session:
        for end, count in ("rollback", 0), ("commit", 1):
            transaction = place.store.begin(session)
            session.add(Entry(text=end))
            transaction.swap(done := a_completion(record), record.revision)
            getattr(transaction, end)()
            assert place.found(record) == (count, done if count else record)

    with place.engine.connect() as connection:
        transaction, claimed, done = place.begun(connection)
        transaction.commit()
        assert not connection.closed
    assert place.found(claimed) == (2, done)


def test_transaction_that_the_user_ended_or_did_not_begin_is_refused(place: Place) -> None:
    """A record written after the user's own commit would not be part of it."""
    record = a_claim(place.store)
    transaction = place.store.begin()
    transaction.connection.commit()
    with pytest.raises(PolicyError, match="leave commit and rollback to it"):
        transaction.swap(a_completion(record), record.revision)
    transaction.rollback()
    with pytest.raises(PolicyError, match="Connection or Session"):
        place.store.begin("session")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_deferred_constraint_is_the_users_own_error(place: Place) -> None:
    """It speaks at the commit, and all is undone."""
    name = f"deferred_{uuid4().hex}"
    transaction, claimed, _ = place.begun()
    for statement in (
        f"CREATE TABLE {name} (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)",
        f"INSERT INTO {name} VALUES (1), (1)",
    ):
        transaction.connection.exec_driver_sql(statement)
    with pytest.raises(IntegrityError):
        transaction.commit()
    assert place.found(claimed) == (0, claimed)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_message_of_a_web_request_belongs_to_its_session(place: Place, end: str) -> None:
    """What is written in the user's own transaction is there if that is committed."""
    message = OutboxMessage("id-1", '{"task": "receipt"}', "application/json")
    with Session(place.engine) as session:
        place.store.enqueue(message, session)
        getattr(session, end)()

    assert [each.message for each in place.store.take(10, 60_000)] == [message] * (end == "commit")
