"""What the Celery app of a Django project says: its store, and the policies of its tasks; and a check of it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from celery import Celery, current_app
from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Warning  # noqa: A004 - Django's own name
from django.db import DEFAULT_DB_ALIAS

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration import binding
from celery_idempotent.integration.operating import verdicts
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.protocol import contents
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores.wrappers import innermost


def runtime() -> Runtime:
    return runtime_of(current_app)


def reveal(record: Record) -> Record:
    """The record as people may see it: decrypted as far as the app has the keys; never to be written back."""
    return contents.reveal(store_of_admin(), record)


def store_of_admin() -> Any:
    """The store of workers if it is on Django's connections, else one on the default database."""
    try:
        store = runtime().store
    except PolicyError:
        return DjangoStore(DEFAULT_DB_ALIAS)
    return store if isinstance(innermost(store), DjangoStore) else runtime().around(DjangoStore(DEFAULT_DB_ALIAS))


def why_records_are_elsewhere() -> str | None:
    """Why workers do not write where the admin page reads; None if they do."""
    try:
        store = runtime().store
    except PolicyError as error:
        return str(error)
    return None if isinstance(innermost(store), DjangoStore) else f"they write to {store!r}"


def check_admin_page(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn where the admin page would show another table than workers write; an empty page alone tells nobody."""
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


def idempotent_tasks() -> list[str]:
    app = current_app._get_current_object()
    _load_tasks(app)
    return [each.name for each in binding.idempotent_tasks(app)]


def policy_of(record: Record) -> Policy:
    """The policy of the record's task, or the app's if the project does not have that task."""
    _load_tasks(current_app._get_current_object())
    return runtime().policy_of(record)


def judge(action: Action, key: str, **proof: Any) -> None:
    """Give a verdict by the policy of the record's task; arguments and errors are those of ``verdicts.judge``."""
    _load_tasks(current_app._get_current_object())
    verdicts.judge(action, key, store=store_of_admin(), **proof)


@cache
def _load_tasks(app: Celery) -> None:
    """Import the tasks that a worker knows by Celery's conventions for Django, once.

    ``app.loader.import_default_modules()`` would set Django up again, which must not happen in a request.
    """
    app.autodiscover_tasks(force=True)
    for module in app.loader.default_modules:
        app.loader.import_task_module(module)
