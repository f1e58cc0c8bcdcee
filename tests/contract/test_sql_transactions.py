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
from sqlalchemy import (
    Column,
    Connection,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    select,
)
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
    def store(self, place: Place) -> Any:
        return sealed(place.store)


def test_connection_lost_as_a_transaction_begins_is_an_outage(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy hands on what a driver says to a new isolation level; taken for an outcome it would be final."""

    def lose(self: Connection, **options: Any) -> Connection:
        raise sqlite3.OperationalError("Lost connection to server during query")

    with sqlite.store() as store:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "execution_options", lose)
            with pytest.raises(StoreUnavailable, match="begin"):
                store.begin()
        store.begin().rollback()


def test_transaction_that_cannot_begin_is_an_outage(sqlite: Database) -> None:
    """SQLite has one writer: who does not get the lock in time leaves no connection behind."""
    with sqlite.store() as first, sqlite.reopened(first.table.name, timeout=0.1, pool_size=1) as second:
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


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SoftTimeLimitExceeded])
def test_interrupted_commit_ends_the_transaction(place: Place, interrupt: type[BaseException]) -> None:
    """A time limit can strike in the middle of it: no lock and no connection stays behind, so the claim can end."""

    def strike(connection: Any) -> None:
        raise interrupt

    transaction, claimed, _ = place.begun()
    engine = place.store._pool().engine
    event.listen(engine, "commit", strike)
    with pytest.raises(interrupt):
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


@pytest.mark.parametrize("strike", [None, SoftTimeLimitExceeded])
def test_connection_lost_after_a_commit_leaves_the_pool(mysql: Database, strike: type[BaseException] | None) -> None:
    """MySQL is told of the end of the transaction's mode when all that counts is done, and may be gone by then."""
    with mysql.store(pool_size=1, timeout=0.5) as store:
        record = a_record()
        transaction = store.begin()
        transaction.swap(record, None)
        link: Any = transaction.connection.connection.dbapi_connection
        commit = link.commit

        def struck(mode: bool) -> None:
            assert strike
            raise strike

        def commit_and_lose() -> None:
            commit()
            link._sock.shutdown(socket.SHUT_RDWR)
            if strike:
                link.autocommit = struck

        link.commit = commit_and_lose
        with pytest.raises(strike) if strike else nullcontext():
            transaction.commit()

        assert store.get(record.key) == record


def test_orm_session_of_the_users_takes_part(place: Place) -> None:
    """What was added is flushed and committed with the record, and a rollback expires it."""
    base: Any = declarative_base()

    class Entry(base):
        __table__ = Table(place.ledger.name, base.metadata, *(column._copy() for column in place.ledger.columns))

    record = a_claim(place.store)
    with Session(place.engine) as session:
        transaction = place.store.begin(session)
        session.add(Entry(text="undone"))
        transaction.swap(a_completion(record), record.revision)
        transaction.rollback()
        assert (place.count(), place.store.get(record.key)) == (0, record)

        transaction = place.store.begin(session)
        session.add(Entry(text="booked"))
        transaction.swap(done := a_completion(record), record.revision)
        transaction.commit()

    assert (place.count(), place.store.get(record.key)) == (1, done)


def test_connection_of_the_users_takes_part(place: Place) -> None:
    """Its transaction is committed; it stays open for its owner."""
    with place.engine.connect() as connection:
        transaction, claimed, done = place.begun(connection)
        transaction.commit()

        assert not connection.closed
    assert place.found(claimed) == (1, done)


def test_transaction_that_the_user_ended_is_refused(place: Place) -> None:
    """A record written after the user's own commit would not be part of it."""
    record = a_claim(place.store)
    transaction = place.store.begin()
    place.insert(transaction.connection)
    transaction.connection.commit()

    with pytest.raises(PolicyError, match="leave commit and rollback to it"):
        transaction.swap(a_completion(record), record.revision)
    transaction.rollback()

    assert place.store.get(record.key) == record


@pytest.mark.parametrize("using", ["session", 7, object()])
def test_something_else_is_refused(using: Any) -> None:
    """A mistake is told before anything happens."""
    with pytest.raises(PolicyError, match="Connection or Session"):
        SQLStore("sqlite:////no/such/folder/x").begin(using)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_deferred_constraint_is_the_users_own_error(place: Place) -> None:
    """It speaks at the commit, and all is undone."""
    metadata = MetaData()
    parent = ForeignKey("parents_of_it.id", deferrable=True, initially="DEFERRED")
    key = Column("id", Integer, primary_key=True)
    deferred = Table(f"deferred_{uuid4().hex}", metadata, key, Column("parent", parent))
    Table("parents_of_it", metadata, Column("id", Integer, primary_key=True))
    metadata.create_all(place.engine)

    transaction, claimed, _ = place.begun()
    transaction.connection.execute(insert(deferred).values(id=1, parent=99))
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
