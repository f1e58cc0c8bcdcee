"""Work that a worker does now and then, in a thread of its main process."""

import os
import threading
from abc import abstractmethod
from functools import cache
from typing import Any, ClassVar

from celery import Celery, bootsteps
from kombu.exceptions import OperationalError

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.startup import StoreCheck
from celery_idempotent.protocol.codec import describe

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

    def __init__(self, parent: Any, **kwargs: Any) -> None:
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
    def failed(self, reason: str | None) -> None:
        """Log that a look failed, and why; without a ``reason``, by the exception at hand."""

    def start(self, parent: Any) -> None:
        """Begin to look."""
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
        """The same."""
        self.stop(parent)

    def _run(self, app: Celery, every: float) -> None:
        pause = self.first_pause(every)
        while not self._stopping.wait(pause):
            pause = every
            try:
                with looking:
                    pause = 0.0 if self.look(app) else every
            except (StoreUnavailable, OperationalError) as error:
                self.failed(describe(error))
            except Exception:  # noqa: BLE001 - it is logged whole
                self.failed(None)
