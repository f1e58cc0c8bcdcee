"""Broken variants, to show that a campaign can see: each is a store that undoes one rule of the library."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from celery_idempotent.record import Record, Status
from celery_idempotent.store import Store

__all__ = ["FLAWS", "Passing"]


class Passing:
    """Passes everything to another store; to be overridden.

    Args:
        store: The store behind.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.store.Store.swap`."""
        return self.store.swap(new, expected)

    def get(self, key: str) -> Record | None:
        """See :meth:`celery_idempotent.store.Store.get`."""
        return self.store.get(key)

    def scan(self, *, status: Status | None = None, task: str | None = None) -> Iterator[Record]:
        """See :meth:`celery_idempotent.store.Store.scan`."""
        return self.store.scan(status=status, task=task)

    def delete(self, key: str, expected: str) -> bool:
        """See :meth:`celery_idempotent.store.Store.delete`."""
        return self.store.delete(key, expected)

    def now(self) -> int:
        """See :meth:`celery_idempotent.store.Store.now`."""
        return self.store.now()

    def provision(self) -> None:
        """See :meth:`celery_idempotent.store.Store.provision`."""
        self.store.provision()

    def close(self) -> None:
        """See :meth:`celery_idempotent.store.Store.close`."""
        self.store.close()


class _CompletesUnconditionally(Passing):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.swap(new, expected)
        while new.status is Status.COMPLETED and stored is not None and stored.revision != new.revision:
            stored = self.store.swap(new, stored.revision)
        return stored


class _ForgetsItsOwnWrites(Passing):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.swap(new, expected)
        if stored is not None and stored is not new and stored.revision == new.revision:
            return replace(stored, revision="another", owner="another")
        return stored


class _DropsCompletions(Passing):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        return new if new.status is Status.COMPLETED else self.store.swap(new, expected)


class _TakesOverAtOnce(Passing):
    def now(self) -> int:
        self._ahead = getattr(self, "_ahead", 0) + 3_600_000
        return self.store.now() + self._ahead


FLAWS: Mapping[str, Callable[[Store], Store]] = {
    "none": lambda store: store,
    "completes unconditionally": _CompletesUnconditionally,
    "forgets its own writes": _ForgetsItsOwnWrites,
    "drops completions": _DropsCompletions,
    "takes over at once": _TakesOverAtOnce,
}
"""By name, what is put between the guard and its store."""
