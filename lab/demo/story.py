"""What happens in a column, told as it happens: rows of the ledger in, sentences out.

Of each kind of kill the first are told from beginning to end. All of them are counted.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lab.ledger import Row

TOLD = 2  # how many kills of a kind are told
WORDS = {
    "charge_card": ("charge", "charged"),
    "reserve_stock": ("stock", "reserved"),
    "send_receipt": ("mail", "mailed"),
}
"""Of each task what its effect is called, and what is done when it happens."""

Subject = tuple[str, str]
"""A task and an order: one operation."""


@dataclass(slots=True)
class Story:
    """Hears rows in the order of time and tells of each kill what became of the operation."""

    kills: int = 0
    takeovers: int = 0
    ended: set[Subject] = field(default_factory=set)
    _began: float = 0
    _at: dict[int, tuple[Subject, set[str]]] = field(default_factory=dict)  # by process: its operation, and signs of it
    _killed: dict[Subject, bool] = field(default_factory=dict)  # whether it was told
    _times: Counter[Subject] = field(default_factory=Counter)
    _told: Counter[str] = field(default_factory=Counter)

    def hear(self, row: Row) -> str:
        """What there is to say about `row`, if anything."""
        self._began = self._began or row.time
        subject = (row.task, row.order)
        match row.what:
            case "delivery":
                self._at[row.pid] = (subject, set())
            case "kill":
                self.kills += 1
                self._at.pop(row.pid, None)
                accident = f"{row.task} {row.point}"
                self._told[accident] += 1
                self._killed[subject] = self._told[accident] <= TOLD
                if self._killed[subject]:
                    return self._line(
                        row, self._name(subject), f"{row.pid} [red]killed[/] right {row.point} its effect"
                    )
            case "effect":
                self._times[subject] += 1
            case "returned" if row.pid in self._at:
                return self._end(row, *self._at.pop(row.pid))
            case "store_killed":
                return self._line(row, "store", "[red]killed[/]; it is back with all that it had acknowledged")
            case _ if row.pid in self._at:
                self._at[row.pid][1].add(row.what)
                self.takeovers += row.what == "taken_over"
        return ""

    def _end(self, row: Row, subject: Subject, signs: set[str]) -> str:
        if signs & {"conflicted", "store_unavailable"}:
            return ""
        self.ended.add(subject)
        # A copy may be replayed a moment before its successor's own end is noted.
        is_being_finished = any(each == subject and "taken_over" in seen for each, seen in self._at.values())
        if is_being_finished or not self._killed.pop(subject, False):
            return ""
        times = self._times[subject]
        done = f"{WORDS[subject[0]][1]} {'[green]once[/]' if times == 1 else f'[bold red]{times} times[/]'}"
        if "taken_over" not in signs:
            return self._line(row, self._name(subject), f"{row.pid} ran it again: {done}")
        known = "; the bank knew its key" if "recognised" in signs else ""
        excuse = " (it knows no key)" if times > 1 else ""
        return self._line(row, self._name(subject), f"{row.pid} [cyan]took over[/]{known}: {done}{excuse}")

    @staticmethod
    def _name(subject: Subject) -> str:
        return f"{WORDS[subject[0]][0]} {subject[1].rpartition('-')[2]}"

    def _line(self, row: Row, subject: str, text: str) -> str:
        return f"[dim]{row.time - self._began:6.1f}[/]  {subject:<13} {text}"


@contextlib.contextmanager
def telling(console: Console, title: str, operations: int) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Tell the story of the column `title`, which has so many operations; on a terminal with a bar below."""
    story = Story()
    console.print(f"\n[bold]{title}[/]")
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("done, {task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=operations)

        def hear(rows: Sequence[Row]) -> None:
            for line in filter(None, map(story.hear, rows)):
                console.print(line, soft_wrap=True)
            note = f"{story.kills} killed, {story.takeovers} taken over"
            bar.update(task, completed=len(story.ended), description=note)

        yield hear
