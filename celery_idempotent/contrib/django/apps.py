"""The app's configuration."""

from django.apps import AppConfig


class IdempotencyConfig(AppConfig):
    """Gives the app a label that no other app has: its package is called ``django``."""

    name = "celery_idempotent.contrib.django"
    label = "celery_idempotent"
    verbose_name = "Idempotency"

    def ready(self) -> None:
        """Register the system check."""
        from celery_idempotent.contrib.django import project  # noqa: F401 - importing registers them
