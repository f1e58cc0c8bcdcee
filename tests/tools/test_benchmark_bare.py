"""The bare clients of the benchmarks do what the library does, with nothing but the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import redis
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.benchmarks.bare import bare_key, bare_redis, bare_sql
from lab.benchmarks.contenders import Contender, GuardedCall
from lab.benchmarks.payloads import order, result_of
from lab.benchmarks.rows import IN_PLACE, kept
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis
from tests.support.waiting import wait_until


def _claims_completes_and_replays(bare: Contender, store: Store) -> None:
    first = bare.delivery(7)()
    (record,) = (each for each in store.scan() if each.key.startswith(bare_key(7)))
    assert first == result_of(order(7))
    assert record.status is Status.COMPLETED
    assert bare.delivery(7)() == first
    assert store.get(record.key) == record  # the duplicate wrote nothing
    assert bare.delivery(8)() == result_of(order(8))


def test_bare_redis_claims_completes_and_replays(redis_server: EmbeddedRedis) -> None:
    """What redis-py sends alone leaves the record that the library leaves."""
    with redis.Redis(port=redis_server.port) as client, closing(open_store(redis_server.url)) as store:
        _claims_completes_and_replays(bare_redis(redis_server.url, client), store)


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of its own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/bare.sqlite3"
        return
    server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(request.param)
    engine = create_engine(server.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("CREATE DATABASE bare"))
    yield make_url(server.url).set(database="bare").render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(text("DROP DATABASE bare"))
    engine.dispose()


def test_bare_driver_claims_completes_and_replays(database: str) -> None:
    """What the driver sends alone leaves the record that the library leaves."""
    with closing(open_store(database)) as store, bare_sql(database) as bare:
        _claims_completes_and_replays(bare, store)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_rows_of_postgresql_are_counted(database: str) -> None:
    """Of a store that has claimed and ended, nearly every end is beside its claim; the sizes are those of the table."""
    with closing(open_store(database)) as store:
        store.provision()
        call = GuardedCall(store)
        for number in range(40):
            call.delivery(number)()
    wait_until(partial(_has_counted, database), "the server has not counted")

    found = kept(database)

    assert found.in_place > IN_PLACE
    assert 200 < found.bytes < 4_000
    assert found.index_bytes > 0


def _has_counted(database: str) -> bool:
    try:
        return kept(database).in_place > 0
    except DBAPIError:  # nothing was updated yet
        return False
