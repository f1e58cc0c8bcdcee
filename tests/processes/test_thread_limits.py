"""Processes that cannot start threads, for want of memory or at their end; this module is their program as well."""

import atexit
import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from celery_idempotent.engine.claim import Claim, claim
from celery_idempotent.engine.delivery import Body, Conflict, ControlFlow, Delivery, Outcome
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.protocol.operation import Run
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from lab.proof.verdicts import CODEC
from tests.support.scene import an_operation
from tests.support.waiting import wait_until

PROGRAM = [sys.executable, "-m", "tests.processes.test_thread_limits"]
LEASE = 1.5
_STACK = 64 << 20
"""Bytes; so much more than anything else here needs that a limit stops threads alone."""


def deliver(store: Store, key: str, body: Body) -> Outcome | Conflict:
    """One delivery of the operation ``key``."""
    operation = an_operation(key, lease=LEASE, grace=0)
    return Delivery(operation, store, CODEC, heartbeat, ControlFlow(), lambda event: None).run(body)


def meet_a_memory_limit(url: str) -> None:
    """Be delivered ``first`` without memory, and then without a limit ``second``, until the standard input ends."""
    threading.stack_size(_STACK)
    store = open_store(url)
    store.get("first")  # opens what it needs

    def say_that_it_began(attempt: Claim | None) -> str:
        print("began", flush=True)  # noqa: T201
        sys.stdin.read()
        return "done"

    (kilobytes,) = re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, (int(kilobytes) * 1024 + _STACK // 2, resource.RLIM_INFINITY))
    try:
        print(deliver(store, "first", lambda attempt: print("ran", flush=True)))  # noqa: T201
    except Exception as error:  # noqa: BLE001 - the reader judges
        print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(deliver(store, "second", say_that_it_began), flush=True)  # noqa: T201


def end_while_renewing() -> None:
    """End the interpreter while attempts are renewed, first with threads to be had and then without."""
    store = FaultyStore(MemoryStore())
    store.before_swap = lambda record: time.sleep(0.01)

    def begin_and_stay() -> None:
        for number in range(20):
            asked_at = time.monotonic()
            run = claim(store, an_operation(f"k{number}", lease=0.5, grace=0))
            assert isinstance(run, Run)
            heartbeat.start(Claim(store, run.record, lease=500, retain=1_000, claimed_at=asked_at))
        threading.Event().wait()

    def outlive_some_renewals() -> None:
        for stack in (0, 1 << 46):
            threading.stack_size(stack)
            before = len(store.swaps)
            wait_until(lambda before=before: len(store.swaps) >= before + 60, "all are renewed three times")  # type: ignore[misc]

    threading.Thread(target=begin_and_stay, daemon=True).start()
    atexit.register(outlive_some_renewals)


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

    assert {type(answer) for answer in answers} == {Conflict}
    assert (deliver(store, "second", duplicate), bodies) == (Outcome("done"), [])
    assert told.startswith("StoreUnavailable: sqlite:///"), told
    assert "no thread can be started to renew the lease: can't start new thread" in told
    store.close()


def test_the_end_of_the_interpreter_is_quiet() -> None:
    """Renewals are under way and threads are refused: a line for each that is renewed late, and no traceback."""
    ended = subprocess.run(PROGRAM, capture_output=True, text=True, check=False)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert all(line.startswith("event=idempotency.renewal_delayed key=k") for line in lines), ended.stderr
    assert 0 < len(lines) < 200


if __name__ == "__main__":
    meet_a_memory_limit(sys.argv[1]) if sys.argv[1:] else end_while_renewing()
