"""Where a message that is published again has to go to come out of the queue that it came out of.

Of a delivery, Celery knows the exchange and the routing key. To publish by these again is not enough: a pool process
of a Redis worker has declared no exchange, so kombu takes each for a direct one and drops what has another key than the
binding, without a word; and an exchange that copies messages to several queues would copy this one again each time. So
the message goes to its queue past every exchange.

Where an app on RabbitMQ has a quorum queue, Celery (5.5 and later) sends what has a countdown to exchanges of its own,
which keep it for whole seconds and then hand it on by its routing key, to the exchange of the queue that Celery takes
for its own: so that is given with the exchange and the key of the message, and not with its name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery
from celery.app.task import Context
from kombu.entity import Exchange, Queue
from kombu.transport.virtual.exchange import TopicExchange

from celery_idempotent.integration.versions import has_quorum_queues

_DELAY = re.compile(r"(?:[01]\.){28}")
"""What Celery puts before the routing key of a message that RabbitMQ delays: the seconds, a bit at a time."""


def way_back(app: Celery, request: Context, options: Mapping[str, Any], *, is_rabbitmq: bool) -> dict[str, Any]:
    """Options by which a message comes out where the message of ``request`` did; none where its author sends it.

    None, too, where this process knows no queue that it can have come out of: the exchange stays as Celery has it.

    Args:
        app: The app.
        request: The delivery that the message is published for.
        options: Those of the message.
        is_rabbitmq: Whether the broker is one.
    """
    info = request.delivery_info or {}
    exchange, key = str(info.get("exchange") or ""), str(info.get("routing_key") or "")
    if request.is_eager or not (exchange or key) or not _is_kept(options, exchange, key):
        return {}
    is_delayed = bool(options.get("countdown") or options.get("eta"))
    if is_rabbitmq and is_delayed and has_quorum_queues(app):
        return _delayed(app, exchange, key) if exchange else {}
    name = key if not exchange else _queue_of(app, exchange, _DELAY.sub("", key), is_rabbitmq)
    if name is None:
        return {}
    # It is declared nowhere, as its worker has done so. Its own exchange, if it has one, is not asked.
    return {"queue": Queue(name, Exchange(""), name), "exchange": "", "routing_key": name, "declare": []}


def require_way_back(options: Mapping[str, Any], *, is_rabbitmq: bool) -> None:
    """Raise ``LookupError`` where the message could be dropped; RabbitMQ knows its exchanges, a process need not."""
    exchange = options.get("exchange")
    if exchange and not is_rabbitmq:
        key = options.get("routing_key")
        raise LookupError(f"no queue of this worker is bound to exchange {exchange!r} with routing key {key!r}")


def _is_kept(options: Mapping[str, Any], exchange: str, key: str) -> bool:
    """Whether the options are as Celery takes them from the delivery, and nobody sends the message elsewhere."""
    if exchange:
        return not options.get("queue") and (options.get("exchange"), options.get("routing_key")) == (exchange, key)
    return bool(options.get("queue") == key)


def _delayed(app: Celery, exchange: str, key: str) -> dict[str, Any]:
    key, delays = _DELAY.subn("", key)
    kinds = (each.exchange.type for each in app.amqp.queues.values() if each.exchange.name == exchange)
    kind = "topic" if delays else next(kinds, "direct")
    # It is declared nowhere: Celery asks a queue for exchange and key, and delays by topic exchanges only.
    return {"queue": Queue("", Exchange(exchange, type=kind), key), "declare": []}


def _queue_of(app: Celery, exchange: str, key: str, is_rabbitmq: bool) -> str | None:
    """The name of a queue that the worker takes messages of, and that such a message goes to; None if there is none."""
    consumed = app.amqp.queues.consume_from.values()
    for queue in consumed:
        for bound, pattern in _bindings(queue):
            if bound.name == exchange and _matches(bound.type, str(pattern or ""), key):
                if bound.type != "fanout" or is_rabbitmq:
                    return str(queue.name)
                # Elsewhere such a queue is none, but a subscription; any worker will do for what is to wait.
                return next((str(each.name) for each in consumed if each.exchange.type != "fanout"), None)
    return None


def _bindings(queue: Queue) -> Iterator[tuple[Exchange, str]]:
    yield queue.exchange, queue.routing_key
    for each in queue.bindings:
        yield each.exchange, each.routing_key


def _matches(kind: str, pattern: str, key: str) -> bool:
    if kind == "topic":
        return re.match(TopicExchange(None).key_to_pattern(pattern), key) is not None
    return kind != "direct" or pattern == key
