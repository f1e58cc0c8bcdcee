"""Holding messages, on real servers and by kombu's own channels: what a broker keeps of it, without a worker."""
# mypy: allow-untyped-calls, allow-untyped-decorators

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import boto3
import pytest
import redis
from botocore.exceptions import ClientError
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Consumer

from celery_idempotent.integration.broker.extenders import Extender, extender_of, survive_expired_receipts
from lab.embedded import EmbeddedRedis, EmbeddedSentinel
from lab.embedded.redis import GROUP
from tests.support.waiting import wait_until


@contextmanager
def consumed(url: str, queue: str, options: dict[str, Any]) -> Iterator[tuple[Extender, Any, Any]]:
    """A message that was delivered and not acknowledged; gives what extends it, its channel, and the message."""
    with Connection(url, transport_options=options) as connection:
        messages: list[Any] = []
        channel = connection.default_channel
        with connection.Producer() as producer:
            producer.publish("order", routing_key=queue, declare=[Queue(queue, routing_key=queue)])
        with Consumer(connection, [Queue(queue, routing_key=queue)], on_message=messages.append):
            while not messages:
                connection.drain_events(timeout=20)
        extender = extender_of(connection.transport.driver_type, channel)
        assert extender is not None
        yield extender, channel, messages[0]


@pytest.mark.parametrize(
    ("kind", "prefix"), [("redis", "shop:"), pytest.param("sentinel", "", marks=pytest.mark.nightly)]
)
def test_a_message_on_redis_that_is_extended_is_not_delivered_again(
    redis_server: EmbeddedRedis, kind: str, prefix: str
) -> None:
    """Until it is extended no more; and one that was acknowledged stays away for good."""
    queue, index = uuid4().hex, uuid4().hex
    options = {"unacked_index_key": index, "unacked_key": uuid4().hex, "visibility_timeout": 60}
    options |= {"master_name": GROUP} if kind == "sentinel" else {"global_keyprefix": prefix}
    with ExitStack() as stack:
        url = redis_server.url
        if kind == "sentinel":
            url = f"sentinel://127.0.0.1:{stack.enter_context(EmbeddedSentinel(redis_server)).port}/0"
        server = stack.enter_context(redis.Redis.from_url(redis_server.url))
        extender, _, message = stack.enter_context(consumed(url, queue, options))
        tag, old = message.delivery_tag, time.time() - 61
        assert extender.visibility("") == 60
        server.zadd(prefix + index, {tag: old})
        extender.extend("", {tag: 60})
        extender.restore()
        assert server.zscore(prefix + index, tag) > old + 50
        assert server.llen(prefix + queue) == 0
        server.zadd(prefix + index, {tag: old})
        extender.restore()
        assert server.llen(prefix + queue) == 1
        message.ack()
        extender.extend("", {tag: 60})
        assert server.zscore(prefix + index, tag) is None


OPTIONS = {"region": "us-east-1", "is_secure": False, "wait_time_seconds": 1, "visibility_timeout": 1800}


@pytest.fixture
def sqs(dynamodb_endpoint: str) -> Any:
    """A client of the server itself."""
    return boto3.Session("test", "test", region_name="us-east-1").client("sqs", endpoint_url=dynamodb_endpoint)


@pytest.fixture(params=["", pytest.param(".fifo", marks=pytest.mark.nightly)], ids=["standard", "fifo"])
def queue(request: pytest.FixtureRequest, sqs: Any) -> str:
    """A queue that somebody else has made, with a timeout of its own."""
    name, fifo = f"{uuid4().hex}{request.param}", {"FifoQueue": "true"} if request.param else {}
    sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "2", **fifo})
    return name


@pytest.fixture
def broker_url(dynamodb_endpoint: str) -> str:
    """The same server, for kombu."""
    return dynamodb_endpoint.replace("http://", "sqs://test:test@") + "//"


def test_a_message_on_sqs_that_is_extended_is_not_delivered_again(sqs: Any, queue: str, broker_url: str) -> None:
    """By the timeout of its queue, not by that of the transport; and it comes back when it is let go."""

    def waiting() -> int:
        answer = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])
        return int(answer["Attributes"]["ApproximateNumberOfMessages"])

    with consumed(broker_url, queue, OPTIONS) as (extender, _, message):
        received = time.monotonic()
        url, tag = extender.queue_of(message), message.delivery_tag
        assert extender.visibility(url) == 2
        while time.monotonic() < received + 5:
            answer = extender.extend(url, {tag: 2})
            assert (answer.gone, answer.failed, waiting()) == ({}, {}, 0)
            time.sleep(0.3)
        wait_until(lambda: waiting() == 1, "it comes back", timeout=10)


def test_a_message_that_is_given_back_too_late_ends_no_worker(queue: str, broker_url: str, sqs: Any) -> None:
    """kombu raises what SQS says, which Celery takes for a reason to end (celery/kombu issue 1391)."""
    with consumed(broker_url, queue, OPTIONS) as (extender, channel, message):
        url, tag = extender.queue_of(message), message.delivery_tag
        sqs.delete_message(QueueUrl=url, ReceiptHandle=tag)
        assert set(extender.extend(url, {tag: 2}).gone) == {tag}
        delivery_info = dict(message.delivery_info)
        del channel.basic_reject  # kombu's own, of its class
        with pytest.raises(ClientError, match="Receipt|does not exist|not available"):
            message.reject(requeue=True)
        message.delivery_info.update(delivery_info)
        survive_expired_receipts(channel)
        message.reject(requeue=True)
        assert channel.qos.can_consume_max_estimate() != 0
