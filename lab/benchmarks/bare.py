"""The library's own requests to a store, replayed by nothing but the driver: the least that any code must pay.

Only the key and the result are put into them, so what is sent has the length of what the library sends, and no
time is spent on anything but the driver and JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from sqlalchemy import Connection, Engine, create_engine, event

from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sql import SQLStore
from lab.benchmarks import wire
from lab.benchmarks.contenders import Contender, GuardedCall
from lab.benchmarks.payloads import order, result_of
from lab.benchmarks.wire import Tap

__all__ = ["bare_key", "bare_redis", "bare_sql"]


def bare_key(number: int) -> str:
    """How the key begins under which a bare client keeps order ``number``."""
    return f"bare-{number}-"


@dataclass(frozen=True, slots=True)
class _Recording:
    """What the library sent for one key, in the words of the driver."""

    key: str
    result: str
    new_key: Sequence[Any]
    duplicate: Sequence[Any]

    def other_key(self, number: int) -> str:
        """A key of the same length for another order."""
        return bare_key(number).ljust(len(self.key), "-")


def _recording(store: Store, during: Callable[[Callable[[], object]], Sequence[Any]]) -> _Recording:
    store.provision()
    call, number = GuardedCall(store), time.time_ns()
    call.delivery(number - 1)()  # connects
    key = call.operation(order(number)).identity.key
    new_key, duplicate = during(call.delivery(number)), during(call.delivery(number))
    record = store.get(key)
    store.close()
    assert record is not None
    assert isinstance(record.result, str)
    return _Recording(key, record.result, new_key, duplicate)


def bare_redis(url: str, client: redis.Redis | redis.RedisCluster) -> Contender:
    """redis-py alone.

    Args:
        url: The store on one server, to record from.
        client: Where to replay.
    """
    port = urlsplit(url).port
    assert port is not None
    with Tap(port, wire.redis) as tap:

        def during(act: Callable[[], object]) -> list[list[bytes]]:
            before = tap.round_trips
            act()
            return _commands(tap.trips[before:])

        recording = _recording(open_store(url.replace(f":{port}", f":{tap.port}")), during)
        for name, *arguments in _commands(tap.trips):
            if name == b"EVAL":
                client.script_load(arguments[0])  # on every node, as not all have met it
    return _BareRedis(client, recording)


def _commands(trips: Sequence[bytes]) -> list[list[bytes]]:
    return [command for trip in trips for command in wire.redis_commands(trip)]


class _BareRedis:
    name = "bare redis-py"

    def __init__(self, client: redis.Redis | redis.RedisCluster, recording: _Recording) -> None:
        self._client: Any = client
        self._recording = recording
        self._claim, self._complete = recording.new_key
        self._name, self._result = recording.key.encode(), recording.result.encode()

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``."""
        sent, key = order(number), self._recording.other_key(number).encode()
        return lambda: self._deliver(sent, key)

    def _deliver(self, sent: dict[str, Any], key: bytes) -> object:
        _, written, *stored = self._client.execute_command(*self._with(self._claim, key))
        if not written:
            (values,) = stored
            return json.loads(dict(zip(values[::2], values[1::2], strict=True))[b"result"])
        result = result_of(sent)
        _, written = self._client.execute_command(*self._with(self._complete, key, json.dumps(result).encode()))
        assert written
        return result

    def _with(self, command: Sequence[bytes], key: bytes, result: bytes = b"") -> list[bytes | str]:
        name, *arguments = command
        return [
            name.decode(),
            *(result if each == self._result else each.replace(self._name, key) for each in arguments),
        ]


_Statement = tuple[str, Any]
"""A statement and its parameters, by position or by name."""


@contextmanager
def bare_sql(url: str) -> Iterator[Contender]:
    """The driver of ``url`` alone, on one connection in autocommit mode."""
    sent: list[_Statement] = []

    def record(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.append((statement, parameters))

    def during(act: Callable[[], object]) -> list[_Statement]:
        sent.clear()
        act()
        return list(sent)

    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    event.listen(engine, "before_cursor_execute", record)
    try:
        # An engine of the user's keeps its events; a test holds what both ways send against each other.
        recording = _recording(SQLStore(engine), during)
        with engine.connect() as connection:
            yield _BareSql(engine, connection, recording)
    finally:
        engine.dispose()


class _BareSql:
    def __init__(self, engine: Engine, connection: Connection, recording: _Recording) -> None:
        self.name = f"bare {engine.driver}"
        self._driver: Any = connection.connection.dbapi_connection
        self._duplicate_key: type[Exception] = engine.dialect.loaded_dbapi.IntegrityError
        self._recording = recording
        self._known: set[int] = set()

    def delivery(self, number: int) -> Callable[[], object]:
        """A delivery of order ``number``."""
        sent, key = order(number), self._recording.other_key(number)
        deliver = self._deliver_again if number in self._known else self._deliver
        self._known.add(number)
        return lambda: deliver(sent, key)

    def _deliver(self, sent: dict[str, Any], key: str) -> object:
        claim, complete = self._recording.new_key
        self._execute(claim, key)
        result = result_of(sent)
        self._execute(complete, key, json.dumps(result))
        return result

    def _deliver_again(self, sent: dict[str, Any], key: str) -> object:
        row: Mapping[str, Any] = {}
        for each in self._recording.duplicate:
            with suppress(self._duplicate_key):
                row = self._execute(each, key)
        return json.loads(row["result_text"])

    def _execute(self, statement: _Statement, key: str, result: str = "") -> Mapping[str, Any]:
        text, parameters = statement
        cursor = self._driver.cursor()
        try:
            cursor.execute(text, self._with(parameters, key, result))
            if cursor.description is None:
                return {}
            row = cursor.fetchone()
            return dict(zip((each[0] for each in cursor.description), row, strict=True))
        finally:
            cursor.close()

    def _with(self, parameters: Any, key: str, result: str) -> Any:
        other = {self._recording.key: key, self._recording.key.encode(): key.encode(), self._recording.result: result}

        def put(value: Any) -> Any:
            return other.get(value, value) if isinstance(value, str | bytes) else value

        if isinstance(parameters, Mapping):
            return {name: put(value) for name, value in parameters.items()}
        return tuple(put(value) for value in parameters)
