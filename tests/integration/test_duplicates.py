"""Deliveries of one call: the body runs once, and everybody gets its result."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.signals import after_task_publish

from celery_idempotent import forget
from celery_idempotent.errors import KeyReused
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from lab.proxy import aws_operations
from tests.integration.cluster import GREEN_POOLS, IdempotentSetup, in_pools, on_every_broker, on_redis, record_of
from tests.integration.idempotent_tasks import (
    FALSY,
    charge,
    charge_published_once,
    falsy,
    refund,
    ship,
)
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
    assert len(ledger.rows("begin")) == 1
    assert len(ledger.rows("effect")) == 1


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
def test_a_duplicate_in_the_process_of_the_first_waits_for_it(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, pool: str
) -> None:
    """The claim names the very process that asks, which is alive, and its lease is renewed: nothing is taken over."""
    results = [charge.delay("o", gate="go") for _ in range(2)]
    (begun,) = ledger.wait_for("begin")
    key = begun.details["idempotency_key"]
    first_lease = record_of(store, key).lease_until
    wait_until(lambda: record_of(store, key).lease_until > first_lease + 2000, "the lease is renewed")
    conflicts = ledger.wait_for("conflicted", count=3)
    ledger.open("go:1")
    assert {result.get(timeout=60) for result in results} == {"o by attempt 1"}
    assert {row.pid for row in conflicts} == {begun.pid}
    assert len(ledger.rows("begin")) == 1


def test_five_publishers_of_a_running_operation_send_one_message(
    celery_setup: IdempotentSetup, ledger: Ledger, request: pytest.FixtureRequest
) -> None:
    """All get its result, and nobody meets it running; who comes after it has the value without a message."""
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


def test_a_killed_child_is_followed_by_whoever_publishes_next(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """Nothing is lost and nothing is stuck: the operation ends, for all who asked for it."""
    results = [charge_published_once.delay("o", "go")]
    (begun,) = ledger.wait_for("begin")
    celery_setup.worker_cluster.kill_child(begun)
    results += [charge_published_once.delay("o", "go") for _ in range(4)]
    for attempt in (1, 2, 3):
        ledger.open(f"go:{attempt}")
    assert len({result.get(timeout=60) for result in results}) == 1
    assert len(ledger.rows("effect")) == 1


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
def test_a_new_key_costs_two_requests_and_a_duplicate_one(
    celery_setup: IdempotentSetup, ledger: Ledger, faults: TcpProxy
) -> None:
    """Claim and completion for the first delivery, the claim alone for every other, and never a read."""

    def requests_of(order_id: str) -> list[str]:
        before = faults.round_trips
        charge.delay(order_id).get(timeout=60)
        return aws_operations(faults.trips[before:])

    requests_of("another, so that the pool's process has its connection")
    assert requests_of("o") == ["PutItem", "PutItem"]
    assert requests_of("o") == ["PutItem"]


@on_redis
def test_falsy_results_are_replayed_as_themselves(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """None, 0, False, "" and [] are results like any other, for the first caller and for the next."""
    for name, value in FALSY.items():
        first, replayed = (falsy.delay(name).get(timeout=60) for _ in range(2))
        assert (first, type(first)) == (replayed, type(replayed)) == (value, type(value))
    assert len(ledger.rows("effect")) == len(ledger.rows("replayed")) == len(FALSY)


@on_redis
@in_pools("threads", *GREEN_POOLS)
@pytest.mark.worker(concurrency=8)
def test_bodies_of_one_process_never_cross_keys_or_results(
    celery_setup: IdempotentSetup, ledger: Ledger, pool: str
) -> None:
    """Eight bodies of two tasks run at the same time in one process, each under its own key."""
    orders = [f"o{number}" for number in range(4)]
    results = {(task.name, order): task.delay(order, gate="go") for task in (charge, refund) for order in orders}
    ledger.wait_for("begin", count=8)
    ledger.open("go:1")
    for order in orders:
        assert results[charge.name, order].get(timeout=60) == f"{order} by attempt 1"
        assert results[refund.name, order].get(timeout=60) == f"refund of {order} by attempt 1"
        own = {task.idempotency_key_for(order, gate="go") for task in (charge, refund)}
        for kind in ("begin", "effect"):
            assert {row.details["idempotency_key"] for row in ledger.rows(kind, order)} == own


@on_redis
def test_an_idempotent_task_inside_another_keeps_a_record_of_its_own(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store
) -> None:
    """The inner task neither borrows the claim of the outer one nor ends it, and happens once as well."""
    assert ship.delay("o").get(timeout=60) == ["o by attempt 1", "o by attempt 1"]
    assert charge.delay("o").get(timeout=60) == "o by attempt 1"
    (nested,) = ledger.rows("nested")
    outer, inner = ship.idempotency_key_for("o"), charge.idempotency_key_for("o")
    assert nested.details == {"before": outer, "after": outer}
    for key in (outer, inner):
        assert record_of(store, key).status is Status.COMPLETED
    assert [row.details["idempotency_key"] for row in ledger.rows("effect")] == [inner, outer]


@on_redis
def test_a_key_with_other_arguments_is_refused_and_nothing_runs(celery_setup: IdempotentSetup, ledger: Ledger) -> None:
    """The second call means something else, so it gets neither the first one's result nor an effect."""
    assert charge.delay("o", amount=1).get(timeout=60) == "o by attempt 1"
    with pytest.raises(KeyReused):
        charge.delay("o", amount=2).get(timeout=60)
    assert len(ledger.rows("begin")) == 1
