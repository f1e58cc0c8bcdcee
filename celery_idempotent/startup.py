"""What is checked when a worker starts, before it takes a message.

A bootstep, because a receiver of Celery's start-up signals cannot stop a worker: its exceptions are logged
and forgotten.
"""

import logging
import warnings
from typing import Any

import click
from celery import Celery, bootsteps

from celery_idempotent.errors import IdempotencyError, IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.runtime import runtime_of
from celery_idempotent.store import VerifiableStore
from celery_idempotent.stores.memory import MemoryStore

__all__ = ["StoreCheck", "check_at_start"]

logger = logging.getLogger(__name__)


class StoreCheck(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
    """Refuses to start a worker whose store cannot work."""

    def create(self, parent: Any) -> None:
        """Check the store before the pool forks, so that every child inherits what its clock taught us.

        Raises:
            click.ClickException: The store or the settings cannot work; the message says what to do.
        """
        try:
            check(parent.app, pool=parent.pool_cls)
        except IdempotencyError as error:
            raise click.ClickException(f"celery-idempotent: {error}") from error


def check(app: Celery, pool: Any) -> None:
    """Check the settings of ``app`` and its store for a worker with the pool class ``pool``.

    Raises:
        PolicyError: A setting cannot be used.
        StoreMisconfigured: The store cannot work; the message names the command or permission to mend it.
    """
    runtime = runtime_of(app)
    store = runtime.store
    _ = runtime.codec, runtime.default_policy
    if isinstance(store, MemoryStore) and not getattr(pool, "__module__", "").endswith((".solo", ".thread")):
        warnings.warn(
            "idempotency_store=memory://: every process of this pool has a memory of its own, so duplicates that "
            "reach another process run again; use another store, or --pool=threads or solo",
            IdempotencyWarning,
            stacklevel=2,
        )
    if isinstance(store, VerifiableStore):
        try:
            store.verify()
        except StoreMisconfigured:
            raise
        except StoreUnavailable as error:
            # Starting is right: tasks are put off until the store is back, as in any later outage.
            logger.error("idempotency.store_unavailable reason=%s", error)


def check_at_start(app: Celery) -> None:
    """Have every worker of ``app`` check its store when it starts; safe to repeat."""
    app.steps["worker"].add(StoreCheck)
