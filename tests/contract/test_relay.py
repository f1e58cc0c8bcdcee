"""Relays between real databases and real brokers: a message that cannot be published fails alone."""
# mypy: allow-untyped-decorators

import json
import os
import signal
import warnings
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import boto3
import pytest
from celery import Celery
from celery.signals import before_task_publish
from redis import Redis
from sqlalchemy import update

from celery_idempotent import outbox
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.sql import SQLStore
from lab.embedded import EmbeddedRedis
from lab.embedded.aws import REGION
from tests.support.sql_databases import Database
from tests.support.waiting import wait_until


@pytest.fixture
def store(sqlite: Database) -> Iterator[SQLStore]:
    """A store whose outbox is empty."""
    with sqlite.store() as store:
        yield store


def _app(store: SQLStore, broker: str, **options: Any) -> Celery:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(idempotency_store=store, broker_transport_options=options)

    def ship(order: str) -> None:
        pass

    app.task(name="ship", shared=False)(ship)
    return app


def _message(task_id: str, order: str = "o-1", **options: Any) -> OutboxMessage:
    signature = {"task": "ship", "args": [order], "kwargs": {}, "options": options}
    return OutboxMessage(task_id, json.dumps(signature), "application/json")


def _enqueue(store: SQLStore, *messages: OutboxMessage) -> None:
    transaction = store.begin()
    for each in messages:
        transaction.enqueue(each)
    transaction.commit()


def _failures(store: SQLStore) -> dict[str, int]:
    """Of what waits, by task id."""
    return {each.id: each.failures for each in store.waiting(1000)}


class Queue:
    """A queue of a name of its own, on an SQS server."""

    def __init__(self, endpoint: str, store: SQLStore) -> None:
        self.name = f"q-{uuid4().hex}"
        self.sqs = boto3.session.Session("test", "test", region_name=REGION).client("sqs", endpoint_url=endpoint)
        self.url = self.sqs.create_queue(QueueName=self.name, Attributes={"MaximumMessageSize": "102400"})["QueueUrl"]
        broker = f"sqs://test:test@{endpoint.removeprefix('http://')}//"
        self.options = {"region": REGION, "is_secure": False}
        self.app = _app(store, broker, **self.options)
        self.app.conf.task_default_queue = self.name

    def arrived(self) -> list[str]:
        """The task ids of what has arrived; it is taken out."""
        found: list[str] = []
        while messages := self.sqs.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10).get("Messages"):
            for each in messages:
                found.append(json.loads(b64decode(each["Body"]))["headers"]["id"])
                self.sqs.delete_message(QueueUrl=self.url, ReceiptHandle=each["ReceiptHandle"])
        return sorted(found)


@pytest.fixture
def queue(dynamodb_endpoint: str, store: SQLStore) -> Iterator[Queue]:
    found = Queue(dynamodb_endpoint, store)
    yield found
    found.app.close()


def test_message_over_limit_of_sqs_fails_alone(store: SQLStore, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Those behind it go out; it is shown, and goes out itself once the queue takes it."""
    large = _message("large", "x" * 100_000)  # kombu encodes it twice in base 64
    _enqueue(store, _message("a"), large, *(_message(f"b{number}") for number in range(9)))

    assert outbox.relay(queue.app) == 10

    assert queue.arrived() == ["a", *(f"b{number}" for number in range(9))]
    (waiting,) = store.waiting(1000)
    reason = waiting.reason or ""
    assert waiting.failures == 1
    assert ("InvalidParameterValue" in reason, "shorter than 102400" in reason, "xxx" in reason) == (True, True, False)
    assert 'idempotency.relay_failed task_id=large failures=1 pause=1 reason="ClientError' in caplog.text

    queue.sqs.set_queue_attributes(QueueUrl=queue.url, Attributes={"MaximumMessageSize": "262144"})
    wait_until(lambda: outbox.relay(queue.app), "the pause to be over")
    assert (queue.arrived(), _failures(store)) == (["large"], {})


def test_what_sqs_refuses_fails_alone(store: SQLStore, queue: Queue) -> None:
    """Whatever class kombu raises of it: botocore's, its own, or the one that it has for a lost connection, too."""
    gone = f"gone-{uuid4().hex}"
    refused = {
        "no such queue": _message("no such queue", queue=gone),
        "not to be sent": _message("not to be sent", MessageGroupId=5),
        "no group": _message("no group", queue=f"{queue.name}.fifo", MessageGroupId=""),
        "not encodable": _message("not encodable", serializer="none such"),
    }
    queue.app.send_task("ship", ("o-1",), queue=gone)  # so that its URL is known to kombu
    queue.sqs.delete_queue(QueueUrl=queue.sqs.get_queue_url(QueueName=gone)["QueueUrl"])
    _enqueue(store, *refused.values(), _message("good"))

    assert outbox.relay(queue.app) == 1

    assert (queue.arrived(), _failures(store)) == (["good"], dict.fromkeys(refused, 1))


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    """A server with empty queues."""
    with EmbeddedRedis() as server:
        yield server


def _arrived(server: EmbeddedRedis) -> list[str]:
    with Redis.from_url(server.url) as client:
        return [json.loads(each)["headers"]["id"] for each in reversed(client.lrange("celery", 0, -1))]


def test_queue_that_redis_cannot_write_fails_alone(store: SQLStore, redis: EmbeddedRedis) -> None:
    """A key of another type, or one that the user may not touch, is no lost connection, though kombu calls it one."""
    with Redis.from_url(redis.url) as client:
        client.set("text", "of somebody")
        client.acl_setuser("shop", enabled=True, nopass=True, keys=["celery*", "_kombu*", "text*"], commands=["+@all"])
    app = _app(store, redis.url.replace("redis://", "redis://shop:x@"))
    _enqueue(store, _message("text", queue="text"), _message("denied", queue="of-others"), _message("good"))

    assert outbox.relay(app) == 1

    assert _arrived(redis) == ["good"]
    reasons = {each.id: each.reason or "" for each in store.waiting(10)}
    assert ("WRONGTYPE" in reasons["text"], "No permissions" in reasons["denied"]) == (True, True)


def test_relay_that_is_killed_loses_nothing_and_forgets_no_failure(store: SQLStore, redis: EmbeddedRedis) -> None:
    """What it had comes back; what it had counted is counted."""
    _enqueue(store, _message("refused", serializer="none such"), *(_message(str(number)) for number in range(5)))
    store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads
        child = os.fork()
    if child == 0:
        sent = iter(range(3))

        def die(**_: Any) -> None:
            if next(sent, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            before_task_publish.connect(die, weak=False)
            outbox.relay(_app(store, redis.url))
        finally:
            os._exit(0)

    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert _arrived(redis) == ["0", "1"]
    app = _app(store, redis.url)
    assert outbox.relay(app) == 0, "the dead relay has them still"

    transaction = store.begin()
    transaction.connection.execute(update(store.outbox).values(taken_until=0))  # as when its hold is over
    transaction.commit()
    assert outbox.relay(app) == 5
    assert Counter(_arrived(redis)) == {"0": 2, "1": 2, "2": 1, "3": 1, "4": 1}
    assert _failures(store) == {"refused": 2}
