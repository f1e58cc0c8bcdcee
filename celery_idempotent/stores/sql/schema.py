"""The tables of an SQL store: importable for Alembic, printable as DDL, the same for every way to create them.

::

    # env.py of Alembic
    from celery_idempotent.stores.sql.schema import metadata as idempotency
    target_metadata = [Base.metadata, idempotency]

Text is kept as it is, except for what some database cannot hold; see :mod:`celery_idempotent.stores.sql.statements`.
Keys are compared byte by byte everywhere: no case folding, no padding, no Unicode normalisation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.dialects.mysql import mariadb
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

TABLE = "idempotency_records"
"""Name of the table of records, unless another is asked for."""

OUTBOX = "idempotency_outbox"
"""Name of the table of messages that stands beside it."""

KEY = "idempotency_key"
"""Column of the key; ``key`` alone is a reserved word of MySQL."""

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": mariadb.MariaDBDialect,
    "sqlite": sqlite.dialect,
}
"""By SQLAlchemy's name, the databases that a store works on."""

_KEY = (
    sa.Text()
    .with_variant(sa.Text(collation="C"), "postgresql")
    # 2048 bytes: the longest key is a scope of 1900, a generation and 64 digits; InnoDB indexes up to 3072.
    .with_variant(mysql.VARBINARY(2048), "mysql", "mariadb")
)
_LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
_LONG_BYTES = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")

_INNODB: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}

_BY_RANGES: dict[str, Any] = {
    "postgresql_using": "brin",
    "postgresql_ops": {"status": "text_bloom_ops(n_distinct_per_range=16)"},
    "postgresql_with": {"autosummarize": "on"},
}
"""On PostgreSQL, an index that sums up ranges of pages: one with an entry for each row would keep the end of an
operation from being a heap-only update, and all indexes would get another entry. See docs/decisions.md, 17."""

_WHERE_THERE_IS_ONE: dict[str, Any] = {
    f"{dialect}_where": sa.text("label IS NOT NULL") for dialect in ("postgresql", "sqlite")
}
"""MySQL knows no index of a part."""

_BY_BEGINNINGS: dict[str, Any] = {"postgresql_ops": {"label": "varchar_pattern_ops"}}
"""On PostgreSQL, an index in the order of a language finds no beginning of a text."""

_FILLED = 70
"""On PostgreSQL, per cent of a page that claims may fill; the rest is for the same rows when they end."""

metadata = sa.MetaData()
"""Holds :data:`records` and :data:`outbox`, and nothing else."""


def records_table(name: str, *, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """The table of an SQL store.

    Times are milliseconds since the epoch, except ``expires_at``, which is in seconds. A result stands in
    ``result_text`` or in ``result_bytes``, as it was encoded; ``steps`` and ``verdict`` are JSON.

    Args:
        name: Its name.
        metadata: What it is added to.
        schema: The schema that it is in; None: the first of the connection's search path.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column(KEY, _KEY, primary_key=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("lease_until", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.Text),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("takeovers", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("app", sa.Text),
        sa.Column("process", sa.Text),
        sa.Column("label", sa.String(255)),
        sa.Column("trace", sa.Text),
        sa.Column("steps", _LONG_TEXT, nullable=False),
        sa.Column("verdict", _LONG_TEXT),
        sa.Column("result_text", _LONG_TEXT),
        sa.Column("result_bytes", _LONG_BYTES),
        sa.Column("content_type", sa.Text),
        sa.Column("error", _LONG_TEXT),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("schema_version", sa.SmallInteger, nullable=False),
        # One index for two questions that are not about a key: which outcomes are forgotten, and what is in a status
        # (on PostgreSQL the second alone). Each index costs writes; that of labels only those that have one.
        sa.Index(f"{name}_status", "status", "expires_at", **_BY_RANGES),
        sa.Index(f"{name}_label", "label", **_WHERE_THERE_IS_ONE, **_BY_BEGINNINGS),
        schema=schema,
        **_INNODB,
        postgresql_with={"fillfactor": str(_FILLED)},
    )


def outbox_table(name: str, *, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """The table of messages that wait to be published.

    Times are milliseconds since the epoch. A message stands in ``data_text`` or in ``data_bytes``, as it was encoded.

    Args:
        name: Its name.
        metadata: What it is added to.
        schema: The schema that it is in; None: the first of the connection's search path.
    """
    return sa.Table(
        name,
        metadata,
        # In the order of writing, more or less: what is written first is published first. No identity, although the
        # sequence of PostgreSQL needs a right of its own: elsewhere Alembic would find it missing for ever.
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("task_id", sa.String(64), nullable=False),
        sa.Column("data_text", _LONG_TEXT),
        sa.Column("data_bytes", _LONG_BYTES),
        sa.Column("content_type", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("taken_until", sa.BigInteger, nullable=False),
        sa.Column("taken_by", sa.String(32)),
        sa.Column("failures", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text),
        schema=schema,
        **_INNODB,
    )


records = records_table(TABLE, metadata=metadata)
"""The table of records under its default name."""

outbox = outbox_table(OUTBOX, metadata=metadata)
"""The table of messages under its default name."""


def creation(table: sa.Table = records) -> Sequence[DDLElement]:
    """What creates ``table`` with its indexes, to be executed in order."""
    return [CreateTable(table), *map(CreateIndex, indexes_of(table))]


def indexes_of(table: sa.Table) -> Sequence[sa.Index]:
    """The indexes of ``table`` in an order that stays the same."""
    return sorted(table.indexes, key=lambda each: str(each.name))


def ddl(dialect: str, *tables: sa.Table) -> str:
    """The same as text, ending in a line feed.

    Args:
        dialect: One of :data:`DIALECTS`.
        tables: The tables to create; none given: :data:`records` and :data:`outbox`.
    """
    elements = [each for table in tables or (records, outbox) for each in creation(table)]
    return "".join(f"{text_of(each, DIALECTS[dialect]())};\n" for each in elements)


def text_of(element: DDLElement, dialect: Dialect) -> str:
    """What is sent to a database, as people read it."""
    return str(element.compile(dialect=dialect)).strip().replace("\t", "    ").replace(" \n", "\n")
