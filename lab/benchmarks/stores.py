"""What the library costs on each store: round trips, CPU of the client, and a worker's throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass

from celery_idempotent.stores import open_store
from lab.benchmarks.contenders import Contender, GuardedCall
from lab.benchmarks.cpu_per_call import collecting_by_hand
from lab.benchmarks.environment import Servers
from lab.benchmarks.paths import PATHS, Found, library_paths
from lab.benchmarks.peers import IN_MEMORY
from lab.benchmarks.places import Place, places
from lab.benchmarks.report import Goal, Grid, Section, ratio
from lab.benchmarks.rows import IN_PLACE, Kept, kept
from lab.benchmarks.stats import Spread, ratios, shuffled, spread
from lab.benchmarks.worker_app import Kind, Setup
from lab.benchmarks.workers import CONCURRENCY, Rate, Worker, sample, standing_by
from lab.embedded import EmbeddedRedis
from lab.folders import temporary_folder

__all__ = ["WARM_UP", "measure"]

_HELD_TO = ("Redis", "Redis Cluster", "PostgreSQL")
"""Stores whose every swap must be one round trip."""

_MOST = 2
"""Times the bare client: what a duplicate may cost. The servers answer in microseconds, so that Python is all there is
to measure, and at most half of it is to be ours."""

_NO_STORE = "none: plain Celery"
_TASKS = 300
_CALLS = ("new key", "duplicate")
WARM_UP = 30
_COLLECT_EVERY = 20


@dataclass(frozen=True, slots=True)
class _Cost:
    """One call: CPU time of this process and time on the clock, in microseconds."""

    cpu: float
    wall: float


_Costs = Mapping[str, Mapping[str, Sequence[_Cost]]]
"""By call and contender."""


def measure(servers: Servers, cpu_rounds: int, worker_rounds: int, progress: Callable[[], None]) -> Section:
    """Measure ``cpu_rounds`` and ``worker_rounds`` interleaved rounds, calling ``progress`` after each."""
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        found, missing = stack.enter_context(places(servers, folder))
        for place in found:
            with closing(open_store(place.url)) as store:
                store.provision()
        paths = {place.name: _paths(place) for place in found}
        with _contenders(found) as contenders:
            costs = _costs(contenders, cpu_rounds, progress)
        broker = stack.enter_context(EmbeddedRedis(options=IN_MEMORY))
        workers = stack.enter_context(standing_by(_setups(found, broker.url)))
        rates = sample(workers, _executed, worker_rounds, progress)
        rows = {place.name: kept(place.url) for place in found if place.url.startswith("postgresql")}
    return Section(
        "5. Stores",
        "Each store on an embedded server of its own, with durable writes: Redis is Valkey with `appendfsync "
        "always`, the cluster has three such masters, PostgreSQL, MariaDB and SQLite commit to disk. DynamoDB is "
        "MiniStack, a Python program whose own CPU time slows down the worker beside it. Memory is the floor: no "
        "store at all could be cheaper. Round trips are counted on the wire, by a proxy before the server: what "
        "the client sends between two replies is one, and `+` joins what goes together; on SQLite, which has no "
        "wire, SQLite names its statements. CPU is user and system time of the calling process, of `Delivery.run`, "
        f"{cpu_rounds} rounds after {WARM_UP} to warm up, all calls in a random order in each; for SQLite the engine "
        "is in it. The bare client is the store's driver alone, which sends the same with keys ready made; what the "
        "library adds is key derivation, its decisions, records and codec, and SQLAlchemy where the store is an SQL "
        "database. Tasks per second are those of `celery worker` with prefork and "
        f"{CONCURRENCY} processes, an empty task, late acknowledgement, the broker a Redis of its own that writes "
        f"nothing to disk: {worker_rounds} rounds of {_TASKS} tasks after one to warm up, in random order, taken "
        "between the first and the last task that end. All servers share this machine's cores and disk."
        + "".join(f" {name} is missing here: {lack}." for name, lack in missing.items()),
        [
            _paths_grid(found, paths),
            *(_costs_grid(call, costs[call]) for call in _CALLS),
            _rates_grid(rates),
            _rows_grid(rows),
        ],
        [*_goals(paths, costs["duplicate"]), *_rows_goals(rows)],
        {
            "paths": paths,
            "cpu_us": {call: {name: asdict(_cpu(each)) for name, each in costs[call].items()} for call in costs},
            "wall_us": {call: {name: asdict(_wall(each)) for name, each in costs[call].items()} for call in costs},
            "executed_per_s": {name: asdict(spread(_per_second(each))) for name, each in rates.items()},
            "rows": {name: asdict(each) for name, each in rows.items()},
            "worker_cpu_us_per_task": {name: asdict(spread(_cpu_us(each))) for name, each in rates.items()},
        },
    )


def _paths(place: Place) -> Found:
    with place.watch() as watched:
        store = open_store(watched.url)
        try:
            return library_paths(store, watched.count)
        finally:
            store.close()


def _paths_grid(found: Sequence[Place], paths: Mapping[str, Found]) -> Grid:
    rows = [(place.name, place.counted, *(_cell(paths[place.name][path]) for path in PATHS)) for place in found]
    return Grid("Requests per path", ("Store", "counted", *PATHS), rows)


def _cell(sent: Sequence[str]) -> str:
    return f"{len(sent)} ({', '.join(sent)})" if sent else "0"


def _goals(paths: Mapping[str, Found], duplicates: Mapping[str, Sequence[_Cost]]) -> Iterator[Goal]:
    for name in (name for name in _HELD_TO if name in paths):
        counts = [len(paths[name][path]) for path in PATHS]
        wanted = list(PATHS.values())
        reached = all(count <= most for count, most in zip(counts, wanted, strict=True))
        yield Goal(f"{name}, round trips per path", f"at most {_listed(wanted)}", _listed(counts), reached)
    for name in (name for name in _HELD_TO if name in paths):
        own, bare = ([each.cpu for each in duplicates[who]] for who in (name, _bare(name)))
        measured = ratios(own, bare).median
        yield Goal(f"{name}, duplicate, CPU to bare client", f"at most {_MOST}", f"{measured:.3f}", measured <= _MOST)


def _rows_goals(rows: Mapping[str, Kept]) -> Iterator[Goal]:
    for name, each in rows.items():
        share = f"{each.in_place:.1%}"
        yield Goal(f"{name}, ends that are heap-only updates", f"over {IN_PLACE:.0%}", share, each.in_place > IN_PLACE)


def _rows_grid(rows: Mapping[str, Kept]) -> Grid:
    columns = ("Store", "ends that are heap-only updates", "table, bytes per record", "indexes, bytes per record")
    cells = [(name, f"{each.in_place:.1%}", f"{each.bytes:,}", f"{each.index_bytes:,}") for name, each in rows.items()]
    return Grid("What is kept: the records of all of the above", columns, cells)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@contextmanager
def _contenders(found: Sequence[Place]) -> Iterator[dict[str, Contender]]:
    with ExitStack() as stack:
        stores = {place.name: stack.enter_context(closing(open_store(place.url))) for place in found}
        ours = {name: GuardedCall(store) for name, store in stores.items()}
        bare = {_bare(each.name): stack.enter_context(each.bare()) for each in found if each.bare is not None}
        yield {**ours, **bare}


def _bare(name: str) -> str:
    return f"{name}, bare client"


def _costs(contenders: Mapping[str, Contender], rounds: int, progress: Callable[[], None]) -> _Costs:
    found: dict[str, dict[str, list[_Cost]]] = {call: {name: [] for name in contenders} for call in _CALLS}
    known = time.time_ns()
    for each in contenders.values():
        each.delivery(known)()
    calls = [(call, name) for call in _CALLS for name in contenders]
    with collecting_by_hand() as collect:
        for index in range(-WARM_UP, rounds):
            if index % _COLLECT_EVERY == 0:
                collect()
            fresh = known + 1 + WARM_UP + index
            for call, name in shuffled(calls, WARM_UP + index):
                cost = _cost(contenders[name].delivery(fresh if call == "new key" else known))
                if index >= 0:
                    found[call][name].append(cost)
            progress()
    return found


def _cost(deliver: Callable[[], object]) -> _Cost:
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    deliver()
    return _Cost((time.process_time_ns() - cpu) / 1000, (time.perf_counter_ns() - wall) / 1000)


def _cpu(costs: Sequence[_Cost]) -> Spread:
    return spread([each.cpu for each in costs])


def _wall(costs: Sequence[_Cost]) -> Spread:
    return spread([each.wall for each in costs])


def _costs_grid(call: str, costs: Mapping[str, Sequence[_Cost]]) -> Grid:
    def row(name: str) -> tuple[str, ...]:
        own = [each.cpu for each in costs[name]]
        cells = (f"{spread(own).median:,.0f}", f"{_wall(costs[name]).median:,.0f}")
        if _bare(name) not in costs:
            return (name, *cells, "", "", "")
        bare = [each.cpu for each in costs[_bare(name)]]
        added = spread([one - other for one, other in zip(own, bare, strict=True)])
        return (name, *cells, f"{spread(bare).median:,.0f}", f"{added.median:,.0f}", ratio(ratios(own, bare)))

    columns = ("Store", "CPU us", "on the clock, us", "bare client, CPU us", "added, CPU us", "CPU to bare client")
    rows = [row(name) for name in costs if not name.endswith(_bare(""))]
    return Grid(f"{call}: medians, and of pairs median [p25-p75]", columns, rows)


def _setups(found: Sequence[Place], broker: str) -> dict[str, Setup]:
    stores = {place.name: Setup(Kind.IDEMPOTENT, broker, place.url) for place in found}
    return {_NO_STORE: Setup(Kind.PLAIN, broker), **stores}


def _executed(worker: Worker) -> Rate:
    worker.publish(_TASKS)
    return worker.execute()


def _per_second(rates: Sequence[Rate]) -> list[float]:
    return [each.per_second for each in rates]


def _cpu_us(rates: Sequence[Rate]) -> list[float]:
    return [each.cpu_us for each in rates]


def _rates_grid(rates: Mapping[str, Sequence[Rate]]) -> Grid:
    plain, plain_cpu = _per_second(rates[_NO_STORE]), _cpu_us(rates[_NO_STORE])

    def row(name: str) -> tuple[str, ...]:
        own, cpu = _per_second(rates[name]), _cpu_us(rates[name])
        cells = (name, f"{spread(own).median:.0f}", f"{spread(cpu).median:,.0f}")
        if name == _NO_STORE:
            return (*cells, "1", "0", "0")
        later = spread([1000 / one - 1000 / other for one, other in zip(own, plain, strict=True)])
        added = spread([one - other for one, other in zip(cpu, plain_cpu, strict=True)])
        return (*cells, ratio(ratios(own, plain)), f"{later.median:.2f}", f"{added.median:,.0f}")

    columns = (
        "Store",
        "tasks/s",
        "worker's CPU per task, us",
        "tasks/s to plain Celery",
        "added per task, ms",
        "added CPU, us",
    )
    return Grid("A worker on each store: empty tasks, medians", columns, [row(name) for name in rates])
