"""DynamoDB that loses replies or is away: nothing is doubled, nothing is lost, nothing is reported too early."""

from __future__ import annotations

import pytest

from celery_idempotent.protocol.store import Store
from tests.integration.cluster import IdempotentSetup, on_redis, record_of
from tests.integration.idempotent_tasks import charge
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, on_redis]


def test_a_lost_reply_neither_blocks_nor_doubles(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """Of a claim, a renewal or a completion: the write was applied, and its sender finds out, at no further attempt."""
    for order, marker, nth in (("claim", b"IN_PROGRESS", 1), ("renewal", b"IN_PROGRESS", 2), ("end", b"COMPLETED", 1)):
        cut = faults.cut_reply(b"PutItem", marker, nth=nth)
        key = charge.idempotency_key_for(order, order)
        result = charge.delay(order, order)
        if order == "renewal":
            wait_until(lambda: cut.struck, "the first renewal loses its reply")  # noqa: B023
            lease_until = record_of(store, key).lease_until
            wait_until(lambda: record_of(store, key).lease_until > lease_until, "the next renewal")  # noqa: B023
        ledger.open(f"{order}:1")
        assert result.get(timeout=60) == f"{order} by attempt 1"
        assert (cut.struck, record_of(store, key).attempts) == (1, 1)
        assert [row.details["takeover"] for row in ledger.rows("effect", order)] == [False]
        assert charge.delay(order, order).get(timeout=60) == f"{order} by attempt 1"
    assert not ledger.rows("lease_lost")
    assert len(ledger.rows("replayed")) == 3


def test_a_lost_reply_of_a_takeover_is_still_a_takeover(
    celery_setup: IdempotentSetup, ledger: Ledger, faults: TcpProxy
) -> None:
    """An attempt that reads its own claim back knows what came before it, and does not wait for itself."""
    cut = faults.cut_reply(b"PutItem", b"takeover")
    result = charge.delay("o", "go")
    (killed,) = ledger.wait_for("begin")
    celery_setup.worker_cluster.kill_child(killed)
    ledger.open("go:2")
    assert result.get(timeout=60) == "o by attempt 2"
    assert cut.struck
    assert [row.details["takeover"] for row in ledger.rows("effect")] == [True]


def test_nothing_runs_while_the_store_is_down_and_nothing_is_reported_too_early(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy
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
