"""A child that is forked relies on nothing of its parent's threads: they are not there, and what they held may be."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import Engine, create_engine

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
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from tests.support.deliveries import an_app
from tests.support.processes import complete_in_a_child_after
from tests.support.scene import an_operation
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _forks_with_threads() -> Iterator[None]:
    """Python 3.12 and later warn of them; they are what this is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _holds_in_child(act: Callable[[], object]) -> bool:
    """Whether ``act`` ends in a forked child, and is true there."""
    child = os.fork()
    if child == 0:
        threading.Timer(30, os._exit, [1]).start()
        status = 1
        try:
            status = 0 if act() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _claimed(store: MemoryStore, key: str = "k") -> Record:
    decision = claim(store, an_operation(key))
    assert isinstance(decision, Run)
    return decision.record


def _beating(store: MemoryStore, key: str, lease: int) -> tuple[Claim, Callable[[], int]]:
    """An attempt that is renewed, whose lease may be shorter than any policy may have it; and how to read the lease."""
    claimed_at, record = time.monotonic(), _claimed(store, key)
    brief = replace(record, lease_until=store.now() + lease, revision=new_nonce())
    store.swap(brief, record.revision)
    attempt = Claim(store, brief, lease=lease, retain=60_000, claimed_at=claimed_at)
    heartbeat.start(attempt)
    return attempt, lambda: cast(Record, store.get(key)).lease_until


def test_child_has_a_heartbeat_of_its_own() -> None:
    """After a fork the process's heartbeat is new: no thread, no beats, no lock held in the copy."""
    store = MemoryStore()
    attempt, lease = _beating(store, "k", 60_000)
    first = lease()

    def beats() -> bool:
        _, own = _beating(store, "child", 300)
        begun = own()
        wait_until(lambda: own() > begun, "the child's own attempt was renewed")
        return attempt not in heartbeat._beats and lease() == first

    assert _holds_in_child(beats)
    heartbeat.stop(attempt)


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
        assert _holds_in_child(lambda: breaker.ask("k", lambda: True))


def test_pool_process_measures_nothing_of_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held messages and the outbox are the main process's; told by each child, they would be counted often."""

    def measured() -> tuple[Any, ...]:
        return holding.held(), backlog.messages, backlog.age

    messages = HeldMessages(cast(Any, SimpleNamespace(queues=())), everything=True)
    monkeypatch.setattr(backlog, "is_watched", True)
    backlog.look(lambda limit: [], lambda: 0)
    holding._holdings.add(messages)
    assert _holds_in_child(lambda: measured() == (None, None, None))
    assert measured() == (0, 0, 0.0)
    holding._holdings.discard(messages)
    backlog.forget()


def test_main_process_sees_that_a_pool_process_has_sent_a_message() -> None:
    """The relay is in the one, and bodies are in the other."""

    def send() -> bool:
        sent[0] = 1
        return True

    sent[0] = 0
    assert _holds_in_child(send)
    assert sent[0]
    sent[0] = 0


def test_no_process_is_forked_in_the_middle_of_a_relays_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its store is closed: a child would inherit locks for ever, and SQLite would lose writes."""
    looking, go_on, order = threading.Event(), threading.Event(), []
    store, app = SQLStore(f"sqlite:///{tmp_path}/records.sqlite"), an_app(idempotency_relay=60)
    store.provision()
    app.conf.idempotency_store = store

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


def test_child_does_not_wait_for_the_memory_store_of_its_parent() -> None:
    """A thread of the parent's is in the middle of a write when the process forks, and is not there in the child."""
    store, taking, go_on = MemoryStore(), threading.Event(), threading.Event()
    record = _claimed(store)
    again = replace(record, revision=new_nonce())

    def writes() -> Iterator[Any]:
        taking.set()
        go_on.wait(30)
        yield from ()

    writing = threading.Thread(target=store.swap_with, args=(again, record.revision, writes()))
    writing.start()
    assert taking.wait(30)
    assert _holds_in_child(lambda: store.get("k") or True)
    go_on.set()
    writing.join(30)


@pytest.mark.parametrize("make", [str, create_engine], ids=["url", "engine"])
def test_child_loses_nothing_when_its_parent_closes_sqlite(make: Callable[[str], Any], tmp_path: Path) -> None:
    """A pool process completes after its parent, which checked the store at start, has closed its connection.

    SQLite keeps its locks by process, and notes in memory which of them its process has. A fork copies the notes and
    not the locks: a connection that a child opens then relies on locks that only its parent has, and when the parent
    closes its own connection it believes to be the last one, and deletes the log that the child goes on writing to.
    """
    given = make(f"sqlite:///{tmp_path / 'records.sqlite3'}")
    store, unused = SQLStore(given), SQLStore(f"sqlite:///{tmp_path / 'unused.sqlite3'}")
    store.provision()

    def close() -> None:
        store.close()
        if isinstance(given, Engine):
            given.dispose()

    complete_in_a_child_after(close, store)
    assert not (tmp_path / "unused.sqlite3").exists(), f"{unused} was not to be opened by a fork"
    close()
