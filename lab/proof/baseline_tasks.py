"""One body under every system: plain Celery, its peers, AWS Powertools, and this library.

`celery -A lab.proof.baseline_tasks worker`, configured by the environment of `lab.demo.settings` and
`SYSTEM`. A publisher calls :func:`make_app`, as some of them act when a task is published.
"""

from __future__ import annotations

import functools
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import boto3
from celery import Celery, Task
from celery.signals import task_postrun, task_prerun, worker_process_init, worker_ready

from celery_idempotent import IdempotentTask, Policy, current_attempt, signals
from lab.demo.gateway import Gateway
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import BACKOFF, LEASE, Settings
from lab.embedded import REGION
from lab.fleet import WORKER_NAME

__all__ = ["SYSTEM", "Fate", "System", "make_app"]

SYSTEM = "BASELINE_SYSTEM"
"""The environment variable that says under which system a worker runs the body."""

SLOW = 12.0
"""Seconds; longer than the visibility timeout and every lease that is not renewed."""

LONGEST_BODY = 15.0
"""Seconds that a body is said to take at most, where a system asks for it."""


RERUN = Policy(key="operation", lease=LEASE, backoff=BACKOFF)
REFUSE = Policy(key="operation", lease=LEASE, backoff=BACKOFF, on_takeover="refuse")


class System(StrEnum):
    """Under what the body runs."""

    PLAIN = "plain Celery, acks_late"
    ONCE = "celery-once 3.0.1"
    SINGLETON = "celery-singleton 0.3.1"
    POWERTOOLS = "Powertools 3.37.0 in a task"
    OURS = "celery-idempotent, rerun"
    OURS_CHECKED = "celery-idempotent, rerun, ensure_owned() before the effect"
    OURS_KEYED = "celery-idempotent, rerun, effect honours a key"
    OURS_REFUSE = "celery-idempotent, refuse"


class Fate(StrEnum):
    """What happens to an operation."""

    DUPLICATED = "published or delivered twice"
    KILLED_BEFORE = "child killed before the effect"
    KILLED_AFTER = "child killed after the effect"
    SLOW = "body outlives the visibility timeout"
    STOPPED = "child stopped before the effect, longer than any lease"


@dataclass(frozen=True, slots=True)
class _Witness:
    """Who writes down what a worker does."""

    ledger: Ledger
    bank: Gateway
    folder: Path

    def row(self, what: str, operation: str) -> None:
        self.ledger.append(Row(what=what, order=operation))

    def is_first(self, what: str, operation: str) -> bool:
        try:
            (self.folder / f"{what}-{operation}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def make_app(system: System, settings: Settings, locks: str) -> Celery:
    """The app of one system, with its one task, ``execute(operation, fate)``.

    Args:
        system: Under what the body runs.
        settings: Broker, store and folder.
        locks: Path of the socket of a Redis or Valkey, for those that keep their locks there.
    """
    app = Celery("baselines", set_as_current=False)
    app.conf.update(settings.celery())
    bank = Gateway(Ledger(settings.folder / "bank.jsonl"))
    witness = _Witness(Ledger(settings.folder / "ledger.jsonl"), bank, settings.folder)
    _TASKS[system](app, witness, settings, locks)
    return app


def _body(witness: _Witness, operation: str, fate: str, effect: Callable[[], None]) -> str:
    """What every system executes; each fault strikes an operation once."""
    if fate == Fate.KILLED_BEFORE and witness.is_first("kill", operation):
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == Fate.STOPPED and witness.is_first("stop", operation):
        _be_stopped(witness, operation)
    # Where late acknowledgements bring ever new copies, two slow runs show it and let the campaign end.
    if fate == Fate.SLOW and any(witness.is_first(f"slow-{run}", operation) for run in (1, 2)):
        time.sleep(SLOW)
    time.sleep(0.3)
    effect()
    if fate == Fate.KILLED_AFTER and witness.is_first("kill", operation):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{operation} by {uuid.uuid4().hex}"


def _be_stopped(witness: _Witness, operation: str) -> None:
    witness.row("stop me", operation)
    go_on = witness.folder / f"go-on-{operation}"
    while not go_on.exists():
        time.sleep(0.02)


def _plain(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    # "Celery will acknowledge after the task": acks_late and reject_on_worker_lost, in Settings.celery().
    @app.task(name="execute", shared=False)
    def execute(operation: str, fate: str) -> str:
        return _body(witness, operation, fate, lambda: witness.row("effect", operation))


def _once(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    queue_once = import_module("celery_once").QueueOnce

    # Its README: backend and default_timeout as in "Usage", graceful for "return None instead of raising",
    # keys for "locking based on a subset".
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": f"redis+socket://{locks}", "default_timeout": 60 * 60},
    }

    @app.task(name="execute", shared=False, base=queue_once, once={"graceful": True, "keys": ["operation"]})
    def execute(operation: str, fate: str) -> str:
        return _body(witness, operation, fate, lambda: witness.row("effect", operation))


def _singleton(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    singleton = import_module("celery_singleton").Singleton

    app.conf.singleton_backend_url = f"unix://{locks}"

    # Its README: unique_on for a subset of the arguments; lock_expiry, as a crashed worker leaves its lock.
    @app.task(name="execute", shared=False, base=singleton, unique_on=["operation"], lock_expiry=60)
    def execute(operation: str, fate: str) -> str:
        return _body(witness, operation, fate, lambda: witness.row("effect", operation))


class _Context:
    """What Powertools asks of Lambda: how long the invocation may still take."""

    def get_remaining_time_in_millis(self) -> int:
        return round(LONGEST_BODY * 1000)


def _powertools(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError

    # A copy that meets the first one fails; like a Lambda's event source, Celery then tries again.
    @app.task(
        name="execute",
        shared=False,
        autoretry_for=(IdempotencyAlreadyInProgressError,),
        retry_kwargs={"countdown": 2},
        max_retries=None,
    )
    def execute(operation: str, fate: str) -> Any:
        payload = {"operation": operation, "fate": fate}
        return _idempotent_function(witness, settings)(payload=payload)


@functools.cache
def _idempotent_function(witness: _Witness, settings: Settings) -> Callable[..., Any]:
    # Made at the first call, so after the fork: one client for each process.
    from aws_lambda_powertools.utilities.idempotency import (
        DynamoDBPersistenceLayer,
        IdempotencyConfig,
        idempotent_function,
    )

    client = boto3.client(
        "dynamodb",
        endpoint_url=settings.store_url,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    # Its documentation, "Idempotency": event_key_jmespath for a subset, raise_on_no_idempotency_key to make a
    # key required, register_lambda_context so that an invocation that died does not block for an hour.
    config = IdempotencyConfig(event_key_jmespath="operation", raise_on_no_idempotency_key=True)
    config.register_lambda_context(_Context())  # type: ignore[arg-type]  # the one method it calls
    layer = DynamoDBPersistenceLayer(table_name="powertools", boto3_client=client)

    def execute(payload: dict[str, str]) -> str:
        operation = payload["operation"]
        return _body(witness, operation, payload["fate"], lambda: witness.row("effect", operation))

    decorate: Any = idempotent_function(data_keyword_argument="payload", persistence_store=layer, config=config)
    function: Callable[..., Any] = decorate(execute)
    return function


def _ours(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    _protect(app, witness, settings, RERUN, lambda operation: witness.row("effect", operation))


def _ours_checked(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    def effect(operation: str) -> None:
        current_attempt().ensure_owned()
        witness.row("effect", operation)

    _protect(app, witness, settings, RERUN, effect)


def _ours_keyed(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    def charge(operation: str) -> None:
        witness.bank.charge(operation, idempotency_key=current_attempt().effect_key("charge"))

    _protect(app, witness, settings, RERUN, charge)


def _ours_refuse(app: Celery, witness: _Witness, settings: Settings, locks: str) -> None:
    _protect(app, witness, settings, REFUSE, lambda operation: witness.row("effect", operation))


def _protect(app: Celery, witness: _Witness, settings: Settings, policy: Policy, effect: Callable[[str], None]) -> None:
    app.conf.idempotency_store = settings.store_url

    @app.task(name="execute", shared=False, base=IdempotentTask, idempotent=policy)
    def execute(operation: str, fate: str) -> str:
        return _body(witness, operation, fate, lambda: effect(operation))


_TASKS: dict[System, Callable[[Celery, _Witness, Settings, str], None]] = {
    System.PLAIN: _plain,
    System.ONCE: _once,
    System.SINGLETON: _singleton,
    System.POWERTOOLS: _powertools,
    System.OURS: _ours,
    System.OURS_CHECKED: _ours_checked,
    System.OURS_KEYED: _ours_keyed,
    System.OURS_REFUSE: _ours_refuse,
}


def _observe(ledger: Ledger) -> None:
    """Write down what this worker is delivered and what our library decides."""
    name = os.environ[WORKER_NAME]

    def note(what: str) -> Callable[..., None]:
        def write(kwargs: dict[str, Any] | None = None, sender: Any = None, **_: Any) -> None:
            arguments = kwargs or (sender.request.kwargs if isinstance(sender, Task) else {})
            ledger.append(Row(what=what, task=name, order=arguments.get("operation", "")))

        return write

    for signal_, what in (
        (worker_ready, "ready"),
        (worker_process_init, "child"),
        (task_prerun, "delivery"),
        (task_postrun, "returned"),
        (signals.taken_over, "taken_over"),
        (signals.outcome_unknown, "outcome_unknown"),
    ):
        signal_.connect(note(what), weak=False)


if SYSTEM in os.environ:
    _settings = Settings.from_environ()
    app = make_app(System(os.environ[SYSTEM]), _settings, os.environ["BASELINE_LOCKS"])
    app.set_current()
    _observe(Ledger(_settings.folder / "ledger.jsonl"))
