"""What is checked when a worker starts, before it takes a message.

A bootstep, because a receiver of Celery's start-up signals cannot stop a worker: its exceptions are logged
and forgotten.
"""

import logging
import warnings
from typing import Any

import click
from celery import Celery, bootsteps
from celery._state import connect_on_app_finalize

from celery_idempotent.errors import (
    IdempotencyError,
    IdempotencyWarning,
    PolicyError,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.integration import binding
from celery_idempotent.integration.broker.hints import Hint, hints
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.store import VerifiableStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.wrappers import innermost

logger = logging.getLogger(__name__)


class StoreCheck(bootsteps.Step):  # type: ignore[misc]  # Celery has no types
    """Refuses to start a worker whose store cannot work."""

    def include_if(self, parent: Any) -> bool:
        """Only where something is to be protected, or somebody thinks so."""
        return bool(binding.idempotent_tasks(parent.app)) or parent.app.conf.get("idempotency_policy") is not None

    def create(self, parent: Any) -> None:
        """Check the store before the pool forks, so that every child inherits what its clock taught us."""
        try:
            for hint in check(parent.app, parent.pool_cls.__module__):
                say(logger.info, "hint", setting=hint.setting, found=hint.found, cost=hint.cost, instead=hint.instead)
        except IdempotencyError as error:
            if isinstance(error, StoreMisconfigured) or not isinstance(error, StoreUnavailable):
                raise click.ClickException(f"celery-idempotent: {error}") from error
            # Starting is right: tasks are postponed until the store is back, as in any later outage.
            say(logger.error, "store_unavailable", reason=error)
        tasks = [each for _, each in sorted(parent.app.tasks.items()) if not binding.is_builtin(type(each))]
        protected = ",".join(each.name for each in tasks if binding.is_enforced(each))
        unprotected = ",".join(each.name for each in tasks if not binding.is_enforced(each))
        say(logger.info, "started", store=runtime_of(parent.app).store, protected=protected, unprotected=unprotected)


def check(app: Celery, pool: str) -> list[Hint]:
    """Check what a worker of ``app`` needs: that its tasks can be bound, its settings used, and its store, too.

    The app's modules are imported by then; ``pool`` is the module of the worker's pool. Gives what could be better
    about settings that nobody wrote; of the others it warns, and of what is grave.
    """
    app.finalize(auto=True)
    runtime = runtime_of(app)
    tasks = binding.idempotent_tasks(app)
    if not tasks and app.conf.get("idempotency_policy") is not None:
        raise PolicyError(
            "idempotency_policy",
            "Policy(...)",
            "no task of the app is idempotent, so nothing is protected; write base=IdempotentTask, or for all tasks "
            'Celery(..., task_cls="celery_idempotent:IdempotentTask")',
        )
    for task in (each for each in tasks if each.idempotent is None):
        try:
            binding.check_policy(runtime.default_policy, binding.body_signature(type(task)))
        except PolicyError as error:
            remedy = f"{task.name}: {error.remedy}; a task can have a policy of its own: idempotent=Policy(...)"
            raise PolicyError("idempotency_policy", f"Policy({error.option}={error.value})", remedy) from error
    store = runtime.store
    runtime.check()
    if isinstance(innermost(store), MemoryStore) and not pool.endswith((".solo", ".thread")):
        text = (
            "idempotency_store=memory://: every process of this pool has a memory of its own, so duplicates that "
            "reach another process run again; use another store, or --pool=threads or solo"
        )
        warnings.warn(IdempotencyWarning(text, "idempotency_store"), stacklevel=2)
    found = hints(app, pool, unheld_tasks(app))
    for hint in found:
        if not hint.is_advice:
            warnings.warn(IdempotencyWarning(str(hint), hint.setting), stacklevel=2)
    if isinstance(store, VerifiableStore):
        store.verify()
    return [hint for hint in found if hint.is_advice]


def unheld_tasks(app: Celery) -> list[Any]:
    """The app's tasks whose messages no worker holds, without Celery's own."""
    holds = runtime_of(app).hold_messages
    ours = [each for each in app.tasks.values() if not binding.is_builtin(type(each))]
    return [] if holds == "all" else [each for each in ours if not (holds and binding.is_protected(each))]


connect_on_app_finalize(lambda app: app.steps["worker"].add(StoreCheck))  # for a policy that protects nothing
