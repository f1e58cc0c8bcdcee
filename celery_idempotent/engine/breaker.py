"""The circuit breaker of a store in one process: claims that would get no answer are not sent.

A backlog that meets a store which is down would ask it thousands of times a minute, wait for each of its time-outs, and
log as much. Only claims pass here: what a running body has to record is tried as before. Of the libraries that there
are, pybreaker makes all threads wait for the one that calls, circuitbreaker lets all of them try at once, and neither
has pauses that grow.
"""

import logging
import os
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from celery_idempotent import clock as local_clock
from celery_idempotent.clock import Clock
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol import circuit as decisions
from celery_idempotent.protocol.circuit import CLOSED, Circuit, Closed, Open

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Breaker:
    """Lets claims through to ``store``, a name for people, while they are answered."""

    def __init__(self, store: str, clock: Clock = local_clock) -> None:
        self._store = store
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._circuit: Circuit = CLOSED
        self._changing = threading.Lock()

    @property
    def is_open(self) -> bool:
        return isinstance(self._circuit, Open)

    @property
    def pause(self) -> float:
        """Seconds until the next claim is let through; 0 while all are."""
        circuit = self._circuit
        return max(0.0, circuit.trial_at - self._clock.monotonic()) if isinstance(circuit, Open) else 0.0

    def ask(self, key: str, claim: Callable[[], T]) -> T:
        """``claim()``, which is one of ``key``, unless the store does not answer: then ``StoreUnavailable`` at once.

        ``StoreMisconfigured`` is an answer: it can be about one record.
        """
        is_trial = self._circuit is not CLOSED and self._admit()
        try:
            answer = claim()
        except StoreMisconfigured:
            self._answered()
            raise
        except StoreUnavailable as error:
            self._failed(error, key, is_trial)
            raise
        except BaseException:
            now = self._clock.monotonic()
            self._change(lambda circuit: decisions.interrupted(circuit, now, is_trial=is_trial))
            raise
        if self._circuit is not CLOSED:
            self._answered()
        return answer

    def _admit(self) -> bool:
        """Whether the claim is a trial; raises ``StoreUnavailable`` where it is not to be sent."""
        with self._own_lock():
            self._circuit, is_sent = decisions.admitted(self._circuit, self._clock.monotonic())
            is_trial = self.is_open
        if not is_sent:
            raise StoreUnavailable(self._store, "claim", "not asked, as it did not answer the claims before this one")
        return is_trial

    def _own_lock(self) -> threading.Lock:
        if self._process != os.getpid():
            self._begin()  # a fork may have copied a lock that is held, and its store is another connection
        return self._changing

    def _failed(self, error: StoreUnavailable, key: str, is_trial: bool) -> None:
        now, draw = self._clock.monotonic(), random.random()  # noqa: S311 - it keeps no secret
        before, after = self._change(lambda circuit: decisions.failed(circuit, now, key, is_trial=is_trial, draw=draw))
        if isinstance(before, Closed) and isinstance(after, Open):
            failures, pause = decisions.FAILURES, round(after.trial_at - now, 1)
            told = {"store": self._store, "failures": failures, "next_try_in": pause, "reason": error.reason}
            say(logger.warning, "store_circuit_opened", **told)

    def _answered(self) -> None:
        before, _ = self._change(lambda circuit: CLOSED)
        if isinstance(before, Open):
            seconds = round(self._clock.monotonic() - before.since, 1)
            say(logger.warning, "store_circuit_closed", store=self._store, seconds=seconds, postponed=before.unanswered)

    def _change(self, change: Callable[[Circuit], Circuit]) -> tuple[Circuit, Circuit]:
        with self._own_lock():
            before, self._circuit = self._circuit, change(self._circuit)
            return before, self._circuit
