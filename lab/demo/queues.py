"""How full a queue is."""

import functools
from typing import Any
from urllib.parse import urlsplit

import boto3

from lab.embedded import REGION, rabbitmq


def queue_length(broker: str, queue: str) -> int:
    """Messages waiting, delayed or being worked on.

    A message on its way from Redis into a worker is in nobody's books for a moment. An empty Redis is empty for
    certain only if it stays so. What RabbitMQ tells is up to a second old.
    """
    address = urlsplit(broker)
    if address.scheme == "redis":
        return _in_redis(broker, queue)
    if address.scheme == "amqp":
        return rabbitmq.length(broker, queue)
    return _in_sqs(f"http://{address.hostname}:{address.port}", queue)


def _in_redis(url: str, queue: str) -> int:
    import redis  # which the demo installs only if it is asked for

    with redis.Redis.from_url(url) as client, client.pipeline() as pipe:
        waiting, unacknowledged = pipe.llen(queue).hlen("unacked").execute()
    return int(waiting) + int(unacknowledged)


def _in_sqs(endpoint: str, queue: str) -> int:
    sqs, counts = _sqs(endpoint), "ApproximateNumberOfMessages"
    asked = [counts, f"{counts}Delayed", f"{counts}NotVisible"]
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    return sum(map(int, sqs.get_queue_attributes(QueueUrl=url, AttributeNames=asked)["Attributes"].values()))


@functools.cache
def _sqs(endpoint: str) -> Any:
    return boto3.Session("test", "test", region_name=REGION).client("sqs", endpoint_url=endpoint)
