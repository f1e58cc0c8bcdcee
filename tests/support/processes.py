"""Processes that a program has left behind, found by what they have inherited."""

from __future__ import annotations

import contextlib
from pathlib import Path

MARK = "MARKED_BY_A_TEST"
"""Of what is started with this variable, all descendants are found by its value."""


def processes(mark: Path) -> dict[int, str]:
    """Command lines of living processes with that mark, by number.

    PostgreSQL writes its titles over its environment, but works in its data folder.
    """
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and (
                f"{MARK}={mark}".encode() in (process / "environ").read_bytes()
                or (process / "cwd").readlink().is_relative_to(mark)
            ):
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found
