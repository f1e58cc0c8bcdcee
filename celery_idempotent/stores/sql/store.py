"""SQL databases through SQLAlchemy: PostgreSQL, MySQL, MariaDB and SQLite.

What is said to the database stands in :mod:`celery_idempotent.stores.sql.statements`, the table in
:mod:`celery_idempotent.stores.sql.schema`, what differs between drivers in
:mod:`celery_idempotent.stores.sql.drivers`. Here it is executed: on a pooled connection in autocommit mode, so that a
swap is one statement and one round trip where the database can; or inside a transaction of the caller's
(:meth:`SQLStore.swap_on`).
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, Executable, Inspector, MetaData, Table, inspect, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import DDLElement

from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge, TakenMessage, WaitingMessage
from celery_idempotent.stores import forks
from celery_idempotent.stores.clock import ServerClock
from celery_idempotent.stores.sql.checks import try_out, warn_of_exposure, warn_of_losses
from celery_idempotent.stores.sql.drivers import (
    already_exists,
    cause_of,
    connectable,
    explained,
    gave_way,
    is_dead,
    is_duplicate,
    new_engine,
    parsed,
    url_of,
)
from celery_idempotent.stores.sql.outbox import OutboxStatements
from celery_idempotent.stores.sql.schema import (
    TABLE,
    completion,
    creation,
    outbox,
    outbox_table,
    records,
    records_table,
)
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
from celery_idempotent.stores.sql.transaction import SQLTransaction, connection_of

__all__ = ["SQLStore"]

_TIMEOUT = 5.0
"""Seconds. A server that needs longer is in trouble, and leases would end meanwhile."""

_POOL_SIZE = 64
"""At least the concurrency of any sane threaded worker, with its heartbeat."""

_PAUSE = 0.02
"""Seconds between two tries where a database does not wait by itself."""

_TRIES = 10
"""How often a statement is sent that the database undoes for another's sake: a deadlock on MySQL, where several
deliveries claim a key in the moment of its deletion. Each time, somebody else has got on."""

_LONGEST_NAME = 50
"""Characters; PostgreSQL cuts names at 63 bytes, and the name of the index has some more."""

_LARGEST_PACKET = "celery_idempotent.max_allowed_packet"
"""In the ``info`` of every connection that was used before: bytes, or None where there is no such limit."""

_LEVEL: Mapping[str, Any] = {
    "postgresql": "READ COMMITTED",
    "mysql": "READ COMMITTED",
    "mariadb": "READ COMMITTED",
    "sqlite": "SERIALIZABLE",
}
"""By dialect, the isolation level of :meth:`SQLStore.begin`: one at which a renewal by the heartbeat, in the middle of
a long transaction, does not make it fail. SQLite has no other."""

_on_files: "WeakSet[SQLStore]" = WeakSet()
"""Stores on SQLite."""


@forks.before_fork
def _leave_files() -> None:
    for store in _on_files:
        store._leave_file()


class SQLStore:
    """Records as rows of one table, one row per idempotency key.

    Args:
        engine_or_url: A URL: ``postgresql+psycopg://user:password@host/database``, ``mysql+pymysql://...``,
            ``mariadb+pymysql://...``, ``sqlite:///file``, or as Celery's result backend spells it,
            ``db+postgresql://...``. Or an engine of your own, with its pool and timeouts; it is used in
            autocommit mode, and after a fork its inherited connections are left to the parent.
        table: Name of the table.
        schema: Its schema; None: the first in the connection's search path.
        timeout: Seconds to connect, to wait for a free connection, and for a statement; None: 5. Not with an engine.
        pool_size: Connections per process at most, each opened when it is needed; None: 64. Not with an engine.

    Raises:
        PolicyError: An option cannot be used; the message names the remedy.
    """

    def __init__(
        self,
        engine_or_url: Engine | URL | str,
        *,
        table: str = TABLE,
        schema: str | None = None,
        timeout: float | None = None,
        pool_size: int | None = None,
    ) -> None:
        if not 1 <= len(table) <= _LONGEST_NAME:
            raise PolicyError("table", repr(table), f"must be a name of 1 to {_LONGEST_NAME} characters")
        self._given: Engine | None = None
        if isinstance(engine_or_url, URL | str):
            self._url = connectable(parsed(engine_or_url) if isinstance(engine_or_url, str) else engine_or_url)
        else:
            self._given, self._url = engine_or_url, connectable(url_of(engine_or_url))
        if self._given is not None and (timeout, pool_size) != (None, None):
            raise PolicyError("timeout, pool_size", f"{timeout}, {pool_size}", "an engine of your own brings its own")
        self._timeout = _at_least(0.1, "timeout", _TIMEOUT if timeout is None else timeout)
        self._pool_size = int(_at_least(1, "pool_size", _POOL_SIZE if pool_size is None else pool_size))
        is_default = (table, schema) == (TABLE, None)
        #: The table, as SQLAlchemy knows it.
        self.table: Table = records if is_default else records_table(table, schema=schema, metadata=MetaData())
        #: Which database it is: one of :data:`celery_idempotent.stores.sql.schema.DIALECTS`.
        self.dialect = self._url.get_backend_name()
        #: The table of messages to be published.
        self.outbox: Table = (
            outbox if is_default else outbox_table(f"{table}_outbox", schema=schema, metadata=MetaData())
        )
        self._outbox = OutboxStatements(self.outbox)
        self._statements = Statements(self.table, self.dialect, repr(self))
        self._clock = ServerClock(lambda: self._statements.now(self._asking("now")))
        self._engine = forks.PerProcess(self._new_engine)
        self._made_in = os.getpid()
        if self.dialect == "sqlite":
            with forks.making:
                _on_files.add(self)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The store that ``url`` names: SQLAlchemy's, with this class's options in its query.

        Raises:
            PolicyError: The URL cannot be used; the message names the remedy.
        """
        found = parsed(url)
        query = dict(found.query)
        options: dict[str, Any] = {name: str(query.pop(name)) for name in ("table", "schema") if name in query}
        options |= {name: _number(name, query.pop(name)) for name in ("timeout", "pool_size") if name in query}
        return cls(found.set(query=query), **options)

    def __repr__(self) -> str:
        place = URL.create(self.dialect, host=self._url.host, port=self._url.port, database=self._url.database)
        return f"{place.render_as_string()}?table={self.table.fullname}"

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`."""
        return self._statements.swap(self._asking("swap"), new, expected)

    def swap_on(self, connection: Connection, new: Record, expected: str | None) -> Record | None:
        """The same on a connection of the caller's, inside its transaction, which the caller commits.

        The record is written if and when that transaction is committed, together with all else in it.

        Args:
            connection: A connection to the same database.
            new: The record to write, whole.
            expected: The revision that must be stored now; None if there must be no record.

        Returns:
            As :meth:`swap` does. What is returned counts once the transaction is committed.

        Raises:
            RecordTooLarge: The record exceeds the database's limit.
            StoreUnavailable: The statement failed; roll back.
        """
        self._meet(connection, "swap")
        return self._statements.swap(partial(self._execute, connection, "swap"), new, expected)

    def begin(self, using: Any = None) -> SQLTransaction:
        """See :meth:`celery_idempotent.stores.TransactionalStore.begin`.

        Args:
            using: Your SQLAlchemy ``Connection`` or ORM ``Session``; what its transaction holds so far is part of it.
                None: a connection of the store's pool, with its timeouts.
        """
        if using is not None:
            return SQLTransaction(self, using)
        with self._explaining("begin"):
            connection = self._living_connection()
        try:
            with self._explaining("begin"):
                connection.rollback()  # of what SQLAlchemy has begun in name only
                connection = connection.execution_options(isolation_level=_LEVEL[self.dialect])
                connection.begin()
                if self.dialect == "sqlite":
                    # A transaction that only reads at first could not begin to write beside another one.
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        return SQLTransaction(self, connection, connection.close)

    def enqueue_on(self, connection: Connection, message: OutboxMessage) -> None:
        """Put a message into the outbox, in the transaction of ``connection``, which the caller commits.

        Raises:
            RecordTooLarge: The database has no room for it.
            StoreUnavailable: The statement failed; roll back.
        """
        self._meet(connection, "enqueue")
        self._outbox.enqueue(partial(self._execute, connection, "enqueue"), message, self.now())

    def enqueue(self, message: OutboxMessage, using: Any) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.enqueue`."""
        self.enqueue_on(connection_of(using), message)

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

    def get(self, key: str) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.get`."""
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
        return time.time_ns() // 1_000_000 if self.dialect == "sqlite" else self._clock.now()

    def verify(self) -> None:
        """See :meth:`celery_idempotent.stores.VerifiableStore.verify`; writes a record and takes it back.

        Warns of settings under which the server forgets what it has acknowledged, and of a connection to another
        machine that others can read.
        """
        with self._connected("verify") as connection:
            execute = partial(self._execute, connection, "verify")
            execute(text("BEGIN"), {})
            try_out(self._statements, execute, repr(self))
            execute(text("ROLLBACK"), {})
            warn_of_losses(self.dialect, execute, repr(self))
            warn_of_exposure(self.dialect, connection.connection.dbapi_connection, repr(self))

    def provision(self) -> None:
        """Create the tables and the index where they are missing; several processes may do so at once.

        Tables of the version before get the columns that they lack, and its workers can go on beside this one's.

        Raises:
            StoreMisconfigured: A table of that name has other columns, or a permission is missing.
            StoreUnavailable: The server did not answer.
        """
        with self._connected("provision") as connection:
            execute = partial(self._execute, connection, "provision")
            if self.dialect == "sqlite":
                self._write_ahead(execute)
                execute(text("BEGIN IMMEDIATE"), {})
            try:
                for table in (self.table, self.outbox):
                    for each in self._lacking(inspect(connection), table):
                        _create(connection, each)
            except SQLAlchemyError as error:
                raise explained(error, repr(self), "provision") from cause_of(error)
            if self.dialect == "sqlite":
                execute(text("COMMIT"), {})
        self.verify()

    def close(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.close`; an engine given by you stays open."""
        engine = self._engine.forget()
        if engine is not None and self._given is None:
            engine.dispose()

    def _write_ahead(self, execute: Execute) -> None:
        """Let readers and the one writer not wait for each other; the file remembers.

        SQLite does not wait here for a writer, whatever its timeout, so it is asked again for as long.
        """
        give_up_at = time.monotonic() + self._timeout
        while True:
            try:
                execute(text("PRAGMA journal_mode = WAL"), {})
                return
            except StoreMisconfigured:
                raise
            except StoreUnavailable:
                if time.monotonic() >= give_up_at:
                    raise
            time.sleep(_PAUSE)

    def _lacking(self, inspector: Inspector, table: Table) -> Sequence[DDLElement]:
        name, schema = table.name, table.schema
        if not inspector.has_table(name, schema):
            return creation(table)
        found = inspector.get_columns(name, schema)
        columns = {each["name"]: not each["nullable"] and each["default"] is None for each in found}
        return completion(table, self.dialect, columns, [each["name"] for each in inspector.get_indexes(name, schema)])

    def _asking(self, operation: str) -> Execute:
        """Executes each statement alone, on whichever connection is free."""

        def ask(statement: Executable, parameters: Parameters) -> Reply:
            tries = 0
            while True:
                tries += 1
                try:
                    with self._connected(operation) as connection:
                        return self._execute(connection, operation, statement, parameters)
                except StoreUnavailable as error:
                    if tries == _TRIES or not gave_way(error.__cause__):
                        raise

        return ask

    def _execute(
        self, connection: Connection, operation: str, statement: Executable, parameters: Parameters, /
    ) -> Reply:
        largest = connection.info[_LARGEST_PACKET]
        if largest is not None and bytes_on_the_wire(parameters) > largest:
            raise RecordTooLarge(f"max_allowed_packet is {largest} bytes, and a byte of a result may take two of them")
        return self._send(connection, operation, statement, parameters)

    def _send(self, connection: Connection, operation: str, statement: Executable, parameters: Parameters) -> Reply:
        asked_at = self._clock.before_asking()
        try:
            result = connection.execute(statement, parameters)
            rows = [dict(each) for each in result.mappings()] if result.returns_rows else []
        except SQLAlchemyError as error:
            if is_duplicate(error):
                raise DuplicateKey from None
            raise explained(error, repr(self), operation) from cause_of(error)
        if rows and SERVER_NOW in rows[0]:
            self._clock.learn(int(rows[0][SERVER_NOW]), asked_at)
        return Reply(rows, result.rowcount)

    @contextmanager
    def _connected(self, operation: str) -> Iterator[Connection]:
        with self._explaining(operation):
            connection = self._living_connection()
        with connection:
            try:
                self._meet(connection, operation)
                yield connection
            except DuplicateKey:
                raise
            except BaseException:
                # It may stand in the middle of an answer, inside a transaction, or before a server that only reads.
                connection.invalidate()
                raise

    @contextmanager
    def _explaining(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, OSError, TypeError, ValueError) as error:
            raise explained(error, repr(self), operation) from cause_of(error)

    def _living_connection(self) -> Connection:
        while True:
            connection = self._engine().connect()
            if _LARGEST_PACKET not in connection.info or not is_dead(connection.connection.dbapi_connection):
                return connection
            # Nothing was sent on it, so nothing is in doubt.
            connection.invalidate()
            connection.close()

    def _meet(self, connection: Connection, operation: str) -> None:
        """Learn what only a connection can tell, once for each."""
        if _LARGEST_PACKET in connection.info:
            return
        largest = None
        if self.dialect in {"mysql", "mariadb"}:
            # Answers to writes have no room for the time there, so a new connection is asked for it.
            (row,) = self._send(connection, operation, MYSQL_GREETING, {}).rows
            largest = row["max_allowed_packet"]
        connection.info[_LARGEST_PACKET] = largest

    def _leave_file(self) -> None:
        """Close idle connections to SQLite, before a fork.

        SQLite notes in memory which locks its process has. A child inherits the notes and not the locks, so it
        would take for granted what only its parent has; and a parent that then closes the file believes itself
        alone, and deletes the log that its children write to.
        """
        engine = self._engine.made() or (self._given if os.getpid() == self._made_in else None)
        if engine is not None:
            engine.dispose()

    def _new_engine(self) -> Engine:
        if self._given is None:
            return new_engine(self._url, timeout=self._timeout, pool_size=self._pool_size)
        if os.getpid() != self._made_in:
            forks.inherited.append(self._given.pool)
            self._given.dispose(close=False)
        return self._given.execution_options(isolation_level="AUTOCOMMIT")


def _create(connection: Connection, what: DDLElement) -> None:
    try:
        connection.execute(what)
    except SQLAlchemyError as error:
        if not already_exists(error):
            raise


def _number(option: str, value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise PolicyError(option, repr(value), "must be a number") from None


def _at_least(smallest: float, option: str, value: float) -> float:
    if not isinstance(value, int | float) or not smallest <= value < float("inf"):
        raise PolicyError(option, repr(value), f"must be {smallest:g} or more")
    return value
