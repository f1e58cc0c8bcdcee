"""A body that hangs and has a deadline: its worker lives, and somebody else does its work."""

from __future__ import annotations

import pytest

from celery_idempotent.protocol.store import Store
from tests.integration.cluster import IdempotentSetup, green, on, record_of
from tests.integration.idempotent_tasks import charge_within_3_s
from tests.support.ledger import Ledger
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker(count=2, concurrency=1, visibility_timeout=4)


@on("redis", "sqs", *green)
def test_another_worker_takes_over_from_a_body_that_hangs(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store
) -> None:
    """Renewals end, and the message is let go: it comes again, and is run again. The late body reports that outcome."""
    result = charge_within_3_s.delay("o", gate="go")
    (hanging,) = ledger.wait_for("begin")
    worker = celery_setup.worker_cluster.worker_of(hanging)
    _, successor = ledger.wait_for("begin", count=2)
    assert successor.details["takeover"]
    assert successor.at - hanging.at > 3
    ledger.open("go:2")
    assert result.get(timeout=60) == "o by attempt 2"
    told = f"witnessed deadline_exceeded of {result.id} by {charge_within_3_s.name}"
    wait_until(lambda: told in worker.logs(), "the signal was sent")
    assert worker.logs().count("idempotency.deadline_exceeded") == 1
    assert worker.logs().count("idempotency.hold_ended") == 1
    ledger.open("go:1")
    (lost,) = ledger.wait_for("lease_lost")
    assert lost.worker == hanging.worker
    reported = ledger.wait_for("reported", count=2)
    assert {row.details["result"] for row in reported} == {"o by attempt 2"}
    assert record_of(store, hanging.details["idempotency_key"]).attempts == 2


@on("redis")
def test_a_late_body_that_nobody_took_over_from_completes(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """Its effect has happened, and its result is the outcome."""
    busy = [charge_within_3_s.delay(order, gate=f"go {order}") for order in ("a", "b")]
    ledger.wait_for("begin", count=2)
    workers = list(celery_setup.worker_cluster)
    wait_until(
        lambda: sum(worker.logs().count("idempotency.deadline_exceeded") for worker in workers) == 2, "both are late"
    )
    for order in ("a", "b"):
        ledger.open(f"go {order}:1")
    assert [result.get(timeout=60) for result in busy] == ["a by attempt 1", "b by attempt 1"]
    assert not ledger.rows("lease_lost")
