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
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.embedded import EmbeddedRedis
from lab.embedded.server import accepts
from lab.tether import ROOT

pytestmark = [pytest.mark.worker, pytest.mark.timeout(240)]

COMMAND = [sys.executable, "-m", "example_project.run"]
MARK = "EXAMPLE_TEST"


@pytest.fixture
def port() -> Iterator[int]:
    """The port of the example's servers, for one test at a time."""
    with (Path(tempfile.gettempdir()) / "celery-idempotent-4577.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield 4577


def environ(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EXAMPLE_")} | variables


def run(**variables: str) -> str:
    """What it prints."""
    ended = subprocess.run(
        COMMAND, cwd=ROOT, env=environ(**variables), capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_one_command_shows_each_effect_once(port: int) -> None:
    """On servers of its own, which end with it."""
    shown = run()
    assert len(re.findall(r"^  (bank|warehouse|mail) ", shown, re.MULTILINE)) == 9
    assert shown.count("one effect") == 9
    assert "18 messages, 9 effects." in shown
    assert not accepts(port)


def test_second_one_says_that_the_first_has_the_port(port: int) -> None:
    """In a sentence that says what to do, not in a traceback."""
    with socket.create_server(("127.0.0.1", port)):
        second = subprocess.run(
            COMMAND, cwd=ROOT, env=environ(), capture_output=True, text=True, timeout=100, check=False
        )
    assert second.returncode == 1
    told, remedy = second.stderr.splitlines()
    assert told.startswith(f"EmbeddedAws: port {port} is taken by process {os.getpid()} (")
    assert "EXAMPLE_BROKER_URL" in remedy


def test_two_variables_point_it_elsewhere(tmp_path: Path) -> None:
    """Its second run on a store that remembers the first is about other orders."""
    with EmbeddedRedis() as redis:
        addresses = {"EXAMPLE_BROKER_URL": redis.url, "EXAMPLE_STORE_URL": f"sqlite:///{tmp_path}/shop.sqlite"}
        for _ in range(2):
            assert "18 messages, 9 effects." in run(**addresses)


def _hear_interrupts() -> None:
    """A shell has what it starts in the background ignore SIGINT, these tests among it; a program inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_no_process(port: int, tmp_path: Path, how: signal.Signals) -> None:
    """Neither its worker nor its servers."""
    mark = f"{MARK}={tmp_path}"
    example = subprocess.Popen(
        COMMAND, cwd=ROOT, env=environ(**{MARK: str(tmp_path)}), stdout=subprocess.PIPE, preexec_fn=_hear_interrupts
    )
    try:
        worker = eventually_a_worker(mark)
        os.kill(worker, signal.SIGSTOP)  # so that there is no end before it is interrupted
        assert example.stdout
        assert b"3 orders" in example.stdout.readline()
        assert accepts(port)
        example.send_signal(how)
        with contextlib.suppress(ProcessLookupError):  # it may have been killed by then
            os.kill(worker, signal.SIGCONT)
        assert example.wait(100) != 0
        assert processes(mark) == {}
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        example.communicate()


def eventually_a_worker(mark: str) -> int:
    """The first process of a worker."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        for pid, line in processes(mark).items():
            if "example_project.app" in line:
                return pid
        time.sleep(0.02)
    raise AssertionError("the worker never started")


def processes(mark: str) -> dict[int, str]:
    """Command lines of living processes that have this in their environment, by number."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found
