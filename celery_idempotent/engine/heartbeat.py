"""The heartbeat: renews the leases of long attempts, in daemon threads of its own.

Two threads live as long as the process. The coordinator sleeps until the first third of the earliest lease is over,
starts a thread for each renewal that is due, and waits for none of them. The reserve renews what no thread can be
started for. So an attempt that has begun is renewed even in a process that has reached its limit of threads, and one
that ends within a third of its lease costs a dictionary entry.

Threads are started by ``_thread``. ``threading.Thread.start`` waits until the new thread says that it runs, and that
is for ever if the thread dies of a MemoryError before it can (python/cpython#140746).

An attempt is captured when it begins. Celery's request, which is local to another thread, is never looked at.
"""

import _thread
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from celery_idempotent import clock as local_clock
from celery_idempotent.clock import Clock
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.events import Timed, timed
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.printable import say

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_RETRIES_PER_LEASE = 10
"""Two renewals may fail outright, and each is retried at a tenth of the lease, before the lease is over."""

NO_THREAD = (RuntimeError, MemoryError)
"""What starting a thread raises: the process is at a limit, or the interpreter shuts down."""

_BEGINS_WITHIN = 5.0
"""Seconds in which a new thread takes its first step, unless memory has ended meanwhile."""

_LONGEST_SLEEP = 60.0
"""Seconds. Bounds what a clock that jumps can delay; and event loops refuse to wait for years."""

_PAUSE_AFTER_ERROR = 0.1
"""Seconds, so that an error that stays does not fill the log."""


@dataclass(slots=True)
class _Beat:
    claim: Claim
    due: float
    """When to act: renew, tell that it is late, or, while nobody has taken it, hand it over once more. Infinite while
    it is renewed."""
    is_handed_over: bool = False
    left: str = ""
    """Why no thread could be started for it; the reserve renews it, unless a later thread is faster."""


class _Resident:
    """A daemon thread that takes one step after the other until the process ends, whatever a step raises."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._begun = threading.Event()
        self.is_alive = False

    def start(self) -> None:
        """Return when it lives; raises one of ``NO_THREAD`` if it does not."""
        self._begun.clear()
        _thread.start_new_thread(self._run, ())
        if not self._begun.wait(_BEGINS_WITHIN):
            raise RuntimeError(f"a new thread did nothing for {_BEGINS_WITHIN:g} s")

    def _run(self) -> None:
        self.is_alive = True
        self._begun.set()
        try:
            while True:
                try:
                    self._step()
                except BaseException as error:  # noqa: BLE001 - it is logged whole
                    # A KeyboardInterrupt or GreenletExit, too, would leave every running attempt without renewals.
                    with suppress(Exception):
                        say(logger.exception, "heartbeat_failed", reason=_described(error))
                    time.sleep(_PAUSE_AFTER_ERROR)
        finally:
            self.is_alive = False


class Heartbeat:
    """Renews every attempt given to :meth:`start` until :meth:`stop`, a loss, its deadline, or its delivery's end.

    An attempt has one renewal under way at most, and none waits for that of another attempt. A renewal that hangs keeps
    its own attempt from recording how it ended, because each write expects the revision of the one before. What bounds
    that is the time that the store allows for a request.
    """

    def __init__(self, clock: Clock = local_clock) -> None:
        self._clock = clock
        self._beats: dict[Claim, _Beat] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._any_left = threading.Condition(self._lock)
        self._sleeps_until = 0.0
        self._staffing = threading.Lock()
        self._coordinator = _Resident(self._hand_over_due)
        self._reserve = _Resident(self._renew_left)

    def start(self, claim: Claim) -> None:
        """Keep the lease of ``claim`` from now on.

        Raises ``StoreUnavailable`` where no thread can be started for it. Run nothing then; the next call tries again.
        """
        now = self._clock.monotonic()
        beat = _Beat(claim, min(now + claim.lease / _RENEWALS_PER_LEASE, claim.late_at))
        if not (self._coordinator.is_alive and self._reserve.is_alive):
            self._start_threads(claim)
        with self._lock:
            self._beats[claim] = beat
            if not now < self._sleeps_until <= beat.due:
                self._changed.notify()  # first: if a time limit strikes in it, the next attempt must not count on it
                self._sleeps_until = beat.due

    def stop(self, claim: Claim) -> None:
        """Stop renewing ``claim``, without waiting for a renewal that is under way; safe to repeat."""
        with self._lock:
            self._beats.pop(claim, None)

    @property
    def in_flight(self) -> int:
        with self._lock:
            return sum(claim.is_underway() for claim in self._beats)

    def _start_threads(self, claim: Claim) -> None:
        with self._staffing:
            try:
                for resident in (self._coordinator, self._reserve):
                    if not resident.is_alive:
                        resident.start()
            except NO_THREAD as error:
                why = (
                    f"no thread can be started to renew the lease: {_described(error)}; "
                    "give the worker more threads (ulimit -u, pids.max) or memory, or lower its concurrency"
                )
                raise StoreUnavailable(repr(claim.store), "heartbeat", why) from error

    def _hand_over_due(self) -> None:
        with self._lock:
            while True:
                now = self._clock.monotonic()
                if due := [beat for beat in self._beats.values() if beat.due <= now]:
                    break
                if self._beats:
                    self._sleeps_until = min(beat.due for beat in self._beats.values())
                elif self._sleeps_until <= now:
                    # Else the attempt that rang is over already, and so may the next one be. Looking when that one's
                    # renewal would have been due serves them all; a thread that is woken for each costs more than the
                    # rest of a short task.
                    self._sleeps_until = inf
                self._changed.wait(min(self._sleeps_until - self._clock.monotonic(), _LONGEST_SLEEP))
            for beat in due:
                beat.is_handed_over = True
                beat.due = now + beat.claim.lease / _RETRIES_PER_LEASE
        for beat in due:
            try:
                _thread.start_new_thread(self._renew, (beat,))
            except NO_THREAD as error:
                with self._lock:
                    if beat.is_handed_over:  # and not taken meanwhile, by a thread that was started earlier and is slow
                        beat.left = _described(error)
                        self._any_left.notify()

    def _renew_left(self) -> None:
        with self._lock:
            while not (left := [beat for beat in self._beats.values() if beat.left]):
                self._any_left.wait()
            beat = min(left, key=lambda each: each.due)
            reason, beat.left = beat.left, ""
        try:
            say(logger.warning, "renewal_delayed", key=beat.claim.key, reason=f"no thread can be started: {reason}")
        finally:
            self._renew(beat)

    def _renew(self, beat: _Beat) -> None:
        lease, asked_at = beat.claim.lease, self._clock.monotonic()
        if not self._take(beat):
            return
        is_renewed = False
        try:
            is_renewed = _is_renewed(beat.claim)
        finally:
            # A lease runs from when it was asked for; a store that fails is given a pause.
            again = self._clock.monotonic() + lease / _RETRIES_PER_LEASE
            due = asked_at + lease / _RENEWALS_PER_LEASE if is_renewed else again
            with self._lock:
                if beat.claim.is_over:
                    self.stop(beat.claim)
                beat.due = min(due, beat.claim.late_at)
                if beat.due < self._sleeps_until:
                    self._changed.notify()

    def _take(self, beat: _Beat) -> bool:
        """Whether the renewal is the caller's to make, and needed at all."""
        with self._lock:
            if not beat.is_handed_over or self._beats.get(beat.claim) is not beat:
                return False
            if not beat.claim.is_underway():
                # A signal struck before the delivery could stop it; it would keep a dead claim alive for ever.
                self.stop(beat.claim)
                return False
            beat.due, beat.is_handed_over, beat.left = inf, False, ""
            return True


def _is_renewed(claim: Claim) -> bool:
    try:
        timed(Timed.RENEWAL, claim.task, claim.renew)
    except StoreUnavailable as error:
        say(logger.warning, "renewal_failed", key=claim.key, reason=error)
        return False
    except BaseException:  # noqa: BLE001 - it is logged whole
        # A store with a bug, or a greenlet that is told to die, must not end the renewals.
        say(logger.exception, "renewal_failed", key=claim.key)
        return False
    return True


def _described(error: BaseException) -> str:
    return str(error) or type(error).__name__


heartbeat = Heartbeat()
"""The heartbeat of this process."""


def _start_anew() -> None:
    # A thread does not survive a fork, and a lock may be held in the copy for ever.
    heartbeat.__init__()  # type: ignore[misc]  # the module's one instance must stay the same object


os.register_at_fork(after_in_child=_start_anew)
