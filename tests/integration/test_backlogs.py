"""A backlog meets a store that is down: what workers log and ask meanwhile, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from celery_idempotent.protocol.circuit import FAILURES
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.embedded import EmbeddedRedis
from tests.integration.cluster import IdempotentSetup, on_redis
from tests.integration.idempotent_tasks import charge
from tests.support.ledger import Ledger
from tests.support.waiting import wait_until

PROCESSES = 2
BACKLOG = 40
POSTPONEMENTS = 20
"""After the first, each keeps its process for some seconds."""


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A Redis of its own, to be stopped; the broker and the ledger are on another."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def store_url(server: EmbeddedRedis) -> Callable[[str], str]:
    """The store is that one."""
    return lambda address: server.url


@pytest.fixture
def store(server: EmbeddedRedis) -> Iterator[Store]:
    """As the workers have it."""
    store = open_store(server.url)
    yield store
    store.close()


@on_redis
@pytest.mark.worker(concurrency=PROCESSES, settings={"worker_prefetch_multiplier": 20})
def test_a_worker_holds_claims_back_and_says_so_once(
    celery_setup: IdempotentSetup, ledger: Ledger, server: EmbeddedRedis
) -> None:
    """Each process logs a handful of lines; every message is postponed as ever, and runs once."""
    server.kill()
    results = [charge.delay(str(number)) for number in range(BACKLOG)]
    ledger.wait_for("store_unavailable", count=POSTPONEMENTS)
    assert not ledger.rows("begin")
    server.revive()
    assert [result.get(timeout=100) for result in results] == [f"{number} by attempt 1" for number in range(BACKLOG)]
    assert len(ledger.rows("begin")) == BACKLOG

    def said(name: str) -> int:
        return int(celery_setup.worker.logs().count(f"idempotency.{name} "))

    def is_through() -> bool:
        if said("store_circuit_opened") == said("store_circuit_closed"):
            return True
        for _ in range(2 * PROCESSES):  # a process that gets no more claims has nothing to let through
            charge.delay(str(uuid4()))
        return False

    wait_until(is_through, "who holds claims back lets them through again")
    assert said("store_unavailable") == PROCESSES * (FAILURES - 1)
    assert said("store_circuit_opened") == PROCESSES
