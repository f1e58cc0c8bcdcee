"""The heartbeat: one daemon thread per process that renews the leases of long attempts.

It sleeps until the first third of the earliest lease is over, so attempts that end sooner cost it nothing
but a dictionary entry. It captures what it needs when an attempt begins and never looks at Celery's
request, which is local to another thread.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass

from celery_idempotent.attempt import Attempt, Clock
from celery_idempotent.errors import StoreUnavailable

__all__ = ["Heartbeat", "heartbeat"]

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_RETRIES_PER_LEASE = 10
"""Two renewals may fail outright, and each is retried at a tenth of the lease, before the lease is over."""


@dataclass(slots=True)
class _Beat:
    attempt: Attempt
    body: threading.Thread
    due: float


class Heartbeat:
    """Renews every attempt given to :meth:`start` until :meth:`stop`, a loss, or the death of its thread.

    Args:
        clock: The local clock in seconds; only its intervals matter.
    """

    def __init__(self, clock: Clock = time) -> None:
        self._clock = clock
        self._beats: dict[Attempt, _Beat] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sleeps_until = 0.0

    def start(self, attempt: Attempt) -> None:
        """Keep the lease of ``attempt``, which the calling thread executes."""
        beat = _Beat(attempt, threading.current_thread(), self._clock.monotonic() + attempt.lease / _RENEWALS_PER_LEASE)
        with self._changed:
            self._beats[attempt] = beat
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="celery-idempotent-heartbeat", daemon=True)
                self._thread.start()
            elif beat.due < self._sleeps_until:
                self._changed.notify()

    def stop(self, attempt: Attempt) -> None:
        """Stop renewing ``attempt``; safe to repeat."""
        with self._changed:
            self._beats.pop(attempt, None)

    def _run(self) -> None:
        while True:
            for beat in self._wait():
                self._renew(beat)

    def _wait(self) -> list[_Beat]:
        with self._changed:
            while True:
                now = self._clock.monotonic()
                due = [beat for beat in self._beats.values() if beat.due <= now]
                if due:
                    return due
                self._sleeps_until = min((beat.due for beat in self._beats.values()), default=float("inf"))
                self._changed.wait(None if self._sleeps_until == float("inf") else self._sleeps_until - now)

    def _renew(self, beat: _Beat) -> None:
        attempt = beat.attempt
        if not beat.body.is_alive():
            # A heartbeat that outlives its task would keep a dead claim alive for ever.
            self.stop(attempt)
            return
        try:
            attempt.renew()
            pause = attempt.lease / _RENEWALS_PER_LEASE
        except StoreUnavailable as error:
            logger.warning("idempotency.renewal_failed key=%s reason=%s", attempt.key, error)
            pause = attempt.lease / _RETRIES_PER_LEASE
        except Exception:
            # A store with a bug must not stop the renewals of every other attempt in the process.
            logger.exception("idempotency.renewal_failed key=%s", attempt.key)
            pause = attempt.lease / _RETRIES_PER_LEASE
        if attempt.is_over:
            self.stop(attempt)
        beat.due = self._clock.monotonic() + pause


heartbeat = Heartbeat()
"""The heartbeat of this process."""


def _start_anew() -> None:
    # A thread does not survive a fork, and a lock may be held in the copy for ever.
    heartbeat.__init__()  # type: ignore[misc]  # the module's one instance must stay the same object


os.register_at_fork(after_in_child=_start_anew)
