"""A Lambda function of a shop, and its runtime: `python -m tests.support.lambda_shop HANDLER URL ARN FOLDER STORE`.

It invokes a handler with batches of a queue until that is empty, and dies on its way: where an order says so, the
process kills itself, the first time that it comes there. What is charged is on disk.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3

from celery_idempotent import Policy, current_attempt
from celery_idempotent.contrib.aws_lambda import sqs_batch
from tests.support.aws_lambda import EventSource, Handler

INVOCATION = 3.0
"""Seconds; the function's timeout."""


def charge_once(folder: Path, order_id: str, key: str) -> None:
    """What a receiver does that honours a key for ever."""
    (folder / f"charge-{sha256(key.encode()).hexdigest()}").write_text(order_id)


def charged_in(folder: Path) -> list[str]:
    """The orders that are charged."""
    return [each.read_text() for each in folder.glob("charge-*")]


def die_once(folder: Path, order_id: str, where: str, dies: str | None) -> None:
    """Kill this process, if the order says that it dies here and this is the first time."""
    mark = folder / f"died-{order_id}-{where}"
    if dies == where and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def handlers(folder: Path, store: str) -> dict[str, Handler]:
    """By name, what can be invoked."""

    def order(order_id: str, dies: str | None, charge: Callable[[], object]) -> None:
        die_once(folder, order_id, "before", dies)
        charge()
        die_once(folder, order_id, "after", dies)

    @sqs_batch(Policy("order_id"), store=store, name="charge")
    def charge(order_id: str, dies: str | None = None) -> None:
        step = current_attempt().step
        order(order_id, dies, lambda: step("charge", lambda step: charge_once(folder, order_id, step.key)))

    def plain(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        for body in (json.loads(each["body"]) for each in event["Records"]):
            order(body["order_id"], body["dies"], partial(charge_once, folder, body["order_id"], uuid4().hex))
        return {"batchItemFailures": []}

    return {"charge": charge, "plain": plain}


def main(name: str, url: str, arn: str, folder: str, store: str) -> None:
    """Invoke until the queue is empty."""
    handler, source = handlers(Path(folder), store)[name], EventSource(boto3.client("sqs"), url, arn)

    def invoke(event: dict[str, Any], context: Any) -> Mapping[str, Any]:
        response = handler(event, context)
        die_once(Path(folder), "batch", "answered", "answered")
        return response

    while source.waiting:
        source.poll(invoke, seconds=INVOCATION)


if __name__ == "__main__":
    main(*sys.argv[1:])
