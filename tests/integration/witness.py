"""Sent to every worker: writes what the library and Celery signal into the ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.signals import task_success

from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.headers import deliveries
from tests.support.ledger import record

logger = logging.getLogger("celery_idempotent.tests")

PROPERTIES = ("DelaySeconds", "MessageGroupId")


def witness_of(event: str) -> Callable[..., None]:
    """A receiver that writes one kind of row."""

    def receive(sender: Any, key: str, fencing_token: int | None, reason: str, **other: Any) -> None:
        if sender is None or sender.request.delivery_info is None:
            return  # of a publisher, or of a scan: no delivery
        properties = sender.request.properties or {}
        sqs = {name: properties[name] for name in PROPERTIES if name in properties}
        told = {
            "redelivered": sender.request.delivery_info.get("redelivered"),
            "deliveries": deliveries(sender.request),
        }
        record(event, key, token=fencing_token or 0, reason=reason, **told, **sqs)

    return receive


def witness_result(sender: Any, result: Any, **other: Any) -> None:
    """Write what a delivery reports as its result."""
    record("reported", sender.name, result=result)


def witness_deadline(sender: Any, key: str, task_id: str, **other: Any) -> None:
    """Note that a deadline is over, in a thread that has no request: by the worker's own log."""
    logger.warning("witnessed deadline_exceeded of %s by %s", task_id, sender.name)


for name, signal in SIGNALS.items():
    receiver = witness_deadline if name == "deadline_exceeded" else witness_of(name)
    signal.connect(receiver, weak=False)
task_success.connect(witness_result, weak=False)
