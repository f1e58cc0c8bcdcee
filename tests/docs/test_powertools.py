"""What the pages say of Powertools is acted out by it and, where both are compared, by this library."""
# mypy: allow-untyped-decorators

import asyncio
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from aws_lambda_powertools.utilities.idempotency import DynamoDBPersistenceLayer, IdempotencyConfig, idempotent_function

from celery_idempotent import Policy, current_attempt, open_store
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

MOVE = DOCS / "how-to/from-powertools.md"
LEASE = 0.5
ORDER = {"id": "o-1", "cents": 500}
KILLED = """
import os, sys
from tests.docs.test_powertools import Theirs

Theirs(*sys.argv[1:]).guard(lambda order: os._exit(9))(order={"id": "o-1", "cents": 500})
"""


class Theirs:
    """Powertools with a table of its own, whose bodies are counted."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.given = endpoint, name
        options: Any = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        self.client = boto3.client("dynamodb", aws_access_key_id="test", aws_secret_access_key="test", **options)
        self.layer = DynamoDBPersistenceLayer(table_name=name, boto3_client=self.client)
        self.bodies, self.began = 0, Queue[int]()

    def guard(self, body: Callable[..., Any], *, stalls: bool = False, validate: str = "") -> Callable[..., Any]:
        """The function with its order's id as key and, of those that stall, a short lease."""
        config = IdempotencyConfig(event_key_jmespath="id", payload_validation_jmespath=validate)
        if stalls:  # it takes the rest of an invocation for its lease
            config.register_lambda_context(Context(LEASE, lambda: 0.0))  # type: ignore[arg-type]  # the one method it calls
        options: Any = {"persistence_store": self.layer, "config": config, "key_prefix": "function"}
        guarded: Callable[..., Any] = idempotent_function(body, data_keyword_argument="order", **options)
        return guarded

    def numbered(self, end: Callable[[int], Any] = int, **options: Any) -> Callable[..., Any]:
        """A guarded function whose end depends on its body's number."""
        return self.guard(lambda order: end(self.count()), **options)

    def count(self) -> int:
        self.bodies += 1
        self.began.put(self.bodies)
        return self.bodies


@pytest.fixture
def theirs(dynamodb_endpoint: str) -> Theirs:
    """With an empty table."""
    theirs = Theirs(dynamodb_endpoint, f"theirs-{uuid4().hex}")
    theirs.client.create_table(
        TableName=theirs.given[1],
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
    )
    return theirs


def called(function: Callable[..., Any], **order: Any) -> str:
    """What a caller gets: a value, or the name of an exception."""
    try:
        found = function(order=order or ORDER)
        return repr(asyncio.run(found) if inspect.iscoroutinefunction(function) else found)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the table names it
        return type(error).__name__


def twice(end: Callable[[int], Any] = int, **order: Any) -> Callable[[Theirs], str]:
    def act(theirs: Theirs) -> str:
        function = theirs.numbered(end)
        return [called(function, **order) for _ in range(2)][1]

    return act


def killed(theirs: Theirs) -> str:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, *theirs.given]
    assert subprocess.run(command, check=False, timeout=120).returncode == 9
    theirs.bodies = 1
    return called(theirs.numbered())


def stale(theirs: Theirs, end: Callable[[int], Any]) -> str:
    """What the next call gets, when one that lost its claim while it ran has ended, too."""
    held = Event()
    function = theirs.numbered(lambda number: end(number) if number == 1 and held.wait(60) else number, stalls=True)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(called, function)
        assert theirs.began.get(timeout=60) == 1
        wait_until(lambda: called(function) == "2", "another call has taken over")
        held.set()
        first.result(60)
    return called(function)


def fails(number: int, error: type[BaseException] = ValueError) -> int:
    if number == 1:
        raise error(number)
    return number


def with_another_amount(theirs: Theirs, validate: str = "") -> str:
    function = theirs.numbered(validate=validate)
    called(function, id=1, cents=500)
    return called(function, id=1, cents=900)


def awaited(theirs: Theirs) -> str:
    async def function(order: dict[str, Any]) -> int:
        return theirs.count()

    guarded = theirs.guard(function)
    return [called(guarded) for _ in range(2)][1]


BUSY = "IdempotencyAlreadyInProgressError"
CALLS: dict[str, tuple[Callable[[Theirs], str], str, int]] = {
    # what the last call gets, and how many bodies have begun
    "after the process was killed in the body": (killed, BUSY, 1),
    "after one that lost its claim while it ran": (partial(stale, end=int), "1", 2),
    "after one that lost its claim, and raises": (partial(stale, end=fails), "3", 3),
    "with another amount": (with_another_amount, "1", 1),
    "with another amount that is validated": (
        partial(with_another_amount, validate="cents"),
        *("IdempotencyValidationError", 1),
    ),
    "without a key, for the second time": (twice(cents=500), "2", 2),
    "after a result of 0": (twice(lambda number: 0), "None", 1),
    "after a result that JSON cannot hold": (twice(lambda number: object()), BUSY, 1),
    "after the body raised": (twice(fails), "2", 2),
    "after it raised SystemExit": (twice(partial(fails, error=SystemExit)), BUSY, 1),
    "of an async function": (awaited, BUSY, 0),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_by_powertools_is_what_the_comparison_says(theirs: Theirs, call: str) -> None:
    """What the last caller gets and how many bodies have begun; ours are told in tests/unit."""
    act, told, bodies = CALLS[call]
    assert (act(theirs), theirs.bodies) == (told, bodies)


ROW = "while both run"


@pytest.mark.parametrize("row", table(MOVE, ROW), ids=lambda row: row[ROW])
def test_call_while_both_run(theirs: Theirs, dynamodb_endpoint: str, row: dict[str, str]) -> None:
    """A first call by one, and what the other gets: a result, an error, or a second body."""
    happens, (first, other), held = row[ROW].split(" ")[0], re.findall("`(.+?)`", row[ROW]), Event()
    url = f"dynamodb://test:test@{dynamodb_endpoint.removeprefix('http://')}/ours-{uuid4().hex}?region=us-east-1"
    store: Any = open_store(url)
    store.provision()

    def act() -> None:
        if theirs.count() == 1 and happens == "running":
            assert held.wait(60)

    functions: dict[str, Any] = {"client": theirs.client, "act": act, "__name__": "shop"}
    ((line, block),) = code(MOVE, "python")
    for written, here in (
        ('table_name="orders"', f"table_name={theirs.given[1]!r}"),
        ('boto_config=Config(region_name="eu-west-1")', "boto3_client=client"),
        ('"dynamodb://@eu-west-1/idempotency"', repr(url)),
        ("    return {", "    act()\n    return {"),
    ):
        assert written in block
        block = block.replace(written, here)
    execute_block(MOVE, line, block, functions)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(functions[first], order=ORDER)
        assert theirs.began.get(timeout=60) == 1
        if happens == "completed":
            running.result(60)
        told = called(functions[other])
        held.set()

    result = "the result" if told == repr({"charged": 500}) else f"`{told}`"
    assert row["the second call gets"] == ("**a second body**" if theirs.bodies > 1 else f"{result}; no body")


class Bank:
    """What both handlers call; afterwards they do ``then``."""

    def __init__(self) -> None:
        self.calls, self.then = 0, Mock()

    def charge(self, fails: str) -> None:
        self.calls += 1
        if fails:
            raise LookupError if fails == "for good" else ConnectionError


def our_handler(bank: Bank, theirs: Theirs) -> Handler:
    @sqs_batch(Policy("order_id", remember=(LookupError,)), store=MemoryStore(), name="charge")
    def charge(order_id: str, cents: int = 1, fails: str = "") -> None:
        current_attempt().step("charge", lambda step: bank.charge(fails))
        bank.then()

    return charge


def their_handler(bank: Bank, theirs: Theirs) -> Handler:
    config = IdempotencyConfig(event_key_jmespath="order_id")

    @idempotent_function(data_keyword_argument="order", config=config, persistence_store=theirs.layer)
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
BATCH_ROWS = list(zip(table(DOCS / "how-to/aws-lambda.md", "batch"), BATCHES, strict=True))


@pytest.mark.parametrize("system", ["ours", "theirs"])
@pytest.mark.parametrize(("row", "batch"), BATCH_ROWS, ids=lambda each: each["batch"] if isinstance(each, dict) else "")
def test_batch_is_handled(theirs: Theirs, row: dict[str, str], batch: Any, system: str) -> None:
    """As many calls, and the messages that come again, as the page says."""
    bank, column = Bank(), "" if system == "ours" else " with Powertools"
    handler = (our_handler if system == "ours" else their_handler)(bank, theirs)

    told = batch(handler, bank)

    assert (str(bank.calls), told) == (row[f"calls{column}"], row[f"comes again{column}"])
