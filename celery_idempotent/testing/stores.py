"""A store for one test, its clock, and the means to put it behind an app."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from celery import Celery

from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.integration.settings import Runtime, StoreHandle
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.faults import Fault, FaultyStore


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
            stack.enter_context(_named(app, store))
        yield


@contextmanager
def _named(app: Celery, store: Store) -> Iterator[None]:
    try:
        before = app.conf.get("idempotency_store")  # reading a setting is what has Celery load them all
    except Exception:  # noqa: BLE001 - an app that nobody can use need not break the tests of another
        yield
        return
    name = _setting(app)
    app.conf[name] = store
    try:
        yield
    finally:
        app.conf[name] = before


def _setting(app: Celery) -> str:
    """The name by which Celery finds the setting first; before 5.7, one without the namespace would not cover it."""
    namespace = getattr(app.conf, "prefix", None) or ""
    name = f"{namespace}idempotency_store"
    return name.upper() if namespace.isupper() else name
