"""Conflicts and outages: a delivery that cannot run now is postponed without using up its retries.

``self.retry()`` would count against ``max_retries`` and, given another limit, leak it onto the shared task
object. So the message is published again as it came, with the same ``retries``, and the delivery ends as
Celery's ``Retry``. If that publish fails, the message itself goes back to the broker.

It has to come out of the queue that it came out of, and of a delivery Celery knows the exchange and the routing key. To
publish by these is not enough: a pool process of a Redis worker has declared no exchange, so kombu takes each for a
direct one and drops what has another key than the binding, without a word; and an exchange that copies messages to
several queues would copy this one each time. So the message goes to its queue past every exchange.

Where an app on RabbitMQ has a quorum queue, Celery (5.5 and later) sends what has a countdown to exchanges of its own,
which hand it on by its routing key to the exchange of the queue that Celery takes for its own: so that is given with
the exchange and the key of the message, and not with its name.
"""

import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import Any, NoReturn

from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.integration.context import arrival_of
from celery_idempotent.integration.headers import (
    CONFLICTS_HEADER,
    DELIVERIES_HEADER,
    OUTAGES_HEADER,
    WAITING_HEADER,
    count_in,
    deliveries,
    is_awaited,
    is_fifo,
    waiting_since,
)
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.versions import has_quorum_queues, headers_again
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import ITEM, bounded

_DELAY = re.compile(r"(?:[01]\.){28}")
"""What Celery puts before the routing key of a message that RabbitMQ delays: the seconds, a bit at a time."""


def conflict(task: Task, policy: Policy, met: Conflict) -> NoReturn:
    """End a delivery that met another one in flight, as ``on_conflict`` says: mostly by Celery's ``Retry``."""
    request = task.request
    if request.is_eager:
        raise met.error
    # The holder's own redelivery is what recovers the task if the holder dies: it is never dropped.
    if met.task_id not in {bounded(request.id or ""), bounded(f"{request.id}{ITEM}")}:
        # A chord is told of the last of a chain only.
        follows = {"group_id": request.group, "link": request.callbacks}
        awaited = is_awaited({**follows, "chord": request.chord, "chain": request.chain})
        if policy.on_conflict == "raise" and not awaited:
            raise met.error
        if policy.on_conflict == "skip" and not awaited and not request.errbacks:
            raise Ignore(str(met.error))
    postponed = count_in(request.headers or {}, CONFLICTS_HEADER)
    delay = policy.conflict_delay_ms(
        postponed, met.running_for, met.error.retry_after, grace=runtime_of(task.app).grace, **bounds(task)
    )
    _postpone(task, CONFLICTS_HEADER, met.error, delay)


def outage(task: Task, policy: Policy, error: IdempotencyError) -> NoReturn:
    """End a delivery that got no certain answer, or lost its lease: nothing is reported as done."""
    if task.request.is_eager:
        raise error
    # A process without an answer would be the fastest, and postpone what the others could run.
    pause = runtime_of(task.app).opened.breaker.pause
    if pause:
        limit = (task.request.timelimit or [None])[0] or task.time_limit or inf
        with suppress(Exception):  # a soft time limit that strikes ends the pause: nothing has run that could fail
            # A shutdown waits for this; and what a hard time limit kills would be acknowledged, and lost.
            time.sleep(min(pause, 2.0, limit / 2))
    postponed = count_in(task.request.headers or {}, OUTAGES_HEADER)
    _postpone(task, OUTAGES_HEADER, error, policy.outage_delay_ms(postponed, **bounds(task)))


def _postpone(task: Task, header: str, error: IdempotencyError, delay: int) -> NoReturn:
    request, arrival = task.request, arrival_of(task.request)
    options = _delay_options(task.app, request, delay)
    try:
        # The same message: its arguments as they came, whatever the body has done to them.
        args, kwargs = arrival.arguments(request) if arrival else (request.args, request.kwargs)
        headers = {
            **headers_again(request),
            header: count_in(request.headers or {}, header) + 1,
            DELIVERIES_HEADER: deliveries(request),
            WAITING_HEADER: waiting_since(request.headers or {}) or round(time.time() * 1000),
        }
        signature = task.signature_from_request(
            request, args, kwargs, retries=request.retries, headers=headers, **options
        )
        exchange, key = signature.options.get("exchange"), signature.options.get("routing_key")
        # The message could be dropped; RabbitMQ knows its exchanges, a process need not.
        if exchange and not runtime_of(task.app).broker.is_rabbitmq:
            raise LookupError(f"no queue of this worker is bound to exchange {exchange!r} with routing key {key!r}")
        signature.apply_async()
    except Exception as failure:
        if not task.acks_late:
            raise  # the message is acknowledged already: a visible failure is all that is left
        if not isinstance(failure, OperationalError):
            time.sleep(min(delay / 1000, 1.0))  # it returns at once, and its own error would make that a hot loop
        raise Reject(failure, requeue=True) from failure
    if arrival is not None:
        arrival.is_answered = True
    raise Retry(str(error), exc=error, when=delay / 1000, sig=signature)


def bounds(task: Task) -> dict[str, Any]:
    """What bounds a delay, beside the policy; SQS delays a message by at most 900 s (SendMessage, DelaySeconds)."""
    runtime = runtime_of(task.app)
    bounds, timeout = [900_000], runtime.broker.visibility_timeout
    # A message that nobody holds, and that waits longer than the visibility timeout in a worker, is delivered again,
    # and again. On a FIFO queue its group waits for it, so it is not to wait for long there, held or not.
    if timeout is not None and not (runtime.broker.driver == "redis" and runtime.hold_messages):
        bounds.append(max(1, round(timeout * 500)))
    return {"bounds": tuple(bounds), "draw": random.random()}  # noqa: S311 - it keeps no secret


def _delay_options(app: Celery, request: Context, delay: int) -> dict[str, Any]:
    broker = runtime_of(app).broker
    whole_seconds = -(delay // -1000)
    if broker.is_sqs and not is_fifo(request):
        return {"DelaySeconds": whole_seconds}  # SQS itself holds the message back: no worker has to keep it in memory
    if broker.is_rabbitmq and has_quorum_queues(app):
        return {"countdown": whole_seconds}  # RabbitMQ does so, too, and Celery refuses less than one
    return {"countdown": delay / 1000}


def way_back(app: Celery, request: Context, options: Mapping[str, Any], *, is_rabbitmq: bool) -> dict[str, Any]:
    """Options by which a message comes out where the message of ``request`` did; none where its author sends it."""
    # None, too, where this process knows no queue that it can have come out of: the exchange stays as Celery has it.
    info = request.delivery_info or {}
    exchange, key = str(info.get("exchange") or ""), str(info.get("routing_key") or "")
    # As Celery takes them from the delivery, or else somebody sends the message elsewhere.
    if exchange:
        is_kept = not options.get("queue") and (options.get("exchange"), options.get("routing_key")) == (exchange, key)
    else:
        is_kept = bool(key) and options.get("queue") == key
    if request.is_eager or not is_kept:
        return {}
    own_key, delays = _DELAY.subn("", key)
    if is_rabbitmq and (options.get("countdown") or options.get("eta")) and has_quorum_queues(app):
        if not exchange:
            return {}
        kinds = (each.exchange.type for each in app.amqp.queues.values() if each.exchange.name == exchange)
        kind = "topic" if delays else next(kinds, "direct")
        # It is declared nowhere: Celery asks a queue for exchange and key, and delays by topic exchanges only.
        return {"queue": Queue("", Exchange(exchange, type=kind), own_key), "declare": []}
    name = key if not exchange else _queue_of(app, exchange, own_key, is_rabbitmq)
    if name is None:
        return {}
    # It is declared nowhere, as its worker has done so. Its own exchange, if it has one, is not asked.
    return {"queue": Queue(name, Exchange(""), name), "exchange": "", "routing_key": name, "declare": []}


def _queue_of(app: Celery, exchange: str, key: str, is_rabbitmq: bool) -> str | None:
    """The name of a queue that the worker takes messages of, and that such a message goes to; None if there is none."""
    consumed = app.amqp.queues.consume_from.values()
    for queue in consumed:
        for binding in (queue, *queue.bindings):
            if binding.exchange.name != exchange:
                continue
            kind, pattern = binding.exchange.type, str(binding.routing_key or "")
            if kind == "topic":
                from kombu.transport.virtual.exchange import TopicExchange  # which most publishers never need

                is_bound = re.match(TopicExchange(None).key_to_pattern(pattern), key) is not None
            else:
                is_bound = kind != "direct" or pattern == key
            if is_bound:
                if kind != "fanout" or is_rabbitmq:
                    return str(queue.name)
                # Elsewhere such a queue is none, but a subscription; any worker will do for what is to wait.
                return next((str(each.name) for each in consumed if each.exchange.type != "fanout"), None)
    return None
