"""Hours of a fleet in virtual time: a short form, that it sees, and that it is the same each time."""

import subprocess
import sys

import pytest

from lab.proof.virtual_fleet import FLAWS, Fleet, simulate_flaw
from lab.proof.virtual_time import Machine, Process, Thread, World, monotonic, wait

pytestmark = pytest.mark.timeout(300)

_SMALL = {"workers": 4, "minutes": 3, "operations": 30}
_PRINT = f"from lab.proof.virtual_fleet import Fleet; print(*Fleet(1, **{_SMALL}).live().history)"


def test_one_seed_has_one_history_in_which_no_promise_is_broken() -> None:
    """Byte by byte, also in another process, where sets have another order."""
    fleet = Fleet(1, **_SMALL).live()
    there = subprocess.run([sys.executable, "-c", _PRINT], stdout=subprocess.PIPE, check=True, text=True).stdout
    assert (there.strip(), fleet.counts["violations"]) == (" ".join(fleet.history), 0)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "refuse is forgotten" else [pytest.mark.nightly]) for each in FLAWS]
)
def test_mistake_is_noticed_by_its_check(name: str) -> None:
    """Each check has a mistake that it is for."""
    assert simulate_flaw(name)[f"BROKEN {FLAWS[name][0]}"]


@pytest.mark.parametrize(("counts_suspend", "read"), [(True, 11), (False, 1)])
def test_suspended_machine_stands(counts_suspend: bool, read: float) -> None:
    """Whoever waits on it goes on later, and reads a clock that may have stood, too."""
    world, seen = World(1), list[float]()
    machine = Machine(world, counts_suspend)
    Thread(lambda: (wait(2), seen.extend((world.now, monotonic()))), process=Process(machine)).start()  # type: ignore[func-returns-value]
    world.after(1, lambda: machine.hinder("suspended", 10))
    world.run(60)
    assert seen == pytest.approx([11, read], abs=1e-3)
