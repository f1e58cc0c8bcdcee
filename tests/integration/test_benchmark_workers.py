"""The workers of the benchmarks execute what they are given, when it is their turn."""

from __future__ import annotations

import time

import pytest
import redis

from lab.benchmarks.worker_app import Kind, Setup
from lab.benchmarks.workers import standing_by
from lab.embedded import EmbeddedRedis

pytestmark = pytest.mark.worker

TASKS = 20


@pytest.mark.parametrize("kind", Kind)
def test_worker_waits_for_its_turn_and_executes_everything(kind: Kind, redis_server: EmbeddedRedis) -> None:
    """Nothing is executed while tasks are published, and each of them once when it is the worker's turn."""
    setup = Setup(kind, redis_server.url, "" if kind is Kind.PLAIN else redis_server.url)
    with standing_by({"it": setup}) as workers:
        workers["it"].publish(TASKS)
        published_at = time.monotonic_ns()
        rate = workers["it"].execute()
        ends = workers["it"].wait()
        assert len(ends) == TASKS
        assert ends == sorted(ends)
        assert ends[0] > published_at
        assert rate.per_second == pytest.approx((TASKS - 1) / ((ends[-1] - ends[0]) / 1e9))
        assert rate.cpu_us > 0
        assert workers["it"].publish_and_execute(TASKS) > 0


@pytest.mark.parametrize(("kind", "left"), [(Kind.ONCE, 0), (Kind.SINGLETON, 0), (Kind.IDEMPOTENT, TASKS)])
def test_every_kind_uses_its_store(kind: Kind, left: int, redis_server: EmbeddedRedis) -> None:
    """Locks are there while tasks are queued and gone afterwards; records come when they are executed and stay."""
    prefixes = {Kind.ONCE: "qo_*", Kind.SINGLETON: "SINGLETONLOCK_*", Kind.IDEMPOTENT: "celery-idempotent:*"}
    with (
        redis.Redis(port=redis_server.port) as client,
        standing_by({"it": Setup(kind, redis_server.url, redis_server.url)}) as workers,
    ):
        before = len(client.keys(prefixes[kind]))
        workers["it"].publish(TASKS)
        assert len(client.keys(prefixes[kind])) - before == TASKS - left
        workers["it"].execute()
        assert len(client.keys(prefixes[kind])) - before == left
