"""RabbitMQ: how a message is delayed in the broker itself, and which settings lose messages.

Where an app has a quorum queue, Celery (5.5 and later) sends what has a countdown to exchanges of its own, which keep
it for whole seconds and then hand it on by its routing key. It takes that key from the queue of the message, and of a
message that is published again it knows the exchange and the key only: so it takes the app's default queue, and the
message comes out in that one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery
from celery.app.task import Context
from kombu.entity import Exchange, Queue

from celery_idempotent.integration.versions import has_quorum_queues

_DELAY = re.compile(r"(?:[01]\.){28}")
"""What Celery puts before the routing key of a message that RabbitMQ delays: the seconds, a bit at a time."""


def way_back(app: Celery, request: Context, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which a delayed message comes out where the message of ``request`` did; none where Celery sees to it.

    Args:
        app: The app, whose broker is a RabbitMQ.
        request: The delivery that the message is published for.
        options: Those of the message.
    """
    info = request.delivery_info or {}
    way = exchange, key = str(info.get("exchange") or ""), str(info.get("routing_key") or "")
    if not (options.get("countdown") or options.get("eta")) or not all(way) or not has_quorum_queues(app):
        return {}
    if options.get("queue") or (options.get("exchange"), options.get("routing_key")) != way:
        return {}  # its author sends it elsewhere
    key, delays = _DELAY.subn("", key, count=1)
    kind = "topic" if delays else _kind_of(app, exchange)
    # It is declared nowhere: Celery asks a queue for exchange and key, and delays by topic exchanges only.
    return {"queue": Queue("", Exchange(exchange, type=kind), key), "declare": []}


def _kind_of(app: Celery, exchange: str) -> str:
    kinds = (each.exchange.type for each in app.amqp.queues.values() if each.exchange.name == exchange)
    return next(kinds, "direct")


def weaknesses(app: Celery) -> Iterator[str]:
    """What in the settings of an app on RabbitMQ loses or holds up messages, with the line to change."""
    if not app.conf.broker_transport_options.get("confirm_publish"):
        yield (
            "RabbitMQ confirms no message, so one that it cannot take, or that it gets before it dies, is lost, also "
            'where a task is postponed; set broker_transport_options={"confirm_publish": True}'
        )
    if not app.conf.broker_channel_error_retry:
        yield (
            "RabbitMQ closes the channel of a worker that has a message for more than half an hour (consumer_timeout), "
            "and Celery ends such a worker; set broker_channel_error_retry=True"
        )
    for name, queue in app.amqp.queues.items():
        arguments = queue.queue_arguments or {}
        if arguments.get("x-queue-type") == "quorum" and queue.exchange.type == "direct":
            yield (
                f"the quorum queue {name} is bound to a direct exchange, so what is postponed waits in a worker and "
                'takes up its prefetch count; bind it to a topic exchange, or set task_default_exchange_type="topic"'
            )
        yield from _too_short(app, name, arguments.get("x-consumer-timeout"))


def _too_short(app: Celery, queue: str, timeout_ms: Any) -> Iterator[str]:
    limit = app.conf.task_time_limit
    if isinstance(timeout_ms, int) and (limit is None or limit * 1000 >= timeout_ms):
        longest = "any time, as task_time_limit is not set" if limit is None else f"{limit:g} s (task_time_limit)"
        yield (
            f"RabbitMQ delivers a message of {queue} again after {timeout_ms / 1000:g} s (x-consumer-timeout), and a "
            f"body may take {longest}; set a shorter task_time_limit, or a longer x-consumer-timeout"
        )
