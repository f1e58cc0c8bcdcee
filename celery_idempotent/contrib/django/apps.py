"""The app's configuration."""

from django.apps import AppConfig
from django.core.checks import register


class IdempotencyConfig(AppConfig):
    """Gives the app a label that no other app has: its package is called ``django``."""

    name = "celery_idempotent.contrib.django"
    label = "celery_idempotent"
    verbose_name = "Idempotency"

    def ready(self) -> None:
        from celery_idempotent.contrib.django.project import check_admin_page

        register(check_admin_page)
