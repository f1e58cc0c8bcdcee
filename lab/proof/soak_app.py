"""The soak's Celery app: three promises, a schedule, a clock that a nemesis can set, and a witness of everything.

`celery -A lab.proof.soak_app worker`, or `beat`, configured by the environment of `lab.demo.settings`. Whoever has this
app publishes its operations once, and whoever knows only the tasks' names as often as told.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

from celery import Celery, Task
from celery.signals import (
    beat_init,
    task_failure,
    task_postrun,
    task_prerun,
    task_success,
    worker_process_init,
    worker_ready,
)

from celery_idempotent import IdempotentTask, current_attempt
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.headers import tick_in
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from lab.demo.gateway import Gateway
from lab.demo.settings import Settings
from lab.fleet import WORKER_NAME
from lab.ledger import Ledger, Row
from lab.proof.soak_settings import BACKOFF, LEASE, LONGEST_DELAY, TICK, celery, skew_file
from lab.short_delays import ShortDelays

settings = Settings.from_environ()
worker_name = os.environ.get(WORKER_NAME, "")
ledger = Ledger(settings.folder / "ledger.jsonl")
gateway = Gateway(Ledger(settings.folder / "bank.jsonl"))


def skew() -> int:
    """By how many milliseconds the worker's clock is wrong."""
    try:
        return int(skew_file(settings.folder, worker_name).read_text())
    except FileNotFoundError:
        return 0


def store() -> Any:
    """The store; the clock of this machine that it uses is the worker's.

    DynamoDB's store uses the date, and corrects it. The others ask their servers and use the time since boot in
    between: that is wrong, too, when a machine was asleep.
    """
    opened: Any = open_store(settings.store_url)
    owner, name = (opened, "_local_clock") if isinstance(opened, DynamoDBStore) else (opened._clock, "_local")
    right = getattr(owner, name)
    setattr(owner, name, lambda: right() + skew())
    return opened


class _Policy(ShortDelays):
    longest = round(LONGEST_DELAY * 1000)


_TIMES: dict[str, Any] = {"lease": LEASE, "backoff": BACKOFF}
_RERUN = _Policy(key="operation", publish="once", max_takeovers=None, **_TIMES)
_REFUSE = _Policy(key="operation", publish="once", on_takeover="refuse", **_TIMES)

app = Celery("soak")
app.conf.update(
    celery(settings),
    idempotency_store=store(),
    beat_schedule={"tick": {"task": "lab.proof.soak_app.tick", "schedule": TICK}},
)


@app.task(base=IdempotentTask, bind=True, idempotent=_RERUN)
def keyed(self: IdempotentTask, operation: str, seconds: float) -> str:
    """May be repeated, and its effect honours an effect key."""
    return _run(self, operation, seconds, _charge)


@app.task(base=IdempotentTask, bind=True, idempotent=_Policy(max_takeovers=None, **_TIMES))
def tick(self: IdempotentTask) -> str:
    """What the schedule asks for; its effect honours an effect key."""
    return _run(self, _operation(self), 0, _charge)


@app.task(bind=True)
def bare(self: Task, operation: str, seconds: float) -> None:
    """Plain Celery, acknowledged late: the negative control."""
    _run(self, operation, seconds, _plainly)


@app.task(base=IdempotentTask, bind=True, idempotent=_RERUN)
def plain(self: IdempotentTask, operation: str, seconds: float) -> str:
    """May be repeated, and its effect happens as often as it is asked for."""
    return _run(self, operation, seconds, _plainly)


@app.task(base=IdempotentTask, bind=True, idempotent=_REFUSE)
def refuse(self: IdempotentTask, operation: str, seconds: float) -> str:
    return _run(self, operation, seconds, _plainly)


def _run(task: Any, operation: str, seconds: float, effect: Any) -> str:
    time.sleep(seconds / 2)
    effect(task, operation)
    time.sleep(seconds / 2)
    return f"{operation} by {uuid.uuid4().hex}"  # different in every body: it shows whose result a caller was told


def _plainly(task: Any, operation: str) -> None:
    _witness("effect", task, operation)


def _charge(task: Any, operation: str) -> None:
    attempt = current_attempt()
    key = attempt.effect_key("charge")
    gateway.charge(operation, idempotency_key=key, attempt=attempt.number, token=attempt.fencing_token)


def _operation(task: Any) -> str:
    """What the task executes; empty where it is only published."""
    request = task.request
    named = tick_in(request.headers or {}, task.name, request.id or "")
    return named or str((request.kwargs or {}).get("operation", ""))


def _witness(what: str, task: Any, operation: str, **more: Any) -> None:
    name, task_id = task.name.rpartition(".")[2], task.request.id or ""
    ledger.append(Row(what=what, task=name, order=operation, task_id=task_id, **more))


def _reported(signal: Any, sender: Any, key: str, fencing_token: int | None, reason: str, **_: Any) -> None:
    """The library has decided something; the row is named like the signal."""
    _witness(signal.name, sender, _operation(sender), token=fencing_token or 0, reference=reason, key=key)


def _told(sender: Any, result: Any = "", exception: BaseException | None = None, **_: Any) -> None:
    """The caller is told a result, or a failure."""
    told = ("told failure", type(exception).__name__) if exception else ("told", result)
    _witness(told[0], sender, _operation(sender), reference=told[1])


def _observe() -> None:
    """Note who is ready, which processes there are, what reaches them, and what the library decides."""
    for signal, what in ((worker_ready, "ready"), (beat_init, "beating"), (worker_process_init, "child")):
        signal.connect(lambda what=what, **_: ledger.append(Row(what=what, task=worker_name)), weak=False)
    for signal, what in ((task_prerun, "delivery"), (task_postrun, "returned")):
        signal.connect(lambda task, what=what, **_: _witness(what, task, _operation(task)), weak=False)
    for signal in (task_success, task_failure):
        signal.connect(_told, weak=False)
    for ours in SIGNALS.values():
        ours.connect(_reported, weak=False)


_observe()
