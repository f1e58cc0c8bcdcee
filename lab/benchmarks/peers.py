"""celery-once and celery-singleton beside the library, on one Redis that is broker, lock server and store."""

from functools import partial

from celery_idempotent.stores import open_store
from lab.benchmarks.environment import DynamoDB
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.timing import Spread, ratios, sample, spread
from lab.benchmarks.worker_app import Kind, Setup
from lab.benchmarks.workers import CONCURRENCY, Worker, standing_by
from lab.embedded import EmbeddedRedis

_TASKS = 400
_WITH_RESULTS = f"{Kind.ONCE}, result backend"
_ORDER = (Kind.PLAIN, Kind.ONCE, _WITH_RESULTS, Kind.SINGLETON, Kind.IDEMPOTENT)

_COMPARED = ("execute/s", "end to end/s", "both, CPU us")


def measure(_: DynamoDB, rounds: int) -> Section:
    # Nothing is written to disk, which is the kindest to everybody.
    with EmbeddedRedis(options=("--save", "", "--appendonly", "no")) as redis:
        url = redis.url
        open_store(url).provision()
        setups: dict[str, Setup] = {kind: Setup(kind, url, "" if kind is Kind.PLAIN else url) for kind in Kind}
        with standing_by({**setups, _WITH_RESULTS: Setup(Kind.ONCE, url, url, url)}) as workers:
            takes = {name: partial(_round, worker) for name, worker in workers.items()}
            found = sample(takes, rounds, warm_up=1)

    def of(name: str, column: str) -> list[float]:
        return [each[column] for each in found[name]]

    def to(name: str, other: str, column: str) -> Spread:
        return ratios(of(name, column), of(other, column))

    def compared(name: str) -> tuple[str, ...]:
        cells = (to(name, Kind.ONCE, each).shown for each in _COMPARED)
        return (name, *(("1",) * 3 if name == Kind.ONCE else cells))

    reached = {
        f"tasks/s, {rate.removesuffix('/s')}, to {other}": to(Kind.IDEMPOTENT, other, rate).median
        for rate in ("end to end/s", "execute/s")
        for other in (Kind.ONCE, _WITH_RESULTS, Kind.SINGLETON)
    }
    columns = list(found[Kind.PLAIN][0])
    medians = [(name, *(f"{spread(of(name, each)).median:,.0f}" for each in columns)) for name in _ORDER]
    return Section(
        "6. Peers on the same Redis",
        f"One Valkey, nothing written to disk, is broker, lock server and store. Every task has a key of its own. "
        f"`celery worker` with prefork and {CONCURRENCY} processes, late acknowledgement, {rounds} rounds after one "
        "to warm up, all contenders in a random order in each. celery-once and celery-singleton lock when a task "
        "is published and unlock when it ends; the library does nothing at publishing and claims and completes at "
        f"execution. So three rates: `publish` {_TASKS} tasks while the worker stands still; `execute` them; and "
        f"`end to end`, publishing {_TASKS} to the running worker until the last one has ended, which compares like "
        "with like. CPU is user and system time of the publisher, and of all processes of the worker. celery-once: "
        "`default_timeout` of 1 h as in its README. celery-singleton: `lock_expiry` of 60 s, as without one a dead "
        "worker's lock stays for ever. Neither keeps a result, takes over from a dead worker before its timeout, "
        "renews its lock, or fences. `result backend` is Celery's, on the same Redis: the publisher subscribes to each "
        "result, and duplicates still get none.",
        [
            Grid("Empty tasks per second, and CPU time per task; medians", ("", *columns), medians),
            Grid("To celery-once: of pairs, median [p25-p75]", ("", *_COMPARED), list(map(compared, _ORDER))),
        ],
        [Goal(what, "at least 1", f"{each:.3f}", each >= 1) for what, each in reached.items()],
    )


def _round(worker: Worker, number: int) -> dict[str, float]:
    """Tasks per second, and microseconds of CPU time per task."""
    published, executed = worker.publish(_TASKS), worker.execute()
    return {
        "publish/s": published.per_second,
        "execute/s": executed.per_second,
        "end to end/s": worker.publish_and_execute(_TASKS),
        "publish, CPU us": published.cpu_us,
        "execute, CPU us": executed.cpu_us,
        "both, CPU us": published.cpu_us + executed.cpu_us,
    }
