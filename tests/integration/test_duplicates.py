"""Deliveries of one call: the body runs once, and everybody gets its result."""

from unittest.mock import Mock

import pytest
from celery.exceptions import TaskRevokedError
from celery.signals import after_task_publish

from celery_idempotent import forget
from celery_idempotent.protocol.store import Store
from lab.proxy import aws_operations
from tests.integration.cluster import Cluster, on, record_of
from tests.integration.idempotent_tasks import charge, charge_and_back_off, charge_published_once
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.usefixtures("celery_setup")]


@on("redis", "sqs", "classic", at_night=("quorum", "greenlets", "threads", "solo"))
@pytest.mark.worker(count=2, concurrency=3)
@pytest.mark.compat
def test_parallel_deliveries_run_the_body_once_and_share_its_result(ledger: Ledger) -> None:
    """Four callers whose messages come twice at once, and one who comes later: one effect, and all hear of it."""
    results = [charge.apply_async(("o", "go"), task_id=f"caller-{number // 2}") for number in range(8)]
    ledger.wait_for("begin")
    ledger.wait_for("conflicted", count=7)
    ledger.open("go:1")
    assert {result.get(timeout=60) for result in results} == {"o by attempt 1"}
    late = charge.delay("o", gate="go")
    assert late.get(timeout=60) == "o by attempt 1"
    assert late.id in {row.task_id for row in ledger.rows("replayed")}
    assert len(ledger.rows("begin")) == len(ledger.rows("effect")) == 1


@on(at_night=("threads", "greenlets"))
@pytest.mark.worker(concurrency=8)
def test_bodies_of_one_process_never_cross_keys_or_results(ledger: Ledger, store: Store) -> None:
    """Eight bodies of two tasks at a time, each under its own key. A duplicate of one of them, whose claim names the
    very process that asks, alive and its lease renewed, takes nothing over."""
    orders, tasks = [f"o{number}" for number in range(3)], (charge, charge_and_back_off)
    results = {(task.name, order): task.delay(order, gate="go") for task in tasks for order in orders}
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
        assert {results[task.name, order].get(timeout=60) for task in tasks} == {f"{order} by attempt 1"}
        own = sorted(task.idempotency_key_for(order, gate="go") for task in tasks)
        for kind in ("begin", "effect"):
            assert sorted(row.details["idempotency_key"] for row in ledger.rows(kind, order)) == own


@on("sqs", at_night=("redis",))
def test_five_publishers_of_a_running_operation_send_one_message(
    cluster: Cluster, ledger: Ledger, request: pytest.FixtureRequest
) -> None:
    """All get its result, and nobody meets it running; who comes after it has the value without a message. A killed
    child is followed by whoever publishes next: nothing is lost, and nothing is stuck."""
    published = Mock()
    after_task_publish.connect(published)
    request.addfinalizer(lambda: after_task_publish.disconnect(published))
    results = [charge_published_once.delay("o", "go")]
    ledger.wait_for("begin")
    results += [charge_published_once.delay("o", "go") for _ in range(4)]
    ledger.open("go:1")
    assert {result.get(timeout=60) for result in results} == {"o by attempt 1"}
    ledger.wait_for("effect")
    results.append(charge_published_once.delay("o", "go"))
    assert results[-1].get(timeout=60) == "o by attempt 1"
    assert [result.id for result in results] == [published.call_args.kwargs["headers"]["id"]] * 6
    assert published.call_count == 1
    assert ledger.rows("conflicted") == ledger.rows("replayed") == []

    results = [charge_published_once.delay("p", "stop")]
    (begun,) = ledger.wait_for("begin", key="p")
    cluster.kill_child(begun)
    results += [charge_published_once.delay("p", "stop") for _ in range(4)]
    for attempt in (1, 2, 3):
        ledger.open(f"stop:{attempt}")
    assert len({result.get(timeout=60) for result in results}) == 1
    assert len(ledger.rows("effect", "p")) == 1


def test_an_operation_whose_message_was_revoked_is_published_again(ledger: Ledger) -> None:
    """Once somebody says so, and under another id: workers remember the revoked one, and would drop it again."""
    revoked = charge_published_once.apply_async(("o",), countdown=1)
    assert charge_published_once.delay("o").id == revoked.id
    charge_published_once.app.control.revoke(revoked.id)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=60)
    assert charge_published_once.delay("o").id == revoked.id
    forget(charge_published_once.idempotency_key_for("o"), app=charge_published_once.app)
    again = charge_published_once.delay("o")
    assert again.id != revoked.id
    assert again.get(timeout=60) == "o by attempt 1"
    assert [row.task_id for row in ledger.rows("effect")] == [again.id]


def test_a_new_key_costs_two_requests_and_a_duplicate_one(ledger: Ledger, faults: TcpProxy) -> None:
    """Claim and completion for the first delivery, the claim alone for every other, and never a read."""
    charge.delay("another, so that the pool's process has its connection").get(timeout=60)
    for requests in (["PutItem", "PutItem"], ["PutItem"], ["PutItem"]):
        before = faults.round_trips
        assert charge.delay("o").get(timeout=60) == "o by attempt 1"
        assert aws_operations(faults.trips[before:]) == requests
    assert (len(ledger.rows("effect")), len(ledger.rows("replayed"))) == (2, 2)
