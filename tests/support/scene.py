"""Deliveries over a faulty store and a clock that is moved by hand; what is to go wrong is told by its moment."""

from collections import defaultdict, deque
from collections.abc import Callable
from math import inf
from typing import Any, NoReturn

import pytest

from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import ControlFlow, Delivery, Outcome
from celery_idempotent.engine.events import Event
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import SafeToRetry, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, RecordUnreadable, Status
from celery_idempotent.protocol.steps import Begun, Step, from_plain
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import LargeResults
from celery_idempotent.stores.wrappers import Offloading
from celery_idempotent.testing import FakeClock, FaultyStore
from celery_idempotent.testing.scenarios import WorkerDied

JSON = Codec("json", frozenset({"application/json"}))


DECLARED = {"sms": AtMostOnce(), "*": AtLeastOnce()}
"""What a scene's policy says of steps, unless it says something else."""


class Again(Exception): ...  # stands for Celery's Retry


class Elsewhere(Exception): ...  # stands for Celery's Ignore and Reject


class SoftTimeLimit(Exception): ...  # stands for billiard's, which a signal raises wherever the main thread is


Swap = Callable[[], Record | None]


def raising(error: BaseException) -> Callable[..., Any]:
    """A function of whatever it is given that raises."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def _fault(kind: type[BaseException], *args: str, is_done: bool = False) -> Callable[[Swap], Record | None]:
    def meet(swap: Swap) -> Record | None:
        if is_done:
            swap()
        raise kind(*args)  # a new one each time, whose traceback does not grow

    return meet


FAULTS: dict[str, Callable[[Swap], Record | None]] = {
    "none": lambda swap: swap(),
    "request lost": _fault(StoreUnavailable, "s", "swap", "request lost"),
    "reply lost": _fault(StoreUnavailable, "s", "swap", "reply lost", is_done=True),
    "struck before": _fault(SoftTimeLimit),
    "struck after": _fault(SoftTimeLimit, is_done=True),
    "exit": _fault(SystemExit),
    "bug": _fault(TypeError),
    "refused": _fault(StoreMisconfigured, "s", "swap", "no permission"),
    "unreadable": _fault(RecordUnreadable, "s", "read", "schema 2"),
    "too large": _fault(RecordTooLarge, "over 400 KB"),
}
"""What one request can meet, by its name."""


def moment_of(new: Record, stored: Record | None) -> str:
    """What a write is: ``claim``, ``begin`` or ``finish`` of a step, ``renewal``, ``abandon``, or an outcome."""
    if new.status is not Status.IN_PROGRESS:
        return str(new.status)
    if stored is None or stored.owner != new.owner:
        return "claim"
    if new.steps == stored.steps:
        return "renewal" if new.lease_until else "abandon"
    begun = [each for name, each in new.steps.items() if each != stored.steps.get(name)]
    return "begin" if begun and isinstance(from_plain(begun[0]), Begun) else "finish"


class PlannedStore(FaultyStore):
    """A faulty store whose writes meet, too, what is planned for their moment."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MemoryStore(clock.now))
        self.plans: dict[str, deque[Callable[[Swap], Record | None]]] = defaultdict(deque)
        self._moments: dict[str, str] = {}

    def _faulted(self, new: Record, swap: Swap) -> Record | None:
        # A write that is made again stays what it was.
        plan = self.plans[self._moments.setdefault(new.revision, moment_of(new, self.store.get(new.key)))]
        planned = plan.popleft() if plan else FAULTS["none"]
        return super()._faulted(new, lambda: planned(swap))


def an_operation(key: str = "k", fingerprint: str | None = None, grace: int = 1000, **policy: Any) -> Operation:
    """An operation, and somebody who asks for it."""
    names = {"task": "t", "task_id": "id", "worker": "w"}
    return Operation(identity=Identity(key, fingerprint), policy=Policy(**policy), **names, grace=grace)


class Scene:
    """Deliveries over a faulty store and a clock that stands, with all its events."""

    def __init__(self, codec: Codec = JSON) -> None:
        self.clock = FakeClock()
        self.store: FaultyStore = PlannedStore(self.clock)
        self.events: list[Event] = []
        self.tell: Callable[[Event], None] = self.events.append
        self.heartbeat = Heartbeat()  # on the real clock, where no lease here lasts long enough to be renewed
        self.codec = codec
        self.large: LargeResults | None = None
        self.until = inf
        self.runs = 0
        self.calls: list[Step | None] = []

    def plan(self, moment: str, *faults: str | Callable[[Swap], Record | None]) -> None:
        """Let the next writes at ``moment`` meet these, by name or as a function of the write; "away" is for good."""
        assert isinstance(self.store, PlannedStore)
        for each in faults:
            fault = FAULTS["request lost" if each == "away" else each] if isinstance(each, str) else each
            self.store.plans[moment].extend([fault] * (10_000 if each == "away" else 1))

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        if isinstance(self.store, PlannedStore):
            self.store.plans.clear()
        self.store.faults.clear()

    def call(self, step: Step | None = None) -> str:
        """The effect of a step, which is counted."""
        self.calls.append(step)
        return f"receipt {len(self.calls)}"

    def answer(self, act: Callable[[], Any]) -> Any:
        """The value of an outcome, or the type of what else is returned or raised."""
        try:
            outcome = act()
        except BaseException as error:  # noqa: BLE001 - it is compared with what is expected
            return type(error)
        return outcome.value if isinstance(outcome, Outcome) else type(outcome)

    def perform(self, body: Callable[[Any], Any], **policy: Any) -> Any:
        """Deliver a task whose body uses its handle; what the guard returns or raises."""

        def handled(attempt: Claim | None) -> Any:
            if attempt is None:
                return body(Attempt(lambda: Identity("k", None)))
            return body(ProtectedAttempt(attempt, self.codec, (SafeToRetry, Again), policy["effects"]))

        policy.setdefault("effects", DECLARED)
        return self.run(handled, **policy)

    def run(self, body: Callable[[Claim | None], Any], fingerprint: str = "f", **policy: Any) -> Any:
        return self.delivery(fingerprint, **policy).run(self._counted(body))

    def observe(self, body: Callable[[Claim | None], Any], **policy: Any) -> Any:
        return self.delivery(**policy).observe(self._counted(body))

    def delivery(self, fingerprint: str = "f", **policy: Any) -> Delivery:
        """The next one."""
        store: Any = self.store if self.large is None else Offloading(self.store, self.large)
        operation, control = an_operation("k", fingerprint, **policy), ControlFlow((Again,), (Elsewhere,))
        given = (operation, store, self.codec, self.heartbeat, control, self.tell, self.clock)
        return Delivery(*given, until=self.until)

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

    @property
    def told(self) -> str:
        """The names of all events, in order."""
        return " ".join(self.names)

    @property
    def status(self) -> Status | None:
        """Of the record, if there is one."""
        record = self.store.get("k")
        return None if record is None else record.status

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

        def die(handle: ProtectedAttempt) -> None:
            body(handle)
            self.store.before_swap = raising(WorkerDied())
            raise WorkerDied

        with pytest.raises(WorkerDied):
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
