"""The demonstration and the example as a reader is told to run them: they work, fail when they should, and clean up."""

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
from typing import Any

import pytest

from lab.embedded import EmbeddedRedis
from lab.embedded.server import accepts
from lab.folders import PREFIX, temporary_folder
from lab.tether import ROOT
from tests.support.processes import MARK, processes
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.timeout(300)]
finds_processes = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found through /proc"
)
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL


def at_night(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for everything that a demonstration makes; PostgreSQL, which runs as another user, can enter it."""
    with temporary_folder() as folder:
        folder.chmod(0o755)
        yield folder


@contextlib.contextmanager
def demo(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration, in an environment by which its descendants can be recognised."""
    command = [sys.executable, "-m", "lab.demo", "--folder", str(place / "demo"), *arguments]
    given: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, MARK: str(place), "TMPDIR": str(place)}}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **streams, **given) as process:
        try:
            yield process
        finally:
            process.kill()


@finds_processes
@pytest.mark.parametrize(
    ("store", "broker"),
    [("dynamodb", "sqs"), at_night("redis", "redis"), at_night("postgres", "sqs"), at_night("redis", "rabbitmq")],
)
def test_every_order_is_charged_exactly_once_under_fire(place: Path, store: str, broker: str) -> None:
    """And it tells of the order whose charge ends with a kill: both columns, from the kill to the end."""
    with demo(place, "--orders", "20", "--store", store, "--broker", broker) as process:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
    for told in ("Every promise was kept.", "IdempotentTask charged 20 of 20 exactly once", f"store {store}, broker"):
        assert told in output
    plain, ours = (re.findall(r"charge 0007 +\d+ (.*)", part) for part in output.split("IdempotentTask", 1))
    assert plain[0] == ours[0] == "killed right after its effect"
    assert re.fullmatch(r"ran it again: charged \d times", plain[1])
    assert ours[1] == "took over; the bank knew its key: charged once"
    assert processes(place) == {}


@finds_processes
@pytest.mark.parametrize(
    ("how", "store", "broker", "server"),
    [
        (KILL, "dynamodb", "sqs", "ministack"),
        at_night(TERM, "dynamodb", "sqs", "ministack"),
        at_night(INT, "postgres", "redis", "postgres"),
        at_night(KILL, "redis-cluster", "redis", "valkey-server"),
        at_night(KILL, "mariadb", "sqs", "mariadbd"),
        at_night(KILL, "sqlite", "rabbitmq", "beam.smp"),
    ],
)
def test_interrupting_the_demo_leaves_no_process(
    place: Path, how: signal.Signals, store: str, broker: str, server: str
) -> None:
    """Neither workers nor servers, and no folder where there was time to delete it."""

    def workers_are_ready() -> bool:
        return any(ledger.read_text().count('"ready"') == 2 for ledger in place.glob("demo/*/ledger.jsonl"))

    with demo(place, "--store", store, "--broker", broker) as process:
        # Of four tests at once on two cores, each with servers of its own, this one may be the last to get a turn.
        wait_until(workers_are_ready, "the workers start", timeout=200)
        # The search finds the store's own process; so it would find it after the end, too.
        assert any(server in line and "a program" not in line for line in processes(place).values())
        process.send_signal(how)
        assert process.wait(60) != 0
        wait_until(lambda: not processes(place), "all processes end")
    assert how is KILL or list(place.glob(f"{PREFIX}*")) == []


COMMAND = [sys.executable, "-m", "example_project.run"]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of the example's servers, for one test at a time."""
    with (Path(tempfile.gettempdir()) / "celery-idempotent-4577.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield 4577


def environ(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EXAMPLE_")} | variables


def example(**variables: str) -> subprocess.CompletedProcess[str]:
    """What it prints, and how it ends."""
    return subprocess.run(COMMAND, cwd=ROOT, env=environ(**variables), capture_output=True, text=True, timeout=200)


def test_one_command_shows_each_effect_once(port: int) -> None:
    """On servers of its own, which end with it; and it says so in two lines if another one has their port."""
    shown = example().stdout
    assert len(re.findall(r"^  (bank|warehouse|mail) ", shown, re.MULTILINE)) == shown.count("one effect") == 9
    assert ("18 messages, 9 effects." in shown, accepts(port)) == (True, False)

    with socket.create_server(("127.0.0.1", port)):
        second = example()
    told, remedy = second.stderr.splitlines()
    assert told.startswith(f"EmbeddedAws: port {port} is taken by process {os.getpid()} (")
    assert (second.returncode, "EXAMPLE_BROKER_URL" in remedy) == (1, True)


@pytest.mark.nightly
def test_two_variables_point_the_example_elsewhere(tmp_path: Path) -> None:
    """Its second run on a store that remembers the first is about other orders."""
    with EmbeddedRedis() as redis:
        addresses = {"EXAMPLE_BROKER_URL": redis.url, "EXAMPLE_STORE_URL": f"sqlite:///{tmp_path}/shop.sqlite"}
        for _ in range(2):
            assert "18 messages, 9 effects." in example(**addresses).stdout


@finds_processes
@pytest.mark.parametrize("how", [INT, pytest.param(TERM, marks=pytest.mark.nightly)])
def test_interrupting_the_example_leaves_no_process(port: int, tmp_path: Path, how: signal.Signals) -> None:
    """Neither its worker nor its servers."""
    marked = environ(**{MARK: str(tmp_path)})

    def hear_interrupts() -> None:
        """A shell has what it starts in the background ignore SIGINT, these tests among it; programs inherit that."""
        signal.signal(INT, signal.SIG_DFL)

    run = subprocess.Popen(COMMAND, cwd=ROOT, env=marked, stdout=subprocess.PIPE, preexec_fn=hear_interrupts)
    assert run.stdout
    try:

        def workers() -> list[int]:
            return [pid for pid, line in processes(tmp_path).items() if "example_project.app" in line]

        worker = wait_until(workers, "the worker starts", timeout=100)[0]
        os.kill(worker, signal.SIGSTOP)  # so that there is no end before it is interrupted
        assert (b"3 orders" in run.stdout.readline(), accepts(port)) == (True, True)
        run.send_signal(how)
        with contextlib.suppress(ProcessLookupError):  # it may have been killed by then
            os.kill(worker, signal.SIGCONT)
        assert (run.wait(100) != 0, processes(tmp_path)) == (True, {})
    finally:
        for pid in processes(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, KILL)
        run.communicate()
