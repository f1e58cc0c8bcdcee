"""The arithmetic of the benchmarks, which decides what is reported."""

from __future__ import annotations

import pytest

from celery_idempotent.stores.memory import MemoryStore
from lab.benchmarks.own_code import Tracers
from lab.benchmarks.stats import Spread, added, ratios, shuffled, spread


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5, 1, 3, 2, 4]) == Spread(median=3, p25=2, p75=4, count=5)


def test_spread_of_one_value_is_that_value() -> None:
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_ratios_are_taken_pair_by_pair() -> None:
    # The ratio of the medians would be 2/10: a machine that slows down half-way must not decide the result.
    assert ratios([1, 2, 200], [1, 10, 100]) == Spread(median=1, p25=0.6, p75=1.5, count=3)


def test_ratios_of_unequal_rounds_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios([1, 2], [1])


def test_added_cost_is_in_what_it_is_added_to() -> None:
    """Three calls' time in place of one has added two, of each pair by itself."""
    assert added([3, 10, 600], [1, 5, 100]) == Spread(median=2, p25=1.5, p75=3.5, count=3)


def test_tracer_of_the_benchmark_runs_a_key_once() -> None:
    """What is measured as a duplicate is one: the second message meets the record of the first, and writes nothing."""
    store = MemoryStore()
    tracers = Tracers(store)
    tracers.delivery("idempotent", 1)()
    before = list(store.scan())
    tracers.delivery("idempotent", 1)()
    assert list(store.scan()) == before
    assert [(each.status, each.attempts) for each in before] == [("COMPLETED", 1)]
    tracers.delivery("idempotent", 2)()
    tracers.delivery("plain", 3)()
    assert len(list(store.scan())) == 2


def test_order_changes_with_the_round_and_not_with_the_run() -> None:
    orders = [tuple(shuffled("abc", number)) for number in range(50)]
    assert {order[0] for order in orders} == set("abc")
    assert {order[:2] for order in orders} == {("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")}
    assert all(sorted(order) == list("abc") for order in orders)
    assert orders == [tuple(shuffled("abc", number)) for number in range(50)]
