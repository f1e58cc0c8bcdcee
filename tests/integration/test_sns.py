"""The page on SNS as it stands: one event, three services, each effect once, whoever dies and whatever comes twice."""

from __future__ import annotations

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

pytestmark = [pytest.mark.worker, pytest.mark.timeout(240)]

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


class Street:
    """A topic with a queue for each service, and the services' workers, in a folder of their own."""

    def __init__(self, folder: Path, aws: EmbeddedAws, broker: str) -> None:
        self.folder = folder
        (folder / "services.py").write_text(SERVICES_PY)
        (folder / "dying.py").write_text(DYING)
        credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}
        path = os.pathsep.join([str(folder), str(tether.ROOT)])
        found = {"AWS_ENDPOINT_URL": aws.endpoint, "BROKER_URL": broker, "PYTHONPATH": path}
        self._process: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **credentials, **found}}
        session = boto3.session.Session("test", "test", region_name=REGION)
        self._sns = session.client("sns", endpoint_url=aws.endpoint)
        self._sqs = session.client("sqs", endpoint_url=aws.endpoint)
        self._topic = self._sns.create_topic(Name="orders")["TopicArn"]
        self._urls = [self._subscribed(f"{name}-orders") for name in EFFECTS]

    def _subscribed(self, queue: str) -> str:
        url = self._sqs.create_queue(QueueName=queue)["QueueUrl"]
        arn = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        self._sns.subscribe(TopicArn=self._topic, Protocol="sqs", Endpoint=arn)
        return url

    def publish(self, order_id: str) -> None:
        message = {"order_id": order_id, "cents": 500, "sku": "chair", "email": "a@example.org"}
        self._sns.publish(TopicArn=self._topic, Message=json.dumps(message))

    def provision(self) -> None:
        for name in EFFECTS:
            command = [sys.executable, "-m", "celery", "-A", f"services:{name}", "idempotency", "provision"]
            subprocess.run(command, check=True, capture_output=True, **self._process)

    def worker(self, service: str, module: str = "services") -> subprocess.Popen[bytes]:
        worker = ["celery", "-A", f"{module}:{service}", "worker", "--concurrency", "2", "--loglevel", "INFO"]
        command = [sys.executable, "-m", "lab.tether", *worker, "--hostname", f"{service}@%h"]
        with (self.folder / f"{service}.log").open("ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(command, start_new_session=True, **streams, **self._process)

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text()

    def effects(self, service: str) -> list[tuple[str, str]]:
        with contextlib.closing(sqlite3.connect(self.folder / f"{service}.sqlite")) as database:
            return sorted(database.execute("SELECT order_id, what FROM effects"))

    def is_quiet(self) -> bool:
        """Whether no queue has a notification, seen or not."""
        names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = (self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"] for url in self._urls)
        return all(each[name] == "0" for each in found for name in names)


def test_each_effect_of_a_fan_out_happens_once(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    """Orders come twice, and a worker dies after it published calls: its successor publishes them again."""
    orders = [f"o-{number}" for number in range(5)]
    with contextlib.ExitStack() as running:
        street = Street(tmp_path, running.enter_context(EmbeddedAws()), redis_server.url)
        street.provision()

        def started(service: str, module: str = "services") -> subprocess.Popen[bytes]:
            worker = street.worker(service, module)
            running.callback(tether.stop, worker)
            return worker

        started("stock")
        started("mail")
        for order_id in (*orders, "o-0"):
            street.publish(order_id)
        dying = started("billing", "dying")
        wait_until(lambda: dying.poll() is not None, "the worker has died", timeout=60)
        assert (tmp_path / "died").exists()
        started("billing", "dying")
        wait_until(street.is_quiet, "every notification was taken", timeout=60)
        expected = {name: [(order_id, what) for order_id in orders] for name, what in EFFECTS.items()}
        wait_until(lambda: {name: street.effects(name) for name in EFFECTS} == expected, "each has each order once")
        wait_until(lambda: "idempotency.replayed" in street.log("billing"), "what was published twice is replayed")
    assert {name: street.effects(name) for name in EFFECTS} == expected
    assert not any("sns_stays" in street.log(name) for name in EFFECTS)
