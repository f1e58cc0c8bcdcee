"""Six effects, six receivers, and the tool for each.

What is promised of each, in words: `python -m lab.kinds.guarantees`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import text

from celery_idempotent import AtMostOnce, Committed, Fenced, IdempotentTask, Keyed, Policy, current_attempt
from lab.demo.settings import BACKOFF, LEASE
from lab.kinds import receivers
from lab.kinds.apps import TABLE_OF_STOCK, books, shop


def policy(**effects: Any) -> Policy:
    """The policy of all six: one operation per order."""
    return Policy(key="order", lease=LEASE, backoff=BACKOFF, effects=effects)


@shop.task(base=IdempotentTask, idempotent=policy(charge=Keyed(window=timedelta(hours=24))))
def charge(order: str, cents: int) -> str:
    """A payment API that honours idempotency keys: a step hands it one that is the same on every attempt."""
    paid: str = current_attempt().step("charge", lambda step: receivers.bank.charge(order, cents, step.key))
    return paid


@shop.task(base=IdempotentTask, idempotent=policy(stock=Committed()))
def reserve(order: str, units: int) -> int:
    """Stock in DynamoDB, beside the record: both are written in one transaction."""
    taken = {
        "TableName": TABLE_OF_STOCK,
        "Key": {"order": order},
        "UpdateExpression": "ADD #reservations :one SET #units = :units",
        "ExpressionAttributeNames": {"#reservations": "reservations", "#units": "units"},
        "ExpressionAttributeValues": {":one": 1, ":units": units},
    }
    with receivers.under_fire("reserve", order):
        return current_attempt().commit(units, writes=[{"Update": taken}])


@books.task(base=IdempotentTask, idempotent=policy(ledger=Committed()))
def book(order: str, cents: int) -> int:
    """A ledger in the store's own database: the row, the record and the message for the receipt, or none of them."""
    with receivers.under_fire("book", order), current_attempt().transaction() as tx:
        tx.execute(text("INSERT INTO ledger VALUES (:order, :cents)"), {"order": order, "cents": cents})
        tx.send(receipt, order)
        done: int = tx.done(cents)
        return done


@books.task(base=IdempotentTask, idempotent=policy(mail=Keyed()))
def receipt(order: str) -> str:
    """What follows from `book`: published once it is committed, and started once, however often it is published."""
    sent: str = current_attempt().step("mail", lambda step: receivers.mailer.charge(order, 0, step.key))
    return sent


@shop.task(base=IdempotentTask, idempotent=policy(index=Fenced()))
def publish(order: str) -> str:
    """A search index that checks fencing tokens: shut out earlier attempts, look, and only then act."""
    index = receivers.index
    entry: str = current_attempt().fenced_step(
        "index",
        fence=lambda step: index.raise_fence(order, step.fencing_token),
        probe=lambda step: index.find(order),
        act=lambda step: index.add(order, step.fencing_token),
    )
    return entry


@shop.task(base=IdempotentTask, idempotent=policy(text=AtMostOnce()))
def notify(order: str) -> str:
    """A text message, of which nobody can tell afterwards whether it was sent: better none than two."""
    sent: str = current_attempt().step("text", lambda step: receivers.phone.send(order))
    return sent


ALL = (charge, reserve, book, receipt, publish, notify)
