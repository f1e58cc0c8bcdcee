"""The outbox: messages that are published if and only if a transaction of an SQL database commits.

In a task, ``tx.send()`` within ``attempt.transaction()`` writes them. Elsewhere, such as in a web request, it is::

    from celery_idempotent import outbox

    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.send(session, ship, order.id)

A relay then publishes each at least once and always with the same task id. Every worker of an app whose store has
an outbox relays, in a thread; ``celery -A your_app idempotency relay`` does so on its own. The message is on disk from
the commit to the moment the broker has taken it, also while the broker is away.
"""

import logging
import os
import threading
from functools import cache
from typing import Any

from celery import Celery, Signature, bootsteps
from kombu.exceptions import DecodeError, KombuError, OperationalError
from kombu.utils.uuid import uuid

from celery_idempotent.codec import Codec, Encoded, describe
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.runtime import runtime_of
from celery_idempotent.store import Outbox, OutboxMessage
from celery_idempotent.transactions import message_of, signature_of

__all__ = ["Relay", "relay", "relay_at_start", "send"]

logger = logging.getLogger(__name__)

_HOLD = 60_000
"""Milliseconds for which a relay has what it took. One that dies delays its messages by this, and no longer."""


def send(using: Any, task: Any, *args: Any, **kwargs: Any) -> str:
    """Have a task published once the transaction of ``using`` commits, and only then.

    Args:
        using: An SQLAlchemy connection or ORM session to the store's database; you commit it. None with a Django
            store, which uses Django's connection and its ``atomic()`` block.
        task: A task, or a signature such as ``ship.s(order_id).set(queue="stock")``.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The task id it will have.

    Raises:
        PolicyError: The app's store has no outbox, or ``using`` cannot be used.
        kombu.exceptions.EncodeError: The arguments cannot be encoded.
        StoreUnavailable: The statement failed; roll back.
    """
    signature = signature_of(task, args, kwargs)
    app = signature.app
    message = message_of(signature, uuid(), runtime_of(app).message_codec)
    outbox_of(app).enqueue(message, using)
    return message.id


def relay(app: Celery, *, limit: int = 100) -> int:
    """Publish messages that wait in the outbox, the oldest first; return how many.

    A message that cannot be decoded is logged and stays. If the broker does not answer, the rest stays, too, and
    comes back within a minute.

    Args:
        app: The Celery app.
        limit: At most that many.

    Raises:
        PolicyError: The app's store has no outbox.
        StoreUnavailable: The database did not answer; what was published may be published again.
        kombu.exceptions.OperationalError: The broker did not answer.
    """
    outbox = outbox_of(app)
    codec = runtime_of(app).message_codec
    published: list[int] = []
    try:
        for number, message in outbox.take(limit, _HOLD):
            try:
                _publish(app, codec, message)
            except OperationalError:
                raise
            except (KombuError, KeyError, TypeError, ValueError) as error:
                logger.error("idempotency.relay_failed task_id=%s reason=%s", message.id, describe(error))
            else:
                published.append(number)
    finally:
        if published:
            outbox.forget(published)
    return len(published)


def outbox_of(app: Celery) -> Outbox:
    """The outbox of the app's store.

    Raises:
        PolicyError: It has none.
    """
    store = runtime_of(app).store
    if not isinstance(store, Outbox):
        raise PolicyError("idempotency_store", repr(store), "has no outbox; that needs an SQL store")
    return store


def _publish(app: Celery, codec: Codec, message: OutboxMessage) -> None:
    fields = codec.decode(Encoded(message.data, message.content_type))
    if not isinstance(fields, dict):
        raise DecodeError("no signature of a task")
    Signature.from_dict(fields, app=app).apply_async(task_id=message.id)


_looking = threading.Lock()
"""Held while a relay's thread works. A pool process forked in the middle of that would inherit locks that nobody in it
will ever release, such as those of the SQLite library; so a fork waits for the end of the look."""


@cache
def _fork_between_looks() -> None:
    # What is registered last comes first before a fork: the look ends, and then stores close what must not be
    # inherited. So this is not done when the module is imported, but once the store is there.
    os.register_at_fork(before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release)


class Relay(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Relays in a thread of the worker's main process, every ``idempotency_relay`` seconds."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(parent, **kwargs)

    def include_if(self, parent: Any) -> bool:
        """Only where there is an outbox, and relaying is not switched off."""
        runtime = runtime_of(parent.app)
        return bool(runtime.relay_every) and isinstance(runtime.store, Outbox)

    def start(self, parent: Any) -> None:
        """Begin to relay."""
        runtime = runtime_of(parent.app)
        _, every = runtime.store, runtime.relay_every
        _fork_between_looks()
        self._thread = threading.Thread(
            target=self._run, args=(parent.app, every), name="celery-idempotent-relay", daemon=True
        )
        self._thread.start()

    def stop(self, parent: Any) -> None:
        """Stop after the messages at hand."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10)

    terminate = stop

    def _run(self, app: Celery, every: float) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            pause = every
            try:
                with _looking:
                    published = relay(app)
                pause = 0.0 if published else every
            except (StoreUnavailable, OperationalError) as error:
                logger.warning("idempotency.relay_failed reason=%s", describe(error))
            except Exception:
                # Whatever it was, the messages wait on disk, and the next look may fare better.
                logger.exception("idempotency.relay_failed")


def relay_at_start(app: Celery) -> None:
    """Have every worker of ``app`` relay; safe to repeat."""
    app.steps["worker"].add(Relay)
