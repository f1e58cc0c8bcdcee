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


KINDS = {Kind.PLAIN: ("-", 0), Kind.ONCE: ("qo_*", -TASKS), Kind.SINGLETON: ("SINGLETONLOCK_*", -TASKS)}


@pytest.mark.parametrize("kind", Kind)
def test_worker_waits_for_its_turn_executes_everything_and_uses_its_store(
    kind: Kind, redis_server: EmbeddedRedis
) -> None:
    """Each task once when it is the worker's turn. Locks are there while tasks are queued and gone afterwards; records
    come when they are executed, and stay."""
    pattern, change = KINDS.get(kind, ("celery-idempotent:*", TASKS))
    url = redis_server.url
    with (
        redis.Redis(port=redis_server.port) as client,
        standing_by({"it": Setup(kind, url, "" if kind is Kind.PLAIN else url)}) as workers,
    ):
        before = len(client.keys(pattern))
        workers["it"].publish(TASKS)
        queued, published_at = len(client.keys(pattern)), time.monotonic_ns()
        rate = workers["it"].execute()
        ends = workers["it"].wait()
        assert (queued - before, len(client.keys(pattern)) - queued) == (max(-change, 0), change)
        assert (len(ends), ends) == (TASKS, sorted(ends))
        assert ends[0] > published_at
        assert rate.per_second == pytest.approx((TASKS - 1) / ((ends[-1] - ends[0]) / 1e9))
        assert rate.cpu_us > 0
        assert workers["it"].publish_and_execute(TASKS) > 0
