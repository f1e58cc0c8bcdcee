"""What is drawn on a terminal, by rich; for a pipe, plain lines that are never cut.

rich is imported where a terminal is there: a worker imports the commands, too, and draws nothing. What is shown was
written by others, so it goes through ``one_line``, and never through rich's markup.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click

from celery_idempotent.printable import one_line

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

NARROW = 120
"""Columns of a terminal below which a list leaves out what is least asked for."""

_STYLES = {
    "UNKNOWN": "bold red",
    "FAILED": "red",
    "IN_PROGRESS": "yellow",
    "COMPLETED": "green",
    "RELEASED": "cyan",
    "FORGOTTEN": "dim",
}

_LEAST = 8
"""Characters that are left of what is cut."""


class Column(NamedTuple):
    """A column: its head, whether its cells may be cut for a narrow terminal, and whether they stand on the right."""

    head: str
    is_cut: bool = False
    is_number: bool = False


def is_terminal(*, err: bool = False) -> bool:
    """Whether somebody sees what is printed."""
    return (sys.stderr if err else sys.stdout).isatty()


def is_conversation() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty() and is_terminal()


def width() -> int | None:
    """Characters in a line of the terminal; None where there is none, and a line may be of any length."""
    return _console().width if is_terminal() else None


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, paged: bool = True) -> None:
    """Print rows: in a terminal, each on one line of it, by a pager where there are more than it has lines."""
    heads = [each.head for each in columns]
    cells = [[one_line(each) for each in row] for row in rows]
    lengths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    if not is_terminal():
        for row in [heads, *cells]:
            click.echo("  ".join(map(str.ljust, row, lengths)).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head, is_cut, is_number in columns:
        made.add_column(Text(head), no_wrap=not is_cut, overflow="ellipsis", justify="right" if is_number else "left")
    for row in cells:
        styles = [_style(cell) if head == "STATUS" else "" for head, cell in zip(heads, row, strict=True)]
        made.add_row(*(Text(*cell, no_wrap=True, overflow="ellipsis") for cell in zip(row, styles, strict=True)))
    console = _console()
    # What must not be cut may be longer than a line of the terminal, which then goes on in the next one.
    least = [_LEAST if each.is_cut else length for each, length in zip(columns, lengths, strict=True)]
    console.width = max(console.width, sum(least) + 2 * len(least))
    with console.capture() as captured:
        console.print(made)
    if paged and len(cells) + 2 > console.height:
        click.echo_via_pager(captured.get(), color=True)
    else:
        click.echo(captured.get(), nl=False)


def lines(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names with what is behind them."""
    shown = [(name, one_line(value)) for name, value in pairs]
    if not is_terminal():
        click.echo("\n".join(f"{name:>14}  {text}" for name, text in shown))
        return
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(justify="right", min_width=14, no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in shown:
        made.add_row(Text(name, "dim"), Text(text, _style(text) if name == "status" else ""))
    _console().print(made)


def _style(status: str) -> str:
    return _STYLES.get(status.partition(",")[0], "")


def counted(label: str, items: Iterable[T], *, total: int | None = None) -> Iterator[T]:
    """``items``, while a terminal is told how many there were, and of how many if that is known; a pipe is not."""
    if not is_terminal(err=True):
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = (BarColumn(), MofNCompleteColumn()) if total else (TextColumn("{task.completed:,}"),)
    columns = SpinnerColumn(), TextColumn(label), *shown, TimeElapsedColumn()
    with Progress(*columns, console=_console(stderr=True), transient=True) as progress:
        yield from progress.track(items, total=total, description=label)


def _console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, force_terminal=True)
