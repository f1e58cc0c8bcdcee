"""Faults at every write: a short form of the campaign, and proof that it can see."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_record
from lab.proof.campaign import attack
from lab.proof.course import PUBLISHER, Dead, Fault, OneDelivery, Plan, Purpose, Strike, Task, at_random
from lab.proof.flaws import CONTROLS, FLAWS
from lab.proof.targets import ALL
from lab.proof.verdicts import PROMISES
from tests.support.stores import a_store

pytestmark = pytest.mark.timeout(300)

SEED = 5


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "redis" else [pytest.mark.nightly]) for each in ALL]
)
def test_no_fault_at_any_write_breaks_a_promise(name: str) -> None:
    """Whichever store is struck, with two attackers on one server, together as many operations as were asked for."""
    with a_store(name) as url:
        found = attack(name, url, faulted=150, seed=SEED, processes=2)
    assert found.problems == []
    assert sum(row.faulted for row in found.rows) == 150
    assert {row.violations + row.stuck + row.unexplained for row in found.rows} == {0}


def test_every_write_and_every_fault_is_met() -> None:
    """Nothing that could be struck is left out, and nothing that strikes; each pair is met by a longer run."""
    found = attack("memory", "", faulted=500, seed=SEED)
    pairs = [each.split(" at ", 1) for each in found.reached]
    assert ({fault for fault, _ in pairs}, {operation for _, operation in pairs}) == (set(Fault), set(Purpose))
    assert found.problems == []


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
    store = Mock(swap=lambda new, expected: happened.append(new.key))
    strikes = () if fault is None else (Strike(Purpose.ANNOUNCEMENT, fault),)
    task = Task(store, Plan(promise=PROMISES["exactly once"], strikes=strikes))
    sender = OneDelivery(task, PUBLISHER)
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


@pytest.mark.parametrize("flaw", CONTROLS)
def test_what_is_broken_is_seen_and_found_again_by_its_number(flaw: str) -> None:
    """Each control breaks a promise; a plan follows from store, seed and number, so it breaks alone, too."""

    def problems(flaw: str, number: int) -> int:
        return len(Task(FLAWS[flaw](MemoryStore()), at_random("memory", SEED, number)).attack().problems)

    broken, seen = next((number, seen) for number in range(400) if (seen := problems(flaw, number)))
    assert (problems(flaw, broken), problems("none", broken)) == (seen, 0)


def test_a_takeover_while_a_lease_runs_is_seen() -> None:
    """Also where nothing else comes of it, or something struck that would explain a repetition."""
    broken = FLAWS["takes over at once"]
    plans = (at_random("memory", SEED, number) for number in range(40))
    seen = [problem for plan in plans for problem in Task(broken(MemoryStore()), plan).attack().problems]
    assert any("took over while a lease ran" in each for each in seen)
