"""Tasks for workers of two versions on one queue: only names that both know, except where both are asked first."""
# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import fields
from typing import Any

from celery import shared_task
from sqlalchemy import text

import celery_idempotent
from celery_idempotent import IdempotentTask, Policy, current_attempt
from tests.support.ledger import record, wait_at

GUARDED: dict[str, Any] = {"base": IdempotentTask, "bind": True, "acks_late": True, "reject_on_worker_lost": True}
QUICK: dict[str, Any] = {"key": "order_id", "lease": 4, "grace": 0.2, "backoff": 0.2, "backoff_max": 0.5}
SINCE: dict[str, Any] = {"label": "order_id"}
"""Options that the present version has and the previous one has not."""
NAMED: dict[str, Any] = {name: value for name, value in SINCE.items() if name in {each.name for each in fields(Policy)}}


def tell(kind: str, order_id: str, **details: Any) -> None:
    """Write down what the attempt did, and which version made it."""
    attempt = current_attempt()
    told = {"package": celery_idempotent.__file__, "idempotency_key": attempt.key, **details}
    record(kind, order_id, token=attempt.fencing_token, attempt=attempt.number, **told)


def pause(gate: str) -> None:
    """Wait for the test, where the call says so, and on the first attempt alone."""
    if gate and current_attempt().number == 1:
        wait_at(gate)


def charge(task: Any, order_id: str, gate: str = "") -> str:
    """At the gate the receiver has been called, and the step is not recorded."""

    def call(step: Any) -> str:
        tell("charged", order_id, effect_key=step.key)
        pause(gate)
        return f"paid {order_id}"

    tell("begin", order_id)
    return str(task.attempt.step("charge", call))


@shared_task(**GUARDED, idempotent=Policy(**QUICK, **NAMED))
def pay(self: Any, order_id: str, gate: str = "") -> str:
    """Call a receiver that honours keys."""
    return charge(self, order_id, gate)


@shared_task(**GUARDED, idempotent=Policy(**QUICK, **NAMED, on_takeover="refuse"))
def pay_at_most_once(self: Any, order_id: str, gate: str = "") -> str:
    """Have an effect that nobody can tell from a second one."""
    tell("begin", order_id)
    tell("effect", order_id)
    pause(gate)
    return f"paid {order_id}"


@shared_task(**GUARDED, idempotent=Policy(**QUICK, **NAMED))
def book(self: Any, order_id: str, gate: str = "") -> str:
    """Write a row in the transaction that records the outcome; at the gate it is written, and not committed."""
    tell("begin", order_id)
    with self.attempt.transaction() as tx:
        tx.execute(text("INSERT INTO bookings (order_id) VALUES (:order_id)"), {"order_id": order_id})
        pause(gate)
        return str(tx.done(f"booked {order_id}"))


@shared_task(**GUARDED, idempotent=Policy(**QUICK, **NAMED, publish="once"))
def pay_published_once(self: Any, order_id: str) -> str:
    """The same, for publishers that send one message of it."""
    return charge(self, order_id)
