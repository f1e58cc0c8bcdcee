"""The load on `IdempotentTask`. What a user copies is in `example_project`."""

from __future__ import annotations

from typing import Any

from celery_idempotent import IdempotentTask, Policy, current_attempt
from lab.demo import effects
from lab.demo.app import app
from lab.demo.settings import BACKOFF, LEASE


@app.task(
    base=IdempotentTask,
    idempotent=Policy(key="order.id", lease=LEASE, backoff=BACKOFF),
)
def charge_card(order: dict[str, Any]) -> dict[str, str]:
    """Charge the card of `order`. The key is a path into an argument.

    The provider gets a key derived from the same intent, so a re-run after a crash moves no money.
    """
    key = current_attempt().effect_key("charge")
    return {"order": order["id"], "charge": effects.charge(order["id"], idempotency_key=key)}


@app.task(
    base=IdempotentTask,
    idempotent=Policy(key=("order_id", "sku"), lease=LEASE, backoff=BACKOFF),
)
def reserve_stock(order_id: str, sku: str, quantity: int) -> str:
    """Reserve what was ordered. The key is made of two arguments."""
    return effects.reserve(order_id, sku, quantity)


def recipient(order_id: str, email: str) -> str:
    """One receipt per order and mailbox, however the address is written."""
    return f"{order_id}:{email.strip().lower()}"


@app.task(
    base=IdempotentTask,
    # By default all arguments must be equal under one key; here the address may be written differently.
    idempotent=Policy(key=recipient, fingerprint=None, lease=LEASE, backoff=BACKOFF),
)
def send_receipt(order_id: str, email: str) -> str:
    """Send the receipt. The key is computed by a function with the task's own signature."""
    return effects.mail(order_id, email)
