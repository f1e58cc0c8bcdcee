"""Work that a worker does now and then, in a thread of its main process."""

import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

from celery import Celery, bootsteps
from kombu.exceptions import OperationalError

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.operating.startup import StoreCheck
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe

logger = logging.getLogger(__name__)

looking = threading.Lock()
"""Held while such a thread works. A pool process forked in the middle of that would inherit locks that nobody in it
will ever release, such as those of the SQLite library; so a fork waits for the end of the look."""


@cache
def fork_between_looks() -> None:
    """Have every fork of this process wait for the end of a look."""
    # What is registered last comes first before a fork: the look ends, and then stores close what must not be
    # inherited. So this is not done when the module is imported, but once the store is there.
    os.register_at_fork(before=looking.acquire, after_in_parent=looking.release, after_in_child=looking.release)


class Periodic(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """A step of a worker that looks for work every so often. Whatever goes wrong, the next look may fare better."""

    # What can be wrong with the store and the settings, StoreCheck has reported by then.
    requires = ("celery.worker.components:Pool", StoreCheck)

    work: ClassVar[str]
    """What it does, in the name of its thread."""

    longest_pause: ClassVar[float] = 0.0
    """Seconds between two looks at most, to which the pause grows while there is nothing to do."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        #: Seconds before the next look.
        self.pause = 0.0
        self._is_away = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(parent, **kwargs)

    @abstractmethod
    def every(self, app: Celery) -> float:
        """Seconds between two looks; 0: none."""

    def first_pause(self, every: float) -> float:
        """Seconds before the first look."""
        return 0.0

    @abstractmethod
    def look(self, app: Celery) -> bool:
        """Do what there is to do; whether to look again at once."""

    @abstractmethod
    def log_failure(self, log: Callable[..., None], reason: str | None) -> None:
        """Have ``log`` say that a look failed, and why; without a ``reason``, it adds the exception at hand."""

    def start(self, parent: Any) -> None:
        _, every = runtime_of(parent.app).store, self.every(parent.app)
        fork_between_looks()
        self._thread = threading.Thread(
            target=self._run, args=(parent.app, every), name=f"celery-idempotent-{self.work}", daemon=True
        )
        self._thread.start()

    def stop(self, parent: Any) -> None:
        """Stop after the look at hand."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10)

    def terminate(self, parent: Any) -> None:
        self.stop(parent)

    def wait(self, pause: float, every: float) -> bool:
        """Whether the worker ends within that many seconds; returns when the next look is due."""
        return self._stopping.wait(pause)

    def _run(self, app: Celery, every: float) -> None:
        self.pause = self.first_pause(every)
        while not self.wait(self.pause, every):
            more = self._look(app)
            self.pause = 0.0 if more else min(max(2 * self.pause, every), max(self.longest_pause, every))

    def _look(self, app: Celery) -> bool:
        """Whether to look again at once. An outage is told when it begins and when it is over."""
        try:
            with looking:
                more = self.look(app)
        except (StoreUnavailable, OperationalError) as error:
            if not self._is_away:
                self.log_failure(logger.warning, describe(error))
            self._is_away = True
            return False
        except Exception:  # noqa: BLE001 - it is logged whole
            self.log_failure(logger.exception, None)
            return False
        if self._is_away:
            say(logger.info, f"{self.work}_resumed")
        self._is_away = False
        return more
