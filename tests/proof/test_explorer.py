"""The explorer finds no broken rule in the library, reaches every fault, and sees what is broken on purpose."""

import pytest

from proof.explorer import Program, Violation, explore
from proof.mutants import MUTANTS, NOT_ENOUGH, PROGRAMS, Mutant, judge


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_no_interleaving_breaks_a_rule(program: Program) -> None:
    """Two deliveries under two faults, one where renewals multiply the worlds; every kind of fault is met."""
    found = explore(program, deliveries=2, faults=program.few_faults)

    assert set(found.reached) == program.faults
    assert found.most_effects == (1 if program.at_most_once else 2)
    assert found.ended["finished" if program.raises is None else "raised"]


@pytest.mark.parametrize("program", NOT_ENOUGH, ids=lambda program: program.name)
def test_half_of_a_fenced_step_is_not_enough(program: Program) -> None:
    """A fencing token alone, or a probe alone, repeats the effect: the explorer shows the way there."""
    with pytest.raises(Violation, match="must not be repeated was repeated"):
        explore(program, deliveries=2, faults=1)


def test_violation_tells_the_way_there() -> None:
    """A broken rule comes with the steps that lead to it."""
    mutant = next(each for each in MUTANTS if each.name == "completion without a condition")

    with mutant.applied(), pytest.raises(Violation) as raised:
        explore(PROGRAMS[0], deliveries=2, faults=2)

    assert raised.value.rule == "a final state was changed"
    assert len(raised.value.trace) > 3
    assert "1. delivery 0 swaps IN_PROGRESS" in str(raised.value)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_noticed(mutant: Mutant) -> None:
    """Explorer, contract or oracle notices each mistake; a survivor would be a hole in the evidence."""
    assert judge(mutant).by


def test_there_are_enough_mutants() -> None:
    """They differ, and each says where its like was seen."""
    assert len({each.name for each in MUTANTS}) == len(MUTANTS) >= 12
    assert all(each.seen_in for each in MUTANTS)
