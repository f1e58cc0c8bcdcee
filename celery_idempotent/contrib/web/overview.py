"""What the whole store holds, counted beside the views: a count reads every record, and a view must not wait for it."""

import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from threading import Condition, Thread
from typing import NamedTuple

from celery_idempotent.engine import search
from celery_idempotent.engine.verdicts import fitting
from celery_idempotent.integration.settings import Runtime
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import Action

MOST_NAMED = 10
"""Records of each kind that are named as waiting for a person."""

_FRESH_FOR_EACH_SECOND = 10
"""A count that takes long is shown for longer, so that counting never becomes all that a store does."""


@dataclass(slots=True)
class Oldest:
    """How many records there are of a kind, and those that were not written for longest, the oldest first."""

    count: int = 0
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Count ``record``; it is kept if it is among the oldest."""
        self.count += 1
        insort(self.records, record, key=attrgetter("updated_at"))
        del self.records[MOST_NAMED:]

    def without(self, keys: Collection[str]) -> "Oldest":
        """Apart from those under ``keys``."""
        left = [each for each in self.records if each.key not in keys]
        return Oldest(self.count - len(self.records) + len(left), left)


class Counted(NamedTuple):
    """The records of one moment: their summary, and who waits for a person."""

    summary: search.Summary
    unknown: Oldest
    abandoned: Oldest


OPEN = (Status.UNKNOWN, Status.IN_PROGRESS)
"""What can wait for a person; a store that has an index finds it without reading the rest."""


def count(runtime: Runtime, records: Iterable[Record]) -> Counted:
    """Reads ``records`` once. Abandoned is what can be released: its attempt never ended, nor has another begun."""
    now, unknown, abandoned = runtime.store.now(), Oldest(), Oldest()

    def sorted_out() -> Iterator[Record]:
        for record in records:
            if record.status is Status.UNKNOWN:
                unknown.add(record)
            elif record.status is Status.IN_PROGRESS and Action.RELEASE in fitting(
                record, grace=runtime.grace, now=now
            ):
                abandoned.add(record)
            yield record

    return Counted(search.summarised(sorted_out(), now), unknown, abandoned)


def prometheus_text(found: Counted, now: int) -> str:
    """What waits for a person at ``now``, in the text format of Prometheus."""
    lines: list[str] = []
    for name, tells in (
        ("operations", "Operations that wait for a person"),
        ("operations_age_seconds", "For how long the oldest of them was not written"),
    ):
        lines += [f"# HELP celery_idempotent_{name} {tells}", f"# TYPE celery_idempotent_{name} gauge"]
        for state, kind in (("unknown", found.unknown), ("abandoned", found.abandoned)):
            age = max(now - kind.records[0].updated_at, 0) / 1000 if kind.count else 0
            value = kind.count if name == "operations" else age
            lines.append(f'celery_idempotent_{name}{{state="{state}"}} {value}')
    return "\n".join([*lines, ""])


class View(NamedTuple):
    """The last count, its age in seconds, and how many records the next one has read, as far as there is one."""

    counted: Counted | None
    age: float
    so_far: int | None


@dataclass(slots=True, eq=False)
class Overview:
    """The last count, shown for ``fresh`` seconds without another, and one thread that makes the next."""

    runtime: Runtime
    clock: Callable[[], float] = time.monotonic
    statuses: Sequence[Status | None] = (None,)
    fresh: float = 5.0
    _change: Condition = field(default_factory=Condition)
    _last: Counted | None = None
    _at: float = 0.0
    _stale_at: float = 0.0
    _so_far: int | None = None
    _error: BaseException | None = None

    def look(self, patience: float) -> View:
        """The last count, or the next if it is over within ``patience`` seconds.

        Raises what a count has raised since, once: a store that takes longer to fail is told of by the next look.
        """
        with self._change:
            is_stale = self._last is None or self.clock() >= self._stale_at
            if is_stale and self._so_far is None and self._error is None:
                self._so_far = 0
                # Nobody waits for it at the end of the process.
                Thread(target=self._count, name="idempotency-overview", daemon=True).start()
            self._change.wait_for(lambda: self._so_far is None, patience)
            error, self._error = self._error, None
            if error is not None:
                raise error
            return View(self._last, self.clock() - self._at if self._last else 0.0, self._so_far)

    def leave_out(self, keys: Collection[str]) -> None:
        """Records under ``keys`` wait no longer; count again at the next look."""
        with self._change:
            if (last := self._last) is not None:
                unknown, abandoned = last.unknown.without(keys), last.abandoned.without(keys)
                self._last, self._stale_at = Counted(last.summary, unknown, abandoned), self.clock()

    def _count(self) -> None:
        began, found, error = self.clock(), None, None
        try:
            found = count(self.runtime, self._records())
        except BaseException as raised:  # noqa: BLE001 - whoever looks raises it
            error = raised
        with self._change:
            self._so_far, self._error = None, error
            if found is not None:
                self._last, self._at = found, self.clock()
                self._stale_at = self._at + max(self.fresh, (self._at - began) * _FRESH_FOR_EACH_SECOND)
            self._change.notify_all()

    def _records(self) -> Iterator[Record]:
        scanned = chain.from_iterable(self.runtime.store.scan(status=each) for each in self.statuses)
        for self._so_far, record in enumerate(scanned, 1):
            yield record
