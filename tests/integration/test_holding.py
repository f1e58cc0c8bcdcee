"""While a worker lives, nobody else gets a message that it holds; when it dies, somebody does, and soon."""

import time
from collections.abc import Callable
from contextlib import suppress
from operator import gt
from typing import Any

import pytest
from celery import VERSION as CELERY
from redis import Redis

from lab.proxy import aws_operations
from tests.integration.cluster import POOLS, AwsContainer, Cluster, SqsBroker, Worker, WorkerOptions, on
from tests.integration.idempotent_tasks import charge, charge_and_wait_for_long
from tests.support.ledger import Ledger
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import wait_until

VISIBILITY = 4
OUTLIVED = 2.5 * VISIBILITY
"""Seconds; a body of that length is delivered again twice by a broker that nobody tells."""

pytestmark = [
    pytest.mark.worker(concurrency=1, visibility_timeout=VISIBILITY, settings={"worker_prefetch_multiplier": 4}),
    pytest.mark.usefixtures("celery_setup"),
]


def deliveries(cluster: Cluster, task_id: str) -> int:
    """How often the message was delivered to any of the workers."""
    return sum(worker.logs().count(f"[{task_id}] received") for worker in cluster)


def outlast(began: float, still: Callable[[], bool]) -> None:
    """Let a body take its time, and see all the while that something is still so."""
    while time.monotonic() < began + OUTLIVED:
        assert still()
        time.sleep(0.2)


def holds_a_long_body(cluster: Cluster, ledger: Ledger) -> None:
    """An idle worker beside the one that runs it does not get its message."""
    result = charge.delay("long", gate="go")
    (begun,) = ledger.wait_for("begin")
    outlast(begun.at, lambda: deliveries(cluster, result.id) == 1)
    ledger.open("go:1")
    assert result.get(timeout=60) == "long by attempt 1"
    assert deliveries(cluster, result.id) == 1


def with_one_asleep(cluster: Cluster) -> tuple[Worker, Worker]:
    """Two workers, of which the second does not run yet, so that it gets nothing of what is published now."""
    working, idle = cluster
    idle.shut_down()
    return working, idle


@on("redis", at_night=("sqs",))
@pytest.mark.worker(count=2)
@pytest.mark.compat
def test_a_long_body_and_what_waits_behind_it_are_delivered_once(cluster: Cluster, ledger: Ledger) -> None:
    """An idle worker beside them gets neither, so nobody has to postpone anything."""
    _, idle = with_one_asleep(cluster)
    results = [charge.delay("long", gate="go"), charge.delay("behind")]
    (begun,) = ledger.wait_for("begin")
    wait_until(lambda: deliveries(cluster, results[1].id) == 1, "the second one is prefetched")
    idle.start_again()
    outlast(begun.at, lambda: [deliveries(cluster, result.id) for result in results] == [1, 1])
    ledger.open("go:1")
    assert [result.get(timeout=60) for result in results] == ["long by attempt 1", "behind by attempt 1"]
    assert [deliveries(cluster, result.id) for result in results] == [1, 1]
    assert ledger.rows("conflicted") == ledger.rows("replayed") == []


@on(at_night=POOLS)
@pytest.mark.worker(count=2)
def test_every_pool_holds_a_long_body(cluster: Cluster, ledger: Ledger) -> None:
    """Whatever the thread that consumes is busy with."""
    holds_a_long_body(cluster, ledger)


@on("sqs", at_night=("redis",))
@pytest.mark.worker(count=2)
def test_a_message_whose_time_has_not_come_is_delivered_once(cluster: Cluster, ledger: Ledger) -> None:
    """Celery keeps it in memory, unacknowledged, for longer than the visibility timeout."""
    result = charge.apply_async(("later",), countdown=OUTLIVED)
    assert result.get(timeout=60) == "later by attempt 1"
    assert deliveries(cluster, result.id) == 1


@pytest.mark.nightly
@pytest.mark.worker(count=2)
def test_a_postponed_message_may_wait_for_longer_than_the_visibility_timeout(cluster: Cluster, ledger: Ledger) -> None:
    """It waits in a worker that holds it, so it asks as seldom as its policy allows, and nobody else gets it."""
    first = charge_and_wait_for_long.delay("long", gate="go")
    ledger.wait_for("begin")
    second = charge_and_wait_for_long.delay("long", gate="go")
    (conflicted,) = ledger.wait_for("conflicted")
    ledger.open("go:1")
    assert first.get(timeout=60) == second.get(timeout=60) == "long by attempt 1"
    (replayed,) = ledger.rows("replayed")
    assert replayed.at > conflicted.at + VISIBILITY
    assert deliveries(cluster, second.id) == 2, "as it came, and as it was postponed"


@on("redis", at_night=("sqs", "classic", "quorum", "greenlets"))
@pytest.mark.worker(count=2)
def test_warm_shutdown_holds_what_it_waits_for(cluster: Cluster, ledger: Ledger, worker_options: WorkerOptions) -> None:
    """SIGTERM ends the consuming, not the body: its message stays where it is."""
    result = charge.delay("long", gate="go")
    (begun,) = ledger.wait_for("begin")
    worker = cluster.worker_of(begun)
    worker.kill(signal="SIGTERM", reload_container=False)
    outlast(begun.at, lambda: deliveries(cluster, result.id) == 1)
    assert not worker.has_exited()
    ledger.open("go:1")
    assert result.get(timeout=60) == "long by attempt 1"
    wait_until(worker.has_exited, "the worker ends")
    if CELERY >= (5, 5) or worker_options.pool != "gevent":  # otherwise kombu gives it back once more
        assert deliveries(cluster, result.id) == 1
    assert len(ledger.rows("effect")) == 1


@pytest.mark.worker(count=2)
def test_a_worker_that_connects_again_holds_its_messages(cluster: Cluster, celery_broker: Any, ledger: Ledger) -> None:
    """By the channel of its new connection."""

    def connections() -> list[int]:
        return [worker.logs().count("Connected to") for worker in cluster]

    before = connections()
    with Redis.from_url(celery_broker.config()["host_url"]) as administrator:
        for _ in range(10):  # kombu says nothing of a connection that it had not used yet
            administrator.client_kill_filter(_type="normal", skipme=True)
            with suppress(AssertionError):
                wait_until(lambda: all(map(gt, connections(), before)), "both connect again", timeout=10)
                break
    assert all(map(gt, connections(), before))
    holds_a_long_body(cluster, ledger)


@pytest.fixture
def celery_counted_broker(aws: AwsContainer, aws_account: str, faults: TcpProxy) -> SqsBroker:
    """SQS behind the proxy that keeps what workers send."""
    return SqsBroker(aws, aws_account, f"{faults.host}:{faults.port}")


@on("counted")
@pytest.mark.worker(settings={"worker_prefetch_multiplier": 10})
def test_ten_messages_cost_three_requests_for_each_timeout(cluster: Cluster, ledger: Ledger, faults: TcpProxy) -> None:
    """As one does; and one request more, now and then, for the timeout of the queue. SQS charges for requests."""
    results = [charge.delay(str(number), gate="go") for number in range(10)]
    wait_until(lambda: sum(deliveries(cluster, result.id) for result in results) == 10, "all are in the worker")
    outlast(time.monotonic() - OUTLIVED / 2, lambda: True)  # until those that came first and last go together
    before, began = len(faults.trips), time.monotonic()
    outlast(began, lambda: True)
    elapsed = time.monotonic() - began
    rate = aws_operations(faults.trips[before:]).count("ChangeMessageVisibilityBatch") * VISIBILITY / elapsed
    assert 2 <= rate <= 3.5
    # The others are kombu's, which asks for the length.
    assert sum(b"GetQueueAttributes" in trip and b"VisibilityTimeout" in trip for trip in faults.trips) == 1
    ledger.open("go:1")
    assert [result.get(timeout=60) for result in results] == [f"{number} by attempt 1" for number in range(10)]
    assert [deliveries(cluster, result.id) for result in results] == [1] * 10


KOMBUS_OWN = {"unacked_restore_interval": 10, "unacked_restore_throttle": 10}
"""How often kombu looks for what nobody holds, if nobody tells it: every hundred seconds."""


@on("sqs", at_night=("redis", "greenlets"))
@pytest.mark.worker(count=2, transport_options=KOMBUS_OWN)
def test_what_a_dead_worker_held_comes_back_after_the_visibility_timeout(cluster: Cluster, ledger: Ledger) -> None:
    """SIGKILL of all its processes, after its messages were extended: what ran and what waited is another's."""
    working, idle = with_one_asleep(cluster)
    results = [charge.delay("long", gate="go"), charge.delay("behind")]
    (begun,) = ledger.wait_for("begin")
    wait_until(lambda: deliveries(cluster, results[1].id) == 1, "the second one is prefetched")
    idle.start_again()
    outlast(begun.at, lambda: len(ledger.rows("begin")) == 1)
    working.kill()
    died = time.monotonic()
    ledger.open("go:2")
    again = wait_until(lambda: ledger.rows("begin")[1:], "something comes back", timeout=4 * VISIBILITY)
    assert [result.get(timeout=30) for result in results] == ["long by attempt 2", "behind by attempt 1"]
    # It was extended a third of the timeout before its worker died, at the earliest; a look may have been on its way.
    assert again[0].at > died + VISIBILITY / 3
    assert all(row.worker == idle.hostname() for row in ledger.rows("effect"))
