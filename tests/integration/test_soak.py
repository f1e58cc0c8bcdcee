"""A short soak: real workers, killed, stopped, cut off and with wrong clocks, break no promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof import soak
from tests.integration.test_demo import MARK, processes
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.worker,
    # The fire lasts 40 s; a claim made under a clock that is minutes ahead holds others off that long.
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found through /proc"),
]


def test_workers_under_fire_break_no_promise_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation ends as promised, whatever struck while it ran."""
    monkeypatch.setenv(MARK, str(tmp_path))
    told: list[str] = []
    rows = soak.run(40 / 60, 7, told.append, tmp_path / "soak")
    broken = [line for line in told if line.startswith("BROKEN")]
    assert not broken
    assert not any(row.violations or row.stuck or row.unexplained for row in rows)
    assert {row.promise for row in rows} == {"exactly once", "at least once", "at most once"}
    assert all(row.tasks >= 40 and row.faulted for row in rows), "a fire that hits nobody proves nothing"
    wait_until(lambda: not processes(tmp_path), "all processes end")
