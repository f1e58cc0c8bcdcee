"""A shop whose page is served by its own command, in a process of its own."""

import os

from celery import Celery

from celery_idempotent import AtMostOnce, IdempotentTask, Keyed, Policy

app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.update(idempotency_store=os.environ.get("SHOP_STORE"), task_acks_late=True, task_reject_on_worker_lost=True)


@app.task(
    base=IdempotentTask,
    name="shop.charge",
    idempotent=Policy(label="order", on_takeover="refuse", effects={"charge": Keyed(), "receipt": AtMostOnce()}),
)
def charge(order: str) -> None:
    """What people are asked about."""


@app.task(base=IdempotentTask, name="shop.refund", idempotent=Policy(label="order"))
def refund(order: str) -> None:
    """Another."""
