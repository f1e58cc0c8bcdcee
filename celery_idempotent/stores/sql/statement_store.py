"""A store by statements, whichever library has the connections: SQLAlchemy's and Django's have this in common.

What is said to the database stands in :mod:`celery_idempotent.stores.sql.statements`, the tables in
:mod:`celery_idempotent.stores.sql.schema`, what errors mean in :mod:`celery_idempotent.stores.sql.errors`. A library
lends a connection, sends a statement on it, and begins a transaction; everything else is here.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Executable, Table

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge, TakenMessage, WaitingMessage
from celery_idempotent.stores.clock import ServerClock
from celery_idempotent.stores.failures import Meaning
from celery_idempotent.stores.sql.checks import try_out, warn_of_exposure, warn_of_losses
from celery_idempotent.stores.sql.errors import CREATION, cause_of, explained, meaning_of
from celery_idempotent.stores.sql.outbox import OutboxStatements
from celery_idempotent.stores.sql.statements import (
    MYSQL_GREETING,
    SERVER_NOW,
    Execute,
    Parameters,
    Reply,
    Statements,
    bytes_on_the_wire,
)

_C = TypeVar("_C")
_T = TypeVar("_T")

_TRIES = 10
"""How often a statement is sent that the database undoes for another's sake: a deadlock on MySQL, where several
deliveries claim a key at the moment of its deletion. Each time, somebody else has made progress."""


class StatementStore(ABC, Generic[_C]):
    """Records as rows of one table, messages as rows of another."""

    #: What the library raises for what the database or its driver says.
    errors: ClassVar[tuple[type[Exception], ...]]
    #: The command that creates the tables.
    creation = CREATION

    def __init__(self, dialect: str, table: Table, outbox: Table) -> None:
        #: Which database it is: one of :data:`celery_idempotent.stores.sql.schema.DIALECTS`.
        self.dialect = dialect
        #: The table of records, as SQLAlchemy knows it.
        self.table = table
        #: The table of messages to be published.
        self.outbox = outbox
        self._statements = Statements(table, dialect, repr(self))
        self._outbox = OutboxStatements(outbox)
        self._clock = ServerClock(lambda: self._statements.now(self._asking("now")))
        #: Of MySQL, by the driver's connection: bytes that the server takes at once.
        self._largest_packets: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @abstractmethod
    def _connected(self, operation: str) -> AbstractContextManager[_C]:
        """A connection that is in no transaction of this store's; closed if what was done on it fails."""

    @abstractmethod
    def _send(self, connection: _C, statement: Executable, parameters: Parameters) -> Reply:
        """Run one statement, and nothing else; raises :attr:`errors`."""

    @abstractmethod
    def _of_driver(self, connection: _C) -> Any:
        """The driver's connection; raises :attr:`errors`."""

    @abstractmethod
    def _undone(self, connection: _C, operation: str) -> AbstractContextManager[None]:
        """A transaction that is rolled back at its end."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`."""
        return self._statements.swap(self._asking("swap"), new, expected)

    def swap_on(self, connection: _C, new: Record, expected: str | None) -> Record | None:
        """The same inside a transaction of the caller's, which commits it, and rolls back on an error.

        What is returned counts once the transaction is committed.
        """
        return self._statements.swap(partial(self._execute, connection, "swap"), new, expected)

    def enqueue_on(self, connection: _C, message: OutboxMessage) -> None:
        """Put a message into the outbox, in the transaction of ``connection``; on an error its owner rolls back."""
        self._outbox.enqueue(partial(self._execute, connection, "enqueue"), message, self.now())

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
        """See :meth:`celery_idempotent.stores.Store.get`; inside a transaction, what that transaction sees."""
        return self._statements.get(self._asking("get"), key)

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; in the order of the keys, by many short statements."""
        return self._statements.scan(self._asking("scan"), status=status, task=task, label=label)

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
        """See :meth:`celery_idempotent.stores.VerifiableStore.verify`; writes records and rolls them back.

        Warns of settings under which the server forgets what it has acknowledged, and of a connection to another
        machine that others can read.
        """
        with self._connected("verify") as connection:
            execute = partial(self._execute, connection, "verify")
            with self._undone(connection, "verify"):
                try_out(self._statements, execute, repr(self))
            warn_of_losses(self.dialect, execute, repr(self))
            warn_of_exposure(self.dialect, self._of_driver(connection), repr(self))

    @contextmanager
    def explaining(self, operation: str, *more: type[Exception]) -> Iterator[None]:
        """Within the block, the library's errors, :attr:`errors` and ``more``, become those of a store."""
        try:
            yield
        except (*self.errors, *more) as error:
            raise self._explained(error, operation) from cause_of(error)

    def _explained(self, error: Exception, operation: str) -> Exception:
        return explained(cause_of(error), repr(self), operation, creation=self.creation)

    def _asking(self, operation: str) -> Execute:
        """Executes each statement alone, on whichever connection is free."""

        def ask(statement: Executable, parameters: Parameters) -> Reply:
            def once() -> Reply:
                with self._connected(operation) as connection:
                    return self._execute(connection, operation, statement, parameters)

            return unless_undone(once)

        return ask

    def _execute(self, connection: _C, operation: str, statement: Executable, parameters: Parameters, /) -> Reply:
        try:
            largest = self._largest_packet(connection)
            if largest is not None and bytes_on_the_wire(parameters) > largest:
                raise RecordTooLarge(f"max_allowed_packet is {largest} bytes; a byte of a result may need two of them")
            return self._ask(connection, statement, parameters)
        except self.errors as error:
            raise self._explained(error, operation) from cause_of(error)

    def _ask(self, connection: _C, statement: Executable, parameters: Parameters) -> Reply:
        asked_at = self._clock.before_asking()
        reply = self._send(connection, statement, parameters)
        if reply.rows and SERVER_NOW in reply.rows[0]:
            self._clock.learn(int(reply.rows[0][SERVER_NOW]), asked_at)
        return reply

    def _largest_packet(self, connection: _C) -> int | None:
        """Bytes that MySQL takes at once, asked on each new connection, together with the time; None elsewhere."""
        if self.dialect not in {"mysql", "mariadb"}:
            return None
        link = self._of_driver(connection)
        if link not in self._largest_packets:
            (row,) = self._ask(connection, MYSQL_GREETING, {}).rows
            self._largest_packets[link] = int(row["max_allowed_packet"])
        return self._largest_packets[link]


def unless_undone(act: Callable[[], _T]) -> _T:
    """What ``act`` returns, which is called again if the database has undone it for another's sake."""
    tries = 0
    while True:
        tries += 1
        try:
            return act()
        except StoreUnavailable as error:
            if tries == _TRIES or meaning_of(error.__cause__) is not Meaning.UNDONE:
                raise
