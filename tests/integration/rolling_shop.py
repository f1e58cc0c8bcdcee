"""A shop that both versions can run, without a worker: `python -m tests.integration.rolling_shop charge o-1`.

Writes what came of it as JSON. Its store is what `STORE` names; as a Celery app, it answers `idempotency` commands.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from typing import Any

from celery import Celery

import celery_idempotent
from celery_idempotent import IdempotentTask, Policy

SINCE: dict[str, Any] = {"label": "order_id"}
"""Options that the present version has and the previous one has not."""
NAMED: dict[str, Any] = {name: value for name, value in SINCE.items() if name in {each.name for each in fields(Policy)}}


def shop(store: Any) -> tuple[Celery, list[str]]:
    """An app, and what its task has charged in this process."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, task_acks_late=True, task_reject_on_worker_lost=True)
    ran: list[str] = []

    @app.task(
        name="charge",
        shared=False,
        base=IdempotentTask,
        bind=True,
        idempotent=Policy("order_id", publish="once", **NAMED),
    )
    def charge(self: Any, order_id: str) -> dict[str, Any]:
        ran.append(order_id)
        own = {"package": celery_idempotent.__file__, "effect_key": self.attempt.effect_key("charge")}
        return {**own, "token": self.attempt.fencing_token}

    return app, ran


def act(store: Any, verb: str, order: str) -> dict[str, Any]:
    """Provision, charge or publish; what came of it."""
    app, ran = shop(store)
    if verb == "provision":
        celery_idempotent.open_store(store).provision()
    if verb == "charge":
        return {"result": app.tasks["charge"].apply((order,)).get(), "ran": ran}
    if verb == "publish":
        return {"task_id": app.tasks["charge"].delay(order).id}
    return {}


app, _ = shop(os.environ.get("STORE", "memory://"))

if __name__ == "__main__":
    sys.stdout.write(json.dumps(act(os.environ["STORE"], *sys.argv[1:])))
