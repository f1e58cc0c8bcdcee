"""The example as its page tells a reader to run it."""

from __future__ import annotations

import os
import re
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


def test_two_variables_point_it_elsewhere(tmp_path: Path) -> None:
    """Its second run on a store that remembers the first is about other orders."""
    with EmbeddedRedis() as redis:
        addresses = {"EXAMPLE_BROKER_URL": redis.url, "EXAMPLE_STORE_URL": f"sqlite:///{tmp_path}/shop.sqlite"}
        for _ in range(2):
            assert "18 messages, 9 effects." in run(**addresses)
