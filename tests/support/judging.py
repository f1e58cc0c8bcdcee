"""Verdicts on what is recorded under a key."""

from typing import Any

from celery_idempotent.engine import verdicts
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import Action


def judge(store: Store, key: str, action: Action, *, seen_revision: str | None = None, **proof: Any) -> Record:
    """Give the verdict ``action`` on ``key``, as a person who looks now."""
    return verdicts.judge(store, verdicts.recorded(store, key, seen_revision), action, **proof)
