"""Sent to every worker: what it cannot see of processes, by the setting `blindness` of a test."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from celery import current_app
from celery.signals import worker_init, worker_process_init

from celery_idempotent.engine import delivery, processes

ELSEWHERE = {"blindness": "elsewhere"}
"""Every worker that starts is on a machine of its own."""

ONLY_PARENTS = {"blindness": "only parents"}
"""Only the worker that lost a process knows that it is gone; no delivery finds out."""


def be_elsewhere(**_: Any) -> None:
    """Before the pool forks."""
    if current_app.conf.get("blindness") == ELSEWHERE["blindness"]:
        machine = f"{os.getpid():016}"
        processes._machine = cache(lambda: machine)


def see_nobody(**_: Any) -> None:
    """In a pool process."""
    if current_app.conf.get("blindness") == ONLY_PARENTS["blindness"]:
        delivery.is_gone = lambda process: False  # type: ignore[attr-defined]  # imported there


worker_init.connect(be_elsewhere, weak=False)
worker_process_init.connect(see_nobody, weak=False)
