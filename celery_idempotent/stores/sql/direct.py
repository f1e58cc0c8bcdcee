"""The short way to a database: a statement compiled once, on a cursor of the driver's own.

SQLAlchemy's way from a statement to its rows takes several times what the driver itself needs, each time. So what every
delivery sends goes past it, on a connection of its pool. An engine of the user's keeps the long way, as its events may
be somebody's log, trace or test.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple, cast

from sqlalchemy import ClauseElement, Engine, Executable, Select
from sqlalchemy.engine.interfaces import Dialect

from celery_idempotent.stores.sql.drivers import is_dead
from celery_idempotent.stores.sql.statements import Parameters, Reply


class DriverFailed(Exception):
    """The driver has raised an error, which is the cause."""


class _Sendable(NamedTuple):
    text: str
    #: Names of the parameters where the driver takes them by position; empty where it takes them by name.
    order: Sequence[str]
    #: Names of the columns that it returns; empty where it returns no rows.
    names: Sequence[str]


class Compiler:
    """Statements as a driver takes them, each compiled once; for those that a store keeps."""

    def __init__(self) -> None:
        self._compiled: dict[Executable, _Sendable] = {}

    def __call__(self, statement: Executable, dialect: Dialect) -> _Sendable:
        """What to hand to the driver, and what it will return."""
        found = self._compiled.get(statement)
        if found is None:
            compiled: Any = cast(ClauseElement, statement).compile(dialect=dialect)
            names = [each.name for each in statement.selected_columns] if isinstance(statement, Select) else ()
            found = self._compiled[statement] = _Sendable(str(compiled), compiled.positiontup or (), names)
        return found


class Link:
    """A connection that an engine's pool has lent, and a cursor that stays with it as long as it is open.

    Raises:
        DriverFailed: None could be opened.
        SQLAlchemyError: None is free.
    """

    def __init__(self, engine: Engine, compiler: Compiler) -> None:
        self._dialect = engine.dialect
        self._compiler = compiler
        self._lent_at = monotonic()
        try:
            self._lent = engine.raw_connection()
        except self._dialect.loaded_dbapi.Error as error:
            raise DriverFailed from error
        #: The driver's connection.
        self.of_driver = cast(Any, self._lent.dbapi_connection)
        kept = self._lent.info
        if _CURSOR not in kept:
            kept[_CURSOR] = self.of_driver.cursor()
        self._cursor: Any = kept[_CURSOR]
        #: Whether it can still be asked; what was never used was opened just now.
        self.is_alive = not (was_used(kept) and is_dead(self.of_driver))

    def can_stay(self) -> bool:
        """Whether it lives, and need not go back to the pool for the sake of its age."""
        self.is_alive = not is_dead(self.of_driver)
        return self.is_alive and monotonic() - self._lent_at < _STAYS

    def send(self, statement: Executable, parameters: Parameters) -> Reply:
        """Run one statement, and nothing else.

        Raises:
            DriverFailed: Whatever the driver says.
        """
        text, order, names = self._compiler(statement, self._dialect)
        cursor = self._cursor
        try:
            cursor.execute(text, [parameters[name] for name in order] if order else parameters)
            # Not from the cursor's description, which takes psycopg as long as all the rest.
            rows = [dict(zip(names, each, strict=True)) for each in cursor.fetchall()] if names else ()
            return Reply(rows, cursor.rowcount)
        except self._dialect.loaded_dbapi.Error as error:
            raise DriverFailed from error

    def leave(self) -> None:
        """Back to the pool with it; closed if it is dead: nothing was sent on it, so nothing is in doubt."""
        if self.is_alive:
            self._lent.close()
        else:
            self.drop()

    def drop(self) -> None:
        """Close it: it may stand in the middle of an answer, or before a server that only reads."""
        self._lent.invalidate()
        self._lent.close()


class Hand:
    """Connections that stay in hand between two swaps, as the pool's bookkeeping takes longer than SQLite's answer.

    Whoever else wants one of the pool has them all given back first, so that none is missed there.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._compiler = Compiler()
        self._idle: list[Link] = []
        self._asking: list[None] = []

    def idle(self) -> Link | None:
        """One that is in hand and lives."""
        while self._idle:
            with suppress(IndexError):  # another thread was faster
                link = self._idle.pop()
                if link.can_stay():
                    return link
                link.leave()
        return None

    def lent(self) -> Link:
        """One of the pool's that lives; see :class:`Link` for what this raises."""
        with self.empty():
            while not (link := Link(self._engine, self._compiler)).is_alive:
                link.leave()
        return link

    def keep(self, link: Link) -> None:
        """Have it ready for the next swap, unless somebody waits for the pool."""
        self._idle.append(link)
        if self._asking:
            self.give_back()

    @contextmanager
    def empty(self) -> Iterator[None]:
        """Nothing is in hand meanwhile."""
        # In this order: who keeps one at this moment either finds this note, or is found by what follows it.
        self._asking.append(None)
        try:
            self.give_back()
            yield
        finally:
            self._asking.pop()

    def give_back(self) -> None:
        """All to the pool."""
        with suppress(IndexError):
            while True:
                self._idle.pop().leave()


_STAYS = 30
"""Seconds in hand; then the pool may replace it for its age."""


def was_used(info: dict[Any, Any]) -> bool:
    """Whether a pooled connection was used before, and may be dead since; from now on it was. ``info`` is its own."""
    was = _IS_USED in info
    info[_IS_USED] = True
    return was


_CURSOR = "celery_idempotent.cursor"
"""In the ``info`` of a pooled connection, its cursor."""

_IS_USED = "celery_idempotent.is_used"
"""In the ``info`` of every pooled connection that was used."""
