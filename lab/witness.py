"""Writes what workers and library report about themselves into a ledger, for an audit to count."""

import os
from typing import Any

from celery.signals import task_postrun, task_prerun, worker_process_init, worker_ready

from celery_idempotent.integration.events import SIGNALS
from lab.fleet import WORKER_NAME
from lab.ledger import Ledger, Row


def note(ledger: Ledger, what: str, task: Any, **more: Any) -> None:
    """Write down something of the running task, whose operation is its first argument."""
    name, task_id = task.name.rpartition(".")[2], task.request.id or ""
    operation = next(iter((task.request.kwargs or {}).values()), "")  # nothing where it is only published
    order = str(operation["id"] if isinstance(operation, dict) else operation)
    ledger.append(Row(what=what, task=name, order=order, task_id=task_id, **more))


def observe(ledger: Ledger) -> None:
    """Note from now on who is ready, which processes there are, what reaches them, and what the library decides.

    A delivery is followed by what becomes of it and by ``returned``, when the process is done with the message.
    """
    worker = os.environ.get(WORKER_NAME, "")
    for signal, what in ((worker_ready, "ready"), (worker_process_init, "child")):
        signal.connect(lambda what=what, **_: ledger.append(Row(what=what, task=worker)), weak=False)
    for signal, what in ((task_prerun, "delivery"), (task_postrun, "returned")):
        signal.connect(lambda task, what=what, **_: note(ledger, what, task), weak=False)

    def reported(signal: Any, sender: Any, key: str, fencing_token: int | None, reason: str, **_: Any) -> None:
        note(ledger, signal.name, sender, token=fencing_token or 0, reference=reason, key=key)

    for ours in SIGNALS.values():
        ours.connect(reported, weak=False)
