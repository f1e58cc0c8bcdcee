"""The workers, brokers and faults of these tests do what the other modules rely on."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError

from lab.proxy import aws_operations
from tests.integration.cluster import IdempotentSetup, short_visibility
from tests.integration.plain_tasks import add, plain_effect
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker


def test_worker_runs_a_task_and_returns_its_result(celery_setup: IdempotentSetup) -> None:
    """A result travels from the test through broker, worker and backend and back."""
    assert add.delay(2, 3).get(timeout=60) == 5


def test_sigkill_of_the_child_redelivers_the_task(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """Celery runs a task again whose process was killed: at least once."""
    result = plain_effect.delay("k", gate="go")
    (begun,) = wait_until(lambda: ledger.rows("begin"), "the task begins")
    celery_setup.worker_cluster.kill_child(begun)
    again = wait_until(lambda: ledger.rows("begin")[1:], "the task begins again")
    ledger.open("go")
    assert result.get(timeout=60) == "k"
    assert [row.task_id for row in again] == [begun.task_id]
    assert again[0].pid != begun.pid


@short_visibility
def test_sigkill_of_the_worker_redelivers_after_the_visibility_timeout(
    celery_setup: IdempotentSetup, ledger: Ledger
) -> None:
    """A message that died with its whole worker is delivered again to its successor."""
    result = plain_effect.delay("k", gate="go")
    wait_until(lambda: ledger.rows("begin"), "the task begins")
    celery_setup.worker.kill()
    assert celery_setup.worker.has_exited()
    ledger.open("go")
    celery_setup.worker.start_again()
    assert result.get(timeout=60) == "k"
    assert [row.key for row in ledger.rows("effect")] == ["k"]


@short_visibility
@pytest.mark.worker(count=2)
def test_a_frozen_worker_is_overtaken_and_thaws(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """What Celery alone does with a paused worker: both copies have the effect."""
    result = plain_effect.delay("k", gate="go")
    (begun,) = wait_until(lambda: ledger.rows("begin"), "the task begins")
    frozen = celery_setup.worker_cluster.worker_of(begun)
    frozen.freeze()
    wait_until(lambda: ledger.rows("begin")[1:], "the other worker begins")
    ledger.open("go")
    assert result.get(timeout=60) == "k"
    assert len(ledger.rows("effect")) == 1
    frozen.thaw()
    wait_until(lambda: len(ledger.rows("effect")) == 2, "the thawed worker has the effect as well")


def test_warm_shutdown_finishes_the_running_task(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """SIGTERM lets a running task end, and a restarted worker consumes again."""
    result = plain_effect.delay("k", gate="go")
    wait_until(lambda: ledger.rows("begin"), "the task begins")
    ledger.open("go")
    celery_setup.worker.shut_down()
    assert result.get(timeout=60) == "k"
    celery_setup.worker.start_again()
    assert add.delay(2, 3).get(timeout=60) == 5


@pytest.mark.parametrize(
    "pool",
    [pytest.param(pool, marks=pytest.mark.worker(pool=pool)) for pool in ("prefork", "threads", "solo")],
)
def test_every_pool_runs_tasks(celery_setup: IdempotentSetup, pool: str) -> None:
    """Each pool of a worker starts and works."""
    assert add.delay(2, 3).get(timeout=60) == 5
    assert f"({pool.removesuffix('s')})" in celery_setup.worker.logs()


@pytest.fixture
def dynamodb(faults: TcpProxy, aws_account: str) -> Any:
    """A DynamoDB client whose every request passes the fault proxy, and that never tries again by itself."""
    return boto3.client(
        "dynamodb",
        endpoint_url=f"http://{faults.host}:{faults.port}",
        region_name="us-east-1",
        aws_access_key_id=aws_account,
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.fixture
def table(dynamodb: Any) -> str:
    """An empty table."""
    dynamodb.create_table(
        TableName="table",
        KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    return "table"


def keys(dynamodb: Any, table: str) -> set[str]:
    return {item["key"]["S"] for item in dynamodb.scan(TableName=table)["Items"]}


def test_a_cut_reply_loses_the_answer_but_not_the_write(dynamodb: Any, table: str, faults: TcpProxy) -> None:
    """The second matching request is applied although its sender sees an error; the others pass."""
    cut = faults.cut_reply(b"PutItem", b"order", nth=2)
    for key in ("other", "order-1"):
        dynamodb.put_item(TableName=table, Item={"key": {"S": key}})
    assert not cut.struck
    with pytest.raises(ConnectionClosedError):
        dynamodb.put_item(TableName=table, Item={"key": {"S": "order-2"}})
    assert cut.struck
    dynamodb.put_item(TableName=table, Item={"key": {"S": "order-3"}})
    assert keys(dynamodb, table) == {"other", "order-1", "order-2", "order-3"}
    assert aws_operations(faults.trips).count("PutItem") == 4


def test_a_cut_request_never_reaches_the_store(dynamodb: Any, table: str, faults: TcpProxy) -> None:
    """The sender sees the same error as for a lost reply, but nothing was written."""
    faults.cut_request(b"PutItem")
    with pytest.raises(ConnectionClosedError):
        dynamodb.put_item(TableName=table, Item={"key": {"S": "order-1"}})
    assert keys(dynamodb, table) == set()


def test_a_store_that_is_down_refuses_everything(dynamodb: Any, table: str, faults: TcpProxy) -> None:
    """Every request fails until the store is back."""
    with faults.down():
        for _ in range(3):
            with pytest.raises(ConnectionClosedError):
                dynamodb.scan(TableName=table)
    assert keys(dynamodb, table) == set()
