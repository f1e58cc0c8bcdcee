"""Sent to every worker: it writes all signals into the ledger, and sees as little of processes as a test says."""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from celery import current_app
from celery.signals import task_success, worker_init, worker_process_init
from kombu.transport import redis

from celery_idempotent.engine import delivery, processes
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.headers import deliveries
from tests.support.ledger import record

logger = logging.getLogger("celery_idempotent.tests")


def witness_of(event: str) -> Callable[..., None]:
    """A receiver that writes one kind of row."""

    def receive(sender: Any, key: str, fencing_token: int | None, reason: str, **other: Any) -> None:
        if sender is None or sender.request.delivery_info is None:
            return  # of a publisher, or of a scan: no delivery
        properties = sender.request.properties or {}
        sqs = {name: properties[name] for name in ("DelaySeconds", "MessageGroupId") if name in properties}
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


def be_elsewhere(**_: Any) -> None:
    """Before the pool forks: be on a machine of its own."""
    if current_app.conf.get("blindness") == "elsewhere":
        machine = f"{os.getpid():016}"
        processes._machine = cache(lambda: machine)


def see_nobody(**_: Any) -> None:
    """In a pool process: take every process for alive."""
    if current_app.conf.get("blindness") == "only parents":
        delivery.is_gone = lambda process: False  # type: ignore[attr-defined]  # imported there


for name, signal in SIGNALS.items():
    receiver = witness_deadline if name == "deadline_exceeded" else witness_of(name)
    signal.connect(receiver, weak=False)
task_success.connect(witness_result, weak=False)
worker_init.connect(be_elsewhere, weak=False)
worker_process_init.connect(see_nobody, weak=False)

# kombu before 5.7 looks for messages in Redis every hundred seconds; since then, options say how often.
if not hasattr(redis.Channel, "unacked_restore_interval"):
    _register: Any = redis.Transport.register_with_event_loop

    def _register_and_look_often(transport: Any, connection: Any, loop: Any) -> None:
        _register(transport, connection, loop)
        loop.call_repeatedly(0.5, transport.cycle.maybe_restore_messages)

    redis.Transport.register_with_event_loop = _register_and_look_often  # type: ignore[method-assign]
    redis.QoS.restore_visible.__defaults__ = (0, 10, 1)
