"""What the tasks do to the world; plain and idempotent tasks share these bodies.

The card is charged at a provider that honours idempotency keys. Stock and mail are like most of the world:
they do what they are told, as often as they are told.
"""

from __future__ import annotations

from dataclasses import dataclass

from celery import current_task

from example_project.app import settings
from example_project.faults import Faults
from example_project.gateway import Gateway
from example_project.ledger import Ledger, Row

ledger = Ledger(settings.folder / "ledger.jsonl")
bank = Ledger(settings.folder / "bank.jsonl")
gateway = Gateway(bank)
faults = Faults(settings.folder / "faults", ledger) if settings.faults else None


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which attempt of which claim acts; plain Celery knows neither."""

    attempt: int = 0
    token: int = 0


def charge(order: str, stamp: Stamp = Stamp(), idempotency_key: str | None = None) -> str:
    """Charge the card; the number of the charge."""
    _began("charge_card", order, stamp)
    reference = gateway.charge(order, idempotency_key=idempotency_key, attempt=stamp.attempt, token=stamp.token)
    _done("charge_card", order)
    return reference


def reserve(order: str, sku: str, quantity: int, stamp: Stamp = Stamp()) -> str:
    """Take `quantity` pieces of `sku` off the shelf."""
    _began("reserve_stock", order, stamp)
    _record("effect", "reserve_stock", order, stamp)
    _done("reserve_stock", order)
    return f"{quantity} x {sku}"


def mail(order: str, email: str, stamp: Stamp = Stamp()) -> str:
    """Send the receipt."""
    _began("send_receipt", order, stamp)
    _record("effect", "send_receipt", order, stamp)
    _done("send_receipt", order)
    return email


def _began(task: str, order: str, stamp: Stamp) -> None:
    _record("run", task, order, stamp)
    if faults:
        faults.strike(task, "before", order)


def _done(task: str, order: str) -> None:
    if faults:
        faults.strike(task, "after", order)


def _record(what: str, task: str, order: str, stamp: Stamp) -> None:
    ledger.append(
        Row(
            what=what,
            task=task,
            order=order,
            task_id=current_task.request.id,
            attempt=stamp.attempt,
            token=stamp.token,
        )
    )
