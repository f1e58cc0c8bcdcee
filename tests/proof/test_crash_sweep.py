"""Real processes die by SIGKILL at every point of an attempt, over a real store."""

import pytest

from lab.proof.crash_sweep import Result, sweep
from lab.proof.table import Row
from lab.proof.targets import ALL
from lab.proof.verdicts import PROMISES
from lab.proof.ways import WAYS
from tests.support.stores import a_store

POINTS = {
    "before the claim",
    "claim stored, reply not read",
    "the body begins",
    "before the renewal",
    "renewal stored, reply not read",
    "before the effect",
    "after the effect",
    "before the completion",
    "completion stored, reply not read",
    "everything done, not acknowledged",
}


@pytest.fixture(scope="module")
def url(dynamodb_endpoint: str) -> str:
    return f"dynamodb://test:test@{dynamodb_endpoint.removeprefix('http://')}/crash-sweep?region=us-east-1"


@pytest.fixture(scope="module")
def swept(url: str) -> Result:
    return sweep("singles", url=url)


def row(swept: Result, promise: str) -> Row:
    (found,) = [each for each in swept.rows if each.promise == promise]
    return found


def test_every_point_was_died_at(swept: Result) -> None:
    """Each named point of an attempt killed a process under every promise: zero violations say something."""
    assert set(swept.points) == POINTS
    for promise in PROMISES:
        assert set(row(swept, promise).faults) == POINTS


@pytest.mark.parametrize("promise", PROMISES)
def test_promise_survives_death_at_every_point(swept: Result, promise: str) -> None:
    """Whatever point a process dies at, the promise holds, nothing is stuck and nobody is told two things."""
    found = row(swept, promise)

    assert [each for each in swept.tally.problems if each.promise == promise] == []
    assert (found.effects_0, found.stuck, found.unexplained) == (0, 0, 0)


def test_only_death_between_effect_and_completion_repeats_an_effect(swept: Result) -> None:
    """At least once: a second effect is there exactly where nobody could know of the first."""
    found = row(swept, "at least once")
    between = sum(found.faults[each] for each in ("after the effect", "before the completion"))
    renewals_after_the_effect = (
        found.faults["before the renewal"] // 2 + found.faults["renewal stored, reply not read"] // 2
    )

    assert found.effects_2 == between + renewals_after_the_effect


def test_refused_takeover_never_repeats_and_says_so(swept: Result) -> None:
    """At most once: no second effect anywhere, and death between claim and completion ends UNKNOWN."""
    found = row(swept, "at most once")
    after_the_claim = POINTS - {
        "before the claim",
        "completion stored, reply not read",
        "everything done, not acknowledged",
    }

    assert found.effects_2 == 0
    assert found.unknown == sum(found.faults[each] for each in after_the_claim)


def test_effect_key_makes_it_exactly_once(swept: Result) -> None:
    """A receiver that honours the effect key has one effect wherever the sender dies."""
    found = row(swept, "exactly once")

    assert found.effects_1 == found.tasks


@pytest.mark.parametrize("flaw", ["drops completions", "takes over at once"])
def test_broken_variant_is_seen(url: str, flaw: str) -> None:
    """The same sweep over a library with one rule undone reports violations."""
    assert sweep("singles", url=url, flaw=flaw).tally.problems


@pytest.mark.nightly
@pytest.mark.parametrize("name", [each for each in ALL if each != "dynamodb"])
def test_every_store_survives_death_at_every_point(name: str) -> None:
    """The same on the other stores, each point once under each promise: all points struck, and nothing broke."""
    with a_store(name) as site:
        found = sweep("brief", target=name, url=site.url)

    assert found.tally.problems == []
    assert [set(each.faults) for each in found.rows] == [POINTS] * len(PROMISES)
    assert [(each.effects_0, each.stuck, each.unexplained) for each in found.rows] == [(0, 0, 0)] * len(PROMISES)
    assert row(found, "at least once").effects_2 == 4  # at the points between the effect and its completion
    assert row(found, "at most once").effects_2 == 0


@pytest.mark.parametrize("name", ["redis", pytest.param("postgres", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("way", [each for each in WAYS if each != "delivery"])
def test_every_way_survives_death_at_every_point(name: str, way: str) -> None:
    """What is no task keeps the same promises: all points struck, and nothing broke."""
    with a_store(name) as site:
        found = sweep("brief", target=name, url=site.url, way=way)

    assert found.tally.problems == []
    assert [set(each.faults) for each in found.rows] == [POINTS] * len(PROMISES)
    assert row(found, "at least once").effects_2 == 4
    assert (row(found, "at most once").effects_2, row(found, "exactly once").effects_2) == (0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("way", [each for each in WAYS if each != "delivery"])
def test_broken_store_is_seen_by_every_way(way: str) -> None:
    """The same sweeps over a store with one rule undone report violations."""
    with a_store("redis") as site:
        assert sweep("brief", target="redis", url=site.url, flaw="drops completions", way=way).tally.problems


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["redis", "postgres", "sqlite"])
def test_store_that_claims_what_is_taken_is_seen(name: str) -> None:
    """A mistake in a store's own script or statements breaks promises in the sweep, too."""
    flaw = "script claims what is taken" if name == "redis" else "INSERT over what is there"
    with a_store(name) as site:
        assert sweep("brief", target=name, url=site.url, flaw=flaw).tally.problems
