"""Out of which queue a message comes that is published again, by the exchange and the key that its delivery had."""

from typing import Any

import pytest
from celery import VERSION as CELERY
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject
from kombu.common import Broadcast
from kombu.entity import Exchange, Queue, binding

from celery_idempotent import IdempotentTask, InFlight, Policy
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.integration import versions
from celery_idempotent.integration.headers import DELIVERIES_HEADER, deliveries
from celery_idempotent.integration.messages.postpone import _delay_options, conflict, way_back
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
needs_quorum = pytest.mark.skipif(CELERY < (5, 5), reason="Celery knows quorum queues since 5.5")


@pytest.fixture
def app() -> Celery:
    app = an_app(task_queues=QUEUES)
    app.amqp.queues.select([each.name for each in QUEUES])
    return app


def a_delivery(exchange: str, key: str, **other: Any) -> Context:
    return Context(delivery_info={"exchange": exchange, "routing_key": key}, **other)


def _found(app: Celery, exchange: str, key: str, *, is_rabbitmq: bool = False, **other: Any) -> dict[str, Any]:
    options = {"exchange": exchange, "routing_key": key} if exchange else {"queue": key}
    return way_back(app, a_delivery(exchange, key, **other), options, is_rabbitmq=is_rabbitmq)


@pytest.mark.parametrize(
    ("exchange", "key", "queue", "on_rabbitmq"),
    [
        ("", "unknown", "unknown", "unknown"),
        ("topics", "orders.eu.1", "eu", "eu"),
        ("topics", "orders.us", "words", "words"),
        ("work", "exact.key", "exact", "exact"),
        ("work", "0." * 28 + "exact.key", "exact", "exact"),
        ("work", "other", "two", "two"),
        ("heads", "", "heads", "heads"),
        ("news", "any", "eu", "two"),
        ("all", "all", "eu", "all"),
    ],
)
def test_a_message_goes_to_its_queue_past_every_exchange(
    app: Celery, exchange: str, key: str, queue: str, on_rabbitmq: str
) -> None:
    """What copies messages copies it no more. A subscription of Redis is no queue; RabbitMQ has one for each worker."""
    for is_rabbitmq, name in ((False, queue), (True, on_rabbitmq)):
        found = _found(app, exchange, key, is_rabbitmq=is_rabbitmq)
        assert (found["queue"].name, found["exchange"], found["routing_key"]) == (name, "", name)
        assert found["declare"] == [], "it has no arguments here, and RabbitMQ refuses a queue with others"


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
    with pytest.raises(Reject, match="'topics' with routing key 'invoices'") as given_back:
        conflict(lost, Policy(backoff=0.01), Conflict(InFlight("k", 0, "w"), "holder", 0))
    retry = lost.signature_from_request()
    lost.pop_request()
    assert (retry.options["exchange"], retry.options["routing_key"]) == ("topics", "invoices")
    assert given_back.value.requeue
    assert not published(app)


def on_rabbitmq(*names: str, kind: str = "quorum") -> Celery:
    exchange, arguments = Exchange("work", "topic"), {"x-queue-type": kind}
    app = an_app(task_queues=[Queue(each, exchange, each, queue_arguments=arguments) for each in names])
    app.conf.broker_url = "amqp://nobody@127.0.0.1:1//"
    return app


@needs_quorum
@pytest.mark.parametrize("delay", [{"countdown": 5}, {"eta": "2030-01-01T00:00:00"}])
@pytest.mark.parametrize(
    ("exchange", "key", "kind", "comes_out"),
    [
        ("work", "orders", "topic", "orders"),
        ("work", "orders.eu", "topic", "orders.eu"),
        ("celery_delayed_2", ".".join(f"{5:028b}") + ".orders", "topic", "orders"),
        ("others", "orders", "direct", "orders"),
    ],
)
def test_a_delayed_message_comes_out_where_it_was_received(
    exchange: str, key: str, kind: str, comes_out: str, delay: dict[str, Any]
) -> None:
    """By its own routing key, without the delay that it has behind it; Celery delays nothing of unknown exchanges."""
    options = {"exchange": exchange, "routing_key": key, **delay}
    found = way_back(on_rabbitmq("orders"), a_delivery(exchange, key), options, is_rabbitmq=True)
    queue = found["queue"]
    assert (queue.exchange.name, queue.exchange.type, queue.routing_key) == (exchange, kind, comes_out)
    assert found["declare"] == []


TO_ORDERS = {"exchange": "work", "routing_key": "orders"}


@needs_quorum
@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (a_delivery("work", "orders"), {"exchange": "work", "routing_key": "others"}),
        (a_delivery("work", "orders"), {"exchange": "work", "routing_key": "others", "countdown": 5}),
        (a_delivery("work", "orders"), {"exchange": "other", "routing_key": "orders", "countdown": 5}),
        (a_delivery("work", "orders"), {**TO_ORDERS, "queue": "others", "countdown": 5}),
        *((a_delivery("", "orders"), {**way, "countdown": 5}) for way in ({"queue": "orders"}, TO_ORDERS, {})),
        *((Context(), {**way, "countdown": 5}) for way in ({"queue": "orders"}, TO_ORDERS, {})),
    ],
)
def test_a_message_goes_where_its_author_or_celery_sends_it(request_: Context, options: dict[str, Any]) -> None:
    """The routing key of the default exchange is the name of a queue, and no queue can be bound to that exchange."""
    assert way_back(on_rabbitmq("orders", "others"), request_, options, is_rabbitmq=True) == {}


@pytest.mark.parametrize(
    ("kind", "delay", "countdown"),
    [
        ("classic", 300, 0.3),
        *(pytest.param("quorum", *each, marks=needs_quorum) for each in ((1, 1), (1000, 1), (1001, 2))),
    ],
)
def test_quorum_queues_delay_by_whole_seconds_rounded_up(kind: str, delay: int, countdown: float) -> None:
    """Celery refuses to publish what waits for less than one, and cuts off what is more; else a worker keeps it."""
    app = on_rabbitmq("orders", kind=kind)
    assert _delay_options(app, a_delivery("work", "orders"), delay) == {"countdown": countdown}


@needs_quorum
def test_a_retry_is_sent_the_way_back() -> None:
    """Celery itself would take the default queue."""

    @on_rabbitmq("celery", "orders").task(base=IdempotentTask, shared=False)
    def task() -> None: ...

    request = a_delivery("work", "orders", id="i", args=[], kwargs={})
    assert task.signature_from_request(request, countdown=5).options["queue"].routing_key == "orders"


def test_quorum_queues_tell_how_often_a_message_was_delivered() -> None:
    """The count goes on over messages; what RabbitMQ tells of one is not said of the next."""
    request = Context(headers={"x-delivery-count": 2, DELIVERIES_HEADER: 4})
    assert (deliveries(request), deliveries(Context(headers={}))) == (7, 1)
    assert dict(versions.headers_again(request)) == {DELIVERIES_HEADER: 4}
