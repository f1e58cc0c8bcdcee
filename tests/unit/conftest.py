"""Unit tests are pure: none of them opens a connection or starts a process, so all of them together take seconds."""

import sys
from collections.abc import Iterator

import pytest

_REFUSED = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
)
"""Python's audit events (docs.python.org, "Audit events table")."""

_refusals: list[str] | None = None
"""What was refused in the test that runs; None between unit tests."""


class Impure(AssertionError):
    """Where such a test belongs is said in tests/README.md."""


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _refusals is not None and event in _REFUSED:
        _refusals.append(event)
        raise Impure(event)


sys.addaudithook(_refuse)


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
