"""The store: a compare-and-swap register of records, and nothing more.

::

              claim                        complete
    (none) ──────────▶ IN_PROGRESS ───────────────────▶ COMPLETED ─┐ retention over:
       ▲                │ ▲   │ └──── fail ──────────▶ FAILED ─────┤ counts as none
       │        release │ │   └────── give up ───────▶ UNKNOWN     │
       │                ▼ │ claim                        │ resolve │
       │              RELEASED ◀─────────────────────────┘         │
       └───────────────────────────────────────────────────────────┘
    takeover: IN_PROGRESS with its lease over ── claim ──▶ IN_PROGRESS, larger fencing token

A store knows nothing of this picture. It compares one revision, writes one record, and returns what is
there. Meaning lives in :mod:`celery_idempotent.protocol`, so a store cannot get the protocol wrong.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from celery_idempotent.record import Record, Status

__all__ = ["Purgeable", "RecordTooLarge", "Store", "Verifiable"]


class RecordTooLarge(Exception):
    """The store refused the record for its size, and certainly did not write it."""


class Store(Protocol):
    """What a store must do. All of it must be safe to call from several threads and after a fork.

    Any failure of the driver surfaces as :class:`~celery_idempotent.errors.StoreUnavailable` with the
    driver's exception as its cause; the caller then treats the outcome of the call as unknown.
    """

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """Write ``new`` if the stored revision is ``expected``; return what is stored afterwards.

        One atomic, durable step. The caller won if and only if the returned revision is ``new.revision``;
        that is also true when the driver sent the write twice because the first reply was lost.

        Args:
            new: The record to write, whole.
            expected: The revision that must be stored now; None if there must be no record.

        Returns:
            The stored record; None if ``expected`` was given and there is no record.

        Raises:
            RecordTooLarge: The record exceeds the store's limit and was not written.
            StoreUnavailable: No certain answer; the write may have happened or may still happen.
        """

    def get(self, key: str) -> Record | None:
        """A consistent snapshot, expired records included; for people and tools, not for the protocol."""

    def scan(self, *, status: Status | None = None, task: str | None = None) -> Iterator[Record]:
        """All records, in no order, optionally of one status or task. Reads the whole store."""

    def delete(self, key: str, expected: str) -> bool:
        """Delete the record if its revision is ``expected``; for operators only."""

    def now(self) -> int:
        """The store's clock in milliseconds since the epoch, UTC. Costs no request."""

    def provision(self) -> None:
        """Create the table or schema if it is missing; safe to repeat."""

    def close(self) -> None:
        """Release connections; safe to repeat."""


@runtime_checkable
class Verifiable(Protocol):
    """A store that can tell, before any task runs, that it is not usable."""

    def verify(self) -> None:
        """Check the store with the same permission a claim needs, leaving nothing behind.

        Raises:
            StoreMisconfigured: Missing table, permission or key schema; the message names the remedy.
            StoreUnavailable: The store did not answer.
        """


@runtime_checkable
class Purgeable(Protocol):
    """A store that keeps forgotten outcomes until it is told to delete them; the others do so by themselves.

    Nothing depends on when: an outcome past its ``expires_at`` counts as absent while it is still there.
    """

    def purge(self, limit: int) -> int:
        """Delete outcomes whose ``expires_at`` is past on the store's clock; return how many.

        Short, and safe beside claims: a record that is claimed again meanwhile stays.

        Args:
            limit: At most that many. Fewer, even none, may be deleted although there are more, where others
                are writing them.

        Raises:
            StoreUnavailable: No certain answer; some may be deleted.
        """
