"""RabbitMQ: how a message is delayed in the broker itself.

Where an app has a quorum queue, Celery (5.5 and later) sends what has a countdown to exchanges of its own, which keep
it for whole seconds and then hand it on by its routing key. It takes that key from the queue of the message, and of a
message that is published again it knows the exchange and the key only: so it takes the app's default queue, and the
message comes out in that one.
"""

import re
from collections.abc import Mapping
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
    key, delays = _DELAY.subn("", key)
    kind = "topic" if delays else _kind_of(app, exchange)
    # It is declared nowhere: Celery asks a queue for exchange and key, and delays by topic exchanges only.
    return {"queue": Queue("", Exchange(exchange, type=kind), key), "declare": []}


def _kind_of(app: Celery, exchange: str) -> str:
    kinds = (each.exchange.type for each in app.amqp.queues.values() if each.exchange.name == exchange)
    return next(kinds, "direct")
