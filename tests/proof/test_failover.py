"""Fail-over: what only the primary had is lost for certain, and the short form of the campaign."""

from contextlib import ExitStack, closing, suppress

import pytest

from celery_idempotent import open_store
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.testing.contract import a_record
from lab.embedded.pairs import PostgresPair, RedisPair
from lab.proof.failover import plan, run
from lab.proof.table import CONTROL

pytestmark = pytest.mark.filterwarnings("ignore:.*can forget")


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [RedisPair, PostgresPair])
def test_what_only_the_primary_had_is_lost(kind: type[RedisPair | PostgresPair], waits: bool) -> None:
    """Though it was acknowledged, unless a write waits for the replica."""
    record, acknowledged = a_record(), False
    with ExitStack() as running:
        pair = kind(running, waits)
        store = running.enter_context(closing(open_store(pair.urls[0])))
        store.provision()
        pair.cut_off_replica()
        with suppress(StoreUnavailable):
            acknowledged = store.swap(record, None) == record
        pair.primary.kill()
        pair.promote()
        assert (acknowledged, store.get(record.key)) == (not waits, None)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_no_promise_breaks_where_writes_wait_for_the_replica() -> None:
    """And without that, each does."""
    rows = [row for each in run(plan(quick=True), print) for row in each.rows]
    assert {row.system == CONTROL for row in rows} == {True, False}
    assert all(bool(row.violations or row.stuck) == (row.system == CONTROL) for row in rows)
