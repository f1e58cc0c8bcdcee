"""A transaction of Django's in which a record is written together with the user's models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from celery_idempotent.errors import PolicyError
from celery_idempotent.record import Record
from celery_idempotent.store import OutboxMessage

__all__ = ["DjangoTransaction"]


class _Store(Protocol):
    alias: str

    def swap_on(self, connection: BaseDatabaseWrapper, new: Record, expected: str | None) -> Record | None: ...

    def enqueue(self, message: OutboxMessage, using: Any) -> None: ...

    def explaining(self, operation: str) -> AbstractContextManager[None]: ...


class _Undone(Exception):
    """Makes an ``atomic()`` block roll back."""


class DjangoTransaction:
    """See :class:`celery_idempotent.store.Transaction`; an ``atomic(durable=True)`` block on Django's connection.

    Args:
        store: Whose record is written.
        connection: The thread's connection to the store's database.
        close: Gives the connection back; called once at the end.
    """

    def __init__(self, store: _Store, connection: BaseDatabaseWrapper, close: Callable[[], None]) -> None:
        self.connection = connection
        self._store = store
        self._close = close
        self._atomic = transaction.atomic(using=store.alias, durable=True)
        try:
            with store.explaining("begin"):
                self._atomic.__enter__()
        except BaseException:
            close()
            raise
        self._depth = len(connection.savepoint_ids)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.store.Transaction.swap`."""
        if not self.connection.in_atomic_block or len(self.connection.savepoint_ids) != self._depth:
            raise PolicyError(
                "transaction", "not at its own level", "end every atomic() of yours before: return tx.done(...)"
            )
        if self.connection.needs_rollback:
            raise PolicyError(
                "transaction",
                "after an error in it",
                "put what may fail into an atomic() of its own, so that only that is undone",
            )
        return self._store.swap_on(self.connection, new, expected)

    def enqueue(self, message: OutboxMessage) -> None:
        """See :meth:`celery_idempotent.store.Transaction.enqueue`."""
        self._store.enqueue(message, None)

    def commit(self) -> None:
        """See :meth:`celery_idempotent.store.Transaction.commit`."""
        try:
            with self._store.explaining("commit"):
                self._atomic.__exit__(None, None, None)
        finally:
            self._close()

    def rollback(self) -> None:
        """See :meth:`celery_idempotent.store.Transaction.rollback`."""
        undone = _Undone()
        with suppress(Error, _Undone):
            self._atomic.__exit__(_Undone, undone, None)
        self._close()
