"""Broken variants, to show that a campaign can see: each is a store that undoes one rule of the library."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from celery_idempotent.record import Record, Status
from celery_idempotent.store import Store
from celery_idempotent.testing import StoreWrapper

__all__ = ["FLAWS"]


class _CompletesUnconditionally(StoreWrapper):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.swap(new, expected)
        while new.status is Status.COMPLETED and stored is not None and stored.revision != new.revision:
            stored = self.store.swap(new, stored.revision)
        return stored


class _ForgetsItsOwnWrites(StoreWrapper):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.swap(new, expected)
        if stored is not None and stored is not new and stored.revision == new.revision:
            return replace(stored, revision="another", owner="another")
        return stored


class _DropsCompletions(StoreWrapper):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        return new if new.status is Status.COMPLETED else self.store.swap(new, expected)


class _TakesOverAtOnce(StoreWrapper):
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
