"""A backlog meets a store that is down: what workers log and ask meanwhile, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest

from celery_idempotent.protocol.circuit import FAILURES
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.embedded import EmbeddedRedis
from tests.integration.cluster import IdempotentSetup, on_redis
from tests.integration.idempotent_tasks import charge
from tests.integration.persistence import WITHOUT_A_BREAKER
from tests.support.ledger import Ledger
from tests.support.waiting import wait_until

PROCESSES = 2
BACKLOG = 40
POSTPONEMENTS = 20
"""After the first, each keeps its process for some seconds."""

POSTPONEMENTS_WITHOUT_A_BREAKER = 200

pytestmark = [on_redis, pytest.mark.worker(concurrency=PROCESSES, settings={"worker_prefetch_multiplier": 20})]


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


@dataclass(frozen=True)
class Said:
    """Lines of a worker's log, by what they tell."""

    postponed: int
    opened: int
    closed: int


def _outlived(setup: IdempotentSetup, ledger: Ledger, server: EmbeddedRedis, postponements: int) -> Said:
    """Let a backlog be postponed while the store is down, see all of it done after that, and count."""
    server.kill()
    results = [charge.delay(str(number)) for number in range(BACKLOG)]
    ledger.wait_for("store_unavailable", count=postponements)
    assert not ledger.rows("begin")
    server.revive()
    assert [result.get(timeout=100) for result in results] == [f"{number} by attempt 1" for number in range(BACKLOG)]
    assert len(ledger.rows("begin")) == BACKLOG

    def said() -> Said:
        lines = setup.worker.logs()
        names = ("store_unavailable", "store_circuit_opened", "store_circuit_closed")
        return Said(*(lines.count(f"idempotency.{name} ") for name in names))

    def is_through() -> bool:
        if said().opened == said().closed:
            return True
        for _ in range(2 * PROCESSES):  # a process that gets no more claims has nothing to let through
            charge.delay(str(uuid4()))
        return False

    wait_until(is_through, "who holds claims back lets them through again")
    return said()


def test_a_worker_holds_claims_back_and_says_so_once(
    celery_setup: IdempotentSetup, ledger: Ledger, server: EmbeddedRedis
) -> None:
    """Each process logs a handful of lines; every message is postponed as ever, and runs once."""
    said = _outlived(celery_setup, ledger, server, POSTPONEMENTS)
    assert said.postponed == PROCESSES * (FAILURES - 1)
    assert said.opened == PROCESSES


@pytest.mark.nightly
@pytest.mark.worker(settings={"worker_prefetch_multiplier": 20, **WITHOUT_A_BREAKER})
def test_without_a_breaker_each_postponement_is_asked_for_and_logged(
    celery_setup: IdempotentSetup, ledger: Ledger, server: EmbeddedRedis
) -> None:
    """What the claim above is worth."""
    said = _outlived(celery_setup, ledger, server, POSTPONEMENTS_WITHOUT_A_BREAKER)
    assert said.postponed >= POSTPONEMENTS_WITHOUT_A_BREAKER
    assert said.opened == 0
