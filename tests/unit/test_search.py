"""How people find records: by what they know of one, or by what several have in common."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent import PolicyError, Record, Status
from celery_idempotent.engine.search import FORGOTTEN, Filter, find, look_up
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record
from tests.support.stores import Indexed


@pytest.fixture
def store() -> MemoryStore:
    return Indexed(FakeClock(1000).now)


def _stored(store: MemoryStore, **changes: Any) -> Record:
    record = replace(a_record(), **changes)
    store.swap(record, None)
    return record


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (Filter(), [0, 1, 2, 3]),
        (Filter(status=Status.UNKNOWN), [0]),
        (Filter(status=Status.COMPLETED), [2]),
        (Filter(status=FORGOTTEN), [3]),  # which is then the only status of an outcome that no longer counts
        (Filter(task="mine"), [0]),
        (Filter(label="acme/1"), [0]),
        (Filter(label="acme/1*"), [0, 2]),
        (Filter(label="*"), [0, 1, 2]),
        (Filter(label=""), []),  # a script whose variable is empty must not mean, and forget, everything else
        (Filter(worker="here"), [0]),
        (Filter(older_than=900), [0, 3]),
        *((Filter(key=key), [0]) for key in ("mine:1:abcdef", "mine:1:a", "abc", "my task id", "mine:abcd")),
        (Filter(status=Status.UNKNOWN, task="mine", label="acme/1", worker="here", older_than=900), [0]),
    ],
)
def test_a_filter_finds_what_it_names_and_nothing_else(store: MemoryStore, wanted: Filter, fits: list[int]) -> None:
    """Of records that differ in everything, or its oldest; a star stands for any rest, and a whole label is one."""
    mine = {"key": "mine:1:abcdef", "task_id": "my task id", "status": Status.UNKNOWN, "worker": "here"}
    records = [
        _stored(store, task="mine", label="acme/1", updated_at=99, **mine),
        _stored(store, label="shop/1", worker="there", updated_at=100),
        _stored(store, label="acme/10", status=Status.COMPLETED, expires_at=2, updated_at=100),
        _stored(store, label="", status=Status.COMPLETED, expires_at=1, updated_at=98),
    ]
    found = list(find(store, wanted))
    assert sorted(records.index(each) for each in found) == fits
    assert list(find(store, wanted, oldest=1))[:1] == found[:1]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        *((text, True) for text in ("shop.charge:1:abcdef", "shop.charge:1:abc", "shop", "abcd", "the id", "acme/1")),
        *((text, False) for text in ("abc", "charge", "another id", "", "acme/*")),
    ],
)
def test_one_record_is_found_by_whatever_is_known_of_it(store: MemoryStore, text: str, is_found: bool) -> None:
    """The beginning of its key or of its hash, task id or label; fewer than four characters would fit by chance."""
    mine = _stored(store, key="shop.charge:1:abcdef", task_id="the id", label="acme/1")
    _stored(store, key="mail.send:1:fedcba", label="")
    if is_found:
        assert look_up(store, text) == mine
    else:
        with pytest.raises(PolicyError, match="nothing is recorded"):
            look_up(store, text)


def test_what_fits_several_names_them(store: MemoryStore) -> None:
    """Five of them, so that the person can go on."""
    for number in range(7):
        _stored(store, key=f"shop.charge:1:{number}abc")
    with pytest.raises(PolicyError, match=r"records: (shop.charge:1:\dabc, ){5}\.\.\.;"):
        look_up(store, "shop.charge")
