"""Processes that cannot start threads, for want of memory or at their end."""

import subprocess
import sys
from pathlib import Path

from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.stores import open_store
from tests.processes.at_the_limit import LEASE, deliver

PROGRAM = [sys.executable, "-m", "tests.processes.at_the_limit"]


def test_one_thread_that_cannot_start_leaves_no_later_body_without_renewals(tmp_path: Path) -> None:
    """Memory ends at the first thread; a later body of three leases and its duplicates still have one effect."""
    url = f"sqlite:///{tmp_path / 'records.sqlite3'}"
    store = open_store(url)
    store.provision()
    bodies: list[str] = []

    def duplicate(attempt: Claim | None) -> str:
        bodies.append("duplicate")
        return "done again"

    with subprocess.Popen([*PROGRAM, url], stdin=-1, stdout=-1, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        told = worker.stdout.readline()
        assert worker.stdout.readline() == "began\n"
        until, answers = store.now() + 3_000 * LEASE, []
        while store.now() < until:
            answers.append(deliver(store, "second", duplicate))
        worker.stdin.close()
        assert worker.stdout.read() == "Outcome(value='done')\n"

    assert not bodies
    assert {type(answer) for answer in answers} == {Conflict}
    assert deliver(store, "second", duplicate) == Outcome("done")
    assert told.startswith("StoreUnavailable: sqlite:///"), told
    assert "no thread can be started to renew the lease: can't start new thread" in told
    store.close()


def test_the_end_of_the_interpreter_is_quiet() -> None:
    """Renewals are under way and threads are refused: a line for each that is renewed late, and no traceback."""
    ended = subprocess.run(PROGRAM, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert lines
    assert all(line.startswith("event=idempotency.renewal_delayed key=k") for line in lines), ended.stderr
    assert len(lines) < 200
