"""Sent to every worker: asks a store that does not answer again and again, by the setting `persistence` of a test."""

from __future__ import annotations

from typing import Any

from celery import current_app
from celery.signals import worker_process_init

from celery_idempotent.protocol import circuit

WITHOUT_A_BREAKER = {"persistence": "endless"}
"""No number of claims without an answer is enough to hold the next one back."""


def persist(**_: Any) -> None:
    """In a pool process."""
    if current_app.conf.get("persistence") == WITHOUT_A_BREAKER["persistence"]:
        circuit.FAILURES = 10**9


worker_process_init.connect(persist, weak=False)
