"""How people find records: by what they know of one, or by what several have in common."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent import PolicyError, Record, Status
from celery_idempotent.engine.search import FORGOTTEN, Filter, found, looked_up, summary
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(FakeClock(1000).now)


def _stored(store: MemoryStore, **changes: Any) -> Record:
    record = replace(a_record(), **changes)
    store.swap(record, None)
    return record


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(status=Status.UNKNOWN),
        Filter(task="mine"),
        Filter(label="acme/1"),
        Filter(label="acme/*"),
        Filter(worker="here"),
        Filter(older_than=900),
        *(Filter(key=key) for key in ("mine:1:abcdef", "mine:1:a", "abc", "my task id")),
        Filter(status=Status.UNKNOWN, task="mine", label="acme/1", worker="here", older_than=900),
    ],
)
def test_a_filter_finds_what_it_names_and_nothing_else(store: MemoryStore, wanted: Filter) -> None:
    """Of two records that differ in everything, one fits."""
    named = {"key": "mine:1:abcdef", "task_id": "my task id"}
    mine = _stored(store, status=Status.UNKNOWN, task="mine", label="acme/1", worker="here", updated_at=99, **named)
    _stored(store, task="other", label="shop/1", worker="there", updated_at=100)

    assert list(found(store, wanted)) == [mine]


def test_an_outcome_that_no_longer_counts_has_no_other_status(store: MemoryStore) -> None:
    """As every count says it."""
    past = _stored(store, status=Status.COMPLETED, expires_at=1)
    kept = _stored(store, status=Status.COMPLETED, expires_at=2)

    assert list(found(store, Filter(status=FORGOTTEN))) == [past]
    assert list(found(store, Filter(status=Status.COMPLETED))) == [kept]


def test_a_filter_without_a_word_finds_all(store: MemoryStore) -> None:
    """As a list without options does."""
    records = [_stored(store), _stored(store)]

    assert list(found(store, Filter())) == records


def test_a_star_stands_for_any_rest_and_for_nothing_else(store: MemoryStore) -> None:
    """A whole label is one, even if another begins with it."""
    records = [_stored(store, label=label) for label in ("acme/1", "acme/10", "acme")]

    assert list(found(store, Filter(label="acme/1"))) == records[:1]
    assert list(found(store, Filter(label="acme/1*"))) == records[:2]


def test_a_record_without_a_label_is_found_by_none(store: MemoryStore) -> None:
    """A script whose variable is empty must not mean, and forget, everything else."""
    _stored(store, label="")
    named = _stored(store, label="acme/1")

    assert list(found(store, Filter(label=""))) == []
    assert list(found(store, Filter(label="*"))) == [named]


@pytest.mark.parametrize(
    "text",
    ["shop.charge:1:abcdef", "shop.charge:1:abc", "shop", "abcd", "the id", "acme/1"],
)
def test_one_record_is_found_by_whatever_is_known_of_it(store: MemoryStore, text: str) -> None:
    """By its key, the beginning of it or of its hash, its task id, or its label."""
    mine = _stored(store, key="shop.charge:1:abcdef", task_id="the id", label="acme/1")
    _stored(store, key="mail.send:1:fedcba", label="")

    assert looked_up(store, text) == mine


@pytest.mark.parametrize("text", ["abc", "charge", "another id", "", "acme/*"])
def test_what_fits_nothing_is_said(store: MemoryStore, text: str) -> None:
    """A beginning of fewer than four characters is none: it would fit by chance."""
    _stored(store, key="shop.charge:1:abcdef", label="")

    with pytest.raises(PolicyError, match="nothing is recorded under it"):
        looked_up(store, text)


def test_what_fits_several_names_them(store: MemoryStore) -> None:
    """Five of them, so that the person can go on."""
    for number in range(7):
        _stored(store, key=f"shop.charge:1:{number}abc")

    with pytest.raises(PolicyError, match=r"several records: (shop.charge:1:\dabc, ){5}\.\.\.; give the key of one"):
        looked_up(store, "shop.charge")


def test_a_summary_counts_by_status_and_task(store: MemoryStore) -> None:
    """An outcome that counts no longer is counted apart, whether the store has deleted it or not."""
    _stored(store, task="a", status=Status.UNKNOWN, updated_at=7)
    _stored(store, task="a", status=Status.UNKNOWN, updated_at=5)
    _stored(store, task="b", status=Status.COMPLETED, updated_at=9, expires_at=store.now() // 1000 + 1)
    _stored(store, task="b", status=Status.COMPLETED, updated_at=3, expires_at=1)

    counted = summary(store)

    assert counted.by_status == {"UNKNOWN": 2, "COMPLETED": 1, FORGOTTEN: 1}
    assert counted.by_task == {"a": {"UNKNOWN": 2}, "b": {"COMPLETED": 1, FORGOTTEN: 1}}
    assert counted.oldest == {"UNKNOWN": 5, "COMPLETED": 9, FORGOTTEN: 3}
