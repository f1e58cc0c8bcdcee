"""explanation/comparison-functions.md: each row is acted out on one emulated DynamoDB, here and with Powertools."""
# mypy: allow-untyped-decorators

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from threading import Barrier, Event
from typing import Any, Protocol
from uuid import uuid4

import boto3
import pytest
from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)

from celery_idempotent import Policy, idempotent, open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from tests.support.documents import DOCS, table
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:aws_lambda_powertools"),
    pytest.mark.filterwarnings("ignore:Couldn't determine the remaining time left"),
    pytest.mark.filterwarnings("ignore:No value found for idempotency_key"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]

CALL = "a call ..."
LEASE = 0.5

KILLED = """
import os, sys
from tests.docs.test_comparison_of_functions import SYSTEMS

system = SYSTEMS[sys.argv[1]](sys.argv[2], sys.argv[3])
system.guard(lambda order: os._exit(9), sys.argv[4])(order={"id": 1})
"""


class System(Protocol):
    """One way to make a function idempotent, with a table of its own."""

    def __init__(self, endpoint: str, name: str) -> None: ...

    def provision(self) -> None:
        """Create the table."""

    def guard(
        self,
        body: Callable[..., Any],
        name: str,
        *,
        lease: float | None = None,
        stalls: bool = False,
        validate: str = "",
    ) -> Callable[..., Any]:
        """The function, with ``order.id`` as its key and, of those that stall, a lease that nobody renews."""

    def is_renewed(self, times: int) -> bool:
        """Whether the lease of the only record was renewed so often; True where nothing ever renews it."""


class Ours:
    def __init__(self, endpoint: str, name: str) -> None:
        store = open_store(f"dynamodb://test:test@{endpoint.removeprefix('http://')}/{name}?region=us-east-1")
        assert isinstance(store, DynamoDBStore)
        self.store = store

    def provision(self) -> None:
        self.store.provision()

    def guard(
        self,
        body: Callable[..., Any],
        name: str,
        *,
        lease: float | None = None,
        stalls: bool = False,
        validate: str = "",
    ) -> Callable[..., Any]:
        if lease is None:
            policy = Policy("order.id")
        else:
            policy = Policy("order.id", lease=lease, deadline=lease if stalls else None)
        return idempotent(policy, store=self.store, name=name)(body)

    def is_renewed(self, times: int) -> bool:
        (record,) = self.store.scan()
        return record.lease_until - record.created_at > LEASE * 1000 * (1 + times / 3)


class _Context:
    """Of an invocation that is nearly over: Powertools takes the rest of its time for the lease."""

    def __init__(self, lease: float) -> None:
        self.lease = lease

    def get_remaining_time_in_millis(self) -> int:
        return round(self.lease * 1000)


class Powertools:
    def __init__(self, endpoint: str, name: str) -> None:
        self.client = boto3.client(
            "dynamodb",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        self.table = name
        self.layer = DynamoDBPersistenceLayer(table_name=name, boto3_client=self.client)

    def provision(self) -> None:
        self.client.create_table(
            TableName=self.table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )

    def guard(
        self,
        body: Callable[..., Any],
        name: str,
        *,
        lease: float | None = None,
        stalls: bool = False,
        validate: str = "",
    ) -> Callable[..., Any]:
        config = IdempotencyConfig(event_key_jmespath="id", payload_validation_jmespath=validate)
        if lease is not None:
            config.register_lambda_context(_Context(lease))  # type: ignore[arg-type]  # the one method it calls
        decorate: Any = idempotent_function(
            data_keyword_argument="order", persistence_store=self.layer, config=config, key_prefix=name
        )
        guarded: Callable[..., Any] = decorate(body)
        return guarded

    def is_renewed(self, times: int) -> bool:
        return True


SYSTEMS: dict[str, type[System]] = {"`@idempotent`": Ours, "Powertools": Powertools}


@dataclass
class Stage:
    """A system, and what its bodies do."""

    system: System
    column: str
    endpoint: str
    name: str
    bodies: int = 0
    began: Queue[int] = field(default_factory=Queue)

    def count(self) -> int:
        self.bodies += 1
        self.began.put(self.bodies)
        return self.bodies

    def guard(self, body: Callable[[int], Any] = lambda number: number, **options: Any) -> Callable[..., Any]:
        """A function whose body is given its number."""

        def function(order: dict[str, Any]) -> Any:
            return body(self.count())

        return self.system.guard(function, "function", **options)

    def tell(self, outcome: str) -> str:
        return f"{outcome}, {self.bodies} {'body' if self.bodies == 1 else 'bodies'}"


def _called(function: Callable[..., Any], **order: Any) -> str:
    """What a caller gets: a value, or the name of an exception."""
    try:
        found = function(order=order or {"id": 1})
        return f"`{asyncio.run(found) if inspect.iscoroutinefunction(function) else found!r}`"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the page names it
        return f"`{type(error).__name__}`"


# -- acts


def _completed(stage: Stage) -> str:
    function = stage.guard()
    _called(function)
    return stage.tell(_called(function))


def _at_once(stage: Stage) -> str:
    function, gate = stage.guard(), Barrier(8)

    def call() -> None:
        gate.wait(60)
        _called(function)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(call)
    return stage.tell(_called(function))


def _while_it_runs(stage: Stage, **options: Any) -> str:
    held = Event()
    function = stage.guard(lambda number: held.wait(60) and number if number == 1 else number, **options)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(_called, function)
        assert stage.began.get(timeout=60) == 1
        if options:
            wait_until(lambda: stage.system.is_renewed(3), "the lease was renewed")
        told = _called(function)
        held.set()
    return stage.tell(told)


def _past_its_lease(stage: Stage) -> str:
    return _while_it_runs(stage, lease=LEASE if stage.column == "`@idempotent`" else 0.001)


def _killed(stage: Stage) -> str:
    arguments = [stage.column, stage.endpoint, stage.name, "function"]
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, *arguments], check=False, timeout=120)
    assert killed.returncode == 9
    stage.bodies = 1
    return stage.tell(_called(stage.guard()))


def _stale(stage: Stage, end: Callable[[int], Any]) -> tuple[str, str]:
    """What a call gets that lost its claim while it ran, and what the next one does."""
    held = Event()
    function = stage.guard(
        lambda number: end(number) if number == 1 and held.wait(60) else number, lease=LEASE, stalls=True
    )
    with ThreadPoolExecutor(1) as threads:
        stale: Future[str] = threads.submit(_called, function)
        assert stage.began.get(timeout=60) == 1
        wait_until(lambda: _called(function) == "`2`", "another call has taken over")
        held.set()
        mine = stale.result(60)
    return stage.tell(mine), stage.tell(_called(function))


def _raising(number: int) -> Any:
    raise ValueError(number)


def _exiting(number: int) -> Any:
    raise SystemExit(number)


def _stale_itself(stage: Stage) -> str:
    return _stale(stage, lambda number: number)[0]


def _after_stale(stage: Stage) -> str:
    return _stale(stage, lambda number: number)[1]


def _after_stale_error(stage: Stage) -> str:
    return _stale(stage, _raising)[1]


def _tampered(stage: Stage, **options: Any) -> str:
    function = stage.guard(**options)
    _called(function, id=1, cents=500)
    return stage.tell(_called(function, id=1, cents=900))


def _validated(stage: Stage) -> str:
    return _tampered(stage, validate="cents")


def _without_key(stage: Stage) -> str:
    function = stage.guard()
    _called(function, cents=500)
    return stage.tell(_called(function, cents=500))


def _returned(value: Any) -> Callable[[Stage], str]:
    def act(stage: Stage) -> str:
        function = stage.guard(lambda number: value)
        _called(function)
        return stage.tell(_called(function))

    return act


def _after(first: Callable[[int], Any]) -> Callable[[Stage], str]:
    def act(stage: Stage) -> str:
        function = stage.guard(lambda number: first(number) if number == 1 else number)
        _called(function)
        return stage.tell(_called(function))

    return act


def _awaited(stage: Stage) -> str:
    async def function(order: dict[str, Any]) -> int:
        return stage.count()

    guarded = stage.system.guard(function, "function")
    _called(guarded)
    return stage.tell(_called(guarded))


def _nested(stage: Stage) -> str:
    inner = stage.system.guard(lambda order: "inner", "inner")

    def outer(order: dict[str, Any]) -> str:
        stage.count()
        inner(order=order)
        return "outer"

    guarded = stage.system.guard(outer, "outer")
    _called(guarded)
    return stage.tell(_called(guarded))


ACTS: dict[str, Callable[[Stage], str]] = {
    "after the first has completed": _completed,
    "after eight at the same time": _at_once,
    "while the first one's body runs": _while_it_runs,
    "while a body runs that has outlived its lease": _past_its_lease,
    "after the process was killed in the body": _killed,
    "that lost its claim while it ran, and returns": _stale_itself,
    "after that": _after_stale,
    "after one that lost its claim, and raises": _after_stale_error,
    "with another amount under the key": _tampered,
    "the same, the amount validated": _validated,
    "without a key, for the second time": _without_key,
    "after a result of `None`": _returned(None),
    "after a result of 0": _returned(0),
    "after a result that JSON cannot hold": _returned(object()),
    "after the body raised": _after(_raising),
    "after the body raised `SystemExit`": _after(_exiting),
    "of an `async def`, for the second time": _awaited,
    "of a function around another one, for the second time": _nested,
}

CELLS = [
    pytest.param(row[CALL], column, row[column], id=f"{row[CALL]}: {column}")
    for row in table(DOCS / "explanation/comparison-functions.md", CALL)
    for column in SYSTEMS
]


@pytest.fixture
def stage(dynamodb_endpoint: str, column: str) -> Stage:
    """A system with an empty table."""
    name = f"functions-{uuid4().hex}"
    stage = Stage(SYSTEMS[column](dynamodb_endpoint, name), column, dynamodb_endpoint, name)
    stage.system.provision()
    return stage


@pytest.mark.parametrize(("call", "column", "cell"), CELLS)
def test_function_is_called(stage: Stage, call: str, cell: str) -> None:
    """What the caller gets and how many bodies have begun, as the page says."""
    assert ACTS[call](stage) == cell


def test_page_has_every_call() -> None:
    """No act without its row."""
    assert [row[CALL] for row in table(DOCS / "explanation/comparison-functions.md", CALL)] == [*ACTS]


def test_nested_functions_of_powertools_with_a_layer_each(dynamodb_endpoint: str) -> None:
    """As the page says, it is the shared layer that mixes their records up."""
    name = f"functions-{uuid4().hex}"
    stage = Stage(Powertools(dynamodb_endpoint, name), "Powertools", dynamodb_endpoint, name)
    stage.system.provision()
    inner = Powertools(dynamodb_endpoint, name).guard(lambda order: "inner", "inner")
    outer = stage.guard(lambda number: inner(order={"id": 1}) and "outer")

    assert [_called(outer), stage.tell(_called(outer))] == ["`'outer'`", "`'outer'`, 1 body"]
