"""celery-once and celery-singleton beside the library, on one Redis that is broker, lock server and store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from uuid import uuid4

from celery.app.trace import build_tracer

from celery_idempotent.stores import open_store
from lab.benchmarks import wire
from lab.benchmarks.report import Goal, Grid, Section, ratio
from lab.benchmarks.stats import ratios, spread
from lab.benchmarks.wire import Tap, trips_during
from lab.benchmarks.worker_app import TASK, Kind, Setup, make_app
from lab.benchmarks.workers import CONCURRENCY, Worker, sample, standing_by
from lab.embedded import EmbeddedRedis

__all__ = ["measure"]

_TASKS = 400

IN_MEMORY = ("--save", "", "--appendonly", "no")
"""Options of the Redis: nothing is written to disk, which is the kindest to everybody."""

_WITH_RESULTS = f"{Kind.ONCE}, result backend"

_ORDER = (Kind.PLAIN, Kind.ONCE, _WITH_RESULTS, Kind.SINGLETON, Kind.IDEMPOTENT)
_LOCKING = (Kind.ONCE, Kind.SINGLETON, Kind.IDEMPOTENT)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step of a task's life costs, and whether the body ran in it."""

    requests: list[str]
    bodies: int

    def __str__(self) -> str:
        requests = f"{len(self.requests)} ({', '.join(self.requests)})" if self.requests else "0"
        return f"{requests}; {('no body', 'body runs')[self.bodies]}"


_Steps = Mapping[str, _Step]


@dataclass(frozen=True, slots=True)
class _Round:
    """One round of one contender: tasks per second, and microseconds of CPU time per task."""

    published: float
    executed: float
    end_to_end: float
    publish_cpu: float
    execute_cpu: float

    @property
    def cpu(self) -> float:
        """Of publishing and execution together."""
        return self.publish_cpu + self.execute_cpu


def measure(rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``rounds`` interleaved rounds, calling ``progress`` after each."""
    with EmbeddedRedis(options=IN_MEMORY) as redis:
        open_store(redis.url).provision()
        steps = {kind: _steps(kind, redis) for kind in _LOCKING}
        with standing_by(_setups(redis.url)) as workers:
            rates = sample(workers, _round, rounds, progress)
    return Section(
        "6. Peers on the same Redis",
        f"One Valkey, nothing written to disk, is broker, lock server and store. Every task has a key of its own. "
        f"`celery worker` with prefork and {CONCURRENCY} processes, late acknowledgement, {rounds} rounds after one "
        f"to warm up, all contenders in a random order in each. celery-once and celery-singleton lock when a task "
        f"is published and unlock when it ends; the library does nothing at publishing and claims and completes at "
        f"execution. So three rates: `publish` {_TASKS} tasks while the worker stands still; `execute` them; and "
        f"`end to end`, publishing {_TASKS} to the running worker until the last one has ended, which is the one "
        "that compares like with like. CPU is user and system time of the publisher, and of all processes of the "
        "worker. celery-once: `default_timeout` of 1 h as in its README. celery-singleton: "
        "`lock_expiry` of 60 s, as without one a dead worker's lock stays for ever. Neither keeps a result. The row "
        "below celery-once is celery-once with Celery's result backend on the same Redis: its publisher subscribes to "
        "each result, and its duplicates still get none. "
        "Neither takes over from a dead worker before its timeout, renews its lock, or fences "
        "(see ../comparison.md).",
        [_steps_grid(steps), _rates_grid(rates), _ratios_grid(rates)],
        list(_goals(steps, rates)),
        {
            "steps": {kind: {step: asdict(each) for step, each in found.items()} for kind, found in steps.items()},
            "rounds": {
                name: {each: asdict(spread(_values(found, each))) for each in _COLUMNS} for name, found in rates.items()
            },
        },
    )


def _setups(url: str) -> dict[str, Setup]:
    return {
        Kind.PLAIN: Setup(Kind.PLAIN, url),
        **{kind: Setup(kind, url, url) for kind in _LOCKING},
        _WITH_RESULTS: Setup(Kind.ONCE, url, url, url),
    }


def _round(worker: Worker) -> _Round:
    published, executed = worker.publish(_TASKS), worker.execute()
    return _Round(
        published.per_second,
        executed.per_second,
        worker.publish_and_execute(_TASKS),
        published.cpu_us,
        executed.cpu_us,
    )


_COLUMNS = {
    "published": "publish/s",
    "executed": "execute/s",
    "end_to_end": "end to end/s",
    "publish_cpu": "publish, CPU us",
    "execute_cpu": "execute, CPU us",
}


def _values(rounds: Sequence[_Round], column: str) -> list[float]:
    return [getattr(each, column) for each in rounds]


def _rates_grid(rates: Mapping[str, Sequence[_Round]]) -> Grid:
    def row(name: str) -> tuple[str, ...]:
        medians = (f"{spread(_values(rates[name], each)).median:,.0f}" for each in _COLUMNS)
        return (name, *medians)

    return Grid(
        "Empty tasks per second, and CPU time per task; medians", ("", *_COLUMNS.values()), list(map(row, _ORDER))
    )


def _ratios_grid(rates: Mapping[str, Sequence[_Round]]) -> Grid:
    def row(name: str) -> tuple[str, ...]:
        return (name, *(_compared(rates, name, Kind.ONCE, each) for each in ("executed", "end_to_end", "cpu")))

    return Grid(
        "To celery-once: of pairs, median [p25-p75]",
        ("", "execute/s", "end to end/s", "CPU us, publish and execute"),
        list(map(row, _ORDER)),
    )


def _compared(rates: Mapping[str, Sequence[_Round]], name: str, other: str, rate: str) -> str:
    return "1" if name == other else ratio(ratios(_values(rates[name], rate), _values(rates[other], rate)))


def _steps_grid(steps: Mapping[Kind, _Steps]) -> Grid:
    rows = [(step, *(str(steps[kind][step]) for kind in _LOCKING)) for step in steps[Kind.ONCE]]
    return Grid("Requests to the Redis beyond the broker's, counted on the wire", ("", *_LOCKING), rows)


def _goals(steps: Mapping[Kind, _Steps], rates: Mapping[str, Sequence[_Round]]) -> Iterator[Goal]:
    ours, theirs = (
        sum(len(steps[kind][step].requests) for step in (_PUBLISH, _EXECUTE)) for kind in (Kind.IDEMPOTENT, Kind.ONCE)
    )
    yield Goal("requests of a task, to celery-once", f"at most {theirs}", str(ours), ours <= theirs)
    for rate, name in (("end_to_end", "end to end"), ("executed", "execute")):
        for other in (Kind.ONCE, _WITH_RESULTS, Kind.SINGLETON):
            reached = ratios(_values(rates[Kind.IDEMPOTENT], rate), _values(rates[other], rate)).median
            yield Goal(f"tasks/s, {name}, to {other}", "at least 1", f"{reached:.3f}", reached >= 1)


_PUBLISH = "publish"
_EXECUTE = "execute"


def _steps(kind: Kind, redis: EmbeddedRedis) -> _Steps:
    """The life of a task, step by step, in this process and with a broker in memory."""
    bodies: Counter[int] = Counter()

    def body(number: int) -> int:
        bodies[number] += 1
        return number

    with Tap(redis.port, wire.redis) as tap, _own_clients():
        store = redis.url.replace(f":{redis.port}", f":{tap.port}")
        app = make_app(Setup(kind, "memory://", store), body)
        task = app.tasks[TASK]
        trace = build_tracer(TASK, task, app=app)
        numbers = iter(range(1_000_000))

        def publish(number: int) -> None:
            try:
                task.apply_async((number,), queue=f"nobody-{kind}")
            except import_module("celery_once").AlreadyQueued:
                return

        def deliver(number: int, task_id: str) -> None:
            message = {"id": task_id, "args": [number], "kwargs": {}, "hostname": "celery@benchmark"}
            trace(task_id, [number], {}, {**message, "delivery_info": {"routing_key": f"nobody-{kind}"}})

        def step(number: int, act: Callable[[], None]) -> _Step:
            before = bodies[number]
            requests = trips_during([tap], act)
            return _Step(requests, bodies[number] - before)

        for number in (next(numbers), next(numbers)):  # to warm up
            publish(number)
            deliver(number, str(uuid4()))
        number, first, second = next(numbers), str(uuid4()), str(uuid4())
        return {
            _PUBLISH: step(number, lambda: publish(number)),
            "publish again, while it is queued": step(number, lambda: publish(number)),
            _EXECUTE: step(number, lambda: deliver(number, first)),
            "the same message again, after its end": step(number, lambda: deliver(number, first)),
            "publish again, after its end": step(number, lambda: publish(number)),
            "execute that": step(number, lambda: deliver(number, second)),
        }


@contextmanager
def _own_clients() -> Iterator[None]:
    """Both peers keep the first client of the process for ever, whatever its address."""

    def forget() -> None:
        import_module("celery_once.backends.redis").redis = None  # type: ignore[attr-defined]
        import_module("celery_singleton.backends")._backend = None  # type: ignore[attr-defined]

    forget()
    try:
        yield
    finally:
        forget()
