"""Provisioning on AWS, where a new table is ACTIVE before it is ready for backups; no local server does that."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import boto3
import pytest
from botocore.config import Config
from botocore.stub import Stubber

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing import FakeClock

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    stub = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr("celery_idempotent.stores.dynamodb.provisioning.time", stub)
    return clock


@pytest.fixture
def server() -> Iterator[Stubber]:
    """A server whose table has just become ACTIVE and expires its items."""
    client = boto3.client(
        "dynamodb",
        region_name="eu-west-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"total_max_attempts": 1}),
    )
    with Stubber(client) as stubber:
        stubber.add_response("create_table", {})
        table = {"TableStatus": "ACTIVE", "KeySchema": [{"AttributeName": "idempotencyKey", "KeyType": "HASH"}]}
        stubber.add_response("describe_table", {"Table": table})
        ttl = {"TimeToLiveStatus": "ENABLED", "AttributeName": "expiryTimestamp"}
        stubber.add_response("describe_time_to_live", {"TimeToLiveDescription": ttl})
        yield stubber
        stubber.assert_no_pending_responses()


@pytest.fixture
def store(server: Stubber) -> DynamoDBStore:
    client = cast("DynamoDBClient", server.client)
    return DynamoDBStore("t", client=client, local_clock=lambda: 0)


def _not_ready(server: Stubber) -> None:
    server.add_client_error("update_continuous_backups", "ContinuousBackupsUnavailableException", "being enabled")


def test_waits_until_the_table_is_ready_for_backups(server: Stubber, store: DynamoDBStore, clock: FakeClock) -> None:
    """The refusal of a table that is minutes old is no failure: recovery is asked for again."""
    for _ in range(3):
        _not_ready(server)
    server.add_response("update_continuous_backups", {})
    server.add_client_error("put_item", "ConditionalCheckFailedException")
    before = clock.monotonic()

    store.provision()

    assert clock.monotonic() - before == pytest.approx(6)


def test_does_not_wait_for_ever(server: Stubber, store: DynamoDBStore, clock: FakeClock) -> None:
    """After ten minutes it says so, and to provision again, which is safe."""
    for _ in range(301):
        _not_ready(server)

    with pytest.raises(StoreUnavailable, match="provision it again"):
        store.provision()
