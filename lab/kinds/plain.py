"""The baseline: the same effects from ordinary Celery tasks, with Celery's own means against loss."""

from __future__ import annotations

from lab.kinds import receivers
from lab.kinds.apps import books, shop


@shop.task
def charge(order: str, cents: int) -> str:
    """Without a key: a task id is new for every publication."""
    return receivers.bank.charge(order, cents, None)


@shop.task
def reserve(order: str, units: int) -> int:
    """One update."""
    with receivers.under_fire("reserve", order):
        receivers.reserve(order, units)
    return units


@books.task
def book(order: str, cents: int) -> int:
    """One row, and then the message."""
    with receivers.under_fire("book", order):
        receivers.book(order, cents)
        receipt.delay(order)
    return cents


@books.task
def receipt(order: str) -> str:
    """One mail."""
    return receivers.mailer.charge(order, 0, None)


@shop.task
def publish(order: str) -> str:
    """One entry."""
    return receivers.index.add(order, None)


@shop.task
def notify(order: str) -> str:
    """One text."""
    return receivers.phone.send(order)
