"""Deliveries over a faulty store and a clock that is moved by hand."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import ControlFlow, Delivery
from celery_idempotent.engine.events import Event
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import SafeToRetry
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults
from celery_idempotent.stores.wrappers import Offloading
from celery_idempotent.testing import FakeClock, FaultyStore

JSON = Codec("json", frozenset({"application/json"}))


DECLARED = {"sms": AtMostOnce(), "*": AtLeastOnce()}
"""What a scene's policy says of steps, unless it says something else."""


class Again(Exception):
    """Stands for Celery's Retry."""


class Elsewhere(Exception):
    """Stands for Celery's Ignore and Reject."""


def an_operation(key: str = "k", fingerprint: str | None = None, grace: int = 1000, **policy: Any) -> Operation:
    """An operation, and somebody who asks for it."""
    names = {"task": "t", "task_id": "id", "worker": "w"}
    return Operation(identity=Identity(key, fingerprint), policy=Policy(**policy), **names, grace=grace)


class Scene:
    """Deliveries over a faulty store and a clock that stands, with all its events."""

    def __init__(self, codec: Codec = JSON) -> None:
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock.now))
        self.events: list[Event] = []
        self.tell: Callable[[Event], None] = self.events.append
        self.heartbeat = Heartbeat()  # on the real clock, where no lease here lasts long enough to be renewed
        self.codec = codec
        self.large: LargeResults | None = None
        self.until = inf
        self.runs = 0

    def perform(self, body: Callable[[ProtectedAttempt], Any], **policy: Any) -> Any:
        """Deliver a task whose body uses its handle; what the guard returns or raises."""

        def handled(attempt: Claim | None) -> Any:
            assert attempt is not None
            return body(ProtectedAttempt(attempt, self.codec, (SafeToRetry, Again), policy["effects"]))

        policy.setdefault("effects", DECLARED)
        return self.run(handled, **policy)

    def run(self, body: Callable[[Claim | None], Any], fingerprint: str = "f", **policy: Any) -> Any:
        return self.delivery(fingerprint, **policy).run(self._counted(body))

    def observe(self, body: Callable[[Claim | None], Any], **policy: Any) -> Any:
        return self.delivery(**policy).observe(self._counted(body))

    def delivery(self, fingerprint: str = "f", **policy: Any) -> Delivery:
        """The next one."""
        return self.delivery_of(an_operation("k", fingerprint, **policy))

    def delivery_of(self, operation: Operation) -> Delivery:
        """One of another operation."""
        control = ControlFlow((Again,), (Elsewhere,))
        given = (operation, self.around, self.codec, self.heartbeat, control, self.tell, self.clock)
        return Delivery(*given, until=self.until)

    @property
    def around(self) -> Any:
        """The store, with a place for large results around it if there is one."""
        return self.store if self.large is None else Offloading(self.store, self.large)

    def _counted(self, body: Callable[[Claim | None], Any]) -> Callable[[Claim | None], Any]:
        def counted(attempt: Claim | None) -> Any:
            self.runs += 1
            return body(attempt)

        return counted

    @property
    def record(self) -> Record:
        record = self.store.get("k")
        assert record is not None
        return record

    @property
    def names(self) -> list[str]:
        return [str(event.name) for event in self.events]

    def reply_takes(self, milliseconds: int) -> None:
        """Let the reply to the next write be that long on its way; what it answers is stored at once."""
        swap = self.store.swap

        def slow(new: Record, expected: str | None) -> Record | None:
            self.store.swap = swap  # type: ignore[method-assign]
            stored = swap(new, expected)
            self.clock.advance(milliseconds)
            return stored

        self.store.swap = slow  # type: ignore[method-assign]

    def abandon(self, body: Callable[[ProtectedAttempt], Any] = lambda handle: None) -> None:
        """Leave a claim behind whose worker died at the end of ``body``, and let its lease pass."""

        class Killed(BaseException):
            pass

        def die(handle: ProtectedAttempt) -> None:
            body(handle)
            self.store.before_swap = lambda record: (_ for _ in ()).throw(Killed)
            raise Killed

        with pytest.raises(Killed):
            self.perform(die)
        self.store.before_swap = lambda record: None
        self.clock.advance(61_000)
        self.events.clear()
        self.runs = 0

    def steal(self, after: int = 61_000) -> None:
        """Somebody else takes the running claim over, so many milliseconds from now."""
        self.clock.advance(after)
        other = Scene()
        other.store, other.clock, other.large = self.store, self.clock, self.large
        other.run(lambda attempt: "theirs")
