"""Plain Celery tasks: they show that the infrastructure works and what Celery alone does."""
# mypy: allow-untyped-decorators

from __future__ import annotations

from celery import shared_task

from tests.support.ledger import record, wait_at


@shared_task
def add(x: int, y: int) -> int:
    """Return the sum."""
    return x + y


@shared_task(acks_late=True, reject_on_worker_lost=True)
def plain_effect(key: str, gate: str) -> str:
    """Begin, wait at the gate, then have the effect."""
    record("begin", key)
    wait_at(gate)
    record("effect", key)
    return key
