"""What the DynamoDB store makes of answers that no local server gives: waiting, pages, cancelled transactions.

botocore's own Stubber stands where the server would; everything above it is real.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import WriteFailed
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record

LOGIN: Any = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


@pytest.fixture
def server() -> Iterator[Stubber]:
    config = Config(retries={"total_max_attempts": 1})
    with Stubber(boto3.client("dynamodb", region_name="eu-west-1", config=config, **LOGIN)) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def store(server: Stubber) -> DynamoDBStore:
    client: Any = server.client
    return DynamoDBStore("t", client=client, local_clock=lambda: 0)


def test_missing_credentials_and_region_are_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What boto3 cannot find is named by boto3's own message, and needs a person."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")

    for store, missing in ((DynamoDBStore("t", region="eu-west-1"), "credentials"), (DynamoDBStore("t"), "region")):
        with pytest.raises(StoreMisconfigured, match=missing):
            store.swap(a_record(), None)


def test_scan_reads_every_page(server: Stubber, store: DynamoDBStore) -> None:
    """A table larger than one page is read to its end, with the filter on every page."""
    records = [a_record() for _ in range(3)]
    items = [store._item(each) for each in records]
    filtered: dict[str, Any] = {
        "TableName": "t",
        "ConsistentRead": True,
        "FilterExpression": "#f0 = :f0",
        "ExpressionAttributeNames": {"#f0": "status"},
        "ExpressionAttributeValues": {":f0": {"S": "IN_PROGRESS"}},
    }
    keys = [{"idempotencyKey": {"S": name}} for name in "xy"]
    for found, last, first in ((items[:2], keys[0], None), ([], keys[1], keys[0]), (items[2:], None, keys[1])):
        page = {"Items": found, **({"LastEvaluatedKey": last} if last else {})}
        server.add_response("scan", page, {**filtered, **({"ExclusiveStartKey": first} if first else {})})

    assert list(store.scan(status=Status.IN_PROGRESS)) == records


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    stub = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time", stub)
    return clock


NOT_READY = "ContinuousBackupsUnavailableException"


@pytest.mark.parametrize(
    ("states", "ttl", "backups", "seconds"),
    [
        (["ACTIVE"], "ENABLED", [""], 0),
        (["CREATING", "CREATING", "UPDATING"], "ENABLING", [""], 1),
        (["ACTIVE"], "DISABLING", ["UnknownOperationException"], 0),  # of servers that imitate DynamoDB
        (["ACTIVE"], "ENABLED", [NOT_READY] * 3 + [""], 6),  # of a table of AWS's that is minutes old
        (["ACTIVE"], "ENABLED", [NOT_READY] * 301, None),
    ],
)
def test_provisioning_waits_and_completes_what_is_missing(
    server: Stubber,
    store: DynamoDBStore,
    clock: FakeClock,
    states: list[str],
    ttl: str,
    backups: list[str],
    seconds: int | None,
) -> None:
    """For the table; TTL that is on is left on; and for backups, but not for ever: to provision again is safe."""
    server.add_client_error("create_table", "ResourceInUseException")
    for state in states:
        key = {"AttributeName": "idempotencyKey", "KeyType": "HASH"}
        server.add_response("describe_table", {"Table": {"TableStatus": state, "KeySchema": [key]}})
    server.add_response("describe_time_to_live", {"TimeToLiveDescription": {"TimeToLiveStatus": ttl}})
    if ttl.startswith("DISABL"):
        wanted: Any = {"Enabled": True, "AttributeName": "expiryTimestamp"}
        server.add_response("update_time_to_live", {}, {"TableName": "t", "TimeToLiveSpecification": wanted})
    for error in backups:
        if error:
            server.add_client_error("update_continuous_backups", error)
        else:
            wanted = {"PointInTimeRecoveryEnabled": True}
            expected = {"TableName": "t", "PointInTimeRecoverySpecification": wanted}
            server.add_response("update_continuous_backups", {}, expected)
    began = clock.monotonic()
    if seconds is None:
        with pytest.raises(StoreUnavailable, match="provision it again"):
            store.provision()
        return
    server.add_client_error("put_item", "ConditionalCheckFailedException")

    store.provision()

    assert clock.monotonic() - began == pytest.approx(seconds)


NOTHING, CONFLICT, FAILED = {"Code": "None"}, {"Code": "TransactionConflict"}, {"Code": "ConditionalCheckFailed"}
INVALID = {"Code": "ValidationError", "Message": "empty attribute"}
THEIRS = a_record()
WRITES = [
    {"Put": {"TableName": "stock", "Item": {"sku": "a"}}},
    {"Delete": {"TableName": "stock", "Key": {"sku": "b"}}},
]


def _outcome(store: DynamoDBStore) -> Any:
    try:
        return store.swap_with(a_record(), "expected", WRITES)
    except WriteFailed as error:
        return error.position, error.reason
    except StoreUnavailable as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("code", "position"), [("TransactionConflict", 0), ("ThrottlingError", 1), ("ProvisionedThroughputExceeded", 2)]
)
def test_contention_of_a_commit_is_an_outage(server: Stubber, store: DynamoDBStore, code: str, position: int) -> None:
    """Whatever is in the way, of the record or of a write, passes by itself; nobody's condition has failed."""
    reasons = [NOTHING, NOTHING, NOTHING]
    reasons[position] = {"Code": code, "Message": "wait"}
    _cancel(server, reasons)

    kind, text = _outcome(store)
    assert (kind, "conflicts with another transaction" in text) == (StoreUnavailable, True)


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ([NOTHING, CONFLICT, INVALID], (1, "ValidationError: empty attribute")),
        ([NOTHING, FAILED, FAILED], (0, "ConditionalCheckFailed")),
        # A zombie's writes fail for its successor's effects; what it must learn is that there is a successor.
        ([{**FAILED, "Item": DynamoDBStore("t")._item(THEIRS)}, FAILED, NOTHING], THEIRS),
        ([FAILED, NOTHING, NOTHING], None),
    ],
)
def test_lost_claim_comes_before_a_refusal_and_that_before_contention(
    server: Stubber, store: DynamoDBStore, reasons: list[Any], outcome: object
) -> None:
    """Of several reasons the one that says most is told."""
    _cancel(server, reasons)
    assert _outcome(store) == outcome


def _cancel(server: Stubber, reasons: list[Any]) -> None:
    fields = {"CancellationReasons": reasons}
    server.add_client_error("transact_write_items", "TransactionCanceledException", "why", modeled_fields=fields)


@pytest.mark.parametrize(
    ("code", "message", "error"),
    [
        ("TransactionInProgressException", "later", StoreUnavailable),  # it may have happened, or may happen still
        ("AccessDeniedException", "not authorized to perform: dynamodb:DeleteItem on stock", StoreMisconfigured),
    ],
)
def test_commit_without_a_certain_answer_is_an_outage(
    server: Stubber, store: DynamoDBStore, code: str, message: str, error: type[Exception]
) -> None:
    """Asking again tells; and of a transaction, which has no IAM action of its own, only AWS knows what it needs."""
    server.add_client_error("transact_write_items", code, message)

    kind, text = _outcome(store)
    assert (kind, message in text, "dynamodb:TransactWriteItems" in text) == (error, True, False)
