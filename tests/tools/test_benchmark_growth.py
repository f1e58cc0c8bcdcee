"""A store that the benchmark has filled holds what the library would have written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from lab.benchmarks.environment import Servers
from lab.benchmarks.filling import Filled, filled_at, key_of
from lab.benchmarks.growth import CALLS, TEMPLATE, Calls, Cost, steepest
from lab.embedded import EmbeddedRedis

COUNT = 30

SERVERS = {
    "memory": "",
    "DynamoDB": "dynamodb_endpoint",
    "Redis": "redis_server",
    "PostgreSQL": "postgres",
    "MariaDB": "mariadb",
    "SQLite": "",
}
"""By store, the fixture with its server."""


@pytest.fixture(params=SERVERS)
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filled]:
    """A store with a record of the library's own, and copies of it."""
    name: str = request.param
    server: Any = request.getfixturevalue(SERVERS[name]) if SERVERS[name] else None
    where = Servers(server if name == "DynamoDB" else "", "")
    match name:
        case "memory":
            url = "memory://"
        case "SQLite":
            url = f"sqlite:///{tmp_path}/growth.sqlite3"
        case "DynamoDB":
            url = where.store_url("growth")
        case _:
            url = server.url
    with filled_at(name, url, COUNT, where) as found:
        Calls(found.store).deliver(TEMPLATE)()
        template = found.store.get(TEMPLATE)
        assert template is not None
        found.fill(template, COUNT)
        yield found
        for each in list(found.store.scan()):
            found.store.delete(each.key, each.revision)


def test_every_filled_record_is_the_librarys_own_under_another_key(filled: Filled) -> None:
    """Nothing but the key differs, on every store; so what is measured on the copies holds for records."""
    template = filled.store.get(TEMPLATE)
    assert template is not None
    for number in range(COUNT):
        key = key_of(TEMPLATE, number)
        assert filled.store.get(key) == template.but(key=key)
    assert len(list(filled.store.scan())) == 1 + COUNT
    size = filled.size()
    assert size is None or size >= 0


def test_delivery_of_a_filled_record_is_a_duplicate(filled: Filled) -> None:
    """The benchmark asks for records by their numbers: one that were not there would be claimed, and cost more."""
    before = list(filled.store.scan())
    Calls(filled.store).deliver(key_of(TEMPLATE, COUNT - 1))()
    assert list(filled.store.scan()) == before
    Calls(filled.store).deliver(key_of(TEMPLATE, COUNT))()
    assert len(list(filled.store.scan())) == len(before) + 1


def test_filled_records_of_redis_are_forgotten_like_others(redis_server: EmbeddedRedis) -> None:
    """The server's dictionary of expiry times is part of what a record costs."""
    with (
        filled_at("Redis", redis_server.url, COUNT, Servers("", "")) as found,
        redis.Redis(port=redis_server.port, db=len(str(COUNT))) as client,
    ):
        client.flushdb()
        Calls(found.store).deliver(TEMPLATE)()
        template = found.store.get(TEMPLATE)
        assert template is not None
        found.fill(template, COUNT)
        assert client.info("keyspace")[f"db{len(str(COUNT))}"]["expires"] == 1 + COUNT
        client.flushdb()


def test_steepest_call_is_found_by_pairs() -> None:
    """A call that doubles is told, of each clock by itself; others that shrink do not make up for it."""
    small, large = [Cost(1, 4), Cost(10, 40)], [Cost(2, 2), Cost(20, 20)]
    by_size = {
        1_000: dict.fromkeys(CALLS, small),
        10_000: dict.fromkeys(CALLS, small),
        100_000: {**dict.fromkeys(CALLS, small), "completion": large},
    }
    assert steepest(by_size, "cpu") == ("completion", 2)
    assert steepest(by_size, "wall") == ("claim", 1)
