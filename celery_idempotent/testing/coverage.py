"""At which lines may a worker die? Each executed line of a task's author is tried, and the effects are counted.

:func:`~celery_idempotent.testing.assert_effect_once` tries deaths at the writes to the store and at both ends of a
body. This tries what lies between, also of tasks that know nothing of this library.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from linecache import getline
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from celery import Task

from celery_idempotent.integration.operating.watching import shown, watch_effects
from celery_idempotent.testing.deaths import MortalThread, Point, Source, Statement, When, unraised
from celery_idempotent.testing.effects import Promise, checked
from celery_idempotent.testing.scenarios import (
    Deliveries,
    DeliveryResult,
    Message,
    Scenarios,
    ScenarioStore,
    WorkerDied,
)
from celery_idempotent.testing.stores import installed
from celery_idempotent.troubleshooting import with_link

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

    __slots__ = ("deaths", "notes", "task")

    task: str
    #: In the order of their execution.
    deaths: tuple[Death, ...]
    #: What left the process without a key, and what was not tried.
    notes: tuple[str, ...]

    def __new__(cls, task: str, deaths: Sequence[Death], notes: Sequence[str] = ()) -> Self:
        """A report of ``task``."""
        report = super().__new__(cls, "\n".join((*_lines(task, deaths), *(f"* {each}" for each in notes))))
        report.task, report.deaths, report.notes = task, tuple(deaths), tuple(notes)
        return report

    def __repr__(self) -> str:
        return f"<effect coverage of {self.task}: {int(self.percent)} %>"

    @property
    def is_complete(self) -> bool:
        """Whether each death had the effects that were promised."""
        return bool(self.deaths) and not any(each.cause for each in self.deaths)

    @property
    def percent(self) -> float:
        """How many of the deaths had the effects that were promised, in percent; 0 where there was none."""
        return percent_of(self.deaths)


def percent_of(deaths: Sequence[Death]) -> float:
    """How many had the effects that were promised, in percent; 0 where there was none."""
    return 100 * sum(not each.cause for each in deaths) / len(deaths) if deaths else 0.0


def _lines(task: str, deaths: Sequence[Death]) -> Iterator[str]:
    faults = dict.fromkeys(_place(each.path, each.line) for each in deaths if not each.ok)
    mend = f"; mend {', '.join(faults)}" if faults else ""
    yield f"{task}: {int(percent_of(deaths))} % of {len(deaths)} deaths are safe{mend}"
    for path, rows in margins(deaths).items():
        if faults and {said for _, _, said in rows} == {"ok"}:
            yield f"\n{shown(path)}: ok"
            continue
        yield f"\n{shown(path)}"
        width = min(max(len(source) for _, source, _ in rows), _WIDTH)
        yield from (f"{line:5}  {source:<{width}}  {said}" for line, source, said in rows)


def _place(path: str, line: int) -> str:
    return f"{Path(path).name}:{line}"


def margins(deaths: Sequence[Death]) -> dict[str, list[tuple[int, str, str]]]:
    """By path: each line that was tried, its source, and what became of the deaths there."""
    found: dict[str, dict[int, list[str]]] = {}
    for death in sorted(deaths, key=lambda death: (death.path, death.line, death.when == "after")):
        said = found.setdefault(death.path, {}).setdefault(death.line, [])
        if (new := _said_of(death)) and new not in said:
            said.append(new)
    return {
        path: [(line, getline(path, line).rstrip(), ", ".join(said) or "ok") for line, said in rows.items()]
        for path, rows in found.items()
    }


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
    checked(task, promise)
    if isinstance(source, str):
        raise TypeError(with_link(f"source={source!r}: must be a list of packages or paths", "errors#test-argument"))
    with (
        closing(ScenarioStore(task.app.conf.get("idempotency_store"))) as store,
        Deliveries.of(task) as deliveries,
        installed(store, task.app),
        unraised(),
    ):
        ours = Source(*(source or [type(deliveries.task).__module__.partition(".")[0]]))
        trials = _Trials(Scenarios(deliveries, store), ours, args, kwargs, effects)
        trials.run()
        with watch_effects() as seen:
            expected = trials.run(learns=True)
        if expected < 1:
            raise ValueError(with_link(trials.explain_silence(), "errors#test-argument"))
        search = _Search(trials, expected, promise)
        tried = list(dict.fromkeys(point for point in trials.points if point.number == 1))
        if not tried:
            raise ValueError(with_link(f"source={source!r}: no line of it was executed", "errors#test-argument"))
        for done, point in enumerate(tried, 1):
            search.try_point(point)
            on_progress(done, len(tried))
        if (again := trials.run()) != expected:
            depend = (
                f"a quiet run had {expected} effects before all deaths, and {again} after them: args= and effects= must"
            )
            raise ValueError(with_link(f"{depend} be about one trial", "errors#test-argument"))
    notes = [] if trials.scenarios.redelivers else [_LOST]
    notes += [str(each) for each in seen if not each.has_key]
    notes += [f"{path}:{line} starts a thread, in which nobody dies" for path, line in trials.threads]
    return EffectCoverage(task.name, search.deaths(), [*notes, *list(trials.failures)[:3]])


@dataclass
class _Search:
    """Which statement is to blame for each change of the effects, from one death to the next?"""

    trials: "_Trials"
    expected: int
    promise: Promise
    effects: dict[Point, int | None] = field(default_factory=dict)
    causes: dict[Point, Statement] = field(default_factory=dict)

    def try_point(self, point: Point) -> None:
        before = next(reversed(self.effects), None)
        found = self.effects[point] = self.trials.effects_of_death(point)
        if found is not None and _keeps(found, self.expected, self.promise):
            return
        if before in self.causes and self.effects[before] == found:
            self.causes[point] = self.causes[before]
        else:
            self.causes[point] = self._culprit(before, point, found)

    def _culprit(self, before: Point | None, point: Point, found: int | None) -> Statement:
        """The statement at which the effects became ``found``; later passes of a loop may lie between."""
        if before is None or found is None:
            return point.statement
        points = self.trials.points
        low, high = points.index(before), points.index(point)
        while high - low > 1:
            middle = (low + high) // 2
            if self.trials.effects_of_death(points[middle]) == self.effects[before]:
                low = middle
            else:
                high = middle
        return self._innermost_at(low)

    def _innermost_at(self, index: int) -> Statement:
        """The innermost statement that was being executed after the point of that number."""
        inside: list[Statement] = []
        for point in self.trials.points[: index + 1]:
            if point.when == "before":
                inside.append(point.statement)
            elif point.statement in inside:
                inside.remove(point.statement)
        return inside[-1] if inside else self.trials.points[index].statement

    def deaths(self) -> tuple[Death, ...]:
        blamed = {cause: self._witness(cause) for cause in self.causes.values()}
        return tuple(
            Death(
                point.statement.path,
                point.statement.line,
                point.when,
                effects,
                self.expected,
                point not in blamed.values(),
                _place(cause.path, cause.line) if (cause := self.causes.get(point)) else "",
            )
            for point, effects in self.effects.items()
        )

    def _witness(self, cause: Statement) -> Point:
        """The death at the blamed statement itself: the first with wrong effects, or else the last."""
        own = [point for point in self.effects if point.statement == cause]
        return next((point for point in own if self.causes.get(point) == cause), own[-1])


def _keeps(effects: int, expected: int, promise: Promise) -> bool:
    too_many, too_few = effects > expected, effects < expected
    return not (too_many and promise != "at least once") and not (too_few and promise != "at most once")


@dataclass
class _Trials:
    scenarios: Scenarios
    source: Source
    args: Callable[[int], Sequence[Any]]
    kwargs: Callable[[int], Mapping[str, Any]]
    effects: Callable[[int], int | Sized]
    numbers: Iterator[int] = field(default_factory=count)
    points: list[Point] = field(default_factory=list)
    threads: dict[tuple[str, int], None] = field(default_factory=dict)
    endings: list[DeliveryResult] = field(default_factory=list)
    failures: dict[str, None] = field(default_factory=dict)
    dead: MortalThread | None = None

    def effects_of_death(self, point: Point) -> int | None:
        for _ in range(_TRIALS):
            found = self.run(point)
            if self.dead is not None:
                if self.endings[-1].how == "FAILURE":
                    self.failures.setdefault(f"After a death, the next delivery raised {self.endings[-1].value!r}")
                return found
        return None

    def run(self, fatal: Point | None = None, *, learns: bool = False) -> int:
        """The effects of a trial, in which a worker dies at ``fatal``, if there is one."""
        trial, self.dead = next(self.numbers), None
        before = self._count(trial)
        self.scenarios.store.plan(None)
        message = self.scenarios.deliveries.message(f"coverage:{uuid4()}", *self.args(trial), **self.kwargs(trial))
        try:
            self.endings = self.scenarios.deliver(message, partial(self._deliver_once, fatal, learns))
            return self._count(trial) - before
        finally:
            self._unwind()

    def _unwind(self) -> None:
        if self.dead is not None:
            self.dead.unwind()

    def explain_silence(self) -> str:
        name, ending = self.scenarios.deliveries.task.name, self.endings[-1]
        why = "" if ending.how == "SUCCESS" else f"; it ended {ending.how}: {ending.value!r}"
        return (
            f"effects= counted none after a quiet run of {name}{why}: let it count those of its trial, and let args= "
            "make arguments with which the body succeeds"
        )

    def _deliver_once(
        self, fatal: Point | None, learns: bool, message: Message
    ) -> tuple[DeliveryResult, list[Message]]:
        is_traced = learns or (fatal is not None and self.dead is None)
        call = partial(self.scenarios.deliver_once, message)
        execution = MortalThread(call, self.source if is_traced else None, fatal, self.scenarios.store.bury)
        execution.start_and_wait()
        if learns:
            self.points += execution.points
            self.threads |= execution.threads
        if execution.is_dead:
            self.dead = execution
            return DeliveryResult("DIED", WorkerDied()), self.scenarios.deliveries.published_by(message)
        if execution.error is not None:
            raise execution.error
        delivered: tuple[DeliveryResult, list[Message]] = execution.result
        return delivered

    def _count(self, trial: int) -> int:
        found: object = self.effects(trial)
        if not isinstance(found, int | Sized):
            told = f"effects={self.effects!r}: gave {found!r}, and must give a number or something with a length"
            raise TypeError(with_link(told, "errors#test-argument"))
        return len(found) if isinstance(found, Sized) else found
