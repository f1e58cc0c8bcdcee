"""Sent to every worker: writes what the library and Celery signal into the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.signals import task_success

from celery_idempotent.integration.messages import deliveries
from celery_idempotent.integration.signals import BY_EVENT
from tests.support.ledger import record

PROPERTIES = ("DelaySeconds", "MessageGroupId")


def witness_of(event: str) -> Callable[..., None]:
    """A receiver that writes one kind of row."""

    def receive(sender: Any, key: str, fencing_token: int | None, reason: str, **other: Any) -> None:
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


for name, signal in BY_EVENT.items():
    signal.connect(witness_of(name), weak=False)
task_success.connect(witness_result, weak=False)
