"""Three tasks, and three ways to say what makes two messages one intent.

A message can come twice: a customer clicks twice, a webhook is sent again, a worker dies and the broker delivers
again. So each task names its *intent* by a key. Messages with equal keys are one operation: the first one runs the
body, and every other gets its recorded result.

A key names what is meant, in the words of the business: the order, never the message.
"""

from __future__ import annotations

from typing import Any

from celery_idempotent import IdempotentTask, Policy, current_attempt
from example_project import providers
from example_project.app import app


# 1. The key is a path into an argument: of each order there is one charge.
@app.task(base=IdempotentTask, idempotent=Policy(key="order.id"))
def charge(order: dict[str, Any]) -> str:
    """Charge the card.

    A worker can die right after the charge, before anything has recorded it; the next attempt then has to ask the
    bank again. So it asks in a *step*, which comes with a key that is the same on every attempt. The bank honours
    such keys: it makes no second charge and answers with the first. What a step has returned is recorded, and is
    not asked for again.
    """
    reference: str = current_attempt().step(
        "charge",
        lambda step: providers.charge_card(order["id"], order["cents"], idempotency_key=step.key),
    )
    # More steps could follow. An attempt that takes over goes on after the last one that is recorded.
    return reference


# 2. The key is made of two arguments: of each order, each article is reserved once.
@app.task(base=IdempotentTask, idempotent=Policy(key=("order_id", "sku")))
def reserve_stock(order_id: str, sku: str, quantity: int) -> str:
    """Reserve an article.

    Nothing here survives a death right after the reservation: the next attempt reserves again. Where that matters,
    docs/how-to/effects.md has a tool for each kind of effect.

    The key leaves `quantity` out. Another quantity under the same key is no duplicate but a mistake of the sender:
    it fails with `KeyReused`, and nothing runs.
    """
    return providers.reserve(order_id, sku, quantity)


def order_and_mailbox(order_id: str, email: str) -> str:
    """A key may be a function with the task's own parameters."""
    return f"{order_id}:{email.strip().lower()}"


# 3. The key is computed: one receipt for each order and mailbox, however the address is written.
# `fingerprint` says which arguments must be equal under one key. By default all of them; here none has to be.
@app.task(base=IdempotentTask, idempotent=Policy(key=order_and_mailbox, fingerprint=None))
def send_receipt(order_id: str, email: str) -> str:
    """Send the receipt."""
    return providers.send_mail(order_id, email.strip())
