"""What only RabbitMQ does: lost connections, quorum queues, delivery limits, dead letters, limited patience."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import VERSION as CELERY
from kombu.connection import Connection

from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from lab.embedded import EmbeddedRabbitMQ
from tests.integration.cluster import Cluster, RabbitMQBroker, Worker, on, record_of
from tests.integration.idempotent_tasks import charge, charge_and_back_off, charge_with_retries
from tests.support.ledger import Ledger
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.usefixtures("celery_setup")]
loses_connections = pytest.mark.worker(pool="prefork" if CELERY >= (5, 7) else "threads")
"""When Celery before 5.7 loses its connection, it forgets which pool processes are busy, and gives one of them the next
message: that one waits for the body, and meets what it has recorded."""


def a_quorum_queue(key: str, **arguments: Any) -> dict[str, Any]:
    """A quorum queue on a topic exchange, as `task_queues` takes it."""
    queue = {"exchange": "work", "exchange_type": "topic", "routing_key": key}
    return {**queue, "queue_arguments": {"x-queue-type": "quorum", **arguments}}


@pytest.fixture(scope="session")
def impatient_server(rabbitmq_server: EmbeddedRabbitMQ) -> Iterator[EmbeddedRabbitMQ]:
    """A RabbitMQ that waits two seconds for an acknowledgement instead of half an hour."""
    with EmbeddedRabbitMQ(settings={"consumer_timeout": 2000, "channel_tick_interval": 200}) as server:
        yield server


@pytest.fixture
def celery_impatient_broker(impatient_server: EmbeddedRabbitMQ) -> RabbitMQBroker:
    """One of its virtual hosts."""
    return RabbitMQBroker(impatient_server)


@on("classic", at_night=("quorum",))
@loses_connections
def test_a_connection_that_is_lost_in_a_body_costs_a_conflict(celery_broker: RabbitMQBroker, ledger: Ledger) -> None:
    """The copy meets the body that goes on; it is a new message from then on, which tells how many came before it."""
    result = charge.delay("o", gate="go")
    ledger.wait_for("begin")
    wait_until(lambda: celery_broker.server.drop_connections(celery_broker.vhost), "connections to drop")
    copy, again = ledger.wait_for("conflicted", count=2)[:2]
    ledger.open("go:1")
    assert result.get(timeout=60) == "o by attempt 1"
    assert len(ledger.rows("begin")) == 1
    assert (copy.details["redelivered"], again.details["redelivered"]) == (True, False)
    told = 2 if celery_broker.settings else 1  # of a classic queue RabbitMQ does not tell how often
    assert (copy.details["deliveries"], again.details["deliveries"]) == (told, told + 1)


@on(at_night=("impatient",))
@loses_connections
def test_a_body_longer_than_rabbitmqs_patience_runs_once(worker: Worker, ledger: Ledger) -> None:
    """RabbitMQ closes the channel and delivers a copy, which is postponed; the worker connects again and goes on."""
    result = charge.delay("o", gate="go")
    ledger.wait_for("begin")
    copy, *_ = ledger.wait_for("conflicted")
    ledger.open("go:1")
    assert result.get(timeout=60) == "o by attempt 1"
    assert copy.details["redelivered"]
    wait_until(lambda: ledger.rows("replayed"), "the copy is answered")
    assert charge.delay("another").get(timeout=60) == "another by attempt 1"
    assert len(ledger.rows("begin", "o")) == 1
    assert "delivery acknowledgement on channel" in worker.logs()


@on("quorum")
@pytest.mark.worker(
    queues="orders", settings={"task_queues": {each: a_quorum_queue(each) for each in ("celery", "orders")}}
)
@pytest.mark.parametrize(
    "task", [pytest.param(charge, marks=pytest.mark.nightly), charge_and_back_off], ids=["within a second", "seconds"]
)
def test_a_conflict_of_a_quorum_queue_waits_in_rabbitmq_and_comes_back_to_its_queue(ledger: Ledger, task: Any) -> None:
    """Postponed, not given back, however short the delay; neither it nor a retry goes to the default queue."""
    holder = task.apply_async(("o", "go"), queue="orders")
    ledger.wait_for("begin")
    waiting = task.apply_async(("o", "go"), queue="orders")
    conflicts = ledger.wait_for("conflicted", count=3)
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert not any(row.details["redelivered"] for row in conflicts)
    assert [row.details["deliveries"] for row in conflicts[:3]] == [1, 2, 3]
    assert charge_with_retries.apply_async(("late", "", 1), queue="orders").get(timeout=60) == 2


LIMIT = 2
DEAD = {"x-delivery-limit": LIMIT, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


@on(at_night=("quorum",))
@pytest.mark.worker(queues="orders", settings={"task_queues": {"orders": a_quorum_queue("orders", **DEAD)}})
def test_a_message_beyond_its_delivery_limit_is_the_same_operation_when_it_is_redriven(
    cluster: Cluster, celery_broker: RabbitMQBroker, ledger: Ledger, store: Store
) -> None:
    """RabbitMQ buries what has killed three processes; the claim stays, and who digs it up takes over as the fourth."""
    with Connection(celery_broker.config()["url"]) as connection:
        channel = connection.default_channel
        channel.queue_declare("dead", durable=True, auto_delete=False)
        result = charge.apply_async(("o", "go"), queue="orders")
        for count in range(1, LIMIT + 2):
            cluster.kill_child(ledger.wait_for("begin", count=count)[-1])
        dead = wait_until(lambda: channel.basic_get("dead"), "the message is dead")
        assert dead.headers["x-death"][0]["reason"] == "delivery_limit"
        key = ledger.rows("begin")[0].details["idempotency_key"]
        assert record_of(store, key).status is Status.IN_PROGRESS
        ledger.open("go:4")
        message = channel.prepare_message(
            dead.body, None, dead.content_type, dead.content_encoding, dead.headers, {"correlation_id": result.id}
        )
        channel.basic_publish(message, exchange="", routing_key="orders")
        channel.basic_ack(dead.delivery_tag)
        assert result.get(timeout=60) == "o by attempt 4"
    assert [row.attempt for row in ledger.rows("begin")] == [1, 2, 3, 4]
    assert len(ledger.rows("effect")) == 1


# Of a queue that does not reject from the beginning, the policy that makes it full would drop what waits there.
REJECTING = {"task_queues": {"celery": {"queue_arguments": {"x-overflow": "reject-publish"}}}}


@on("classic")
@pytest.mark.worker(settings=REJECTING)
def test_a_conflict_that_rabbitmq_refuses_goes_back_and_is_postponed_later(
    celery_broker: RabbitMQBroker, ledger: Ledger
) -> None:
    """With confirmations a worker hears of the refusal: the message it has is given back, not acknowledged."""
    holder = charge.delay("o", gate="go")
    ledger.wait_for("begin")
    waiting = charge.delay("o", gate="go")
    conflicts = ledger.wait_for("conflicted")
    full = {"pattern": "^celery$", "definition": {"max-length": 0}}
    celery_broker.server.ask("PUT", f"policies/{celery_broker.vhost}/full", full)
    wait_until(lambda: any(row.details["redelivered"] for row in ledger.rows("conflicted")), "it is given back")
    celery_broker.server.ask("DELETE", f"policies/{celery_broker.vhost}/full")
    ledger.open("go:1")
    assert holder.get(timeout=60) == waiting.get(timeout=60) == "o by attempt 1"
    assert not conflicts[0].details["redelivered"]
