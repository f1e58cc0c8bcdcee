"""DynamoDB that loses replies or is away: nothing is doubled, nothing is lost, nothing is reported too early."""

from __future__ import annotations

import pytest

from celery_idempotent.protocol.store import Store
from tests.integration.cluster import IdempotentSetup, on_redis, record_of
from tests.integration.idempotent_tasks import charge
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.worker


@on_redis
@pytest.mark.parametrize("status", ["IN_PROGRESS", "COMPLETED"])
def test_a_lost_reply_neither_blocks_nor_doubles(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy, status: str
) -> None:
    """The write was applied and its sender does not know: it finds out, and it costs no further attempt."""
    cut = faults.cut_reply(b"PutItem", status.encode())
    ledger.open("go:1")
    assert charge.delay("o", "go").get(timeout=60) == "o by attempt 1"
    assert cut.struck
    assert not ledger.rows("lease_lost")
    assert not ledger.rows("replayed")
    (effect,) = ledger.rows("effect")
    assert not effect.details["takeover"]
    assert record_of(store, charge.idempotency_key_for("o", "go")).attempts == 1
    assert charge.delay("o", "go").get(timeout=60) == "o by attempt 1"


@on_redis
def test_a_lost_reply_of_a_renewal_does_not_end_the_attempt(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """The heartbeat's write was applied and it does not know: it goes on renewing, and the attempt completes."""
    key = charge.idempotency_key_for("o", "go")
    cut = faults.cut_reply(b"PutItem", b"IN_PROGRESS", nth=2)
    result = charge.delay("o", "go")
    wait_until(lambda: cut.struck, "the first renewal loses its reply")
    lease_until = record_of(store, key).lease_until
    wait_until(lambda: record_of(store, key).lease_until > lease_until, "the next renewal")
    ledger.open("go:1")
    assert result.get(timeout=60) == "o by attempt 1"
    assert not ledger.rows("lease_lost")
    assert len(ledger.rows("begin")) == 1


@on_redis
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
    (effect,) = ledger.rows("effect")
    assert effect.details["takeover"]


def test_nothing_runs_while_the_store_is_down_and_once_when_it_is_back(
    celery_setup: IdempotentSetup, ledger: Ledger, faults: TcpProxy
) -> None:
    """A claim that gets no certain answer is tried again later, by Celery, without an effect."""
    with faults.down():
        result = charge.delay("o")
        ledger.wait_for("store_unavailable", count=2)
        assert not ledger.rows("begin")
    assert result.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1


def test_nothing_is_reported_while_the_completion_cannot_be_stored(
    celery_setup: IdempotentSetup, ledger: Ledger, store: Store, faults: TcpProxy
) -> None:
    """The effect has happened and its record cannot be written: the claim is kept until it can."""
    result = charge.delay("o", "go")
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
    assert len(ledger.rows("begin")) == 1


def test_an_outage_at_completion_is_waited_out(celery_setup: IdempotentSetup, ledger: Ledger, faults: TcpProxy) -> None:
    """The whole store is away when the body ends: nothing is reported until it is back."""
    result = charge.delay("o", "go")
    ledger.wait_for("begin")
    with faults.losing() as cut:
        ledger.open("go:1")
        ledger.wait_for("effect")
        wait_until(lambda: cut.seen > 8, "the completion fails, although the driver and the store try again")
        assert not result.ready()
    assert result.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1
