"""Whether a call costs more when the store is full: claim, completion, duplicate and listing, by number of records."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from statistics import median
from typing import Any
from uuid import uuid4

from celery_idempotent import Policy
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from lab.benchmarks.contenders import make_app
from lab.benchmarks.cpu_per_call import collecting_by_hand
from lab.benchmarks.environment import Servers
from lab.benchmarks.filling import Filled, filled_at, key_of, urls
from lab.benchmarks.payloads import order, result_of
from lab.benchmarks.report import Goal, Grid, Section, ratio
from lab.benchmarks.stats import Spread, ratios, shuffled, spread
from lab.folders import temporary_folder

__all__ = ["CALLS", "FLAT", "SIZES", "TEMPLATE", "WARM_UP", "Calls", "Cost", "measure", "steepest"]

SIZES = (1_000, 10_000, 100_000, 1_000_000)

_LIMITS: Mapping[str, int] = {"DynamoDB": 10_000, "MariaDB": 100_000}
"""Records that can be filled in within about half a minute; of the others, all sizes."""

_BIG_LIMITS: Mapping[str, int] = {"DynamoDB": 100_000}
"""The same within some minutes."""

CALLS = ("claim", "completion", "duplicate")
FLAT = 1.2
"""Times the smallest store: what a call on the largest may cost."""

_LISTED_IN = 1.0
_UNKNOWN = 20
_LISTED_OF = 100_000
_LISTINGS = 3
_OPERATIONS = 1_000
"""Operations over which the bytes of a record in memory are taken."""

WARM_UP = 20
_COLLECT_EVERY = 20


@dataclass(frozen=True, slots=True)
class Cost:
    """One call: CPU time of this process and time on the clock, in microseconds."""

    cpu: float
    wall: float


Costs = Mapping[str, Mapping[int, Mapping[str, Sequence[Cost]]]]
"""By store, size and call."""


@dataclass(frozen=True, slots=True)
class Listing:
    """How long it took to list few records of so many, by what they have."""

    size: int
    by: str
    seconds: float


_LABEL = "acme/7"
_QUESTIONS: Mapping[str, Mapping[str, Any]] = {"status": {"status": Status.UNKNOWN}, "label": {"label": _LABEL}}


def measure(servers: Servers, rounds: int, largest: int, progress: Callable[[], None], *, big: bool = False) -> Section:
    """Measure ``rounds`` interleaved rounds on stores of up to ``largest`` records, calling ``progress`` after each."""
    limits = _BIG_LIMITS if big else _LIMITS
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        found, missing = stack.enter_context(urls(servers, folder))
        subjects = {
            name: {
                size: _Subject(stack.enter_context(filled_at(name, url, size, servers)), size)
                for size in SIZES
                if size <= min(largest, limits.get(name, largest))
            }
            for name, url in found.items()
        }
        record_bytes = {name: _fill(by_size) for name, by_size in subjects.items()}
        record_bytes["memory"] = _bytes_in_memory()
        costs = _costs(subjects, rounds, progress)
        listings = {name: _listed(by_size) for name, by_size in subjects.items()}
    return Section(
        "9. Growth",
        "The same calls on stores that hold more and more records: a table, a database of Redis or a file of its own "
        "for each size, filled in bulk by the store's own means with copies of one completed record under keys as "
        f"random as real ones. {rounds} rounds after {WARM_UP} to warm up; in each, every store of every size gets one "
        "new key and one duplicate of a record drawn from all it holds, in random order. `claim` is from the call to "
        "the beginning of the body, `completion` from its end to the return, `duplicate` a whole replay. CPU is user "
        "and system time of the calling process. A ratio is that of two calls of one round, to the store with the "
        "fewest records. The DynamoDB here is an emulator that keeps a table in "
        f"a Python dict and takes in some thousand records a second, so it is filled to {_limit(subjects, 'DynamoDB')} "
        "only, and its times say nothing about AWS; it lists a table in one page, where AWS begins "
        f"another after each MB. MariaDB is filled to {_limit(subjects, 'MariaDB')}. "
        "Bytes per record are what the server needs more after filling, indexes included: Redis's `used_memory`, "
        "`pg_total_relation_size`, the InnoDB and SQLite file; on DynamoDB AWS's rule (names, values and 100 bytes); "
        f"in memory what Python allocates for {_OPERATIONS} operations that were run. The argument is the smallest "
        f"order. Listing is `scan(status=UNKNOWN)` and `scan(label=...)` with {_UNKNOWN} such records, median of "
        f"{_LISTINGS}, on DynamoDB by its optional indexes."
        + "".join(f" {name} is missing here: {lack}." for name, lack in missing.items()),
        [*(_grid(call, costs) for call in CALLS), _listing_grid(listings, record_bytes)],
        list(_goals(costs, listings)),
        {
            "calls": {
                name: {
                    size: {
                        call: {
                            "cpu_us": asdict(spread([cost.cpu for cost in by_call[call]])),
                            "wall_us": asdict(spread([cost.wall for cost in by_call[call]])),
                            "cpu_to_smallest": asdict(_to_smallest(by_size, size, call, "cpu")),
                            "wall_to_smallest": asdict(_to_smallest(by_size, size, call, "wall")),
                        }
                        for call in CALLS
                    }
                    for size, by_call in by_size.items()
                }
                for name, by_size in costs.items()
            },
            "bytes_per_record": record_bytes,
            "listing": {name: {each.by: asdict(each) for each in found} for name, found in listings.items()},
        },
    )


def _limit(subjects: Mapping[str, Mapping[int, object]], name: str) -> str:
    return f"{max(subjects[name]):,}" if name in subjects else "nothing"


class _Subject:
    """A store of one size, and the calls on it.

    Args:
        filled: The store.
        size: How many records it is to hold.
    """

    def __init__(self, filled: Filled, size: int) -> None:
        self._filled = filled
        self._size = size
        self._calls = Calls(filled.store)
        self._made = 0

    def fill(self) -> float | None:
        """Fill the store with copies of the library's own record; how many bytes each takes, if the server tells."""
        self._calls.deliver(TEMPLATE)()
        self._filled.fill(self._template(), self._size)
        size = self._filled.size()
        return None if size is None else size / self._size

    def new_key(self) -> Mapping[str, Cost]:
        """Claim a new key and complete it."""
        deliver = self._calls.deliver(self._new())
        before = _Moment()
        deliver()
        after, began = _Moment(), self._calls.body_began
        return {"claim": before.until(began), "completion": began.until(after)}

    def duplicate(self, number: int) -> Mapping[str, Cost]:
        """Replay one of the records."""
        deliver = self._calls.deliver(key_of(TEMPLATE, number % self._size))
        before = _Moment()
        deliver()
        return {"duplicate": before.until(_Moment())}

    def listings(self) -> Sequence[Listing]:
        """List the few records that wait for a person, by their status and by their label."""
        store, template = self._filled.store, self._template()
        for number in range(_UNKNOWN):
            unknown = template.but(
                key=key_of(TEMPLATE, f"unknown {number}"),
                revision=uuid4().hex,
                status=Status.UNKNOWN,
                label=_LABEL,
                result=None,
                content_type=None,
                expires_at=None,
                error="the attempt never ended",
            )
            store.swap(unknown, None)
        return [
            Listing(self._size, by, median(_seconds(partial(_list, store, wanted)) for _ in range(_LISTINGS)))
            for by, wanted in _QUESTIONS.items()
        ]

    def _template(self) -> Record:
        template = self._filled.store.get(TEMPLATE)
        assert template is not None
        return template

    def _new(self) -> str:
        self._made += 1
        return key_of(TEMPLATE, f"new {self._made}")


_FINGERPRINT = sha256(b"the arguments").hexdigest()
TEMPLATE = key_of("growth:1:", "template")


class _Moment:
    __slots__ = ("cpu", "wall")

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time_ns(), time.perf_counter_ns()

    def until(self, later: _Moment) -> Cost:
        return Cost((later.cpu - self.cpu) / 1000, (later.wall - self.wall) / 1000)


class Calls:
    """Deliveries to one store, under given keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._app = make_app(store)  # its runtime holds it weakly
        self._codec = runtime_of(self._app).codec
        self._result = result_of(order(0))
        self.body_began = _Moment()

    def deliver(self, key: str) -> Callable[[], object]:
        """A delivery, ready to be called."""
        operation = _operation(key)
        delivery = Delivery(operation, self._store, self._codec, heartbeat, CONTROL_FLOW, lambda event: None)
        return lambda: delivery.run(self._body)

    def _body(self, claimed: object) -> dict[str, Any]:
        self.body_began = _Moment()
        return self._result


def _operation(key: str) -> Operation:
    return Operation(
        identity=Identity(key, _FINGERPRINT),
        policy=Policy(),
        task="shop.charge",
        task_id="0b8d1a5e-7c2f-4a52-9d0c-6f6f3b1f4a11",
        worker="celery@benchmark",
    )


def _list(store: Store, wanted: Mapping[str, Any]) -> None:
    found = list(store.scan(**wanted))
    assert len(found) == _UNKNOWN, f"{store!r} lists {len(found)} records"


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _fill(by_size: Mapping[int, _Subject]) -> float | None:
    """Fill the stores; bytes per record of the largest."""
    return [by_size[size].fill() for size in sorted(by_size)][-1]


def _listed(by_size: Mapping[int, _Subject]) -> Sequence[Listing]:
    return by_size[max(size for size in by_size if size <= _LISTED_OF)].listings()


def _bytes_in_memory() -> float:
    store = MemoryStore()
    calls = Calls(store)
    calls.deliver(TEMPLATE)()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(_OPERATIONS):
            calls.deliver(key_of(TEMPLATE, number))()
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / _OPERATIONS
    finally:
        tracemalloc.stop()


def _costs(
    subjects: Mapping[str, Mapping[int, _Subject]], rounds: int, progress: Callable[[], None]
) -> dict[str, dict[int, dict[str, list[Cost]]]]:
    found: dict[str, dict[int, dict[str, list[Cost]]]] = {
        name: {size: {call: [] for call in CALLS} for size in by_size} for name, by_size in subjects.items()
    }
    drawn = random.Random(0)
    calls = [(name, size, is_new) for name, by_size in subjects.items() for size in by_size for is_new in (True, False)]
    with collecting_by_hand() as collect:
        for index in range(-WARM_UP, rounds):
            if index % _COLLECT_EVERY == 0:
                collect()
            number = drawn.randrange(max(SIZES))
            for name, size, is_new in shuffled(calls, WARM_UP + index):
                subject = subjects[name][size]
                made = subject.new_key() if is_new else subject.duplicate(number)
                if index >= 0:
                    for call, cost in made.items():
                        found[name][size][call].append(cost)
            progress()
    return found


def _to_smallest(by_size: Mapping[int, Mapping[str, Sequence[Cost]]], size: int, call: str, clock: str) -> Spread:
    of_size, of_smallest = ([getattr(cost, clock) for cost in by_size[each][call]] for each in (size, min(by_size)))
    return ratios(of_size, of_smallest)


def steepest(by_size: Mapping[int, Mapping[str, Sequence[Cost]]], clock: str) -> tuple[str, float]:
    """The call that costs most in the largest store in terms of the smallest, and that ratio."""
    found = {call: _to_smallest(by_size, max(by_size), call, clock).median for call in CALLS}
    call = max(found, key=lambda each: found[each])
    return call, found[call]


def _grid(call: str, costs: Costs) -> Grid:
    def row(name: str, size: int) -> tuple[str, ...]:
        by_size = costs[name]
        cpu, wall = (spread([getattr(each, clock) for each in by_size[size][call]]).median for clock in _CLOCKS)
        cells = (f"{name}, {size:,}", f"{cpu:,.0f}", f"{wall:,.0f}")
        if size == min(by_size):
            return (*cells, "1", "1")
        return (*cells, *(ratio(_to_smallest(by_size, size, call, clock)) for clock in _CLOCKS))

    columns = ("Store and records", "CPU us", "on the clock, us", "CPU to smallest", "clock to smallest")
    rows = [row(name, size) for name, by_size in costs.items() for size in by_size]
    return Grid(f"{call}: medians, and of pairs median [p25-p75]", columns, rows)


_CLOCKS = ("cpu", "wall")


def _listing_grid(listings: Mapping[str, Sequence[Listing]], record_bytes: Mapping[str, float | None]) -> Grid:
    def row(name: str) -> tuple[str, ...]:
        found, size = listings[name], record_bytes[name]
        bytes_of = "" if size is None else f"{size:,.0f}"
        return (name, bytes_of, f"{found[0].size:,}", *(f"{each.seconds * 1000:,.1f}" for each in found))

    columns = ("Store", "bytes per record", "listed of", *(f"by {by}, ms" for by in _QUESTIONS))
    return Grid(f"Room, and listing {_UNKNOWN} UNKNOWN records", columns, list(map(row, listings)))


def _goals(costs: Costs, listings: Mapping[str, Sequence[Listing]]) -> Iterator[Goal]:
    for name, by_size in costs.items():
        sizes = f"{min(by_size):,} to {max(by_size):,} records"
        for clock, what in zip(_CLOCKS, ("CPU", "on the clock"), strict=True):
            call, measured = steepest(by_size, clock)
            yield Goal(
                f"{name}, {sizes}, {what}", f"at most {FLAT} times", f"{measured:.3f} ({call})", measured <= FLAT
            )
        for found in listings[name]:
            yield Goal(
                f"{name}, {_UNKNOWN} UNKNOWN of {found.size:,} by {found.by}",
                f"under {_LISTED_IN:.0f} s",
                f"{found.seconds:.3f} s",
                found.seconds < _LISTED_IN,
            )
