"""Commits on DynamoDB: the user's writes and the record, all or nothing."""

from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from celery_idempotent.protocol.store import CommittingStore, RecordTooLarge, WriteFailed
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.items import typed
from celery_idempotent.stores.wrappers import innermost
from celery_idempotent.testing import CommittingContract
from celery_idempotent.testing.contract import a_claim, a_completion
from tests.support.dynamodb import count_requests
from tests.support.objects import sealed


@pytest.fixture(scope="module", params=["direct", "boto3"])
def store(request: pytest.FixtureRequest, dynamodb_endpoint: str) -> Iterator[DynamoDBStore]:
    address = dynamodb_endpoint.removeprefix("http://")
    options = f"region=us-east-1&transport={request.param}"
    opened = open_store(f"dynamodb://test:test@{address}/commits-{uuid4().hex}?{options}")
    assert isinstance(opened, DynamoDBStore)
    opened.provision()
    yield opened
    opened.close()


class _Stock:
    """The user's own table, with one item."""

    def __init__(self, store: DynamoDBStore) -> None:
        self.client = store._connected()
        self.table = f"stock-{uuid4().hex}"
        self.client.create_table(
            TableName=self.table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "sku", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "sku", "KeyType": "HASH"}],
        )
        self.client.put_item(TableName=self.table, Item={"sku": {"S": "a"}, "left": {"N": "5"}})

    def taken(self, units: int, **values: Any) -> dict[str, Any]:
        return {
            "Update": {
                "TableName": self.table,
                "Key": {"sku": "a"},
                "UpdateExpression": "SET #left = #left - :units",
                "ConditionExpression": "#left >= :units",
                "ExpressionAttributeNames": {"#left": "left"},
                "ExpressionAttributeValues": {":units": units, **values},
            }
        }

    @property
    def left(self) -> int:
        item = self.client.get_item(TableName=self.table, Key={"sku": {"S": "a"}}, ConsistentRead=True)["Item"]
        return int(item["left"]["N"])


class _Notes:
    """Items of the user's, each put once."""

    def __init__(self, store: DynamoDBStore) -> None:
        self._stock = _Stock(store)

    def made(self) -> dict[str, Any]:
        return self._put(ConditionExpression="attribute_not_exists(sku)")

    def refused(self) -> dict[str, Any]:
        return self._put(ConditionExpression="attribute_exists(sku)")

    def count(self) -> int:
        found: int = self._stock.client.scan(TableName=self._stock.table, ConsistentRead=True, Select="COUNT")["Count"]
        return found

    def _put(self, **condition: str) -> dict[str, Any]:
        return {"Put": {"TableName": self._stock.table, "Item": {"sku": uuid4().hex}, **condition}}


class TestCommits(CommittingContract):
    """What every store that commits must do."""

    @pytest.fixture
    def writes(self, store: DynamoDBStore) -> _Notes:
        return _Notes(store)


class TestSealedCommits(CommittingContract):
    """They are the same where records are encrypted."""

    @pytest.fixture(name="store")
    def sealed_store(self, store: DynamoDBStore) -> Any:
        return sealed(store)

    @pytest.fixture
    def writes(self, store: Any) -> _Notes:
        return _Notes(innermost(store))


@pytest.fixture
def stock(store: DynamoDBStore) -> _Stock:
    return _Stock(store)


def test_record_and_writes_happen_together(store: DynamoDBStore, stock: _Stock) -> None:
    """In one request."""
    record = a_claim(store)
    done = a_completion(record)

    with count_requests(store) as requests:
        assert store.swap_with(done, record.revision, [stock.taken(2)]) == done

    assert isinstance(store, CommittingStore)
    assert requests == ["TransactWriteItems"]
    assert store.get(record.key) == done
    assert stock.left == 3


def test_refused_write_is_named_and_undoes_all(store: DynamoDBStore, stock: _Stock) -> None:
    """A failed condition of the user's leaves record and all writes as they were."""
    record = a_claim(store)
    note = {"Put": {"TableName": stock.table, "Item": {"sku": "note", "text": "sold"}}}

    with pytest.raises(WriteFailed) as refused:
        store.swap_with(a_completion(record), record.revision, [note, stock.taken(6)])

    assert (refused.value.position, refused.value.reason) == (1, "ConditionalCheckFailed")
    assert store.get(record.key) == record
    assert "Item" not in store._connected().get_item(TableName=stock.table, Key={"sku": {"S": "note"}})


@pytest.mark.parametrize(
    ("write", "position"),
    [
        ({"Put": {"TableName": "no-such-table", "Item": {"sku": "a"}}}, None),
        ({"Update": {"TableName": "no-such-table", "Key": {"sku": "a"}, "UpdateExpression": "nonsense"}}, None),
        ({"Upsert": {}}, 0),
        ({"Put": {}, "Delete": {}}, 0),
        ("Put", 0),
        ({"Put": {"TableName": "t", "Item": {"price": 1.5}}}, 0),
        ({"Put": {"TableName": "t", "Item": None}}, 0),
        ({"Put": {"TableName": "t", "Item": {"sku": "a", "names": [{"S": "Zoë \ud83d"}]}}}, 0),
        ({"Delete": {"TableName": "t", "Key": {"sku": "\udcff"}}}, 0),
    ],
)
def test_unusable_write_is_refused(store: DynamoDBStore, write: Any, position: int | None) -> None:
    """A write that can never succeed is the author's error, not an outage to wait for."""
    record = a_claim(store)

    with pytest.raises(WriteFailed) as refused:
        store.swap_with(a_completion(record), record.revision, [write])

    assert refused.value.position == position
    assert store.get(record.key) == record


def test_too_many_writes_are_refused(store: DynamoDBStore) -> None:
    """DynamoDB takes 100, and one is the record."""
    with pytest.raises(WriteFailed, match="100 writes"):
        typed([{"Delete": {"TableName": "t", "Key": {"sku": str(number)}}} for number in range(100)])


def test_result_too_large_is_told_from_a_refused_write(store: DynamoDBStore, stock: _Stock) -> None:
    """It can be committed again without the result."""
    record = a_claim(store)

    with pytest.raises(RecordTooLarge):
        store.swap_with(a_completion(record, "x" * 420_000), record.revision, [stock.taken(1)])
    with pytest.raises(RecordTooLarge):
        store.swap_with(a_completion(record, "x" * 409_590), record.revision, [stock.taken(1)])

    big = {"Put": {"TableName": stock.table, "Item": {"sku": "x" * 420_000}}}
    with pytest.raises(WriteFailed, match="size|length"):
        store.swap_with(replace(a_completion(record), result=None), record.revision, [big])
    assert stock.left == 5


def test_values_may_be_plain_or_typed() -> None:
    """As boto3's client and resources take them."""
    (write,) = typed(
        [
            {
                "Put": {
                    "TableName": "t",
                    "Item": {"a": {"S": "text"}, "b": "text", "c": 1, "d": Decimal("1.5"), "e": {"x": None}},
                    "ConditionExpression": "attribute_not_exists(a)",
                }
            }
        ]
    )

    assert write == {
        "Put": {
            "TableName": "t",
            "Item": {
                "a": {"S": "text"},
                "b": {"S": "text"},
                "c": {"N": "1"},
                "d": {"N": "1.5"},
                "e": {"M": {"x": {"NULL": True}}},
            },
            "ConditionExpression": "attribute_not_exists(a)",
        }
    }
