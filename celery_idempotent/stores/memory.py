"""A store in this process's memory: for tests, the explorer, and workers with one process."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self, Unpack

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Wanted


class MemoryStore:
    """Keeps records in a dict under one lock. Nothing outlives the process, and no other process sees it."""

    _lock = threading.RLock()

    def __init__(self, now: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self.now = now
        #: The writes of every :meth:`swap_with` that won, in order; for tests to look at.
        self.committed: list[Mapping[str, Any]] = []
        self._records: dict[str, Record] = {}

    @classmethod
    def from_url(cls, url: str) -> Self:
        """A new, empty store; the URL says nothing more."""
        return cls()

    def __repr__(self) -> str:
        return "memory://"

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self.swap_with(new, expected, ())

    def swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        """See :meth:`celery_idempotent.stores.CommittingStore.swap_with`; ``writes`` are kept and go nowhere."""
        with self._lock:
            stored = self._records.get(new.key)
            if (stored.revision if stored else None) != expected:
                return stored
            self._records[new.key] = new
            self.committed.extend(writes)
            return new

    def get(self, key: str) -> Record | None:
        with self._lock:
            return self._records.get(key)

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        with self._lock:
            records = list(self._records.values())
        exact = [(name, wanted.get(name)) for name in ("status", "task", "label")]
        return (each for each in records if all(value in (None, getattr(each, name)) for name, value in exact))

    def delete(self, key: str, expected: str) -> bool:
        with self._lock:
            stored = self._records.get(key)
            if stored is None or stored.revision != expected:
                return False
            del self._records[key]
            return True

    def purge(self, limit: int) -> int:
        now = self.now()
        with self._lock:
            past = (
                each.key
                for each in self._records.values()
                if each.expires_at is not None and each.expires_at * 1000 <= now
            )
            forgotten = list(islice(past, limit))
            for key in forgotten:
                del self._records[key]
        return len(forgotten)

    def provision(self) -> None:
        """Nothing to create."""

    def close(self) -> None:
        """Nothing to release."""


# A process forked while another thread holds the lock could never take its copy.
_lock = MemoryStore._lock
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
