"""A Lambda function of a shop, and its runtime: `python -m tests.support.lambda_shop HANDLER URL ARN FOLDER STORE`.

It invokes a handler with batches of a queue until that is empty, and dies on its way: where an order says so, the
process kills itself, the first time that it comes there. What is charged is on disk, in a database of the receiver's.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3

from celery_idempotent import Policy, current_attempt
from celery_idempotent.contrib.aws_lambda import sqs_batch
from tests.support.aws_lambda import EventSource, Handler

INVOCATION = 3.0
"""Seconds; the function's timeout."""


class Receiver:
    """Takes charges: it honours a key for ever, and what comes without one is a charge each time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "charges.sqlite"
        with closing(sqlite3.connect(self._path)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS charges (key TEXT PRIMARY KEY, order_id TEXT)")

    def charge(self, order_id: str, key: str) -> None:
        """One charge for each key."""
        with closing(sqlite3.connect(self._path)) as db, db:
            db.execute("INSERT OR IGNORE INTO charges VALUES (?, ?)", (key, order_id))

    @property
    def charged(self) -> list[str]:
        """The orders, in the order of their charges."""
        with closing(sqlite3.connect(self._path)) as db:
            return [order_id for (order_id,) in db.execute("SELECT order_id FROM charges ORDER BY rowid")]


def die_once(folder: Path, order_id: str, where: str, dies: str | None) -> None:
    """Kill this process, if the order says that it dies here and this is the first time."""
    mark = folder / f"died-{order_id}-{where}"
    if dies == where and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def handlers(folder: Path, store: str) -> dict[str, Handler]:
    """By name, what can be invoked."""
    receiver = Receiver(folder)

    @sqs_batch(Policy("order_id"), store=store, name="charge")
    def charge(order_id: str, dies: str | None = None) -> None:
        die_once(folder, order_id, "before", dies)
        current_attempt().step("charge", lambda step: receiver.charge(order_id, step.key))
        die_once(folder, order_id, "after", dies)

    def plain(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
        for each in event["Records"]:
            body = json.loads(each["body"])
            die_once(folder, body["order_id"], "before", body.get("dies"))
            receiver.charge(body["order_id"], uuid4().hex)
            die_once(folder, body["order_id"], "after", body.get("dies"))
        return {"batchItemFailures": []}

    return {"charge": charge, "plain": plain}


def main() -> None:
    """Invoke until the queue is empty."""
    name, url, arn, folder, store = sys.argv[1:]
    handler = handlers(Path(folder), store)[name]

    def invoke(event: dict[str, Any], context: Any) -> Mapping[str, Any]:
        response = handler(event, context)
        die_once(Path(folder), "batch", "answered", "answered")
        return response

    source = EventSource(boto3.client("sqs"), url, arn)
    while source.waiting:
        source.poll(invoke, seconds=INVOCATION)


if __name__ == "__main__":
    main()
