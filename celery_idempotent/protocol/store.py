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
there. Meaning lives in :mod:`celery_idempotent.protocol.operation`, so a store cannot get the protocol wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack, runtime_checkable

from celery_idempotent.protocol.record import Record, Status


class RecordTooLarge(Exception):
    """The store refused the record for its size, and certainly did not write it."""


class WriteFailed(Exception):
    """The store refused one of the user's writes, and certainly wrote nothing.

    Args:
        position: Which of the writes, counted from 0; None where the store refused them as a whole.
        reason: Why, in the store's words.
    """

    def __init__(self, position: int | None, reason: str) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason


class Wanted(TypedDict, total=False):
    """Which records a scan is for: None, or left out, asks for nothing.

    Only status, task and label must be followed. Where a label could be meant, one that is encrypted may be the one.
    """

    status: Status | None
    task: str | None
    label: str | None
    #: How the label begins.
    label_prefix: str | None
    worker: str | None
    #: The task id or the label, or how the key or what stands behind its last colon begins; also behind a task's name.
    name: str | None
    #: Written before that time, in milliseconds on the store's clock.
    before: int | None
    #: So many of all that is wanted are enough, if none of it was written before them.
    oldest: int | None


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
        """A consistent snapshot, expired records included; for people and tools, not for the protocol.

        Raises:
            StoreMisconfigured: What is stored cannot be read; so does :meth:`swap`.
            StoreUnavailable: The store did not answer.
        """

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        """All records, in no order, optionally of one status, task or label.

        A record that cannot be read is named in the log and passed over: :func:`celery_idempotent.stores.readable`.
        Of what is certainly not wanted, a store says nothing.
        """

    def delete(self, key: str, expected: str) -> bool:
        """Delete the record if its revision is ``expected``; for operators only."""

    def now(self) -> int:
        """The store's clock in milliseconds since the epoch, UTC. Costs no request."""

    def provision(self) -> None:
        """Create the table or schema if it is missing; safe to repeat."""

    def close(self) -> None:
        """Release connections; safe to repeat."""


@runtime_checkable
class VerifiableStore(Store, Protocol):
    """A store that can tell, before any task runs, that it is not usable."""

    def verify(self) -> None:
        """Check the store with the same permission a claim needs, leaving nothing behind.

        Raises:
            StoreMisconfigured: Missing table, permission or key schema; the message names the remedy.
            StoreUnavailable: The store did not answer.
        """


@runtime_checkable
class PurgeableStore(Store, Protocol):
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


@runtime_checkable
class IndexedStore(Store, Protocol):
    """A store that is asked the whole question, and can tell before a scan what it takes."""

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """As :meth:`Store.scan`; what else is wanted may be ignored, or saves sending what nobody asked for."""

    def reads_all(self, **wanted: Unpack[Wanted]) -> bool:
        """Whether no index tells which records these are, so that all must be looked at."""


@runtime_checkable
class CommittingStore(Store, Protocol):
    """A store that can commit writes of the user's together with a record, in one atomic step."""

    def swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        """As :meth:`Store.swap`, and ``writes`` happen if and only if ``new`` is written.

        Raises:
            WriteFailed: One of the writes was refused; nothing was written.
            RecordTooLarge: The record exceeds the store's limit; nothing was written.
            StoreUnavailable: No certain answer; all of it may have happened or may still happen. Contention
                with another transaction is one, too: ask again.
        """


class OutboxMessage(NamedTuple):
    """A message that is to be published because a transaction was committed."""

    #: The task id it will have, each time it is published.
    id: str
    #: The encoded signature.
    data: str | bytes
    #: How it is encoded.
    content_type: str


class TakenMessage(NamedTuple):
    """A message that a relay has to itself for a while."""

    #: Its number in the outbox.
    number: int
    #: What is to be published.
    message: OutboxMessage
    #: How often publishing it has failed.
    failures: int
    #: Nonce of the taking. What a relay says of the message counts until somebody else has taken it.
    taken_by: str


class WaitingMessage(NamedTuple):
    """What people are told of a message that waits to be published: nothing of its contents."""

    #: The task id that it will have.
    id: str
    #: When it was written, in milliseconds on the store's clock.
    created_at: int
    #: How often publishing it has failed.
    failures: int
    #: The earliest time at which a relay takes it, likewise; 0: the next look.
    next_try: int
    #: Why it failed the last time, on one line; None if it never did.
    reason: str | None


class Transaction(Protocol):
    """An open transaction on the store's database, with the user's statements in it.

    It ends by :meth:`commit` or :meth:`rollback`, whatever either raises.
    """

    @property
    def connection(self) -> Any:
        """What the user executes statements with."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """As :meth:`Store.swap`, but what is written counts if and when the transaction is committed.

        From then on no other write of the record succeeds until the transaction has ended.

        Raises:
            RecordTooLarge: The record exceeds the store's limit; only :meth:`rollback` is left.
            StoreUnavailable: The statement failed; only :meth:`rollback` is left.
        """

    def enqueue(self, message: OutboxMessage) -> None:
        """Put a message into the outbox, from which it is published after the commit; raises as :meth:`swap`."""

    def commit(self) -> None:
        """Make everything in it durable at once.

        Raises:
            StoreUnavailable: No certain answer: it was committed, or not, or may be while its row is locked.
            Exception: The database's own, such as for a deferred constraint: certainly not committed.
        """

    def rollback(self) -> None:
        """Undo everything in it; never raises."""


@runtime_checkable
class TransactionalStore(Store, Protocol):
    """A store whose records can be written in one transaction with the user's statements."""

    def begin(self, using: Any = None) -> Transaction:
        """Begin a transaction.

        Args:
            using: A connection or session of the user's, to the same database; None: one of the store's own.

        Raises:
            PolicyError: ``using`` cannot be used.
            StoreUnavailable: The database did not answer.
        """


@runtime_checkable
class Outbox(Store, Protocol):
    """A store that keeps messages to be published, written in transactions of the user's."""

    def enqueue(self, message: OutboxMessage, using: Any) -> None:
        """Write a message in the transaction of the user's connection or session, which the user commits.

        Raises:
            PolicyError: ``using`` cannot be used.
            RecordTooLarge: The database has no room for it.
            StoreUnavailable: The statement failed; roll back.
        """

    def take(self, limit: int, hold: int) -> list[TakenMessage]:
        """Up to ``limit`` messages that no other relay gets meanwhile; by the number of their failures, then by age.

        The oldest, but at most half of them failed before while there are enough others: no number of messages that
        cannot be published keeps back those that can.

        Args:
            limit: At most that many.
            hold: Milliseconds after which they come back unless they are forgotten.

        Raises:
            StoreUnavailable: No certain answer; what was taken comes back.
        """

    def give_back(self, messages: Sequence[TakenMessage]) -> None:
        """Let the next look have messages that were not tried; raises as :meth:`take`, and then they are held."""

    def postpone(self, message: TakenMessage, pause: int, reason: str) -> None:
        """Count a failure of a message, which nobody gets for ``pause`` milliseconds on the store's clock.

        Args:
            message: What was taken.
            pause: Milliseconds.
            reason: Why, for people; one line.

        Raises:
            StoreUnavailable: No certain answer; the message comes back after the hold, at the latest.
        """

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete messages that are published; raises as :meth:`take`, and then they may be published again."""

    def waiting(self, limit: int) -> list[WaitingMessage]:
        """The ``limit`` oldest messages that wait, for people; takes none of them. Raises as :meth:`take`."""
