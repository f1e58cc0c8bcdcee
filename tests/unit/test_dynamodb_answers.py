"""What the DynamoDB store makes of answers that no local server gives: denials, waiting, pages.

botocore's own Stubber stands where the server would; everything above it is real.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import boto3
import pytest
from botocore.config import Config
from botocore.parsers import ResponseParserError
from botocore.stub import Stubber

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import RecordTooLarge, WriteFailed
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing.contract import a_record

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


@pytest.fixture
def server() -> Iterator[Stubber]:
    client = boto3.client(
        "dynamodb",
        region_name="eu-west-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"total_max_attempts": 1}),
    )
    with Stubber(client) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def store(server: Stubber) -> DynamoDBStore:
    return DynamoDBStore("t", client=cast("DynamoDBClient", server.client))


@pytest.mark.parametrize(
    ("code", "message", "error", "remedy"),
    [
        ("AccessDeniedException", "not authorized", StoreMisconfigured, "dynamodb:PutItem is not granted"),
        ("UnrecognizedClientException", "bad token", StoreMisconfigured, "credentials"),
        ("ResourceNotFoundException", "no table", StoreMisconfigured, "idempotency provision"),
        ("ValidationException", "Missing the key pk in the item", StoreMisconfigured, "key_attr"),
        ("ValidationException", "Item size has exceeded the maximum allowed size", RecordTooLarge, "size"),
        ("ProvisionedThroughputExceededException", "slow down", StoreUnavailable, "slow down"),
        ("InternalServerError", "oops", StoreUnavailable, "oops"),
        ("ValidationException", "something else", StoreUnavailable, "something else"),
    ],
)
def test_every_refusal_says_what_to_do(
    server: Stubber, store: DynamoDBStore, code: str, message: str, error: type[Exception], remedy: str
) -> None:
    """A denied action names itself; what may pass is an outage; nothing is taken for an answer."""
    server.add_client_error("put_item", code, message)

    with pytest.raises(error, match=remedy) as raised:
        store.swap(a_record(), None)

    assert type(raised.value) is error


def test_missing_credentials_and_region_are_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What boto3 cannot find is named by boto3's own message, and needs a person."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")

    for store in (DynamoDBStore("t", region="eu-west-1"), DynamoDBStore("t")):
        with pytest.raises(StoreMisconfigured, match=r"(?i)credentials|region"):
            store.swap(a_record(), None)


def test_item_that_vanished_is_no_record(server: Stubber, store: DynamoDBStore) -> None:
    """A failed condition without an item means that there is none."""
    server.add_client_error("put_item", "ConditionalCheckFailedException")

    assert store.swap(a_record(), "a revision") is None


def test_scan_reads_every_page(server: Stubber, store: DynamoDBStore) -> None:
    """A table larger than one page is read to its end, with the filter on every page."""
    records = [a_record() for _ in range(3)]
    items = [store._item(each) for each in records]
    pages: list[dict[str, Any]] = [
        {
            "Items": items[:2],
            "LastEvaluatedKey": {"idempotencyKey": {"S": "x"}},
        },
        {"Items": [], "LastEvaluatedKey": {"idempotencyKey": {"S": "y"}}},
        {"Items": items[2:]},
    ]
    filtered: dict[str, Any] = {
        "TableName": "t",
        "ConsistentRead": True,
        "FilterExpression": "#f0 = :f0",
        "ExpressionAttributeNames": {"#f0": "status"},
        "ExpressionAttributeValues": {":f0": {"S": "IN_PROGRESS"}},
    }
    for page, start in zip(pages, (None, "x", "y"), strict=True):
        expected = {**filtered, **({"ExclusiveStartKey": {"idempotencyKey": {"S": start}}} if start else {})}
        server.add_response("scan", page, expected)

    assert list(store.scan(status=Status.IN_PROGRESS)) == records


def test_provisioning_waits_for_the_table_and_completes_what_is_missing(
    server: Stubber, store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that is being created is waited for; TTL that is on is left on; recovery is asked for."""
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time.sleep", lambda seconds: None)
    table = {"KeySchema": [{"AttributeName": "idempotencyKey", "KeyType": "HASH"}]}
    server.add_response("create_table", {})
    server.add_response("describe_table", {"Table": {**table, "TableStatus": "CREATING"}})
    server.add_response("describe_table", {"Table": {**table, "TableStatus": "ACTIVE"}})
    server.add_response("describe_time_to_live", {"TimeToLiveDescription": {"TimeToLiveStatus": "ENABLED"}})
    server.add_response(
        "update_continuous_backups",
        {},
        {"TableName": "t", "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True}},
    )
    server.add_client_error("put_item", "ConditionalCheckFailedException")

    store.provision()


def test_server_without_recovery_is_provisioned_all_the_same(server: Stubber, store: DynamoDBStore) -> None:
    """Servers that imitate DynamoDB may lack point-in-time recovery, and may not say the time."""
    server.add_client_error("create_table", "ResourceInUseException")
    server.add_response(
        "describe_table",
        {
            "Table": {
                "KeySchema": [{"AttributeName": "idempotencyKey", "KeyType": "HASH"}],
                "TableStatus": "ACTIVE",
            }
        },
    )
    server.add_response("describe_time_to_live", {"TimeToLiveDescription": {"TimeToLiveStatus": "ENABLED"}})
    server.add_client_error("update_continuous_backups", "UnknownOperationException")
    server.add_client_error("put_item", "ConditionalCheckFailedException")

    store.provision()

    assert store._offset == 0


def test_composite_key_is_named_in_the_refusal(server: Stubber) -> None:
    """A table with a sort key that was not configured says which attributes were expected."""
    store = DynamoDBStore("t", client=cast("DynamoDBClient", server.client), key_attr="pk", sort_key_attr="sk")
    server.add_client_error("put_item", "ValidationException", "The provided key element does not match the schema")

    with pytest.raises(StoreMisconfigured, match="partition key 'pk' \\(S\\) and sort key 'sk'"):
        store.verify()


def test_reply_that_is_no_reply_is_an_outage(store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that answers with a page of its own leaves the outcome unknown, as a timeout does."""

    def garbled(**parameters: Any) -> None:
        raise ResponseParserError("<html>")

    monkeypatch.setattr(store._connected(), "put_item", garbled)

    with pytest.raises(StoreUnavailable, match="html"):
        store.swap(a_record(), None)


def test_damaged_item_is_refused_by_name(server: Stubber, store: DynamoDBStore) -> None:
    """An item of ours that somebody edited is neither guessed at nor overwritten."""
    item = store._item(a_record())
    for damage in ({"status": {"S": "DONE"}}, {"lockExpiry": None}):
        damaged = {name: value for name, value in {**item, **damage}.items() if value is not None}
        server.add_client_error("put_item", "ConditionalCheckFailedException", modeled_fields={"Item": damaged})
        with pytest.raises(StoreMisconfigured, match="damaged"):
            store.swap(a_record(), None)


def test_item_of_another_program_is_refused_by_name(server: Stubber, store: DynamoDBStore) -> None:
    """An item without our layout under our key is somebody else's: refused, not overwritten."""
    server.add_client_error(
        "put_item",
        "ConditionalCheckFailedException",
        modeled_fields={"Item": {"idempotencyKey": {"S": "k"}, "data": {"S": "{}"}}},
    )

    with pytest.raises(StoreMisconfigured, match="table of its own"):
        store.swap(a_record(), None)


# -- commits


def _cancelled(server: Stubber, *reasons: dict[str, Any]) -> None:
    server.add_client_error(
        "transact_write_items",
        "TransactionCanceledException",
        "Transaction cancelled",
        modeled_fields={"CancellationReasons": list(reasons)},
    )


NOTHING = {"Code": "None"}
WRITES = [
    {"Put": {"TableName": "stock", "Item": {"sku": "a"}}},
    {"Delete": {"TableName": "stock", "Key": {"sku": "b"}}},
]


@pytest.mark.parametrize("code", ["TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_contention_of_a_commit_is_an_outage(server: Stubber, store: DynamoDBStore, code: str, position: int) -> None:
    """Whatever is in the way, of the record or of a write, passes by itself; nobody's condition has failed."""
    reasons = [NOTHING, NOTHING, NOTHING]
    reasons[position] = {"Code": code, "Message": "wait"}
    _cancelled(server, *reasons)

    with pytest.raises(StoreUnavailable, match="it conflicts with another transaction") as raised:
        store.swap_with(a_record(), "expected", WRITES)

    assert type(raised.value) is StoreUnavailable


def test_contention_does_not_hide_a_refusal(server: Stubber, store: DynamoDBStore) -> None:
    """Where one write met another transaction and a second one failed its condition, the second is told."""
    _cancelled(
        server, NOTHING, {"Code": "TransactionConflict"}, {"Code": "ValidationError", "Message": "empty attribute"}
    )

    with pytest.raises(WriteFailed) as raised:
        store.swap_with(a_record(), "expected", WRITES)

    assert (raised.value.position, raised.value.reason) == (1, "ValidationError: empty attribute")


def test_lost_claim_comes_before_a_refused_write(server: Stubber, store: DynamoDBStore) -> None:
    """A zombie's writes fail for its successor's effects; what it must learn is that there is a successor."""
    theirs = a_record()
    _cancelled(
        server,
        {"Code": "ConditionalCheckFailed", "Item": store._item(theirs)},
        {"Code": "ConditionalCheckFailed"},
        NOTHING,
    )
    _cancelled(server, {"Code": "ConditionalCheckFailed"}, NOTHING, NOTHING)

    assert store.swap_with(a_record(), "expected", WRITES) == theirs
    assert store.swap_with(a_record(), "expected", WRITES) is None


@pytest.mark.parametrize("code", ["TransactionInProgressException", "InternalServerError"])
def test_commit_without_a_certain_answer_is_an_outage(server: Stubber, store: DynamoDBStore, code: str) -> None:
    """It may have happened, or may happen still; asking again tells."""
    server.add_client_error("transact_write_items", code, "later")

    with pytest.raises(StoreUnavailable, match="later"):
        store.swap_with(a_record(), "expected", WRITES)


def test_permission_that_a_write_needs_is_named_as_aws_names_it(server: Stubber, store: DynamoDBStore) -> None:
    """A transaction has no action of its own: what is missing is one of the writes', and only AWS knows which."""
    denial = "not authorized to perform: dynamodb:DeleteItem on resource: arn:aws:dynamodb:eu-west-1:1:table/stock"
    server.add_client_error("transact_write_items", "AccessDeniedException", denial)

    with pytest.raises(StoreMisconfigured, match="dynamodb:DeleteItem") as raised:
        store.swap_with(a_record(), "expected", WRITES)

    assert "dynamodb:TransactWriteItems" not in str(raised.value)
