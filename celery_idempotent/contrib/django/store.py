"""Records on Django's own connections: the table, statements and errors of the SQL store, run through Django.

A claim must outlast whatever comes after it, so nothing is written where it may be rolled back: an open ``atomic()``
block is refused. Only the transaction that Django's ``TestCase`` puts around a test is taken for none, as Django does
itself for ``atomic(durable=True)``.

A connection that the store had to open is closed again at once: in the thread of a heartbeat, or before a worker
forks, nobody else would do it. While a task is executed it stays, and Celery's Django fixup closes it with whatever
the body has used.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Self, cast
from weakref import WeakKeyDictionary

from celery import current_task
from django.apps import apps
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured
from django.db import Error, IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from sqlalchemy import ClauseElement, Executable
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.engine.interfaces import Dialect

from celery_idempotent.contrib.django.transactions import DjangoTransaction
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import scheme_of
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge, TakenMessage, WaitingMessage
from celery_idempotent.stores import forks
from celery_idempotent.stores.clock import ServerClock
from celery_idempotent.stores.sql.checks import try_out, warn_of_exposure, warn_of_losses
from celery_idempotent.stores.sql.drivers import explained, gave_way, is_dead, is_duplicate
from celery_idempotent.stores.sql.outbox import OutboxStatements
from celery_idempotent.stores.sql.schema import outbox, records
from celery_idempotent.stores.sql.statements import (
    MYSQL_GREETING,
    SERVER_NOW,
    DuplicateKey,
    Execute,
    Parameters,
    Reply,
    Statements,
    bytes_on_the_wire,
)

__all__ = ["APP", "DjangoStore", "dialect_of"]

APP = "celery_idempotent.contrib.django"
"""What stands in ``INSTALLED_APPS``."""

_DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "postgresql": lambda: psycopg.PGDialect_psycopg(paramstyle="pyformat"),  # type: ignore[no-untyped-call]
    "mysql": lambda: mysql.dialect(paramstyle="pyformat"),
    "sqlite": lambda: sqlite.dialect(paramstyle="pyformat"),
}
"""By Django's name of a vendor. All of Django's cursors take parameters in this style."""


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """SQLAlchemy's dialect for what Django sends over ``connection``."""
    return _DIALECTS[connection.vendor]()


class DjangoStore:
    """Records in the table that the app's migration makes, on one of Django's databases.

    Args:
        alias: The database, a key of ``DATABASES``: PostgreSQL, MySQL, MariaDB or SQLite.

    Raises:
        PolicyError: Django is not set up, the app is not installed, or the database cannot be used.
    """

    def __init__(self, alias: str = "default") -> None:
        _check(alias)
        self.alias = alias
        self._dialect = dialect_of(connections[alias])
        self._statements = Statements(records, self._dialect.name, repr(self))
        self._outbox = OutboxStatements(outbox)
        self._compiled: WeakKeyDictionary[Executable, _Compiled] = WeakKeyDictionary()
        self._clock = ServerClock(lambda: self._statements.now(self._asking("now")))
        self._met: WeakKeyDictionary[BaseDatabaseWrapper, _Met] = WeakKeyDictionary()
        _inheritable.add(alias)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store that ``django://alias`` names.

        Raises:
            PolicyError: As for the class; or the URL says more, or less, than an alias.
        """
        alias = url.partition("://")[2].rstrip("/")
        if not alias or set(alias) & set(_MORE_THAN_AN_ALIAS):
            raise PolicyError(
                "idempotency_store", scheme_of(url), "write django://default, or another key of DATABASES"
            )
        return cls(alias)

    def __repr__(self) -> str:
        return f"django://{self.alias}"

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`."""
        return self._statements.swap(self._asking("swap"), new, expected)

    def swap_on(self, connection: BaseDatabaseWrapper, new: Record, expected: str | None) -> Record | None:
        """The same inside the transaction of ``connection``; it counts if and when that is committed."""
        with self.explaining("swap"):
            return self._statements.swap(partial(self._execute, connection), new, expected)

    def begin(self, using: Any = None) -> DjangoTransaction:
        """See :meth:`celery_idempotent.stores.TransactionalStore.begin`; an ``atomic()`` block, for models and cursors.

        Args:
            using: Nothing: the connection is the thread's own.
        """
        self._refuse_using(using)
        connection, was_open = self._living_connection("begin")
        return DjangoTransaction(self, connection, partial(_give_back, connection, was_open))

    def enqueue(self, message: OutboxMessage, using: Any = None) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.enqueue`; in the ``atomic()`` block around it, or at once."""
        self._refuse_using(using)
        now = self.now()
        with self._borrowed("enqueue") as connection:
            # Not tried again: after an error the transaction that it belongs to is lost.
            self._outbox.enqueue(partial(self._execute, connection), message, now)

    def take(self, limit: int, hold: int) -> list[TakenMessage]:
        """See :meth:`celery_idempotent.stores.Outbox.take`."""
        return self._outbox.take(self._asking("take"), limit, self.now(), hold)

    def give_back(self, messages: Sequence[TakenMessage]) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.give_back`."""
        self._outbox.give_back(self._asking("give_back"), messages)

    def postpone(self, message: TakenMessage, pause: int, reason: str) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.postpone`."""
        self._outbox.postpone(self._asking("postpone"), message, self.now() + pause, reason)

    def forget(self, numbers: Sequence[int]) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.forget`."""
        self._outbox.forget(self._asking("forget"), numbers)

    def waiting(self, limit: int) -> list[WaitingMessage]:
        """See :meth:`celery_idempotent.stores.Outbox.waiting`."""
        return self._outbox.waiting(self._asking("waiting"), limit)

    @contextmanager
    def explaining(self, operation: str) -> Iterator[None]:
        """Within the block, what Django says of the database is said as a store says it."""
        try:
            yield
        except Error as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            creation = f"python manage.py migrate --database {self.alias}"
            raise explained(cause, repr(self), operation, creation=creation) from cause

    def get(self, key: str) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.get`; inside a transaction, what that transaction sees."""
        return self._statements.get(self._asking("get"), key)

    def scan(self, *, status: Status | None = None, task: str | None = None) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; in the order of the keys, by many short statements."""
        return self._statements.scan(self._asking("scan"), status=status, task=task)

    def delete(self, key: str, expected: str) -> bool:
        """See :meth:`celery_idempotent.stores.Store.delete`."""
        return self._statements.delete(self._asking("delete"), key, expected)

    def purge(self, limit: int) -> int:
        """See :meth:`celery_idempotent.stores.PurgeableStore.purge`."""
        return self._statements.purge(self._asking("purge"), limit, self.now())

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`; on SQLite, which has no server, this machine's clock."""
        return time.time_ns() // 1_000_000 if self._dialect.name == "sqlite" else self._clock.now()

    def verify(self) -> None:
        """See :meth:`celery_idempotent.stores.VerifiableStore.verify`; writes records and takes them back.

        Warns of settings under which the server forgets what it has acknowledged.
        """
        with self._borrowed("verify") as connection:
            execute = partial(self._execute, connection)
            with transaction.atomic(using=self.alias):
                try_out(self._statements, execute, repr(self))
                transaction.set_rollback(True, using=self.alias)
            warn_of_losses(self._dialect.name, execute, repr(self))
            warn_of_exposure(self._dialect.name, connection.connection, repr(self))

    def provision(self) -> None:
        """Check as :meth:`verify` does; the table is made by ``manage.py migrate``, as all of Django's.

        Raises:
            StoreMisconfigured: There is no table, or another one; the message names the command.
            StoreUnavailable: The server did not answer.
        """
        self.verify()

    def close(self) -> None:
        """Nothing to release: connections are Django's, and what this store opened it has closed."""

    def _asking(self, operation: str) -> Execute:
        """Executes each statement alone, on the thread's connection."""

        def ask(statement: Executable, parameters: Parameters) -> Reply:
            tries = 0
            while True:
                tries += 1
                try:
                    with self._borrowed(operation) as connection:
                        return self._execute(connection, statement, parameters)
                except StoreUnavailable as error:
                    if tries == _TRIES or not gave_way(error.__cause__):
                        raise

        return ask

    @contextmanager
    def _borrowed(self, operation: str) -> Iterator[BaseDatabaseWrapper]:
        connection, was_open = self._living_connection(operation)
        try:
            with self.explaining(operation):
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
        connection = connections[self.alias]
        if operation in _TO_LAST:
            self._refuse_transaction(connection, operation)
        was_open = connection.connection is not None
        if was_open and not connection.in_atomic_block and is_dead(connection.connection):
            _close(connection)  # nothing was sent on it, so nothing is in doubt
        return connection, was_open

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

    def _execute(self, connection: BaseDatabaseWrapper, statement: Executable, parameters: Parameters, /) -> Reply:
        with connection.cursor() as cursor:
            largest = self._largest_packet(connection, cursor)
            if largest is not None and bytes_on_the_wire(parameters) > largest:
                raise RecordTooLarge(f"max_allowed_packet is {largest} bytes; a byte of a result may take two of them")
            return self._ask(cursor, statement, parameters)

    def _ask(self, cursor: CursorWrapper, statement: Executable, parameters: Parameters) -> Reply:
        text, fixed = self._compile(statement)
        asked_at = self._clock.before_asking()
        try:
            cursor.execute(text, {name: parameters.get(name, value) for name, value in fixed.items()})
        except IntegrityError as error:
            if is_duplicate(error):
                raise DuplicateKey from None
            raise
        if cursor.description is None:
            return Reply([], cursor.rowcount)
        names = [each[0] for each in cursor.description]
        rows = [dict(zip(names, each, strict=True)) for each in cursor.fetchall()]
        if rows and SERVER_NOW in rows[0]:
            self._clock.learn(int(rows[0][SERVER_NOW]), asked_at)
        return Reply(rows, cursor.rowcount)

    def _compile(self, statement: Executable) -> "_Compiled":
        found = self._compiled.get(statement)
        if found is None:
            element = cast(ClauseElement, statement)
            compiled = element.compile(dialect=self._dialect, compile_kwargs={"render_postcompile": True})
            found = self._compiled[statement] = _Compiled(str(compiled), dict(compiled.params))
        return found

    def _largest_packet(self, connection: BaseDatabaseWrapper, cursor: CursorWrapper) -> int | None:
        """Bytes that MySQL takes at once, asked on each new connection, together with the time; None elsewhere."""
        if self._dialect.name != "mysql":
            return None
        met = self._met.get(connection)
        if met is None or met.connection is not connection.connection:
            (row,) = self._ask(cursor, MYSQL_GREETING, {}).rows
            met = self._met[connection] = _Met(connection.connection, int(row["max_allowed_packet"]))
        return met.largest_packet


class _Compiled(NamedTuple):
    """What is sent. Without a reference to the statement it comes from, so that both are forgotten together."""

    text: str
    #: By name, every parameter; the value of those that the statement fixes itself.
    parameters: Mapping[str, Any]


class _Met(NamedTuple):
    connection: object
    largest_packet: int


_MORE_THAN_AN_ALIAS = "/?#@:"
"""What only a URL with a host, a login or options has; the login stays out of errors."""

_TRIES = 10
"""How often a statement is sent that the database undoes for another's sake, as in a deadlock; see the SQL store."""

_TO_LAST = {"swap", "delete", "begin"}
"""Operations whose effect must not be rolled back with something else."""

_inheritable: set[str] = set()
"""The databases of all stores in this process."""


def _leave_to_parent() -> None:
    for connection in connections.all(initialized_only=True):
        if connection.alias in _inheritable and connection.connection is not None:
            forks.inherited.append(connection.connection)
            connection.connection = None
        pools = getattr(connection, "_connection_pools", {})  # Django's, by alias, for psycopg's option "pool"
        if connection.alias in _inheritable and connection.alias in pools:
            forks.inherited.append(pools.pop(connection.alias))


@forks.before_fork
def _leave_files() -> None:
    """Close idle connections to SQLite files: a child would inherit what SQLite notes of its locks, and not the locks.

    Django opens the file again when it is needed. See the SQL store for what is lost otherwise.
    """
    for connection in connections.all(initialized_only=True):
        if connection.alias in _inheritable and connection.vendor == "sqlite" and not connection.in_atomic_block:
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
        raise _unusable(alias, f"DATABASES has no such key; it has: {', '.join(databases)}")
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
