"""The app of the recovery campaign: a body that hangs in its first attempt, until somebody kills it.

`celery -A lab.proof.recovery_app worker`, configured by the environment of `lab.demo.settings` and :data:`SYSTEM`.
"""

from __future__ import annotations

import os
import time
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from celery import Celery, current_task
from celery.signals import worker_ready

from celery_idempotent import IdempotentTask, Policy, signals
from celery_idempotent.engine import processes
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import Settings

__all__ = ["SHORT_LEASE", "SYSTEM", "VISIBILITY_TIMEOUT", "System", "elsewhere", "make_app"]

SYSTEM = "RECOVERY_SYSTEM"
"""The environment variable that says under which system a worker runs the body."""

VISIBILITY_TIMEOUT = 6
"""Seconds until a broker gives the messages of a dead worker again."""

SHORT_LEASE = 10
"""Seconds. A minute, the default, would be all there is to measure where nothing ends a lease before its time."""


class System(StrEnum):
    """Under what the body runs."""

    PLAIN = "plain Celery, acks_late, reject_on_worker_lost"
    BEFORE = "celery-idempotent, claims name no process"
    OURS = "celery-idempotent"


def elsewhere(folder: Path) -> Path:
    """While this file exists, workers that start believe to be on a machine of their own."""
    return folder / "elsewhere"


def make_app(system: System, settings: Settings) -> Celery:
    """An app with the task ``execute`` and, under the same body, ``execute_on_a_short_lease``."""
    app = Celery("recovery", set_as_current=False)
    app.conf.update(settings.celery())
    app.conf.broker_transport_options["visibility_timeout"] = VISIBILITY_TIMEOUT
    ledger = Ledger(settings.folder / "ledger.jsonl")

    def execute(operation: str) -> None:
        task_id = current_task.request.id
        ledger.append(Row(what="run", order=operation, task_id=task_id))
        if _is_first(settings.folder / operation):
            time.sleep(600)
        ledger.append(Row(what="effect", order=operation, task_id=task_id))

    for name, policy in (
        ("execute", Policy("operation")),
        ("execute_on_a_short_lease", Policy("operation", lease=SHORT_LEASE)),
    ):
        ours: dict[str, Any] = {} if system is System.PLAIN else {"base": IdempotentTask, "idempotent": policy}
        app.task(name=name, shared=False, **ours)(execute)
    return app


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _observe(ledger: Ledger) -> None:
    def note(what: str) -> Any:
        return lambda sender=None, **_: ledger.append(Row(what=what, order=_operation(sender)))

    worker_ready.connect(note("ready"), weak=False)
    signals.conflicted.connect(note("conflicted"), weak=False)


def _operation(sender: Any) -> str:
    return str(sender.request.kwargs["operation"]) if isinstance(sender, IdempotentTask) else ""


def _hide_processes() -> None:
    processes._PROC = Path("/nonexistent")


def _be_elsewhere() -> None:
    processes._machine = cache(lambda: "f" * 16)


if SYSTEM in os.environ:
    _settings, _system = Settings.from_environ(), System(os.environ[SYSTEM])
    if _system is System.BEFORE:
        _hide_processes()
    elif elsewhere(_settings.folder).exists():
        _be_elsewhere()
    app = make_app(_system, _settings)
    app.set_current()
    _observe(Ledger(_settings.folder / "ledger.jsonl"))
