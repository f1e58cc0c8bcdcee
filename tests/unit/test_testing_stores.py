"""The store and the deliveries that the test kit gives to users."""

from contextlib import suppress

import pytest
from celery import Celery

from celery_idempotent import Policy, idempotent
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import FakeStore
from celery_idempotent.testing.contract import a_record
from celery_idempotent.testing.stores import installed
from tests.support.deliveries import an_app


def test_fake_store_keeps_time_by_hand() -> None:
    """Its clock stands until it is advanced, by seconds, forwards or backwards."""
    store = FakeStore()
    before = store.now()
    store.advance(1.5)
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

        with suppress(KeyError), installed(store, app):
            assert app.conf.idempotency_store is store
            raise KeyError

        assert app.conf.get("idempotency_store") is before


def test_store_is_behind_all_that_records() -> None:
    """Behind an app that is not named, in place of a ``store=``, and beside an app whose settings nobody can load."""
    broken, unnamed = Celery("broken", set_as_current=False, config_source="no.such.module"), an_app()
    store = FakeStore()

    @idempotent(Policy("order"), store="memory://")
    def ship(order: str) -> None: ...

    @idempotent(Policy("order"), app=unnamed)
    def pack(order: str) -> None: ...

    with installed(store, broken):
        ship("o-1")
        pack("o-1")

    assert len(store.records) == 2
    assert runtime_of(unnamed).store is not store
