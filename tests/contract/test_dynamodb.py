"""The contract on DynamoDB, and what only this store adds: its items, its commits, its clock, its clients."""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.config import Config

from celery_idempotent.errors import PolicyError, StoreMisconfigured
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge, Store, WriteFailed
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.items import typed
from celery_idempotent.stores.dynamodb.provisioning import ATTENTION
from celery_idempotent.testing import CommittingContract, OutageContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_claim, a_completion, a_record
from tests.support.dynamodb import LOGIN, count_requests, new_url, provisioned

OWN_NAMES = {"key_attr": "pk", "sort_key_attr": "sk", "sort_key_value": "IDEMPOTENCY", "ttl_attr": "ttl"}
OWN_NAMES_AND_INDEXES = {**OWN_NAMES, "unknown_index": "doubt", "label_index": "labels"}


class TestDynamoDBStore(StoreContract, VerifiableContract):
    """The whole contract, on both paths, with and without a sort key and indexes."""

    @pytest.fixture(
        params=[
            {"transport": "direct"},
            {"transport": "boto3", **OWN_NAMES},
            pytest.param({"transport": "direct", **OWN_NAMES_AND_INDEXES}, marks=pytest.mark.nightly),
        ],
        ids=["as provision makes it", "with own names, through boto3", "with own names and indexes"],
    )
    def store(self, request: pytest.FixtureRequest, dynamodb_endpoint: str) -> Iterator[DynamoDBStore]:
        self.url = new_url(dynamodb_endpoint, **request.param)
        with provisioned(self.url) as store:
            yield store

    @pytest.fixture
    def misconfigured_store(self, dynamodb_endpoint: str) -> Store:
        return open_store(new_url(dynamodb_endpoint))

    def reopen(self, store: Store) -> Store:
        return open_store(self.url)


class TestDynamoDBAway(OutageContract):
    """Connections are refused; or accepted, and that is all."""

    @pytest.fixture(params=["refused", "direct", pytest.param("boto3", marks=pytest.mark.nightly)])
    def unreachable_store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        path = "direct" if request.param == "refused" else request.param
        with socket.create_server(("127.0.0.1", 0)) as server:
            store = DynamoDBStore(
                "t",
                region="us-east-1",
                endpoint_url=f"http://127.0.0.1:{1 if request.param == 'refused' else server.getsockname()[1]}",
                session=boto3.session.Session(**LOGIN),
                config=Config(read_timeout=0.2),
                transport=path,
            )
            yield store
            store.close()


@pytest.fixture(scope="module")
def url(dynamodb_endpoint: str) -> str:
    """Of a table that is there."""
    found = new_url(dynamodb_endpoint)
    with provisioned(found):
        return found


@pytest.fixture(scope="module", params=["direct", "boto3"])
def store(request: pytest.FixtureRequest, url: str) -> Iterator[DynamoDBStore]:
    """A store of that table, which other tests use."""
    store = DynamoDBStore.from_url(f"{url}&transport={request.param}")
    yield store
    store.close()


def test_item_has_the_documented_attributes(store: DynamoDBStore) -> None:
    """Attribute names and types are an interface: dashboards, exports and other versions read them."""
    values: dict[str, Any] = {"takeovers": 2, "steps": {"a": 1}, "verdict": {"by": "ann"}, "expires_at": 4_000_000_000}
    record = a_record().but(**values, result='"x"', content_type="application/json", error="e")
    store.swap(record, None)

    item: Any = store._connected().get_item(TableName=store.table, Key={"idempotencyKey": {"S": record.key}})["Item"]

    types = sorted((next(iter(value)), name) for name, value in item.items())
    assert " ".join(name for type_, name in types if type_ == "N") == (
        "attempts createdAt expiryTimestamp fencingToken lockExpiry takeovers updatedAt v"
    )
    assert " ".join(name for type_, name in types if type_ == "S") == (
        "app contentType error fingerprint idempotencyKey label owner process resultData revision status steps task "
        "taskId trace verdict worker"
    )
    assert set(store._attributes) == {each.name for each in fields(Record)}


def test_items_stand_under_the_users_names_and_others_are_left_alone(dynamodb_endpoint: str) -> None:
    """Expiry is in seconds; in a table shared with others, and in its indexes, only items with our sort key count."""
    with provisioned(new_url(dynamodb_endpoint, **OWN_NAMES_AND_INDEXES)) as store:
        record = replace(a_completion(a_record()), expires_at=4_000_000_000)
        client: Any = store._connected()
        theirs = store._item(record) | {"sk": {"S": "of another service"}}
        client.put_item(TableName=store.table, Item=theirs)
        store.swap(record, None)

        key = {"pk": {"S": record.key}, "sk": {"S": "IDEMPOTENCY"}}
        item = client.get_item(TableName=store.table, Key=key)["Item"]

        assert (item["ttl"], "idempotencyKey" in item) == ({"N": "4000000000"}, False)
        assert list(store.scan()) == [record] == list(store.scan(label=record.label))


def test_every_swap_is_one_request_and_so_is_the_check(store: DynamoDBStore) -> None:
    """Won or lost, a swap costs one PutItem and nothing else; the check needs the claim's own permission."""
    record = a_record()
    store.verify()
    kept = len(list(store.scan()))

    with count_requests(store) as requests:
        store.swap(record, None)
        store.swap(replace(record, revision="b"), None)
        store.swap(replace(record, revision="b"), record.revision)
        store.swap(replace(record, revision="c"), "wrong")
        store.swap(a_record(), "nothing there")
        store.verify()

    assert (requests, len(list(store.scan()))) == (["PutItem"] * 6, kept + 1)


def test_result_beyond_the_item_limit_is_refused_before_and_by_the_server(store: DynamoDBStore) -> None:
    """A record over 400 KB is certainly not written, whether we or the server notice."""
    record = a_record()
    store.swap(record, None)

    for size in (400 * 1024 + 1, 400 * 1024 - 100):
        with pytest.raises(RecordTooLarge):
            store.swap(replace(record, revision="r", result="x" * size, content_type="t"), record.revision)

    assert store.get(record.key) == record


def test_missing_table_or_another_key_names_the_remedy(url: str, dynamodb_endpoint: str) -> None:
    """The command that creates it, at the check and at a claim; or the options that name its attributes."""
    missing = DynamoDBStore.from_url(new_url(dynamodb_endpoint))
    one, two = (DynamoDBStore.from_url(f"{url}&key_attr=pk{other}") for other in ("", "&sort_key_attr=sk"))
    wanted = r"partition key 'pk' \(S\) and sort key 'sk' \(S\); .*key_attr"

    asks: list[tuple[Callable[[], object], str]] = [
        (missing.verify, "idempotency provision"),
        (lambda: missing.swap(a_record(), None), "idempotency provision"),
        *((ask, "key_attr") for ask in (one.verify, one.provision)),
        *((ask, wanted) for ask in (two.verify, two.provision)),
    ]
    for ask, remedy in asks:
        with pytest.raises(StoreMisconfigured, match=remedy):
            ask()


def test_own_client_is_used_as_it_is(dynamodb_endpoint: str, store: DynamoDBStore) -> None:
    """A user's client, or function that makes one, takes the place of ours."""
    client = boto3.client("dynamodb", region_name="us-east-1", endpoint_url=dynamodb_endpoint, **LOGIN)
    for given in (client, lambda: client):
        mine = DynamoDBStore(store.table, client=given)
        record = a_record()
        assert mine.swap(record, None) == record == store.get(record.key)
        assert mine._connected() is client
        mine.close()


def test_client_is_not_carried_over_a_fork(store: DynamoDBStore) -> None:
    """A child makes a client of its own; one given by the user before the fork is refused there."""
    store.swap(a_record(), None)
    given = DynamoDBStore(store.table, client=store._connected())
    parents = store._connected(), store._direct()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads: this is the point
        pid = os.fork()
    if pid == 0:
        status, record = 1, a_record()
        try:
            own = store._connected() is not parents[0] and store._direct() is not parents[1]
            if own and store.swap(record, None) == record:
                given.swap(a_record(), None)
        except StoreMisconfigured as error:
            status = 0 if "a function that makes a client" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("skew", [-3_600_000, 0, 30_000])
def test_clock_follows_the_server_when_the_local_one_is_wrong(store: DynamoDBStore, skew: int) -> None:
    """A Date header has one second's resolution: within it, the finer local clock counts."""
    clock = lambda: time.time_ns() // 1_000_000 + skew  # noqa: E731
    skewed = DynamoDBStore(store.table, client=store._connected(), local_clock=clock)
    skewed.verify()
    assert abs(skewed.now() - time.time_ns() // 1_000_000) < (2_000 if skew else 50)
    assert bool(skewed._offset) == bool(skew)


@pytest.mark.parametrize(
    ("url", "table", "region", "endpoint"),
    [
        ("@eu-west-1/orders", "orders", "eu-west-1", None),
        ("AKIA:very-se/cret@localhost:8000/orders", "orders", "us-east-1", "http://localhost:8000"),
        ("@10.0.0.1:80/orders?region=eu-north-1&secure=1", "orders", "eu-north-1", "https://10.0.0.1:80"),
    ],
)
def test_url_names_table_region_and_endpoint(
    url: str, table: str, region: str, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL reads as Celery's own: a Region, or a host with a port for another endpoint; no secret is shown."""
    monkeypatch.delenv("AWS_REGION", raising=False)

    store = DynamoDBStore.from_url(f"dynamodb://{url}")

    assert (store.table, store._region, store._endpoint_url) == (table, region, endpoint)
    assert repr(store) == f"dynamodb://@{(endpoint or region).removeprefix('http://')}/{table}"


def test_unusable_urls_and_options_are_refused() -> None:
    """Without table or host, misspelt, or contradictory; two attributes, or two indexes, cannot have one name."""
    for url in ("@eu-west-1", "/orders", "@localhost:99999/orders", "@eu-west-1/orders?key_atr=pk"):
        with pytest.raises(PolicyError, match="idempotency_store"):
            open_store(f"dynamodb://{url}")
    options: Any
    for options, word in (
        ({"client": lambda: None, "region": "eu-west-1"}, "client"),
        ({"transport": "fast"}, "transport"),
        ({"ttl_attr": ATTENTION}, "overlap"),
        ({"unknown_index": "i", "label_index": "i"}, "name them differently"),
    ):
        with pytest.raises(PolicyError, match=word):
            DynamoDBStore("t", **options)


class _Stock:
    """A table of the user's, in which one item can be taken from, and others are put once."""

    def __init__(self, store: DynamoDBStore) -> None:
        self.client: Any = store._connected()
        self.table = f"stock-{uuid4().hex}"
        self.client.create_table(
            TableName=self.table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "sku", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "sku", "KeyType": "HASH"}],
        )

    def made(self) -> dict[str, Any]:
        return self.put(ConditionExpression="attribute_not_exists(sku)")

    def refused(self) -> dict[str, Any]:
        return self.put(ConditionExpression="#sku = :sku", ExpressionAttributeValues={":sku": "none such"})

    def count(self) -> int:
        return int(self.client.scan(TableName=self.table, ConsistentRead=True, Select="COUNT")["Count"])

    def put(self, **condition: Any) -> dict[str, Any]:
        names = {"ExpressionAttributeNames": {"#sku": "sku"}} if "ExpressionAttributeValues" in condition else {}
        return {"Put": {"TableName": self.table, "Item": {"sku": uuid4().hex}, **names, **condition}}


@pytest.fixture(scope="module")
def stock(store: DynamoDBStore) -> _Stock:
    return _Stock(store)


class TestCommits(CommittingContract):
    """What every store that commits must do."""

    @pytest.fixture
    def writes(self, stock: _Stock) -> _Stock:
        return stock


def test_commit_is_one_request_and_a_refused_write_is_named(store: DynamoDBStore, stock: _Stock) -> None:
    """It is counted from the first of the user's, with DynamoDB's own reason."""
    record = a_claim(store)
    done = a_completion(record)
    with pytest.raises(WriteFailed) as refused:
        store.swap_with(done, record.revision, [stock.made(), stock.refused()])
    assert (refused.value.position, refused.value.reason) == (1, "ConditionalCheckFailed")

    with count_requests(store) as requests:
        assert store.swap_with(done, record.revision, [stock.made()]) == done

    assert requests == ["TransactWriteItems"]


@pytest.mark.parametrize(
    ("write", "position"),
    [
        ({"Put": {"TableName": "no-such-table", "Item": {"sku": "a"}}}, None),
        ({"Upsert": {}}, 0),
        ({"Put": {"TableName": "t", "Item": {"sku": "a", "names": [{"S": "Zoë \ud83d"}]}}}, 0),
    ],
)
def test_unusable_write_is_refused(store: DynamoDBStore, write: Any, position: int | None) -> None:
    """A write that can never succeed is the author's error, not an outage to wait for."""
    record = a_claim(store)

    with pytest.raises(WriteFailed) as refused:
        store.swap_with(a_completion(record), record.revision, [write])

    assert (refused.value.position, store.get(record.key)) == (position, record)


def test_result_too_large_is_told_from_a_refused_write(store: DynamoDBStore, stock: _Stock) -> None:
    """It can be committed again without the result."""
    record = a_claim(store)
    before = stock.count()
    for size in (420_000, 409_590):
        with pytest.raises(RecordTooLarge):
            store.swap_with(a_completion(record, "x" * size), record.revision, [stock.made()])
    big = {"Put": {"TableName": stock.table, "Item": {"sku": "x" * 420_000}}}
    with pytest.raises(WriteFailed, match="size|length"):
        store.swap_with(replace(a_completion(record), result=None), record.revision, [big])
    assert stock.count() == before


def test_writes_are_up_to_99_and_their_values_plain_or_typed() -> None:
    """As boto3's client and resources take them; DynamoDB takes 100, and one is the record."""
    condition = {"TableName": "t", "ConditionExpression": "attribute_not_exists(a)"}
    plain = {"a": {"S": "text"}, "b": "text", "c": 1, "d": Decimal("1.5"), "e": {"x": None}}
    values: dict[str, Any] = {"a": {"S": "text"}, "b": {"S": "text"}, "c": {"N": "1"}, "d": {"N": "1.5"}}
    values |= {"e": {"M": {"x": {"NULL": True}}}}

    write = {"Put": {**condition, "Item": plain}}
    assert typed([write] * 99) == [{"Put": {**condition, "Item": values}}] * 99
    with pytest.raises(WriteFailed, match="100 writes"):
        typed([write] * 100)
