"""An append-only file of rows, the witness of what really happened.

It has **no unique constraint** on purpose: whatever happens twice is there twice. One `write` with `O_APPEND`
per row keeps rows whole when many processes write, and when a process is killed a moment later: what reached
the kernel stays.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that happened, to which order, in which attempt of which task.

    `what` is `delivery`, `run`, `effect`, `ended`, `kill`, `ready`, `recognised` (a charge the bank had already
    made), `store_killed`, or the name of a signal of the library.
    """

    what: str
    task: str = ""
    order: str = ""
    task_id: str = ""
    attempt: int = 0
    token: int = 0
    point: str = ""  # of a kill: "before" or "after" the effect
    reference: str = ""  # of a charge: its number at the bank
    key: str = ""  # of a charge: the idempotency key that came with it
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)


LEDGERS = ("ledger", "bank")
"""By name, what a folder has. The bank last: what the workers say they have done is in its books by then."""


class Ledger:
    """Rows in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def append(self, row: Row) -> None:
        """Add `row`. It survives the death of this process once this returns."""
        # The newline in front keeps a predecessor's torn line from swallowing this row.
        line = b"\n" + json.dumps(asdict(row)).encode() + b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(file, line)
        finally:
            os.close(file)
        if written != len(line):
            raise OSError(f"wrote {written} of {len(line)} bytes to {self._path}; is the disk full?")

    def rows(self) -> list[Row]:
        """Every row so far. A torn line was never reported as written, so it is passed over."""
        return self.since(0)[0]

    def since(self, position: int) -> tuple[list[Row], int]:
        """The rows from `position` on, and the position after them."""
        try:
            with self._path.open("rb") as file:
                file.seek(position)
                found = file.read()
        except FileNotFoundError:
            return [], position
        whole = found[: found.rfind(b"\n") + 1]  # what comes after it may still be under way
        return [row for line in whole.splitlines() if line and (row := _parse(line))], position + len(whole)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of `locked` blocks; the kernel lets go for a holder that is killed."""
        file = os.open(self._path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def is_first(mark: Path) -> bool:
    """Whether nobody asked about that mark before, in whatever process."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _parse(line: bytes) -> Row | None:
    try:
        return Row(**json.loads(line))
    except ValueError:
        return None


def rows_in(folder: Path) -> list[Row]:
    """What is noted in a folder: by its ledger and by the bank's books."""
    return [row for name in LEDGERS for row in Ledger(folder / f"{name}.jsonl").rows()]
