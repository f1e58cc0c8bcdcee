"""What happens in a column, told as it happens: rows of the ledger in, sentences out.

Of each kind of accident the first are told from beginning to end. All of them are counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lab.ledger import Row

TOLD = 2
"""How many accidents of a kind are told."""

WORDS = {
    "charge_card": ("charge", "charged"),
    "reserve_stock": ("stock", "reserved"),
    "send_receipt": ("mail", "mailed"),
}
"""Of each task what its effect is called, and what is done when it happens."""

STYLES = {
    r"^ *[\d.]+": "dim",
    r"\bkilled\b": "red",
    r"\btook over\b": "cyan",
    r"\b(once|nothing ran again)\b": "green",
    r"\b\d+ times\b": "bold red",
    r"\b(postponed|recorded result)\b": "yellow",
}

Subject = tuple[str, str]
"""A task and an order: one operation."""


@dataclass(slots=True)
class _Delivery:
    subject: Subject
    task_id: str
    meanwhile: int | None  # the process that was at the same message when this one got it
    signs: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Story:
    """Hears rows in the order of time and tells what is worth telling."""

    kills: int = 0
    takeovers: int = 0
    ended: set[Subject] = field(default_factory=set)
    _began: float = 0
    _at: dict[int, _Delivery] = field(default_factory=dict)
    _killed: dict[Subject, bool] = field(default_factory=dict)  # whether it was told
    _times: Counter[Subject] = field(default_factory=Counter)
    _told: Counter[str] = field(default_factory=Counter)

    def hear(self, row: Row) -> str:
        """What there is to say about `row`, if anything."""
        self._began = self._began or row.time
        subject, at = (row.task, row.order), self._at.get(row.pid)
        match row.what:
            case "delivery":
                meanwhile = next((pid for pid, each in self._at.items() if each.task_id == row.task_id), None)
                self._at[row.pid] = _Delivery(subject, row.task_id, meanwhile)
            case "run" if at and at.meanwhile in self._at:
                return self._tell("overlap", row, subject, f"came again: {row.pid} runs it while {at.meanwhile} does")
            case "kill":
                self.kills += 1
                self._at.pop(row.pid, None)
                line = self._tell(
                    f"{row.task} {row.point}", row, subject, f"{row.pid} killed right {row.point} its effect"
                )
                self._killed[subject] = bool(line)
                return line
            case "effect":
                self._times[subject] += 1
                if self._times[subject] > 1 and subject not in self._killed:
                    return self._tell("repeated", row, subject, f"came again: {self._done(subject)}")
            case "ended" if at:
                return self._end(row, self._at.pop(row.pid))
            case "store_killed":
                return self._line(row, "store", "killed; it is back with all that it had acknowledged")
            case _ if at:
                at.signs.add(row.what)
                self.takeovers += row.what == "taken_over"
                if row.what == "conflicted" and at.meanwhile in self._at:
                    text = f"came again while {at.meanwhile} works on it: postponed"
                    return self._tell("overlap", row, at.subject, text)
                if row.what == "store_unavailable":
                    return self._tell("away", row, at.subject, "found the store away: nothing ran, postponed")
        return ""

    def _end(self, row: Row, delivery: _Delivery) -> str:
        if delivery.signs & {"conflicted", "store_unavailable"}:
            return ""
        subject, came_again = delivery.subject, delivery.subject in self.ended
        self.ended.add(subject)
        # A copy may be replayed a moment before its successor's own end is noted.
        is_being_finished = any(each.subject == subject and "taken_over" in each.signs for each in self._at.values())
        if subject in self._killed and not is_being_finished:
            is_told = self._killed.pop(subject)
            return self._about(row, subject, self._ending(row.pid, delivery)) if is_told else ""
        if came_again and "replayed" in delivery.signs:
            return self._tell("replayed", row, subject, "came again: got the recorded result, nothing ran")
        return ""

    def _ending(self, pid: int, delivery: _Delivery) -> str:
        """What to say of an operation that ended after a kill."""
        done = self._done(delivery.subject)
        if "taken_over" not in delivery.signs:
            return f"{pid} ran it again: {done}"
        known = "; the bank knew its key" if "recognised" in delivery.signs else ""
        excuse = " (it knows no key)" if self._times[delivery.subject] > 1 else ""
        return f"{pid} took over{known}: {done}{excuse}"

    def _done(self, subject: Subject) -> str:
        times = self._times[subject]
        return f"{WORDS[subject[0]][1]} {'once' if times == 1 else f'{times} times'}"

    def _tell(self, accident: str, row: Row, subject: Subject, text: str) -> str:
        """A line, unless enough accidents of that kind have been told."""
        self._told[accident] += 1
        return self._about(row, subject, text) if self._told[accident] <= TOLD else ""

    def _about(self, row: Row, subject: Subject, text: str) -> str:
        task, order = subject
        return self._line(row, f"{WORDS[task][0]} {order.rpartition('-')[2]}", text)

    def _line(self, row: Row, subject: str, text: str) -> str:
        return f"{row.time - self._began:6.1f}  {subject:<13} {text}"


@contextlib.contextmanager
def telling(console: Console, title: str, operations: int) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Tell the story of the column `title`, which has so many operations; on a terminal with a bar below."""
    story = Story()
    console.print(f"\n[bold]{title}[/]")
    columns = (
        TextColumn("       "),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("done, {task.description}"),
    )
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=operations)

        def hear(rows: Sequence[Row]) -> None:
            for line in filter(None, map(story.hear, rows)):
                text = Text(line)
                for pattern, style in STYLES.items():
                    text.highlight_regex(pattern, style)
                console.print(text, soft_wrap=True)
            note = f"{story.kills} killed, {story.takeovers} taken over"
            bar.update(task, completed=len(story.ended), description=note)

        yield hear
