"""Out of which queue a message comes that is published again, by the exchange and the key that its delivery had."""

from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject
from kombu.common import Broadcast
from kombu.entity import Exchange, Queue, binding

from celery_idempotent import IdempotentTask, InFlight, Policy
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.integration.messages.postpone import conflict, way_back
from tests.support.deliveries import an_app, published

TOPIC, DIRECT, FANOUT = Exchange("topics", "topic"), Exchange("work"), Exchange("news", "fanout")
QUEUES = [
    Queue("eu", TOPIC, "orders.eu.#"),
    Queue("words", TOPIC, "orders.*"),
    Queue("exact", DIRECT, "exact.key"),
    Queue("two", DIRECT, "one", bindings=[binding(DIRECT, "other"), binding(FANOUT)]),
    Broadcast("all", queue="all"),
    Queue("heads", Exchange("heads", "headers")),
]


@pytest.fixture
def app() -> Celery:
    app = an_app(task_queues=QUEUES)
    app.amqp.queues.select([each.name for each in QUEUES])
    return app


def _found(app: Celery, exchange: str, key: str, *, is_rabbitmq: bool = False, **other: Any) -> dict[str, Any]:
    request = Context(delivery_info={"exchange": exchange, "routing_key": key}, **other)
    options = {"exchange": exchange, "routing_key": key} if exchange else {"queue": key}
    return way_back(app, request, options, is_rabbitmq=is_rabbitmq)


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("", "unknown", "unknown"),
        ("topics", "orders.eu.1", "eu"),
        ("topics", "orders.us", "words"),
        ("work", "exact.key", "exact"),
        ("work", "0." * 28 + "exact.key", "exact"),
        ("work", "other", "two"),
        ("news", "any", "two"),
        ("heads", "", "heads"),
    ],
)
@pytest.mark.parametrize("is_rabbitmq", [True, False])
def test_a_message_goes_to_its_queue_past_every_exchange(
    app: Celery, exchange: str, key: str, queue: str, is_rabbitmq: bool
) -> None:
    """Whatever a pool process has declared; what copies messages to several queues copies it no more."""
    found = _found(app, exchange, key, is_rabbitmq=is_rabbitmq)
    expected = "eu" if exchange == "news" and not is_rabbitmq else queue
    assert (found["queue"].name, found["exchange"], found["routing_key"]) == (expected, "", expected)
    assert found["declare"] == [], "it has no arguments here, and RabbitMQ refuses a queue with others"


def test_a_copy_for_a_subscriber_waits_in_a_queue(app: Celery) -> None:
    """A subscription of Redis is no queue; RabbitMQ has one for each worker."""
    assert _found(app, "all", "")["queue"].name == "eu"
    assert _found(app, "all", "all", is_rabbitmq=True)["queue"].name == "all"


def test_a_call_that_no_message_made_has_no_queue(app: Celery) -> None:
    """Eager, or outside of a worker."""
    assert way_back(app, Context(), {"queue": "eu"}, is_rabbitmq=False) == {}
    assert _found(app, "topics", "orders.eu.1", is_eager=True) == {}


def test_a_message_of_no_known_queue_goes_back_to_the_broker(app: Celery) -> None:
    """Published again it would be dropped; RabbitMQ knows its exchanges. A body's retry goes as Celery has it."""
    assert _found(app, "topics", "invoices", is_rabbitmq=True) == {}

    @app.task(base=IdempotentTask, shared=False, name="t.lost")
    def lost() -> None: ...

    lost.push_request(id="x", args=[], kwargs={}, delivery_info={"exchange": "topics", "routing_key": "invoices"})
    with pytest.raises(Reject) as given_back:
        conflict(lost, Policy(backoff=0.01), Conflict(InFlight("k", 0, "w"), "holder", 0))
    retry = lost.signature_from_request()
    lost.pop_request()
    assert (retry.options["exchange"], retry.options["routing_key"]) == ("topics", "invoices")
    assert given_back.value.requeue
    assert "no queue of this worker is bound to exchange 'topics' with routing key 'invoices'" in str(given_back.value)
    assert not published(app)
