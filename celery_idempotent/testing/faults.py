"""A store that fails as real ones do: before a write, or after it with the reply lost."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import CommittingStore, Store

Fault = Literal["none", "request lost", "reply lost"]


class StoreWrapper:
    """Passes everything to another store; override what should be different.

    Args:
        store: The store behind.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`."""
        return self.store.swap(new, expected)

    def get(self, key: str) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.get`."""
        return self.store.get(key)

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`."""
        return self.store.scan(status=status, task=task, label=label)

    def delete(self, key: str, expected: str) -> bool:
        """See :meth:`celery_idempotent.stores.Store.delete`."""
        return self.store.delete(key, expected)

    def now(self) -> int:
        """See :meth:`celery_idempotent.stores.Store.now`."""
        return self.store.now()

    def provision(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.provision`."""
        self.store.provision()

    def close(self) -> None:
        """See :meth:`celery_idempotent.stores.Store.close`."""
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
        """See :meth:`celery_idempotent.stores.Store.swap`; raises ``StoreUnavailable`` as planned."""
        return self._faulted(new, lambda: self.store.swap(new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        """See :meth:`celery_idempotent.stores.CommittingStore.swap_with`; raises ``StoreUnavailable`` as planned."""
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
