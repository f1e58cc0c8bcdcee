"""A task outside of Django's apps, which a worker finds by `CELERY_IMPORTS`."""
# mypy: allow-untyped-decorators

from celery_idempotent import IdempotentTask
from tests.django.project.celery import app


@app.task(base=IdempotentTask, shared=False, name="reports.send")
def send(day: str) -> str:
    """Send the report of a day."""
    return f"sent {day}"
