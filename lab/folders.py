"""Temporary folders that do not long outlive who made them: what a killed process left, the next one deletes.

An owner holds a lock on its folder, which the kernel gives back however the owner ends. The mark in the folder says
that the lock was taken: without it nobody can tell whether a folder is new or abandoned, so it stays.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "celery-idempotent-"
MARK = ".owned"


class OwnedFolder:
    """A new temporary folder; those of dead owners are deleted before it is made."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / MARK).touch()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """An :class:`OwnedFolder` for the time of a ``with`` block."""
    folder = OwnedFolder()
    try:
        yield folder.path
    finally:
        folder.remove()


def sweep() -> None:
    """Delete the folders whose owners are dead."""
    for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            lock = os.open(mark.parent, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if it has a living owner or is another user's
            shutil.rmtree(mark.parent, ignore_errors=True)
