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
from celery.signals import task_failure, task_success

from celery_idempotent import IdempotentTask, current_attempt
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from lab.demo.gateway import Gateway
from lab.demo.settings import Settings
from lab.fleet import WORKER_NAME
from lab.ledger import Ledger
from lab.proof.soak_settings import BACKOFF, LEASE, LONGEST_DELAY, TICK, celery, skew_file
from lab.short_delays import ShortDelays
from lab.witness import note, observe, operation_of

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
    return _run(self, operation_of(self), 0, _charge)


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
    note(ledger, "effect", task)


def _charge(task: Any, operation: str) -> None:
    attempt = current_attempt()
    key = attempt.effect_key("charge")
    gateway.charge(operation, idempotency_key=key, attempt=attempt.number, token=attempt.fencing_token)


def _told(sender: Any, result: Any = "", exception: BaseException | None = None, **_: Any) -> None:
    """The caller is told a result, or a failure."""
    told = ("told failure", type(exception).__name__) if exception else ("told", result)
    note(ledger, told[0], sender, reference=told[1])


observe(ledger)
for each in (task_success, task_failure):
    each.connect(_told, weak=False)
