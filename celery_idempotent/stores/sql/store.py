"""SQL databases through SQLAlchemy: PostgreSQL, MySQL, MariaDB and SQLite.

Statements are sent on a pooled connection in autocommit mode, so that a swap is one statement and one round trip where
the database can; or inside a transaction of the caller's (:meth:`SQLStore.swap_on`). On the store's own connections
they go past SQLAlchemy to the driver; an engine of the user's keeps its events, which may be somebody's log, trace or
test. What differs between drivers is in
:mod:`celery_idempotent.stores.sql.drivers`.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from math import ceil
from typing import Any, Self, Unpack
from weakref import WeakSet

from sqlalchemy import URL, Connection, Engine, Index, MetaData, Table, inspect, text
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.schema import CreateIndex, DDLElement, DropIndex

from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import OutboxMessage, Wanted
from celery_idempotent.stores import forks
from celery_idempotent.stores.failures import Meaning
from celery_idempotent.stores.sql.drivers import (
    AnyConnection,
    C,
    ConnectionPool,
    check_pool,
    connectable,
    dialect_of,
    drop,
    end_transaction_of_a_hook,
    new_engine,
    of_driver,
    parsed,
    url_of,
)
from celery_idempotent.stores.sql.errors import meaning_of
from celery_idempotent.stores.sql.schema import (
    TABLE,
    creation,
    indexes_of,
    outbox,
    outbox_table,
    records,
    records_table,
)
from celery_idempotent.stores.sql.statement_store import StatementStore, Values, answer, lacking_indexes, unless_undone
from celery_idempotent.stores.sql.statements import RELATION, Execute, Reply

_TIMEOUT = 5.0
"""Seconds. A server that needs longer is in trouble, and leases would end meanwhile."""

_POOL_SIZE = 64
"""At least the concurrency of any sane threaded worker, with its heartbeat."""

_TO_INDEX, _TO_READ = 3600.0, 60.0
"""Seconds that an index of a table that is there may take, and a look at all its rows."""

_PAUSE = 0.02
"""Seconds between two tries where a database does not wait by itself."""

_LONGEST_NAME = 50
"""Characters; PostgreSQL cuts names at 63 bytes, and the name of the index has some more."""

_on_files: "WeakSet[SQLStore]" = WeakSet()
"""Stores on SQLite."""


@forks.before_fork
def _leave_files() -> None:
    for store in _on_files:
        store._leave_file()


class SQLStore(StatementStore[AnyConnection]):
    """Records as rows of one table, one row per idempotency key.

    Args:
        engine_or_url: A URL: ``postgresql+psycopg://user:password@host/database``, ``mysql+pymysql://...``,
            ``mariadb+pymysql://...``, ``sqlite:///file``, or as Celery's result backend spells it,
            ``db+postgresql://...``. Or an engine of your own, with its pool, timeouts and events; it is used in
            autocommit mode, and after a fork its inherited connections are left to the parent.
        table: Name of the table.
        schema: Its schema; None: the first in the connection's search path.
        timeout: Seconds to connect, to wait for a free connection, and for a statement; None: 5. Not with an engine.
        pool_size: Connections per process at most, each opened when it is needed; None: 64. Not with an engine.

    Raises:
        PolicyError: An option cannot be used; the message names the remedy.
    """

    wrapper = SQLAlchemyError

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
            check_pool(engine_or_url)
        if self._given is not None and (timeout, pool_size) != (None, None):
            raise PolicyError("timeout, pool_size", f"{timeout}, {pool_size}", "an engine of your own brings its own")
        self._timeout = _at_least(0.1, "timeout", _TIMEOUT if timeout is None else timeout)
        self._pool_size = int(_at_least(1, "pool_size", _POOL_SIZE if pool_size is None else pool_size))
        self._pool = forks.PerProcess(lambda: ConnectionPool(self._new_engine()))
        self._made_in = os.getpid()
        tables = records, outbox
        if (table, schema) != (TABLE, None):
            own: dict[str, Any] = {"schema": schema, "metadata": MetaData()}
            tables = records_table(table, **own), outbox_table(f"{table}_outbox", **own)
        self._name = _name_of(self._url, tables[0])
        dialect = dialect_of(self._url)
        self.errors = SQLAlchemyError, dialect.loaded_dbapi.Error
        super().__init__(dialect, *tables)
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
        names = ("table", "schema", "timeout", "pool_size")
        options: dict[str, Any] = {name: str(query.pop(name)) for name in names if name in query}
        return cls(found.set(query=query), **options)

    def __repr__(self) -> str:
        return self._name

    def begin(self, using: Any = None) -> "SQLTransaction":
        """See :meth:`celery_idempotent.stores.TransactionalStore.begin`.

        Args:
            using: Your SQLAlchemy ``Connection`` or ORM ``Session``; what its transaction holds so far is part of it.
                None: a connection of the store's pool, with its timeouts.
        """
        if using is not None:
            return SQLTransaction(self, using)
        with self.explaining("begin", OSError, TypeError, ValueError):
            connection = self._pool().connect()
        try:
            # SQLAlchemy hands on what the driver says to a new isolation level as it is.
            with self.explaining("begin", connection.dialect.loaded_dbapi.Error, OSError, TypeError, ValueError):
                connection.rollback()  # of what SQLAlchemy has begun in name only
                # At a stricter level a renewal in the middle of a long transaction makes it fail. SQLite has one alone.
                level: Any = "SERIALIZABLE" if self.dialect == "sqlite" else "READ COMMITTED"
                connection = connection.execution_options(isolation_level=level)
                self._begin(connection)
                if self.dialect == "sqlite":
                    # A transaction that only reads at first could not begin to write beside another one.
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
            return SQLTransaction(self, connection, partial(_give_back, connection))
        except BaseException:
            drop(connection)
            raise

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; where no index helps, a statement may take long."""
        if self._is_bound or not (any(wanted.values()) and self.reads_all(**wanted)):
            yield from super().scan(**wanted)
            return
        with self.explaining("scan", OSError), self._patient(_TO_READ) as connection:
            yield from self._statements.scan(partial(self._execute, connection, "scan"), **wanted)

    def enqueue(self, message: OutboxMessage, using: Any) -> None:
        self.enqueue_on(connection_of(using), message)

    def provision(self) -> None:
        """Create the tables and the index where they are missing; several processes may do so at once.

        Raises:
            StoreMisconfigured: A table of that name has other columns, or a permission is missing.
            StoreUnavailable: The server did not answer.
        """
        with self._lent("provision", self._pool().connect) as connection:
            if self.dialect == "sqlite":
                self._write_ahead(partial(self._execute, connection, "provision"))
                with self._begun(connection, "provision", "COMMIT"):
                    self._complete(connection)
            else:
                # Two that make an index beside writers wait for each other.
                unless_undone(partial(self._complete, connection))
        self.verify()

    def close(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.close`; an engine given by you stays open."""
        pool = self._pool.forget()
        if pool is not None and self._given is None:
            pool.dispose()

    def _complete(self, connection: Connection) -> None:
        for table in (self.table, self.outbox):
            with self.explaining("provision"):
                if not inspect(connection).has_table(table.name, table.schema):
                    _apply(connection, *creation(table))
                cut_off = [each for each in indexes_of(table) if _is_cut_off(connection, each)]
                _apply(connection, *(DropIndex(each, if_exists=True) for each in cut_off), is_used=True)
                names = lacking_indexes(table, self.dialect, partial(self._execute, connection, "provision"))
                if lacking := [each for each in indexes_of(table) if each.name in names]:
                    with nullcontext(connection) if self._is_bound else self._patient(_TO_INDEX) as patient:
                        _apply(patient, *map(CreateIndex, lacking), is_used=True)

    @property
    def _is_bound(self) -> bool:
        """Whether all connections have the timeouts of an engine that was given, or a statement has none anyhow."""
        return self._given is not None or self.dialect == "sqlite"

    @contextmanager
    def _patient(self, seconds: float) -> Iterator[Connection]:
        """A connection that waits for what a large table takes, but for no lock that keeps writers waiting."""
        engine = new_engine(self._url, timeout=seconds, pool_size=1)
        try:
            with engine.connect() as patient:
                if self.dialect != "postgresql":
                    patient.execute(text(f"SET SESSION lock_wait_timeout = {ceil(self._timeout)}"))
                yield patient
        finally:
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

    def _connected(self, operation: str) -> AbstractContextManager[AnyConnection]:
        if self._given is None:
            return self._lent(operation, self._pool().raw_connection)
        return self._lent(operation, self._pool().connect)

    @contextmanager
    def _lent(self, operation: str, connect: Callable[[], C]) -> Iterator[C]:
        pool = self._pool()  # for a process that forks meanwhile, still this one's
        with self.explaining(operation, OSError, TypeError, ValueError):
            lent = connect()
        try:
            if isinstance(lent, Connection):
                with self.explaining(operation):
                    self._begin(lent)
            yield lent
        except BaseException:
            # It may stand in the middle of an answer, inside a transaction, or before a server that only reads.
            drop(lent)
            raise
        if isinstance(lent, Connection):
            lent.close()
        else:
            pool.keep(lent)

    def _begin(self, connection: Connection) -> None:
        """What SQLAlchemy would do by itself; in autocommit mode it calls hooks, and nothing more."""
        connection.begin()
        if self.dialect == "sqlite":
            end_transaction_of_a_hook(connection)

    def _run(self, connection: AnyConnection, text: str, values: Values, names: Sequence[str] | None) -> Reply:
        if not isinstance(connection, Connection):
            return answer(connection.cursor(), text, values, names)
        result = connection.exec_driver_sql(text, values)
        return Reply([dict(each) for each in result.mappings()] if result.returns_rows else [], result.rowcount)

    def _of_driver(self, connection: AnyConnection) -> Any:
        return of_driver(connection)

    @contextmanager
    def _begun(self, connection: AnyConnection, operation: str, end: str) -> Iterator[None]:
        """A transaction that ``end`` ends. One that fails is rolled back, as your engine may keep the connection."""
        execute = partial(self._execute, connection, operation)
        execute(text("BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN"), {})
        try:
            yield
        except BaseException:
            with suppress(StoreUnavailable):
                execute(text("ROLLBACK"), {})
            raise
        execute(text(end), {})

    def _undone(self, connection: AnyConnection, operation: str) -> AbstractContextManager[None]:
        return self._begun(connection, operation, "ROLLBACK")

    def _leave_file(self) -> None:
        """Close idle connections to SQLite, before a fork.

        SQLite notes in memory which locks its process has. A child inherits the notes and not the locks, so it
        would take for granted what only its parent has; and a parent that then closes the file believes itself
        alone, and deletes the log that its children write to.
        """
        pool = self._pool.made()
        if pool is not None:
            pool.dispose()
        elif self._given is not None and os.getpid() == self._made_in:
            self._given.dispose()

    def _new_engine(self) -> Engine:
        if self._given is None:
            return new_engine(self._url, timeout=self._timeout, pool_size=self._pool_size)
        if os.getpid() != self._made_in:
            forks.inherited.append(self._given.pool)
            self._given.dispose(close=False)
        return self._given.execution_options(isolation_level="AUTOCOMMIT")


def _name_of(url: URL, table: Table) -> str:
    place = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database)
    return f"{place.render_as_string()}?table={table.fullname}"


def _give_back(connection: Connection) -> None:
    """To the pool, when its transaction has ended one way or the other: what fails now costs the connection alone."""
    # Left to the pool, whose place for it would be lost where the server is not there for this any more.
    try:
        if not connection.invalidated:
            connection.execution_options(isolation_level="AUTOCOMMIT")
    except connection.dialect.loaded_dbapi.Error:
        connection.invalidate()
    except BaseException:
        connection.invalidate()
        raise
    finally:
        connection.close()


def _is_cut_off(connection: Connection, index: Index) -> bool:
    """Whether its making ended before it was done, which leaves an index of PostgreSQL that serves nobody."""
    table: Any = index.table
    named = {"schema": table.schema, "name": index.name}
    # Asked twice: one that is finished in the moment of the question seems cut off.
    return connection.dialect.name == "postgresql" and all(connection.execute(_CUT_OFF, named).all() for _ in range(2))


def _apply(connection: Connection, *elements: DDLElement, is_used: bool = False) -> None:
    """Execute each; an index of a table that is used is made and dropped beside those who write."""
    for each in elements:
        ddl = str(each.compile(dialect=connection.dialect))
        if is_used and connection.dialect.name == "postgresql":  # MySQL does so by itself, and SQLite never
            ddl = ddl.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
        try:
            connection.exec_driver_sql(ddl)
        except SQLAlchemyError as error:
            if meaning_of(error.__cause__) is not Meaning.ALREADY_THERE:
                raise


_CUT_OFF = text(
    f"SELECT 1 FROM pg_index WHERE indexrelid = {RELATION} AND NOT indisvalid "  # noqa: S608 - a constant
    "AND indexrelid NOT IN (SELECT index_relid FROM pg_stat_progress_create_index)"
)


def _at_least(smallest: float, option: str, value: object) -> float:
    with suppress(ValueError):
        if smallest <= (number := float(str(value))) < float("inf"):
            return number
    raise PolicyError(option, repr(value), f"must be a number, {smallest:g} or more")


def _is_session(using: object) -> bool:
    orm = sys.modules.get("sqlalchemy.orm")  # 6 MB in every process, which whoever has a session has paid
    return orm is not None and isinstance(using, orm.Session | orm.scoped_session)


def connection_of(using: Any) -> Connection:
    if isinstance(using, Connection):
        return using
    if _is_session(using):
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
        if _is_session(self._owner):
            self._owner.flush()
        if not self.connection.in_transaction():
            raise PolicyError(
                "transaction", "ended within its block", "leave commit and rollback to it: end with return tx.done(...)"
            )
        return self._store.swap_on(self.connection, new, expected)

    def enqueue(self, message: OutboxMessage) -> None:
        self._store.enqueue_on(self.connection, message)

    def commit(self) -> None:
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
