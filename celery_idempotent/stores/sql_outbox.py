"""The outbox of an SQL store: messages that wait to be published because a transaction was committed.

A row is written by the transaction that it belongs to. A relay takes some, publishes them, and deletes them. It
takes by writing until when it has them, so that relays share the work, and what a dead one had comes back.
"""

from collections.abc import Sequence
from secrets import token_hex

from sqlalchemy import Table, bindparam, delete, insert, select, update

from celery_idempotent.store import OutboxMessage
from celery_idempotent.stores.sql_statements import Execute

__all__ = ["OutboxStatements"]


class OutboxStatements:
    """The questions of an outbox.

    Args:
        table: From :func:`celery_idempotent.stores.sql_schema.outbox_table`.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        values = ("task_id", "data_text", "data_bytes", "content_type", "created_at", "taken_until")
        # Inline: the number is not asked for, so that a sender needs no right to read.
        self._insert = insert(table).inline().values({name: bindparam(f"new_{name}") for name in values})

    def enqueue(self, execute: Execute, message: OutboxMessage, now: int) -> None:
        """Write a message; ``now`` is milliseconds on the server's clock."""
        is_text = isinstance(message.data, str)
        values = {
            "task_id": message.id,
            "data_text": message.data if is_text else None,
            "data_bytes": None if is_text else message.data,
            "content_type": message.content_type,
            "created_at": now,
            "taken_until": 0,
        }
        execute(self._insert, {f"new_{name}": value for name, value in values.items()})

    def take(self, execute: Execute, limit: int, now: int, hold: int) -> list[tuple[int, OutboxMessage]]:
        """Have up to ``limit`` messages, the oldest first, to oneself for ``hold`` milliseconds."""
        table = self.table
        is_free = table.c.taken_until <= now
        waiting = select(table.c.number).where(is_free).order_by(table.c.number).limit(limit)
        numbers = [row["number"] for row in execute(waiting, {}).rows]
        if not numbers:
            return []
        mine = token_hex(16)
        execute(
            update(table).where(table.c.number.in_(numbers), is_free).values(taken_until=now + hold, taken_by=mine), {}
        )
        taken = select(table).where(table.c.number.in_(numbers), table.c.taken_by == mine).order_by(table.c.number)
        return [
            (
                row["number"],
                OutboxMessage(
                    row["task_id"],
                    bytes(row["data_bytes"]) if row["data_text"] is None else row["data_text"],
                    row["content_type"],
                ),
            )
            for row in execute(taken, {}).rows
        ]

    def forget(self, execute: Execute, numbers: Sequence[int]) -> None:
        """Delete messages that are published."""
        execute(delete(self.table).where(self.table.c.number.in_(numbers)), {})
