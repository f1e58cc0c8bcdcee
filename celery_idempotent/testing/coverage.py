"""At which lines may a worker die? Each executed line of a task's author is tried, and the effects are counted.

:func:`~celery_idempotent.testing.assert_effect_once` tries deaths at the writes to the store and at both ends of a
body. This tries what lies between, also of tasks that know nothing of this library.
"""

from bisect import bisect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import count, groupby
from linecache import getline
from pathlib import Path
from types import CodeType
from typing import Any, Self

from celery import Task

from celery_idempotent.integration.operating.watching import shown, watch_effects
from celery_idempotent.testing.deaths import MortalThread, Point, Statement, When, authors, without_unraisable
from celery_idempotent.testing.effects import Promise, check_arguments, keeps, refusal
from celery_idempotent.testing.scenarios import Deliveries, DeliveryResult, Message

_WIDTH = 88
"""Columns of source in a report, at most."""

_LOST = (
    "Its message is lost with its worker: set task_acks_late and task_reject_on_worker_lost, in the test's app as in "
    "production, before the task is declared"
)

_TRIALS = 3
"""How often a line is tried that a trial did not come by."""


@dataclass(frozen=True, slots=True)
class Death:
    """A death right before or right after a statement, and how many effects there were in the end."""

    path: str
    #: The statement's first line.
    line: int
    when: When
    #: None where no trial came by the line again.
    effects: int | None
    expected: int
    #: False where the line is to blame: up to there, a death had other effects.
    ok: bool
    #: Where effects are not as expected: file and line that are to blame, which may be one before.
    cause: str = ""


class EffectCoverage(str):
    """What :func:`effect_coverage` found: a text, the source with its margins, that knows its figures.

    It is a ``str``, since pytest cuts short what else stands behind the comma of an assertion.
    """

    __slots__ = ("deaths", "notes", "percent", "task")

    task: str
    #: In the order of their execution.
    deaths: tuple[Death, ...]
    #: What left the process without a key, and what was not tried.
    notes: tuple[str, ...]
    #: How many of the deaths had the effects that were promised, in percent; 0 where there was none.
    percent: float

    def __new__(cls, task: str, deaths: Sequence[Death], notes: Sequence[str] = ()) -> Self:
        """A report of ``task``."""
        percent = 100 * sum(not each.cause for each in deaths) / len(deaths) if deaths else 0.0
        lines = (f"{task}: {int(percent)} % of {len(deaths)} deaths are safe", *_lines(deaths))
        report = super().__new__(cls, "".join(lines) + "".join(f"\n* {each}" for each in notes))
        report.task, report.deaths, report.notes, report.percent = task, tuple(deaths), tuple(notes), percent
        return report

    def __repr__(self) -> str:
        return f"<effect coverage of {self.task}: {int(self.percent)} %>"

    @property
    def is_complete(self) -> bool:
        """Whether each death had the effects that were promised."""
        return self.percent == 100


def _lines(deaths: Sequence[Death]) -> Iterator[str]:
    faults = dict.fromkeys(each.cause for each in deaths if each.cause)
    yield f"; mend {', '.join(faults)}" if faults else ""
    for path, rows in margins(deaths).items():
        yield f"\n\n{shown(path)}"
        if faults and all(said == "ok" for _, _, said in rows):
            yield ": ok"
            continue
        width = min(max(len(source) for _, source, _ in rows), _WIDTH)
        yield from (f"\n{line:5}  {source:<{width}}  {said}" for line, source, said in rows)


def margins(deaths: Sequence[Death]) -> dict[str, list[tuple[int, str, str]]]:
    """By path: each line that was tried, its source, and what became of the deaths there."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    in_order = sorted(deaths, key=lambda death: (death.path, death.line, death.when == "after"))
    for (path, line), those in groupby(in_order, lambda death: (death.path, death.line)):
        said = ", ".join(dict.fromkeys(filter(None, map(_said_of, those))))
        found.setdefault(path, []).append((line, getline(path, line).rstrip(), said or "ok"))
    return found


def _said_of(death: Death) -> str:
    if death.effects is None:
        return f"died {death.when}: not reached again"
    if death.ok:
        return f"ok but for {death.cause}" if death.cause and death.when == "after" else ""
    if not death.cause:
        return "its effect is repeated"
    return f"died {death.when}: {death.effects}x instead of {death.expected}x"


def effect_coverage(
    task: Task,
    args: Callable[[int], Sequence[Any]] = lambda trial: (),
    *,
    effects: Callable[[int], int | Sized],
    kwargs: Callable[[int], Mapping[str, Any]] = lambda trial: {},
    promise: Promise = "exactly once",
    source: Sequence[str] = (),
    on_progress: Callable[[int, int], object] = lambda done, of: None,
) -> EffectCoverage:
    """Kill ``task`` before and after each executed line of its author's, deliver it again, and count its effects.

    The task is delivered by Celery's own tracer in this process, on a store in memory, without a broker or a backend.
    It runs to its end twice, so that what happens once per process has happened; the second time its lines are learnt.
    Then there is a trial for each side of each line: the worker dies there, at its first pass, and the message is
    delivered again as a broker would until nothing is left to deliver. It works for plain Celery tasks, too.

    A dead worker is a thread that stands still at the line until the effects are counted, or for a second. None of its
    ``finally`` blocks and handlers runs. Each delivery has a thread of its own: it does not see what a test has written
    in a transaction that is still open. Deaths within C functions, in other threads of a body and in other processes
    are not tried.

    A line is to blame where its death has other effects than the death a moment earlier. Whatever comes after it is
    repeated with it, and is not to blame.

    Args:
        task: Your task; nothing of it is replaced but what surrounds its body.
        args: Makes the positional arguments of a trial, of which each is an operation of its own.
        effects: How many effects a trial has had: a number, or something with a length. What was there before it does
            not count.
        kwargs: Makes the keyword arguments of a trial.
        promise: ``"exactly once"``: each death has as many effects as a quiet run; ``"at least once"``: it may have
            more; ``"at most once"``: it may have fewer.
        source: Packages, modules or paths whose lines are tried. Where it is empty: the top package of the task's
            module, without what is installed.
        on_progress: Called after each trial with the number of those done, and of all.

    Returns:
        The report. ``assert report.is_complete, report`` shows its source with the lines that are not safe.

    Raises:
        TypeError: ``task`` is not a task, ``source`` is a text, or ``effects`` does not count.
        ValueError: ``promise`` is not one of the three, a quiet run has no effect, one trial changes what another
            has, or no line of ``source`` was executed.
    """
    __tracebackhide__ = True
    check_arguments(task, promise)
    if isinstance(source, str):
        raise TypeError(refusal(f"source={source!r}: must be a list of packages or paths"))
    with Deliveries.of(task) as deliveries, without_unraisable():
        is_authors = authors(*(source or [type(deliveries.task).__module__.partition(".")[0]]))
        trials = _Trials(deliveries, is_authors, args, kwargs, effects)
        trials.run()
        with watch_effects() as seen:
            quiet = trials.run()
        if quiet.effects < 1:
            raise ValueError(refusal(_silence(task, quiet.endings[-1])))
        trials.points = [point for each in quiet.workers for point in each.points]
        tried = [each for each in trials.points if each.number == 1]
        if not tried:
            raise ValueError(refusal(f"source={source!r}: no line of it was executed"))
        for done, point in enumerate(tried, 1):
            trials.found[point] = trials.effects_of_death(point)
            on_progress(done, len(tried))
        deaths = trials.deaths(quiet.effects, promise)
        if (again := trials.run().effects) != quiet.effects:
            depend = f"a quiet run had {quiet.effects} effects before all deaths, and {again} after them"
            raise ValueError(refusal(f"{depend}: args= and effects= must be about one trial"))
    notes = [
        *([] if deliveries.redelivers else [_LOST]),
        *(str(each) for each in seen if not each.has_key),
        *dict.fromkeys(
            f"{place} starts a thread, in which nobody dies" for each in quiet.workers for place in each.threads
        ),
        *list(trials.failures)[:3],
    ]
    return EffectCoverage(task.name, deaths, notes)


def _silence(task: Task, ending: DeliveryResult) -> str:
    why = "" if ending.how == "SUCCESS" else f"; it ended {ending.how}: {ending.value!r}"
    return (
        f"effects= counted none after a quiet run of {task.name}{why}: let it count those of its trial, and let args= "
        "make arguments with which the body succeeds"
    )


@dataclass(frozen=True)
class _Trial:
    """What came of an operation."""

    effects: int
    endings: Sequence[DeliveryResult]
    workers: Sequence[MortalThread]


@dataclass
class _Trials:
    """Operations of one task, in each of which a worker may die once."""

    deliveries: Deliveries
    is_authors: Callable[[CodeType], bool]
    args: Callable[[int], Sequence[Any]]
    kwargs: Callable[[int], Mapping[str, Any]]
    effects: Callable[[int], int | Sized]
    numbers: Iterator[int] = field(default_factory=count)
    #: What a quiet trial came by, in order.
    points: list[Point] = field(default_factory=list)
    #: The effects of a death at each first pass.
    found: dict[Point, int | None] = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)

    def run(self, fatal: Point | None = None) -> _Trial:
        """A trial in which a worker dies at ``fatal``, if there is one."""
        number = next(self.numbers)
        before = self._count(number)
        workers: list[MortalThread] = []

        def deliver_once(message: Message) -> DeliveryResult:
            is_authors = None if any(each.is_dead for each in workers) else self.is_authors
            workers.append(MortalThread(self.deliveries, message, is_authors, fatal))
            return workers[-1].start_and_wait()

        message = self.deliveries.begin(self.args(number), self.kwargs(number))
        try:
            endings = self.deliveries.deliver(message, deliver_once)
            return _Trial(self._count(number) - before, endings, workers)
        finally:
            for each in workers:
                each.unwind()

    def effects_of_death(self, point: Point) -> int | None:
        for _ in range(_TRIALS):
            trial = self.run(point)
            if any(each.is_dead for each in trial.workers):
                if trial.endings[-1].how == "FAILURE":
                    note = f"After a death, the next delivery raised {trial.endings[-1].value!r}"
                    self.failures.setdefault(note)
                return trial.effects
        return None

    def deaths(self, expected: int, promise: Promise) -> list[Death]:
        """Each death with what is to blame for it, where it is not as promised."""
        right = {each for each, many in self.found.items() if many is not None and keeps(many, expected, promise)}
        causes = self._causes(right)
        last = {each.statement: each for each in self.found}
        first_wrong = {each.statement: each for each in reversed([*causes]) if causes[each] == each.statement}
        blamed = {(last | first_wrong)[each] for each in causes.values()}
        places = {each: f"{Path(cause.path).name}:{cause.line}" for each, cause in causes.items()}
        return [
            Death(*each.statement[:2], each.when, many, expected, each not in blamed, places.get(each, ""))
            for each, many in self.found.items()
        ]

    def _causes(self, right: Container[Point | None]) -> dict[Point, Statement]:
        causes: dict[Point, Statement] = {}
        for before, point in zip((None, *self.found), self.found, strict=False):
            if point in right:
                continue
            if before in causes and self.found[before] == self.found[point]:
                causes[point] = causes[before]
            else:
                causes[point] = self._culprit(before, point)
        return causes

    def _culprit(self, before: Point | None, point: Point) -> Statement:
        """The statement with which the effects stop to be those of ``before``; passes of a loop may lie between."""
        if before is None or self.found[point] is None:
            return point.statement
        first, usual = self.points.index(before) + 1, self.found[before]
        between = self.points[first : self.points.index(point)]
        same = bisect(between, False, key=lambda each: self.effects_of_death(each) != usual)
        return _innermost(self.points[: first + same])

    def _count(self, trial: int) -> int:
        found: object = self.effects(trial)
        if not isinstance(found, int | Sized):
            gave = f"effects={self.effects!r}: gave {found!r}, and must give a number or something with a length"
            raise TypeError(refusal(gave))
        return len(found) if isinstance(found, Sized) else found


def _innermost(points: Sequence[Point]) -> Statement:
    """The innermost statement that is being executed after the last of them."""
    inside: list[Statement] = []
    for point in points:
        if point.when == "before":
            inside.append(point.statement)
        elif point.statement in inside:
            inside.remove(point.statement)
    return inside[-1] if inside else points[-1].statement
