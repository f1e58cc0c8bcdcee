"""The version before this one: built from git, installed in a folder of its own, and run beside the present one.

Celery and the drivers are the same for both, so that what differs between two programs is this library alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
REVISION = "af1c53cb59bf1d300bfcc58645903e27d234623e"
"""The previous version. Before the first release: the commit before records got a label, a trace and a verdict."""


@dataclass(frozen=True)
class Previous:
    """The previous version as it is installed.

    Args:
        folder: What goes to the front of ``PYTHONPATH``.
    """

    folder: Path

    def environ(self) -> dict[str, str]:
        """The environment of a program that runs on it, and finds the tests' own modules behind it."""
        return {"PYTHONPATH": os.pathsep.join((str(self.folder), str(ROOT)))}

    def run(self, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
        """What ``python ...`` prints when it runs on the previous version."""
        return python(*arguments, environ={**self.environ(), **(environ or {})}, cwd=self.folder)


def python(*arguments: str, environ: Mapping[str, str], cwd: Path) -> str:
    """What ``python ...`` prints; if it fails, what it printed is in the failure."""
    # Python puts the current folder before PYTHONPATH, so it must not be the root of the project.
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def shared(run: Path) -> Previous:
    """The previous version, built once for all processes of a test run."""
    folder, done = run / "previous", run / "previous" / "done"
    archive = _archive()  # first: where there is none, every process skips, and none waits for another
    try:
        folder.mkdir()
    except FileExistsError:
        wait_until(done.exists, "another process builds the previous version", timeout=120)
        return Previous(folder / SITE)
    previous = _installed(folder, archive)
    done.touch()
    return previous


SITE = "site"


def _installed(folder: Path, archive: bytes) -> Previous:
    """Build the previous version's wheel in ``folder``, and install it there."""
    source, site = folder / "source", folder / SITE
    source.mkdir()
    subprocess.run(["tar", "--extract", "--directory", str(source)], input=archive, check=True)
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *quiet, "--no-deps", "-w", str(folder), str(source)], check=True
    )
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as built:  # pure Python: this is how it is installed
        built.extractall(site)
    return Previous(site)


def _archive() -> bytes:
    """The previous version's source.

    A source archive has no history, and a shallow clone may have no way to fetch it, so the test is skipped there. In a
    whole clone a missing revision is a failure: the tests would otherwise be gone without a word.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("no git history to build the previous version from, as in a source archive")
    if _git("cat-file", "-e", f"{REVISION}^{{commit}}").returncode:
        _git("fetch", "--quiet", "--depth", "1", "origin", REVISION)  # a shallow clone
    archive = _git("archive", REVISION)
    if archive.returncode:
        told = archive.stderr.decode(errors="replace")
        if _git("rev-parse", "--is-shallow-repository").stdout.strip() == b"true":
            pytest.skip(f"this clone is shallow and cannot fetch {REVISION}: git fetch --unshallow\n{told}")
        pytest.fail(f"git cannot give {REVISION}, the previous version\n{told}")
    return archive.stdout


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
