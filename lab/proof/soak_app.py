"""The soak's Celery app: three promises, a schedule, a clock that a nemesis can set, and a witness of everything.

`celery -A lab.proof.soak_app worker`, or `beat`, configured by the environment of `lab.demo.settings`. Whoever has this
app publishes its operations once, and whoever knows only the tasks' names as often as told.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any, cast

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

from celery_idempotent import IdempotentTask, current_attempt, signals
from celery_idempotent.integration.headers import tick_in
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from lab.demo.gateway import Gateway
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import Settings
from lab.fleet import WORKER_NAME
from lab.proof.soak_settings import BACKOFF, LEASE, LONGEST_DELAY, TICK, celery, skew_file
from lab.short_delays import ShortDelays

settings = Settings.from_environ()
worker_name = os.environ.get(WORKER_NAME, "")
ledger = Ledger(settings.folder / "ledger.jsonl")
bank = Ledger(settings.folder / "bank.jsonl")
gateway = Gateway(bank)


def skew() -> int:
    """By how many milliseconds the worker's clock is wrong."""
    try:
        return int(skew_file(settings.folder, worker_name).read_text())
    except FileNotFoundError:
        return 0


def store() -> Store:
    """The store; the clock of this machine that it uses is the worker's.

    DynamoDB's store uses the date, and corrects it. The others ask their servers and use the time since boot in
    between: that is wrong, too, when a machine was asleep.
    """
    opened: Any = open_store(settings.store_url)
    owner, name = (opened, "_local_clock") if isinstance(opened, DynamoDBStore) else (opened._clock, "_local")
    right = getattr(owner, name)
    setattr(owner, name, lambda: right() + skew())
    return cast(Store, opened)


app = Celery("soak")
app.conf.update(celery(settings), idempotency_store=store())


class _Policy(ShortDelays):
    longest = round(LONGEST_DELAY * 1000)


_TIMES: dict[str, Any] = {"lease": LEASE, "backoff": BACKOFF}
RERUN = _Policy(key="operation", publish="once", max_takeovers=None, **_TIMES)
REFUSE = _Policy(key="operation", publish="once", on_takeover="refuse", **_TIMES)
EVERY_TICK = _Policy(max_takeovers=None, **_TIMES)


@app.task(base=IdempotentTask, bind=True, idempotent=RERUN)
def keyed(self: IdempotentTask, operation: str, seconds: float) -> str:
    """May be repeated, and its effect honours an effect key."""
    time.sleep(seconds / 2)
    _charge(self, operation)
    time.sleep(seconds / 2)
    return _result(operation)


@app.task(base=IdempotentTask, bind=True, idempotent=EVERY_TICK)
def tick(self: IdempotentTask) -> str:
    """What the schedule asks for; its effect honours an effect key."""
    _charge(self, _operation(self))
    return _result(_operation(self))


@app.task(bind=True)
def bare(self: Task, operation: str, seconds: float) -> None:
    """Plain Celery, acknowledged late: the negative control."""
    time.sleep(seconds / 2)
    _witness("effect", self, operation)
    time.sleep(seconds / 2)


app.conf.beat_schedule = {"tick": {"task": tick.name, "schedule": TICK}}


@app.task(base=IdempotentTask, bind=True, idempotent=RERUN)
def plain(self: IdempotentTask, operation: str, seconds: float) -> str:
    """May be repeated, and its effect happens as often as it is asked for."""
    return _plainly(self, operation, seconds)


@app.task(base=IdempotentTask, bind=True, idempotent=REFUSE)
def refuse(self: IdempotentTask, operation: str, seconds: float) -> str:
    """Must not be repeated."""
    return _plainly(self, operation, seconds)


def _plainly(task: IdempotentTask, operation: str, seconds: float) -> str:
    time.sleep(seconds / 2)
    _witness("effect", task, operation, token=current_attempt().fencing_token)
    time.sleep(seconds / 2)
    return _result(operation)


def _charge(task: IdempotentTask, operation: str) -> None:
    attempt = current_attempt()
    key = attempt.effect_key("charge")
    gateway.charge(operation, idempotency_key=key, attempt=attempt.number, token=attempt.fencing_token)


def _operation(task: Task) -> str:
    """What the task executes; empty where it is only published."""
    request = task.request
    named = tick_in(request.headers or {}, task.name, request.id or "")
    return named or str((request.kwargs or {}).get("operation", ""))


def _result(operation: str) -> str:
    # Different in every body, so that it shows whose result a caller was told.
    return f"{operation} by {uuid.uuid4().hex}"


def _witness(what: str, task: Any, operation: str, *, token: int = 0, reference: str = "", key: str = "") -> None:
    name = task.name.rpartition(".")[2]
    task_id = task.request.id or ""
    ledger.append(
        Row(what=what, task=name, order=operation, task_id=task_id, token=token, reference=reference, key=key)
    )


@worker_ready.connect
def ready(**_: Any) -> None:
    """A worker takes messages from now on."""
    ledger.append(Row(what="ready", task=worker_name))


@beat_init.connect
def beating(**_: Any) -> None:
    """A beat has read its schedule."""
    ledger.append(Row(what="beating", task=worker_name))


@worker_process_init.connect
def child_began(**_: Any) -> None:
    """A pool process of this worker."""
    ledger.append(Row(what="child", task=worker_name))


@task_prerun.connect
def delivered(task: Any, **_: Any) -> None:
    """A message has reached a pool process; the body may or may not run."""
    _witness("delivery", task, _operation(task))


@task_postrun.connect
def returned(task: Any, **_: Any) -> None:
    """The pool process is done with the message."""
    _witness("returned", task, _operation(task))


@task_success.connect
def succeeded(sender: Any, result: Any, **_: Any) -> None:
    """The caller is told a result."""
    _witness("told", sender, _operation(sender), reference=result)


@task_failure.connect
def failed(sender: Any, exception: BaseException, **_: Any) -> None:
    """The caller is told a failure."""
    _witness("told failure", sender, _operation(sender), reference=type(exception).__name__)


@signals.claimed.connect
@signals.completed.connect
@signals.conflicted.connect
@signals.failed.connect
@signals.lease_lost.connect
@signals.outcome_unknown.connect
@signals.publish_skipped.connect
@signals.released.connect
@signals.replayed.connect
@signals.store_unavailable.connect
@signals.taken_over.connect
def reported(signal: Any, sender: Any, key: str, fencing_token: int | None, reason: str, **_: Any) -> None:
    """The library has decided something; the row is named like the signal."""
    _witness(signal.name, sender, _operation(sender), token=fencing_token or 0, reference=reason, key=key)
