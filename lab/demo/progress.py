"""How far a column is: bars on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[str, int, str], None]
"""Takes a column's name, the number of orders charged so far, and a note."""

QUIET = 5.0  # seconds between two lines


@contextlib.contextmanager
def progress(console: Console, names: Sequence[str], orders: int) -> Iterator[Show]:
    """Show the progress of the columns called `names`, `orders` orders each."""
    if console.is_terminal:
        with _bars(console) as bars:
            yield _on_bars(bars, names, orders)
    else:
        yield _in_lines(console, orders)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("orders charged, {task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _on_bars(bars: Progress, names: Sequence[str], orders: int) -> Show:
    bar = {name: bars.add_task(name, total=orders, note="", start=False) for name in names}

    def show(name: str, charged: int, note: str) -> None:
        bars.start_task(bar[name])
        bars.update(bar[name], completed=charged, note=note)

    return show


def _in_lines(console: Console, orders: int) -> Show:
    last = float("-inf")

    def show(name: str, charged: int, note: str) -> None:
        nonlocal last
        if time.monotonic() - last >= QUIET:
            last = time.monotonic()
            console.print(f"{name}: {charged}/{orders} orders charged, {note}")

    return show
