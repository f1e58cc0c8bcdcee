"""What PostgreSQL has made of the records of a benchmark: where it wrote their ends, and what room they take."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import create_engine, text

__all__ = ["IN_PLACE", "Kept", "kept"]

IN_PLACE = 0.95
"""Share of the ends that must be heap-only updates."""

_QUESTION = """
SELECT CAST(n_tup_hot_upd AS FLOAT) / n_tup_upd AS in_place, pg_table_size(relid) / rows AS bytes,
       pg_indexes_size(relid) / rows AS index_bytes
FROM pg_stat_user_tables, (SELECT count(*) AS rows FROM idempotency_records) AS counted
WHERE relname = 'idempotency_records'
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one table: the share of updates that were heap-only, and bytes for each record."""

    in_place: float
    bytes: int
    index_bytes: int


def kept(url: str) -> Kept:
    """What the server at ``url`` has counted; processes that have just worked report up to a second later."""
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            return Kept(*connection.execute(text(_QUESTION)).one())
    finally:
        engine.dispose()
