"""What the shop's workers do."""
# mypy: allow-untyped-decorators

import os
import time
from typing import Any

from celery_idempotent import Policy, current_attempt
from celery_idempotent.contrib.django import IdempotentTask
from tests.django.project.celery import app
from tests.django.project.shop.models import Charge


@app.task(
    base=IdempotentTask,
    bind=True,
    shared=False,
    name="shop.charge",
    idempotent=Policy(key="order_id", lease=2, backoff=0.2, retain=86_400),
)
def charge(self: Any, order_id: str, seconds: float = 0) -> str:
    """Charge once per order; a body that takes time leaves word of its beginning."""
    if seconds:
        Charge.objects.create(order_id=f"begin {order_id}", process=os.getpid())
        time.sleep(seconds)
    Charge.objects.create(order_id=order_id, process=os.getpid())
    return f"charged {order_id}"


@app.task(
    base=IdempotentTask,
    shared=False,
    name="shop.refund",
    idempotent=Policy(key="order_id", on_takeover="refuse", lease=30, retain=3 * 86_400),
)
def refund(order_id: str) -> str:
    """Refund at most once per order."""
    return f"refunded {order_id}"


@app.task(base=IdempotentTask, shared=False, name="shop.receipt", idempotent=Policy(key="order_id"))
def receipt(order_id: str) -> None:
    """Write a receipt once per order."""
    Charge.objects.create(order_id=f"receipt {order_id}", process=os.getpid())


@app.task(
    base=IdempotentTask,
    bind=True,
    shared=False,
    name="shop.book",
    idempotent=Policy(key="order_id", lease=2, backoff=0.2),
)
def book(self: Any, order_id: str, seconds: float = 0) -> str:
    """Book an order and have its receipt written, all or nothing."""
    if seconds:
        Charge.objects.create(order_id=f"begin {order_id}", process=os.getpid())
    with current_attempt().transaction() as tx:
        Charge.objects.create(order_id=order_id, process=os.getpid())
        tx.send(receipt, order_id)
        time.sleep(seconds if current_attempt().number == 1 else 0)
        done: str = tx.done(f"booked {order_id} by attempt {current_attempt().number}")
        return done
