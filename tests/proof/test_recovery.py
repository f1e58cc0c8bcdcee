"""The recovery campaign measures what it says: one death after another, and the effect of each operation once."""

import pytest

from lab.proof.recovery import SHORT_LEASE, Death, Part, Recovery, System, run
from tests.support.stores import a_store


@pytest.mark.nightly
def test_lease_is_waited_for_only_where_nobody_can_tell() -> None:
    """A killed pool process costs a moment, and the lease where claims name no process."""
    systems = (System.OURS, System.BEFORE)
    parts = [Part(system=each, death=Death.CHILD, rounds=1, at_once=2, lease=SHORT_LEASE) for each in systems]
    with a_store("redis"):  # or the test is skipped
        ours, before = run(1, lambda news: None, parts, ["redis"])
    assert (ours.wrong, before.wrong) == (0, 0)
    assert (ours.conflicts, before.conflicts > 0) == (0, True)
    assert max(ours.seconds) < SHORT_LEASE / 2 < min(before.seconds)
    # The lease of a process that is known to be dead is ended; of the other two nobody knows, so it and the grace pass.
    assert (len(before.after_lease), before.early, ours.early) == (2, 0, len(ours.after_lease))
    assert min(before.after_lease) >= 1


def test_numbers_are_those_of_the_operations() -> None:
    """Median and maximum of all, what all but one in twenty kept below, and the effect that came too early."""
    part = Part(system=System.PLAIN, death=Death.WORKER, rounds=5, at_once=4, lease=None)
    seconds = tuple(map(float, range(1, 21)))
    found = Recovery(part=part, broker="Redis", seconds=seconds, after_lease=(1, -0.5, 2), conflicts=0, wrong=0)
    told = found.as_json()
    assert [told[each] for each in ("kills", "operations", "p50", "p95", "max")] == [5, 20, 10.5, 19.0, 20.0]
    assert (found.early, told["after lease"]) == (1, -0.5)
