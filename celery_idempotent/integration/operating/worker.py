"""What a worker does beside its tasks: checks before it takes a message, and work done now and then in a thread.

The checks are a bootstep, because a receiver of Celery's start-up signals cannot stop a worker: its exceptions are
logged and forgotten.
"""

import logging
import os
import random
import threading
import warnings
from abc import abstractmethod
from collections import Counter
from functools import cache
from itertools import islice
from typing import Any, ClassVar

import click
from celery import Celery, bootsteps
from kombu.exceptions import OperationalError

from celery_idempotent.engine.verdicts import Fate, PolicyOf, sweep_abandoned, sweep_released
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
from celery_idempotent.protocol.codec import describe
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import PurgeableStore, VerifiableStore
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


looking = threading.Lock()
"""Held while such a thread works. A pool process forked in the middle of that would inherit locks that nobody in it
will ever release, such as those of the SQLite library; so a fork waits for the end of the look."""


@cache
def fork_between_looks() -> None:
    """Have every fork of this process wait for the end of a look."""
    # What is registered last comes first before a fork: the look ends, and then stores close what must not be
    # inherited. So this is not done when the module is imported, but once the store is there.
    os.register_at_fork(before=looking.acquire, after_in_parent=looking.release, after_in_child=looking.release)


class Periodic(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """A step of a worker that looks for work every so often. Whatever goes wrong, the next look may fare better."""

    # What can be wrong with the store and the settings, StoreCheck has reported by then.
    requires = ("celery.worker.components:Pool", StoreCheck)

    work: ClassVar[str]
    """What it does, in the names of its thread, its events and its setting."""

    longest_pause: ClassVar[float] = 0.0
    """Seconds between two looks at most, to which the pause grows while there is nothing to do."""

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self.pause = 0.0  # seconds before the next look
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(parent, **kwargs)

    def every(self, app: Celery) -> float:
        """Seconds between two looks; 0: none."""
        return float(getattr(runtime_of(app), f"{self.work}_every")) / 1000

    def first_pause(self, every: float) -> float:
        """Seconds before the first look."""
        return 0.0

    @abstractmethod
    def look(self, app: Celery) -> bool:
        """Do what there is to do; whether to look again at once."""

    def start(self, parent: Any) -> None:
        _, about = runtime_of(parent.app).store, (parent.app, self.every(parent.app))
        fork_between_looks()
        name = f"celery-idempotent-{self.work}"
        self._thread = threading.Thread(target=self._run, args=about, name=name, daemon=True)
        self._thread.start()

    def stop(self, parent: Any) -> None:
        """Stop after the look at hand."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(10)

    def terminate(self, parent: Any) -> None:
        self.stop(parent)

    def wait(self, pause: float, every: float) -> bool:
        """Whether the worker ends within that many seconds; returns when the next look is due."""
        return self._stopping.wait(pause)

    def _run(self, app: Celery, every: float) -> None:
        """Look again and again. An outage is told when it begins and when it is over."""
        self.pause, is_away = self.first_pause(every), False
        while not self.wait(self.pause, every):
            more = False
            try:
                with looking:
                    more = self.look(app)
                if is_away:
                    say(logger.info, f"{self.work}_resumed")
                is_away = False
            except (StoreUnavailable, OperationalError) as error:
                if not is_away:
                    say(logger.warning, f"{self.work}_failed", reason=describe(error))
                is_away = True
            except Exception:  # noqa: BLE001 - it is logged whole
                say(logger.exception, f"{self.work}_failed")
            self.pause = 0.0 if more else min(max(2 * self.pause, every), max(self.longest_pause, every))


_BATCH = 1000
"""Records that are deleted in one look; a fork waits for its end."""


def policies_of(app: Celery) -> PolicyOf:
    """By record, the policy of its task, if this app has made the record and knows the task."""

    def policy_of(record: Record) -> Policy | None:
        task = app.tasks.get(record.task) if record.app == (app.main or "") else None
        return getattr(task, "idempotency_policy", None)

    return policy_of


class Purge(Periodic):
    """Purges in a thread of the worker's main process, every ``idempotency_purge`` seconds."""

    # Workers do it one after the other as chance has it; two at once delete different records.
    work = "purge"

    def include_if(self, parent: Any) -> bool:
        runtime = runtime_of(parent.app)
        ages = runtime.purge_released, runtime.purge_abandoned
        return bool(self.every(parent.app)) and (isinstance(runtime.store, PurgeableStore) or any(ages))

    def first_pause(self, every: float) -> float:
        return random.uniform(0, every)  # noqa: S311 - workers that start together must not all begin together

    def look(self, app: Celery) -> bool:
        runtime = runtime_of(app)
        store = runtime.store
        done: Counter[str] = Counter()
        if isinstance(store, PurgeableStore):
            done["outcomes"] = store.purge(_BATCH)
        if runtime.purge_released:
            done["released"] = sum(1 for _ in islice(sweep_released(store, age=runtime.purge_released), _BATCH))
        if runtime.purge_abandoned:
            swept = sweep_abandoned(store, policies_of(app), age=runtime.purge_abandoned + runtime.grace)
            for record, fate in islice(swept, _BATCH):
                done[fate] += 1
                if fate is Fate.IN_DOUBT:
                    say(logger.warning, "purge_in_doubt", key=record.key, task=record.task, worker=record.worker)
        if done.total():
            ended = {"abandoned": done[Fate.DELETED], "in_doubt": done[Fate.IN_DOUBT]}
            say(logger.info, "purged", outcomes=done["outcomes"], released=done["released"], **ended)
        return any(count == _BATCH for count in done.values())
