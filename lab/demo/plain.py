"""The baseline: the same bodies as ordinary Celery tasks, with Celery's own means against loss.

There is no key to give the payment provider: a task id is new for every publication, and arguments are not an
identity Celery knows of.
"""

from __future__ import annotations

from typing import Any

from lab.demo import effects
from lab.demo.app import app


@app.task
def charge_card(order: dict[str, Any]) -> dict[str, str]:
    """Charge the card of `order`."""
    return {"order": order["id"], "charge": effects.charge(order["id"])}


@app.task
def reserve_stock(order_id: str, sku: str, quantity: int) -> str:
    """Reserve what was ordered."""
    return effects.reserve(order_id, sku, quantity)


@app.task
def send_receipt(order_id: str, email: str) -> str:
    """Send the receipt."""
    return effects.mail(order_id, email)
