"""Waiting for a condition, so that no test hopes that a sleep was long enough."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], message: str, *, timeout: float = 60) -> T:
    """Return the first true value of `condition`, or fail saying what never happened."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {message}")
        time.sleep(0.02)
    return value
