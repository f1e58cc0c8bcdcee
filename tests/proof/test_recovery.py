"""The recovery campaign measures what it says: one death after another, and the effect of each operation once."""

import pytest

from lab.proof.recovery import Death, Part, Recovery, run
from lab.proof.recovery_app import SHORT_LEASE, System
from tests.support.stores import a_store


@pytest.mark.nightly
def test_lease_is_waited_for_only_where_nobody_can_tell() -> None:
    """A killed pool process costs a moment, and the lease where claims name no process."""
    parts = [
        Part(system=system, death=Death.CHILD, rounds=1, at_once=2, lease=SHORT_LEASE)
        for system in (System.OURS, System.BEFORE)
    ]
    with a_store("redis"):  # or the test is skipped
        ours, before = run(1, lambda news: None, parts, ["redis"])
    assert (ours.wrong, before.wrong) == (0, 0)
    assert (ours.conflicts, before.conflicts > 0) == (0, True)
    assert max(ours.seconds) < SHORT_LEASE / 2 < min(before.seconds)
    # The lease of a process that is known to be dead is ended; of the other two nobody knows, so it and the grace pass.
    assert (len(before.after_lease), before.early, ours.early) == (2, 0, len(ours.after_lease))
    assert min(before.after_lease) >= 1


def test_numbers_are_those_of_the_operations() -> None:
    """Median and maximum of all, and what all but one in twenty kept below."""
    part = Part(system=System.PLAIN, death=Death.WORKER, rounds=5, at_once=4, lease=None)
    told = Recovery(part=part, broker="Redis", seconds=tuple(map(float, range(1, 21))), conflicts=0, wrong=0).as_json()
    assert (told["kills"], told["operations"]) == (5, 20)
    assert (told["p50"], told["p95"], told["max"]) == (10.5, 19.0, 20.0)


def test_effect_before_the_end_of_a_lease_is_early() -> None:
    """The smallest distance is told, however many came later."""
    part = Part(system=System.OURS, death=Death.MACHINE, rounds=1, at_once=3, lease=SHORT_LEASE)
    found = Recovery(part=part, broker="Redis", seconds=(9, 10, 11), after_lease=(1, -0.5, 2), conflicts=0, wrong=0)
    assert (found.early, found.as_json()["after lease"]) == (1, -0.5)
