"""A short soak: real workers, killed, stopped, cut off and with wrong clocks, break no promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.fleet import Freezer
from lab.proof import soak, table
from lab.tether import ROOT
from tests.support.processes import MARK, processes
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.worker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]


@pytest.mark.parametrize(
    ("store", "broker", "seconds", "seed", "operations"),
    [("dynamodb", "sqs", 40, 7, 40), ("redis", "redis", 30, 39, 30), ("dynamodb", "rabbitmq", 20, 7, 20)],
)
@pytest.mark.nightly
def test_workers_under_fire_break_no_promise_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, broker: str, seconds: float, seed: int, operations: int
) -> None:
    """Every operation ends as promised, whatever struck while it ran; a store that can is killed and restarted."""
    monkeypatch.setenv(MARK, str(tmp_path))
    told: list[str] = []
    rows = soak.run(seconds / 60, seed, told.append, tmp_path / "soak", store, broker)
    assert not [line for line in told if line.startswith("BROKEN")]
    *ours, control = rows
    assert not any(row.violations or row.stuck or row.unexplained for row in ours)
    assert {row.promise for row in ours} == {"exactly once", "at least once", "at most once"}
    assert all(row.tasks >= operations and row.faulted for row in ours), "a fire that hits nobody proves nothing"
    assert ours[0].faults.get(soak.Kind.KILL_STORE, 0) >= (2 if store == "redis" else 0)
    assert (control.system, control.violations > 0) == (table.PLAIN, True)
    table.keep("soak", tmp_path / "reliability", rows=rows)
    wait_until(lambda: not processes(tmp_path), "all processes end")


def test_what_is_frozen_stands_still_and_goes_on_by_itself() -> None:
    """A nemesis that does nothing would make every zero in the table worthless."""
    freezer = Freezer()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as cat:

        def stands_still() -> bool:
            return Path(f"/proc/{cat.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

        freezer.freeze(1, cat.pid)
        wait_until(stands_still, "it stands still")
        wait_until(lambda: not stands_still(), "it goes on")
        freezer.freeze(600, -cat.pid)
        wait_until(stands_still, "its group stands still")
        freezer.thaw()
        wait_until(lambda: not stands_still(), "it goes on when it is told")


@pytest.mark.nightly
def test_a_soak_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """Not even one that a nemesis has just stopped: its timer wakes it up, and it finds its parent gone."""
    run = f"from pathlib import Path; from lab.proof import soak; soak.run(1, 7, print, Path({str(tmp_path)!r}))"
    ledger, environ = tmp_path / "ledger.jsonl", {**os.environ, MARK: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.DEVNULL, cwd=ROOT, env=environ) as process:
        try:
            wait_until(lambda: ledger.exists() and "delivery" in ledger.read_text(), "a delivery", timeout=120)
        finally:
            process.kill()
    wait_until(lambda: not processes(tmp_path), "all processes end")
