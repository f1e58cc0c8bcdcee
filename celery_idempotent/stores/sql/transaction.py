"""A transaction in which an SQL store's record is written together with the user's rows."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.sql.statement_store import StatementStore


def connection_of(using: Any) -> Connection:
    """The connection of the user's connection or ORM session."""
    if isinstance(using, Connection):
        return using
    if isinstance(using, Session | scoped_session):
        connection: Connection = using.connection()
        return connection
    raise PolicyError("using", repr(type(using)), "must be an SQLAlchemy Connection or Session (not an async one)")


class SQLTransaction:
    """See :class:`celery_idempotent.stores.Transaction`; ``owner`` commits: a connection, or the user's ORM session."""

    def __init__(self, store: StatementStore[Any], owner: Any, close: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._owner = owner
        self._close = close
        self.connection = connection_of(owner)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Transaction.swap`."""
        if isinstance(self._owner, Session | scoped_session):
            self._owner.flush()
        if not self.connection.in_transaction():
            raise PolicyError(
                "transaction", "ended within its block", "leave commit and rollback to it: end with return tx.done(...)"
            )
        return self._store.swap_on(self.connection, new, expected)

    def enqueue(self, message: OutboxMessage) -> None:
        """See :meth:`celery_idempotent.stores.Transaction.enqueue`."""
        self._store.enqueue_on(self.connection, message)

    def commit(self) -> None:
        """See :meth:`celery_idempotent.stores.Transaction.commit`."""
        try:
            self._owner.commit()
        except IntegrityError:
            self.rollback()
            raise  # a deferred constraint of the user's
        except BaseException:  # of the database, or a time limit or a shutdown while it was being asked
            self._abandon()
            with self._store.explaining("commit"):
                raise
        self._close()

    def rollback(self) -> None:
        """See :meth:`celery_idempotent.stores.Transaction.rollback`."""
        if self.connection.closed:
            return
        try:
            self._owner.rollback()
        except SQLAlchemyError:
            self._abandon()
        else:
            self._close()

    def _abandon(self) -> None:
        """Cut the connection: the server undoes what it has not committed."""
        with suppress(SQLAlchemyError):
            self.connection.invalidate()
        with suppress(SQLAlchemyError):
            self._owner.rollback()
        self._close()
