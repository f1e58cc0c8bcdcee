"""Batches of a real queue, handled by processes that are killed: each order is charged once."""
# mypy: allow-untyped-decorators

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import boto3
import pytest

from celery_idempotent import Policy, Status
from celery_idempotent.contrib.aws_lambda import sqs_batch
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing import FakeStore
from lab.embedded import EmbeddedAws
from lab.embedded.aws import REGION
from tests.support.aws_lambda import EventSource
from tests.support.documents import ROOT
from tests.support.lambda_shop import INVOCATION, charged_in
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as server:
        yield server


@pytest.fixture
def sqs(aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> SQSClient:
    """A client of the emulator for this process and those that it starts."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    return boto3.client("sqs")


def a_queue(sqs: SQSClient, *, visibility: float = INVOCATION, **attributes: str) -> EventSource:
    """A new queue, and what invokes functions with its batches."""
    given: Any = {"VisibilityTimeout": f"{visibility:.0f}", **attributes}
    url = sqs.create_queue(QueueName=f"orders-{uuid4().hex}", Attributes=given)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    return EventSource(sqs, url, arn)


def _handled(source: EventSource, name: str, folder: Path, store: str) -> int:
    """Have the queue emptied by processes, each until it is killed; how many were."""
    killed = 0
    while True:
        command = [sys.executable, "-m", "tests.support.lambda_shop", name, source.url, source.arn, str(folder), store]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            return killed
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        killed += 1


@pytest.mark.parametrize("name", ["charge", "plain"])
def test_each_order_is_charged_once_though_processes_are_killed(
    aws: EmbeddedAws, sqs: SQSClient, tmp_path: Path, name: str
) -> None:
    """Before the effect, after it, and after the answer of a whole batch; a plain handler charges some three times."""
    table = f"t-{uuid4().hex}"
    store = DynamoDBStore(table)
    store.provision()
    source = a_queue(sqs)
    for number in range(6):  # each order twice; some kill the process that has them
        body = json.dumps({"order_id": f"o-{number}", "dies": {2: "before", 4: "after"}.get(number)})
        for _ in range(2):
            sqs.send_message(QueueUrl=source.url, MessageBody=body)

    assert _handled(source, name, tmp_path, aws.store_url(table)) == 3

    charged = Counter(charged_in(tmp_path))
    assert set(charged) == {f"o-{number}" for number in range(6)}
    assert max(charged.values()) == 1 if name == "charge" else max(charged.values()) > 2
    assert {each.status for each in store.scan()} == ({Status.COMPLETED} if name == "charge" else set())


def test_message_that_cannot_be_handled_ends_in_the_dead_letter_queue(sqs: SQSClient) -> None:
    """With its body, after as many deliveries as the queue allows; the other messages are done at the first."""
    dead = a_queue(sqs)
    redrive = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2})
    source = a_queue(sqs, visibility=1, RedrivePolicy=redrive)
    charged: list[str] = []

    @sqs_batch(Policy("order_id"), store=FakeStore(), name="charge")
    def charge(order_id: str) -> None:
        charged.append(order_id)

    for body in ("no JSON", '{"order_id": "o-1"}'):
        sqs.send_message(QueueUrl=source.url, MessageBody=body)

    def is_dead() -> bool:
        source.poll(charge)
        return bool(dead.waiting)

    wait_until(is_dead, "the message that cannot be handled is given up")
    assert charged == ["o-1"]
    (found,) = sqs.receive_message(QueueUrl=dead.url)["Messages"]
    assert found["Body"] == "no JSON"
