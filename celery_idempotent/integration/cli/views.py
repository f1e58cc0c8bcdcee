"""Records as people read them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from celery_idempotent.printable import one_line
from celery_idempotent.protocol.publishing import shown_status
from celery_idempotent.protocol.record import Record

HEADS = ("STATUS", "UPDATED", "ATTEMPTS", "TASK", "KEY", "WORKER")


def status_of(record: Record, now: int) -> str:
    """The status as people read it."""
    return shown_status(record.status, record.owner, record.lease_until, now)


def rows_of(records: Iterable[Record], now: int) -> list[Sequence[object]]:
    """A table of records, its heads first."""
    rows: list[Sequence[object]] = [HEADS]
    rows += [
        (status_of(each, now), time_text(each.updated_at, "seconds"), each.attempts, each.task, each.key, each.worker)
        for each in records
    ]
    return rows


def fields_text(fields: Mapping[str, Any]) -> str:
    """A line for each field of a record."""
    return "\n".join(f"{name:>14}  {_readable(name, value)}" for name, value in fields.items())


def _readable(name: str, value: Any) -> str:
    if name in {"lease_until", "created_at", "updated_at"}:
        return time_text(value)
    if name == "expires_at":
        return time_text(value * 1000)
    return f"{len(value)} bytes" if name == "result" else one_line(value)


def time_text(milliseconds: int, precision: str = "milliseconds") -> str:
    """A time on the store's clock, by ISO 8601 in UTC."""
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):  # after the year 9999: a damaged clock, or a test
        return str(milliseconds)
    return f"{moment.isoformat(timespec=precision)}Z"


def duration_text(milliseconds: int) -> str:
    """How long it is, such as ``1 day, 2:03:04``."""
    return str(timedelta(seconds=max(milliseconds, 0) // 1000))
