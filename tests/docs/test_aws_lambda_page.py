"""docs/how-to/aws-lambda.md: its code handles events, its template can be deployed, and its comparison was run."""
# mypy: allow-untyped-decorators

import json
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import boto3
import pytest
import yaml
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
from cfnlint.api import lint_file
from click.testing import CliRunner

from celery_idempotent import Policy, Status, current_attempt
from celery_idempotent.contrib.aws_lambda import sqs_batch
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.task import guard
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing import FakeStore
from tests.docs.test_aws_documents import _Template
from tests.support.aws_lambda import QUEUE, Context, Event, Handler, a_record, an_event, returned
from tests.support.documents import DOCS, code, execute_block, table

PAGE = DOCS / "how-to/aws-lambda.md"
REFERENCE = DOCS / "how-to/aws-lambda.md"
TEMPLATE = DOCS / "aws" / "lambda.yaml"
FIFO = f"{QUEUE}.fifo"


@pytest.fixture
def _aws(dynamodb_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that names nothing comes to the emulator."""
    for name, value in {
        "AWS_ENDPOINT_URL": dynamodb_endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": uuid4().hex[:16],
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)


# -- the code


class Gateway:
    """Honours keys."""

    def __init__(self) -> None:
        self.charges: dict[str, str] = {}

    def charge(self, order_id: str, cents: int, *, idempotency_key: str) -> str:
        return self.charges.setdefault(idempotency_key, order_id)


@pytest.mark.usefixtures("_aws", "unchanged_celery")
def test_the_example_charges_an_order_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On DynamoDB, as it stands: messages of SQS, an event, and a notification of SNS."""
    monkeypatch.setattr(guard, "_by_url", {})
    store = DynamoDBStore("idempotency", region="eu-west-1")
    store.provision()
    gateway = Gateway()
    names: dict[str, Any] = {"gateway": gateway, "__name__": "shop"}
    for block in code(PAGE, "python"):
        assert len(block[1].splitlines()) < 60
        execute_block(PAGE, *block, names)
    order = {"order_id": "o-1", "cents": 500}
    notification = {"Records": [{"Sns": {"MessageId": "m", "Message": "text"}}]}

    for _ in range(2):
        assert names["handler"](an_event(order, order), Context(30)) == {"batchItemFailures": []}
        assert names["handler"](an_event(order), None) == {"batchItemFailures": []}
        assert names["on_order"]({"order_id": "o-2", "cents": 500}, Context(30)) == "o-2"
        names["on_notification"](notification, Context(30))

    assert list(gateway.charges.values()) == ["o-1", "o-2"]
    assert {each.task for each in store.scan()} == {"charge", "shop.on_order", "shop.on_notification"}
    assert {(each.status, each.attempts) for each in store.scan()} == {(Status.COMPLETED, 1)}
    listed = CliRunner().invoke(idempotency, ["list"], obj=SimpleNamespace(app=names["app"]))
    assert "charge" in listed.output


# -- the template


def _resources() -> Any:
    return yaml.load(TEMPLATE.read_text(), _Template)


@pytest.mark.parametrize("name", ["lambda", "table"])
def test_templates_are_free_of_lint(name: str) -> None:
    """By AWS's own linter, with SAM's transform."""
    assert lint_file(DOCS / "aws" / f"{name}.yaml") == []


def test_the_template_has_what_the_page_asks_for() -> None:
    """Failures are read, messages stay hidden long enough, and no outcome is forgotten before its message."""
    template = _resources()
    function = template["Resources"]["Function"]["Properties"]
    (source,) = function["Events"].values()
    queue = template["Resources"]["Queue"]["Properties"]
    defaults = {name: each["Default"] for name, each in template["Parameters"].items()}

    assert source["Properties"]["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert defaults["VisibilityTimeout"] == 6 * defaults["FunctionTimeout"]
    assert queue["MessageRetentionPeriod"] * 1000 < Policy().retain_ms
    assert queue["RedrivePolicy"]["maxReceiveCount"] >= 5
    assert function["Handler"] == "shop.handler"
    (policy,) = function["Policies"]
    worker = json.loads((DOCS / "aws" / "iam-worker.json").read_text())
    assert [each["Action"] for each in policy["Statement"]] == worker["Statement"][0]["Action"]


# -- the comparison


class Declined(Exception):
    pass


class Bank:
    """What both handlers call."""

    def __init__(self) -> None:
        self.calls = 0
        self.then: Callable[[], None] = lambda: None

    def charge(self) -> None:
        self.calls += 1


System = Callable[[Bank], Handler]


def ours(bank: Bank) -> Handler:
    @sqs_batch(Policy("order_id", remember=(Declined,)), store=FakeStoreOnTime(), name="charge")
    def charge(order_id: str, cents: int = 1, fails: str = "") -> None:
        current_attempt().step("charge", lambda step: _charge(bank, fails))
        bank.then()

    return charge


def powertools(bank: Bank) -> Handler:
    name = f"powertools-{uuid4().hex}"
    boto3.client("dynamodb").create_table(
        TableName=name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
    )
    config = IdempotencyConfig(event_key_jmespath="order_id")

    @idempotent_function(
        data_keyword_argument="order", config=config, persistence_store=DynamoDBPersistenceLayer(table_name=name)
    )
    def charge(order: dict[str, Any]) -> None:
        _charge(bank, order.get("fails", ""))
        bank.then()

    def handler(event: Event, context: Any) -> Mapping[str, Any]:
        config.register_lambda_context(context)
        is_fifo = event["Records"][0]["eventSourceARN"].endswith(".fifo")
        found: Mapping[str, Any] = process_partial_response(
            event,
            lambda record: charge(order=json.loads(record.body)),
            SqsFifoPartialProcessor() if is_fifo else BatchProcessor(EventType.SQS),
            context,
        )
        return found

    return handler


class FakeStoreOnTime(FakeStore):
    """Its clock goes as the world's does, for a test that waits for a lease."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000


def _charge(bank: Bank, fails: str) -> None:
    bank.charge()
    if fails == "for good":
        raise Declined
    if fails:
        raise ConnectionError


def order(number: int, **members: Any) -> dict[str, Any]:
    return {"order_id": f"o-{number}", **members}


class Dead(BaseException):
    pass


def _told(handler: Handler, *records: object, seconds: float = 30) -> str:
    """What comes again of a batch."""
    event = an_event(*records)
    try:
        places = returned(event, handler(event, Context(seconds)))
    except BatchProcessingError:
        return "the invocation fails"
    return ", ".join(f"the {('first', 'second', 'third')[place]}" for place in places) or "none"


def _thrice(handler: Handler, bank: Bank) -> str:
    told = {_told(handler, order(1, fails="for good")) for _ in range(3)}
    (same,) = told
    return same


def _in_order(handler: Handler, bank: Bank) -> str:
    orders = ((1, "a", "once"), (2, "b", ""), (3, "a", ""))
    return _told(handler, *(a_record(order(n, fails=fails), group=group, queue=FIFO) for n, group, fails in orders))


def _killed(handler: Handler, bank: Bank) -> str:
    def die() -> None:
        bank.then = lambda: None
        raise Dead

    bank.then = die
    with pytest.raises(Dead):
        _told(handler, order(1), seconds=3)
    ends = time.monotonic() + 60
    while (told := _told(handler, order(1))) != "none" and time.monotonic() < ends:
        pass  # until the claim of the dead one has ended
    return told


BATCHES: Mapping[str, Callable[[Handler, Bank], str]] = {
    "the same order twice": lambda handler, bank: _told(handler, order(1), order(1)),
    "an order, and a text that is no JSON": lambda handler, bank: _told(handler, order(1), "no JSON"),
    "an order without its id": lambda handler, bank: _told(handler, {"cents": 1}),
    "an order, and the same with another amount": lambda handler, bank: _told(handler, order(1), order(1, cents=2)),
    "two orders that fail": lambda handler, bank: _told(handler, order(1, fails="once"), order(2, fails="once")),
    "an order that is declined for good, delivered three times": _thrice,
    "FIFO: an order of group a that fails, one of b, one of a": _in_order,
    "two orders when half a second is left": lambda handler, bank: _told(handler, order(1), order(2), seconds=0.5),
    "an order whose process dies after the call, delivered again": _killed,
}


def _row(system: System, batch: str) -> tuple[str, str]:
    bank = Bank()
    handler = system(bank)
    told = BATCHES[batch](handler, bank)
    return str(bank.calls), told


@pytest.mark.usefixtures("_aws")
@pytest.mark.filterwarnings("ignore:No idempotency key value found")
@pytest.mark.parametrize("row", table(REFERENCE, "batch"), ids=lambda row: row["batch"])
def test_the_comparison_was_run(row: dict[str, str]) -> None:
    """Both got the same batches."""
    assert _row(ours, row["batch"]) == (row["calls"], row["comes again"])
    assert _row(powertools, row["batch"]) == (row["calls with Powertools"], row["comes again with Powertools"])


def test_every_batch_is_in_the_comparison() -> None:
    """And no other."""
    assert [row["batch"] for row in table(REFERENCE, "batch")] == list(BATCHES)
