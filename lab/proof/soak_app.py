"""The soak's Celery app: three promises, one body, a clock that a nemesis can set, and a witness of everything.

`celery -A lab.proof.soak_app worker`, configured by the environment of `lab.demo.settings`.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any, cast

from celery import Celery
from celery.signals import task_failure, task_postrun, task_prerun, task_success, worker_process_init, worker_ready

from celery_idempotent import IdempotentTask, Policy, signals
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from lab.demo.gateway import Gateway
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import Settings
from lab.fleet import WORKER_NAME
from lab.proof.soak_settings import BACKOFF, BACKOFF_MAX, LEASE, skew_file

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
app.conf.update(settings.celery())
app.conf.idempotency_store = store()
app.conf.idempotency_hold_messages = True

RERUN = Policy(key="operation", lease=LEASE, backoff=BACKOFF, backoff_max=BACKOFF_MAX, max_takeovers=None)
REFUSE = Policy(key="operation", lease=LEASE, backoff=BACKOFF, backoff_max=BACKOFF_MAX, on_takeover="refuse")


@app.task(base=IdempotentTask, bind=True, idempotent=RERUN)
def keyed(self: IdempotentTask, operation: str, seconds: float) -> str:
    """May be repeated, and its effect honours an effect key."""
    time.sleep(seconds / 2)
    attempt = self.attempt
    key = attempt.effect_key("charge")
    gateway.charge(operation, idempotency_key=key, attempt=attempt.number, token=attempt.fencing_token)
    time.sleep(seconds / 2)
    return _result(operation)


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
    _witness("effect", task, operation, token=task.attempt.fencing_token)
    time.sleep(seconds / 2)
    return _result(operation)


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


@worker_process_init.connect
def child_began(**_: Any) -> None:
    """A pool process of this worker."""
    ledger.append(Row(what="child", task=worker_name))


@task_prerun.connect
def delivered(task: Any, kwargs: dict[str, Any], **_: Any) -> None:
    """A message has reached a pool process; the body may or may not run."""
    _witness("delivery", task, kwargs["operation"])


@task_postrun.connect
def returned(task: Any, kwargs: dict[str, Any], **_: Any) -> None:
    """The pool process is done with the message."""
    _witness("returned", task, kwargs["operation"])


@task_success.connect
def succeeded(sender: Any, result: Any, **_: Any) -> None:
    """The caller is told a result."""
    _witness("told", sender, sender.request.kwargs["operation"], reference=result)


@task_failure.connect
def failed(sender: Any, exception: BaseException, kwargs: dict[str, Any], **_: Any) -> None:
    """The caller is told a failure."""
    _witness("told failure", sender, kwargs["operation"], reference=type(exception).__name__)


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
def reported(signal: Any, sender: Any, key: str, fencing_token: int | None, reason: str, **_: Any) -> None:
    """The library has decided something; the row is named like the signal."""
    operation = sender.request.kwargs["operation"]
    _witness(signal.name, sender, operation, token=fencing_token or 0, reference=reason, key=key)
