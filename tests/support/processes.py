"""Processes that a program has left behind, and a child that outlives its parent's connection."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract import a_completion, a_record

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


def complete_in_a_child_after(
    close: Callable[[], None], store: Store, open_: Callable[[], None] = lambda: None
) -> None:
    """Claim in a forked child, close what the parent has of the store, complete in the child, and look for it."""
    claimed = a_record()
    completed = a_completion(claimed)
    (told, tell), (go, let_go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            open_()
            assert store.swap(claimed, None) == claimed
            os.write(tell, b"claimed")
            os.read(go, 1)
            assert store.swap(completed, claimed.revision) == completed
        finally:
            os._exit(0)
    os.read(told, 7)
    close()
    os.write(let_go, b"!")
    os.waitpid(child, 0)
    assert store.get(claimed.key) == completed
