"""A store for one test, and the means to put it behind an app."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.clock import FakeClock
from celery_idempotent.testing.faults import Fault, FaultyStore


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
def installed(app: Celery, store: Store) -> Iterator[None]:
    """Within the block ``store`` is behind ``app``; afterwards it is what it was."""
    before = app.conf.get("idempotency_store")  # reading a setting is what has Celery load them all
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
