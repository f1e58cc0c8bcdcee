"""What is drawn on a terminal."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from celery_idempotent.integration import tables
from celery_idempotent.printable import one_line


def table(rows: Iterable[Sequence[object]], *, last: int) -> str:
    """``rows`` in columns; the first one is the heads, and ``last`` the column that is never cut."""
    cells: list[tables.Row] = [tuple(map(one_line, row)) for row in rows]
    return tables.table(cells, last=last, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def counted(label: str, totals: Iterator[int]) -> int:
    """The last of ``totals``, which are shown while they grow."""
    with click.progressbar(totals, label=label, item_show_func=_shown, show_percent=False, file=sys.stderr) as bar:
        return max(bar, default=0)


def _shown(total: int | None) -> str:
    return str(total or 0)
