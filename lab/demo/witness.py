"""Writes what workers and library report about themselves into a ledger, for an audit to count."""

from __future__ import annotations

from typing import Any

from celery.signals import task_postrun, task_prerun, worker_ready

from celery_idempotent.integration.events import SIGNALS
from lab.demo.ledger import Ledger, Row


def watch(ledger: Ledger) -> None:
    """Note every delivery and every signal of the library in `ledger`, from now on and in this process."""

    def ready(**_: Any) -> None:
        ledger.append(Row(what="ready"))

    def delivered(task_id: str, task: Any, args: Any, kwargs: Any, **_: Any) -> None:
        ledger.append(Row(what="delivery", task=_short(task), order=_order(*args, **kwargs), task_id=task_id))

    def ended(task_id: str, task: Any, **_: Any) -> None:
        ledger.append(Row(what="ended", task=_short(task), task_id=task_id))

    def reported(
        signal: Any, sender: Any, task_id: str | None = None, fencing_token: int | None = None, **_: Any
    ) -> None:
        ledger.append(Row(what=signal.name, task=_short(sender), task_id=task_id or "", token=fencing_token or 0))

    for celerys, receiver in ((worker_ready, ready), (task_prerun, delivered), (task_postrun, ended)):
        celerys.connect(receiver, weak=False)
    for ours in SIGNALS.values():
        ours.connect(reported, weak=False)


def _short(task: Any) -> str:
    return str(task.name).rpartition(".")[2]


def _order(*args: Any, **kwargs: Any) -> str:
    """The order that a call is about: its first argument, by whatever name."""
    first = [*args, *kwargs.values()][0]
    return str(first["id"] if isinstance(first, dict) else first)
