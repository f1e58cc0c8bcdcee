"""Conflicts come back by themselves, on every kind of queue, exchange and route, and cost the task's author nothing."""

from typing import Any

import pytest

from tests.integration.cluster import MARKS, on, on_every_broker
from tests.integration.idempotent_tasks import charge, charge_and_back_off, charge_with_retries
from tests.support.ledger import Ledger

pytestmark = [pytest.mark.worker, pytest.mark.usefixtures("celery_setup")]


@on_every_broker
@pytest.mark.compat
def test_conflicts_do_not_use_up_the_retries_of_the_author(ledger: Ledger) -> None:
    """After three conflicts a task still has both retries that it allows itself, and counts only those."""
    holder = charge_with_retries.delay("o", gate="go")
    ledger.wait_for("begin")
    waiting = charge_with_retries.delay("o")
    ledger.wait_for("conflicted", count=3)
    ledger.open("go:1")
    with pytest.raises(RuntimeError):
        holder.get(timeout=60)
    assert waiting.get(timeout=60) == 2
    begun = [row for row in ledger.rows("begin") if row.task_id == waiting.id]
    assert [row.details["retries"] for row in begun] == [0, 1, 2]


@on("sqs")
@pytest.mark.worker(
    queues="work.fifo", transport_options={"sqs-creation-attributes": {"ContentBasedDeduplication": "true"}}
)
def test_a_conflict_on_a_fifo_queue_is_not_dropped_and_keeps_its_group(ledger: Ledger) -> None:
    """SQS FIFO drops a message it has seen and orders a group: a retry is new to it, and stays in its group."""

    def publish(number: str) -> Any:
        options = {"MessageGroupId": f"group-{number}", "MessageDeduplicationId": f"published-{number}"}
        return charge.apply_async(("o", "go"), queue="work.fifo", **options)

    holder = publish("1")
    ledger.wait_for("begin")
    waiting = publish("2")
    conflicts = ledger.wait_for("conflicted", count=3)
    assert {row.details["MessageGroupId"] for row in conflicts} == {"group-2"}
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1


@on("sqs")
def test_a_conflict_on_sqs_waits_in_the_queue_and_not_in_the_worker(ledger: Ledger) -> None:
    """SQS itself holds a conflict back (DelaySeconds), so no worker keeps it in memory."""
    holder = charge_and_back_off.delay("o", gate="go")
    ledger.wait_for("begin")
    waiting = charge_and_back_off.delay("o", gate="go")
    first, second = ledger.wait_for("conflicted", count=2)[:2]
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    delay = second.details["DelaySeconds"]
    assert "DelaySeconds" not in first.details
    assert 1 <= delay <= 6  # right after the lease, which is over sooner than the backoff
    assert second.at - first.at >= delay - 0.5


def orders(exchange_type: str = "direct", routing_key: str = "orders", **queue: Any) -> dict[str, Any]:
    """Settings with a queue beside the default one."""
    bound = {"exchange": "work", "exchange_type": exchange_type, "routing_key": routing_key, **queue}
    return {"task_queues": {"celery": {}, "orders": bound}}


TOPIC, OF_ORDERS = orders("topic", "orders.#"), {"kind": "order"}
TO_ORDERS, EU = {"queue": "orders"}, {"queue": "orders", "routing_key": "orders.eu"}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "missing queue": ("redis sqs classic quorum", {}, TO_ORDERS),
    "direct": ("redis sqs classic quorum", orders(), TO_ORDERS),
    "exchange": ("redis classic quorum", orders(), {"exchange": "work", "routing_key": "orders"}),
    "topic": ("redis classic quorum threads", TOPIC, EU),
    "route": ("redis classic", {**TOPIC, "task_routes": {"*": EU}}, {}),
    "fanout": ("redis classic quorum", orders("fanout"), TO_ORDERS),
    "headers": ("classic", orders("headers", binding_arguments=OF_ORDERS), {**TO_ORDERS, "headers": OF_ORDERS}),
}
"""By name the brokers, the settings, and the options of the call. SQS has no exchanges: kombu keeps the bindings of one
in the process that made them."""
BY_DAY = ("topic-redis", "headers-classic")
SCENES = [(f"{name}-{broker}", broker, *way[1:]) for name, way in WAYS.items() for broker in way[0].split()]


@pytest.mark.parametrize(
    ("celery_broker", "options"),
    [
        pytest.param(
            broker,
            options,
            id=scene,
            marks=[
                *MARKS.get(broker, []),
                pytest.mark.worker(queues="celery,orders", settings=settings),
                *([] if scene in BY_DAY else [pytest.mark.nightly]),
            ],
        )
        for scene, broker, settings, options in SCENES
    ],
    indirect=["celery_broker"],
)
def test_a_conflict_and_a_retry_come_back_to_their_queue(ledger: Ledger, options: dict[str, Any]) -> None:
    """As often as they are published again."""
    holder = charge.apply_async(("o", "go"), **options)
    ledger.wait_for("begin")
    waiting = charge.apply_async(("o", "go"), **options)
    ledger.wait_for("conflicted", count=3)
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert charge_with_retries.apply_async(("late", "", 1), **options).get(timeout=60) == 2
    assert len(ledger.rows("effect", "o")) == 1
