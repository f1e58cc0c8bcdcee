"""The example as its page tells a reader to run it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.embedded import EmbeddedRedis
from lab.embedded.server import accepts
from lab.tether import ROOT

pytestmark = [pytest.mark.worker, pytest.mark.timeout(120)]


def run(**variables: str) -> str:
    """What it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EXAMPLE_")} | variables
    command = [sys.executable, "-m", "example_project.run"]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_one_command_shows_each_effect_once() -> None:
    """On servers of its own, which end with it."""
    shown = run()
    assert len(re.findall(r"^  (bank|warehouse|mail) ", shown, re.MULTILINE)) == 9
    assert shown.count("one effect") == 9
    assert "18 messages, 9 effects." in shown
    assert not accepts(4577)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    """Neither its worker nor its servers."""
    address = f"sqlite:///{tmp_path}/shop.sqlite"  # by which its processes are known
    command = [sys.executable, "-m", "example_project.run"]
    environ = {**os.environ, "EXAMPLE_STORE_URL": address}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as example:
        assert example.stdout is not None
        assert next(line for line in example.stdout if line.startswith("  bank "))
        assert len(processes(address)) > 3
        example.send_signal(how)
        example.communicate(timeout=60)
    assert example.returncode not in (0, None)
    assert processes(address) == []


def processes(mark: str) -> list[str]:
    """Command lines of living processes that have this in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


def test_two_variables_point_it_elsewhere(tmp_path: Path) -> None:
    """Its second run on a store that remembers the first is about other orders."""
    with EmbeddedRedis() as redis:
        addresses = {"EXAMPLE_BROKER_URL": redis.url, "EXAMPLE_STORE_URL": f"sqlite:///{tmp_path}/shop.sqlite"}
        for _ in range(2):
            assert "18 messages, 9 effects." in run(**addresses)
