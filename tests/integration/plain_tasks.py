"""A plain Celery task, which shows what Celery alone does."""
# mypy: allow-untyped-decorators

from __future__ import annotations

from celery import shared_task


@shared_task
def add(x: int, y: int) -> int:
    """Return the sum."""
    return x + y
