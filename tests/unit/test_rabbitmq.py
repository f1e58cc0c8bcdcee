"""What differs on RabbitMQ: where a delayed message goes, what is warned about, and what is counted."""

import re
import warnings
from functools import partial
from typing import Any

import pytest
from celery import VERSION as CELERY
from celery import Celery
from celery.app.task import Context
from kombu.entity import Exchange, Queue

from celery_idempotent import IdempotencyWarning, IdempotentTask
from celery_idempotent.integration import versions
from celery_idempotent.integration.headers import DELIVERIES_HEADER, deliveries
from celery_idempotent.integration.messages import postpone
from celery_idempotent.integration.operating.worker import check

GOOD = {"confirm_publish": True}
BITS = ".".join(f"{5:028b}")

needs_quorum = pytest.mark.skipif(CELERY < (5, 5), reason="Celery knows quorum queues since 5.5")


def an_app(*queues: Queue, **settings: Any) -> Celery:
    app = Celery(set_as_current=False, broker="amqp://nobody@127.0.0.1:1//")
    app.conf.update(
        task_queues=queues or None,
        idempotency_store="memory://",
        broker_transport_options=GOOD,
        broker_channel_error_retry=True,
        **settings,
    )
    return app


def a_queue(name: str, kind: str = "topic", patience: int | None = None) -> Queue:
    arguments = {"x-queue-type": "quorum", "x-consumer-timeout": patience}
    return Queue(name, Exchange("work", type=kind), name, queue_arguments=arguments)


def a_delivery(exchange: str, key: str) -> Context:
    return Context(delivery_info={"exchange": exchange, "routing_key": key})


_way_back = partial(postpone.way_back, is_rabbitmq=True)


def test_an_app_on_rabbitmq_is_known() -> None:
    """By the driver, and without a connection."""
    from celery_idempotent.integration.settings import runtime_of

    app = an_app()  # its runtime does not keep it
    assert runtime_of(app).broker.is_rabbitmq


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"broker_transport_options": {}}, 'write broker_transport_options = {..., "confirm_publish": True}'),
        ({"broker_channel_error_retry": False}, "write broker_channel_error_retry = True"),
        ({"task_queues": [a_queue("orders", "direct")]}, 'or task_default_exchange_type = "topic"'),
        ({"task_queues": [a_queue("orders", patience=60_000)]}, "longer x-consumer-timeout"),
        (
            {"task_queues": [a_queue("orders", patience=60_000)], "task_time_limit": 60},
            "shorter task_time_limit",
        ),
    ],
)
def test_a_worker_warns_of_settings_that_lose_messages_with_the_line_to_change(
    settings: dict[str, Any], line: str
) -> None:
    """When it starts, and once for each."""
    app = an_app()
    app.conf.update(settings)
    with pytest.warns(IdempotencyWarning) as told:
        check(app, "celery.concurrency.solo")
    assert len(told) == 1
    assert line in str(told[0].message)


@pytest.mark.parametrize(
    ("options", "found"),
    [({}, "confirm_publish=False (default):"), ({"confirm_publish": False}, "confirm_publish=False:")],
)
def test_warning_tells_a_default_from_what_somebody_wrote(options: dict[str, Any], found: str) -> None:
    """Who reads it looks for the line to change, or learns that there is none yet."""
    app = an_app()
    app.conf.broker_transport_options = options
    with pytest.warns(IdempotencyWarning, match=re.escape(found)):
        check(app, "celery.concurrency.solo")


@pytest.mark.parametrize(
    "app",
    [
        an_app(),
        an_app(Queue("orders", Exchange("work"), "orders", queue_arguments={"x-consumer-timeout": "soon"})),
        an_app(Queue("orders", Exchange("work"), "orders")),
        an_app(a_queue("orders")),
        an_app(a_queue("orders", patience=60_000), task_time_limit=59),
    ],
)
def test_a_worker_does_not_warn_of_settings_that_are_right(app: Celery) -> None:
    """Classic and quorum queues, a patience that is longer than every body, and one that RabbitMQ will refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(app, "celery.concurrency.solo")


@needs_quorum
@pytest.mark.parametrize("delay", [{"countdown": 5}, {"eta": "2030-01-01T00:00:00"}])
@pytest.mark.parametrize(
    ("exchange", "key", "kind", "comes_out"),
    [
        ("work", "orders", "topic", "orders"),
        ("work", "orders.eu", "topic", "orders.eu"),
        ("celery_delayed_2", f"{BITS}.orders", "topic", "orders"),
        ("others", "orders", "direct", "orders"),
    ],
)
def test_a_delayed_message_comes_out_where_it_was_received(
    exchange: str, key: str, kind: str, comes_out: str, delay: dict[str, Any]
) -> None:
    """By its own routing key, without the delay that it has behind it; Celery delays nothing of unknown exchanges."""
    options = {"exchange": exchange, "routing_key": key, **delay}
    found = _way_back(an_app(a_queue("orders")), a_delivery(exchange, key), options)
    queue = found["queue"]
    assert (queue.exchange.name, queue.exchange.type, queue.routing_key) == (exchange, kind, comes_out)
    assert found["declare"] == []


@needs_quorum
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "work", "routing_key": "others"},
        {"exchange": "work", "routing_key": "others", "countdown": 5},
        {"exchange": "other", "routing_key": "orders", "countdown": 5},
        {"exchange": "work", "routing_key": "orders", "queue": "others", "countdown": 5},
    ],
)
def test_a_message_goes_where_its_author_sends_it(options: dict[str, Any]) -> None:
    """Whether it waits or not."""
    app = an_app(a_queue("orders"), a_queue("others"))
    assert _way_back(app, a_delivery("work", "orders"), options) == {}


@needs_quorum
@pytest.mark.parametrize("options", [{"queue": "orders"}, {"exchange": "", "routing_key": "orders"}, {}])
@pytest.mark.parametrize("request_", [Context(), a_delivery("", "orders")])
def test_a_message_of_the_default_exchange_is_left_to_celery(request_: Context, options: dict[str, Any]) -> None:
    """Its routing key is the name of its queue, and no queue can be bound to that exchange."""
    options = {**options, "countdown": 5}
    assert _way_back(an_app(a_queue("orders")), request_, options) == {}


def test_without_quorum_queues_a_worker_keeps_what_is_delayed() -> None:
    """As on other brokers; also before Celery 5.5, which knows none."""
    app = an_app(Queue("orders", Exchange("work", type="topic"), "orders"))
    assert postpone._delay_options(app, a_delivery("work", "orders"), 300) == {"countdown": 0.3}


def test_celery_without_quorum_queues_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.5 a queue may be one, and nothing follows from it."""
    monkeypatch.setattr(versions, "DEFAULTS", {})
    assert not versions.has_quorum_queues(an_app(a_queue("orders")))


@needs_quorum
@pytest.mark.parametrize(("delay", "countdown"), [(1, 1), (300, 1), (1000, 1), (1001, 2)])
def test_rabbitmq_delays_by_whole_seconds_rounded_up(delay: int, countdown: int) -> None:
    """Celery refuses to publish what waits for less than one, and cuts off what is more."""
    options = postpone._delay_options(an_app(a_queue("orders")), a_delivery("work", "orders"), delay)
    assert options == {"countdown": countdown}


@needs_quorum
def test_a_retry_is_sent_the_way_back() -> None:
    """Celery itself would take the default queue."""
    app = an_app(a_queue("celery"), a_queue("orders"))

    @app.task(base=IdempotentTask, shared=False, acks_late=True, reject_on_worker_lost=True)
    def task() -> None: ...

    request = Context(id="i", args=[], kwargs={}, delivery_info={"exchange": "work", "routing_key": "orders"})
    options = task.signature_from_request(request, countdown=5).options
    assert options["queue"].routing_key == "orders"


def test_quorum_queues_tell_how_often_a_message_was_delivered() -> None:
    """The count goes on over messages; what RabbitMQ tells of one is not said of the next."""
    request = Context(headers={"x-delivery-count": 2, DELIVERIES_HEADER: 4})
    assert deliveries(request) == 7
    assert deliveries(Context(headers={})) == 1
    assert dict(versions.headers_again(request)) == {DELIVERIES_HEADER: 4}
