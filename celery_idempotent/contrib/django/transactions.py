"""A transaction of Django's in which a record is written together with the user's models."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import Error, IntegrityError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.sql.statement_store import StatementStore


class _Undone(Exception):
    """Makes an ``atomic()`` block roll back."""


class DjangoTransaction:
    """See :class:`celery_idempotent.stores.Transaction`; an ``atomic(durable=True)`` block on Django's connection."""

    def __init__(
        self, store: StatementStore[BaseDatabaseWrapper], connection: BaseDatabaseWrapper, close: Callable[[], None]
    ) -> None:
        self.connection = connection
        self._store = store
        self._close = close
        self._atomic = transaction.atomic(using=connection.alias, durable=True)
        try:
            with store.explaining("begin"), _writing_from_the_start(connection):
                self._atomic.__enter__()
        except BaseException:
            close()
            raise
        self._depth = len(connection.savepoint_ids)
        self._is_ended = False

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if not self.connection.in_atomic_block or len(self.connection.savepoint_ids) != self._depth:
            raise PolicyError(
                "transaction", "not at its own level", "end all of your own atomic() blocks first: return tx.done(...)"
            )
        if self.connection.needs_rollback:
            raise PolicyError(
                "transaction",
                "after an error in it",
                "put what may fail into an atomic() of its own, so that only that is undone",
            )
        return self._store.swap_on(self.connection, new, expected)

    def enqueue(self, message: OutboxMessage) -> None:
        self._store.enqueue_on(self.connection, message)

    def commit(self) -> None:
        """See :meth:`celery_idempotent.stores.Transaction.commit`.

        Callbacks of ``transaction.on_commit`` run after it. The outcome is certain by then, so one that raises is
        logged by Django and changes nothing.
        """
        connection: Any = self.connection  # Django's stubs do not know how it keeps its callbacks
        if len(connection.atomic_blocks) == 1:  # else it is in a TestCase, which may want to see them
            connection.run_on_commit = [(ids, call, True) for ids, call, _ in connection.run_on_commit]
        self._is_ended = True
        try:
            self._atomic.__exit__(None, None, None)
        except IntegrityError:
            raise  # a deferred constraint of the user's; Django has rolled back
        except Error as error:
            self._cut()
            first = _first_of(error)
            if not isinstance(first, Error | connection.Database.Error):
                raise first from None
            with self._store.explaining("commit"):
                raise
        except BaseException:
            # A time limit or an exit during the commit. On MySQL and SQLite it may have been committed all
            # the same, record and effects: Django sets autocommit back whatever has happened.
            self._cut()
            raise
        finally:
            self._close()

    def rollback(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        undone = _Undone()
        try:
            self._atomic.__exit__(_Undone, undone, None)
        except Error:
            self._cut()
        finally:
            self._close()

    def _cut(self) -> None:
        """Close the connection: the server undoes what it has not committed."""
        with suppress(Error):
            self.connection.close()


def _first_of(error: BaseException) -> BaseException:
    """What came before all that followed from it: an error in setting autocommit back hides what made it necessary."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


@contextmanager
def _writing_from_the_start(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """On SQLite a transaction that only reads at first could not begin to write beside another one."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        yield
        return
    connection.ensure_connection()
    of_sqlite: Any = connection
    usual, of_sqlite.transaction_mode = of_sqlite.transaction_mode, "IMMEDIATE"
    try:
        yield
    finally:
        of_sqlite.transaction_mode = usual
