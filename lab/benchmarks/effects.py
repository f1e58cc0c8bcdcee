"""What the tools for effects cost: requests of a step, a commit, a transaction, and DynamoDB's write units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from sqlalchemy import text

from celery_idempotent import Policy
from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce, Effect
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.store import CommittingStore, Store, TransactionalStore
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from lab.benchmarks import wire
from lab.benchmarks.contenders import make_app
from lab.benchmarks.environment import Servers
from lab.benchmarks.places import Place, places
from lab.benchmarks.report import Goal, Grid, Section
from lab.benchmarks.wire import Tap
from lab.folders import temporary_folder

__all__ = ["measure"]

_PLAIN = "nothing: claim and completion"
_MOST: Mapping[str, int] = {
    _PLAIN: 2,
    "a step": 3,
    "a step at most once": 4,
    "three steps": 5,
    "a commit": 2,
}
"""By what the body does, the most requests that the library wants to pay for a new key. A transaction is counted too,
and held to nothing: how a driver begins and ends one is its own."""

_TRANSACTION = "a transaction with one insert"

_Body = Callable[[ProtectedAttempt], object]


def measure(servers: Servers) -> Section:
    """Count once; counts do not vary."""
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        found, missing = stack.enter_context(places(servers, folder))
        counted = {place.name: dict(_requests(place)) for place in found}
        units = dict(_write_units(next(place for place in found if place.name == "DynamoDB")))
    bodies = [*_MOST, _TRANSACTION]
    rows = [(name, *(_cell(each.get(body)) for body in bodies)) for name, each in counted.items()]
    return Section(
        "7. Effects",
        "A new key whose body does what the column says, with everything that is sent for it, claim and end included. "
        "Round trips are counted on the wire, on SQLite its statements. Write units are AWS's for the items that were "
        "sent: one for each started KiB, and twice that in a transaction (DynamoDB Developer Guide, "
        '"Read and write operations"); the emulator\'s own figures are not used. The record is that of a result of '
        f"20 bytes.{''.join(f' {name} is missing here: {lack}.' for name, lack in missing.items())}",
        [
            Grid("Requests for a new key", ("Store", *bodies), rows),
            Grid(
                "DynamoDB, write units for a new key",
                ("body", "units", "of them for the user's own write"),
                [(body, f"{ours + theirs}", f"{theirs}") for body, (ours, theirs) in units.items()],
            ),
        ],
        [
            Goal(f"{name}, {body}", f"at most {most}", str(len(each[body])), len(each[body]) <= most)
            for name, each in counted.items()
            if name in {"DynamoDB", "Redis", "PostgreSQL"}
            for body, most in _MOST.items()
            if body in each
        ],
        {"requests": counted, "write_units": units},
    )


def _cell(sent: list[str] | None) -> str:
    return "" if sent is None else str(len(sent))


_EFFECTS: dict[str, Effect] = {"at most once": AtMostOnce(), "*": AtLeastOnce()}


class _Operations:
    """New operations on one store, one after the other."""

    def __init__(self, store: Store) -> None:
        self._app = make_app(store)
        self._codec = runtime_of(self._app).codec
        self._store = store

    def run(self, body: _Body) -> None:
        """Deliver one."""

        def handled(attempt: Claim | None) -> object:
            assert attempt is not None
            return body(ProtectedAttempt(attempt, self._codec, effects=_EFFECTS))

        operation = Operation(
            identity=Identity(f"effects:1:{uuid4().hex}", None), policy=Policy(), task="t", task_id="id", worker="w"
        )
        Delivery(operation, self._store, self._codec, heartbeat, CONTROL_FLOW, lambda event: None).run(handled)


def _bodies(store: Store, prepare: Callable[[str], None]) -> Iterator[tuple[str, _Body]]:
    yield _PLAIN, lambda handle: "x" * 18
    yield "a step", lambda handle: handle.step("a", lambda step: "ch_1")
    yield "a step at most once", lambda handle: handle.step("at most once", lambda step: "ch_1")
    yield "three steps", lambda handle: [handle.step(name, lambda step: "ch_1") for name in "abc"]
    if isinstance(store, CommittingStore) and isinstance(store, DynamoDBStore):
        table = f"effects-{uuid4().hex}"
        prepare(table)
        put = {"Put": {"TableName": table, "Item": {"key": "a", "text": "x" * 100}}}
        yield "a commit", lambda handle: handle.commit("x" * 18, [put])
    if isinstance(store, TransactionalStore):
        table = f"effects_{uuid4().hex}"
        prepare(table)
        statement = text(f"INSERT INTO {table} VALUES ('a')")

        def book(handle: ProtectedAttempt) -> object:
            with handle.transaction() as transaction:
                transaction.execute(statement)
                return transaction.done("x" * 18)

        yield _TRANSACTION, book


def _requests(place: Place) -> Iterator[tuple[str, list[str]]]:
    with closing(open_store(place.url)) as unwatched:
        unwatched.provision()
        with place.watch() as watched, closing(open_store(watched.url)) as store:
            operations = _Operations(store)
            for name, body in _bodies(store, lambda table: _make_table(unwatched, table)):
                for _ in range(8):  # until drivers have connected, loaded scripts and prepared statements
                    operations.run(body)
                yield name, watched.count(lambda body=body: operations.run(body))  # type: ignore[misc]


def _make_table(store: Store, name: str) -> None:
    if isinstance(store, DynamoDBStore):
        store._connected().create_table(
            TableName=name,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        )
    elif isinstance(store, TransactionalStore):
        transaction = store.begin()
        transaction.connection.execute(text(f"CREATE TABLE {name} (word VARCHAR(9))"))
        transaction.connection.commit()
        transaction.rollback()


def _write_units(place: Place) -> Iterator[tuple[str, tuple[int, int]]]:
    """By body, the units of the record and of the user's own write."""
    port = urlsplit(place.url).port or 0
    with Tap(port, wire.aws) as tap, closing(open_store(place.url.replace(f":{port}", f":{tap.port}"))) as store:
        assert isinstance(store, DynamoDBStore)
        operations = _Operations(store)
        for name, body in _bodies(store, lambda table: _make_table(store, table)):
            before = tap.round_trips
            operations.run(body)
            ours = theirs = 0
            for trip in tap.trips[before:]:
                (operation,), request = wire.aws([trip]), json.loads(trip.partition(b"\r\n\r\n")[2])
                if operation == "PutItem":
                    ours += _units(request["Item"])
                else:
                    record, *others = (next(iter(each.values()))["Item"] for each in request["TransactItems"])
                    ours += 2 * _units(record)
                    theirs += sum(2 * _units(each) for each in others)
            yield name, (ours, theirs)


def _units(item: Mapping[str, Mapping[str, Any]]) -> int:
    """Names and values in UTF-8, in started KiB; a number is counted by its digits, which is never too little."""
    size = sum(
        len(name.encode()) + len(str(value).encode()) for name, typed in item.items() for value in typed.values()
    )
    return math.ceil(size / 1024)
