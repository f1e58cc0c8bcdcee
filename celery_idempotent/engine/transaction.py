"""A body's transaction: the user's statements, follow-up messages, and the record, committed together."""

import mmap
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from celery_idempotent.engine.claim import Claim, effect_key
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.codec import Codec, Kept
from celery_idempotent.protocol.contents import Slot, pack
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge, Store, Transaction, TransactionalStore

T = TypeVar("T")

sent = mmap.mmap(-1, 1)
"""A byte that a worker and its forked pool processes share: not zero once a message was written into the outbox."""


def derived_id(key: str) -> str:
    """A task id for the effect of that key: the same on every attempt."""
    return str(UUID(hex=key[:32], version=4))


def signature_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The call of ``task``, which is a task, or a signature that the arguments are added to."""
    if hasattr(task, "signature"):
        return task.signature(args, kwargs)
    if hasattr(task, "clone"):
        return task.clone(args, kwargs)
    raise PolicyError(
        "task",
        repr(task),
        "is neither a task nor a signature; write attempt.send(name_of_the_step, task, ...), tx.send(task, ...) or "
        "outbox.send(task, ...)",
    )


def message_of(signature: Any, task_id: str, codec: Codec, store: Store) -> OutboxMessage:
    """The message that publishes ``signature`` under ``task_id``; raises what encoding raises."""
    encoded, _ = pack(store, codec.encode(dict(signature)), message_slot(task_id))
    return OutboxMessage(task_id, encoded.data, encoded.content_type)


def message_slot(task_id: str) -> Slot:
    """Where a message of the outbox belongs."""
    return Slot(task_id, "message")


class BodyTransaction:
    """``with attempt.transaction() as tx:`` commits what is done in the block, or nothing of it."""

    def __init__(self, claim: Claim, codec: Codec, store: TransactionalStore, using: Any) -> None:
        self._claim, self._codec = claim, codec
        self._store, self._using = store, using
        self._transaction: Transaction | None = None
        self._kept: Kept | None = None
        self._sent = 0

    def __enter__(self) -> Self:
        self._claim.undo = self._undo
        self._transaction = self._store.begin(self._using)
        return self

    def _undo(self) -> None:
        if self._transaction is not None:
            self._transaction.rollback()
        self._transaction = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ = self._open
        if error is not None:
            self._undo()
            return
        if self._kept is None:
            self._undo()
            raise PolicyError("transaction", "without done()", "end its block with: return tx.done(<the result>)")
        try:
            self._claim.commit_in(self._open, self._kept, partial(setattr, self, "_transaction", None))
        except RecordTooLarge as too_large:
            why = f"the record has no room for it; return less ({too_large})"
            raise PolicyError("done", "this result", why) from too_large

    @property
    def connection(self) -> Any:
        """What statements are executed with: SQLAlchemy's connection, or Django's.

        Raises:
            PolicyError: The block has not begun, or is over.
        """
        return self._open.connection

    def execute(self, statement: Any, *arguments: Any, **options: Any) -> Any:
        """Execute a statement of yours: ``connection.execute(...)``."""
        return self.connection.execute(statement, *arguments, **options)

    def send(self, task: Any, *args: Any, **kwargs: Any) -> str:
        """Have a task published once the transaction is committed, and only then.

        A relay publishes it, at least once, always with the same task id; a follow-up task that is idempotent
        then has its effect once.

        Args:
            task: A task, or a signature such as ``receipt.s(order_id).set(queue="mail")``.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The task id it will have.

        Raises:
            kombu.exceptions.EncodeError: The arguments cannot be encoded.
            StoreUnavailable: The database did not answer; let it pass.
        """
        signature = signature_of(task, args, kwargs)
        self._sent += 1
        task_id = derived_id(effect_key(self._claim.key, f"celery_idempotent.send:{self._sent}"))
        self._open.enqueue(message_of(signature, task_id, self._codec, self._claim.store))
        sent[0] = 1
        return task_id

    def done(self, result: T) -> T:
        """State the operation's result, to be recorded with all else in this transaction.

        Returns:
            ``result`` as a replay would return it, if its policy keeps it.
        """
        _ = self._open
        kept = self._codec.keep_outcome(result)
        self._kept = self._claim.packed(kept, is_final=False)
        value: T = self._kept.value
        return value

    @property
    def _open(self) -> Transaction:
        if self._transaction is None:
            raise PolicyError("transaction", "outside its block", "use it within: with attempt.transaction() as tx:")
        return self._transaction
