"""Processes that cannot start threads.

``python -m tests.processes.at_the_limit STORE``: a delivery of ``first`` comes while no more memory is to be had. Then,
without a limit, comes one of ``second``, whose body lasts until the standard input ends.

``python -m tests.processes.at_the_limit``: the interpreter ends while attempts are renewed, first with threads to be
had and then without.
"""

import atexit
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from celery_idempotent.engine.claim import Claim, claim
from celery_idempotent.engine.delivery import Body, Conflict, ControlFlow, Delivery, Outcome
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.protocol.operation import Run
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from lab.proof.verdicts import CODEC
from tests.support.scene import an_operation
from tests.support.waiting import wait_until

LEASE = 1.5
_STACK = 64 << 20
"""Bytes; so much more than anything else here needs that a limit stops threads alone."""


def deliver(store: Store, key: str, body: Body) -> Outcome | Conflict:
    """One delivery of the operation ``key``."""
    operation = an_operation(key, lease=LEASE, grace=0)
    return Delivery(operation, store, CODEC, heartbeat, ControlFlow(), lambda event: None).run(body)


@contextmanager
def _no_further_memory() -> Iterator[None]:
    (kilobytes,) = re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, (int(kilobytes) * 1024 + _STACK // 2, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _meet_a_memory_limit(url: str) -> None:
    threading.stack_size(_STACK)
    store = open_store(url)
    store.get("first")  # opens what it needs

    def say_that_it_began(attempt: Claim | None) -> str:
        print("began", flush=True)  # noqa: T201
        sys.stdin.read()
        return "done"

    with _no_further_memory():
        try:
            print(deliver(store, "first", lambda attempt: print("ran", flush=True)))  # noqa: T201
        except Exception as error:  # noqa: BLE001 - the reader judges
            print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201
    print(deliver(store, "second", say_that_it_began), flush=True)  # noqa: T201


def _end_while_renewing() -> None:
    store = FaultyStore(MemoryStore())
    store.before_swap = lambda record: time.sleep(0.01)

    def begin_and_stay() -> None:
        for number in range(20):
            heartbeat.start(_attempt(store, f"k{number}"))
        threading.Event().wait()

    def outlive_some_renewals() -> None:
        for stack in (0, 1 << 46):
            threading.stack_size(stack)
            enough = len(store.swaps) + 60
            wait_until(partial(_are_at_least, enough, store.swaps), "all are renewed three times")

    threading.Thread(target=begin_and_stay, daemon=True).start()
    atexit.register(outlive_some_renewals)


def _are_at_least(number: int, swaps: list[Record]) -> bool:
    return len(swaps) >= number


def _attempt(store: Store, key: str) -> Claim:
    asked_at = time.monotonic()
    run = claim(store, an_operation(key, lease=0.5, grace=0))
    assert isinstance(run, Run)
    return Claim(store, run.record, lease=500, retain=1_000, claimed_at=asked_at)


if __name__ == "__main__":
    _meet_a_memory_limit(sys.argv[1]) if sys.argv[1:] else _end_while_renewing()
