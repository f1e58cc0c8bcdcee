"""What the benchmarks count on the wire is what the server was asked, trip by trip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Connection, create_engine, text

from lab.benchmarks import wire
from lab.benchmarks.places import _tapped_cluster, _traced_sqlite
from lab.benchmarks.wire import Tap, trips_during
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis, EmbeddedRedisCluster


def test_redis_commands_are_trips_and_a_pipeline_is_one(redis_server: EmbeddedRedis) -> None:
    """Two commands that wait for their replies are two trips; two that are sent together are one."""
    with Tap(redis_server.port, wire.redis) as tap, redis.Redis(port=tap.port) as client:
        client.ping()

        def two_commands() -> None:
            client.set("wire", "a value\r\nof two lines, *1 $2")
            client.get("wire")

        def one_pipeline() -> None:
            client.pipeline(transaction=False).set("wire", 1).delete("wire").execute()

        assert trips_during([tap], two_commands) == ["SET", "GET"]
        assert trips_during([tap], one_pipeline) == ["SET+DEL"]
        assert trips_during([tap], lambda: None) == []


def test_large_message_is_one_trip(redis_server: EmbeddedRedis) -> None:
    """A command that comes in many pieces is one."""
    with Tap(redis_server.port, wire.redis) as tap, redis.Redis(port=tap.port) as client:
        client.ping()
        assert trips_during([tap], lambda: client.set("wire", b"x" * 3_000_000)) == ["SET"]
        assert client.strlen("wire") == 3_000_000


def test_pipeline_that_is_answered_while_it_comes_is_one_trip() -> None:
    """Wherever it is cut within a command."""
    sent = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*1\r\n$4\r\nPING\r\n"
    for cut in range(1, len(sent)):
        names = wire.redis([sent[:cut], sent[cut:]])
        assert [each for each in names if each != wire._PART] in (["GET+PING"], ["GET", "PING"])
        assert (names == ["GET", "PING"]) is (cut == sent.index(b"*1"))


def test_cluster_names_the_taps_while_it_is_watched(redis_cluster: EmbeddedRedisCluster) -> None:
    """A client that asks the cluster where its nodes are goes through a tap to every node."""
    keys = [f"key-{number}" for number in range(30)]
    with _tapped_cluster(redis_cluster) as watched:
        address = watched.url.replace("redis+cluster:", "redis:")
        with redis.RedisCluster.from_url(address) as client:
            for key in keys:
                client.get(key)  # a connection to each node
            assert watched.count(lambda: [client.get(key) for key in keys]) == ["GET"] * len(keys)


def _insert_and_look(connection: Connection) -> None:
    connection.execute(text("INSERT INTO wire VALUES (:number)"), {"number": 1})
    connection.execute(text("SELECT number FROM wire")).all()


SQL: dict[str, tuple[str, Callable[[Any], Any], list[str]]] = {
    "postgres": ("postgres", wire.postgresql, ["BEGIN", "INSERT", "SELECT", "COMMIT"]),
    # pymysql begins no transaction: it has switched autocommit off when it connected.
    "mariadb": ("mariadb", wire.mysql, ["INSERT", "SELECT", "COMMIT"]),
}


@pytest.mark.parametrize("name", SQL)
def test_statements_of_a_transaction_are_trips(name: str, request: pytest.FixtureRequest) -> None:
    """BEGIN and COMMIT count like any other statement; prepared ones are called by what they do."""
    fixture, protocol, expected = SQL[name]
    server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(fixture)
    with Tap(server.port, protocol) as tap:
        engine = create_engine(server.url.replace(f":{server.port}", f":{tap.port}"))
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE wire (number INTEGER)"))

        def transaction() -> None:
            with engine.connect() as connection:
                _insert_and_look(connection)
                connection.commit()

        try:
            for _ in range(8):  # psycopg prepares at the fifth
                transaction()
            assert trips_during([tap], transaction)[: len(expected)] == expected
        finally:
            with engine.begin() as connection:
                connection.execute(text("DROP TABLE wire"))
            engine.dispose()


def test_statement_outside_a_transaction_is_one_trip(postgres: EmbeddedPostgres) -> None:
    """In autocommit mode PostgreSQL is asked once, and once more while psycopg prepares the statement."""
    with Tap(postgres.port, wire.postgresql) as tap:
        url = postgres.url.replace(f":{postgres.port}", f":{tap.port}")
        engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_reset_on_return=None)
        with engine.connect() as connection:
            found = [trips_during([tap], lambda: connection.execute(text("SELECT :n"), {"n": "1"})) for _ in range(8)]
        engine.dispose()
    assert found.count(["SELECT"]) == 7
    assert found.count(["PREPARE SELECT", "SELECT"]) == 1


def test_sqlite_names_its_statements(tmp_path: Path) -> None:
    """SQLite itself says what it executes, also what nobody wrote."""
    with _traced_sqlite(f"sqlite:///{tmp_path}/wire.sqlite3") as watched:
        engine = create_engine(watched.url)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE wire (number INTEGER)"))

        def transaction() -> None:
            with engine.begin() as connection:
                _insert_and_look(connection)

        assert watched.count(transaction) == ["BEGIN", "INSERT", "SELECT", "COMMIT"]
        engine.dispose()


def test_operations_of_aws_are_named() -> None:
    """The operation stands in a header; it may come in any case."""
    request = b"POST / HTTP/1.1\r\nHost: here\r\nX-Amz-Target: DynamoDB_20120810.PutItem\r\nContent-Length: 2\r\n\r\n{}"
    assert wire.aws([request, request.replace(b"X-Amz-Target", b"x-amz-target")]) == ["PutItem", "PutItem"]
