"""Hours of a fleet in virtual time: a short form, that it sees, and that it is the same each time."""

import os
import subprocess
import sys

import pytest

from lab.proof.virtual_fleet import FLAWS
from lab.proof.virtual_time import Machine, Process, Thread, World, monotonic, wait

pytestmark = pytest.mark.timeout(300)


def _alone(expression: str, hash_seed: int = 0) -> str:
    """What ``expression`` gives in a process of its own: a world takes over time and threads of the whole process."""
    program = f"from lab.proof.virtual_fleet import FLAWS, Fleet, simulate_flaw; print({expression})"
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, env=environ
    ).stdout.decode()


def test_one_seed_has_one_history_in_which_no_promise_is_broken() -> None:
    """Byte by byte, also where sets have another order."""
    fleet = "(fleet := Fleet(1, workers=4, minutes=3, operations=30).live()).counts['violations'], fleet.history"
    here, there = _alone(fleet, 1), _alone(fleet, 2)
    assert here == there
    assert here.startswith("0 [")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "refuse is forgotten" else [pytest.mark.nightly]) for each in FLAWS]
)
def test_mistake_is_noticed_by_its_check(name: str) -> None:
    """Each check has a mistake that it is for."""
    assert int(_alone(f"simulate_flaw({name!r})['BROKEN {FLAWS[name][0]}']")) > 0


@pytest.mark.parametrize(("counts_suspend", "read"), [(True, 11), (False, 1)])
def test_suspended_machine_stands(counts_suspend: bool, read: float) -> None:
    """Whoever waits on it goes on later, and reads a clock that may have stood, too."""
    world, seen = World(1), list[float]()
    machine = Machine(world, counts_suspend)
    Thread(lambda: (wait(2), seen.extend((world.now, monotonic()))), process=Process(machine)).start()  # type: ignore[func-returns-value]
    world.after(1, lambda: machine.hinder("suspended", 10))
    world.run(60)
    assert seen == pytest.approx([11, read], abs=1e-3)
