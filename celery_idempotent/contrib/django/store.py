"""Records on Django's own connections: the table, statements and errors of the SQL store, run through Django.

A claim must outlast whatever comes after it, so nothing is written where it may be rolled back: an open ``atomic()``
block is refused. Only the transaction that Django's ``TestCase`` puts around a test is ignored, as Django itself does
for ``atomic(durable=True)``.

A connection that the store had to open is closed again at once: in the thread of a heartbeat, or before a worker
forks, nobody else would do it. While a task is executed it stays, and Celery's Django fixup closes it with whatever
the body has used.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

from celery import current_task
from django.apps import apps
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured, SynchronousOnlyOperation
from django.db import Error, IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.asyncio import async_unsafe
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.engine.interfaces import Dialect

from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import scheme_of
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores import forks
from celery_idempotent.stores.sql.drivers import is_dead
from celery_idempotent.stores.sql.schema import outbox, records
from celery_idempotent.stores.sql.statement_store import StatementStore, Values, answer
from celery_idempotent.stores.sql.statements import Reply


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
            remedy = "put what may fail into an atomic() of its own, so that only that is undone"
            raise PolicyError("transaction", "after an error in it", remedy)
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


APP = "celery_idempotent.contrib.django"
"""The entry in ``INSTALLED_APPS``."""

_DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "postgresql": lambda: psycopg.PGDialect_psycopg(paramstyle="pyformat"),  # type: ignore[no-untyped-call]
    "mysql": lambda: mysql.dialect(paramstyle="pyformat"),
    "sqlite": lambda: sqlite.dialect(paramstyle="pyformat"),
}
"""By Django's name of a vendor. All of Django's cursors take parameters in this style."""


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    return _DIALECTS[connection.vendor]()


class DjangoStore(StatementStore[BaseDatabaseWrapper]):
    """Records in the table that the app's migration makes, on one of Django's databases.

    Args:
        alias: The database, a key of ``DATABASES``: PostgreSQL, MySQL, MariaDB or SQLite.

    Raises:
        PolicyError: Django is not set up, the app is not installed, or the database cannot be used.
    """

    wrapper = Error
    errors = (Error,)

    def __init__(self, alias: str = "default") -> None:
        _check(alias)
        self.alias = alias
        self.creation = f"python manage.py migrate --database {alias}"
        super().__init__(dialect_of(connections[alias]), records, outbox)
        _inheritable.add(alias)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store that ``django://alias`` names.

        Raises:
            PolicyError: As for the class; or the URL is not just an alias.
        """
        alias = url.partition("://")[2].rstrip("/")
        if not alias or set(alias) & set(_MORE_THAN_AN_ALIAS):
            raise PolicyError(
                "idempotency_store", scheme_of(url), "write django://default, or another key of DATABASES"
            )
        return cls(alias)

    def __repr__(self) -> str:
        return f"django://{self.alias}"

    def begin(self, using: Any = None) -> DjangoTransaction:
        """See :meth:`celery_idempotent.stores.TransactionalStore.begin`; an ``atomic()`` block, for models and cursors.

        ``using`` stays None: the connection is the thread's own.
        """
        self._refuse_using(using)
        connection, was_open = self._living_connection("begin")
        return DjangoTransaction(self, connection, partial(_give_back, connection, was_open))

    def enqueue(self, message: OutboxMessage, using: Any = None) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.enqueue`; in the ``atomic()`` block around it, or at once."""
        self._refuse_using(using)
        with self._connected("enqueue") as connection:
            # Not tried again: after an error the transaction that it belongs to is lost.
            self.enqueue_on(connection, message)

    def provision(self) -> None:
        """Check as :meth:`verify` does; the table is made by ``manage.py migrate``, as all of Django's.

        Raises:
            StoreMisconfigured: There is no table, or another one; the message names the command.
            StoreUnavailable: The server did not answer.
        """
        self.verify()

    def close(self) -> None:
        """Nothing to release: connections are Django's, and what this store opened it has closed."""

    @contextmanager
    def _connected(self, operation: str) -> Iterator[BaseDatabaseWrapper]:
        connection, was_open = self._living_connection(operation)
        try:
            yield connection
        except StoreUnavailable:
            if not connection.in_atomic_block:
                # It may stand in the middle of an answer, or before a server that only reads.
                _close(connection)
            raise
        finally:
            _give_back(connection, was_open)

    def _living_connection(self, operation: str) -> tuple[BaseDatabaseWrapper, bool]:
        """The thread's connection, and whether somebody else has opened it."""
        self._refuse_async(operation)
        connection = connections[self.alias]
        if operation in _TO_LAST:
            self._refuse_transaction(connection, operation)
        was_open = connection.connection is not None
        if was_open and not connection.in_atomic_block and is_dead(connection.connection):
            _close(connection)  # nothing was sent on it, so nothing is in doubt
        return connection, was_open

    def _refuse_async(self, operation: str) -> None:
        try:
            _outside_event_loops()
        except SynchronousOnlyOperation as error:
            why = "Django's connections cannot be used in async code; call the task by sync_to_async(task.delay)(...)"
            raise StoreMisconfigured(repr(self), operation, why) from error

    def _refuse_using(self, using: Any) -> None:
        if using is not None:
            raise PolicyError("using", repr(type(using)), "a Django store uses Django's own connection; leave it out")

    def _refuse_transaction(self, connection: BaseDatabaseWrapper, operation: str) -> None:
        if connection.in_atomic_block:
            if connection.atomic_blocks[-1]._from_testcase:  # type: ignore[attr-defined]  # as in Django's own check
                return
            opened = "inside atomic()"
        elif connection.connection is not None and not connection.autocommit:
            opened = "after set_autocommit(False)"
        else:
            return
        raise StoreMisconfigured(
            repr(self),
            operation,
            f"{opened} on database {self.alias!r} a claim would be rolled back together with whatever comes after it. "
            "Call the task after the end of the transaction: transaction.on_commit(...) or delay_on_commit(...); "
            "with ATOMIC_REQUESTS mark the view by transaction.non_atomic_requests",
        )

    def _run(self, connection: BaseDatabaseWrapper, text: str, values: Values, names: Sequence[str] | None) -> Reply:
        with connection.cursor() as cursor:
            return answer(cursor, text, values, names)

    def _of_driver(self, connection: BaseDatabaseWrapper) -> Any:
        connection.ensure_connection()
        return connection.connection

    @contextmanager
    def _undone(self, connection: BaseDatabaseWrapper, operation: str) -> Iterator[None]:
        with self.explaining(operation), transaction.atomic(using=self.alias):
            yield
            transaction.set_rollback(True, using=self.alias)


@async_unsafe
def _outside_event_loops() -> None:
    """Raise as Django does of a connection that is used within an event loop."""


_MORE_THAN_AN_ALIAS = "/?#@:"
"""What only a URL with a host, a login or options has; the login stays out of errors."""

_TO_LAST = {"swap", "delete", "begin"}
"""Operations whose effect must not be rolled back with something else."""

_inheritable: set[str] = set()
"""The databases of all stores in this process."""


def _of_stores() -> list[BaseDatabaseWrapper]:
    """This thread's connections that stores use; none where Django may not even be configured."""
    if not _inheritable:
        return []
    return [each for each in connections.all(initialized_only=True) if each.alias in _inheritable]


def _leave_to_parent() -> None:
    for connection in _of_stores():
        pools = getattr(connection, "_connection_pools", {})  # Django's, by alias, for psycopg's option "pool"
        left = connection.connection, pools.pop(connection.alias, None)
        forks.inherited.extend(each for each in left if each is not None)
        connection.connection = None


@forks.before_fork
def _leave_files() -> None:
    """Close idle connections to SQLite files: a child would inherit what SQLite notes of its locks, and not the locks.

    Django opens the file again when it is needed. See the SQL store for what is lost otherwise.
    """
    for connection in _of_stores():
        if connection.vendor == "sqlite" and not connection.in_atomic_block:
            _close(connection)


os.register_at_fork(after_in_child=_leave_to_parent)


def _give_back(connection: BaseDatabaseWrapper, was_open: bool) -> None:
    if not was_open and not current_task:
        _close(connection)


def _close(connection: BaseDatabaseWrapper) -> None:
    with suppress(Error):  # of a connection that is broken already; Django forgets it all the same
        connection.close()


def _check(alias: str) -> None:
    try:
        is_installed, databases = apps.is_installed(APP), connections.settings
    except ImproperlyConfigured as error:
        raise _unusable(alias, "Django is not configured; set DJANGO_SETTINGS_MODULE") from error
    except AppRegistryNotReady as error:
        raise _unusable(alias, "Django is not set up; call django.setup() before the store is used") from error
    if not is_installed:
        raise _unusable(alias, f"add {APP!r} to INSTALLED_APPS, then run: python manage.py migrate")
    if alias not in databases:
        raise _unusable(alias, f"not a key of DATABASES, which has: {', '.join(databases)}")
    if not databases[alias]["AUTOCOMMIT"]:
        raise _unusable(alias, "AUTOCOMMIT is off there, so that a claim could be rolled back; remove that setting")
    try:
        vendor = connections[alias].vendor
    except (ImproperlyConfigured, ImportError) as error:
        raise _unusable(alias, str(error)) from error
    if vendor not in _DIALECTS:
        raise _unusable(alias, f"records can be kept in {', '.join(_DIALECTS)}, and not in {vendor}")


def _unusable(alias: str, remedy: str) -> PolicyError:
    return PolicyError("idempotency_store", f"'django://{alias}'", remedy)
