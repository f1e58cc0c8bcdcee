"""A child that is forked relies on nothing of its parent's threads: they are not there, and what they held may be."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import setitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.engine.transaction import sent
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.broker import holding
from celery_idempotent.integration.broker.holding import HeldMessages
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.messages.outbox import backlog
from celery_idempotent.protocol.circuit import FAILURES
from celery_idempotent.protocol.operation import Run
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from tests.support.deliveries import an_app
from tests.support.scene import an_operation
from tests.support.waiting import wait_until

LEASE = 300


@pytest.fixture(autouse=True)
def _forks_with_threads() -> Iterator[None]:
    """Python 3.12 and later warn of them; they are what this is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _attempt(store: MemoryStore, key: str, lease: int) -> Claim:
    claimed_at = time.monotonic()
    decision = claim(store, an_operation(key))
    assert isinstance(decision, Run)
    # Shorter than any policy may have it: the test waits for renewals.
    brief = replace(decision.record, lease_until=store.now() + lease, revision=new_nonce())
    assert store.swap(brief, decision.record.revision) == brief
    return Claim(store, brief, lease=lease, retain=60_000, claimed_at=claimed_at)


def _lease(store: MemoryStore, key: str) -> int:
    record = store.get(key)
    assert record is not None
    return record.lease_until


def test_child_has_a_heartbeat_of_its_own() -> None:
    """After a fork the process's heartbeat is new: no thread, no beats, no lock held in the copy."""
    store = MemoryStore()
    attempt = _attempt(store, "k", lease=60_000)
    heartbeat.start(attempt)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            first = _lease(store, "k")
            short = _attempt(store, "child", LEASE)
            heartbeat.start(short)
            begun = _lease(store, "child")
            wait_until(lambda: _lease(store, "child") > begun, "the child's own attempt was renewed")
            status = 0 if attempt not in heartbeat._beats and _lease(store, "k") == first else 2
        finally:
            os._exit(status)
    heartbeat.stop(attempt)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_child_asks_a_store_that_its_parent_holds_claims_back_from() -> None:
    """Its connections are its own, and nobody in it would ever release a lock that was held when it was forked."""

    def unavailable() -> None:
        raise StoreUnavailable("memory", "swap", "down")

    breaker = Breaker("memory://")
    for number in range(FAILURES):
        with suppress(StoreUnavailable):
            breaker.ask(str(number), unavailable)
    assert breaker.is_open
    with breaker._changing:
        pid = os.fork()
        if pid == 0:
            asked = threading.Event()
            threading.Thread(target=breaker.ask, args=("k", asked.set), daemon=True).start()
            os._exit(0 if asked.wait(30) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_pool_process_measures_nothing_of_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held messages and the outbox are the main process's; told by each child, they would be counted often."""
    messages = HeldMessages(cast(Any, SimpleNamespace(queues=())), everything=True)
    monkeypatch.setattr(backlog, "is_watched", True)
    backlog.look(lambda limit: [], lambda: 0)
    holding._holdings.add(messages)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if (holding.held(), backlog.messages, backlog.age) == (None, None, None) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (holding.held(), backlog.messages, backlog.age) == (0, 0, 0.0)
    holding._holdings.discard(messages)
    backlog.forget()


def test_main_process_sees_that_a_pool_process_has_sent_a_message() -> None:
    """The relay is in the one, and bodies are in the other."""
    sent[0] = 0
    assert _ends_in_child(partial(setitem, sent, 0, 1))
    assert sent[0]
    sent[0] = 0


def test_no_process_is_forked_in_the_middle_of_a_relays_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork waits for the look, and only then the store closes what a child must not inherit.

    A child would otherwise wait for ever for locks that the relay's thread had held, and SQLite would lose writes.
    """
    looking, go_on, order = threading.Event(), threading.Event(), []
    store, app = SQLStore(f"sqlite:///{tmp_path}/records.sqlite"), an_app()
    store.provision()
    app.conf.update(idempotency_store=store, idempotency_relay=60)

    def look(app: object) -> int:
        looking.set()
        go_on.wait(30)
        order.append("looked")
        return 0

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        order.append("forked")
        os.waitpid(child, 0)

    monkeypatch.setattr(outbox, "relay", look)
    monkeypatch.setattr(store, "_leave_file", lambda: order.append("closed"))
    step = outbox.Relay(SimpleNamespace(app=app, steps=[]))
    step.start(SimpleNamespace(app=app))
    assert looking.wait(30)
    forking = threading.Thread(target=fork)
    forking.start()
    forking.join(0.2)  # far longer than a fork that does not wait
    go_on.set()
    forking.join(30)
    step.stop(SimpleNamespace(app=app))
    store.close()

    assert order == ["looked", "closed", "forked"]


class _Held(list[Mapping[str, object]]):
    """Writes that a store takes only once they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.taking, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        self.taking.set()
        self.go_on.wait(30)
        return super().__iter__()


def _ends_in_child(act: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        threading.Timer(10, os._exit, [1]).start()
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_child_does_not_wait_for_the_memory_store_of_its_parent() -> None:
    """A thread of the parent's is in the middle of a write when the process forks, and is not there in the child."""
    store, writes = MemoryStore(), _Held()
    decision = claim(store, an_operation("k"))
    assert isinstance(decision, Run)
    again = replace(decision.record, revision=new_nonce())
    writing = threading.Thread(target=store.swap_with, args=(again, decision.record.revision, writes))
    writing.start()
    assert writes.taking.wait(30)

    ended = _ends_in_child(lambda: store.get("k"))
    writes.go_on.set()
    writing.join(30)

    assert ended
