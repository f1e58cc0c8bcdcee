"""Whatever is no longer pure is refused here, also where the tested code would survive the refusal."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from celery_idempotent.testing.contract.parallel import race
from tests.unit.conftest import Impure


@pytest.mark.parametrize(
    ("act", "event"),
    [
        (lambda: socket.getaddrinfo("example.com", 80), "socket.getaddrinfo"),
        (lambda: subprocess.run(["true"], check=True), "subprocess.Popen"),
        (os.fork, "os.fork"),
    ],
)
def test_connections_and_processes_are_refused(act: Callable[[], object], event: str, refusals: list[str]) -> None:
    """The refusal is raised where it is asked for, and kept for the end of the test."""
    with pytest.raises(Impure, match=event):
        act()
    assert refusals == [event]
    refusals.clear()


def test_threads_are_traced_at_once_beside_the_refusal() -> None:
    """As coverage does as each begins; one that Python does not let begin would be waited for in vain."""

    def trace_anew() -> None:
        for _ in range(2_000):
            sys.settrace(sys.gettrace())

    race([trace_anew] * 4)
