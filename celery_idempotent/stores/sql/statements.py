"""The statements of an SQL store, and records as rows and back; nothing here sends them.

:class:`Statements` hands each to ``execute``, which is :meth:`StatementStore._execute` on some connection: it runs that
statement alone, in autocommit mode or inside a transaction whose end it leaves to somebody else, and raises
:class:`UnreadableRow`, or what a store raises.

A swap is one statement on PostgreSQL. Elsewhere it is one if it wins; if it does not, a second one reads why.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, Unpack

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.types import TypeEngine, UserDefinedType

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, Record, Status
from celery_idempotent.protocol.store import Wanted
from celery_idempotent.stores import readable
from celery_idempotent.stores.sql.schema import KEY

SERVER_NOW = "server_now"
"""Column of a reply with the server's time, in milliseconds since the epoch, truncated."""

Row = Mapping[str, Any]
Parameters = Mapping[str, Any]


class Reply(NamedTuple):
    """What a statement was answered."""

    #: The rows it returned, by column name, with values as the driver gives them.
    rows: Sequence[Row]
    #: How many rows it wrote, none if its primary key is there already; without meaning where it returned rows.
    written: int


Execute = Callable[[sa.Executable, Parameters], Reply]
"""Runs one statement; the module's docstring says how."""


class UnreadableRow(StoreMisconfigured):
    """The driver cannot decode a row."""


_STALE_ANSWERS = 100
"""Impossible answers in a row before a swap gives up. Every one of them means that somebody else wrote in the
same moment, so a primary never gets near it."""

_PAGE = 200
"""Records that a scan reads at a time."""

_LONGEST_PATTERN = 2048
"""Characters that a LIKE looks for: more than a key or label has. SQLite refuses those of 50,000 bytes."""

_OUTCOMES = (str(Status.COMPLETED), str(Status.FAILED))
_WON = "won"
_KIND = "kind"


def _clock(expression: str) -> sa.ColumnElement[int]:
    return sa.literal_column(expression, sa.BigInteger).label(SERVER_NOW)


_CLOCKS: Mapping[str, Sequence[sa.ColumnElement[int]]] = {
    "postgresql": [_clock("CAST(floor(extract(epoch FROM clock_timestamp()) * 1000) AS BIGINT)")],
    # UNIX_TIMESTAMP(NOW(3)) would be ambiguous in the hour that daylight saving time repeats.
    "mysql": [_clock("timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(3)) DIV 1000")],
    "sqlite": [],
}
"""By dialect, the column with the time; SQLite has no server whose time could differ."""

MYSQL_GREETING = sa.select(*_CLOCKS["mysql"], sa.literal_column("@@max_allowed_packet").label("max_allowed_packet"))
"""What to ask a new connection to MySQL: the time, and the largest statement that it takes, in bytes."""


class _TupleId(UserDefinedType[str]):
    """Where a row of PostgreSQL is: its page, and its place there."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "TID"


_CTID = sa.literal_column("ctid", _TupleId())

RELATION = "to_regclass(concat_ws('.', quote_ident(:schema), quote_ident(:name)))"
"""What PostgreSQL knows by a name, in a schema or, without one, in the search path; NULL where there is none."""

_PAGES = sa.text(f"SELECT pg_relation_size({RELATION}) / CAST(current_setting('block_size') AS BIGINT) AS pages")
"""How many pages PostgreSQL has for a table."""

_PAGES_AT_ONCE = 2048
"""Pages that one statement of a purge reads: 16 MB."""


def _page(number: int) -> sa.ColumnElement[str]:
    return sa.cast(sa.literal(f"({number},0)", sa.Text), _TupleId())


class Statements:
    """The questions of a store, as statements for one kind of database."""

    def __init__(self, table: sa.Table, dialect: str, store: str) -> None:
        self._table = table
        self._key = table.c[KEY]
        self._store = store
        self._is_mysql = dialect in {"mysql", "mariadb"}
        self._text: TypeEngine[Any] = mysql.VARBINARY() if self._is_mysql else sa.Text()
        self._clock = _CLOCKS["mysql" if self._is_mysql else dialect]
        self._answers_at_once = dialect == "postgresql"
        #: Of a table of PostgreSQL, the page from which the next purge goes on.
        self._purging = 0
        self._claim: sa.Executable = self._insert(dialect)
        self._replace: sa.Executable = sa.update(table).where(*self._at_expected()).values(self._new_values())
        if self._answers_at_once:
            self._claim, self._replace = self._with_answer(self._claim), self._with_answer(self._replace)
        self._touch = sa.update(table).where(*self._at_expected()).values(revision=table.c.revision)
        self._delete = sa.delete(table).where(*self._at_expected())
        self._get = sa.select(*self._clock, table).where(self._key == sa.bindparam("key"))
        # A locking read sees what is committed now, even in a transaction that began before.
        self._look = self._get.with_for_update(read=True) if self._is_mysql else self._get

    def swap(self, execute: Execute, new: Record, expected: str | None) -> Record | None:
        parameters = row_of(new)
        parameters["key"] = self._as_compared(new.key)
        if expected is not None:
            parameters["expected"] = self._as_compared(expected)
        for _ in range(_STALE_ANSWERS):
            stored = self._swap_once(execute, new, expected, parameters)
            # Had there been what was expected, the swap would have won: what was seen is of before somebody
            # else's write, and the swap came after it.
            if (stored.revision if stored else None) != expected:
                return stored
        why = f"{_STALE_ANSWERS} answers in a row showed a record that cannot have beaten the swap"
        raise StoreUnavailable(self._store, "swap", f"{why}; are reads sent to a replica?")

    def get(self, execute: Execute, key: str) -> Record | None:
        return self._found(execute(self._get, {"key": self._as_compared(key)}))

    def scan(self, execute: Execute, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; in the order of the keys, or of time where few are enough.

        The database looks at all rows where no index tells, in one statement, and sends those that are wanted.
        """
        page, oldest, read, found = sa.select(self._table).where(*self._conditions(wanted)), wanted.get("oldest"), 0, 0
        rest = page.order_by(self._table.c.updated_at, self._key) if oldest else page.order_by(self._key)
        limit = oldest or _PAGE
        while True:
            rows = self._page(execute, rest.limit(limit))
            for record in readable(rows, partial(self._whole, execute, page), _key_of):
                found += 1
                yield record
            if len(rows) < limit or (oldest and found >= oldest):
                return
            read += len(rows)
            rest = rest.offset(read) if oldest else page.order_by(self._key).where(self._key > _comparable(rows[-1]))

    def _conditions(self, wanted: Wanted) -> Iterator[sa.ColumnElement[bool]]:
        columns = self._table.c
        if (status := wanted.get("status")) is not None:
            yield columns.status == str(status)
        for name in ("task", "worker"):
            if (value := wanted.get(name)) is not None:
                yield self._equals(name, sa.literal(self._as_compared(str(value)), self._text))
        if (label := wanted.get("label")) is not None:
            yield self._has_label(label)
        if (before := wanted.get("before")) is not None:
            yield columns.updated_at < before
        is_encrypted = columns.label.startswith(ENCRYPTED_TEXT)
        if (prefix := wanted.get("label_prefix")) is not None:
            yield columns.label.startswith(_stored(prefix)[:_LONGEST_PATTERN], autoescape=True) | is_encrypted
        if (text := wanted.get("name")) is not None:
            key, whole, last = sa.type_coerce(self._key, sa.Text), _stored(text), _stored(text.rpartition(":")[2])
            begins = [key.startswith(each[:_LONGEST_PATTERN], autoescape=True) for each in (whole, last)]
            holds = key.contains(f":{last}"[:_LONGEST_PATTERN], autoescape=True)
            yield sa.or_(*begins, holds, columns.task_id == whole, columns.label == whole, is_encrypted)

    def _page(self, execute: Execute, page: sa.Select[Any]) -> Sequence[Row]:
        """The rows; of a page with text that is not UTF-8, which only SQLite keeps, the keys alone, as bytes."""
        try:
            return execute(page, {}).rows
        except UnreadableRow:
            keys = sa.cast(self._key, sa.LargeBinary).label(KEY), sa.func.typeof(self._key).label(_KIND)
            return execute(page.with_only_columns(*keys), {}).rows

    def _whole(self, execute: Execute, page: sa.Select[Any], row: Row) -> Record | None:
        """The record of a row, which is fetched now where there is only its key."""
        if _KIND not in row:
            return record_of(row, store=self._store)
        return self._found(execute(page.where(self._key == _comparable(row)), {}))

    def delete(self, execute: Execute, key: str, expected: str) -> bool:
        parameters = {"key": self._as_compared(key), "expected": self._as_compared(expected)}
        return execute(self._delete, parameters).written == 1

    def purge(self, execute: Execute, limit: int, now: int) -> int:
        """See :meth:`celery_idempotent.stores.PurgeableStore.purge`; ``now`` is the server's time in milliseconds."""
        if self._answers_at_once:
            return self._purge_by_pages(execute, limit, now)
        table = self._table
        forgotten = self._forgotten(now).add_columns(table.c.revision).limit(limit)
        if not self._is_mysql:
            keys = forgotten.with_only_columns(self._key)
            return execute(sa.delete(table).where(self._key.in_(keys)), {}).written
        # MySQL would lock by the index first and by the key second; a swap does it the other way round, and
        # both would wait for each other. A revision is never used twice, so it stands for all of the condition.
        found = execute(forgotten, {}).rows
        if not found:
            return 0
        at_found = (
            self._key.in_([each[KEY] for each in found]),
            table.c.revision.in_([each["revision"] for each in found]),
        )
        return execute(sa.delete(table).where(*at_found), {}).written

    def _purge_by_pages(self, execute: Execute, limit: int, now: int) -> int:
        """PostgreSQL's: no index knows what expires, so the table is read, once for however many batches.

        Each goes on where the one before had enough, and around. Less than ``limit`` means that all of it was read.
        """
        forgotten = self._forgotten(now)
        (row,) = execute(_PAGES, {"schema": self._table.schema, "name": self._table.name}).rows
        if not row["pages"]:  # nothing is there; or it is in partitions, which have pages of their own
            return execute(self._deletion(forgotten.limit(limit)), {}).written
        starts = range(0, row["pages"], _PAGES_AT_ONCE)
        deleted = 0
        for start in sorted(starts, key=lambda each: (each < self._purging, each)):
            self._purging = start
            doomed = forgotten.where(_page(start) <= _CTID, _page(start + _PAGES_AT_ONCE) > _CTID)
            deleted += execute(self._deletion(doomed.limit(limit - deleted)), {}).written
            if deleted == limit:
                break
        return deleted

    def _forgotten(self, now: int) -> sa.Select[Any]:
        is_forgotten = sa.and_(self._table.c.status.in_(_OUTCOMES), self._table.c.expires_at <= now // 1000)
        # PostgreSQL takes no index for what is asked of a truth value, and its index would be of no use here.
        return sa.select(self._key).where(is_forgotten.is_(sa.true()) if self._answers_at_once else is_forgotten)

    def _deletion(self, keys: sa.Select[Any]) -> sa.Executable:
        """PostgreSQL's, of some forgotten outcomes."""
        # A row that somebody is writing is passed over, and one that has changed since the statement began
        # is looked at again. As a CTE it is asked once, so that the limit holds.
        doomed = keys.with_for_update(skip_locked=True).cte("doomed")
        return sa.delete(self._table).where(self._key.in_(sa.select(doomed.c[KEY])))

    def now(self, execute: Execute) -> int:
        """The server's time in milliseconds; not for SQLite, which has no server."""
        return int(execute(sa.select(*self._clock), {}).rows[0][SERVER_NOW])

    def _insert(self, dialect: str) -> "mysql.Insert | postgresql.Insert | sqlite.Insert":
        values = {KEY: sa.bindparam("key"), **self._new_values()}
        if self._is_mysql:
            # MySQL's own ways to go on after a duplicate hide other errors, or leave in doubt who has won.
            return mysql.insert(self._table).values(values)
        dialect_insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
        return dialect_insert(self._table).values(values).on_conflict_do_nothing(index_elements=[self._key])

    def _at_expected(self) -> tuple[sa.ColumnElement[bool], ...]:
        return self._key == sa.bindparam("key"), self._equals("revision", sa.bindparam("expected", type_=self._text))

    def _new_values(self) -> dict[str, Any]:
        return {each.name: sa.bindparam(f"new_{each.name}") for each in self._table.c if each.name != KEY}

    def _with_answer(self, write: Any) -> sa.Executable:
        """The write, and in one row: whether it won, what there is if it did not, and the time."""
        written = write.returning(self._table.c.revision).cte("written")
        won = sa.exists(sa.select(written.c.revision))
        answer = sa.select(sa.literal_column("1")).subquery("answer")
        found = answer.outerjoin(self._table, sa.and_(self._key == sa.bindparam("key"), ~won))
        return sa.select(*self._clock, won.label(_WON), self._table).select_from(found)

    def _swap_once(self, execute: Execute, new: Record, expected: str | None, parameters: Parameters) -> Record | None:
        write = self._claim if expected is None else self._replace
        if self._answers_at_once:
            (row,) = execute(write, parameters).rows
            if row[_WON]:
                return new
            stored = None if row[KEY] is None else record_of(row, store=self._store)
            if stored is not None and stored.revision == new.revision:
                # A commit that was cut off while it waited for a standby is seen here and may be unknown there. One
                # more commit waits for both.
                execute(self._touch, {"key": parameters["key"], "expected": self._as_compared(new.revision)})
            return stored
        if execute(write, parameters).written == 1:
            return new
        return self._found(execute(self._look, {"key": parameters["key"]}))

    def _found(self, reply: Reply) -> Record | None:
        return record_of(reply.rows[0], store=self._store) if reply.rows else None

    def _equals(self, column: str, value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Equal byte by byte. MySQL ignores trailing spaces, except in bytes."""
        text = self._table.c[column]
        return (sa.cast(text, self._text) if self._is_mysql else text) == value

    def _has_label(self, label: str) -> sa.ColumnElement[bool]:
        """By the column itself, first, as an index knows nothing of the bytes it is cast to."""
        equals = self._equals("label", sa.literal(self._as_compared(label), self._text))
        return sa.and_(self._table.c.label == _stored(label), equals)

    def _as_compared(self, text: str) -> str | bytes:
        return _stored(text).encode() if self._is_mysql else _stored(text)


def row_of(record: Record) -> dict[str, Any]:
    """The parameters that write ``record``, all but its key: by ``new_`` and the column's name."""
    values = vars(record)
    result = record.result
    is_text = isinstance(result, str)
    row = {parameter: values[name] for parameter, name in _PARAMETERS}
    row["new_steps"] = json.dumps(dict(record.steps)) if record.steps else "{}"
    row["new_verdict"] = json.dumps(dict(record.verdict)) if record.verdict else None
    for optional in _NULL_IF_EMPTY:
        row[optional] = row[optional] or None
    row["new_result_text"], row["new_result_bytes"] = (result, None) if is_text else (None, result)
    row["new_schema_version"] = record.schema
    texts = [value for value in row.values() if isinstance(value, str)]
    if not "".join(texts).isprintable():
        return {name: _stored(value) if isinstance(value, str) else value for name, value in row.items()}
    return row


def record_of(row: Row, *, store: str) -> Record:
    found, decode = {**_NEVER_NULL}, None
    for name, value in row.items():
        if value is not None and name in _FIELD_OF:
            if name == KEY and type(value) is bytes and value.isascii():  # as MySQL has them
                value = value.decode()
            found[_FIELD_OF[name]] = value
            kind = type(value)
            if kind is not int and (kind is not str or "\x1b" in value):
                decode = _loaded
    return Record.from_fields(found, store=store, decode=decode)


def bytes_on_the_wire(parameters: Parameters) -> int:
    """What a statement with ``parameters`` takes at most where a driver writes them into its text, as for MySQL.

    A server that is sent more than its ``max_allowed_packet`` hangs up, which looks like any other lost connection.
    """
    size = _STATEMENT
    for each in parameters.values():
        if isinstance(each, str):
            size += 2 * (len(each) if each.isascii() else len(each.encode()))
        elif isinstance(each, bytes):
            size += 2 * len(each)
    return size


_STATEMENT = 4096
"""Bytes; more than the text of any statement here, with its numbers."""

_SAME = [each.name for each in fields(Record) if each.name not in {"key", "steps", "verdict", "result", "schema"}]
"""Fields whose column has their name and holds their value."""

_PARAMETERS = [(f"new_{name}", name) for name in _SAME]

_NULL_IF_EMPTY = ("new_label", "new_trace")
"""An index of labels has those alone that are there."""

_FIELD_OF = {name: name for name in (*_SAME, "steps", "verdict")} | {
    KEY: "key",
    "schema_version": "schema",
    "result_bytes": "result",
    "result_text": "result",
}
"""By column, the field that it holds."""

_NEVER_NULL = {"steps": None, "schema": None}
"""What is refused where it is null."""

# PostgreSQL refuses NUL, and every encoder a lone surrogate; the escape character makes room for itself.
_UNSTORABLE = re.compile("[\0\x1b\ud800-\udfff]")
_ESCAPED = re.compile("\x1b([0-9a-f]{4})")


def _stored(text: str) -> str:
    """Any text, as one that every database holds; nearly always the same."""
    return _UNSTORABLE.sub(lambda found: f"\x1b{ord(found[0]):04x}", text)


def _loaded(field: str, value: Any) -> Any:
    """What was stored; drivers differ in how they give bytes and truth values."""
    if isinstance(value, memoryview | bytearray):
        value = bytes(value)
    if field == "key" and isinstance(value, bytes):
        value = value.decode()
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), value) if isinstance(value, str) else value


def _comparable(row: Row) -> Any:
    """The key of a row, to compare a column with: SQLite keeps text and bytes apart, and no text equals any bytes."""
    return sa.cast(sa.literal(row[KEY], sa.LargeBinary), sa.Text) if row.get(_KIND) == "text" else row[KEY]


def _key_of(row: Row) -> object:
    """The key, as far as it can be read."""
    key = row[KEY]
    return key if isinstance(key, str) else bytes(key).decode(errors="backslashreplace")
