"""Idempotent tasks whose every step is written to the ledger, and which a test can hold at a gate."""
# mypy: allow-untyped-decorators

import os
import signal
from asyncio import CancelledError
from pathlib import Path
from typing import Any

from celery import shared_task
from greenlet import GreenletExit

from celery_idempotent import IdempotentTask, Policy, current_attempt
from lab.short_delays import ShortDelays
from tests.support.ledger import record, wait_at

GUARDED: dict[str, Any] = {"base": IdempotentTask, "bind": True, "acks_late": True, "reject_on_worker_lost": True}
# Recovery within seconds, and conflicts that come back at once.
QUICK: dict[str, Any] = {"key": "order_id", "lease": 2, "backoff": 0.2}


def perform(task: Any, order_id: str, gate: str = "") -> str:
    """Begin, wait at the gate of this attempt, have the effect."""
    number = begin(task, order_id)
    if gate:
        wait_at(f"{gate}:{number}")
    return take_effect(order_id)


def begin(task: Any, order_id: str) -> int:
    """Write that the attempt has begun; its number."""
    return write("begin", order_id, retries=task.request.retries)


def take_effect(order_id: str) -> str:
    """Have the effect, in the name of the attempt that is now the current one."""
    return f"{order_id} by attempt {write('effect', order_id)}"


def write(kind: str, order_id: str, **details: Any) -> int:
    attempt = current_attempt()
    facts = {"token": attempt.fencing_token, "attempt": attempt.number, "takeover": attempt.is_takeover}
    record(kind, order_id, **facts, idempotency_key=attempt.key, **details)
    return attempt.number


def _charge(name: str, policy: Policy) -> Any:
    """A task that has the effect once per order, whatever else it is called with."""

    def charge(self: Any, order_id: str, gate: str = "", other: Any = None) -> str:
        return perform(self, order_id, gate)

    return shared_task(name=f"{__name__}.{name}", **GUARDED, idempotent=policy)(charge)


charge = _charge("charge", ShortDelays(**QUICK))
charge_published_once = _charge("charge_published_once", ShortDelays(**QUICK, publish="once"))
charge_with_a_long_lease = _charge("charge_with_a_long_lease", ShortDelays(**{**QUICK, "lease": 90}))
charge_with_a_lease_of_8_s = _charge("charge_with_a_lease_of_8_s", ShortDelays(**{**QUICK, "lease": 8}))
charge_within_3_s = _charge("charge_within_3_s", ShortDelays(**QUICK, deadline=3))
charge_at_most_once = _charge("charge_at_most_once", ShortDelays(**QUICK, on_takeover="refuse"))
charge_with_one_takeover = _charge("charge_with_one_takeover", ShortDelays(**QUICK, max_takeovers=1))
charge_and_back_off = _charge("charge_and_back_off", ShortDelays(**{**QUICK, "backoff": 3}))
charge_and_wait_for_long = _charge("charge_and_wait_for_long", Policy(**{**QUICK, "lease": 60, "backoff": 8}))


@shared_task(**GUARDED, idempotent=ShortDelays(**QUICK, max_takeovers=1))
def charge_or_die(self: Any, order_id: str, death: str) -> str:
    """Leave every attempt, or only the first one, by what no worker survives."""
    if begin(self, order_id) == 2 and death == "once":
        return take_effect(order_id)
    if death == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    raise {"CancelledError": CancelledError(), "GreenletExit": GreenletExit()}.get(death, SystemExit(3))


@shared_task(**GUARDED, max_retries=2, idempotent=ShortDelays(**QUICK, fingerprint="order_id"))
def charge_with_retries(self: Any, order_id: str, gate: str = "", countdown: float = 0) -> int:
    """Fail if it was held at a gate; otherwise use up the two retries that its author allows."""
    perform(self, order_id, gate)
    if gate:
        raise RuntimeError("released, so that the next delivery runs")
    if self.request.retries < 2:
        raise self.retry(countdown=countdown)
    return int(self.request.retries)


COMPUTED = "computed"
"""The file that ends the computation."""


@shared_task(**GUARDED, idempotent=ShortDelays(**QUICK))
def charge_after_computing(self: Any, order_id: str, gate: str, guard: str) -> str:
    """Have the effect; the first attempt computes before, and yields to no greenlet until the test says so."""
    number = begin(self, order_id)
    if number == 1:
        while not Path(COMPUTED).exists():
            pass
    else:
        wait_at(f"{gate}:{number}")
    if guard == "in a step":
        return str(current_attempt().step("charge", lambda step: take_effect(order_id)))
    if guard == "asks":
        current_attempt().ensure_owned()
    return take_effect(order_id)


@shared_task
def note(text: Any) -> str:
    """Follow another task in a canvas; not idempotent, so that every dispatch shows."""
    record("note", "note", text=text)
    return f"noted: {text}"
