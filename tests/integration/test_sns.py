"""The page on SNS as it stands: one event, three services, each effect once, whoever dies and whatever comes twice."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
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

SERVICES = ("billing", "stock", "mail")

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
        self.environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": aws.endpoint,
            "BROKER_URL": broker,
            "PYTHONPATH": os.pathsep.join([str(folder), str(tether.ROOT)]),
        }
        (folder / "services.py").write_text(SERVICES_PY)
        (folder / "dying.py").write_text(DYING)
        session = boto3.session.Session("test", "test", region_name=REGION)
        self._sns = session.client("sns", endpoint_url=aws.endpoint)
        self.sqs = session.client("sqs", endpoint_url=aws.endpoint)
        self._topic = self._sns.create_topic(Name="orders")["TopicArn"]
        self.urls = [self._subscribed(f"{name}-orders") for name in SERVICES]

    def _subscribed(self, queue: str) -> str:
        url = self.sqs.create_queue(QueueName=queue)["QueueUrl"]
        arn = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        self._sns.subscribe(TopicArn=self._topic, Protocol="sqs", Endpoint=arn)
        return url

    def publish(self, order_id: str) -> None:
        message = {"order_id": order_id, "cents": 500, "sku": "chair", "email": "a@example.org"}
        self._sns.publish(TopicArn=self._topic, Message=json.dumps(message))

    def provision(self) -> None:
        for name in SERVICES:
            command = [sys.executable, "-m", "celery", "-A", f"services:{name}", "idempotency", "provision"]
            subprocess.run(command, cwd=self.folder, env=self.environment, check=True, capture_output=True)

    def worker(self, module: str, service: str) -> subprocess.Popen[bytes]:
        command = ["celery", "-A", f"{module}:{service}", "worker", "--concurrency", "2"]
        with (self.folder / f"{service}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lab.tether", *command, "--loglevel", "INFO", "--hostname", f"{service}@%h"],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text()

    def effects(self, service: str) -> list[tuple[str, str]]:
        with contextlib.closing(sqlite3.connect(self.folder / f"{service}.sqlite")) as database:
            return sorted(database.execute("SELECT order_id, what FROM effects"))

    def wait_for(self, service: str, effects: list[tuple[str, str]]) -> None:
        wait_until(lambda: self.effects(service) == effects, f"{service} has each order once")

    def is_quiet(self) -> bool:
        """Whether no queue has a notification, seen or not."""
        names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = (self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"] for url in self.urls)
        return all(each[name] == "0" for each in found for name in names)


@pytest.fixture
def street(tmp_path: Path, redis_server: EmbeddedRedis) -> Iterator[Street]:
    with EmbeddedAws() as aws:
        yield Street(tmp_path, aws, redis_server.url)


def test_each_effect_of_a_fan_out_happens_once(street: Street) -> None:
    """Orders come twice, and a worker dies after it published calls: its successor publishes them again."""
    street.provision()
    workers = [street.worker("services", name) for name in ("stock", "mail")]
    orders = [f"o-{number}" for number in range(5)]
    for order_id in (*orders, "o-0"):
        street.publish(order_id)

    dying = street.worker("dying", "billing")
    try:
        wait_until(lambda: dying.poll() is not None, "the worker has died", timeout=60)
        assert (street.folder / "died").exists()
        workers.append(street.worker("dying", "billing"))

        wait_until(street.is_quiet, "every notification was taken", timeout=60)
        expected = {"billing": "invoice of 500", "stock": "reserved chair", "mail": "confirmed to a@example.org"}
        for name, what in expected.items():
            street.wait_for(name, [(order_id, what) for order_id in orders])
        wait_until(lambda: "idempotency.replayed" in street.log("billing"), "what was published twice is replayed")
    finally:
        for worker in (dying, *workers):
            tether.stop(worker)
    for name in SERVICES:
        assert len(street.effects(name)) == len(orders)
        assert "sns_stays" not in street.log(name)
