"""Hours of a fleet in virtual time: a short form, that it sees, and that it is the same each time."""

import subprocess
import sys

import pytest

from lab.proof.simulation import FLAWS, Fleet, flawed
from lab.proof.virtual import Machine, Process, Thread, World, monotonic, wait

SEEN = {40: "a worker that is stopped at once holds no message"}
"""Seeds of small fleets in which something was found, with what it was."""

_PRINT = "from lab.proof.simulation import Fleet; print(*Fleet(1, workers=4, minutes=3, operations=20).run().history)"


@pytest.mark.parametrize(
    ("seed", "operations"), [(1, 40), *(pytest.param(each, 150, marks=pytest.mark.nightly) for each in SEEN)]
)
def test_no_promise_is_broken(seed: int, operations: int) -> None:
    """Every operation has its end, no living body is taken over, and no message is lost from sight."""
    size = {"workers": 8, "minutes": 20} if seed in SEEN else {"workers": 5, "minutes": 5}
    fleet = Fleet(seed, operations=operations, **size).run()
    assert fleet.problems == []
    assert fleet.counts["tasks"] == operations <= fleet.counts["deliveries"]


def test_one_seed_has_one_history() -> None:
    """Byte by byte, also in another process, where sets have another order."""
    here = Fleet(1, workers=4, minutes=3, operations=20).run().history
    there = subprocess.run([sys.executable, "-c", _PRINT], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert there.strip() == " ".join(here)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "leases are ignored" else [pytest.mark.nightly]) for each in FLAWS]
)
def test_mistake_is_noticed_by_its_check(name: str) -> None:
    """Each check has a mistake that only it is for."""
    assert FLAWS[name][0] in flawed(name)[1]


@pytest.mark.parametrize(("counts_suspend", "read"), [(True, 11), (False, 1)])
def test_suspended_machine_stands(counts_suspend: bool, read: float) -> None:
    """Whoever waits on it goes on later, and reads a clock that may have stood, too."""
    world, seen = World(1), list[float]()
    machine = Machine(world, counts_suspend)

    def look() -> None:
        wait(2)
        seen.extend((world.now, monotonic()))

    Thread(look, process=Process(machine)).start()
    world.after(1, lambda: machine.hinder("suspended", 10))
    world.run(60)
    assert seen == pytest.approx([11, read], abs=1e-3)
