"""Ticks of beat: every beat knows each by one name, sends each once, and loses none while one beat lives."""
# mypy: allow-untyped-decorators

import logging
import pickle
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, beat
from celery.beat import BeatLazyFunc, ScheduleEntry, SchedulingError
from celery.schedules import BaseSchedule, crontab, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_idempotent import IdempotentTask, Policy, PolicyError
from celery_idempotent.beat import PersistentScheduler, SchedulerMixin
from celery_idempotent.integration.headers import TICK_HEADER, tick_in
from celery_idempotent.integration.messages.ticks import OnGrid, on_grid, tick_at
from tests.support.celeries import since_celery
from tests.support.deliveries import an_app, deliver, published, redeliver
from tests.support.packages import needs

NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
moments = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))


@cache
def _app(timezone: str = "UTC") -> Celery:
    """Nobody changes it, and to make one takes longer than a property needs for an example."""
    app = Celery("beats", set_as_current=False, broker="memory://")
    app.conf.timezone = timezone
    return app


class Clock(Celery):  # Celery has no types
    """An app whose time is what a test says."""

    at = NOON

    def now(self) -> datetime:
        return self.at


class Killed(BaseException):
    """SIGKILL, as nothing in a beat catches it."""


class Recorder(SchedulerMixin, beat.Scheduler):
    """A beat that notes what it would publish."""

    producer = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[str | None] = []
        self.is_killed_in_sending = False
        super().__init__(*args, **kwargs)

    def send_task(self, name: str, *_: Any, headers: Mapping[str, Any], task_id: str, **kwargs: Any) -> None:
        if self.is_killed_in_sending:
            raise Killed
        self.sent.append(tick_in(headers, name, task_id))


def _clock() -> Clock:
    return Clock("beats", set_as_current=False, broker="memory://")


def _beat(
    every: Any, at: datetime = NOON, kind: type[Recorder] = Recorder, app: Clock | None = None, **entry: Any
) -> Recorder:
    app = app or _clock()
    app.at = at
    app.conf.beat_schedule = {"report": {"task": "of.another.app", "schedule": every, **entry}}
    return kind(app)


# Due times


@given(moments, st.timedeltas(timedelta(microseconds=1), timedelta(days=400)))
def test_an_interval_has_the_same_due_times_whenever_it_is_asked(now: datetime, every: timedelta) -> None:
    """Of any moment, the latest due time is one of the grid's, and no other lies between."""
    grid = OnGrid(every, app=_app())
    latest = grid.latest(now)

    assert latest <= now < grid.following(now) == latest + every
    assert (latest - datetime(1970, 1, 1, tzinfo=UTC)) % every == timedelta(0)
    assert grid.latest(latest) == latest


@given(moments, st.integers(1, 40), st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Beirut"]))
def test_relative_days_begin_at_midnight(now: datetime, days: int, zone: str) -> None:
    """Wherever the app is, and however long the day."""
    grid = OnGrid(timedelta(days=days), relative=True, app=_app(zone))
    latest, following = grid.latest(now), grid.following(now)

    assert latest <= now < following
    assert grid.latest(following) == following
    assert grid.latest(following - timedelta(microseconds=1)) == latest
    days_between = following.astimezone(ZoneInfo(zone)).date() - latest.astimezone(ZoneInfo(zone)).date()
    assert days_between == timedelta(days=days)


def test_a_relative_day_of_23_hours_is_one_day() -> None:
    """Clocks go forward on 29 March 2026 in Berlin."""
    grid = OnGrid(timedelta(days=1), relative=True, app=_app("Europe/Berlin"))
    day = grid.latest(datetime(2026, 3, 29, 12, tzinfo=BERLIN))

    assert day == datetime(2026, 3, 29, tzinfo=BERLIN)
    assert grid.following(day) - day == timedelta(hours=23)


survives_days_without_the_event = since_celery("5.7", "schedules that survive a day without the event")
cronspecs = st.fixed_dictionaries(
    {},
    optional={
        "minute": st.sampled_from(["*", "*/7", "0", "30", "5,59"]),
        "hour": st.sampled_from(["*", "*/5", "2", "0,23"]),
        "day_of_week": st.sampled_from(["*", "1", "6,0"]),
        "day_of_month": st.sampled_from(["*", "1", "29-31"]),
        "month_of_year": st.sampled_from(["*", "2", "*/5"]),
    },
)


@given(moments, cronspecs, st.timedeltas(timedelta(0), timedelta(days=3)))
def test_a_crontab_has_the_same_due_time_whenever_it_is_asked(
    now: datetime, spec: dict[str, str], later: timedelta
) -> None:
    """What a beat calls the tick at its due time, one calls it that comes later; Celery agrees on when that is."""
    cron = crontab(**spec, app=_app())
    name = tick_at(cron, now)
    assert name is not None
    due = datetime.fromisoformat(name)

    assert tick_at(cron, due) == name
    assert tick_at(cron, due - timedelta(microseconds=1)) != name
    clock = crontab(**spec, app=_app(), nowfun=lambda: due)
    assert due <= now
    assert clock.is_due(due - timedelta(seconds=1)).is_due
    assert not clock.is_due(due).is_due
    next_name = tick_at(cron, now + later)
    assert next_name == name or (next_name is not None and datetime.fromisoformat(next_name) > now)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe"])
@pytest.mark.parametrize("spec", [{"minute": "*/15"}, {"minute": "30", "hour": "2"}, {"minute": "0", "hour": "*/2"}])
@pytest.mark.parametrize("begin", [datetime(2017, 10, 14), datetime(2026, 3, 28), datetime(2026, 10, 24)])
def test_beats_agree_while_the_clocks_change(zone: str, spec: dict[str, str], begin: datetime) -> None:
    """Through the hour that is left out or comes twice, ticks have one name each, in order, however late one asks."""
    cron = crontab(**spec, app=_app(zone))
    begin = begin.replace(tzinfo=UTC)
    names = [tick_at(cron, begin + timedelta(minutes=15 * n + n % 2)) for n in range(4 * 72)]
    ticks = sorted(set(filter(None, names)))

    assert names == sorted(filter(None, names))
    local = [datetime.fromisoformat(each).astimezone(ZoneInfo(zone)) for each in ticks]
    assert len({each.replace(fold=0, tzinfo=None) for each in local}) == len(local)
    assert len({each.date() for each in local}) >= 3


@needs("ephem")
@pytest.mark.parametrize("event", ["dawn_astronomical", "sunrise", "solar_noon", "sunset"])
@pytest.mark.parametrize(
    ("lat", "lon"),
    [
        (40.7, -74),
        (-36.8, 174.8),
        (0, -180),
        # In July, sunset comes back over midnight there, and two of them are on one day of the clock.
        pytest.param(65.76, -18, marks=survives_days_without_the_event),
        pytest.param(69.6, 18.9, marks=survives_days_without_the_event),
    ],
)
def test_each_event_of_the_sun_is_one_tick(event: str, lat: float, lon: float) -> None:
    """Through a year, also where the sun stays away for weeks, and although no event is found at one moment twice."""
    from celery.schedules import solar

    sun = solar(event, lat, lon, app=_app())
    ticks: list[str | None] = []
    now = datetime(2026, 1, 1, tzinfo=UTC)
    while now.year == 2026:
        sun.nowfun = lambda now=now: now
        now += sun.remaining_estimate(now)
        names = {tick_at(sun, now + late) for late in map(timedelta, (0, 0, 0), (0, 1, 3600))}
        assert len(names) == 1
        ticks += names
        now += timedelta(minutes=5)

    assert len(ticks) == len(set(ticks)) >= 180


class Moody(BaseSchedule):
    """Due when it likes."""

    def is_due(self, last_run_at: datetime) -> Any:
        return True, 60


@pytest.mark.parametrize("other", [Moody(), schedule(timedelta(0))])
def test_a_schedule_of_no_known_kind_has_no_ticks(other: Any) -> None:
    """Two beats would name them differently, and each would run its own."""
    assert tick_at(on_grid(other), NOON) is None


def test_a_calendar_of_another_package_is_known_by_its_name() -> None:
    """A moment (``clocked``) or a rule (``rrule``) is the same for every beat, until there are no more."""
    at = NOON - timedelta(hours=5)

    class clocked(BaseSchedule):  # noqa: N801
        __module__, __qualname__ = "django_celery_beat.clockedschedule", "clocked"

        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return at - self.now()  # type: ignore[no-any-return]

    class rrule(clocked):  # noqa: N801
        __module__, __qualname__ = "redbeat.schedules", "rrule"

        def remaining_estimate(self, last_run_at: datetime) -> timedelta | None:  # type: ignore[override]
            return at - self.now() if self.now() < at else None

    for kind in (clocked, rrule):
        assert tick_at(kind(app=_app()), NOON) == at.isoformat()
        assert tick_at(kind(app=_app()), at - timedelta(seconds=1)) is None


def test_an_interval_is_kept_as_celerys_own() -> None:
    """A schedule file can be read by a beat without this library; nothing else changes by the way, either."""
    plain = schedule(timedelta(seconds=9), relative=True, app=_app())
    again = pickle.loads(pickle.dumps(on_grid(plain)))

    assert type(again) is schedule
    assert (again.run_every, again.relative) == (timedelta(seconds=9), True)
    assert on_grid(plain) == plain
    assert on_grid(on_grid(plain)).remaining_estimate(plain.now()) <= timedelta(seconds=9)


# Beats


def test_a_beat_that_starts_between_two_ticks_sends_the_next_one_in_time() -> None:
    """Not an interval after its start, as Celery's own does, and nothing of the time before."""
    scheduler = _beat(10, at=NOON + timedelta(seconds=7))
    assert scheduler.tick() == pytest.approx(3, abs=0.02)
    assert scheduler.sent == []

    scheduler.app.at = NOON + timedelta(seconds=10)
    assert scheduler.tick() == 0
    assert scheduler.sent == ["report@2026-03-04T12:00:10+00:00"]
    assert scheduler.tick() == pytest.approx(10, abs=0.02)


def test_a_late_beat_sends_the_latest_tick_alone() -> None:
    """As Celery's own does; the next one comes at its time, and not an interval after the late one."""
    scheduler = _beat(10)
    scheduler.tick()
    scheduler.app.at = NOON + timedelta(seconds=47)
    while scheduler.tick() == 0:
        pass

    assert scheduler.sent == ["report@2026-03-04T12:00:40+00:00"]
    assert scheduler.tick() == pytest.approx(3, abs=0.02)


def test_an_entry_that_makes_its_schedule_anew_stays_on_the_grid() -> None:
    """As Django's does, from its row, each time it has run."""

    class Entry(ScheduleEntry):
        def __next__(self) -> ScheduleEntry:
            again = schedule(timedelta(seconds=10), app=self.app)
            return type(self)(**{**dict(self), "schedule": again, "last_run_at": again.now()})

    rows = type("Rows", (beat.Scheduler,), {"Entry": Entry, "reserve": lambda self, entry: next(entry)})
    scheduler = _beat(10, kind=type("OfRows", (Recorder, rows), {}))
    for seconds in (0, 10, 20):
        scheduler.app.at = NOON + timedelta(seconds=seconds)
        scheduler.tick()

    assert [each[-14:-6] for each in scheduler.sent if each] == ["12:00:10", "12:00:20"]


def test_a_clock_that_is_set_back_repeats_no_tick() -> None:
    """What was sent before is not due again, and the next one is."""
    scheduler = _beat(10)
    scheduler.tick()
    for seconds in (10, 4, 10, 20):
        scheduler.app.at = NOON + timedelta(seconds=seconds)
        while scheduler.tick() == 0:
            pass

    assert [each[-14:-6] for each in scheduler.sent if each] == ["12:00:10", "12:00:20"]


@st.composite
def _lives(draw: st.DrawFn) -> tuple[timedelta, list[tuple[float, float, float, list[float]]]]:
    """An interval; and beats, each with its start, its end, the age of its schedule file, and how late it wakes.

    In units of the interval.
    """
    every = timedelta(seconds=draw(st.sampled_from([0.7, 1, 7, 60, 600])))
    late = st.lists(st.floats(0, 0.45), min_size=1, max_size=5)
    life = st.tuples(st.floats(0, 8), st.floats(0, 12), st.floats(0, 5), late)
    return every, draw(st.lists(life, min_size=1, max_size=5))


@settings(max_examples=150)
@given(_lives(), st.timedeltas(timedelta(0), timedelta(days=1)))
def test_every_tick_is_sent_while_one_beat_lives(
    lives: tuple[timedelta, list[tuple[float, float, float, list[float]]]], phase: timedelta
) -> None:
    """Whenever beats start, wake and die: each sends each tick of its life once, all by one name, and no other."""
    every, beats = lives
    begin = NOON + phase
    grid, app = OnGrid(every, app=_app()), _shared_clock()
    sent: set[str] = set()
    expected: set[str] = set()
    for start, length, age, late in beats:
        born, dead = begin + every * start, begin + every * (start + length)
        own = _sent_by(app, every, born, dead, born - every * age, late)
        caught_up = grid.latest(born) > born - every * age
        due = _due_in(grid, grid.latest(born) - every if caught_up else born, dead - every / 2)
        assert len(own) == len(set(own))
        assert due <= set(own) <= _due_in(grid, grid.latest(born) - every, dead)
        sent.update(own)
        expected.update(due)
    assert expected <= sent


_shared_clock = cache(_clock)
"""One for all beats of the property, which live one after the other: to make one takes longer than a life."""


def _sent_by(
    app: Clock, every: timedelta, born: datetime, dead: datetime, last_run_at: datetime, late: list[float]
) -> list[str]:
    """The ticks that one beat names from its start to its end."""
    scheduler = _beat(every, at=born, app=app, last_run_at=last_run_at)
    lateness = cycle(late)
    while scheduler.app.at <= dead:
        pause = max(scheduler.tick(), 0.001)
        scheduler.app.at += timedelta(seconds=pause) + (every * next(lateness) if pause > 0.001 else timedelta(0))
    return [each for each in scheduler.sent if each]


def _due_in(grid: OnGrid, after: datetime, until: datetime) -> set[str]:
    """The ticks after a moment, up to another."""
    found, due = set(), grid.following(after)
    while due <= until:
        found.add(f"report@{due.isoformat()}")
        due = grid.following(due)
    return found


class Shared(Recorder):
    """A beat that reads and notes its entries where others do, as redbeat's."""

    def tick(self) -> None:
        for entry in self.schedule.values():
            if entry.is_due().is_due:
                self.apply_async(entry)


def test_a_tick_is_noted_where_others_read_it_once_it_is_sent() -> None:
    """A beat that is killed before it has sent leaves the tick to another; one that is killed after repeats it."""
    scheduler = _beat(10, kind=Shared)
    scheduler.app.at += timedelta(seconds=10)
    scheduler.is_killed_in_sending = True
    with pytest.raises(Killed):
        scheduler.tick()

    scheduler.is_killed_in_sending = False
    for _ in range(3):
        scheduler.tick()
    assert scheduler.sent == ["report@2026-03-04T12:00:10+00:00"]


def test_a_tick_that_falls_due_while_another_is_sent_is_not_passed_over() -> None:
    """What is noted is the moment that named the tick, and not the one at which the broker had taken it."""

    class Slow(Shared):
        def send_task(self, *args: Any, **options: Any) -> None:
            super().send_task(*args, **options)
            self.app.at += timedelta(seconds=7)

    scheduler = _beat(10, kind=Slow)
    scheduler.app.at += timedelta(seconds=15)
    for _ in range(3):
        scheduler.tick()

    assert [each[-14:-6] for each in scheduler.sent if each] == ["12:00:10", "12:00:20"]


@pytest.mark.parametrize("kind", [Recorder, Shared])
def test_a_tick_that_the_broker_refuses_is_noted(kind: type[Recorder]) -> None:
    """As by Celery: otherwise a message that can never be published would be tried without a pause."""

    class Refused(kind):  # type: ignore[misc, valid-type]
        tries = 0

        def send_task(self, *args: Any, **options: Any) -> None:
            self.tries += 1
            raise ConnectionError

    scheduler: Any = _beat(10, kind=Refused)
    scheduler.app.at += timedelta(seconds=15)
    for _ in range(3):
        try:
            scheduler.tick()
        except SchedulingError:
            assert kind is Shared
    assert scheduler.tries == 1


def test_an_entry_that_was_not_due_is_no_tick() -> None:
    """Somebody sends it by hand: an operation of its own, and the tick still comes."""
    scheduler = _beat(10)
    (entry,) = scheduler.schedule.values()
    scheduler.apply_entry(entry)
    scheduler.app.at += timedelta(seconds=10)
    scheduler.tick()
    scheduler.apply_entry(entry)

    assert scheduler.sent == [None, "report@2026-03-04T12:00:10+00:00", None]


def test_what_a_beat_sends_is_marked_under_every_celery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery marks it since 5.7; without the mark, an entry that has no tick would run once and never again."""
    given: list[ScheduleEntry] = []
    monkeypatch.setattr(beat.Scheduler, "apply_async", lambda self, entry, **options: given.append(entry))
    scheduler = _beat(10, options={"headers": {"mine": "x"}})
    scheduler.apply_entry(*scheduler.schedule.values())

    (entry,) = given
    assert entry.options["headers"] == {"mine": "x", "celery_beat_task": True}


def test_a_mixin_that_comes_too_late_is_refused() -> None:
    """Celery's own scheduler would never ask it, and each tick run once for every beat."""
    with pytest.raises(PolicyError, match=r"write class Mine\(SchedulerMixin, PersistentScheduler\)"):
        type("Mine", (beat.PersistentScheduler, SchedulerMixin), {})

    class Logging(beat.PersistentScheduler):
        """Celery's, which asks the next."""

    assert type("Mine", (Logging, PersistentScheduler), {}).__mro__.index(SchedulerMixin)


def test_the_schedule_can_be_replaced() -> None:
    """As Celery's own."""
    scheduler = _beat(10)
    scheduler.schedule = {}

    assert scheduler.schedule == scheduler.data == {}


def test_the_file_of_a_beat_is_celerys_own(tmp_path: Path) -> None:
    """A beat can be changed to this one and back: the file has no class of this library, and its entries are used."""
    app = Clock("beats", set_as_current=False, broker="memory://")
    app.conf.beat_schedule = {"report": {"task": "of.another.app", "schedule": 10.0}}
    name = str(tmp_path / "schedule")
    for kind in (beat.PersistentScheduler, PersistentScheduler, beat.PersistentScheduler, PersistentScheduler):
        scheduler = kind(app, schedule_filename=name)
        entry = scheduler.schedule["report"]
        assert isinstance(entry.schedule, OnGrid) == (kind is PersistentScheduler)
        assert entry.last_run_at == NOON
        scheduler.sync()
        assert isinstance(scheduler.schedule["report"].schedule, OnGrid) == (kind is PersistentScheduler)
        scheduler.close()
    app.at += timedelta(hours=1)
    assert all(b"celery_idempotent" not in each.read_bytes() for each in tmp_path.iterdir())


# Messages


@pytest.fixture
def app() -> Celery:
    app = an_app(beat_max_loop_interval=1)
    app.now = lambda: NOON
    return app


class Beat(SchedulerMixin, beat.Scheduler):
    """A beat that keeps nothing."""


def _sent(app: Celery, entry: Mapping[str, Any] | None = None) -> list[Any]:
    """The messages of one tick of the task ``report`` from two beats."""
    due = {"task": "report", "schedule": 10, "last_run_at": NOON - timedelta(minutes=1)}
    app.conf.beat_schedule = {"report": {**due, **(entry or {})}}
    for _ in range(2):
        Beat(app).tick()
    return published(app)


def test_a_tick_of_two_beats_runs_once(app: Celery) -> None:
    """Each sends a message with a task id of its own; a redelivery of either changes nothing."""
    runs = []

    @app.task(base=IdempotentTask, name="report", shared=False)
    def report(day: str) -> str:
        runs.append(day)
        return f"report of {day}"

    messages = _sent(app, {"args": ("monday",)})
    ends = [redeliver(app, each) for each in (*messages, *messages)]

    assert len({each.headers["id"] for each in messages}) == 2
    assert runs == ["monday"]
    assert [each.value for each in ends] == ["report of monday"] * 4


def test_the_next_tick_runs(app: Celery) -> None:
    """Equal arguments, another due time: another operation. So it is with another entry of the same time."""
    runs = []

    @app.task(base=IdempotentTask, name="report", shared=False)
    def report() -> None:
        runs.append(1)

    sent = _sent(app)
    app.now = lambda: NOON + timedelta(seconds=10)
    sent += _sent(app)
    app.conf.beat_schedule = {"again": app.conf.beat_schedule["report"]}
    Beat(app).tick()
    for each in (*sent, *published(app)):
        redeliver(app, each)

    assert len(runs) == 3


def test_a_tick_with_other_arguments_runs(app: Celery) -> None:
    """Beats of two releases, of which one sends what the other does not: neither gets the other's result."""
    runs = []

    @app.task(base=IdempotentTask, name="report", shared=False)
    def report(shop: str) -> None:
        runs.append(shop)

    for each in (*_sent(app, {"args": ("berlin",)}), *_sent(app, {"args": ("rome",)})):
        redeliver(app, each)

    assert runs == ["berlin", "rome"]


def test_a_tick_that_is_retried_with_other_arguments_is_the_same_tick(app: Celery) -> None:
    """The copy of the other beat, which comes after the retry, does not run."""
    runs = []

    @app.task(base=IdempotentTask, name="report", shared=False, bind=True)
    def report(self: Any, page: int = 1) -> int:
        runs.append(page)
        if page < 2:
            raise self.retry(kwargs={"page": 2}, countdown=0, headers={"trace": "t-1"})
        return page

    first, second = _sent(app)
    redeliver(app, first)
    (retry,) = published(app)
    assert retry.headers[TICK_HEADER] == first.headers[TICK_HEADER]
    redeliver(app, retry)
    assert redeliver(app, second).value == 2
    assert runs == [1, 2]


def test_headers_that_are_passed_on_are_no_tick(app: Celery) -> None:
    """A body calls its task once more with its own headers, as people do to pass on a trace: another operation."""
    runs = []

    @app.task(base=IdempotentTask, name="report", shared=False, bind=True)
    def report(self: Any) -> None:
        runs.append(1)
        if len(runs) < 3:
            self.apply_async(headers=dict(self.request.headers))

    for each in _sent(app):
        redeliver(app, each)
    for _ in range(2):
        for each in published(app):
            redeliver(app, each)

    assert len(runs) == 3


def test_a_task_id_cannot_be_taken_for_a_tick(app: Celery) -> None:
    """Nor a header that anybody may write: neither reaches what a tick did, and a tick does not reach theirs."""
    runs = []

    @app.task(base=IdempotentTask, name="report", shared=False)
    def report() -> None:
        runs.append(1)

    message, _ = _sent(app)
    redeliver(app, message)
    written = message.headers[TICK_HEADER]
    tick = written.partition(":")[2]
    for task_id in (tick, written):
        deliver(report, task_id=task_id, request={"headers": {"celery_beat_task": True}})
    for forged in (tick, written, f":{tick}", 7, None, ""):
        deliver(report, request={"headers": {"celery_beat_task": True, TICK_HEADER: forged}})
    assert len(runs) == 9
    deliver(report, request={"headers": {TICK_HEADER: written}})
    deliver(report)
    assert len(runs) == 10


@pytest.mark.parametrize("options", [{}, {"options": {"idempotency_key": "mine"}}])
def test_a_key_of_ones_own_identifies_the_effect(app: Celery, options: dict[str, Any]) -> None:
    """Whoever names an effect knows better than the clock: the next tick gets what the first one did."""
    runs = []
    policy = Policy() if options else Policy(key="shop")

    @app.task(base=IdempotentTask, name="report", shared=False, idempotent=policy)
    def report(shop: str) -> None:
        runs.append(shop)

    sent = _sent(app, {"args": ("berlin",), **options})
    app.now = lambda: NOON + timedelta(seconds=10)
    for each in (*sent, *_sent(app, {"args": ("berlin",), **options})):
        redeliver(app, each)

    assert len(sent) == 2
    assert runs == ["berlin"]


def test_options_of_an_entry_are_kept(app: Celery) -> None:
    """The tick is added to the entry's own headers, in the message alone."""

    @app.task(base=IdempotentTask, name="report", shared=False)
    def report() -> None: ...

    own = {"headers": {"trace": "t-1"}, "task_id": "mine", "priority": 3}
    message, _ = _sent(app, {"options": own})

    assert (message.headers["trace"], message.headers["id"], message.properties["priority"]) == ("t-1", "mine", 3)
    assert tick_in(message.headers, "report", "mine") == "report@2026-03-04T12:00:00+00:00"
    assert message.headers["celery_beat_task"] is True
    assert TICK_HEADER not in own["headers"]  # type: ignore[operator]


def test_a_plain_task_is_sent_as_before(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """And each beat says once that it will run for every one of them."""

    @app.task(name="report", shared=False)
    def report() -> None: ...

    sent = _sent(app)

    assert len(sent) == 2
    assert all(TICK_HEADER not in each.headers for each in sent)
    assert [each.levelno for each in caplog.records if "idempotency.tick" in each.message] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    ("problem", "policy", "entry"),
    [
        ("same at every tick", Policy(key="shop"), {"args": ("berlin",)}),
        ("same at every tick", Policy(key="shop"), {"kwargs": {"shop": "berlin"}}),
        ("same at every tick", None, {"args": ("berlin",), "options": {"headers": {"idempotency_key": "mine"}}}),
        ("mode is 'observe'", Policy(mode="observe"), {"args": ("berlin",)}),
        ("due times of Moody", None, {"args": ("berlin",), "schedule": Moody()}),
        (None, None, {"args": ("berlin",)}),
        (None, Policy(key="shop"), {"args": (BeatLazyFunc(str),)}),
        (None, Policy(key="shop"), {"kwargs": {"shop": BeatLazyFunc(str)}}),
        (None, Policy(key="shop"), {"args": (BeatLazyFunc(str),), "schedule": Moody()}),
    ],
)
def test_what_keeps_a_tick_from_running_once_is_said(
    app: Celery, caplog: pytest.LogCaptureFixture, problem: str | None, policy: Policy | None, entry: dict[str, Any]
) -> None:
    """At the start of a beat, in one line with the entry and what to write; and nothing where all is well."""

    @app.task(base=IdempotentTask, name="report", shared=False, idempotent=policy)
    def report(shop: str) -> None: ...

    _sent(app, entry)
    told = [each.message for each in caplog.records if "idempotency.tick" in each.message]

    assert len(told) == (2 if problem else 0)
    assert all(
        f"entry=report task=report reason={problem}"[:30] in each and problem in each for each in told if problem
    )


def test_a_task_of_another_app_gets_the_name_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A beat that has not imported the tasks cannot know whether they are idempotent; the worker does."""
    scheduler = _beat(10)
    scheduler.app.at += timedelta(seconds=10)
    scheduler.tick()

    assert scheduler.sent == ["report@2026-03-04T12:00:10+00:00"]
    assert [each.message for each in caplog.records if "does not know the task" in each.message]


def test_celerys_own_cleaning_is_not_complained_about(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Beat adds it by itself, nobody can change it, and twice is as good as once."""
    app.conf.beat_schedule = {"cleanup": {"task": "celery.backend_cleanup", "schedule": 10}}
    Beat(app)

    assert "idempotency.tick" not in caplog.text
