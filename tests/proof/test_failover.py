"""Fail-over: that what only the primary had is lost for certain, and the short form of the campaign."""

from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import pytest

from celery_idempotent import open_store
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.testing.contract import a_record
from lab.embedded.pairs import Pair, PostgresPair, RedisPair
from lab.proof import failover
from lab.proof.table import CONTROL

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::celery_idempotent.errors.IdempotencyWarning"),
]


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", [RedisPair, PostgresPair])
def test_what_only_the_primary_had_is_lost(kind: Callable[[bool], Pair[Any]], waits: bool) -> None:
    """Though it was acknowledged, unless a write waits for the replica."""
    record, acknowledged = a_record(), False
    with kind(waits) as pair:
        with closing(open_store(pair.urls[0])) as store:
            store.provision()
            pair.cut_off_replica()
            with suppress(StoreUnavailable):
                acknowledged = store.swap(record, None) == record
        pair.primary.kill()
        pair.promote()
        with closing(open_store(pair.primary.url)) as successor:
            assert (acknowledged, successor.get(record.key)) == (not waits, None)


@pytest.mark.nightly
def test_no_promise_breaks_where_writes_wait_for_the_replica() -> None:
    """And without that, each does."""
    rows = [row for each in failover.run(failover.plan(quick=True), print) for row in each.rows]
    assert {bool(row.violations) for row in rows if row.system == CONTROL} == {True}
    assert {row.violations + row.stuck for row in rows if row.system != CONTROL} == {0}
