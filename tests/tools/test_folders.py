"""Temporary folders end with their owners: at once, or when the next owner comes."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.folders import PREFIX, temporary_folder
from lab.tether import ROOT

OWNER = """
import sys, time
from lab import tether
from lab.folders import temporary_folder

tether.unwind_on_signals()
with temporary_folder() as folder:
    (folder / "data").mkdir()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def _owner(place: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    environ = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def _next_start() -> None:
    with temporary_folder():
        pass


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_owner_deletes_its_folder(tmp_path: Path, how: signal.Signals) -> None:
    """Before it ends."""
    with _owner(tmp_path) as (process, folder):
        assert (folder / "data").exists()
        process.send_signal(how)
        process.wait(30)
    assert list(tmp_path.iterdir()) == []


def test_killed_owners_folder_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    """Nobody else could: a killed process deletes nothing."""
    with _owner(tmp_path) as (process, folder):
        process.kill()
        process.wait(30)
        assert folder.exists()
        _next_start()
    assert list(tmp_path.iterdir()) == []


def test_living_owner_keeps_its_folder(tmp_path: Path) -> None:
    """Whoever else starts meanwhile, in this process or in another one."""
    with _owner(tmp_path) as (_, theirs), temporary_folder() as ours:
        _next_start()
        assert theirs.exists()
        assert ours.exists()


def _empty(folder: Path) -> None:
    """Perhaps its owner is about to lock it."""


def _with_data(folder: Path) -> None:
    (folder / "data").mkdir()


@pytest.mark.parametrize("fill", [_empty, _with_data])
def test_folder_that_nobody_has_marked_stays(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    """It may be somebody's who holds no lock."""
    folder = tmp_path / f"{PREFIX}unmarked"
    folder.mkdir()
    fill(folder)
    _next_start()
    assert list(tmp_path.iterdir()) == [folder]
