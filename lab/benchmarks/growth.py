"""Whether a call costs more when the store is full: a new key, a duplicate and listing, by number of records."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from statistics import median
from typing import Any, cast
from uuid import uuid4

from sqlalchemy import insert, select

from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.schema import KEY
from lab.benchmarks.contenders import GuardedCall, order, result_of
from lab.benchmarks.environment import DynamoDB
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.timing import Spread, ratios, sample, spread
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis
from lab.folders import temporary_folder

SIZES = (1_000, 10_000, 100_000, 1_000_000)
_LIMITS: Mapping[str, int] = {"DynamoDB": 10_000, "MariaDB": 100_000, "memory": 100_000, "SQLite": 100_000}
"""Records that can be written within two minutes; of the others, all sizes."""

_BATCH, _RECORDS = 5_000, 100  # times the rounds squared, the largest store may have: a short run fills no large one
CALLS = ("new key", "duplicate")
CLOCKS = {"cpu": "CPU", "wall": "on the clock"}
FLAT = 1.2  # times the smallest store: what a call on the largest may cost
WARM_UP = 20

_LISTED_IN, _UNKNOWN, _LISTINGS = 1.0, 20, 3
"""Seconds in which so many records of all are to be listed; and how often that is tried."""

_LABEL = "acme/7"
_ASKED = {"status": Status.UNKNOWN, "label": _LABEL, "name": _LABEL, "oldest": _UNKNOWN}


def key_of(number: int | str) -> str:
    """The key of record ``number``, as random as a real one."""
    return f"growth:1:{sha256(str(number).encode()).hexdigest()}"


def url_at(name: str, url: str, size: int) -> str:
    """The place for ``size`` records in the store at ``url``: a table, a database of Redis, or a file."""
    head, _, query = url.partition("?")
    places = {
        "memory": url,
        "Redis": f"{url.rpartition('/')[0]}/{len(str(size))}",
        "DynamoDB": f"{head.rpartition('/')[0]}/growth-{size}?{query}&unknown_index=in-doubt&label_index=labels",
    }
    return places.get(name, f"{url}?table=growth_{size}")


@dataclass(frozen=True, slots=True)
class Cost:
    """One call: CPU time of this process and time on the clock, in microseconds."""

    cpu: float
    wall: float


BySize = Mapping[int, Mapping[str, Sequence[Cost]]]
"""By size and call, of one store."""


class Subject:
    """A store of one size, filled by the library's own writes, and the calls on it."""

    def __init__(self, url: str, size: int) -> None:
        self.store = open_store(url)
        self.store.provision()
        self._size = size
        self._call = GuardedCall(self.store)
        self._result = result_of(order(0))

    def close(self) -> None:
        self.store.close()

    def fill(self) -> None:
        """Copy the first record, as fast as the store can."""
        self.deliver(0)
        store, template = self.store, cast(Any, self.store.get(key_of(0)))
        for first in range(1, self._size, _BATCH):
            keys = [key_of(number) for number in range(first, min(first + _BATCH, self._size))]
            if isinstance(store, RedisStore):
                with store._connected().pipeline(transaction=False) as pipeline:
                    for key in keys:
                        pipeline.copy(store._redis_key(template.key).decode(), store._redis_key(key).decode())
                    pipeline.execute()
            elif isinstance(store, SQLStore):
                transaction = store.begin()
                row = transaction.connection.execute(select(store.table).limit(1)).mappings().one()
                named = [key.encode() if isinstance(row[KEY], bytes) else key for key in keys]
                transaction.connection.execute(insert(store.table), [{**row, KEY: key} for key in named])
                transaction.commit()
            else:
                for key in keys:
                    store.swap(template.but(key=key), None)

    def deliver(self, number: int | str) -> Cost:
        """Claim and complete that record, or replay it."""
        deliver = self._call.of(Identity(key_of(number), "f" * 64), lambda: self._result)
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        deliver()
        return Cost((time.process_time_ns() - cpu) / 1000, (time.perf_counter_ns() - wall) / 1000)

    def call(self, which: str, number: int) -> Cost:
        """A new key, or one of the records, drawn from all."""
        drawn = random.Random(number).randrange(max(SIZES)) % self._size
        return self.deliver(drawn if which == "duplicate" else f"new {number}")

    def listings(self) -> dict[str, float]:
        """Seconds in which the few records that wait for a person are listed, by their status and by their label."""
        template: Any = self.store.get(key_of(0))
        unknown = template.but(status=Status.UNKNOWN, label=_LABEL, result=None, content_type=None, expires_at=None)
        for number in range(_UNKNOWN):
            self.store.swap(unknown.but(key=key_of(f"unknown {number}"), revision=uuid4().hex), None)
        return {by: median(self._seconds({by: asked}) for _ in range(_LISTINGS)) for by, asked in _ASKED.items()}

    def _seconds(self, asked: Mapping[str, Any]) -> float:
        begin = time.perf_counter()
        found = list(self.store.scan(**asked))
        assert len(found) >= _UNKNOWN, f"{self.store!r} lists {len(found)} records"
        return time.perf_counter() - begin


def _urls(dynamodb: DynamoDB, running: ExitStack) -> dict[str, str]:
    kinds: Mapping[str, Any] = {"Redis": EmbeddedRedis, "PostgreSQL": EmbeddedPostgres, "MariaDB": EmbeddedMariaDB}
    urls = {"memory": "memory://", "DynamoDB": dynamodb.store_url("growth")}
    urls |= {name: running.enter_context(kind()).url for name, kind in kinds.items() if not kind.missing()}
    return {**urls, "SQLite": f"sqlite:///{running.enter_context(temporary_folder())}/benchmark.sqlite3"}


def measure(dynamodb: DynamoDB, rounds: int) -> Section:
    """Measure ``rounds`` interleaved rounds on stores as large as they allow."""
    largest = _RECORDS * rounds**2
    with ExitStack() as stack:
        subjects = {
            (name, size): stack.enter_context(closing(Subject(url_at(name, url, size), size)))
            for name, url in _urls(dynamodb, stack).items()
            for size in SIZES
            if size <= min(largest, _LIMITS.get(name, largest))
        }
        for subject in subjects.values():
            subject.fill()
        takes = {(*of, call): partial(subject.call, call) for of, subject in subjects.items() for call in CALLS}
        taken = sample(takes, rounds, warm_up=WARM_UP)
        listed = dict(iter(subjects))  # of each store the largest
        seconds = {name: subjects[name, size].listings() for name, size in listed.items()}
    costs: dict[str, BySize] = {
        name: {size: {call: taken[name, size, call] for call in CALLS} for each, size in subjects if each == name}
        for name in listed
    }
    listing = [
        (name, f"{listed[name]:,}", *(f"{each * 1000:,.1f}" for each in took.values()))
        for name, took in seconds.items()
    ]
    return Section(
        "9. Growth",
        "The same calls on stores that hold more and more records: a table, a database of Redis or a file of its own "
        f"for each size, filled with copies of one completed record. {rounds} rounds after {WARM_UP} to warm up; in "
        "each, every store of every size gets one new key and one duplicate of a record drawn from all it holds, in "
        "random order. CPU is user and system time of the calling process. A ratio is that of two calls of one round, "
        "to the store with the fewest records. The DynamoDB here is an emulator that counts a table's items after each "
        f"write, so its clock says nothing about AWS. Listing is `scan` with {_UNKNOWN} records that fit, median of "
        f"{_LISTINGS}, on DynamoDB by its optional indexes; that and memory give all for name and age.",
        [
            *(_grid(call, costs) for call in CALLS),
            Grid(f"Listing {_UNKNOWN} UNKNOWN records, ms", ("Store", "listed of", *_ASKED), listing),
        ],
        list(_goals(costs, seconds)),
    )


def _of(by_size: BySize, size: int, call: str, clock: str) -> list[float]:
    return [getattr(cost, clock) for cost in by_size[size][call]]


def _to_smallest(by_size: BySize, size: int, call: str, clock: str) -> Spread:
    return ratios(_of(by_size, size, call, clock), _of(by_size, min(by_size), call, clock))


def steepest(by_size: BySize, clock: str) -> tuple[str, float]:
    """The call that costs most in the largest store in terms of the smallest, and that ratio."""
    found = {call: _to_smallest(by_size, max(by_size), call, clock).median for call in CALLS}
    return max(found.items(), key=lambda each: each[1])


def _grid(call: str, costs: Mapping[str, BySize]) -> Grid:
    def row(name: str, size: int) -> tuple[str, ...]:
        by_size, is_smallest = costs[name], size == min(costs[name])
        medians = (f"{spread(_of(by_size, size, call, clock)).median:,.0f}" for clock in CLOCKS)
        compared = ("1" if is_smallest else _to_smallest(by_size, size, call, clock).shown for clock in CLOCKS)
        return (f"{name}, {size:,}", *medians, *compared)

    columns = ("Store and records", "CPU us", "on the clock, us", "CPU to smallest", "clock to smallest")
    rows = [row(name, size) for name, by_size in costs.items() for size in by_size]
    return Grid(f"{call}: medians, and of pairs median [p25-p75]", columns, rows)


def _goals(costs: Mapping[str, BySize], seconds: Mapping[str, Mapping[str, float]]) -> Iterator[Goal]:
    for name, by_size in costs.items():
        for clock in ("cpu",) if name == "DynamoDB" else CLOCKS:  # on its clock a bare `put_item` grows as much
            call, measured = steepest(by_size, clock)
            subject = f"{name}, {min(by_size):,} to {max(by_size):,} records, {CLOCKS[clock]}"
            yield Goal(subject, f"at most {FLAT} times", f"{measured:.3f} ({call})", measured <= FLAT)
        for by, took in seconds[name].items():
            subject = f"{name}, {_UNKNOWN} UNKNOWN of {max(by_size):,} by {by}"
            yield Goal(subject, f"under {_LISTED_IN:.0f} s", f"{took:.3f} s", took < _LISTED_IN)
