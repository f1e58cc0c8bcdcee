"""celery-once and celery-singleton beside the library, on one Redis that is broker, lock server and store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from celery_idempotent.stores import open_store
from lab.benchmarks.report import Goal, Grid, Section, ratio
from lab.benchmarks.stats import ratios, spread
from lab.benchmarks.worker_app import Kind, Setup
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
        [_rates_grid(rates), _ratios_grid(rates)],
        list(_goals(rates)),
        {
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


def _goals(rates: Mapping[str, Sequence[_Round]]) -> Iterator[Goal]:
    for rate, name in (("end_to_end", "end to end"), ("executed", "execute")):
        for other in (Kind.ONCE, _WITH_RESULTS, Kind.SINGLETON):
            reached = ratios(_values(rates[Kind.IDEMPOTENT], rate), _values(rates[other], rate)).median
            yield Goal(f"tasks/s, {name}, to {other}", "at least 1", f"{reached:.3f}", reached >= 1)
