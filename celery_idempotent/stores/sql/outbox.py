"""The outbox of an SQL store: messages that wait to be published because a transaction was committed.

A row is written by the transaction that it belongs to. A relay takes some, publishes them, and deletes them. It
takes by writing until when it has them, so that relays share the work, and what a dead one had comes back. The same
column says until when nobody has a message that could not be published.
"""

from collections.abc import Sequence
from secrets import token_hex

from sqlalchemy import ColumnElement, Table, bindparam, delete, insert, select, update

from celery_idempotent.protocol.store import OutboxMessage, TakenMessage, WaitingMessage
from celery_idempotent.stores.sql.statements import Execute, Row


class OutboxStatements:
    """The questions of an outbox."""

    def __init__(self, table: Table) -> None:
        self.table = table
        values = ("task_id", "data_text", "data_bytes", "content_type", "created_at", "taken_until", "failures")
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
            "failures": 0,
        }
        execute(self._insert, {f"new_{name}": value for name, value in values.items()})

    def take(self, execute: Execute, limit: int, now: int, hold: int) -> list[TakenMessage]:
        """See :meth:`celery_idempotent.stores.Outbox.take`; ``now`` is milliseconds on the server's clock."""
        table = self.table
        is_free = table.c.taken_until <= now
        numbers = self._found(execute, is_free, limit)
        if not numbers:
            return []
        mine = token_hex(16)
        execute(
            update(table).where(table.c.number.in_(numbers), is_free).values(taken_until=now + hold, taken_by=mine), {}
        )
        taken = select(table).where(table.c.number.in_(numbers), table.c.taken_by == mine)
        return [_taken(row) for row in execute(taken.order_by(table.c.failures, table.c.number), {}).rows]

    def _found(self, execute: Execute, is_free: ColumnElement[bool], limit: int) -> list[int]:
        table = self.table
        free = select(table.c.number, table.c.failures).where(is_free).order_by(table.c.number)
        oldest = execute(free.limit(limit), {}).rows
        failing = [row["number"] for row in oldest if row["failures"]]
        if len(failing) <= limit // 2:
            return [row["number"] for row in oldest]
        others = [row["number"] for row in execute(free.where(table.c.failures == 0).limit(-(limit // -2)), {}).rows]
        return others + failing[: limit - len(others)]

    def give_back(self, execute: Execute, messages: Sequence[TakenMessage]) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.give_back`."""
        execute(update(self.table).where(*self._still(*messages)).values(taken_until=0, taken_by=None), {})

    def postpone(self, execute: Execute, message: TakenMessage, until: int, reason: str) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.postpone`; ``until`` is milliseconds on the server's clock."""
        failure = {"failures": self.table.c.failures + 1, "reason": reason, "taken_until": until, "taken_by": None}
        execute(update(self.table).where(*self._still(message)).values(failure), {})

    def forget(self, execute: Execute, numbers: Sequence[int]) -> None:
        """See :meth:`celery_idempotent.stores.Outbox.forget`."""
        execute(delete(self.table).where(self.table.c.number.in_(numbers)), {})

    def waiting(self, execute: Execute, limit: int) -> list[WaitingMessage]:
        """See :meth:`celery_idempotent.stores.Outbox.waiting`."""
        told = [self.table.c[name] for name in ("task_id", "created_at", "failures", "taken_until", "reason")]
        rows = execute(select(*told).order_by(self.table.c.number).limit(limit), {}).rows
        return [WaitingMessage(*(row[each.name] for each in told)) for row in rows]

    def _still(self, *messages: TakenMessage) -> tuple[ColumnElement[bool], ...]:
        """That nobody else has taken them since."""
        table = self.table
        numbers, takers = [each.number for each in messages], [each.taken_by for each in messages]
        return table.c.number.in_(numbers), table.c.taken_by.in_(takers)


def _taken(row: Row) -> TakenMessage:
    data = bytes(row["data_bytes"]) if row["data_text"] is None else row["data_text"]
    message = OutboxMessage(row["task_id"], data, row["content_type"])
    return TakenMessage(row["number"], message, row["failures"], row["taken_by"])
