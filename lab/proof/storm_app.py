"""The app of the storm: one long body, and a witness of everybody who asks for it.

`celery -A lab.proof.storm_app worker`, configured by the environment of `lab.demo.settings` and :data:`POLICY`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.signals import task_success, worker_ready

from celery_idempotent import IdempotentTask, Policy, signals
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import Settings
from lab.short_delays import ShortDelays

__all__ = ["POLICY", "VISIBILITY_TIMEOUT", "make_app"]

POLICY = "STORM_POLICY"
"""The environment variable with options of the policy, as JSON."""

VISIBILITY_TIMEOUT = {"redis": 30, "sqs": 120}
"""Seconds, by broker. On Redis a duplicate that waits in a worker's memory for longer is held. On SQS no delay is
longer than half of it, and the bound of the questions is about delays that grow up to a minute."""


def make_app(settings: Settings, options: Mapping[str, Any]) -> Celery:
    """An app with the task ``execute``: ``lease`` is its policy's, and ``grows`` says whether the delays do."""
    app = Celery("storm", set_as_current=False)
    app.conf.update(settings.celery(), idempotency_hold_messages=True)
    app.conf.broker_transport_options["visibility_timeout"] = VISIBILITY_TIMEOUT[settings.broker_url.partition(":")[0]]
    ledger = Ledger(settings.folder / "ledger.jsonl")

    def execute(operation: str, seconds: float) -> None:
        ledger.append(Row(what="run", order=operation))
        time.sleep(seconds)
        ledger.append(Row(what="ended", order=operation))

    kind = Policy if options.get("grows", True) else ShortDelays
    policy = kind("operation", lease=options["lease"])
    app.task(name="execute", shared=False, base=IdempotentTask, idempotent=policy)(execute)
    return app


def _observe(ledger: Ledger) -> None:
    def note(what: str) -> Any:
        return lambda sender, **_: ledger.append(Row(what=what, task_id=sender.request.id))

    worker_ready.connect(lambda **_: ledger.append(Row(what="ready")), weak=False)
    signals.conflicted.connect(note("conflicted"), weak=False)
    task_success.connect(note("told"), weak=False)


if POLICY in os.environ:
    _settings = Settings.from_environ()
    app = make_app(_settings, json.loads(os.environ[POLICY]))
    app.set_current()
    _observe(Ledger(_settings.folder / "ledger.jsonl"))
