"""A guard over a faulty store and a clock that is moved by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.engine.attempt import Attempt
from celery_idempotent.engine.guard import ControlFlow, Event, Guard, Operation
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.engine.protected import Protected
from celery_idempotent.errors import SafeToRetry
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore

JSON = Codec("json", frozenset({"application/json"}))


class Again(Exception):
    """Stands for Celery's Retry."""


class Elsewhere(Exception):
    """Stands for Celery's Ignore and Reject."""


class Scene:
    """A guard over a faulty store and a clock that stands, with all its events."""

    def __init__(self, codec: Codec = JSON) -> None:
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock.now))
        self.events: list[Event] = []
        self.guard = Guard(
            self.store,
            codec,
            Heartbeat(),  # on the real clock, where no lease here lasts long enough to be renewed
            ControlFlow((Again,), (Elsewhere,)),
            self.events.append,
            self.clock,
        )
        self.codec = codec
        self.runs = 0

    def perform(self, body: Callable[[Protected], Any], **policy: Any) -> Any:
        """Deliver a task whose body uses its handle; what the guard returns or raises."""

        def handled(attempt: Attempt | None) -> Any:
            assert attempt is not None
            return body(Protected(attempt, self.codec, (SafeToRetry, Again)))

        return self.run(handled, **policy)

    def run(self, body: Callable[[Attempt | None], Any], fingerprint: str = "f", **policy: Any) -> Any:
        return self.guard.run(self._operation(fingerprint, policy), self._counted(body))

    def observe(self, body: Callable[[Attempt | None], Any], **policy: Any) -> Any:
        return self.guard.observe(self._operation("f", policy), self._counted(body))

    def _operation(self, fingerprint: str, policy: dict[str, Any]) -> Operation:
        return Operation(
            identity=Identity("k", fingerprint), policy=Policy(**policy), task="t", task_id="id", worker="w"
        )

    def _counted(self, body: Callable[[Attempt | None], Any]) -> Callable[[Attempt | None], Any]:
        def counted(attempt: Attempt | None) -> Any:
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

    def abandon(self, body: Callable[[Protected], Any] = lambda handle: None) -> None:
        """Leave a claim behind whose worker died at the end of ``body``, and let its lease pass."""

        class Killed(BaseException):
            pass

        def die(handle: Protected) -> None:
            body(handle)
            self.store.before_swap = lambda record: (_ for _ in ()).throw(Killed)
            raise Killed

        with pytest.raises(Killed):
            self.perform(die)
        self.store.before_swap = lambda record: None
        self.clock.advance(61_000)
        self.events.clear()
        self.runs = 0

    def steal(self) -> None:
        """Somebody else takes the running claim over."""
        self.clock.advance(61_000)
        other = Scene()
        other.store, other.clock = self.store, self.clock
        other.guard._store, other.guard._clock = self.store, self.clock
        other.run(lambda attempt: "theirs")
