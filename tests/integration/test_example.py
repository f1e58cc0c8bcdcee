"""The example as its page tells a reader to run it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.embedded import EmbeddedRedis
from lab.embedded.server import accepts
from lab.tether import ROOT
from tests.support.processes import MARK, processes
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.timeout(240)]

COMMAND = [sys.executable, "-m", "example_project.run"]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of the example's servers, for one test at a time."""
    with (Path(tempfile.gettempdir()) / "celery-idempotent-4577.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield 4577


def environ(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EXAMPLE_")} | variables


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    """What it prints, and how it ends."""
    given = environ(**variables)
    return subprocess.run(COMMAND, cwd=ROOT, env=given, capture_output=True, text=True, timeout=200, check=False)


def test_one_command_shows_each_effect_once(port: int) -> None:
    """On servers of its own, which end with it."""
    shown = run().stdout
    assert len(re.findall(r"^  (bank|warehouse|mail) ", shown, re.MULTILINE)) == shown.count("one effect") == 9
    assert ("18 messages, 9 effects." in shown, accepts(port)) == (True, False)


def test_second_one_says_that_the_first_has_the_port(port: int) -> None:
    """In a sentence that says what to do, not in a traceback."""
    with socket.create_server(("127.0.0.1", port)):
        second = run()
    told, remedy = second.stderr.splitlines()
    assert told.startswith(f"EmbeddedAws: port {port} is taken by process {os.getpid()} (")
    assert (second.returncode, "EXAMPLE_BROKER_URL" in remedy) == (1, True)


def test_two_variables_point_it_elsewhere(tmp_path: Path) -> None:
    """Its second run on a store that remembers the first is about other orders."""
    with EmbeddedRedis() as redis:
        addresses = {"EXAMPLE_BROKER_URL": redis.url, "EXAMPLE_STORE_URL": f"sqlite:///{tmp_path}/shop.sqlite"}
        for _ in range(2):
            assert "18 messages, 9 effects." in run(**addresses).stdout


def _hear_interrupts() -> None:
    """A shell has what it starts in the background ignore SIGINT, these tests among it; a program inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_no_process(port: int, tmp_path: Path, how: signal.Signals) -> None:
    """Neither its worker nor its servers."""
    marked = environ(**{MARK: str(tmp_path)})
    example = subprocess.Popen(COMMAND, cwd=ROOT, env=marked, stdout=subprocess.PIPE, preexec_fn=_hear_interrupts)
    assert example.stdout
    try:
        (worker, *_) = wait_until(
            lambda: [pid for pid, line in processes(tmp_path).items() if "example_project.app" in line],
            "the worker starts",
            timeout=100,
        )
        os.kill(worker, signal.SIGSTOP)  # so that there is no end before it is interrupted
        assert (b"3 orders" in example.stdout.readline(), accepts(port)) == (True, True)
        example.send_signal(how)
        with contextlib.suppress(ProcessLookupError):  # it may have been killed by then
            os.kill(worker, signal.SIGCONT)
        assert (example.wait(100) != 0, processes(tmp_path)) == (True, {})
    finally:
        for pid in processes(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        example.communicate()
