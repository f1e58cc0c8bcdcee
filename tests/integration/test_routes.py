"""A message that is published again comes back to its queue, by whatever exchange and route it came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cluster import IdempotentSetup, quorum
from tests.integration.idempotent_tasks import charge, charge_with_late_retries
from tests.support.ledger import Ledger

ANY = ("redis", "sqs", "classic", quorum)
OF_ALL_KINDS = ("redis", "classic", quorum)
"""SQS has no exchanges: kombu keeps the bindings of one in the process that made them."""


def orders(exchange_type: str = "direct", routing_key: str = "orders", **queue: Any) -> dict[str, Any]:
    """Settings with a queue beside the default one."""
    bound = {"exchange": "work", "exchange_type": exchange_type, "routing_key": routing_key, **queue}
    return {"task_queues": {"celery": {}, "orders": bound}}


def routed(to: dict[str, Any]) -> dict[str, Any]:
    """Settings with a route for every task."""
    return {**orders("topic", "orders.#"), "task_routes": {"*": to}}


OF_ORDERS = {"kind": "order"}
EU = {"queue": "orders", "routing_key": "orders.eu"}
WAYS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "default": (ANY, {}, {}),
    "missing queue": (ANY, {}, {"queue": "orders"}),
    "direct": (ANY, orders(), {"queue": "orders"}),
    "no missing queues": (ANY, {**orders(), "task_create_missing_queues": False}, {"queue": "orders"}),
    "direct by its exchange": (OF_ALL_KINDS, orders(), {"exchange": "work", "routing_key": "orders"}),
    "topic": (OF_ALL_KINDS, orders("topic", "orders.#"), EU),
    "topic of one word": (OF_ALL_KINDS, orders("topic", "orders.*"), EU),
    "route": (OF_ALL_KINDS, routed(EU), {}),
    "fanout": (OF_ALL_KINDS, orders("fanout"), {"queue": "orders"}),
    "headers": (
        ("classic",),
        orders("headers", binding_arguments=OF_ORDERS),
        {"queue": "orders", "headers": OF_ORDERS},
    ),
}
"""By name the brokers, the settings, and the options of the call; most are for the night."""


def _scenes() -> Iterator[Any]:
    for name, (brokers, settings, options) in WAYS.items():
        for broker in brokers:
            for pool in ("prefork", "threads") if name == "topic" else ("prefork",):
                worker = pytest.mark.worker(pool=pool, queues="celery,orders", settings=settings)
                (plain,) = getattr(broker, "values", (broker,))
                by_day = name in {"default", "topic", "headers"} and pool == "prefork" and plain != "quorum"
                marks = [*getattr(broker, "marks", ()), worker, *([] if by_day else [pytest.mark.nightly])]
                yield pytest.param(plain, options, id=f"{name}-{plain}-{pool}", marks=marks)


@pytest.mark.parametrize(("celery_broker", "options"), list(_scenes()), indirect=["celery_broker"])
def test_a_conflict_and_a_retry_come_back_to_their_queue(
    celery_setup: IdempotentSetup, ledger: Ledger, options: dict[str, Any]
) -> None:
    """As often as they are published again."""
    holder = charge.apply_async(("o", "go"), **options)
    ledger.wait_for("begin")
    waiting = charge.apply_async(("o", "go"), **options)
    ledger.wait_for("conflicted", count=3)
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert charge_with_late_retries.apply_async(("late",), **options).get(timeout=60) == 2
    assert len(ledger.rows("effect", "o")) == 1
