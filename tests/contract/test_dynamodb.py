"""The contract on DynamoDB, and what only DynamoDB can get wrong."""

import inspect
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.config import Config

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim, new_nonce
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.effects import AtMostOnce
from celery_idempotent.protocol.keys import Identity, Selector, label_of
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status, bounded
from celery_idempotent.protocol.store import RecordTooLarge, Store, VerifiableStore
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing import FaultyStore, OutageContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_record
from tests.support.dynamodb import count_requests
from tests.support.scene import Scene


@pytest.fixture
def table() -> str:
    return f"idempotency-{uuid4().hex}"


@pytest.fixture
def url(dynamodb_endpoint: str, table: str) -> str:
    return f"dynamodb://test:test@{dynamodb_endpoint.removeprefix('http://')}/{table}?region=us-east-1"


def _opened(url: str) -> Iterator[DynamoDBStore]:
    store = open_store(url)
    assert isinstance(store, DynamoDBStore)
    store.provision()
    yield store
    store.close()


class TestDynamoDBStore(StoreContract, VerifiableContract):
    """The whole contract on a table as ``provision`` makes it, on the direct path."""

    transport = "direct"

    @pytest.fixture
    def store(self, url: str) -> Iterator[DynamoDBStore]:
        self.url = f"{url}&transport={self.transport}"
        yield from _opened(self.url)

    @pytest.fixture
    def misconfigured_store(self, url: str) -> Iterator[Store]:
        store = open_store(url)
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return open_store(self.url)


class TestDynamoDBStoreByBoto3(TestDynamoDBStore):
    """The whole contract again, where every request goes through a boto3 client."""

    transport = "boto3"


class TestDynamoDBStoreWithOwnNames(StoreContract):
    """The whole contract on a table with a sort key and attribute names of the user's."""

    @pytest.fixture
    def store(self, url: str) -> Iterator[DynamoDBStore]:
        yield from _opened(f"{url}&key_attr=pk&sort_key_attr=sk&sort_key_value=IDEMPOTENCY&ttl_attr=ttl")

    def test_scan_leaves_other_items_of_the_table_alone(self, store: DynamoDBStore) -> None:
        """In a table shared with others, only items with our sort key are records."""
        record = a_record()
        store.swap(record, None)
        store._connected().put_item(
            TableName=store.table, Item={"pk": {"S": "customer"}, "sk": {"S": "profile"}, "name": {"S": "Ada"}}
        )

        assert list(store.scan()) == [record]

    def test_items_stand_under_the_users_names(self, store: DynamoDBStore, url: str) -> None:
        """Key, sort key and expiry are where the user's table expects them; expiry is in seconds."""
        record = replace(a_record(), expires_at=1_900_000_000)
        store.swap(record, None)

        item = store._connected().get_item(
            TableName=store.table, Key={"pk": {"S": record.key}, "sk": {"S": "IDEMPOTENCY"}}
        )["Item"]

        assert item["ttl"] == {"N": "1900000000"}
        assert "idempotencyKey" not in item


class TestDynamoDBStoreWithoutAServer(OutageContract):
    """Connections are refused."""

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        store = open_store("dynamodb://test:test@127.0.0.1:1/t")
        yield store
        store.close()


class TestDynamoDBStoreWithoutAnswers(OutageContract):
    """Connections are accepted, and that is all."""

    @pytest.fixture(params=["direct", "boto3"])
    def unreachable_store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store = DynamoDBStore(
                "t",
                region="us-east-1",
                endpoint_url=f"http://127.0.0.1:{server.getsockname()[1]}",
                session=boto3.session.Session(aws_access_key_id="test", aws_secret_access_key="test"),
                config=Config(read_timeout=0.2),
                transport=request.param,
            )
            yield store
            store.close()


@pytest.fixture(params=["direct", "boto3"])
def store(request: pytest.FixtureRequest, url: str) -> Iterator[DynamoDBStore]:
    yield from _opened(f"{url}&transport={request.param}")


def test_item_has_the_documented_attributes(store: DynamoDBStore) -> None:
    """Attribute names and types are an interface: dashboards, exports and other versions read them."""
    record = replace(
        a_record(),
        takeovers=2,
        steps={"a": 1},
        verdict={"by": "ann"},
        result='"x"',
        content_type="application/json",
        error="e",
        expires_at=9,
    )
    store.swap(record, None)

    item: Any = store._connected().get_item(TableName=store.table, Key={"idempotencyKey": {"S": record.key}})["Item"]

    assert {name: next(iter(value)) for name, value in item.items()} == {
        "idempotencyKey": "S",
        "status": "S",
        "revision": "S",
        "owner": "S",
        "fencingToken": "N",
        "lockExpiry": "N",
        "fingerprint": "S",
        "attempts": "N",
        "takeovers": "N",
        "createdAt": "N",
        "updatedAt": "N",
        "task": "S",
        "taskId": "S",
        "worker": "S",
        "app": "S",
        "process": "S",
        "label": "S",
        "trace": "S",
        "steps": "S",
        "verdict": "S",
        "resultData": "S",
        "contentType": "S",
        "error": "S",
        "expiryTimestamp": "N",
        "v": "N",
    }


def test_call_with_half_a_surrogate_pair_is_kept_readable_and_no_outage(store: DynamoDBStore) -> None:
    """As any JSON body can bring it, in whatever a caller names: to DynamoDB it would be no request at all."""
    half = "Zoë \ud83d"
    bound = inspect.signature(lambda name: None).bind(half)
    scene = Scene()
    scene.store = FaultyStore(store)
    identity = Identity(new_nonce(), "f", label_of(Selector("label", lambda name: name), lambda: bound))
    policy = Policy(effects={"text to *": AtMostOnce()}, on_takeover="refuse")
    operation = Operation(identity=identity, policy=policy, task=half, task_id=half, worker=half, app=half)

    def body(claim: Claim | None) -> None:
        assert claim is not None
        handle = ProtectedAttempt(claim, scene.codec, effects=policy.effects)
        assert handle.step(f"text to {half}", lambda step: half) == half
        raise LookupError(half)

    for _ in range(2):
        with pytest.raises(LookupError):
            scene.delivery_of(operation).run(body)

    record = store.get(identity.key)
    assert record is not None
    assert (record.status, record.error) == (Status.FAILED, "LookupError: Zoë \\ud83d")
    assert record.label == "Zoë \\ud83d"
    assert record.task_id == record.worker == bounded(half)
    assert scene.names == ["claimed", "failed", "replayed"]


def test_every_swap_is_one_request(store: DynamoDBStore) -> None:
    """Won or lost, a swap costs one PutItem and nothing else."""
    record = a_record()

    with count_requests(store) as requests:
        store.swap(record, None)
        store.swap(replace(record, revision="b"), None)
        store.swap(replace(record, revision="b"), record.revision)
        store.swap(replace(record, revision="c"), "wrong")
        store.swap(a_record(), "nothing there")

    assert requests == ["PutItem"] * 5


def test_provisioned_table_is_on_demand_with_ttl(store: DynamoDBStore) -> None:
    """The table is billed on demand and deletes outcomes past their expiry."""
    client = store._connected()

    table: Any = client.describe_table(TableName=store.table)["Table"]
    ttl = client.describe_time_to_live(TableName=store.table)["TimeToLiveDescription"]

    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert ttl["AttributeName"] == "expiryTimestamp"
    assert ttl["TimeToLiveStatus"] in {"ENABLED", "ENABLING"}


def test_verify_accepts_a_provisioned_table_and_writes_nothing(store: DynamoDBStore) -> None:
    """The check before a worker starts costs one request with the claim's own permission."""
    assert isinstance(store, VerifiableStore)

    with count_requests(store) as requests:
        store.verify()

    assert requests == ["PutItem"]
    assert list(store.scan()) == []


def test_missing_table_names_the_command(url: str) -> None:
    """Without its table the store says which command creates it, at the check and at a claim."""
    store = open_store(url)
    assert isinstance(store, DynamoDBStore)

    with pytest.raises(StoreMisconfigured, match="idempotency provision"):
        store.verify()
    with pytest.raises(StoreMisconfigured, match="idempotency provision"):
        store.swap(a_record(), None)


def test_wrong_key_schema_names_the_options(store: DynamoDBStore, url: str) -> None:
    """A table with another key is refused with the options that name its attributes."""
    other = open_store(f"{url}&key_attr=pk")
    assert isinstance(other, DynamoDBStore)

    for ask in (other.verify, other.provision):
        with pytest.raises(StoreMisconfigured, match="key_attr"):
            ask()


def test_unreachable_server_is_unavailable_not_misconfigured() -> None:
    """A server that does not answer may be back soon; the driver's error is the cause."""
    store = DynamoDBStore(
        "t",
        region="us-east-1",
        endpoint_url="http://127.0.0.1:1",
        session=boto3.session.Session(aws_access_key_id="test", aws_secret_access_key="test"),
        config=Config(retries={"total_max_attempts": 1}),
    )
    store.close()

    with pytest.raises(StoreUnavailable) as raised:
        store.swap(a_record(), None)

    assert not isinstance(raised.value, StoreMisconfigured)
    assert raised.value.__cause__ is not None


def test_result_beyond_the_item_limit_is_refused_before_and_by_the_server(store: DynamoDBStore) -> None:
    """A record over 400 KB is certainly not written, whether we or the server notice."""
    record = a_record()
    store.swap(record, None)

    for size in (400 * 1024 + 1, 400 * 1024 - 100):
        with pytest.raises(RecordTooLarge):
            store.swap(replace(record, revision="r", result="x" * size, content_type="t"), record.revision)

    assert store.get(record.key) == record


def test_record_of_a_newer_version_is_refused_and_left_alone(store: DynamoDBStore) -> None:
    """A reader that meets a newer layout says so instead of rewriting what it does not know."""
    record = replace(a_record(), schema=2)
    store.swap(record, None)

    with pytest.raises(StoreMisconfigured, match="schema 2"):
        store.swap(replace(record, schema=1, revision="r"), None)
    with pytest.raises(StoreMisconfigured, match="upgrade"):
        store.get(record.key)


def test_record_of_the_version_before_is_read(store: DynamoDBStore) -> None:
    """It has a flag where this one counts, and names no app."""
    record = replace(a_record(), takeovers=0, app="")
    store._connected().put_item(TableName=store.table, Item={**store._item(record), "takeover": {"BOOL": True}})

    assert store.get(record.key) == record


def test_own_client_is_used_as_it_is(dynamodb_endpoint: str, store: DynamoDBStore) -> None:
    """A user's client, or function that makes one, takes the place of ours."""
    client = boto3.client(
        "dynamodb",
        region_name="us-east-1",
        endpoint_url=dynamodb_endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    for given in (client, lambda: client):
        mine = DynamoDBStore(store.table, client=given)
        record = a_record()
        assert mine.swap(record, None) == record
        assert mine._connected() is client
        mine.close()
    assert store.get(record.key) == record


def test_client_is_not_carried_over_a_fork(store: DynamoDBStore) -> None:
    """A child makes a client of its own; one given by the user before the fork is refused there."""
    store.swap(a_record(), None)
    given = DynamoDBStore(store.table, client=store._connected())
    parent, direct = store._connected(), store._direct()

    def in_child() -> int:
        own = store._connected() is not parent and store._direct() is not direct
        fresh = own and store.swap(record := a_record(), None) == record
        try:
            given.swap(a_record(), None)
        except StoreMisconfigured:
            return 0 if fresh else 1
        return 2

    assert _exit_status_of_child(in_child) == 0


def test_given_client_knows_its_process(store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process the error says how to give a client that survives a fork."""
    given = DynamoDBStore(store.table, client=store._connected())
    monkeypatch.setattr("os.getpid", lambda: -1)

    with pytest.raises(StoreMisconfigured, match="a function that makes a client"):
        given.verify()


@pytest.mark.parametrize("skew", [-3_600_000, -30_000, 30_000, 3_600_000])
def test_clock_follows_the_server_when_the_local_one_is_wrong(url: str, skew: int) -> None:
    """After one reply the store's clock is within two seconds of the server's, whatever the local clock says."""
    import time

    honest = open_store(url)
    assert isinstance(honest, DynamoDBStore)
    honest.provision()
    skewed = DynamoDBStore(
        honest.table,
        client=honest._connected(),
        local_clock=lambda: time.time_ns() // 1_000_000 + skew,
    )

    skewed.verify()

    assert abs(skewed.now() - time.time_ns() // 1_000_000) < 2_000


def test_clock_is_the_local_one_while_it_agrees_with_the_server(store: DynamoDBStore) -> None:
    """A Date header has one second's resolution: within it, the finer local clock counts."""
    store.verify()

    assert store._offset == 0


@pytest.mark.parametrize(
    ("url", "table", "region", "endpoint"),
    [
        ("dynamodb://@eu-west-1/orders", "orders", "eu-west-1", None),
        ("dynamodb://@localhost/orders", "orders", "us-east-1", "http://localhost"),
        ("dynamodb://@localhost:8000/orders", "orders", "us-east-1", "http://localhost:8000"),
        (
            "dynamodb://@10.0.0.1:8000/orders?region=eu-north-1&secure=1",
            "orders",
            "eu-north-1",
            "https://10.0.0.1:8000",
        ),
    ],
)
def test_url_names_table_region_and_endpoint(
    url: str, table: str, region: str, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL reads as Celery's own: a Region, or a host with a port for another endpoint."""
    monkeypatch.delenv("AWS_REGION", raising=False)

    store = DynamoDBStore.from_url(url)

    assert (store.table, store._region, store._endpoint_url) == (table, region, endpoint)


@pytest.mark.parametrize(
    "url", ["dynamodb://@eu-west-1", "dynamodb:///orders", "dynamodb://@eu-west-1/orders?key_atr=pk"]
)
def test_unusable_url_is_refused(url: str) -> None:
    """A URL without table or host, or with a misspelt option, is refused when it is opened."""
    with pytest.raises(PolicyError, match="idempotency_store"):
        open_store(url)


def test_url_credentials_are_not_shown() -> None:
    """What appears in logs and errors has no secret in it."""
    store = open_store("dynamodb://AKIA:very-secret@localhost:8000/orders")

    assert "very-secret" not in repr(store)
    assert repr(store) == "dynamodb://@localhost:8000/orders"


def test_contradictory_options_are_refused() -> None:
    """A client brings its own endpoint, and two attributes cannot have one name."""
    with pytest.raises(PolicyError, match="client"):
        DynamoDBStore("t", client=lambda: None, region="eu-west-1")  # type: ignore[arg-type, return-value]
    with pytest.raises(PolicyError, match="overlap"):
        DynamoDBStore("t", key_attr="status")


def _exit_status_of_child(work: Any) -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads: this is the point
        pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_record_layout_is_complete(store: DynamoDBStore) -> None:
    """Every field of the record has an attribute."""
    from dataclasses import fields

    assert set(store._attributes) == {each.name for each in fields(Record)}
