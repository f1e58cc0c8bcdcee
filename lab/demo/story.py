"""What happens in a column, told as it happens. Pure: rows of the ledger in, sentences out.

Of each kind of accident the first are told from beginning to end. All of them are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lab.demo.ledger import Row

Subject = tuple[str, str]
"""A task and an order: one operation."""


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence about one operation; `seconds` since the first delivery."""

    seconds: float
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.seconds:6.1f}  {self.subject:<13} {self.text}"


@dataclass(frozen=True, slots=True)
class Ending:
    """How an operation ended after a kill: what its process reported, and how often its effect was seen by then."""

    pid: int
    task: str
    point: str  # of the kill: "before" or "after" the effect
    signs: frozenset[str]
    times: int


@dataclass(frozen=True, slots=True)
class Voice:
    """How an act talks.

    Args:
        words: Of each task what its effect is called, and what is done when it happens.
        ending: What to say of an operation that ended after a kill.
        told: How many accidents of a kind are told.
    """

    words: Mapping[str, tuple[str, str]]
    ending: Callable[[Ending], str]
    told: int

    def subject(self, task: str, order: str) -> str:
        """What an operation is called."""
        return f"{self.words[task][0]} {order.rpartition('-')[2]}"

    def done(self, task: str, times: int) -> str:
        """What was done, how often."""
        return f"{self.words[task][1]} {'once' if times == 1 else f'{times} times'}"


@dataclass(frozen=True, slots=True)
class _Delivery:
    subject: Subject
    task_id: str
    meanwhile: int | None  # the process that was at the same message when this one got it
    signs: frozenset[str] = frozenset()


@dataclass(slots=True)
class Story:
    """Hears rows in the order of time and tells what is worth telling."""

    voice: Voice
    kills: int = 0
    takeovers: int = 0
    ended: set[Subject] = field(default_factory=set)
    _began: float | None = None
    _at: dict[int, _Delivery] = field(default_factory=dict)
    _killed: dict[Subject, tuple[str, bool]] = field(default_factory=dict)  # where, and whether it was told
    _times: Counter[Subject] = field(default_factory=Counter)
    _told: Counter[str] = field(default_factory=Counter)

    def hear(self, row: Row) -> Line | None:
        """What there is to say about `row`, if anything."""
        match row.what:
            case "delivery":
                self._began = self._began or row.time
                self._at[row.pid] = _Delivery((row.task, row.order), row.task_id, self._who_is_at(row.task_id))
                return None
            case "run":
                return self._run(row)
            case "kill":
                return self._kill(row)
            case "effect":
                return self._effect(row)
            case "ended":
                return self._end(row)
            case "store_killed":
                return self._line(row, "store", "killed; it is back with all that it had acknowledged")
            case _:
                return self._sign(row) if row.pid in self._at else None

    def _run(self, row: Row) -> Line | None:
        delivery = self._at[row.pid]
        text = f"came again: {row.pid} runs it while {delivery.meanwhile} does"
        return self._tell("overlap", row, delivery.subject, text) if delivery.meanwhile in self._at else None

    def _kill(self, row: Row) -> Line | None:
        self.kills += 1
        self._at.pop(row.pid, None)
        subject = (row.task, row.order)
        line = self._tell(f"{row.task} {row.point}", row, subject, f"{row.pid} killed right {row.point} its effect")
        self._killed[subject] = (row.point, line is not None)
        return line

    def _effect(self, row: Row) -> Line | None:
        subject = (row.task, row.order)
        self._times[subject] += 1
        if self._times[subject] == 1 or subject in self._killed:
            return None
        return self._tell("repeated", row, subject, f"came again: {self.voice.done(row.task, self._times[subject])}")

    def _sign(self, row: Row) -> Line | None:
        delivery = self._at[row.pid]
        self._at[row.pid] = replace(delivery, signs=delivery.signs | {row.what})
        match row.what:
            case "taken_over":
                self.takeovers += 1
                return None
            case "conflicted" if delivery.meanwhile in self._at:
                text = f"came again while {delivery.meanwhile} works on it: postponed"
                return self._tell("overlap", row, delivery.subject, text)
            case "store_unavailable":
                return self._tell("away", row, delivery.subject, "found the store away: nothing ran, postponed")
            case _:
                return None

    def _end(self, row: Row) -> Line | None:
        delivery = self._at.pop(row.pid)
        if delivery.signs & {"conflicted", "store_unavailable"}:
            return None
        subject, came_again = delivery.subject, delivery.subject in self.ended
        self.ended.add(subject)
        if subject in self._killed and not self._is_being_finished(subject):
            point, told = self._killed.pop(subject)
            ending = Ending(row.pid, subject[0], point, delivery.signs, self._times[subject])
            return self._about(row, subject, self.voice.ending(ending)) if told else None
        if came_again and "replayed" in delivery.signs:
            return self._tell("replayed", row, subject, "came again: got the recorded result, nothing ran")
        return None

    def _is_being_finished(self, subject: Subject) -> bool:
        """Whether the successor is about to end: a copy may be replayed a moment before its own end is noted."""
        return any(each.subject == subject and "taken_over" in each.signs for each in self._at.values())

    def _who_is_at(self, task_id: str) -> int | None:
        return next((pid for pid, delivery in self._at.items() if delivery.task_id == task_id), None)

    def _tell(self, accident: str, row: Row, subject: Subject, text: str) -> Line | None:
        """A line, unless enough accidents of that kind have been told."""
        self._told[accident] += 1
        return self._about(row, subject, text) if self._told[accident] <= self.voice.told else None

    def _about(self, row: Row, subject: Subject, text: str) -> Line:
        return self._line(row, self.voice.subject(*subject), text)

    def _line(self, row: Row, subject: str, text: str) -> Line:
        return Line(row.time - (self._began or row.time), subject, text)
