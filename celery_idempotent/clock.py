"""The local clock, by which leases, deadlines and pauses are counted. It goes on while the machine is suspended."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """A local clock. Only intervals are taken from it, never a date."""

    def monotonic(self) -> float:
        """Seconds that never go backwards."""

    def sleep(self, seconds: float, /) -> None:
        """Wait that many seconds."""


def counting_suspend() -> Callable[[], float]:
    """Seconds that go on in suspend, where the system has such a clock; else ``time.monotonic``.

    A lease goes on in suspend. By a clock that stood still meanwhile, a worker that wakes would still own what another
    has taken over and done. Python's own stands still on Linux and macOS; each has another one under this name.
    """
    name = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC"}.get(sys.platform, "")
    try:
        read = partial(time.clock_gettime, getattr(time, name))
        read()
    except (AttributeError, OSError):  # an older system, or a sandbox
        return time.monotonic
    return read


monotonic = counting_suspend()
"""The local clock."""


def sleep(seconds: float, /) -> None:
    """Wait that many seconds, by what ``time.sleep`` is by now: gevent replaces it, perhaps after this was imported."""
    time.sleep(seconds)
