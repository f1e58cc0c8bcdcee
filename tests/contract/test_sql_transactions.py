"""Transactions of SQL stores: the user's rows, messages and the record, all or nothing."""

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import (
    Column,
    Connection,
    Engine,
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
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Outbox, OutboxMessage, TransactionalStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.store import SQLTransaction
from celery_idempotent.testing import OutboxContract, TransactionalContract
from celery_idempotent.testing.contract import a_claim, a_completion, a_record
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from tests.support.objects import sealed
from tests.support.sql_databases import Database


class _Place:
    """A store, and a ledger of the user's in the same database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SQLStore(url, table=f"t_{uuid4().hex}")
        self.store.provision()
        self.engine: Engine = create_engine(self.store._url)
        self.ledger = Table(
            f"ledger_{uuid4().hex}", MetaData(), Column("id", Integer, primary_key=True), Column("text", String(100))
        )
        self.ledger.metadata.create_all(self.engine)

    def count(self) -> int:
        with self.engine.connect() as connection:
            return connection.execute(select(func.count()).select_from(self.ledger)).scalar_one()

    def insert(self, connection: Any) -> None:
        connection.execute(insert(self.ledger).values(text="booked"))

    def close(self) -> None:
        self.store.close()
        self.engine.dispose()


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Place]:
    match request.param:
        case "postgresql":
            postgres: EmbeddedPostgres = request.getfixturevalue("postgres")
            url = postgres.url
        case "mariadb":
            mariadb: EmbeddedMariaDB = request.getfixturevalue("mariadb")
            url = mariadb.url
        case _:
            url = f"sqlite:///{tmp_path}/records.sqlite"
    place = _Place(url)
    yield place
    place.close()


class TestTransactions(TransactionalContract, OutboxContract):
    """What every store with transactions must do."""

    @pytest.fixture
    def store(self, place: _Place) -> SQLStore:
        return place.store

    @pytest.fixture
    def rows(self, place: _Place) -> _Place:
        return place


class TestSealedTransactions(TestTransactions):
    """They are the same where records are encrypted."""

    @pytest.fixture
    def store(self, place: _Place) -> Any:
        return sealed(place.store)


def test_connection_lost_where_a_transaction_begins_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy hands on what a driver says to a new isolation level; taken for an outcome it would be final."""
    store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()

    def lose(self: Connection, **options: Any) -> Connection:
        raise sqlite3.OperationalError("Lost connection to server during query")

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "execution_options", lose)
        with pytest.raises(StoreUnavailable, match="begin"):
            store.begin()

    store.begin().rollback()
    store.close()


@pytest.mark.parametrize("place", ["postgresql", "mariadb"], indirect=True)
def test_nobody_sees_either_before_the_commit(place: _Place) -> None:
    """Neither the record nor the rows. (Readers of SQLite wait.)"""
    record = a_claim(place.store)
    transaction = place.store.begin()
    place.insert(transaction.connection)
    transaction.swap(a_completion(record), record.revision)

    assert (place.count(), place.store.get(record.key)) == (0, record)
    transaction.commit()
    assert isinstance(place.store, TransactionalStore)
    assert isinstance(place.store, Outbox)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SoftTimeLimitExceeded])
def test_interrupted_commit_ends_the_transaction(place: _Place, interrupt: type[BaseException]) -> None:
    """A time limit can strike in the middle of it: no lock and no connection stays behind, so the claim can end."""
    record = a_claim(place.store)
    engine = place.store._pool().engine

    def strike(connection: Any) -> None:
        raise interrupt

    transaction = place.store.begin()
    place.insert(transaction.connection)
    transaction.swap(a_completion(record), record.revision)
    event.listen(engine, "commit", strike)
    with pytest.raises(interrupt):
        transaction.commit()
    event.remove(engine, "commit", strike)

    released = replace(record, status=Status.RELEASED, revision=new_nonce())
    assert place.store.swap(released, record.revision) == released
    assert place.count() == 0


def _cut(transaction: SQLTransaction, place: _Place) -> None:
    """End the server's side of a transaction's connection."""
    pid = transaction.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with place.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid}, 10000)")


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_commit_without_an_answer_is_an_outage(place: _Place) -> None:
    """Who asked must find out what became of it; the connection is not used again."""
    record = a_claim(place.store)
    transaction = place.store.begin()
    place.insert(transaction.connection)
    transaction.swap(a_completion(record), record.revision)
    _cut(transaction, place)

    with pytest.raises(StoreUnavailable) as raised:
        transaction.commit()

    assert raised.value.__cause__ is not None
    assert (place.count(), place.store.get(record.key)) == (0, record)


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_rollback_of_a_dead_connection_is_no_error(place: _Place) -> None:
    """The server has undone it already, and what the body raised must come out."""
    record = a_claim(place.store)
    transaction = place.store.begin()
    place.insert(transaction.connection)
    _cut(transaction, place)

    transaction.rollback()

    assert (place.count(), place.store.get(record.key)) == (0, record)


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_connection_that_died_in_the_pool_is_replaced(place: _Place) -> None:
    """A server that was restarted has closed all; nothing was sent on it, so nobody need hear of it."""
    before = place.store.begin()
    pid = before.connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
    before.rollback()
    with place.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid}, 10000)")

    transaction = place.store.begin()
    place.insert(transaction.connection)
    transaction.commit()

    assert place.count() == 1


@pytest.mark.parametrize("strike", [None, SoftTimeLimitExceeded])
def test_connection_lost_after_the_commit_costs_no_place_in_the_pool(
    mariadb: EmbeddedMariaDB, strike: type[BaseException] | None
) -> None:
    """MySQL is told of the end of the transaction's mode when all that counts is done, and may be gone by then."""
    with Database(mariadb.url, mariadb).store(pool_size=1, timeout=0.5) as store:
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


def test_transaction_that_cannot_begin_is_an_outage(tmp_path: Path) -> None:
    """SQLite has one writer: who does not get the lock in time leaves no connection behind."""
    url = f"sqlite:///{tmp_path}/records.sqlite"
    first, second = SQLStore(url), SQLStore(url, timeout=0.1)
    first.provision()
    holding = first.begin()

    with pytest.raises(StoreUnavailable, match="begin"):
        second.begin()

    holding.rollback()
    second.begin().rollback()
    first.close()
    second.close()


@pytest.mark.parametrize("place", ["postgresql", "mariadb"], indirect=True)
def test_renewal_in_the_middle_is_met_and_not_failed_on(place: _Place) -> None:
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
    transaction.commit()
    assert (place.count(), place.store.get(record.key)) == (1, done)


def test_orm_session_of_the_users_takes_part(place: _Place) -> None:
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


def test_connection_of_the_users_takes_part(place: _Place) -> None:
    """Its transaction is committed; it stays open for its owner."""
    record = a_claim(place.store)
    with place.engine.connect() as connection:
        transaction = place.store.begin(connection)
        place.insert(transaction.connection)
        transaction.swap(a_completion(record), record.revision)
        transaction.commit()

        assert not connection.closed
    assert place.count() == 1


def test_transaction_that_the_user_ended_is_refused(place: _Place) -> None:
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
def test_something_else_is_refused(place: _Place, using: Any) -> None:
    """A mistake is told before anything happens."""
    with pytest.raises(PolicyError, match="Connection or Session"):
        place.store.begin(using)


def test_deferred_constraint_is_the_users_own_error(postgres: EmbeddedPostgres) -> None:
    """It speaks at the commit, and all is undone."""
    place = _Place(postgres.url)
    metadata = MetaData()
    deferred = Table(
        f"deferred_{uuid4().hex}",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("parent", ForeignKey("parents_of_it.id", deferrable=True, initially="DEFERRED")),
    )
    Table("parents_of_it", metadata, Column("id", Integer, primary_key=True))
    metadata.create_all(place.engine)
    record = a_claim(place.store)

    transaction = place.store.begin()
    transaction.connection.execute(insert(deferred).values(id=1, parent=99))
    transaction.swap(a_completion(record), record.revision)
    with pytest.raises(IntegrityError):
        transaction.commit()

    assert place.store.get(record.key) == record
    place.close()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_message_of_a_web_request_belongs_to_its_session(place: _Place, end: str) -> None:
    """What is written in the user's own transaction is there if that is committed."""
    message = OutboxMessage("id-1", '{"task": "receipt"}', "application/json")
    with Session(place.engine) as session:
        place.store.enqueue(message, session)
        getattr(session, end)()

    assert [each.message for each in place.store.take(10, 60_000)] == [message] * (end == "commit")
