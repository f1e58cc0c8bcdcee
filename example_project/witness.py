"""Writes what workers and library report about themselves into the ledger, for `audit.py` to count."""
# mypy: disallow-untyped-decorators=False
# Celery has no type hints, so every decorator of its is untyped.

from __future__ import annotations

from typing import Any

from celery.signals import task_postrun, task_prerun, worker_ready

from celery_idempotent import signals
from example_project.effects import ledger
from example_project.ledger import Row


@worker_ready.connect
def ready(**_: Any) -> None:
    """A worker takes messages from now on."""
    ledger.append(Row(what="ready"))


@task_prerun.connect
def delivered(task_id: str, task: Any, **_: Any) -> None:
    """A message has reached a worker process; the body may or may not run."""
    ledger.append(Row(what="delivery", task=task.name.rpartition(".")[2], task_id=task_id))


@task_postrun.connect
def ended(task_id: str, task: Any, **_: Any) -> None:
    """The worker process is done with a delivery, and was not killed over it."""
    ledger.append(Row(what="ended", task=task.name.rpartition(".")[2], task_id=task_id))


@signals.claimed.connect
@signals.completed.connect
@signals.conflicted.connect
@signals.failed.connect
@signals.lease_lost.connect
@signals.outcome_unknown.connect
@signals.released.connect
@signals.replayed.connect
@signals.store_unavailable.connect
@signals.taken_over.connect
def reported(signal: Any, sender: Any, task_id: str | None = None, fencing_token: int | None = None, **_: Any) -> None:
    """The library has decided something; the row is named like the signal."""
    ledger.append(
        Row(
            what=signal.name,
            task=sender.name.rpartition(".")[2],
            task_id=task_id or "",
            token=fencing_token or 0,
        )
    )
