"""Faults at every write, on every store: a short form of the campaign, and proof that it can see."""

import itertools
from dataclasses import replace

import pytest

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract.records import a_record
from lab.proof.course import PUBLISHER, Dead, OneDelivery, Operation, Plan, Strike, Task
from lab.proof.multitude import CONTROLS, STORES, Fault, _World, attack, plan, run
from lab.proof.table import CONTROL
from lab.proof.targets import Site
from lab.proof.verdicts import PROMISES
from tests.support.stores import a_store

SEED = 5
MEMORY = Site("")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.nightly] if each in {"redis-cluster", "mariadb"} else [])
        for each in STORES
        if each != "memory"
    ],
)
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


class _Noting(MemoryStore):
    """Says which writes arrive."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__()
        self._happened = happened

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self._happened.append(new.key)
        return super().swap(new, expected)


@pytest.mark.parametrize(
    ("fault", "happens"),
    [
        (None, "first told second told end"),
        (Fault.REQUEST_LOST, "unsure second told end"),
        (Fault.REPLY_LOST, "first unsure second told end"),
        (Fault.DOUBLED, "first first told second told end"),
        (Fault.OVERTAKEN, "unsure second first told end"),
        (Fault.HELD, "unsure second told end first"),
        (Fault.DIES_BEFORE, "dead dead end"),
        (Fault.DIES_DURING, "dead dead end first"),
        (Fault.DIES_AFTER, "first dead dead end"),
        (Fault.CUT_OFF, "unsure unsure end"),
    ],
)
def test_a_fault_does_what_its_name_says(fault: Fault | None, happens: str) -> None:
    """To the first of two writes: what arrives, and what their sender is told."""
    happened: list[str] = []
    world = _World(itertools.repeat(_Noting(happened)), "none")
    strikes = () if fault is None else (Strike(Operation.ANNOUNCEMENT, fault),)
    task = Task(world, Plan(promise=PROMISES["exactly once"], strikes=strikes))
    sender = OneDelivery(world.store, task, PUBLISHER, None)

    for key in ("first", "second"):
        try:
            sender.swap(replace(a_record(), key=key), None)
            happened.append("told")
        except StoreUnavailable:
            happened.append("unsure")
        except Dead:
            happened.append("dead")
    happened.append("end")
    task.land()

    assert " ".join(happened) == happens


def test_what_is_broken_is_seen() -> None:
    """A campaign has all controls. Each breaks a promise under the same plans, worst of all having no library."""
    campaign = run("memory", 50, SEED, lambda done: None)

    rows = [row for row in campaign.rows if row.system == CONTROL]
    assert [row.store for row in rows] == [f"memory, {flaw}" for flaw in CONTROLS]
    assert all(row.violations for row in rows)
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
