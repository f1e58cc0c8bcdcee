"""Holding messages, on real servers and by kombu's own channels: what a broker keeps of it, without a worker."""
# mypy: allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from uuid import uuid4

import boto3
import pytest
import redis
from botocore.exceptions import ClientError
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Consumer

from celery_idempotent.integration.broker.extenders import Extender, extender_of, survive_expired_receipts
from lab.embedded import EmbeddedRedis
from tests.support.redis_servers import GROUP, EmbeddedSentinel
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


class TestRedis:
    """Redis, by whatever way kombu reaches it."""

    @pytest.fixture(params=["redis", "prefix", "sentinel"])
    def way(self, request: pytest.FixtureRequest, redis_server: EmbeddedRedis) -> Iterator[tuple[str, dict[str, Any]]]:
        """A URL and the options of the transport."""
        index = {"unacked_index_key": uuid4().hex, "unacked_key": uuid4().hex}
        if request.param == "redis":
            yield redis_server.url, index
        elif request.param == "prefix":
            yield redis_server.url, {**index, "global_keyprefix": "shop:"}
        else:
            with EmbeddedSentinel(redis_server) as sentinel:
                yield f"sentinel://127.0.0.1:{sentinel.port}/0", {**index, "master_name": GROUP}

    @pytest.fixture
    def server(self, redis_server: EmbeddedRedis) -> Iterator[Any]:
        """A client of the server itself, without prefixes."""
        with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
            yield client

    def test_a_message_that_is_extended_is_not_delivered_again(
        self, way: tuple[str, dict[str, Any]], server: Any
    ) -> None:
        """Until it is extended no more; and one that was acknowledged stays away for good."""
        url, options = way
        queue = uuid4().hex
        index = options.get("global_keyprefix", "") + options["unacked_index_key"]
        waiting = options.get("global_keyprefix", "") + queue
        with consumed(url, queue, {**options, "visibility_timeout": 60}) as (extender, _, message):
            tag, old = message.delivery_tag, time.time() - 61
            assert extender.visibility("") == 60
            server.zadd(index, {tag: old})
            extender.extend("", {tag: 60})
            extender.restore()
            assert server.zscore(index, tag) > old + 50
            assert server.llen(waiting) == 0
            server.zadd(index, {tag: old})
            extender.restore()
            assert server.llen(waiting) == 1
            message.ack()
            extender.extend("", {tag: 60})
            assert server.zscore(index, tag) is None


class TestSqs:
    """SQS, by receipts."""

    OPTIONS: ClassVar = {"region": "us-east-1", "is_secure": False, "wait_time_seconds": 1, "visibility_timeout": 1800}

    @pytest.fixture
    def sqs(self, dynamodb_endpoint: str) -> Any:
        """A client of the server itself."""
        return boto3.Session("test", "test", region_name="us-east-1").client("sqs", endpoint_url=dynamodb_endpoint)

    @pytest.fixture(params=["", ".fifo"], ids=["standard", "fifo"])
    def queue(self, request: pytest.FixtureRequest, sqs: Any) -> str:
        """A queue that somebody else has made, with a timeout of its own."""
        name = f"{uuid4().hex}{request.param}"
        sqs.create_queue(
            QueueName=name,
            Attributes={"VisibilityTimeout": "2", **({"FifoQueue": "true"} if request.param else {})},
        )
        return name

    @pytest.fixture
    def broker_url(self, dynamodb_endpoint: str) -> str:
        """The same server, for kombu."""
        return dynamodb_endpoint.replace("http://", "sqs://test:test@") + "//"

    def waiting(self, sqs: Any, url: str) -> int:
        """Messages that anybody could have."""
        answer = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["ApproximateNumberOfMessages"])
        return int(answer["Attributes"]["ApproximateNumberOfMessages"])

    def test_a_message_that_is_extended_is_not_delivered_again(self, sqs: Any, queue: str, broker_url: str) -> None:
        """By the timeout of its queue, not by that of the transport; and it comes back when it is let go."""
        with consumed(broker_url, queue, self.OPTIONS) as (extender, _, message):
            received = time.monotonic()
            url, tag = extender.queue_of(message), message.delivery_tag
            assert extender.visibility(url) == 2
            while time.monotonic() < received + 6:
                answer = extender.extend(url, {tag: 2})
                assert (answer.gone, answer.failed) == ({}, {})
                assert self.waiting(sqs, url) == 0
                time.sleep(0.3)
            wait_until(lambda: self.waiting(sqs, url) == 1, "it comes back", timeout=10)

    def test_what_was_acknowledged_is_gone(self, sqs: Any, queue: str, broker_url: str) -> None:
        """The others of the request are extended all the same."""
        with consumed(broker_url, queue, self.OPTIONS) as (extender, _, message):
            url, tag = extender.queue_of(message), message.delivery_tag
            message.ack()
            answer = extender.extend(url, {tag: 2})
            assert set(answer.gone) == {tag}
            assert answer.failed == {}

    def test_a_message_that_is_given_back_too_late_ends_no_worker(self, queue: str, broker_url: str, sqs: Any) -> None:
        """kombu raises what SQS says, which Celery takes for a reason to end (celery/kombu issue 1391)."""
        with consumed(broker_url, queue, self.OPTIONS) as (extender, channel, message):
            url, tag = extender.queue_of(message), message.delivery_tag
            sqs.delete_message(QueueUrl=url, ReceiptHandle=tag)
            delivery_info = dict(message.delivery_info)
            del channel.basic_reject  # kombu's own, of its class
            with pytest.raises(ClientError, match="Receipt|does not exist|not available"):
                message.reject(requeue=True)
            message.delivery_info.update(delivery_info)
            survive_expired_receipts(channel)
            message.reject(requeue=True)
            assert channel.qos.can_consume_max_estimate() != 0
