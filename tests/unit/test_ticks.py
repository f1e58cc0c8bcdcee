"""Ticks of beat: every beat knows each by one name, sends each once, and loses none while one beat lives."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, beat
from celery.beat import BeatLazyFunc, SchedulingError
from celery.schedules import BaseSchedule, crontab, solar
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_idempotent import IdempotentTask, Policy, PolicyError
from celery_idempotent.beat import PersistentScheduler, SchedulerMixin
from celery_idempotent.integration.headers import TICK_HEADER, tick_in
from celery_idempotent.integration.messages.ticks import OnGrid, tick_at
from tests.support.celeries import since_celery
from tests.support.deliveries import an_app, deliver, published, redeliver
from tests.support.packages import needs

NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))


@cache
def _app(timezone: str = "UTC") -> Celery:
    """Nobody changes it, and to make one takes longer than a property needs for an example."""
    app = Celery("beats", set_as_current=False, broker="memory://")
    app.conf.timezone = timezone
    return app


class Clock(Celery):
    """An app whose time is what a test says."""

    at = NOON

    def now(self) -> datetime:
        return self.at


class Recorder(SchedulerMixin, beat.Scheduler):
    """A beat that notes what it would publish."""

    producer = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[str | None] = []
        self.sends: Callable[[], None] = lambda: None
        super().__init__(*args, **kwargs)

    def send_task(self, name: str, *_: Any, headers: Mapping[str, Any], task_id: str, **kwargs: Any) -> None:
        self.sends()
        self.sent.append(tick_in(headers, name, task_id))

    def until(self, *seconds: float) -> float:
        """Tick at each time after noon until nothing is due; the pause after the last one."""
        for each in seconds:
            self.app.at = NOON + timedelta(seconds=each)
            while (pause := self.tick()) == 0:
                pass
        return float(pause)


Beat = type("Beat", (SchedulerMixin, beat.Scheduler), {})
"""A beat that keeps nothing."""


class Shared(Recorder):
    """A beat that reads and notes its entries where others do, as redbeat's."""

    def tick(self) -> float:
        for entry in self.schedule.values():
            if entry.is_due().is_due:
                self.apply_async(entry)
        return 1


@cache
def _clock() -> Clock:
    """One for all beats, which live one after the other: to make one takes longer than a life."""
    return Clock("beats", set_as_current=False, broker="memory://")


def _beat(every: Any, at: datetime = NOON, kind: type[Recorder] = Recorder, **entry: Any) -> Recorder:
    app = _clock()
    app.at = at
    app.conf.beat_schedule = {"report": {"task": "of.another.app", "schedule": every, **entry}}
    return kind(app)


def _ticks(*seconds: int) -> list[str]:
    return [f"report@2026-03-04T12:00:{each:02}+00:00" for each in seconds]


@given(moments, st.timedeltas(timedelta(microseconds=1), timedelta(days=400)))
def test_an_interval_has_the_same_due_times_whenever_it_is_asked(now: datetime, every: timedelta) -> None:
    """Of any moment, the latest due time is one of the grid's, and no other lies between."""
    grid = OnGrid(every, app=_app())
    latest = grid.latest(now)
    assert latest == grid.latest(latest) <= now < grid.following(now) == latest + every
    assert (latest - datetime(1970, 1, 1, tzinfo=UTC)) % every == timedelta(0)


@given(moments, st.integers(1, 40), st.sampled_from(["UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Beirut"]))
def test_relative_days_begin_at_midnight(now: datetime, days: int, zone: str) -> None:
    """Wherever the app is, and however long the day: those on which clocks change have 23 and 25 hours."""
    grid = OnGrid(timedelta(days=days), relative=True, app=_app(zone))
    latest, following = grid.latest(now), grid.following(now)

    assert latest <= now < following == grid.latest(following)
    assert grid.latest(following - timedelta(microseconds=1)) == latest
    begin, end = (each.astimezone(ZoneInfo(zone)) for each in (latest, following))
    assert end.date() - begin.date() == timedelta(days=days)
    assert (following - timedelta(seconds=1)).astimezone(ZoneInfo(zone)).date() < end.date()


survives_days_without_the_event = since_celery("5.7", "schedules that survive a day without the event")
CRON = {
    "minute": ["*", "*/7", "0", "30", "5,59"],
    "hour": ["*", "*/5", "2", "0,23"],
    "day_of_week": ["*", "1", "6,0"],
    "day_of_month": ["*", "1", "29-31"],
    "month_of_year": ["*", "2", "*/5"],
}
cronspecs = st.fixed_dictionaries({}, optional={field: st.sampled_from(values) for field, values in CRON.items()})


@settings(max_examples=15)
@given(moments, cronspecs, st.timedeltas(timedelta(0), timedelta(days=3)))
def test_crontab_has_one_due_time_whenever_it_is_asked(now: datetime, spec: dict[str, str], later: timedelta) -> None:
    """What a beat calls the tick at its due time, one calls it that comes later; Celery agrees on when that is."""
    cron = crontab(**spec, app=_app())
    name = tick_at(cron, now)
    assert name is not None
    due = datetime.fromisoformat(name)

    assert due <= now
    assert tick_at(cron, due - timedelta(microseconds=1)) != name == tick_at(cron, due)
    clock = crontab(**spec, app=_app(), nowfun=lambda: due)
    assert [clock.is_due(each).is_due for each in (due - timedelta(seconds=1), due)] == [True, False]
    next_name = tick_at(cron, now + later)
    assert next_name == name or (next_name is not None and datetime.fromisoformat(next_name) > now)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe"])
@pytest.mark.parametrize("spec", [{"minute": "*/15"}, {"minute": "30", "hour": "2"}])
@pytest.mark.parametrize("begin", [datetime(2017, 10, 14), datetime(2026, 3, 28), datetime(2026, 10, 24)])
def test_beats_agree_while_the_clocks_change(zone: str, spec: dict[str, str], begin: datetime) -> None:
    """Through the hour that is left out or comes twice, ticks have one name each, in order, however late one asks."""
    cron = crontab(**spec, app=_app(zone))
    begin = begin.replace(tzinfo=UTC)
    names = [str(tick_at(cron, begin + timedelta(minutes=15 * n + n % 2))) for n in range(4 * 72)]
    local = [datetime.fromisoformat(each).astimezone(ZoneInfo(zone)) for each in sorted(set(names))]

    assert names == sorted(names)
    assert len({each.replace(fold=0, tzinfo=None) for each in local}) == len(local)
    assert len({each.date() for each in local}) >= 3


@needs("ephem")
@pytest.mark.parametrize("event", ["dawn_astronomical", "sunset"])
@pytest.mark.parametrize(
    ("lat", "lon"),
    [
        (-36.8, 174.8),
        pytest.param(65.76, -18, marks=survives_days_without_the_event),  # in July, one day has two sunsets
        pytest.param(69.6, 18.9, marks=survives_days_without_the_event),
    ],
)
def test_each_event_of_the_sun_is_one_tick(event: str, lat: float, lon: float) -> None:
    """Through a year, also where the sun stays away for weeks, and although no event is found at one moment twice."""
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


@pytest.mark.parametrize("name", ["django_celery_beat.clockedschedule.clocked", "redbeat.schedules.rrule"])
def test_a_calendar_of_another_package_is_known_by_its_name(name: str) -> None:
    """A moment (``clocked``) or a rule (``rrule``) is the same for every beat, until there are no more."""
    at, (module, _, kind) = NOON - timedelta(hours=5), name.rpartition(".")

    class Calendar(BaseSchedule):
        __module__, __qualname__ = module, kind

        def remaining_estimate(self, last_run_at: datetime) -> timedelta | None:
            return at - self.now() if self.now() < at or kind == "clocked" else None

    assert tick_at(Calendar(app=_app()), NOON) == at.isoformat()
    assert tick_at(Calendar(app=_app()), at - timedelta(seconds=1)) is None


@pytest.mark.parametrize(
    ("seconds", "sent", "pause"),
    [((7,), [], 3), ((7, 10), [10], 10), ((0, 47), [40], 3), ((0, 10, 4, 10, 20), [10, 20], 10)],
    ids=["started between two ticks", "at the next one", "late by several", "its clock was set back"],
)
def test_a_beat_sends_the_latest_tick_that_it_has_not_sent(seconds: Any, sent: list[int], pause: int) -> None:
    """An interval begins with the grid, not with the beat; a late beat sends the latest alone, as Celery's own does."""
    scheduler = _beat(10, at=NOON + timedelta(seconds=seconds[0]))
    assert scheduler.until(*seconds) == pytest.approx(pause, abs=0.02)
    assert scheduler.sent == _ticks(*sent)


@given(
    st.sampled_from([0.7, 1, 7, 60, 600]).map(lambda seconds: timedelta(seconds=seconds)),
    st.timedeltas(timedelta(0), timedelta(days=1)),
    # In units of the interval: how long a beat lives, how old its schedule file is, and how late it wakes each time.
    *(st.floats(0, 12), st.floats(0, 5), st.lists(st.floats(0, 0.45), min_size=1, max_size=5)),
)
def test_every_tick_is_sent_while_one_beat_lives(
    every: timedelta, phase: timedelta, length: float, age: float, late: list[float]
) -> None:
    """Whenever a beat starts, wakes and dies, it sends each tick of its life once, by the grid's name, and no other."""
    born, grid = NOON + phase, OnGrid(every, app=_app())
    dead = born + every * length
    scheduler, lateness = _beat(every, at=born, last_run_at=born - every * age), cycle(late)
    while scheduler.app.at <= dead:
        pause = max(scheduler.tick(), 0.001)
        scheduler.app.at += timedelta(seconds=pause) + (every * next(lateness) if pause > 0.001 else timedelta(0))
    own = [each for each in scheduler.sent if each]
    caught_up = grid.latest(born) > born - every * age
    due = _due_in(grid, grid.latest(born) - every if caught_up else born, dead - every / 2)
    assert len(own) == len(set(own))
    assert due <= set(own) <= _due_in(grid, grid.latest(born) - every, dead)


def _due_in(grid: OnGrid, after: datetime, until: datetime) -> set[str]:
    found, due = set(), grid.following(after)
    while due <= until:
        found.add(f"report@{due.isoformat()}")
        due = grid.following(due)
    return found


def test_a_tick_is_noted_where_others_read_it_once_it_is_sent() -> None:
    """A beat that is killed before it has sent leaves the tick to another; one that is killed after repeats it."""
    scheduler = _beat(10, kind=Shared)
    scheduler.sends = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        scheduler.until(10)
    scheduler.sends = lambda: None
    scheduler.until(10, 10, 10)
    assert scheduler.sent == _ticks(10)


def test_a_tick_that_falls_due_while_another_is_sent_is_not_passed_over() -> None:
    """What is noted is the moment that named the tick, and not the one at which the broker had taken it."""
    scheduler = _beat(10, kind=Shared)
    scheduler.sends = lambda: setattr(scheduler.app, "at", scheduler.app.at + timedelta(seconds=7))
    scheduler.until(15)
    scheduler.tick()
    scheduler.tick()
    assert scheduler.sent == _ticks(10, 20)


@pytest.mark.parametrize("kind", [Recorder, Shared])
def test_a_tick_that_the_broker_refuses_is_noted(kind: type[Recorder]) -> None:
    """As by Celery: otherwise a message that can never be published would be tried without a pause."""
    scheduler = _beat(10, kind=kind)
    scheduler.sends = refuse = Mock(side_effect=ConnectionError)
    if kind is Shared:
        with pytest.raises(SchedulingError):
            scheduler.until(15)
    scheduler.until(15, 15, 15)
    refuse.assert_called_once()


def test_a_mixin_that_comes_too_late_is_refused() -> None:
    """Celery's own scheduler would never ask it, and each tick run once for every beat."""
    with pytest.raises(PolicyError, match=r"write class Mine\(SchedulerMixin, PersistentScheduler\)"):
        type("Mine", (beat.PersistentScheduler, SchedulerMixin), {})
    asks_the_next = type("Logging", (beat.PersistentScheduler,), {})
    assert type("Mine", (asks_the_next, PersistentScheduler), {}).__mro__.index(SchedulerMixin)


def test_the_file_of_a_beat_is_celerys_own(tmp_path: Path) -> None:
    """A beat can be changed to this one and back: the file has no class of this library, and its entries are used."""
    app = _beat(10.0).app
    for kind in (beat.PersistentScheduler, PersistentScheduler, beat.PersistentScheduler, PersistentScheduler):
        scheduler = kind(app, schedule_filename=str(tmp_path / "schedule"))
        for _ in range(2):
            entry = scheduler.schedule["report"]
            assert (isinstance(entry.schedule, OnGrid), entry.last_run_at) == (kind is PersistentScheduler, NOON)
            scheduler.sync()
        scheduler.close()
    assert all(b"celery_idempotent" not in each.read_bytes() for each in tmp_path.iterdir())


@pytest.fixture
def app() -> Celery:
    app = an_app(beat_max_loop_interval=1)
    app.now = lambda: NOON
    return app


def _report(app: Celery, body: Any = None, policy: Policy | None = None) -> list[Any]:
    """Add the task ``report``, which notes what it is called with; what it has noted."""
    runs: list[Any] = []

    def report(task: Any, shop: Any = "berlin") -> Any:
        runs.append(shop)
        return body(task, shop) if body else shop

    app.task(base=IdempotentTask, name="report", shared=False, lazy=False, bind=True, idempotent=policy)(report)
    return runs


def _sent(app: Celery, name: str = "report", after: int = 0, **entry: Any) -> list[Any]:
    """The messages of one tick of the task ``report`` from two beats, so many seconds after noon."""
    app.now = lambda: NOON + timedelta(seconds=after)
    due = {"task": "report", "schedule": 10, "last_run_at": NOON - timedelta(minutes=1)}
    app.conf.beat_schedule = {name: {**due, **entry}}
    for _ in range(2):
        Beat(app).tick()
    return published(app)


def test_a_tick_of_two_beats_runs_once(app: Celery) -> None:
    """A redelivery of either message changes nothing; another due time, entry or argument is another operation."""
    runs = _report(app)
    others: list[dict[str, Any]] = [{}, {"after": 10}, {"name": "again"}, {"args": ("rome",)}]
    for number, another in enumerate(others, 1):
        messages = _sent(app, **another)
        ends = [redeliver(app, each) for each in (*messages, *messages)]
        assert len({each.headers["id"] for each in messages}) == 2
        assert len(runs) == number
        assert [each.value for each in ends] == [runs[-1]] * 4


def test_a_tick_that_is_retried_with_other_arguments_is_the_same_tick(app: Celery) -> None:
    """The copy of the other beat, which comes after the retry, does not run."""

    again: dict[str, Any] = {"kwargs": {"shop": "rome"}, "countdown": 0, "headers": {"trace": "t-1"}}
    runs = _report(app, lambda task, shop: shop if shop == "rome" else task.retry(**again))
    first, second = _sent(app)
    redeliver(app, first)
    (retry,) = published(app)
    assert retry.headers[TICK_HEADER] == first.headers[TICK_HEADER]
    assert [redeliver(app, each).value for each in (retry, second)] == ["rome", "rome"]
    assert runs == ["berlin", "rome"]


def test_a_task_id_cannot_be_taken_for_a_tick(app: Celery) -> None:
    """Nor a header that anybody may write: neither reaches what a tick did, and a tick does not reach theirs."""
    runs = _report(app)
    message, _ = _sent(app)
    redeliver(app, message)
    written, report = message.headers[TICK_HEADER], app.tasks["report"]
    tick = written.partition(":")[2]
    for task_id in (tick, written):
        deliver(report, task_id=task_id, request={"headers": {"celery_beat_task": True}})
    for forged in (tick, written, f":{tick}", 7, None, ""):
        deliver(report, request={"headers": {"celery_beat_task": True, TICK_HEADER: forged}})
    assert len(runs) == 9
    deliver(report, request={"headers": {TICK_HEADER: written}})
    deliver(report)
    assert len(runs) == 10


@pytest.mark.parametrize("options", [{}, {"idempotency_key": "mine"}])
def test_a_key_of_ones_own_identifies_the_effect(app: Celery, options: dict[str, Any]) -> None:
    """Whoever names an effect knows better than the clock: the next tick gets what the first one did."""
    runs = _report(app, policy=None if options else Policy(key="shop"))
    for each in (*_sent(app, options=options), *_sent(app, after=10, options=options)):
        redeliver(app, each)
    assert runs == ["berlin"]


def test_options_of_an_entry_are_kept(app: Celery) -> None:
    """The message alone gets the tick, and also before Celery 5.7 the mark without which it would run only once."""
    _report(app)
    own: dict[str, Any] = {"headers": {"trace": "t-1"}, "task_id": "mine", "priority": 3}
    message, _ = _sent(app, options=own)
    assert (message.headers["trace"], message.headers["id"], message.properties["priority"]) == ("t-1", "mine", 3)
    assert (tick_in(message.headers, "report", "mine"), message.headers["celery_beat_task"]) == (*_ticks(0), True)
    assert own["headers"] == {"trace": "t-1"}
    Beat(app).apply_entry(*Beat(app).schedule.values())
    (by_hand,) = published(app)
    assert (TICK_HEADER in by_hand.headers, by_hand.headers["celery_beat_task"]) == (False, True)


KEYED, MINE = Policy(key="shop"), {"options": {"headers": {"idempotency_key": "mine"}}}


@pytest.mark.parametrize(
    ("problem", "policy", "entry"),
    [
        ("same at every tick", KEYED, {"args": ("berlin",)}),
        ("same at every tick", None, {"args": ("berlin",), **MINE}),
        ("mode is 'observe'", Policy(mode="observe"), {"args": ("berlin",)}),
        ("due times of Moody", None, {"args": ("berlin",), "schedule": Moody()}),
        ("not idempotent", None, {"task": "plain"}),
        ("does not know the task", None, {"task": "of.another.app"}),
        (None, None, {"args": ("berlin",)}),
        (None, KEYED, {"kwargs": {"shop": BeatLazyFunc(str)}}),
        (None, KEYED, {"args": (BeatLazyFunc(str),), "schedule": Moody()}),
        (None, None, {"task": "celery.backend_cleanup"}),
    ],
)
def test_what_keeps_a_tick_from_running_once_is_said(
    app: Celery, caplog: pytest.LogCaptureFixture, problem: str | None, policy: Policy | None, entry: dict[str, Any]
) -> None:
    """By each beat, once, with the entry. A task that the beat does not know has a tick: its worker may know it."""
    _report(app, policy=policy)

    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    messages = _sent(app, **entry)
    told = [(each.levelname, each.message) for each in caplog.records if "idempotency.tick" in each.message]
    assert len(told) == (2 if problem else 0)
    assert all(level == "WARNING" and "entry=report" in line and str(problem) in line for level, line in told)
    is_named = {TICK_HEADER in each.headers for each in messages}
    assert is_named == {entry.get("task") not in ("plain", "celery.backend_cleanup") and "schedule" not in entry}
