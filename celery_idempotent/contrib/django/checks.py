"""System checks: what would otherwise be noticed only by somebody who looks at an empty admin page."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Warning, register  # noqa: A004 - Django's own name

from celery_idempotent.contrib.django.project import why_records_are_elsewhere


@register()
def check_admin_page(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn where the admin page would show another table than the one that workers write."""
    reason = why_records_are_elsewhere() if apps.is_installed("django.contrib.admin") else None
    if reason is None:
        return []
    return [
        Warning(
            f"The admin page for idempotency records does not show what workers write: {reason}.",
            hint="Set CELERY_IDEMPOTENCY_STORE = 'django://default' and import the Celery app in the package of your "
            "project; or, if the store's table is in Django's database all the same, silence this check.",
            id="celery_idempotent.W001",
        )
    ]
