"""What the pages say of Powertools is acted out by it and by this library, on one emulated DynamoDB."""
# mypy: allow-untyped-decorators

import asyncio
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from threading import Event
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import boto3
import pytest
from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    SqsFifoPartialProcessor,
    process_partial_response,
)
from aws_lambda_powertools.utilities.batch.exceptions import BatchProcessingError
from aws_lambda_powertools.utilities.idempotency import (
    DynamoDBPersistenceLayer,
    IdempotencyConfig,
    idempotent_function,
)

from celery_idempotent import Policy, current_attempt, idempotent, open_store
from celery_idempotent.contrib.aws_lambda import sqs_batch
from celery_idempotent.stores.memory import MemoryStore
from tests.support.aws_lambda import QUEUE, Context, Handler, a_record, an_event, returned
from tests.support.documents import DOCS, code, execute_block, table
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:aws_lambda_powertools"),
    pytest.mark.filterwarnings("ignore:Couldn't determine the remaining time left"),
    pytest.mark.filterwarnings("ignore:No value found for idempotency_key"),
    pytest.mark.filterwarnings("ignore:No idempotency key value found"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
]

MOVE, FUNCTIONS = DOCS / "how-to/from-powertools.md", DOCS / "how-to/aws-lambda.md"
LEASE = 0.5
ORDER = {"id": "o-1", "cents": 500}
KILLED = """
import os, sys
from tests.docs.test_powertools import Stage

Stage(*sys.argv[1:]).guard(lambda order: os._exit(9))(order={"id": "o-1", "cents": 500})
"""


@dataclass
class Stage:
    """A system with a table of its own, whose bodies are counted."""

    system: str
    endpoint: str
    name: str
    bodies: int = 0
    began: Queue[int] = field(default_factory=Queue)

    def __post_init__(self) -> None:
        options: Any = {"endpoint_url": self.endpoint, "region_name": "us-east-1"}
        self.client = boto3.client("dynamodb", aws_access_key_id="test", aws_secret_access_key="test", **options)
        self.layer = DynamoDBPersistenceLayer(table_name=f"theirs-{self.name}", boto3_client=self.client)
        address = self.endpoint.removeprefix("http://")
        self.url = f"dynamodb://test:test@{address}/ours-{self.name}?region=us-east-1"
        self.store: Any = open_store(self.url)

    def provision(self) -> None:
        self.store.provision()
        self.client.create_table(
            TableName=f"theirs-{self.name}",
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        )

    def guard(
        self, body: Callable[..., Any], name: str = "function", *, stalls: bool = False, validate: str = ""
    ) -> Callable[..., Any]:
        """The function with its order's id as key and, of those that stall, a lease that nobody renews."""
        if self.system == "ours":
            bounds: Any = {"lease": LEASE, "deadline": LEASE} if stalls else {}
            return idempotent(Policy("order.id", **bounds), store=self.store, name=name)(body)
        config = IdempotencyConfig(event_key_jmespath="id", payload_validation_jmespath=validate)
        if stalls:  # Powertools takes the rest of an invocation for its lease
            config.register_lambda_context(Context(LEASE, lambda: 0.0))  # type: ignore[arg-type]  # the one method it calls
        decorate: Any = idempotent_function(
            data_keyword_argument="order", persistence_store=self.layer, config=config, key_prefix=name
        )
        guarded: Callable[..., Any] = decorate(body)
        return guarded

    def numbered(self, end: Callable[[int], Any] = lambda number: number, **options: Any) -> Callable[..., Any]:
        """A guarded function whose end depends on its body's number."""

        def function(order: dict[str, Any]) -> Any:
            return end(self.count())

        return self.guard(function, **options)

    def count(self) -> int:
        self.bodies += 1
        self.began.put(self.bodies)
        return self.bodies

    def page(self, act: Callable[[], object]) -> dict[str, Callable[..., Any]]:
        """The functions of the page on moving; ``act`` is the effect."""
        names: dict[str, Any] = {"client": self.client, "act": act, "__name__": "shop"}
        ((line, block),) = code(MOVE, "python")
        for written, here in (
            ('table_name="orders"', f'table_name="theirs-{self.name}"'),
            ('boto_config=Config(region_name="eu-west-1")', "boto3_client=client"),
            ('"dynamodb://@eu-west-1/idempotency"', repr(self.url)),
            ("    return {", "    act()\n    return {"),
        ):
            assert written in block
            block = block.replace(written, here)
        execute_block(MOVE, line, block, names)
        return names


@pytest.fixture
def stage(dynamodb_endpoint: str, request: pytest.FixtureRequest) -> Stage:
    """With empty tables."""
    stage = Stage(request.node.callspec.params.get("system", "ours"), dynamodb_endpoint, uuid4().hex)
    stage.provision()
    return stage


def called(function: Callable[..., Any], **order: Any) -> str:
    """What a caller gets: a value, or the name of an exception."""
    try:
        found = function(order=order or ORDER)
        return repr(asyncio.run(found) if inspect.iscoroutinefunction(function) else found)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the table names it
        return type(error).__name__


def twice(end: Callable[[int], Any] = int) -> Callable[[Stage], str]:
    def act(stage: Stage) -> str:
        function = stage.numbered(end)
        return [called(function) for _ in range(2)][1]

    return act


def while_it_runs(stage: Stage) -> str:
    held = Event()
    function = stage.numbered(lambda number: held.wait(60) and number if number == 1 else number)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(called, function)
        assert stage.began.get(timeout=60) == 1
        told = called(function)
        held.set()
    return told


def killed(stage: Stage) -> str:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, stage.system, stage.endpoint, stage.name]
    assert subprocess.run(command, check=False, timeout=120).returncode == 9
    stage.bodies = 1
    return called(stage.numbered())


def stale(end: Callable[[int], Any], is_next: bool) -> Callable[[Stage], str]:
    """What a call gets that lost its claim while it ran, or what the next one does."""

    def act(stage: Stage) -> str:
        held = Event()
        function = stage.numbered(lambda number: end(number) if number == 1 and held.wait(60) else number, stalls=True)
        with ThreadPoolExecutor(1) as threads:
            first: Future[str] = threads.submit(called, function)
            assert stage.began.get(timeout=60) == 1
            wait_until(lambda: called(function) == "2", "another call has taken over")
            held.set()
            mine = first.result(60)
        return called(function) if is_next else mine

    return act


def fails(number: int, error: type[BaseException] = ValueError) -> int:
    if number == 1:
        raise error(number)
    return number


def with_another_amount(stage: Stage, validate: str = "") -> str:
    function = stage.numbered(validate=validate)
    called(function, id=1, cents=500)
    return called(function, id=1, cents=900)


def without_key(stage: Stage) -> str:
    function = stage.numbered()
    return [called(function, cents=500) for _ in range(2)][1]


def awaited(stage: Stage) -> str:
    async def function(order: dict[str, Any]) -> int:
        return stage.count()

    guarded = stage.guard(function)
    return [called(guarded) for _ in range(2)][1]


BUSY = "IdempotencyAlreadyInProgressError"
CALLS: dict[str, tuple[Callable[[Stage], str], tuple[str, int], tuple[str, int]]] = {
    # what the last call gets, and how many bodies have begun: here, and with Powertools
    "after the first has completed": (twice(), ("1", 1), ("1", 1)),
    "while the first one's body runs": (while_it_runs, ("InFlight", 1), (BUSY, 1)),
    "after the process was killed in the body": (killed, ("2", 2), (BUSY, 1)),
    "that lost its claim while it ran, and returns": (stale(int, False), ("2", 2), ("1", 2)),
    "after that": (stale(int, True), ("2", 2), ("1", 2)),
    "after one that lost its claim, and raises": (stale(fails, True), ("2", 2), ("3", 3)),
    "with another amount": (with_another_amount, ("KeyReused", 1), ("1", 1)),
    "with another amount that is validated": (
        lambda stage: with_another_amount(stage, "cents"),
        *(("KeyReused", 1), ("IdempotencyValidationError", 1)),
    ),
    "without a key, for the second time": (without_key, ("KeyMissing", 0), ("2", 2)),
    "after a result of 0": (twice(lambda number: 0), ("0", 1), ("None", 1)),
    "after a result that JSON cannot hold": (twice(lambda number: object()), ("ResultLost", 1), (BUSY, 1)),
    "after the body raised": (twice(fails), ("2", 2), ("2", 2)),
    "after it raised SystemExit": (twice(lambda number: fails(number, SystemExit)), ("2", 2), (BUSY, 1)),
    "of an async function": (awaited, ("1", 1), (BUSY, 0)),
}


@pytest.mark.parametrize("system", ["ours", "theirs"])
@pytest.mark.parametrize("call", CALLS)
def test_function_is_called(stage: Stage, system: str, call: str) -> None:
    """What the last caller gets and how many bodies have begun, as the comparison says."""
    act, ours, theirs = CALLS[call]
    assert (act(stage), stage.bodies) == (ours if system == "ours" else theirs)


ROW = "while both run"


@pytest.mark.parametrize("row", table(MOVE, ROW), ids=lambda row: row[ROW])
def test_call_while_both_run(stage: Stage, row: dict[str, str]) -> None:
    """A first call by one, and what the other gets: a result, an error, or a second body."""
    happens, (first, other) = row[ROW].split(" ")[0], re.findall("`(.+?)`", row[ROW])
    held = Event()

    def act() -> None:
        if stage.count() == 1 and happens == "running":
            assert held.wait(60)

    functions = stage.page(act)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(functions[first], order=ORDER)
        assert stage.began.get(timeout=60) == 1
        if happens == "completed":
            running.result(60)
        told = called(functions[other])
        held.set()

    result = "the result" if told == repr({"charged": 500}) else f"`{told}`"
    assert row["the second call gets"] == ("**a second body**" if stage.bodies > 1 else f"{result}; no body")


class Bank:
    """What both handlers call."""

    def __init__(self) -> None:
        self.calls = 0
        self.then: Callable[[], None] = lambda: None

    def charge(self, fails: str) -> None:
        self.calls += 1
        if fails == "for good":
            raise LookupError
        if fails:
            raise ConnectionError


def our_handler(bank: Bank, stage: Stage) -> Handler:
    @sqs_batch(Policy("order_id", remember=(LookupError,)), store=MemoryStore(), name="charge")
    def charge(order_id: str, cents: int = 1, fails: str = "") -> None:
        current_attempt().step("charge", lambda step: bank.charge(fails))
        bank.then()

    return charge


def their_handler(bank: Bank, stage: Stage) -> Handler:
    config = IdempotencyConfig(event_key_jmespath="order_id")

    @idempotent_function(data_keyword_argument="order", config=config, persistence_store=stage.layer)
    def charge(order: dict[str, Any]) -> None:
        bank.charge(order.get("fails", ""))
        bank.then()

    def handler(event: dict[str, Any], context: Any) -> Mapping[str, Any]:
        config.register_lambda_context(context)
        is_fifo = event["Records"][0]["eventSourceARN"].endswith(".fifo")
        processor = SqsFifoPartialProcessor() if is_fifo else BatchProcessor(EventType.SQS)
        found: Mapping[str, Any] = process_partial_response(
            event, lambda record: charge(order=json.loads(record.body)), processor, context
        )
        return found

    return handler


def order(number: int, **members: Any) -> dict[str, Any]:
    return {"order_id": f"o-{number}", **members}


def handled(*records: object, seconds: float = 30) -> Callable[[Handler, Bank], str]:
    """What comes again of a batch."""

    def act(handler: Handler, bank: Bank) -> str:
        event = an_event(*records)
        try:
            places = returned(event, handler(event, Context(seconds)))
        except BatchProcessingError:
            return "the invocation fails"
        return ", ".join(f"the {('first', 'second', 'third')[place]}" for place in places) or "none"

    return act


def thrice(handler: Handler, bank: Bank) -> str:
    (same,) = {handled(order(1, fails="for good"))(handler, bank) for _ in range(3)}
    return same


def dead(handler: Handler, bank: Bank) -> str:
    bank.then = Mock(side_effect=[KeyboardInterrupt, *[None] * 9])
    with pytest.raises(KeyboardInterrupt):
        handled(order(1), seconds=3)(handler, bank)
    wait_until(lambda: handled(order(1))(handler, bank) == "none", "the dead claim is over")
    return "none"


IN_ORDER = ((1, "a", "once"), (2, "b", ""), (3, "a", ""))
BATCHES: list[Callable[[Handler, Bank], str]] = [
    handled(order(1), order(1)),
    handled(order(1), "no JSON"),
    handled({"cents": 1}),
    handled(order(1), order(1, cents=2)),
    thrice,
    handled(*(a_record(order(n, fails=fails), group=group, queue=f"{QUEUE}.fifo") for n, group, fails in IN_ORDER)),
    handled(order(1), order(2), seconds=0.5),
    dead,
]
"""By row of the page's table, in order."""
BATCH_ROWS = list(zip(table(FUNCTIONS, "batch"), BATCHES, strict=True))


@pytest.mark.parametrize("system", ["ours", "theirs"])
@pytest.mark.parametrize(("row", "batch"), BATCH_ROWS, ids=lambda each: each["batch"] if isinstance(each, dict) else "")
def test_batch_is_handled(stage: Stage, row: dict[str, str], batch: Any, system: str) -> None:
    """As many calls, and the messages that come again, as the page says."""
    bank, column = Bank(), "" if system == "ours" else " with Powertools"
    handler = (our_handler if system == "ours" else their_handler)(bank, stage)

    told = batch(handler, bank)

    assert (str(bank.calls), told) == (row[f"calls{column}"], row[f"comes again{column}"])
