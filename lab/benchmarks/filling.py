"""Stores that hold many records: a place of its own for each size, filled in bulk by the store's own means.

Every record is a copy of one that the library has written, under a key as long as that one's and as random. So
whoever knows the number of a record can ask for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import redis
from sqlalchemy import Engine, create_engine, event, make_url, text

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sql import SQLStore
from lab.benchmarks.environment import Servers
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis

__all__ = ["Filled", "filled_at", "item_bytes", "key_of", "urls"]


def key_of(template: str, number: int | str) -> str:
    """The key of record ``number``, as long as ``template``; both end in a hash."""
    return f"{template.rpartition(':')[0]}:{sha256(str(number).encode()).hexdigest()}"


class Filled(Protocol):
    """A store of one size."""

    store: Store

    def fill(self, template: Record, count: int) -> None:
        """Add records 0 to ``count``, all as ``template``, which is there already."""

    def size(self) -> float | None:
        """Bytes that the server needs for all records; None where it does not tell."""

    def close(self) -> None:
        """Close what is open, the store included."""


@contextmanager
def urls(servers: Servers, folder: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """By name, the address of every store that runs here while the block lasts; and what is missing for the others."""
    kinds: Mapping[str, Any] = {"Redis": EmbeddedRedis, "PostgreSQL": EmbeddedPostgres, "MariaDB": EmbeddedMariaDB}
    missing = {name: lack for name, kind in kinds.items() if (lack := kind.missing())}
    found = {"memory": "memory://", "DynamoDB": servers.store_url("benchmark-stores")}
    with ExitStack() as stack:
        for name, kind in kinds.items():
            if name not in missing:
                found[name] = stack.enter_context(kind()).url
        yield {**found, "SQLite": f"sqlite:///{folder / 'benchmark.sqlite3'}"}, missing


@contextmanager
def filled_at(name: str, url: str, size: int, servers: Servers) -> Iterator[Filled]:
    """The place for ``size`` records in the store at ``url``, empty."""
    made = _KINDS[name](url, size, servers)
    made.store.provision()
    try:
        yield made
    finally:
        made.close()


class _Memory:
    def __init__(self, url: str, size: int, servers: Servers) -> None:
        self.store = open_store(url)

    def at(self, url: str) -> str:
        return url

    def fill(self, template: Record, count: int) -> None:
        for number in range(count):
            self.store.swap(template.but(key=key_of(template.key, number)), None)

    def size(self) -> float | None:
        return None

    def close(self) -> None:
        self.store.close()


class _Redis:
    _BATCH = 500
    _SCRIPT = """
        local fields, forget_at = redis.call('HGETALL', KEYS[1]), redis.call('PEXPIRETIME', KEYS[1])
        for i = 2, #KEYS do
          redis.call('HSET', KEYS[i], unpack(fields))
          redis.call('PEXPIREAT', KEYS[i], forget_at)
        end
    """

    def __init__(self, url: str, size: int, servers: Servers) -> None:
        self._database = len(str(size))
        self.store = open_store(self.at(url))
        self._client = redis.Redis.from_url(self.at(url))
        self._before = self._used()

    def at(self, url: str) -> str:
        # A database is a dictionary of its own, so each grows by itself.
        return f"{url.rpartition('/')[0]}/{self._database}"

    def fill(self, template: Record, count: int) -> None:
        (name,) = self._client.scan_iter(match=f"*{template.key}")
        prefix = name.decode().removesuffix(template.key)
        for first in range(0, count, self._BATCH):
            numbers = range(first, min(first + self._BATCH, count))
            names = [f"{prefix}{key_of(template.key, number)}" for number in numbers]
            self._client.eval(self._SCRIPT, 1 + len(names), name, *names)

    def size(self) -> float | None:
        return self._used() - self._before

    def close(self) -> None:
        self.store.close()
        self._client.close()

    def _used(self) -> float:
        return float(self._client.info("memory")["used_memory"])


class _DynamoDB:
    _BATCH = 25

    def __init__(self, url: str, size: int, servers: Servers) -> None:
        self._table = f"benchmark-growth-{size}"
        self.store = open_store(self.at(url))
        self._client = servers.session().client("dynamodb", endpoint_url=servers.dynamodb)
        self._template: Mapping[str, Any] = {}
        self._count = 0

    def at(self, url: str) -> str:
        head, _, query = url.partition("?")
        return f"{head.rpartition('/')[0]}/{self._table}?{query}&unknown_index=in-doubt&label_index=labels"

    def fill(self, template: Record, count: int) -> None:
        self._template = self._client.get_item(TableName=self._table, Key={_KEY: {"S": template.key}})["Item"]
        self._count = count
        for first in range(0, count, self._BATCH):
            numbers = range(first, min(first + self._BATCH, count))
            puts: Any = [{"PutRequest": {"Item": self._item(template, number)}} for number in numbers]
            reply = self._client.batch_write_item(RequestItems={self._table: puts})
            assert not reply["UnprocessedItems"], "the server wants to be asked more slowly"

    def size(self) -> float | None:
        # What AWS stores and bills: the item, and 100 bytes for the index of keys.
        return (item_bytes(self._template) + 100) * self._count

    def close(self) -> None:
        self.store.close()
        self._client.close()

    def _item(self, template: Record, number: int) -> dict[str, Any]:
        return {**self._template, _KEY: {"S": key_of(template.key, number)}}


_KEY = "idempotencyKey"


def item_bytes(item: Mapping[str, Mapping[str, Any]]) -> int:
    """Names and values in UTF-8; a number is counted by its digits, which is never too little."""
    return sum(
        len(name.encode()) + len(str(value).encode()) for name, typed in item.items() for value in typed.values()
    )


class _Sql:
    """Copies made by the database itself, out of the one row that is there.

    Args:
        url: The database.
        size: How many records.
    """

    key: str
    """SQL: the key of row ``n``, from ``:head``."""
    numbers: str
    """SQL: a table with the column ``n``, from 0 to before ``{count}``."""
    settle: Sequence[str]
    """What the server does by itself some time after so many rows are new, with ``{table}``."""
    measure: str
    """SQL: the bytes of ``{table}`` and of its indexes."""

    def __init__(self, url: str, size: int, servers: Servers) -> None:
        self._table = f"growth_{size}"
        self._size = size
        self.store: Any = open_store(self.at(url))
        self._engine = self._new_engine(url)

    def at(self, url: str) -> str:
        return make_url(url).update_query_dict({"table": self._table}).render_as_string(hide_password=False)

    def fill(self, template: Record, count: int) -> None:
        assert isinstance(self.store, SQLStore)
        others = ", ".join(f"t.{each.name}" for each in self.store.table.c if each.name != "idempotency_key")
        names = others.replace("t.", "")
        statement = (
            f"INSERT INTO {self._table} (idempotency_key, {names}) SELECT {self.key}, {others} "
            f"FROM {self._table} AS t CROSS JOIN {self.numbers.format(count=count)} WHERE t.idempotency_key = :key"
        )
        head = template.key.rpartition(":")[0] + ":"
        self._execute(text(statement).bindparams(head=head, key=self._stored(template.key)))
        for each in self.settle:
            self._execute(text(each.format(table=self._table)))

    def size(self) -> float | None:
        return float(self._execute(text(self.measure.format(table=self._table))))

    def close(self) -> None:
        self.store.close()
        self._engine.dispose()

    def _execute(self, statement: Any) -> Any:
        with self._engine.connect() as connection:
            result = connection.execute(statement)
            return result.scalar() if result.returns_rows else None

    def _new_engine(self, url: str) -> Engine:
        return create_engine(url, isolation_level="AUTOCOMMIT")

    def _stored(self, key: str) -> object:
        return key


class _PostgreSQL(_Sql):
    key = ":head || encode(sha256(n::text::bytea), 'hex')"
    numbers = "generate_series(0, {count} - 1) AS n"
    settle = ("VACUUM ANALYZE {table}",)
    measure = "SELECT pg_total_relation_size('{table}')"


class _MariaDB(_Sql):
    key = "CONCAT(:head, SHA2(n, 256))"
    numbers = "(SELECT seq AS n FROM seq_0_to_{count} WHERE seq < {count}) AS numbers"
    settle = ("ANALYZE TABLE {table}",)
    measure = (
        "SELECT file_size FROM information_schema.innodb_sys_tablespaces WHERE name = CONCAT(DATABASE(), '/{table}')"
    )

    def _stored(self, key: str) -> object:
        return key.encode()


class _SQLite(_Sql):
    key = ":head || sha256(n)"
    numbers = (
        "(WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count} - 1) "
        "SELECT n FROM numbers) AS numbers"
    )
    settle = ("PRAGMA wal_checkpoint(TRUNCATE)",)
    measure = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"

    def at(self, url: str) -> str:
        # A file of its own for each size, as its bytes are counted.
        return super().at(f"{url}-{self._size}")

    def _new_engine(self, url: str) -> Engine:
        engine = create_engine(f"{url}-{self._size}", isolation_level="AUTOCOMMIT")

        def teach(connection: sqlite3.Connection, record: object) -> None:
            connection.create_function("sha256", 1, lambda n: sha256(str(n).encode()).hexdigest())

        event.listen(engine, "connect", teach)
        return engine


_KINDS: Mapping[str, Callable[[str, int, Servers], Filled]] = {
    "memory": _Memory,
    "DynamoDB": _DynamoDB,
    "Redis": _Redis,
    "PostgreSQL": _PostgreSQL,
    "MariaDB": _MariaDB,
    "SQLite": _SQLite,
}
