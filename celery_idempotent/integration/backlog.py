"""What waits in the outbox, counted by the relay that looks into it anyway, and only where somebody measures it."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from celery_idempotent import clock as local_clock
from celery_idempotent.protocol.store import WaitingMessage

MOST = 1000
"""Messages that are counted; more are as many."""

_COUNT_EVERY = 10.0
"""Seconds between two counts."""


@dataclass(frozen=True, slots=True)
class _Count:
    messages: int
    oldest: float
    counted_at: float


class Backlog:
    """The last count, by the local clock. A process that does not relay has none."""

    def __init__(self, clock: Callable[[], float] = local_clock.monotonic) -> None:
        self._clock = clock
        #: Whether anybody wants to know.
        self.is_watched = False
        self._count: _Count | None = None

    def look(self, waiting: Callable[[int], list[WaitingMessage]], now: Callable[[], int]) -> None:
        """Count if it is time to; ``waiting`` gives the oldest messages and ``now`` the store's time, in milliseconds.

        Raises:
            StoreUnavailable: No certain answer. The last count stays, and its messages grow older.
        """
        if not self.is_watched or (self._count and self._clock() < self._count.counted_at + _COUNT_EVERY):
            return
        found = waiting(MOST)
        oldest = max(now() - found[0].created_at, 0) / 1000 if found else 0.0
        self._count = _Count(len(found), oldest, self._clock())

    @property
    def messages(self) -> int | None:
        """How many wait; None if nobody has counted."""
        return None if self._count is None else self._count.messages

    @property
    def age(self) -> float | None:
        """Seconds for which the oldest has waited; 0 if none waits, None if nobody has counted."""
        match self._count:
            case None:
                return None
            case _Count(messages=0):
                return 0.0
            case counted:
                return counted.oldest + self._clock() - counted.counted_at

    def forget(self) -> None:
        """Have no count: somebody else counts from now on."""
        self._count = None


backlog = Backlog()
"""What a relay of this process has counted."""

os.register_at_fork(after_in_child=backlog.forget)  # only a worker's main process relays
