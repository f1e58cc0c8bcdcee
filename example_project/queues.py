"""How full a queue of the embedded SQS is."""

from __future__ import annotations

import functools
from typing import Any

import boto3

from example_project.embedded import REGION


@functools.cache
def _sqs(endpoint: str) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
    )


def queue_length(endpoint: str, queue: str) -> int:
    """Messages waiting, delayed or being worked on."""
    sqs = _sqs(endpoint)
    lengths = sqs.get_queue_attributes(
        QueueUrl=sqs.get_queue_url(QueueName=queue)["QueueUrl"],
        AttributeNames=[
            "ApproximateNumberOfMessages",
            "ApproximateNumberOfMessagesDelayed",
            "ApproximateNumberOfMessagesNotVisible",
        ],
    )["Attributes"]
    return sum(int(length) for length in lengths.values())
