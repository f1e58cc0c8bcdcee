"""What processes ask of their store and are answered: each request is noted before it is sent, and with its answer.

For each store all write into one file, whose order is that of time. Whoever is killed meanwhile notes no answer.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from celery_idempotent.protocol.record import Record
from celery_idempotent.stores import open_store
from lab.folders import temporary_folder
from lab.ledger import Ledger, Row

NO_ANSWER = "no answer"
_FOLDER, _MISTAKE = "RECORDED_IN", "RECORDED_WITH"
"""The environment variables that say where a process notes its requests, and which mutant it is."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request of ``actor``, and what was stored after it, if an answer came; ``now`` is the actor's own clock.

    ``earliest`` is how many requests were over when this one was made; if None, all before it were.
    """

    actor: object
    new: Record
    expected: str | None
    answer: Record | str | None
    now: int
    earliest: int | None = None


def note_requests(swap: Callable[..., Any], note: Callable[[Line], None]) -> Callable[..., Record | None]:
    """``swap`` of a kind of store, which notes requests; who asks is the process, or the store's own ``number``."""

    @wraps(swap)
    def noting(store: Any, new: Record, expected: str | None, *writes: Any, **named: Any) -> Record | None:
        line = Line(getattr(store, "number", os.getpid()), new, expected, NO_ANSWER, new.updated_at)
        note(line)
        stored: Record | None = swap(store, new, expected, *writes, **named)
        note(replace(line, answer=stored))
        return stored

    return noting


def pair(notes: Sequence[Line]) -> tuple[Line, ...]:
    """The requests with their answers; who gets none is over as it begins. A clock is best told by the next request."""
    asked, ends, latest = dict[int, Line](), dict[int, int](), dict[str, int]()
    for place, line in enumerate(_resend(notes)):
        if line.answer == NO_ANSWER:
            latest[line.new.revision] = place
        begin = latest[line.new.revision]
        asked[begin], ends[begin] = line, place
    later: dict[object, Line] = {}
    for begin, line in reversed(asked.items()):
        following, later[line.actor] = later.get(line.actor, line), line
        now = following.now if following.expected else line.now
        asked[begin] = replace(line, now=now, earliest=sum(end < begin for end in ends.values()))
    return tuple(asked.values())


def _resend(notes: Sequence[Line]) -> Iterator[Line]:
    """A driver has sent a request twice whose answer is what came after it, though others saw it stored."""
    stored = {each.new.revision: getattr(each.answer, "revision", None) for each in notes if each.answer != NO_ANSWER}
    twice = {new for new, other in stored.items() if new != other} & {
        *stored.values(),
        *(each.expected for each in notes),
    }
    for line in notes:
        yield from (line,) * (2 if line.answer == NO_ANSWER and line.new.revision in twice else 1)


@contextmanager
def record(mistake: str = "") -> Iterator[Path]:
    """A folder in which processes that begin within the block note their requests, and make that mistake."""
    with temporary_folder() as folder, mock.patch.dict(os.environ, {_FOLDER: str(folder), _MISTAKE: mistake}):
        yield folder


def record_if_wanted(url: str) -> None:
    """If somebody is recording, note from now on what this process asks of such a store."""
    if _FOLDER not in os.environ:
        return
    kind = type(open_store(url))
    ledger = Ledger(Path(os.environ[_FOLDER]) / f"{kind.__name__}.jsonl")

    def note(line: Line) -> None:
        ledger.append(Row(what="request", key=line.new.key, reference=json.dumps(asdict(line), default=repr)))

    for name in {"swap", "swap_with"} & {*dir(kind)}:
        setattr(kind, name, note_requests(getattr(kind, name), note))
    if mistake := os.environ[_MISTAKE]:
        from lab.proof.mutants import MUTANTS  # only here: it loads every method

        _MISTAKES.enter_context(next(each for each in MUTANTS if each.name == mistake).applied())


_MISTAKES = ExitStack()
"""For as long as the process lives."""


def read(folder: Path) -> Iterator[tuple[Line, ...]]:
    """What was noted there, by store and record."""
    for path in folder.glob("*.jsonl"):
        notes: dict[str, list[Line]] = defaultdict(list)
        for row in Ledger(path).rows():
            fields = json.loads(row.reference)
            records = {name: Record.from_fields(at, store="") for name, at in fields.items() if isinstance(at, dict)}
            notes[row.key].append(Line(**fields | records))
        yield from map(pair, notes.values())
