"""A short soak: real workers, killed, stopped, cut off and with wrong clocks, break no promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.fleet import Freezer
from lab.proof import soak, table
from lab.tether import ROOT
from tests.integration.test_demo import MARK, processes
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.worker,
    # The fire lasts 40 s; a claim made under a clock that is minutes ahead holds others off that long.
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]


@pytest.mark.parametrize(
    ("store", "broker", "seconds", "seed", "operations"),
    [("dynamodb", "sqs", 40, 7, 40), ("redis", "sqs", 20, 36, 20), ("dynamodb", "rabbitmq", 20, 7, 20)],
    ids=["dynamodb", "redis", "rabbitmq"],
)
def test_workers_under_fire_break_no_promise_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, broker: str, seconds: float, seed: int, operations: int
) -> None:
    """Every operation ends as promised, whatever struck while it ran; a store that can is killed and restarted."""
    monkeypatch.setenv(MARK, str(tmp_path))
    told: list[str] = []
    rows = soak.run(seconds / 60, seed, told.append, tmp_path / "soak", store, broker)
    broken = [line for line in told if line.startswith("BROKEN")]
    assert not broken
    assert not any(row.violations or row.stuck or row.unexplained for row in rows)
    assert {row.promise for row in rows} == {"exactly once", "at least once", "at most once"}
    assert all(row.tasks >= operations and row.faulted for row in rows), "a fire that hits nobody proves nothing"
    assert rows[0].faults.get(soak.Kind.KILL_STORE, 0) >= (2 if store == "redis" else 0)
    table.save("soak", rows, tmp_path / "reliability")
    assert table.read(tmp_path / "reliability") == rows
    wait_until(lambda: not processes(tmp_path), "all processes end")


@pytest.mark.parametrize("sign", [1, -1], ids=["process", "group"])
def test_what_is_frozen_stands_still_and_goes_on_by_itself(sign: int) -> None:
    """A nemesis that does nothing would make every zero in the table worthless."""
    freezer = Freezer()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as cat:
        freezer.freeze(1, sign * cat.pid)
        wait_until(lambda: _state(cat) == "T", "it stands still")
        wait_until(lambda: _state(cat) != "T", "it goes on")
        freezer.freeze(600, sign * cat.pid)
        wait_until(lambda: _state(cat) == "T", "it stands still again")
        freezer.thaw()
        wait_until(lambda: _state(cat) != "T", "it goes on when it is told")


def _state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_soak_that_is_interrupted_leaves_no_process(tmp_path: Path, how: signal.Signals) -> None:
    """Not even one that a nemesis has just stopped: its timer wakes it up, and it finds its parent gone."""
    # A shell starts background jobs, such as this whole test run may be one, with SIGINT ignored.
    obey = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    call = (
        f"{obey}; from pathlib import Path; from lab.proof import soak; soak.run(1, 7, print, Path({str(tmp_path)!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", call], stdout=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, MARK: str(tmp_path)}
    )
    try:
        wait_until(lambda: _began(tmp_path / "ledger.jsonl"), "a delivery", timeout=120)
        process.send_signal(how)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not processes(tmp_path), "all processes end")


def _began(ledger: Path) -> bool:
    return ledger.exists() and "delivery" in ledger.read_text()
