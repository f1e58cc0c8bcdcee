"""The store and the deliveries that the test kit gives to users."""

from contextlib import suppress

import pytest
from celery import Celery

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import FakeStore
from celery_idempotent.testing.contract import a_record
from celery_idempotent.testing.stores import installed


def test_fake_store_keeps_time_by_hand() -> None:
    """Its clock stands until it is advanced, by seconds, forwards or backwards."""
    store = FakeStore()
    before = store.now()

    store.advance(1.5)
    assert store.now() == before + 1_500
    store.advance(-2)
    assert store.now() == before - 500


def test_fake_store_shows_its_records_and_meets_faults() -> None:
    """What was planned at its making, or later, happens to the coming swaps; the rest goes through."""
    store = FakeStore("request lost", "reply lost")
    lost, written = a_record(), a_record()

    for record in (lost, written):
        with pytest.raises(StoreUnavailable, match=r"FakeStore\(\)"):
            store.swap(record, None)

    assert store.records == [written]
    assert [each.status for each in store.swaps] == [Status.IN_PROGRESS] * 2


def test_installed_store_gives_way_to_what_was_there() -> None:
    """A store, a URL or nothing; also if the block raises."""
    for before in (None, "memory://", FakeStore()):
        app = Celery("a", set_as_current=False)
        if before is not None:
            app.conf.idempotency_store = before
        store: Store = FakeStore()

        with suppress(KeyError), installed(app, store):
            assert app.conf.idempotency_store is store
            raise KeyError

        assert app.conf.get("idempotency_store") is before
