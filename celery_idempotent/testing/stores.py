"""A store for one test that fails as real ones do, its clock, and the means to put it behind an app."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal
from unittest.mock import patch

from celery import Celery

from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.settings import Runtime, StoreHandle
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import CommittingStore, Store
from celery_idempotent.stores.memory import MemoryStore

Fault = Literal["none", "request lost", "reply lost"]


class StoreWrapper:
    """Passes everything to another store; override what should be different.

    Args:
        store: The store behind.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self.store.swap(new, expected)

    def get(self, key: str) -> Record | None:
        return self.store.get(key)

    def scan(self, **wanted: Any) -> Iterator[Record]:
        return self.store.scan(**wanted)

    def delete(self, key: str, expected: str) -> bool:
        return self.store.delete(key, expected)

    def now(self) -> int:
        return self.store.now()

    def provision(self) -> None:
        self.store.provision()

    def close(self) -> None:
        self.store.close()


class FaultyStore(StoreWrapper):
    """Passes everything to another store, except that each swap meets the next planned fault.

    Args:
        store: The store behind.
        faults: What the coming swaps meet, in order; afterwards there are no more faults.
    """

    def __init__(self, store: Store, *faults: Fault) -> None:
        super().__init__(store)
        self.faults: deque[Fault] = deque(faults)
        #: Every swap that was asked for, faulted or not.
        self.swaps: list[Record] = []
        #: Called before each swap; a test can interfere here.
        self.before_swap: Callable[[Record], None] = lambda record: None

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._faulted(new, lambda: self.store.swap(new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        assert isinstance(self.store, CommittingStore)
        committing = self.store
        return self._faulted(new, lambda: committing.swap_with(new, expected, writes))

    def _faulted(self, new: Record, swap: Callable[[], Record | None]) -> Record | None:
        self.swaps.append(new)
        self.before_swap(new)
        fault = self.faults.popleft() if self.faults else "none"
        if fault == "request lost":
            raise StoreUnavailable(repr(self), "swap", "request lost")
        stored = swap()
        if fault == "reply lost":
            raise StoreUnavailable(repr(self), "swap", "reply lost")
        return stored


class FakeClock:
    """A clock that moves only when a test moves it; milliseconds for a store, seconds for an attempt.

    Sleeping moves it at once.

    Args:
        start: Milliseconds since the epoch.
    """

    def __init__(self, start: int = 1_800_000_000_000) -> None:
        self.milliseconds = start
        #: Called with the seconds of every sleep, after the clock has moved: where a test lets things happen.
        self.on_sleep: Callable[[float], None] = lambda seconds: None

    def now(self) -> int:
        """Milliseconds since the epoch; give it to a store."""
        return self.milliseconds

    def monotonic(self) -> float:
        """The same in seconds; makes this a clock for attempts and guards."""
        return self.milliseconds / 1000

    def sleep(self, seconds: float, /) -> None:
        """Move on by ``seconds`` without waiting."""
        self.milliseconds += round(seconds * 1000)
        self.on_sleep(seconds)

    def advance(self, milliseconds: int) -> None:
        """Move by ``milliseconds``, which may be negative: real clocks are stepped back, too."""
        self.milliseconds += milliseconds


class FakeStore(FaultyStore):
    """A store in memory whose clock stands until it is advanced and whose swaps meet the planned faults.

    Only the store's clock is fake. The attempt's own, which paces heartbeats and resends, is real.

    Args:
        faults: What the coming swaps meet, in order; afterwards there are no more faults.
    """

    def __init__(self, *faults: Fault) -> None:
        self.clock = FakeClock()
        self._memory = MemoryStore(self.clock.now)
        super().__init__(self._memory, *faults)

    def __repr__(self) -> str:
        return "FakeStore()"

    @property
    def records(self) -> list[Record]:
        """All records, as they are now."""
        return list(self.scan())

    @property
    def committed(self) -> Sequence[Mapping[str, Any]]:
        """The writes of every ``attempt.commit()``, in order. They are kept here and go nowhere else."""
        return self._memory.committed

    def advance(self, seconds: float) -> None:
        """Let time pass: leases end, outcomes are forgotten. In seconds; negative ones set the clock back."""
        self.clock.advance(round(seconds * 1000))


@contextmanager
def installed(store: Store, *apps: Celery) -> Iterator[None]:
    """Within the block ``store`` is behind all that records, and settings of ``apps`` name it; then all is as it was.

    Behind every app, also one that is made in the block, and in place of a ``store=``. Large results are kept in it.
    """
    opened = StoreHandle(store, store, Breaker(repr(store)))
    with ExitStack() as stack:
        stack.enter_context(patch.object(Runtime, "opened", property(lambda _: opened)))
        for app in apps:
            with suppress(Exception):  # an app that nobody can use need not break the tests of another
                app.conf.get("idempotency_store")  # reading a setting is what has Celery load them all
                stack.enter_context(patch.dict(app.conf.changes, {_setting(app): store}))
        yield


def _setting(app: Celery) -> str:
    """The name by which Celery finds the setting first; before 5.7, one without the namespace would not cover it."""
    namespace = getattr(app.conf, "prefix", None) or ""
    name = f"{namespace}idempotency_store"
    return name.upper() if namespace.isupper() else name
