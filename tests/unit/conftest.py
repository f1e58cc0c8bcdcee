"""Unit tests are pure: none of them opens a connection or starts a process, so all of them together take seconds."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent import Policy
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.deliveries import Shop
from tests.support.scene import Scene

_REFUSED = (
    *(f"os.{each}" for each in ("exec", "fork", "forkpty", "posix_spawn", "system")),
    *(f"socket.{each}" for each in ("bind", "connect", "getaddrinfo")),
    "subprocess.Popen",
)
"""Python's audit events (docs.python.org, "Audit events table")."""

_refusals: list[str] | None = None
"""What was refused in the test that runs; None between unit tests."""


class Impure(AssertionError):
    """Where such a test belongs is said in tests/README.md."""


class _Refused(str):
    """The name of an event, which refuses what is compared with it."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, event: object) -> bool:
        if _refusals is None:
            return False
        _refusals.append(str(self))
        raise Impure(str(self))


# A dictionary compares keys of one hash only, so at any other event this runs no line of Python, in which another
# thread could get its turn. In the midst of sys.settrace(), Python 3.11 takes that other thread's own call for a second
# one of this thread. Where coverage is measured, a thread that begins then would end before its first step, and whoever
# meets it at a barrier would wait for ever.
_hook: dict[str, Any] = dict.fromkeys(map(_Refused, _REFUSED))
sys.addaudithook(_hook.get)


@pytest.fixture(autouse=True)
def refusals() -> Iterator[list[str]]:
    """Refuse what is impure; a test whose code survives the refusal fails at its end, unless it empties this list."""
    global _refusals
    refused: list[str] = []
    _refusals = refused
    yield refused
    _refusals = None
    if refused:
        raise Impure(", ".join(refused))


@pytest.fixture
def scene() -> Scene:
    """Deliveries over a store in which nothing goes wrong yet."""
    return Scene()


@pytest.fixture
def shop() -> Shop:
    return Shop(Policy("order_id"))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock.now)
