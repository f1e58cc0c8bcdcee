"""The workers of the benchmarks execute what they are given, when it is their turn."""

import time

import pytest

from lab.benchmarks.worker_app import Kind, Setup
from lab.benchmarks.workers import standing_by
from lab.embedded import EmbeddedRedis

pytestmark = pytest.mark.worker

TASKS = 20


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each is Kind.IDEMPOTENT else pytest.mark.nightly) for each in Kind]
)
def test_worker_waits_for_its_turn_and_executes_everything(kind: Kind, redis_server: EmbeddedRedis) -> None:
    """Each task once, when it is the worker's turn; its rate is that of the ends it has noted."""
    url = redis_server.url
    with standing_by({"it": Setup(kind, url, "" if kind is Kind.PLAIN else url)}) as workers:
        workers["it"].publish(TASKS)
        published_at = time.monotonic_ns()
        rate = workers["it"].execute()
        ends = workers["it"].wait()
        assert (len(ends), ends) == (TASKS, sorted(ends))
        assert ends[0] > published_at
        assert rate.per_second == pytest.approx((TASKS - 1) / ((ends[-1] - ends[0]) / 1e9))
        assert rate.cpu_us > 0
        assert workers["it"].publish_and_execute(TASKS) > 0
