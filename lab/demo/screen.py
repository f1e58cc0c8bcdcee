"""A story on a screen: its lines as they come, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lab.demo.ledger import Row
from lab.demo.story import Line, Story

Hear = Callable[[Sequence[Row]], None]
"""Takes what is new in a ledger."""

STYLES = {
    r"^ *[\d.]+": "dim",
    r"\bkilled\b": "red",
    r"\btook over\b": "cyan",
    r"\b(once|nothing ran again)\b": "green",
    r"\b(once more|\d+ times)\b": "bold red",
    r"\b(postponed|recorded result|in doubt)\b": "yellow",
}


def announce(console: Console, title: str, told: int) -> None:
    """Say what comes, and how to read it."""
    console.print(title, style="bold")
    accidents = "the first accident" if told == 1 else f"the first {told} accidents"
    console.print(f"Of each kind {accidents}: seconds, operation, what its processes did.", style="dim")


@contextlib.contextmanager
def telling(console: Console, title: str, story: Story, operations: int) -> Iterator[Hear]:
    """Tell the story of the column `title`, which has so many operations."""
    console.print(f"\n[bold]{title}[/]")
    with _bar(console) as bar:
        task = bar.add_task("", total=operations)

        def hear(rows: Sequence[Row]) -> None:
            for line in filter(None, map(story.hear, rows)):
                console.print(_styled(line), soft_wrap=True)
            note = f"{story.kills} killed, {story.takeovers} taken over"
            bar.update(task, completed=len(story.ended), description=note)

        yield hear


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("       "),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("done, {task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _styled(line: Line) -> Text:
    text = Text(str(line))
    for pattern, style in STYLES.items():
        text.highlight_regex(pattern, style)
    return text
