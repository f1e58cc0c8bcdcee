"""A Django app: the record's table as a migration, a store on Django's own connections, and an admin page.

``INSTALLED_APPS += ["celery_idempotent.contrib.django"]``, ``CELERY_IDEMPOTENCY_STORE = "django://default"``.
"""

from celery.contrib.django.task import DjangoTask

from celery_idempotent.integration.task.task import IdempotentMixin

__all__ = ["IdempotentTask"]


class IdempotentTask(IdempotentMixin, DjangoTask):  # type: ignore[misc]  # Celery has no types
    """The root's ``IdempotentTask``, with ``delay_on_commit`` and ``apply_async_on_commit`` of Celery's for Django."""

    abstract = True
