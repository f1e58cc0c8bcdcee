"""Ticks that all beats know by one name, so that any number of beats run one schedule without a leader.

Each beat sends each tick, and the guard lets it happen once. So a tick's name, its entry and due time, must not depend
on the beat. A crontab or the sun is the same for all; Celery's intervals begin when a beat does, so here they lie on a
grid. A tick is what was due last: a beat that is late by several sends the latest, as Celery's own does.
"""

import logging
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from celery import beat
from celery.beat import BeatLazyFunc, ScheduleEntry, SchedulingError
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from celery.utils.time import maybe_make_aware
from kombu.utils.uuid import uuid

from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.binding import is_idempotent
from celery_idempotent.integration.headers import KEY_HEADER, TICK_HEADER, bound_header
from celery_idempotent.printable import say
from celery_idempotent.protocol.keys import WHOLE_CALL

logger = logging.getLogger(__name__)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = timedelta(days=1)

_LONGEST = timedelta(days=70 * 366)
"""Longer than a crontab pauses: a weekday is 29 February every 28 years, and around 2100 after 40."""

_OF_OTHER_PACKAGES = {"django_celery_beat.clockedschedule.clocked", "redbeat.schedules.rrule"}
"""Schedules that give the same due times to every beat, by name, as neither package need be installed."""

_STEPS = {crontab: timedelta(minutes=1), solar: _DAY}
"""How far apart ticks may lie; what is asked about a shorter time has no answer more often than not."""

_MEAN_HOURS = {"next_rising": 6, "next_transit": 12, "next_setting": 18}
"""Hours after solar midnight around which the events of a kind lie; none is ever half a day away."""

_Base: Any = object
"""Nothing: what is mixed in comes before a scheduler of Celery's."""


class SchedulerMixin(_Base):  # type: ignore[misc]
    """Makes a scheduler of beat name its ticks: ``class Mine(SchedulerMixin, DatabaseScheduler)``, mixin first.

    Any number of beats may then run one schedule, and an idempotent task keyed by all its arguments (the default)
    runs once for each tick. What keeps an entry of the schedule from that is logged once, as ``idempotency.tick``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(SchedulerMixin)]
        if beat.Scheduler in before:  # Celery's own calls nobody after it
            base = next(each for each in before if not issubclass(each, SchedulerMixin)).__name__
            raise PolicyError(
                "base",
                cls.__name__,
                f"{base} goes before SchedulerMixin, so no tick would have a name and each would run once for every "
                f"beat; write class {cls.__name__}(SchedulerMixin, {base})",
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ticks: dict[str, str | None] = {}
        self._reported: set[tuple[str, str]] = set()
        super().__init__(*args, **kwargs)

    def setup_schedule(self) -> None:
        """Set the schedule up, and tell what is wrong with it."""
        super().setup_schedule()
        for entry in self.schedule.values():
            self._check_tick(entry, entry.default_now())

    @property
    def schedule(self) -> Any:
        """The entries by name, all their intervals on the grid."""
        entries = super().schedule
        for entry in entries.values():
            entry.schedule = on_grid(entry.schedule)
        return entries

    @schedule.setter
    def schedule(self, entries: Any) -> None:
        super(SchedulerMixin, type(self)).schedule.__set__(self, entries)

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        """Note the entry as run: what is noted and what is sent is one tick."""
        following = super().reserve(entry)
        following.schedule = on_grid(following.schedule)
        self._ticks[entry.name] = self._check_tick(entry, following.last_run_at)
        return following

    def apply_async(self, entry: ScheduleEntry, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
        """Send the entry with its tick's name, if it has one: what was not due is an operation of its own."""
        named, now, failure = entry, entry.default_now(), None
        tick = self._check_tick(entry, now) if advance else self._ticks.pop(entry.name, None)
        if entry.task not in self.app.tasks or is_idempotent(self.app.tasks[entry.task]):
            task_id = entry.options.get("task_id") or uuid()
            # Celery marks what beat sends since 5.7.
            headers = {**(entry.options.get("headers") or {}), "celery_beat_task": True}
            if tick is not None:
                headers[TICK_HEADER] = bound_header(f"{entry.name}@{tick}", entry.task, task_id)
            named = _copy(entry, options={**entry.options, "task_id": task_id, "headers": headers})
        try:
            sent = super().apply_async(named, producer=producer, advance=False, **kwargs)
        except SchedulingError as error:
            failure = error
        if advance:
            # The note may be there for all beats to read. So it comes after the message: a beat that is killed between
            # the two repeats the tick, under its name, and the other way round nobody would send it. It is of the
            # moment of the tick, as another due time may have passed since.
            following = super().reserve(_copy(entry, schedule=_at(entry.schedule, now)))
            following.schedule = entry.schedule
        if failure is not None:
            raise failure
        return sent

    def _check_tick(self, entry: ScheduleEntry, now: datetime) -> str | None:
        """The tick of an entry; what keeps it from running once is logged."""
        tick = tick_at(entry.schedule, now)
        problem = _problem(entry, self.app.tasks.get(entry.task), tick)
        if problem is not None and (entry.name, problem) not in self._reported:
            self._reported.add((entry.name, problem))
            say(logger.warning, "tick", entry=entry.name, task=entry.task, reason=problem)
        return tick


class PersistentScheduler(SchedulerMixin, beat.PersistentScheduler):  # type: ignore[misc]  # Celery has no types
    """Celery's own scheduler, for any number of beats: ``celery beat -S celery_idempotent.beat:PersistentScheduler``.

    Each beat keeps a schedule file of its own.
    """


def _problem(entry: ScheduleEntry, task: Any, tick: str | None) -> str | None:
    """Why the entry does not run once for each tick, if it does not."""
    if entry.task == "celery.backend_cleanup":
        return None  # to delete what has expired twice is to delete it once
    if task is None:
        return "the app of this beat does not know the task; unless it is idempotent, it runs once for each beat"
    if not is_idempotent(task):
        return "the task is not idempotent, so it runs once for each beat; write base=IdempotentTask"
    policy = task.idempotency_policy
    if policy.mode != "enforce":
        return f"mode is {policy.mode!r}, so the task runs once for each beat"
    values = *(entry.args or ()), *(entry.kwargs or {}).values()
    if policy.key != WHOLE_CALL or KEY_HEADER in {**entry.options, **(entry.options.get("headers") or {})}:
        if any(isinstance(each, BeatLazyFunc) for each in values):
            return None
        return (
            "the key is the same at every tick, so the task runs once while its outcome is retained "
            f"({policy.retain_ms / 1000:g} s); write Policy(), or send an argument that changes: BeatLazyFunc"
        )
    if tick is None:
        return (
            f"two beats may disagree on the due times of {type(entry.schedule).__name__}, so the task runs once for "
            "each beat; write an interval, a crontab or solar"
        )
    return None


class OnGrid(schedule):  # type: ignore[misc]  # Celery has no types
    """An interval that begins in 1970 and not when a beat starts; all else, its pickle included, is Celery's own.

    ``relative`` days begin at midnight in the app's timezone, whatever the length of the day.
    """

    run_every: timedelta

    def latest(self, now: datetime) -> datetime:
        if self._in_days:
            return self._midnight(now.astimezone(self.tz).date())
        return now - (now - _EPOCH) % self.run_every

    def following(self, moment: datetime) -> datetime:
        if self._in_days:
            return self._midnight(moment.astimezone(self.tz).date() + self.run_every)
        return self.latest(moment) + self.run_every

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """The time until the first due time after ``last_run_at``."""
        return self.following(_utc(last_run_at)) - _utc(self.now())

    def is_due(self, last_run_at: datetime) -> Any:
        """Whether a due time has passed since ``last_run_at``, and the seconds until the next."""
        now = _utc(self.now())
        return schedstate(self.latest(now) > _utc(last_run_at), (self.following(now) - now).total_seconds())

    def __reduce__(self) -> tuple[Any, ...]:
        # What a beat keeps must be readable to one that does not know this class.
        return schedule, (self.run_every, self.relative, self.nowfun)

    @property
    def _in_days(self) -> bool:
        return bool(self.relative) and not self.run_every % _DAY

    def _midnight(self, day: date) -> datetime:
        day -= (day - _EPOCH.date()) % self.run_every
        return _utc(datetime.combine(day, time(), self.tz))


def on_grid(given: Any) -> Any:
    """An interval of Celery's own as one that all beats agree on; any other schedule as it is."""
    if type(given) is schedule and given.run_every > timedelta(0):
        return OnGrid(given.run_every, given.relative, given.nowfun, given.app)
    return given


def tick_at(given: Any, now: datetime) -> str | None:
    """The due time of the schedule's latest tick up to ``now``; None where two beats could disagree about it."""
    now = _utc(now)
    if isinstance(given, OnGrid):
        return given.latest(now).isoformat()
    if isinstance(given, solar):
        # Its time differs by less than a minute, depending on the moment from which it is looked for.
        event = _latest(given, now + timedelta(minutes=1))
        # The day by the mean sun of its place: an event near midnight is not on two days, nor two on one.
        to_noon = timedelta(days=given.lon / 360, hours=12 - _MEAN_HOURS[given.method])
        return None if event is None else (event + to_noon).date().isoformat()
    kinds = {f"{each.__module__}.{each.__qualname__}" for each in type(given).__mro__}
    due = _latest(given, now) if isinstance(given, crontab) or kinds & _OF_OTHER_PACKAGES else None
    return None if due is None else due.isoformat()


def _latest(given: BaseSchedule, now: datetime) -> datetime | None:
    """The last due time up to ``now`` of a calendar, which can only be asked what comes next after a moment."""
    back = _STEPS.get(type(given), timedelta(seconds=1))
    while (due := _following(given, now - back)) is None or due > now:
        back *= 2
        if back > _LONGEST:
            return None
    while (later := _following(given, due)) is not None and due < later <= now:
        due = later
    return due


def _following(given: BaseSchedule, moment: datetime) -> datetime | None:
    """The first due time after ``moment``."""
    if isinstance(given, crontab):
        # remaining_estimate() subtracts wall times before Celery 5.7, which is wrong across a change of the clocks.
        local = moment.astimezone(given.tz)
        start, delta, _ = _at(given, local).remaining_delta(local)
        return _utc(start + delta)
    remaining = _at(given, moment).remaining_estimate(moment)
    return None if remaining is None else moment + remaining


def _at(given: BaseSchedule, moment: datetime) -> Any:
    """The schedule at another moment than now."""
    return _copy(given, nowfun=lambda: moment)


def _copy(original: Any, **changes: Any) -> Any:
    """A copy with other attributes; ``copy`` would go by way of pickle, which drops some."""
    twin = object.__new__(type(original))
    vars(twin).update(vars(original), **changes)
    return twin


def _utc(moment: datetime) -> datetime:
    aware: datetime = maybe_make_aware(moment)
    return aware.astimezone(UTC)
