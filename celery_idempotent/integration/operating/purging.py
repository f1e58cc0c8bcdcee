"""Purging by the workers themselves, where the store keeps what it has until somebody deletes it."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

from celery import Celery

from celery_idempotent.engine.sweeping import Fate, PolicyOf, sweep_abandoned, sweep_released
from celery_idempotent.integration.operating.periodic import Periodic
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import PurgeableStore

logger = logging.getLogger(__name__)

_BATCH = 1000
"""Records that are deleted in one look; a fork waits for its end."""


def policies_of(app: Celery) -> PolicyOf:
    """By record, the policy of its task, if this app has made the record and knows the task."""

    def policy_of(record: Record) -> Policy | None:
        task = app.tasks.get(record.task) if record.app == (app.main or "") else None
        return getattr(task, "idempotency_policy", None)

    return policy_of


class Purge(Periodic):
    """Purges in a thread of the worker's main process, every ``idempotency_purge`` seconds.

    Workers do it one after the other as chance has it; two at once delete different records.
    """

    work = "purge"

    def include_if(self, parent: Any) -> bool:
        """Only where it is asked for, and there is something to delete."""
        runtime = runtime_of(parent.app)
        ages = runtime.purge_released, runtime.purge_abandoned
        return bool(self.every(parent.app)) and (isinstance(runtime.store, PurgeableStore) or any(ages))

    def every(self, app: Celery) -> float:
        return runtime_of(app).purge_every

    def first_pause(self, every: float) -> float:
        """Some part of it: workers that start together must not all begin together."""
        return random.uniform(0, every)  # noqa: S311 - it keeps no secret

    def look(self, app: Celery) -> bool:
        """Delete a batch of each kind."""
        runtime, store = runtime_of(app), runtime_of(app).store
        done: Counter[str] = Counter()
        if isinstance(store, PurgeableStore):
            done["outcomes"] = store.purge(_BATCH)
        if runtime.purge_released:
            done["released"] = sum(1 for _ in islice(sweep_released(store, age=runtime.purge_released), _BATCH))
        if runtime.purge_abandoned:
            swept = sweep_abandoned(store, policies_of(app), age=runtime.purge_abandoned)
            for record, fate in islice(swept, _BATCH):
                done[fate] += 1
                if fate is Fate.IN_DOUBT:
                    say(logger.warning, "purge_in_doubt", key=record.key, task=record.task, worker=record.worker)
        if done.total():
            say(
                logger.info,
                "purged",
                outcomes=done["outcomes"],
                released=done["released"],
                abandoned=done[Fate.DELETED],
                in_doubt=done[Fate.IN_DOUBT],
            )
        return any(count == _BATCH for count in done.values())

    def log_failure(self, log: Callable[..., None], reason: str | None) -> None:
        """What is left is there for the next look."""
        say(log, "purge_failed", reason=reason)
