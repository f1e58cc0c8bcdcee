"""The reliability table: one row per system and campaign, kept as JSON and shown on a terminal."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from lab.versions import versions

CONTROL = "negative control: celery-idempotent"
"""What a row calls this library where something beneath it is broken on purpose, so that its promise must break."""

OURS = "celery-idempotent"
"""What a row calls this library."""

PLAIN = "negative control: plain Celery, acks_late, reject_on_worker_lost"
"""What a row calls a task without this library under the same fire."""

FOLDER = Path(__file__).parent.parent.parent / "docs" / "reliability"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one system did under one campaign of faults, in tasks that should have one effect each.

    Stuck is what no clean delivery finishes. Of what ended UNKNOWN, some had no injected fault to explain it; it is not
    counted among those without an effect.
    """

    system: str
    store: str
    promise: str
    campaign: str
    tasks: int
    faulted: int
    deliveries: int
    faults: Mapping[str, int] = field(default_factory=dict)
    takeovers: int = 0
    effects_0: int = 0
    effects_1: int = 0
    effects_2: int = 0
    unknown: int = 0
    unexplained: int = 0
    stuck: int = 0
    violations: int
    seconds: float
    seed: int | None = None


def keep(name: str, folder: Path, **found: object) -> None:
    """Keep what a campaign found; replaces what an earlier run did."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps({"versions": versions(), **found}, indent=1, default=asdict)
    (folder / f"{name}.json").write_text(f"{document}\n")


def summarize(rows: Iterable[Row]) -> Table:
    """One campaign's table for a terminal, where only what decides has room; the files that are kept have the rest."""
    columns = ("system", "promise", "campaign", "faulted", "effects 0 / 1 / 2+", "UNKNOWN (unexplained)")
    cells = [
        (
            f"{row.system} on {row.store}",
            *(row.promise, row.campaign, row.faulted),
            f"{row.effects_0:,} / {row.effects_1:,} / {row.effects_2:,}",
            f"{row.unknown:,} ({row.unexplained:,})",
            *(row.stuck, row.violations),
        )
        for row in rows
    ]
    return make_table("Reliability under fire", (*columns, "stuck", "violations"), cells, alarm=True)


def make_table(title: str, columns: Iterable[str], rows: Iterable[Sequence[object]], *, alarm: bool = False) -> Table:
    """A table for a terminal; with ``alarm``, rows that end in another number than 0 are red."""
    table = Table(title=title)
    given = list(rows)
    for number, column in enumerate(columns):
        is_number = not any(re.search("[a-zA-Z]", str(row[number] or 0)) for row in given)
        table.add_column(column, overflow="fold", justify="right" if is_number else "left", no_wrap=is_number)
    for row in given:
        cells = ("" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        table.add_row(*cells, style="red" if alarm and row[-1] else "")
    return table
