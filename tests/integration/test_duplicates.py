"""Deliveries of one call: the body runs once, and everybody gets its result."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.signals import after_task_publish

from celery_idempotent import forget
from celery_idempotent.protocol.store import Store
from lab.proxy import aws_operations
from tests.integration.cluster import GREEN_POOLS, IdempotentSetup, in_pools, on_every_broker, on_redis, record_of
from tests.integration.idempotent_tasks import FALSY, charge, charge_published_once, falsy, refund
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker


@on_every_broker
@pytest.mark.worker(count=2, concurrency=3)
@pytest.mark.compat
def test_parallel_deliveries_run_the_body_once_and_share_its_result(
    celery_setup: IdempotentSetup, ledger: Ledger
) -> None:
    """Four callers whose messages are each delivered twice, all at once: one effect, and all hear of it."""
    results = [charge.apply_async(("o", "go"), task_id=f"caller-{number // 2}") for number in range(8)]
    ledger.wait_for("begin")
    ledger.wait_for("conflicted", count=7)
    ledger.open("go:1")
    assert {result.get(timeout=60) for result in results} == {"o by attempt 1"}
    assert len(ledger.rows("begin")) == len(ledger.rows("effect")) == 1


@on_redis
@in_pools("prefork", "threads", "solo", *GREEN_POOLS)
@pytest.mark.worker(count=2)
def test_every_pool_runs_a_duplicate_once(celery_setup: IdempotentSetup, ledger: Ledger, pool: str) -> None:
    """While the first one runs, and afterwards: the guarantee does not depend on how a worker executes its tasks."""
    results = [charge.delay("o", gate="go") for _ in range(3)]
    ledger.wait_for("conflicted", count=1)
    ledger.open("go:1")
    assert {result.get(timeout=60) for result in results} == {"o by attempt 1"}
    late = charge.delay("o", gate="go")
    assert late.get(timeout=60) == "o by attempt 1"
    assert late.id in {row.task_id for row in ledger.rows("replayed")}
    assert len(ledger.rows("begin")) == len(ledger.rows("effect")) == 1


@on_redis
@in_pools("threads", *GREEN_POOLS)
@pytest.mark.worker(concurrency=8)
def test_bodies_of_one_process_never_cross_keys_or_results(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, pool: str
) -> None:
    """Eight bodies of two tasks at a time, each under its own key. A duplicate of one of them, whose claim names the
    very process that asks, alive and its lease renewed, takes nothing over."""
    orders = [f"o{number}" for number in range(3)]
    results = {(task.name, order): task.delay(order, gate="go") for task in (charge, refund) for order in orders}
    begun = ledger.wait_for("begin", count=6)
    key = charge.idempotency_key_for("o1", gate="go")
    first_lease = record_of(store, key).lease_until
    duplicate = charge.delay("o1", gate="go")
    wait_until(lambda: record_of(store, key).lease_until > first_lease + 2000, "the lease is renewed")
    conflicts = ledger.wait_for("conflicted", count=3)
    assert {row.pid for row in conflicts} == {row.pid for row in begun}
    ledger.open("go:1")
    assert duplicate.get(timeout=60) == "o1 by attempt 1"
    for order in orders:
        assert results[charge.name, order].get(timeout=60) == f"{order} by attempt 1"
        assert results[refund.name, order].get(timeout=60) == f"refund of {order} by attempt 1"
        own = sorted(task.idempotency_key_for(order, gate="go") for task in (charge, refund))
        for kind in ("begin", "effect"):
            assert sorted(row.details["idempotency_key"] for row in ledger.rows(kind, order)) == own


def test_five_publishers_of_a_running_operation_send_one_message(
    celery_setup: IdempotentSetup, ledger: Ledger, request: pytest.FixtureRequest
) -> None:
    """All get its result, and nobody meets it running; who comes after it has the value without a message. A killed
    child is followed by whoever publishes next: nothing is lost, and nothing is stuck."""
    sent: list[str] = []

    def note(headers: dict[str, Any], **told: Any) -> None:
        sent.append(headers["id"])

    after_task_publish.connect(note)
    request.addfinalizer(lambda: after_task_publish.disconnect(note))
    results = [charge_published_once.delay("o", "go")]
    ledger.wait_for("begin")
    results += [charge_published_once.delay("o", "go") for _ in range(4)]
    ledger.open("go:1")
    assert {result.get(timeout=60) for result in results} == {"o by attempt 1"}
    ledger.wait_for("effect")
    results.append(charge_published_once.delay("o", "go"))
    assert results[-1].get(timeout=60) == "o by attempt 1"
    assert [result.id for result in results] == sent * 6
    assert ledger.rows("conflicted") == ledger.rows("replayed") == []

    results = [charge_published_once.delay("p", "stop")]
    (begun,) = ledger.wait_for("begin", key="p")
    celery_setup.worker_cluster.kill_child(begun)
    results += [charge_published_once.delay("p", "stop") for _ in range(4)]
    for attempt in (1, 2, 3):
        ledger.open(f"stop:{attempt}")
    assert len({result.get(timeout=60) for result in results}) == 1
    assert len(ledger.rows("effect", "p")) == 1


@on_redis
def test_an_operation_whose_message_was_revoked_is_published_again(
    celery_setup: IdempotentSetup, ledger: Ledger
) -> None:
    """Once somebody says so, and under another id: workers remember the revoked one, and would drop it again."""
    revoked = charge_published_once.apply_async(("o",), countdown=1)
    assert charge_published_once.delay("o").id == revoked.id
    celery_setup.app.control.revoke(revoked.id)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=60)
    assert charge_published_once.delay("o").id == revoked.id
    forget(charge_published_once.idempotency_key_for("o"), app=charge_published_once.app)
    again = charge_published_once.delay("o")
    assert again.id != revoked.id
    assert again.get(timeout=60) == "o by attempt 1"
    assert [row.task_id for row in ledger.rows("effect")] == [again.id]


@on_redis
def test_a_new_key_costs_two_requests_and_a_duplicate_one_whatever_its_result(
    celery_setup: IdempotentSetup, ledger: Ledger, faults: TcpProxy
) -> None:
    """Claim and completion for the first delivery, the claim alone for every other, and never a read; None, 0, False,
    "" and [] are results like any other, for the first caller and for the next."""
    charge.delay("another, so that the pool's process has its connection").get(timeout=60)
    for name, value in FALSY.items():
        for requests in (["PutItem", "PutItem"], ["PutItem"]):
            before = faults.round_trips
            result = falsy.delay(name).get(timeout=60)
            assert (result, type(result)) == (value, type(value))
            assert aws_operations(faults.trips[before:]) == requests
    assert len(ledger.rows("effect")) == len(ledger.rows("replayed")) + 1 == len(FALSY) + 1
