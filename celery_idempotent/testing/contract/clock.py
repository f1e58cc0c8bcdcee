"""The contract of a store's clock."""

import os
import time

from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract.base import StoreTests
from celery_idempotent.testing.contract.parallel import wait_until
from celery_idempotent.testing.contract.records import a_record

_CLOCK_ERROR = 2_000
"""Milliseconds by which a store's clock may be corrected in one go: the ``Date`` header that DynamoDB's store
has to make do with counts whole seconds."""


class ClockContract(StoreTests):
    """Milliseconds, and nothing that jumps."""

    def test_clock_is_in_milliseconds(self, store: Store) -> None:
        """The store's clock counts milliseconds since the epoch in this century."""
        assert type(store.now()) is int
        assert 1_700_000_000_000 < store.now() < 4_100_000_000_000

    def test_clock_runs(self, store: Store) -> None:
        """The clock goes on between requests, at the speed of real time."""
        asked = time.monotonic()
        before = store.now()
        answered = time.monotonic()
        wait_until(lambda: time.monotonic() > answered + 0.05)
        asked_again = time.monotonic()
        after = store.now()
        at_most = (time.monotonic() - asked) * 1000

        assert (asked_again - answered) * 1000 - 25 <= after - before <= at_most + 25

    def test_clock_knows_no_time_zone(self, store: Store) -> None:
        """The clock counts the same milliseconds wherever its machine believes to be."""
        zone = os.environ.get("TZ")
        try:
            readings = []
            for there in ("UTC", "EAST-12", "WEST+12"):
                os.environ["TZ"] = there
                time.tzset()
                readings.append(store.now())
        finally:
            os.environ.pop("TZ")
            os.environ |= {"TZ": zone} if zone is not None else {}
            time.tzset()

        assert max(readings) - min(readings) < 3_600_000

    def test_clock_does_not_jump_with_replies(self, store: Store) -> None:
        """What replies teach about the server's time is a correction, not another time."""
        record = a_record()
        start, started = store.now(), time.monotonic()
        for _ in range(10):
            store.swap(record, None)
            drift = store.now() - start - (time.monotonic() - started) * 1000
            assert abs(drift) <= _CLOCK_ERROR
