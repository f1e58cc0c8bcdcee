"""Conflicts come back by themselves, on every kind of queue, and cost the task's author nothing."""

from __future__ import annotations

import pytest

from tests.integration.cluster import IdempotentSetup, on_every_broker, on_redis, on_sqs
from tests.integration.idempotent_tasks import charge, charge_and_back_off, charge_with_retries
from tests.support.ledger import Ledger

pytestmark = pytest.mark.worker
FIFO = "work.fifo"


@on_every_broker
@pytest.mark.compat
def test_conflicts_do_not_use_up_the_retries_of_the_author(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
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


@on_sqs
@pytest.mark.worker(
    queues=FIFO,
    transport_options={"sqs-creation-attributes": {"ContentBasedDeduplication": "true"}},
)
def test_a_conflict_on_a_fifo_queue_is_not_dropped_and_keeps_its_group(
    celery_setup: IdempotentSetup, ledger: Ledger
) -> None:
    """SQS FIFO drops a message it has seen and orders a group: a retry is new to it, and stays in its group."""
    holder = charge.apply_async(("o", "go"), queue=FIFO, MessageGroupId="first", MessageDeduplicationId="published-1")
    ledger.wait_for("begin")
    waiting = charge.apply_async(("o", "go"), queue=FIFO, MessageGroupId="second", MessageDeduplicationId="published-2")
    conflicts = ledger.wait_for("conflicted", count=3)
    assert {row.details["MessageGroupId"] for row in conflicts} == {"second"}
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1


@on_sqs
def test_a_conflict_on_sqs_waits_in_the_queue_and_not_in_the_worker(
    celery_setup: IdempotentSetup, ledger: Ledger
) -> None:
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


@on_redis
@pytest.mark.worker(settings={"accept_content": ["json", "yaml"], "result_accept_content": ["json"]})
def test_a_conflict_comes_back_with_the_serialiser_it_came_with(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """Arguments that JSON would change, or could not carry at all, are the same when the message comes again."""
    arguments = ("o", "go", {1: {"a", "b"}})
    holder = charge.apply_async(arguments, serializer="yaml")
    ledger.wait_for("begin")
    waiting = charge.apply_async(arguments, serializer="yaml")
    ledger.wait_for("conflicted", count=2)
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1
