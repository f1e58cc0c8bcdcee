"""The outbox: messages that are published if and only if a transaction of an SQL database commits; and their relay."""

import logging
import os
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import Celery, Signature
from kombu.exceptions import DecodeError, OperationalError
from kombu.utils.uuid import uuid

from celery_idempotent import clock
from celery_idempotent.engine.transaction import message_of, message_slot, sent, signature_of
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.operating.worker import Periodic
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line, say
from celery_idempotent.protocol.codec import Encoded, describe
from celery_idempotent.protocol.contents import unpack
from celery_idempotent.protocol.store import Outbox, OutboxMessage, TakenMessage, WaitingMessage

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
    message = message_of(signature, uuid(), runtime_of(app).codec, runtime_of(app).store)
    outbox_of(app).enqueue(message, using)
    sent[0] = 1
    return message.id


def relay(app: Celery, *, limit: int = 100) -> int:
    """Publish messages that wait in the outbox, the oldest first; return how many.

    One that cannot be published is logged, and tried again after a pause that grows with every failure. It does not
    keep others back. If the broker does not answer, the rest waits for the next call.

    Args:
        app: The Celery app.
        limit: At most that many.

    Raises:
        PolicyError: The app's store has no outbox.
        StoreUnavailable: The database did not answer; what was published may be published again.
        kombu.exceptions.OperationalError: The broker did not answer.
    """
    outbox = outbox_of(app)
    ends_at = clock.monotonic() + _HOLD / 2000  # before another relay can take them
    waiting = deque(outbox.take(limit, _HOLD))
    published: list[int] = []
    try:
        while waiting and clock.monotonic() < ends_at:
            try:
                _publish(app, waiting[0].message)
            except Exception as error:
                is_away = _is_of_the_broker(app, error)
                _postpone(app, outbox, waiting[0], error, is_away=is_away)
                if is_away:
                    raise
            else:
                published.append(waiting[0].number)
            waiting.popleft()
    finally:
        if published:
            outbox.forget(published)
        if waiting:
            outbox.give_back(list(waiting))
    return len(published)


def _publish(app: Celery, message: OutboxMessage) -> None:
    Signature.from_dict(_fields(app, message), app=app).apply_async(task_id=message.id)


def _fields(app: Celery, message: OutboxMessage) -> dict[str, Any]:
    runtime = runtime_of(app)
    encoded = unpack(runtime.store, Encoded(message.data, message.content_type), message_slot(message.id))
    fields = runtime.codec.decode(encoded)
    if not isinstance(fields, dict):
        raise DecodeError("no signature of a task")
    return fields


def _is_of_the_broker(app: Celery, error: Exception) -> bool:
    """Whether every other message would meet ``error`` as well."""
    # So kombu reports whatever its transport counts among the errors of a connection, and some of one queue or message.
    if not isinstance(error, OperationalError):
        return False
    cause, connection = error.__cause__, app.connection_for_write()
    if type(cause).__name__ == "ParamValidationError":  # botocore's, of a message that it does not send
        return False
    return isinstance(cause, connection.connection_errors) or not isinstance(cause, connection.channel_errors)


def _postpone(app: Celery, outbox: Outbox, taken: TakenMessage, error: Exception, *, is_away: bool) -> None:
    reason = f"{type(error).__name__}: {describe(error)}"
    with suppress(Exception):  # what cannot be decoded names no task
        if app.tasks[_fields(app, taken.message)["task"]].idempotency_policy.private:
            reason = type(error).__name__  # the text can quote arguments
    reason = one_line(reason)[:300]
    # Where the broker is away, at the next look, but after the others: it may be the message's fault all the same. Else
    # after a second, doubled by every failure, and at most ten minutes.
    pause = 0 if is_away else min(1_000 << min(taken.failures, 30), 600_000)
    outbox.postpone(taken, pause, reason)
    if not is_away:
        say(
            logger.error,
            "relay_failed",
            task_id=taken.message.id,
            failures=taken.failures + 1,
            pause=pause // 1000,
            reason=reason,
        )


def outbox_of(app: Celery) -> Outbox:
    store = runtime_of(app).store
    if not isinstance(store, Outbox):
        raise PolicyError("idempotency_store", repr(store), "has no outbox; that needs an SQL store")
    return store


MOST = 1000
"""Messages that are counted; more are as many."""


class Backlog:
    """What waits in the outbox: the last count, by the local clock, of the relay, which looks into it anyway.

    It counts only where somebody measures it. A process that does not relay has none.
    """

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self._clock = clock
        self.is_watched = False  # whether anybody wants to know
        self.messages: int | None = None  # how many wait; None if nobody has counted
        self._counted_at = self._oldest_since = 0.0

    def look(self, waiting: Callable[[int], list[WaitingMessage]], now: Callable[[], int]) -> None:
        """Count, every ten seconds; ``waiting`` gives the oldest messages, and ``now`` the store's milliseconds."""
        # Without a certain answer the last count stays, and its messages grow older.
        if self.is_watched and (self.messages is None or self._clock() >= self._counted_at + 10):
            found = waiting(MOST)
            age = max(now() - found[0].created_at, 0) / 1000 if found else 0.0
            self._counted_at = self._clock()
            self._oldest_since, self.messages = self._counted_at - age, len(found)

    @property
    def age(self) -> float | None:
        """Seconds for which the oldest has waited; 0 if none waits, None if nobody has counted."""
        return self._clock() - self._oldest_since if self.messages else self.messages

    def forget(self) -> None:
        """Have no count: somebody else counts from now on."""
        self.messages = None


backlog = Backlog()
"""What a relay of this process has counted."""

os.register_at_fork(after_in_child=backlog.forget)  # only a worker's main process relays


class Relay(Periodic):
    """Relays in a thread of the worker's main process, every ``idempotency_relay`` seconds while there are messages.

    Where none are found it asks ever more rarely. What this worker's bodies send, it looks for at once; what others do,
    such as a web server, the next of all workers finds.
    """

    work = "relay"
    longest_pause = 15.0

    def include_if(self, parent: Any) -> bool:
        return bool(self.every(parent.app)) and isinstance(runtime_of(parent.app).store, Outbox)

    def look(self, app: Celery) -> bool:
        published = relay(app)
        backlog.look(outbox_of(app).waiting, runtime_of(app).store.now)
        return bool(published)

    def wait(self, pause: float, every: float) -> bool:
        """Return early where something is sent meanwhile; workers must not all ask at one moment."""
        left = pause * random.uniform(0.5, 1)  # noqa: S311 - it keeps no secret
        while left > every and not (sent[0] or super().wait(every, every)):
            left -= every
        if sent[0]:
            sent[0], self.pause = 0, 0.0
        return super().wait(min(left, every), every)

    def stop(self, parent: Any) -> None:
        super().stop(parent)
        backlog.forget()
