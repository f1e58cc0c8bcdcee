"""How long the store takes, told to one who listens. While nobody does, no clock is read."""

from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")


class Timed(StrEnum):
    """What is timed."""

    CLAIM = "claim"
    RENEWAL = "renewal"


Listener = Callable[[Timed, str, float, str | None], None]
"""Gets what was timed, the name of the task, seconds, and the type of the error that it ended with, if it did."""

_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Have ``listener`` told from now on, in place of any other; None: nobody."""
    global _listener
    _listener = listener


def timed(what: Timed, task: str, act: Callable[[], T]) -> T:
    """``act()``, and tell how long it took."""
    listener = _listener
    if listener is None:
        return act()
    began, error = perf_counter(), None
    try:
        return act()
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        with suppress(Exception):  # who measures is not to end a claim
            listener(what, task, perf_counter() - began, error)
