"""DynamoDB that is away: nothing is lost, nothing runs, and nothing is reported too early or too often."""

from uuid import uuid4

import pytest

from celery_idempotent.protocol.circuit import FAILURES
from celery_idempotent.protocol.store import Store
from tests.integration.cluster import Worker, record_of
from tests.integration.idempotent_tasks import charge
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.usefixtures("celery_setup")]


def test_nothing_runs_while_the_store_is_down_and_nothing_is_reported_too_early(
    ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """A claim without a certain answer is tried again later, by Celery; a completion that cannot be stored, or an
    outage at that moment, is waited out, and the claim is kept."""
    with faults.down():
        result = charge.delay("o", "go")
        ledger.wait_for("store_unavailable", count=2)
        assert not ledger.rows("begin")
    (begun,) = ledger.wait_for("begin")
    key = begun.details["idempotency_key"]
    with faults.losing(b"PutItem", b"COMPLETED") as cut:
        ledger.open("go:1")
        wait_until(lambda: cut.struck, "the completion fails")
        lease_until = record_of(store, key).lease_until
        wait_until(lambda: store.now() > lease_until + 1000, "the lease of that moment is over")
        duplicate = charge.delay("o", "go")
        ledger.wait_for("conflicted")
        assert not result.ready()
        assert not ledger.rows("reported")
    assert result.get(timeout=60) == duplicate.get(timeout=60) == "o by attempt 1"

    away = charge.delay("p", "stop")
    ledger.wait_for("begin", key="p")
    with faults.losing() as lost:
        ledger.open("stop:1")
        ledger.wait_for("effect", key="p")
        wait_until(lambda: lost.seen > 8, "the completion fails, although the driver and the store try again")
        assert not away.ready()
    assert away.get(timeout=60) == "p by attempt 1"
    assert len(ledger.rows("begin")) == 2


@pytest.mark.worker(settings={"worker_prefetch_multiplier": 20})
def test_a_worker_holds_claims_back_and_says_so_once(worker: Worker, ledger: Ledger, faults: TcpProxy) -> None:
    """Each of its two processes logs a handful of lines; every message of a backlog is postponed, and runs once."""
    with faults.down():
        results = [charge.delay(str(number)) for number in range(40)]
        ledger.wait_for("store_unavailable", count=20)
        assert not ledger.rows("begin")
    assert [result.get(timeout=100) for result in results] == [f"{number} by attempt 1" for number in range(40)]
    assert len(ledger.rows("begin")) == 40

    def said(name: str) -> int:
        return int(worker.logs().count(f"idempotency.{name} "))

    def is_through() -> bool:
        if said("store_circuit_opened") == said("store_circuit_closed"):
            return True
        for _ in range(4):  # a process that gets no more claims has nothing to let through
            charge.delay(str(uuid4()))
        return False

    wait_until(is_through, "who holds claims back lets them through again")
    assert (said("store_unavailable"), said("store_circuit_opened")) == (2 * (FAILURES - 1), 2)
