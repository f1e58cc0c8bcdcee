"""What the whole store holds, counted beside the views: a count reads every record, and a view must not wait for it."""

import time
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from threading import Event, Lock, Thread

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


@dataclass(frozen=True, slots=True)
class Counted:
    """The records of one moment: their summary, and who waits for a person."""

    summary: search.Summary
    unknown: Oldest
    abandoned: Oldest


OPEN = (Status.UNKNOWN, Status.IN_PROGRESS)
"""What can wait for a person; a store that has an index finds it without reading the rest."""


def counted(
    runtime: Runtime, read: Callable[[int], object] = lambda count: None, statuses: Sequence[Status | None] = (None,)
) -> Counted:
    """Reads the records of ``statuses`` once; ``read`` is told now and then how many it was.

    Abandoned is what can be released: its attempt never ended, and nobody has taken over since.
    """
    store = runtime.store
    now, unknown, abandoned = store.now(), Oldest(), Oldest()

    def sorted_out() -> Iterator[Record]:
        scanned = chain.from_iterable(store.scan(status=each) for each in statuses)
        for number, record in enumerate(scanned, 1):
            if record.status is Status.UNKNOWN:
                unknown.add(record)
            elif record.status is Status.IN_PROGRESS and Action.RELEASE in fitting(
                record, grace=runtime.policy_of(record).grace_ms, now=now
            ):
                abandoned.add(record)
            if number % 1000 == 0:
                read(number)
            yield record

    return Counted(search.summarised(sorted_out(), now), unknown, abandoned)


def exposed(found: Counted, now: int) -> str:
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


@dataclass(frozen=True, slots=True)
class View:
    """The last count, its age in seconds, and how many records the next one has read, as far as there is one."""

    counted: Counted | None
    age: float
    so_far: int | None


class Overview:
    """The last count, shown for ``fresh`` seconds without another, and one thread that makes the next."""

    def __init__(
        self,
        runtime: Runtime,
        clock: Callable[[], float] = time.monotonic,
        *,
        statuses: Sequence[Status | None] = (None,),
        fresh: float = 5.0,
    ) -> None:
        self._count_all = partial(counted, runtime, self._read, statuses)
        self._fresh = fresh
        self._clock = clock
        self._lock = Lock()
        self._last: tuple[Counted, float] | None = None
        self._stale_at = clock()
        self._failed: BaseException | None = None
        self._under_way: Event | None = None
        self._so_far = 0

    def look(self, patience: float) -> View:
        """The last count, or the next if it is over within ``patience`` seconds.

        Raises what a count has raised since, once: a store that takes longer to fail is told of by the next look.
        """
        with self._lock:
            if self._under_way is None and self._failed is None and self._clock() >= self._stale_at:
                self._under_way, self._so_far = Event(), 0
                # Nobody waits for it at the end of the process.
                Thread(target=self._count, args=(self._under_way,), name="idempotency-overview", daemon=True).start()
            under_way = self._under_way
        if under_way is not None:
            under_way.wait(patience)
        with self._lock:
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            so_far = None if self._under_way is None else self._so_far
            last, at = self._last or (None, self._clock())
            return View(last, self._clock() - at, so_far)

    def judged(self, keys: Collection[str]) -> None:
        """Records under ``keys`` wait no longer; count again at the next look."""
        with self._lock:
            self._stale_at = self._clock()
            if self._last is not None:
                last, at = self._last
                changed = replace(last, unknown=last.unknown.without(keys), abandoned=last.abandoned.without(keys))
                self._last = changed, at

    def _count(self, over: Event) -> None:
        began = self._clock()
        try:
            found = self._count_all()
        except BaseException as error:  # noqa: BLE001 - whoever looks raises it
            with self._lock:
                self._failed, self._under_way = error, None
        else:
            with self._lock:
                now, self._under_way = self._clock(), None
                self._last = found, now
                self._stale_at = now + max(self._fresh, (now - began) * _FRESH_FOR_EACH_SECOND)
        over.set()

    def _read(self, count: int) -> None:
        self._so_far = count
