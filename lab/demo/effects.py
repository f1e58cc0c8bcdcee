"""What the tasks do to the world; plain and idempotent tasks share these bodies.

The card is charged at a provider that honours idempotency keys. Stock and mail are like most of the world:
they do what they are told, as often as they are told.
"""

from __future__ import annotations

from celery import current_task

from celery_idempotent import current_attempt
from lab.demo import witness
from lab.demo.app import settings
from lab.demo.faults import Faults
from lab.demo.gateway import Gateway
from lab.demo.ledger import Ledger, Row

ledger = Ledger(settings.folder / "ledger.jsonl")
bank = Ledger(settings.folder / "bank.jsonl")
gateway = Gateway(bank)
faults = Faults(settings.folder / "faults", ledger) if settings.faults else None
witness.watch(ledger)


def charge(order: str, idempotency_key: str | None = None) -> str:
    """Charge the card; the number of the charge."""
    _began("charge_card", order)
    attempt, token = _stamp()
    reference = gateway.charge(order, idempotency_key=idempotency_key, attempt=attempt, token=token)
    _done("charge_card", order)
    return reference


def reserve(order: str, sku: str, quantity: int) -> str:
    """Take `quantity` pieces of `sku` off the shelf."""
    _began("reserve_stock", order)
    _record("effect", "reserve_stock", order)
    _done("reserve_stock", order)
    return f"{quantity} x {sku}"


def mail(order: str, email: str) -> str:
    """Send the receipt."""
    _began("send_receipt", order)
    _record("effect", "send_receipt", order)
    _done("send_receipt", order)
    return email


def _began(task: str, order: str) -> None:
    _record("run", task, order)
    if faults:
        faults.strike(task, "before", order)


def _done(task: str, order: str) -> None:
    if faults:
        faults.strike(task, "after", order)


def _record(what: str, task: str, order: str) -> None:
    attempt, token = _stamp()
    task_id = current_task.request.id
    ledger.append(Row(what=what, task=task, order=order, task_id=task_id, attempt=attempt, token=token))


def _stamp() -> tuple[int, int]:
    """Number and fencing token of the attempt that is running; plain Celery knows neither."""
    try:
        attempt = current_attempt()
    except LookupError:
        return 0, 0
    return attempt.number, attempt.fencing_token
