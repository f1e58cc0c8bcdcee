"""The page on SNS as it stands: one event, three services, each effect once, whoever dies and whatever comes twice."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest

from lab import tether
from lab.embedded import EmbeddedAws, EmbeddedRedis
from lab.embedded.aws import REGION
from tests.support.documents import DOCS, code
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.worker, pytest.mark.timeout(240)]

((_, SERVICES_PY),) = code(DOCS / "how-to/sns.md", "py")

EFFECTS = {"billing": "invoice of 500", "stock": "reserved chair", "mail": "confirmed to a@example.org"}
"""By service, what it does with an order."""

DYING = """
import os, signal
from pathlib import Path
import boto3

made = boto3.client

def client(service):
    client = made(service)

    def soon(params, **_):
        params["VisibilityTimeout"] = 2

    def die(**_):
        if not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    client.meta.events.register("provide-client-params.sqs.ReceiveMessage", soon)
    client.meta.events.register("before-call.sqs.DeleteMessageBatch", die)
    return client

boto3.client = client
from services import *
"""
"""The services, of which one worker dies once between publishing calls and deleting their notifications."""


def effects(folder: Path, service: str) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(folder / f"{service}.sqlite")) as database:
        return sorted(database.execute("SELECT order_id, what FROM effects"))


def test_each_effect_of_a_fan_out_happens_once(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    """Orders come twice, and a worker dies after it published calls: its successor publishes them again."""
    (tmp_path / "services.py").write_text(SERVICES_PY)
    (tmp_path / "dying.py").write_text(DYING)
    orders = [f"o-{number}" for number in range(5)]
    with contextlib.ExitStack() as running:
        aws = running.enter_context(EmbeddedAws())
        credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}
        servers = {"AWS_ENDPOINT_URL": aws.endpoint, "BROKER_URL": redis_server.url}
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(tether.ROOT)])}
        process: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, **credentials, **servers, **path}}
        session = boto3.session.Session("test", "test", region_name=REGION)
        sns, sqs = session.client("sns", endpoint_url=aws.endpoint), session.client("sqs", endpoint_url=aws.endpoint)
        topic = sns.create_topic(Name="orders")["TopicArn"]
        urls = {name: sqs.create_queue(QueueName=f"{name}-orders")["QueueUrl"] for name in EFFECTS}
        for name, url in urls.items():
            found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
            sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=found["Attributes"]["QueueArn"])
            command = [sys.executable, "-m", "celery", "-A", f"services:{name}", "idempotency", "provision"]
            subprocess.run(command, check=True, capture_output=True, **process)

        def start(service: str, module: str = "services") -> subprocess.Popen[bytes]:
            options = ("--concurrency", "2", "--loglevel", "INFO", "--hostname", f"{service}@%h")
            worker = ["lab.tether", "celery", "-A", f"{module}:{service}", "worker", *options]
            with (tmp_path / f"{service}.log").open("ab") as log:
                streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
                command = [sys.executable, "-m", *worker]
                started = subprocess.Popen(command, start_new_session=True, **streams, **process)
            running.callback(tether.stop, started)
            return started

        def is_quiet() -> bool:
            """Whether no queue has a notification, seen or not."""
            names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            found = [sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names) for url in urls.values()]
            return all(count == "0" for each in found for count in each["Attributes"].values())

        start("stock")
        start("mail")
        for order_id in (*orders, "o-0"):
            message = {"order_id": order_id, "cents": 500, "sku": "chair", "email": "a@example.org"}
            sns.publish(TopicArn=topic, Message=json.dumps(message))
        dying = start("billing", "dying")
        wait_until(lambda: dying.poll() is not None, "the worker has died", timeout=60)
        assert (tmp_path / "died").exists()
        start("billing", "dying")
        wait_until(is_quiet, "every notification was taken", timeout=60)
        expected = {name: [(order_id, what) for order_id in orders] for name, what in EFFECTS.items()}
        wait_until(lambda: {each: effects(tmp_path, each) for each in EFFECTS} == expected, "each has each order once")
        log = tmp_path / "billing.log"
        wait_until(lambda: "idempotency.replayed" in log.read_text(), "what was published twice is replayed")
    assert {name: effects(tmp_path, name) for name in EFFECTS} == expected
    assert not any("sns_stays" in (tmp_path / f"{name}.log").read_text() for name in EFFECTS)
