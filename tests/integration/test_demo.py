"""The demonstration itself: what a reader is told to run has to work, fail when it should, and clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from example_project.embedded import EmbeddedAws
from example_project.servers import TABLE
from example_project.settings import Settings
from example_project.tether import ROOT

pytestmark = [
    pytest.mark.worker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]

MARK = "DEMO_TEST"


@contextlib.contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demonstration, in an environment by which its descendants can be recognised."""
    process = subprocess.Popen(
        [sys.executable, "-m", "example_project.demo", "--folder", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, MARK: str(folder)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def processes(folder: Path) -> list[str]:
    """Command lines of living processes that descend from `demo(folder)`."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and f"{MARK}={folder}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def workers_at_work(folder: Path) -> bool:
    """Both workers of a column are ready."""
    return any(ledger.read_text().count('"ready"') == 2 for ledger in folder.glob("*/ledger.jsonl"))


def test_every_order_is_charged_exactly_once_under_fire(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with demo(folder, "--orders", "20") as process:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
    assert "Every order was charged exactly once" in output
    assert "Broken promise" not in output
    assert processes(folder) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupting_it_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "demo"
    with demo(folder) as process:
        eventually(lambda: workers_at_work(folder), "the workers never started")
        assert len(processes(folder)) > 3
        process.send_signal(how)
        assert process.wait(60) != 0
        eventually(lambda: not processes(folder), f"still there: {processes(folder)}")


def test_worker_and_publisher_in_two_terminals(tmp_path: Path) -> None:
    with EmbeddedAws() as aws:
        settings = Settings(
            broker_url=aws.broker_url,
            store_url=aws.store_url(TABLE),
            results_url=f"file://{tmp_path}/results",
            folder=tmp_path,
        )
        environ = {**os.environ, **settings.environ()}
        command = [sys.executable, "-m", "example_project.worker"]
        with subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True) as worker:
            try:
                command = [sys.executable, "-m", "example_project.publish", "--orders", "3", "--duplicates"]
                publisher = subprocess.run(
                    command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
                )
                assert publisher.returncode == 0, publisher.stderr
                assert "The bank's books show 3 charges for 3 orders." in publisher.stdout
                assert "3 of 3 orders have one outcome" in publisher.stdout
                worker.terminate()
                assert worker.wait(60) == 0
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)


def eventually(condition: Callable[[], bool], otherwise: str, timeout: float = 60) -> None:
    """Wait for `condition`."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)
