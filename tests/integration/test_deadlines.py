"""What limits of time do to an operation: a body that hangs and has a deadline, and a completion that is struck."""

from __future__ import annotations

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from tests.integration.cluster import IdempotentSetup, green, on, record_of
from tests.integration.idempotent_tasks import charge, charge_within_3_s
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
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
@pytest.mark.worker(count=1)
def test_a_soft_time_limit_during_the_completion_waits_for_it(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """The body has returned: Celery reports the limit, and the same call sent again is answered and has no effect."""
    ledger.open("go:1")
    with faults.losing(b"PutItem", b"COMPLETED") as cut:
        limited = charge.apply_async(("o", "go"), soft_time_limit=2)
        wait_until(lambda: cut.struck, "the completion is under way")
        wait_until(lambda: "Soft time limit" in celery_setup.worker.logs(), "the worker announces the limit")
        tries = cut.struck
        wait_until(lambda: cut.struck > tries + 1, "the limit has struck, before the second try from now on")
    with pytest.raises(SoftTimeLimitExceeded):
        limited.get(timeout=60)
    assert record_of(store, charge.idempotency_key_for("o", "go")).status is Status.COMPLETED
    assert charge.delay("o", "go").get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("effect")) == 1
