"""What the settings of a broker lose or cost, and the line to write instead; connects to nothing.

What loses messages or ends workers is worth a warning. The rest breaks no promise, and costs time or throughput: there
a value that somebody wrote is worth a warning, and a default of kombu's or Celery's is worth advice.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from celery import Celery

from celery_idempotent.integration.binding import is_protected
from celery_idempotent.integration.settings import Runtime, runtime_of

_LONG = 300
"""Seconds. Up to here a visibility timeout may be somebody's choice, such as for greenlets that do not yield. It is
short for messages that are not held."""


class Hint(NamedTuple):
    """A setting that costs something, what it is, what comes of that, and the line to write instead."""

    setting: str
    found: str
    cost: str
    instead: str
    is_default: bool  # whether nobody wrote what was found
    is_grave: bool = False  # whether messages are lost or workers end by it

    @property
    def is_advice(self) -> bool:
        """Whether it is not worth a warning."""
        return self.is_default and not self.is_grave

    def __str__(self) -> str:
        found = f"{self.found} (default)" if self.is_default else self.found
        return f"{self.setting}={found}: {self.cost}; write {self.instead}"


def hints(app: Celery, pool: str, unheld: Iterable[Any]) -> list[Hint]:
    """All that there is to say; ``pool`` is a module, and messages of the tasks ``unheld`` are not held."""
    runtime, options = runtime_of(app), app.conf.broker_transport_options or {}
    found: list[Hint] = []
    if runtime.broker.is_sqs:
        found += _of_sqs(app.conf, options, is_green=pool.endswith(".gevent"))
    if runtime.broker.driver == "redis" and runtime.broker.visibility_timeout is not None:
        found += _of_redis(runtime.broker.visibility_timeout, options, holds=bool(runtime.hold_messages))
    if runtime.broker.is_rabbitmq:
        found += _of_rabbitmq(app, options)
    return [*found, *_of_visibility(runtime, options, list(unheld))]


def _of_visibility(runtime: Runtime, options: Mapping[str, Any], unheld: list[Any]) -> Iterator[Hint]:
    timeout, holds = runtime.broker.visibility_timeout, runtime.hold_messages
    is_default = "visibility_timeout" not in options
    if timeout is not None and timeout > _LONG and not unheld:
        yield Hint(
            "visibility_timeout",
            f"{timeout:g}",
            f"when a machine dies, its messages stay away for {timeout:g} s; where every worker of the broker holds "
            "its own, a minute is enough",
            _option(visibility_timeout=60)
            + ", and set it on queues that exist, too: kombu sets it only on those that it creates"
            if runtime.broker.is_sqs
            else _option(visibility_timeout=60, unacked_mutex_expire=60),
            is_default,
        )
    delay = max((each.default_retry_delay or 0 for each in unheld), default=0)
    has_plain = not all(map(is_protected, unheld))  # one that runs again with each copy of its message
    if timeout is not None and (delay > timeout or (has_plain and timeout <= _LONG)):
        whose = "plain tasks" if holds else "any task"
        instead = '"all"' if holds or has_plain else "True"
        yield Hint(
            "idempotency_hold_messages",
            str(holds),
            f"no message of {whose} is held, so what takes longer than the visibility timeout ({timeout:g} s) is "
            "delivered again each time, and runs again if its task is plain: a body, a prefetched message, a "
            f"countdown, a retry that waits for its default_retry_delay ({delay:g} s)",
            f"idempotency_hold_messages = {instead}, or a visibility_timeout that is longer than all of these",
            bool(holds) and is_default,
        )


def _of_sqs(conf: Any, options: Mapping[str, Any], *, is_green: bool) -> Iterator[Hint]:
    if options.get("polling_interval") is None:
        yield Hint(
            "polling_interval",
            "1",
            "in kombu 5.7, a worker whose prefetch window was full waits for a second before it asks again, so it does "
            "at most concurrency x worker_prefetch_multiplier tasks in a second",
            # kombu's loop for greenlets would ask itself without a pause whether there is room again.
            _option(polling_interval=0.1 if is_green else 0),
            True,
        )
    named = [conf.task_default_queue, conf.task_queues, conf.task_routes, list(options.get("predefined_queues") or ())]
    fifo = sorted({each for each in _words(named) if each.endswith(".fifo")})
    routes = conf.task_routes if isinstance(conf.task_routes, list | tuple) else [conf.task_routes or ()]
    # A router of one's own can make a message group of the arguments.
    is_grouped = any(not isinstance(each, Mapping | list | tuple) for each in routes)
    if fifo and not is_grouped and "MessageGroupId" not in _words(routes):
        yield Hint(
            "MessageGroupId",
            "'default'",
            f"calls that name no group share that of kombu, in which tasks run one by one ({', '.join(fifo)})",
            'apply_async(..., MessageGroupId="customer-7"), or task_routes = [lambda name, args, kwargs, options, '
            f'**rest: {{"queue": "{fifo[0]}", "MessageGroupId": str(args[0])}}]',
            True,
        )


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _words(each)
    else:
        yield str(getattr(value, "name", value))


def _of_redis(timeout: float, options: Mapping[str, Any], *, holds: bool) -> Iterator[Hint]:
    # kombu takes text, too, as out of an environment variable. Its defaults are those of 5.3 to 5.7 (transport/redis).
    expire = float(options.get("unacked_mutex_expire", 300))
    if expire > timeout:
        yield Hint(
            "unacked_mutex_expire",
            f"{expire:g}",
            "a worker that is killed while it looks for messages of dead workers keeps the others from looking for "
            f"{expire:g} s, though the visibility timeout is {timeout:g} s",
            _option(unacked_mutex_expire=max(1, int(timeout))),
            "unacked_mutex_expire" not in options,
        )
    every = float(options.get("unacked_restore_interval", 10)) * float(options.get("unacked_restore_throttle", 10))
    if every > timeout and not holds:
        yield Hint(
            "unacked_restore_interval x unacked_restore_throttle",
            f"{every:g}",
            f"workers look for messages of dead workers every {every:g} s, though the visibility timeout is "
            f"{timeout:g} s",
            _option(unacked_restore_interval=max(1, int(timeout / 3)), unacked_restore_throttle=1)
            + " (kombu 5.7), or idempotency_hold_messages = True, under which a worker looks as often by itself",
            {"unacked_restore_interval", "unacked_restore_throttle"}.isdisjoint(options),
        )


def _of_rabbitmq(app: Celery, options: Mapping[str, Any]) -> Iterator[Hint]:
    if not options.get("confirm_publish"):
        yield Hint(
            "confirm_publish",
            "False",
            "RabbitMQ confirms no message, so one that it cannot take, or that it gets before it dies, is lost, also "
            "where a task is postponed",
            _option(confirm_publish=True),
            "confirm_publish" not in options,
            is_grave=True,
        )
    if not app.conf.broker_channel_error_retry:
        yield Hint(
            "broker_channel_error_retry",
            "False",
            "RabbitMQ closes the channel of a worker that has a message for more than half an hour "
            "(consumer_timeout), and Celery ends such a worker",
            "broker_channel_error_retry = True",
            is_default=True,
            is_grave=True,
        )
    limit = app.conf.task_time_limit
    for name, queue in app.amqp.queues.items():
        arguments = queue.queue_arguments or {}
        if arguments.get("x-queue-type") == "quorum" and queue.exchange.type == "direct":
            yield Hint(
                f"exchange of the quorum queue {name}",
                "direct",
                "what is postponed waits in a worker and takes up its prefetch count",
                'a topic exchange, or task_default_exchange_type = "topic"',
                is_default=False,
            )
        timeout = arguments.get("x-consumer-timeout")
        if isinstance(timeout, int) and (limit is None or limit * 1000 >= timeout):
            longest = "any time, as task_time_limit is not set" if limit is None else f"{limit:g} s (task_time_limit)"
            yield Hint(
                f"x-consumer-timeout of the queue {name}",
                str(timeout),
                f"RabbitMQ delivers a message again after {timeout / 1000:g} s, and a body may take {longest}",
                "a shorter task_time_limit, or a longer x-consumer-timeout",
                is_default=False,
            )


def _option(**options: Any) -> str:
    written = ", ".join(f'"{name}": {value}' for name, value in options.items())
    return f"broker_transport_options = {{..., {written}}}"
