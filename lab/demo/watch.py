"""Waiting for what the workers of a column do, by what they note in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from lab.demo.ledger import Ledger, Row
from lab.demo.screen import Hear
from lab.fleet import Fleet

POLL = 0.2
LOOKS = 8  # nothing is left for certain if that many looks in a row find nothing
PATIENCE = 240.0

# The bank last: what the workers say they have done is in its books by then.
LEDGERS = ("ledger", "bank")


class Watch:
    """What is noted in `folder`: kept, and handed to `hear` as it comes.

    Args:
        folder: Of the ledgers and the workers' logs.
        fleets: The workers, which are not to end.
        hear: Gets what is new.
    """

    def __init__(self, folder: Path, fleets: Sequence[Fleet], hear: Hear) -> None:
        self.rows: list[Row] = []
        self._folder = folder
        self._fleets = fleets
        self._hear = hear
        self._read = dict.fromkeys(LEDGERS, 0)

    def look(self) -> None:
        """Read what is new."""
        news: list[Row] = []
        for name, position in self._read.items():
            rows, self._read[name] = Ledger(self._folder / f"{name}.jsonl").since(position)
            news += rows
        news.sort(key=lambda row: row.time)
        self.rows += news
        self._hear(news)

    def until(self, done: Callable[[], bool], what: str, *, looks: int = 1) -> None:
        """Wait until so many looks in a row find it done.

        Raises:
            click.ClickException: A worker ended, or it took far too long; the workers' logs are in it.
        """
        deadline = time.monotonic() + PATIENCE
        seen = 0
        while (seen := seen + 1 if self._finds(done) else 0) < looks:
            if any(fleet.dead() for fleet in self._fleets):
                raise click.ClickException(f"a worker ended early:\n{self._logs()}")
            if time.monotonic() > deadline:
                raise click.ClickException(f"waited {PATIENCE:g} s for {what}:\n{self._logs()}")
            time.sleep(POLL)

    def until_ready(self) -> None:
        """Wait until every worker is."""
        workers = sum(len(fleet.names) for fleet in self._fleets)
        self.until(lambda: sum(row.what == "ready" for row in self.rows) == workers, "the workers to start")

    def _finds(self, done: Callable[[], bool]) -> bool:
        self.look()
        return done()

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self._folder.glob("*.log"))
