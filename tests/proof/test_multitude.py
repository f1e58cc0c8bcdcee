"""Faults at every write, on every store: a short form of the campaign, and proof that it can see."""

import pytest

from lab.proof.course import Operation
from lab.proof.multitude import CONTROLS, STORES, Fault, attack, controls, plan
from lab.proof.targets import Site
from tests.support.stores import a_store

SEED = 5
MEMORY = Site("")


@pytest.mark.parametrize("name", [each for each in STORES if each != "memory"])
def test_no_fault_at_any_write_breaks_a_promise(name: str) -> None:
    """Effects, records and what every caller was told stay within the promise, whichever store is struck."""
    with a_store(name) as site:
        found = attack(name, site, 250, SEED)

    assert found.tally.problems == []
    assert sum(row.faulted for row in found.rows) == 250
    assert {row.violations + row.stuck + row.unexplained for row in found.rows} == {0}


def test_every_write_and_every_fault_is_met() -> None:
    """Nothing that could be struck is left out, and nothing that strikes; each pair is met by a longer run."""
    found = attack("memory", MEMORY, 1_500, SEED)

    pairs = [each.split(" at ", 1) for each in found.reached]
    assert {fault for fault, _ in pairs} == set(Fault)
    assert {operation for _, operation in pairs} == set(Operation)
    assert found.tally.problems == []


def test_what_is_broken_is_seen() -> None:
    """Each control breaks a promise under the same plans, and the worst is to have no library at all."""
    rows = controls("memory", MEMORY, 200, SEED)

    assert [row.store for row in rows] == [f"memory, {flaw}" for flaw in CONTROLS]
    assert all(row.violations and row.system.startswith("negative control") for row in rows)
    assert max(rows, key=lambda row: row.effects_2).store == "memory, no store at all"


def test_operation_is_reproduced_by_its_number() -> None:
    """A broken one is found again alone: its plan depends on seed and number, and not on those before it."""
    assert [plan(SEED, number) for number in range(50)] == [plan(SEED, number) for number in range(50)]
    assert plan(SEED, 7) != plan(SEED + 1, 7)

    from_the_start = attack("memory", MEMORY, 60, SEED, flaw="drops completions")
    broken = from_the_start.tally.problems[-1]
    alone = attack("memory", MEMORY, 1, SEED, flaw="drops completions", first=int(broken.group.removeprefix("number ")))

    assert [each.task for each in alone.tally.problems] == [broken.task]


def test_shares_of_two_attackers_are_different_operations() -> None:
    """On one server, together as many as were asked for."""
    with a_store("sqlite") as site:
        found = attack("sqlite", site, 40, SEED, processes=2)

    assert sum(row.faulted for row in found.rows) == 40
    assert found.tally.problems == []
