"""Batches of a real queue, handled by processes that are killed: each order is charged once."""
# mypy: allow-untyped-decorators

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from uuid import uuid4

import boto3
import pytest

from celery_idempotent import Status
from celery_idempotent.stores.dynamodb import DynamoDBStore
from lab.embedded import EmbeddedAws
from lab.embedded.aws import REGION
from tests.support.aws_lambda import EventSource
from tests.support.documents import ROOT
from tests.support.lambda_shop import INVOCATION, charged_in


@pytest.fixture
def source(aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> EventSource:
    """A new queue, and what invokes functions with its batches, for this process and those that it starts."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    sqs = boto3.client("sqs")
    timeout = f"{INVOCATION:.0f}"
    url = sqs.create_queue(QueueName=f"orders-{uuid4().hex}", Attributes={"VisibilityTimeout": timeout})["QueueUrl"]
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


@pytest.mark.parametrize("name", ["charge", pytest.param("plain", marks=pytest.mark.nightly)])
def test_each_order_is_charged_once_though_processes_are_killed(
    aws: EmbeddedAws, source: EventSource, tmp_path: Path, name: str
) -> None:
    """Before the effect, after it, and after the answer of a whole batch; a plain handler charges some three times."""
    table = f"t-{uuid4().hex}"
    store = DynamoDBStore(table)
    store.provision()
    for number in range(6):  # each order twice; some kill the process that has them
        body = json.dumps({"order_id": f"o-{number}", "dies": {2: "before", 4: "after"}.get(number)})
        for _ in range(2):
            source.sqs.send_message(QueueUrl=source.url, MessageBody=body)

    assert _handled(source, name, tmp_path, aws.store_url(table)) == 3

    charged = Counter(charged_in(tmp_path))
    assert set(charged) == {f"o-{number}" for number in range(6)}
    assert max(charged.values()) == 1 if name == "charge" else max(charged.values()) > 2
    assert {each.status for each in store.scan()} == ({Status.COMPLETED} if name == "charge" else set())
