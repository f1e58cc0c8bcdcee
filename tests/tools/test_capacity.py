"""The simulation of a store's load repeats itself, loses nothing, and agrees with what a real storm has shown."""

from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller
from statistics import fmean
from typing import Any

import pytest

from celery_idempotent import Policy
from lab.capacity import DOLLARS_PER_UNIT, LOADS, Load, Report, hot_keys, outage, plain, simulate, storm, told
from lab.short_delays import ShortDelays

loads = pytest.mark.parametrize("make", LOADS)
Make = Callable[[int], Load]


def _key_figures(report: Report) -> tuple[Any, ...]:
    return report.requests, report.waits, report.units, report.by_kind, report.completed


@loads
def test_same_seed_gives_the_same_figures_and_another_one_others(make: Make) -> None:
    """Or no figure could be looked at again."""
    assert _key_figures(simulate(make(3), 3)) == _key_figures(simulate(make(3), 3))
    assert _key_figures(simulate(make(3), 3)) != _key_figures(simulate(make(4), 4))


@loads
def test_every_message_is_answered_and_every_operation_completes_once(make: Make) -> None:
    """Whatever meets it: conflicts, an outage, a crowd."""
    load = make(5)
    report = simulate(load, 5)
    operations = {operation for _, operation in load.arrivals}
    assert len(report.waits) == len(report.questions) == len(load.arrivals)
    assert report.completed == dict.fromkeys(operations, 1)
    assert report.bodies == dict.fromkeys(operations, 1)


@loads
def test_requests_add_up(make: Make) -> None:
    """A delivery has one claim, or two where a reply did not come, or a third party was quicker; a body has one end."""
    report = simulate(make(5), 5)
    kinds = report.by_kind
    assert sum(report.questions) == kinds["claim"] + kinds["unanswered claim"] / 2 + report.held_back
    assert kinds["end"] == len(report.completed)
    assert len(report.requests) == kinds.total()
    answered = sum(number for kind, number in kinds.items() if not kind.startswith("unanswered"))
    assert report.units == answered  # a record of a unit
    assert report.dollars == pytest.approx(answered * DOLLARS_PER_UNIT * 1e6 / len(report.waits))


def test_new_key_costs_two_requests_and_a_duplicate_one() -> None:
    """As they are counted on the wire by the benchmarks."""
    load = plain(1)
    report = simulate(load, 1)
    assert report.by_kind == {"claim": len(load.arrivals), "end": 10_000}


def test_a_lease_that_ends_in_an_outage_is_taken_over_and_the_effect_recorded_once() -> None:
    """The body runs twice, as `rerun` says, and one end is written; the other one reports it."""
    load = Load(
        name="takeover",
        arrivals=[(0, 0), (8000, 0)],
        body=10_000,
        policy=Policy("operation", lease=1),
        outages=[(100, 8000)],
    )
    report = simulate(load, 1)
    assert report.bodies == {0: 2}
    assert report.completed == {0: 1}
    assert len(report.waits) == 2


def test_outage_holds_claims_back() -> None:
    """A store that is away is asked by trials, not by every message; and afterwards nothing is left over."""
    report = simulate(outage(1), 1)
    assert report.held_back > report.by_kind["unanswered claim"]
    assert max(report.requests) > 80_000


def test_hot_keys_cost_less_than_new_ones() -> None:
    """A duplicate is one request, a new key two."""
    assert simulate(hot_keys(1), 1).dollars < simulate(plain(1), 1).dollars


def test_a_real_storm_had_these_figures() -> None:
    """Both stand side by side in docs/explanation/capacity.md: measure anew where the decisions are changed.

    Which is: ``storm.run(print, duplicates=300, body=90, leases=[60], brokers=["redis"])`` of ``lab.proof``.
    """
    reports = [simulate(storm(seed, duplicates=300, body=90_000), seed) for seed in range(10)]

    def mean(figure: Callable[[Report], float]) -> float:
        return fmean(map(figure, reports))

    windows = [mean(methodcaller("between", begin, begin + 10_000)) for begin in range(0, 90_000, 10_000)]
    assert windows == pytest.approx([123.5, 31.5, 23.1, 7.7, 13.1, 10.3, 3.3, 5.5, 8.5], abs=2)
    assert mean(lambda report: len(report.requests)) == pytest.approx(2601, rel=0.03)
    assert mean(lambda report: sum(report.questions[1:]) / 300) == pytest.approx(8.49, abs=0.1)
    assert mean(lambda report: report.waited(0.95) - 90) == pytest.approx(49.6, abs=4)


def test_delays_that_do_not_grow_cost_more() -> None:
    """As the control of the real storm shows."""
    grows = storm(1, lease=1)
    stays = replace(grows, policy=ShortDelays("operation", lease=1))
    grow, stay = (simulate(load, 1) for load in (grows, stays))
    assert len(stay.requests) > 5 * len(grow.requests)


def test_report_has_its_numbers() -> None:
    """For people."""
    report = simulate(replace(storm(1, duplicates=10, body=5000), name="a small storm"), 1)
    text = told(report)
    assert text.startswith("a small storm\n  operations 1, messages 11, bodies 1\n")
    assert f"{report.units:,} write units" in text
