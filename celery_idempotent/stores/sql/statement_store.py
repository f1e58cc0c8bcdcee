"""A store by statements, whichever library has the connections: SQLAlchemy's and Django's have this in common.

What is said to the database stands in :mod:`celery_idempotent.stores.sql.statements`, the tables in
:mod:`celery_idempotent.stores.sql.schema`, what errors mean in :mod:`celery_idempotent.stores.sql.errors`. A library
lends a connection, runs the text of a statement on it, and begins a transaction; everything else is here.

A statement is compiled once: SQLAlchemy's way from a statement to its rows takes several times what the driver needs.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from secrets import token_hex
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, Unpack, cast
from uuid import uuid4
from weakref import WeakKeyDictionary

from sqlalchemy import ClauseElement, Executable, Select, Table, Update, bindparam, delete, insert, select, text, update
from sqlalchemy.engine.interfaces import Dialect

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import BLANK, Record, Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge, TakenMessage, WaitingMessage, Wanted
from celery_idempotent.stores.clock import ServerClock
from celery_idempotent.stores.failures import Meaning, warn, warn_if_exposed, warn_of_losses
from celery_idempotent.stores.sql.drivers import exposure
from celery_idempotent.stores.sql.errors import CREATION, OTHER_TABLE, explained, meaning_of
from celery_idempotent.stores.sql.statements import (
    MYSQL_GREETING,
    RELATION,
    SERVER_NOW,
    Execute,
    Parameters,
    Reply,
    Row,
    Statements,
    bytes_on_the_wire,
)

Values = Mapping[str, Any] | tuple[Any, ...]
"""Parameters by name or by position, as the driver takes them."""

_C = TypeVar("_C")
_T = TypeVar("_T")

_TRIES = 10
"""How often a statement is sent that the database undoes for another's sake: a deadlock on MySQL, where several
deliveries claim a key at the moment of its deletion. Each time, somebody else has made progress."""


class StatementStore(ABC, Generic[_C]):
    """Records as rows of one table, messages as rows of another."""

    #: What the library puts around the driver's errors.
    wrapper: ClassVar[type[Exception]]
    #: What is raised for what the database or its driver says.
    errors: tuple[type[Exception], ...]
    #: The command that creates the tables.
    creation = CREATION

    def __init__(self, dialect: Dialect, table: Table, outbox: Table) -> None:
        #: Which database it is: one of :data:`celery_idempotent.stores.sql.schema.DIALECTS`.
        self.dialect = dialect.name
        #: The table of records, as SQLAlchemy knows it.
        self.table = table
        #: The table of messages to be published.
        self.outbox = outbox
        self._compiling = dialect
        self._compiled: WeakKeyDictionary[Executable, _Compiled] = WeakKeyDictionary()
        self._statements = Statements(table, dialect.name, repr(self))
        values = ("task_id", "data_text", "data_bytes", "content_type", "created_at", "taken_until", "failures")
        # Inline: the number is not asked for, so that a sender needs no right to read.
        self._enqueue = insert(outbox).inline().values({name: bindparam(f"new_{name}") for name in values})
        self._clock = ServerClock(lambda: self._statements.now(self._asking("time query")))
        #: Of MySQL, by the driver's connection: bytes that the server takes at once.
        self._largest_packets: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @abstractmethod
    def _connected(self, operation: str) -> AbstractContextManager[_C]:
        """A connection that is in no transaction of this store's; closed if what was done on it fails."""

    @abstractmethod
    def _run(self, connection: _C, text: str, values: Values, names: Sequence[str] | None) -> Reply:
        """Run one statement, and nothing else; raises :attr:`errors`. ``names``: as in :func:`answer`."""

    @abstractmethod
    def _of_driver(self, connection: _C) -> Any:
        """The driver's connection; raises :attr:`errors`."""

    @abstractmethod
    def _undone(self, connection: _C, operation: str) -> AbstractContextManager[None]:
        """A transaction that is rolled back at its end."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._statements.swap(self._asking("swap"), new, expected)

    def swap_on(self, connection: _C, new: Record, expected: str | None) -> Record | None:
        """The same inside a transaction of the caller's, which commits it, and rolls back on an error.

        What is returned counts once the transaction is committed.
        """
        return self._statements.swap(partial(self._execute, connection, "swap"), new, expected)

    def enqueue_on(self, connection: _C, message: OutboxMessage) -> None:
        """Put a message into the outbox, in the transaction of ``connection``; on an error its owner rolls back."""
        is_text = isinstance(message.data, str)
        values = {
            "new_task_id": message.id,
            "new_data_text": message.data if is_text else None,
            "new_data_bytes": None if is_text else message.data,
            "new_content_type": message.content_type,
            "new_created_at": self.now(),
            "new_taken_until": 0,
            "new_failures": 0,
        }
        if self._execute(connection, "enqueue", self._enqueue, values).written != 1:
            raise StoreUnavailable(repr(self), "enqueue", "the table of messages gave it the number of another one")

    def take(self, limit: int, hold: int) -> list[TakenMessage]:
        """See :meth:`celery_idempotent.stores.Outbox.take`.

        It takes by writing until when it has them, so that relays share the work, and what a dead one had comes back.
        The same column says until when nobody has a message that could not be published.
        """
        execute, table, now = self._asking("take"), self.outbox, self.now()
        is_free = table.c.taken_until <= now
        free = select(table.c.number, table.c.failures).where(is_free).order_by(table.c.number)
        oldest = execute(free.limit(limit), {}).rows
        numbers = [row["number"] for row in oldest]
        failing = [row["number"] for row in oldest if row["failures"]]
        if len(failing) > limit // 2:
            untried = execute(free.where(table.c.failures == 0).limit(-(limit // -2)), {}).rows
            others = [row["number"] for row in untried]
            numbers = others + failing[: limit - len(others)]
        if not numbers:
            return []
        mine = token_hex(16)
        taking = update(table).where(table.c.number.in_(numbers), is_free)
        execute(taking.values(taken_until=now + hold, taken_by=mine), {})
        taken = select(table).where(table.c.number.in_(numbers), table.c.taken_by == mine)
        return [_taken(row) for row in execute(taken.order_by(table.c.failures, table.c.number), {}).rows]

    def give_back(self, messages: Sequence[TakenMessage]) -> None:
        self._asking("give_back")(self._still_taken(*messages).values(taken_until=0, taken_by=None), {})

    def postpone(self, message: TakenMessage, pause: int, reason: str) -> None:
        failures, until = self.outbox.c.failures + 1, self.now() + pause
        failure = {"failures": failures, "reason": reason, "taken_until": until, "taken_by": None}
        self._asking("postpone")(self._still_taken(message).values(failure), {})

    def forget(self, numbers: Sequence[int]) -> None:
        self._asking("forget")(delete(self.outbox).where(self.outbox.c.number.in_(numbers)), {})

    def waiting(self, limit: int) -> list[WaitingMessage]:
        told = [self.outbox.c[name] for name in ("task_id", "created_at", "failures", "taken_until", "reason")]
        rows = self._asking("waiting")(select(*told).order_by(self.outbox.c.number).limit(limit), {}).rows
        return [WaitingMessage(*(row[each.name] for each in told)) for row in rows]

    def _still_taken(self, *messages: TakenMessage) -> Update:
        """Writes the messages that nobody else has taken since."""
        numbers, takers = [each.number for each in messages], [each.taken_by for each in messages]
        return update(self.outbox).where(self.outbox.c.number.in_(numbers), self.outbox.c.taken_by.in_(takers))

    def get(self, key: str) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.get`; inside a transaction, what that transaction sees."""
        return self._statements.get(self._asking("get"), key)

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; by many short statements."""
        return self._statements.scan(self._asking("scan"), **wanted)

    def reads_all(self, **wanted: Unpack[Wanted]) -> bool:
        """See :meth:`celery_idempotent.stores.IndexedStore.reads_all`; SQLite's index knows no beginnings."""
        by_label = wanted.get("label") or (self.dialect != "sqlite" and wanted.get("label_prefix"))
        return not by_label and wanted.get("status") in (None, Status.COMPLETED)

    def delete(self, key: str, expected: str) -> bool:
        return self._statements.delete(self._asking("delete"), key, expected)

    def purge(self, limit: int) -> int:
        return self._statements.purge(self._asking("purge"), limit, self.now())

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`; on SQLite, which has no server, this machine's clock."""
        return time.time_ns() // 1_000_000 if self.dialect == "sqlite" else self._clock.now()

    def verify(self) -> None:
        """See :meth:`celery_idempotent.stores.VerifiableStore.verify`; writes records and rolls them back.

        Warns of indexes that are missing, of settings under which the server forgets what it has acknowledged, and of a
        connection to another machine that others can read.
        """
        with self._connected("verify") as connection:
            execute = partial(self._execute, connection, "verify")
            with self._undone(connection, "verify"):
                try_out(self._statements, execute, repr(self))
            if lacking := lacking_indexes(self.table, self.dialect, execute):
                made = f"create it with: {self.creation}; or as celery -A <your app> idempotency ddl prints it"
                warn(repr(self), f"the table has no index {', '.join(lacking)}, so lists read all of it; {made}")
            warn_of_losses(repr(self), losses_of(self.dialect, execute))
            warn_if_exposed(repr(self), exposure(self._of_driver(connection)), _VERIFIED.get(self.dialect, ""))

    @contextmanager
    def explaining(self, operation: str, *more: type[Exception]) -> Iterator[None]:
        """Within the block, the library's errors, :attr:`errors` and ``more``, become those of a store."""
        try:
            yield
        except (*self.errors, *more) as error:
            raise self._explained(error, operation) from self._cause_of(error)

    def _explained(self, error: Exception, operation: str) -> Exception:
        return explained(self._cause_of(error), repr(self), operation, creation=self.creation)

    def _cause_of(self, error: Exception) -> Exception:
        """The driver's error: what a library puts around it shows statements, and with them what is stored."""
        return error.__cause__ if isinstance(error, self.wrapper) and isinstance(error.__cause__, Exception) else error

    def _asking(self, operation: str) -> Execute:
        """Executes each statement alone, on whichever connection is free."""

        def ask(statement: Executable, parameters: Parameters) -> Reply:
            with self._connected(operation) as connection:
                return self._execute(connection, operation, statement, parameters)

        return lambda statement, parameters: unless_undone(partial(ask, statement, parameters))

    def _execute(self, connection: _C, operation: str, statement: Executable, parameters: Parameters, /) -> Reply:
        try:
            largest = self._largest_packet(connection)
            if largest is not None and bytes_on_the_wire(parameters) > largest:
                raise RecordTooLarge(f"max_allowed_packet is {largest} bytes; a byte of a result may need two of them")
            return self._ask(connection, statement, parameters)
        except self.errors as error:
            cause = self._cause_of(error)
            if meaning_of(cause) is Meaning.DUPLICATE:  # MySQL's; the others are asked in a way that gives no error
                return Reply((), 0)
            raise self._explained(error, operation) from cause

    def _ask(self, connection: _C, statement: Executable, parameters: Parameters) -> Reply:
        asked_at = self._clock.before_asking()
        text, fixed, in_order, names = self._compiled.get(statement) or self._compile(statement)
        values = {**fixed, **parameters} if fixed else parameters
        reply = self._run(connection, text, in_order(values), names)
        if reply.rows and SERVER_NOW in reply.rows[0]:
            self._clock.learn(int(reply.rows[0][SERVER_NOW]), asked_at)
        return reply

    def _compile(self, statement: Executable) -> "_Compiled":
        element = cast(ClauseElement, statement)
        compiled: Any = element.compile(dialect=self._compiling, compile_kwargs={"render_postcompile": True})
        asked = {bound.key for bound in compiled.bind_names if bound.required}
        fixed = {name: value for name, value in compiled.params.items() if name not in asked}
        names = [each.name for each in statement.selected_columns] if isinstance(statement, Select) else None
        found = self._compiled[statement] = _Compiled(str(compiled), fixed, _in_order(compiled.positiontup), names)
        return found

    def _largest_packet(self, connection: _C) -> int | None:
        """Bytes that MySQL takes at once, asked on each new connection, together with the time; None elsewhere."""
        if self.dialect not in {"mysql", "mariadb"}:
            return None
        link = self._of_driver(connection)
        if link not in self._largest_packets:
            (row,) = self._ask(connection, MYSQL_GREETING, {}).rows
            self._largest_packets[link] = int(row["max_allowed_packet"])
        return self._largest_packets[link]


def unless_undone(call: Callable[[], _T]) -> _T:
    """What ``call`` gives, which is made again where the database undid it for another's sake."""
    tries = 0
    while True:
        tries += 1
        try:
            return call()
        except StoreUnavailable as error:
            if tries == _TRIES or meaning_of(error.__cause__) is not Meaning.UNDONE:
                raise


class _Compiled(NamedTuple):
    """What is sent. Without a reference to the statement it comes from, so that both are forgotten together."""

    text: str
    #: By name, the values that the statement fixes itself.
    fixed: Mapping[str, Any]
    #: Makes of values by name what the driver takes.
    in_order: Callable[[Parameters], Values]
    #: Names of the columns that it returns, where they are known.
    names: Sequence[str] | None


def _in_order(names: Sequence[str] | None) -> Callable[[Parameters], Values]:
    """By position, if the driver takes parameters so."""
    if names is None:
        return lambda values: values
    return itemgetter(*names) if len(names) > 1 else lambda values: tuple(values[name] for name in names)


def answer(cursor: Any, text: str, values: Values, names: Sequence[str] | None) -> Reply:
    """What a driver's cursor says; ``names`` of the columns, or None: the driver is asked, which takes psycopg long."""
    cursor.execute(text, values)
    if names is None:
        names = [each[0] for each in cursor.description or ()]
    rows = [dict(zip(names, each, strict=True)) for each in cursor.fetchall()] if names else ()
    return Reply(rows, cursor.rowcount)


def _taken(row: Row) -> TakenMessage:
    data = bytes(row["data_bytes"]) if row["data_text"] is None else row["data_text"]
    message = OutboxMessage(row["task_id"], data, row["content_type"])
    return TakenMessage(row["number"], message, row["failures"], row["taken_by"])


_MYSQL = (
    # A binary log that is not on disk makes InnoDB roll back at a restart what it had committed.
    "SELECT @@innodb_flush_log_at_trx_commit AS innodb_flush_log_at_trx_commit, "
    "IF(@@log_bin, @@sync_binlog, 1) AS sync_binlog",
    {"innodb_flush_log_at_trx_commit": {"1", "3"}, "sync_binlog": {"1"}},
)
_DURABILITY: Mapping[str, tuple[str, Mapping[str, set[str]]]] = {
    "postgresql": (
        "SELECT current_setting('synchronous_commit') AS synchronous_commit, current_setting('fsync') AS fsync",
        {"synchronous_commit": {"on", "local", "remote_write", "remote_apply"}, "fsync": {"on"}},
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}
"""By dialect, a question, and by setting the values under which no acknowledged write is lost."""


def try_out(statements: Statements, execute: Execute, store: str) -> None:
    """Claim, claim what must be another key, claim again, go on: a table made by hand may not tell them apart.

    ``execute`` runs in a transaction that the caller rolls back.
    """
    nonce = uuid4().hex
    first = BLANK.but(key=f"celery-idempotent:verify:{nonce}", revision="1", owner=nonce)
    for new, expected, shall_win in (
        (first, None, True),
        (replace(first, key=first.key.upper(), revision="2"), None, True),
        (replace(first, revision="3"), None, False),
        (replace(first, revision="4"), first.revision, True),
    ):
        stored = statements.swap(execute, new, expected)
        if (stored is not None and stored.revision == new.revision) is not shall_win:
            raise StoreMisconfigured(store, "verify", f"{OTHER_TABLE} (its key is not compared byte by byte)")


_MYSQL_INDEXES = (
    "SELECT DISTINCT index_name AS name FROM information_schema.statistics "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name"
)
_INDEXES = {
    "postgresql": "SELECT relname AS name FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "  # noqa: S608 - a constant
    f"WHERE indrelid = {RELATION} AND indisvalid",
    "mysql": _MYSQL_INDEXES,
    "mariadb": _MYSQL_INDEXES,
    "sqlite": "SELECT name FROM pragma_index_list(:name)",
}
"""By dialect, a question for the indexes of a table that can be used."""


def lacking_indexes(table: Table, dialect: str, execute: Execute) -> Sequence[str]:
    """The names of those that the schema has and the database has not."""
    found = execute(text(_INDEXES[dialect]), {"schema": table.schema, "name": table.name}).rows
    return sorted({str(each.name) for each in table.indexes} - {row["name"] for row in found})


def losses_of(dialect: str, execute: Execute) -> str:
    """The settings under which the server forgets what it has acknowledged."""
    if dialect == "sqlite":
        return ""
    question, safe = _DURABILITY[dialect]
    (answer,) = execute(text(question), {}).rows
    return ", ".join(f"{name} is {answer[name]}" for name, each in safe.items() if str(answer[name]) not in each)


_VERIFIED = {"postgresql": "set sslmode=verify-full and sslrootcert", "mysql": "set ssl_ca", "mariadb": "set ssl_ca"}
"""By dialect, what to do about it."""
