"""The benchmarks measure what they say: their arithmetic, and the stores that they fill."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks.environment import DynamoDB
from lab.benchmarks.growth import CALLS, Cost, Subject, key_of, steepest, url_at
from lab.benchmarks.latency import Process
from lab.benchmarks.timing import Spread, added, ratios
from lab.embedded import EmbeddedRedis

COUNT = 30
SERVERS = {"DynamoDB": "dynamodb_endpoint", "Redis": "redis_server", "PostgreSQL": "postgres", "MariaDB": "mariadb"}
"""By store, the fixture with its server."""


def test_arithmetic_is_of_pairs() -> None:
    """The ratio of medians would be 2/10: a machine that slows down half-way must not decide the result."""
    assert ratios([1, 2, 200], [1, 10, 100]) == Spread(median=1, p25=0.6, p75=1.5)
    assert added([3, 10, 600], [1, 5, 100]) == Spread(median=2, p25=1.5, p75=3.5)
    small, large = [Cost(1, 4), Cost(10, 40)], [Cost(2, 2), Cost(20, 20)]
    by_size = {1_000: dict.fromkeys(CALLS, small), 10_000: {"new key": small, "duplicate": large}}
    assert (steepest(by_size, "cpu"), steepest(by_size, "wall")) == (("duplicate", 2), ("new key", 1))


def test_process_waits_for_a_store_that_is_away(redis_server: EmbeddedRedis) -> None:
    """A new key twice, a duplicate once, a plain task never; each takes no less than its round trips."""
    with ExitStack() as running:
        process = Process(redis_server.url, 20, running)
        for call, trips in {"new key": 2, "duplicate": 1, "plain": 0}.items():
            expected = process.line.round_trips + trips
            assert (process.ms(call) >= 20 * trips, process.line.round_trips) == (True, expected)


@pytest.mark.parametrize(
    "name", ["SQLite", "Redis", *(pytest.param(each, marks=pytest.mark.nightly) for each in SERVERS if each != "Redis")]
)
def test_every_filled_record_is_the_librarys_own_under_another_key(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """So what is measured on the copies holds for records; one that is asked for by its number is a duplicate."""
    server: Any = request.getfixturevalue(SERVERS[name]) if name in SERVERS else None
    urls = {"SQLite": f"sqlite:///{tmp_path}/growth.sqlite3"}
    url = DynamoDB(server).store_url("growth") if name == "DynamoDB" else urls.get(name) or server.url
    with closing(Subject(url_at(name, url, COUNT), COUNT)) as subject:
        store: Any = subject.store
        subject.fill()
        keys, before = [key_of(number) for number in range(COUNT)], list(store.scan())
        assert [store.get(key) for key in keys] == [store.get(keys[0]).but(key=key) for key in keys]
        subject.deliver(COUNT - 1)
        assert list(store.scan()) == before
        subject.deliver(COUNT)
        assert len(list(store.scan())) == len(before) + 1 == COUNT + 1
        for each in list(store.scan()):
            store.delete(each.key, each.revision)
