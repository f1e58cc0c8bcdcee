"""What the settings of a broker lose or cost, and the line to write instead: pure functions of a setup.

What loses messages or ends workers is worth a warning. The rest breaks no promise, and costs time or throughput: there
a value that somebody wrote is worth a warning, and a default of kombu's or Celery's is worth advice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from celery import Celery

from celery_idempotent.integration.binding import is_protected
from celery_idempotent.integration.settings import Broker, runtime_of

_MINUTE = 60
"""Seconds: a visibility timeout that is right where messages are held."""

_LONG = 300
"""Seconds. Up to here a visibility timeout may be somebody's choice, such as for greenlets that do not yield. It is
short for messages that are not held."""

_MUTEX_EXPIRE = 300
_RESTORE_INTERVAL = 10
_RESTORE_THROTTLE = 10
"""kombu's defaults (kombu 5.3 to 5.7, transport/redis; the last two can be set since 5.7)."""


@dataclass(frozen=True, slots=True)
class Hint:
    """One setting that costs something.

    Args:
        setting: Its name.
        found: What it is.
        cost: What comes of that.
        instead: The line to write.
        is_default: Whether nobody wrote what was found.
        is_grave: Whether messages are lost or workers end by it.
    """

    setting: str
    found: str
    cost: str
    instead: str
    is_default: bool
    is_grave: bool = False

    @property
    def is_advice(self) -> bool:
        """Whether it is not worth a warning."""
        return self.is_default and not self.is_grave

    def __str__(self) -> str:
        found = f"{self.found} (default)" if self.is_default else self.found
        return f"{self.setting}={found}: {self.cost}; write {self.instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What hints are asked about.

    Args:
        broker: The broker.
        options: ``broker_transport_options``.
        holds: Whose messages a worker holds.
        unheld_delay: The longest ``default_retry_delay`` of a task whose messages are not held; None: all are.
        has_plain: Whether one of those tasks runs again with each copy of its message.
        fifo: Queues that the settings name and that are FIFO queues, if no setting names a message group.
        is_green: Whether the pool is one of greenlets.
        queues: The queues of a RabbitMQ, by name.
        retries_channels: ``broker_channel_error_retry``.
        time_limit: ``task_time_limit``.
    """

    broker: Broker
    options: Mapping[str, Any]
    holds: bool | Literal["all"]
    unheld_delay: float | None
    has_plain: bool
    fifo: tuple[str, ...]
    is_green: bool
    queues: Mapping[str, Any]
    retries_channels: bool
    time_limit: float | None


def hints(setup: Setup) -> list[Hint]:
    """All that there is to say."""
    return [*(hint for each in _HINTS if (hint := each(setup)) is not None), *_of_queues(setup)]


def setup_of(app: Celery, pool: str, unheld: Iterable[Any]) -> Setup:
    """What the settings of ``app`` say; connects to nothing.

    Args:
        app: The app.
        pool: The module of the worker's pool.
        unheld: The tasks whose messages are not held.
    """
    runtime, options, unheld = runtime_of(app), app.conf.broker_transport_options or {}, list(unheld)
    return Setup(
        broker=runtime.broker,
        options=options,
        holds=runtime.hold_messages,
        unheld_delay=max((each.default_retry_delay or 0 for each in unheld), default=None),
        has_plain=not all(map(is_protected, unheld)),
        fifo=() if _names_groups(app.conf.task_routes) else _fifo(app.conf, options),
        is_green=pool.endswith(".gevent"),
        queues=app.amqp.queues if runtime.broker.is_rabbitmq else {},
        retries_channels=app.conf.broker_channel_error_retry,
        time_limit=app.conf.task_time_limit,
    )


def _names_groups(routes: Any) -> bool:
    """Whether a route names a message group, or may: a router of one's own can make one of the arguments."""
    listed = routes if isinstance(routes, list | tuple) else [routes] if routes else []
    return any(not isinstance(each, Mapping | list | tuple) for each in listed) or "MessageGroupId" in _words(listed)


def _fifo(conf: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    named = [conf.task_default_queue, conf.task_queues, conf.task_routes, list(options.get("predefined_queues") or ())]
    return tuple(sorted({each for each in _words(named) if each.endswith(".fifo")}))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _words(each)
    else:
        yield str(getattr(value, "name", value))


_EXISTING = ", and set it on queues that exist, too: kombu sets it only on those that it creates"


def _long_visibility(setup: Setup) -> Hint | None:
    timeout = setup.broker.visibility_timeout
    if timeout is None or timeout <= _LONG or setup.unheld_delay is not None:
        return None
    return Hint(
        "visibility_timeout",
        f"{timeout:g}",
        f"when a machine dies, its messages stay away for {timeout:g} s; where every worker of the broker holds its "
        "own, a minute is enough",
        _option(visibility_timeout=_MINUTE) + _EXISTING
        if setup.broker.is_sqs
        else _option(visibility_timeout=_MINUTE, unacked_mutex_expire=_MINUTE),
        "visibility_timeout" not in setup.options,
    )


def _polling(setup: Setup) -> Hint | None:
    if not setup.broker.is_sqs or setup.options.get("polling_interval") is not None:
        return None
    return Hint(
        "polling_interval",
        "1",
        "in kombu 5.7, a worker whose prefetch window was full waits for a second before it asks again, so it does at "
        "most concurrency x worker_prefetch_multiplier tasks in a second",
        # kombu's loop for greenlets would ask itself without a pause whether there is room again.
        _option(polling_interval=0.1 if setup.is_green else 0),
        True,
    )


def _mutex(setup: Setup) -> Hint | None:
    timeout, expire = setup.broker.visibility_timeout, _number(setup, "unacked_mutex_expire", _MUTEX_EXPIRE)
    if setup.broker.driver != "redis" or timeout is None or expire <= timeout:
        return None
    return Hint(
        "unacked_mutex_expire",
        f"{expire:g}",
        "a worker that is killed while it looks for messages of dead workers keeps the others from looking for "
        f"{expire:g} s, though the visibility timeout is {timeout:g} s",
        _option(unacked_mutex_expire=max(1, int(timeout))),
        "unacked_mutex_expire" not in setup.options,
    )


def _restore(setup: Setup) -> Hint | None:
    timeout, names = setup.broker.visibility_timeout, {"unacked_restore_interval", "unacked_restore_throttle"}
    every = _number(setup, "unacked_restore_interval", _RESTORE_INTERVAL)
    every *= _number(setup, "unacked_restore_throttle", _RESTORE_THROTTLE)
    if setup.broker.driver != "redis" or timeout is None or setup.holds or every <= timeout:
        return None
    return Hint(
        "unacked_restore_interval x unacked_restore_throttle",
        f"{every:g}",
        f"workers look for messages of dead workers every {every:g} s, though the visibility timeout is {timeout:g} s",
        _option(unacked_restore_interval=max(1, int(timeout / 3)), unacked_restore_throttle=1)
        + " (kombu 5.7), or idempotency_hold_messages = True, under which a worker looks as often by itself",
        names.isdisjoint(setup.options),
    )


def _waiting(setup: Setup) -> Hint | None:
    timeout, delay = setup.broker.visibility_timeout, setup.unheld_delay
    if timeout is None or delay is None:
        return None
    if delay <= timeout and not (setup.has_plain and timeout <= _LONG):
        return None
    whose = "plain tasks" if setup.holds else "any task"
    instead = '"all"' if setup.holds or setup.has_plain else "True"
    return Hint(
        "idempotency_hold_messages",
        str(setup.holds),
        f"no message of {whose} is held, so what takes longer than the visibility timeout ({timeout:g} s) is delivered "
        "again each time, and runs again if its task is plain: a body, a prefetched message, a countdown, a retry that "
        f"waits for its default_retry_delay ({delay:g} s)",
        f"idempotency_hold_messages = {instead}, or a visibility_timeout that is longer than all of these",
        bool(setup.holds) and "visibility_timeout" not in setup.options,
    )


def _groups(setup: Setup) -> Hint | None:
    if not setup.broker.is_sqs or not setup.fifo:
        return None
    return Hint(
        "MessageGroupId",
        "'default'",
        f"calls that name no group share that of kombu, in which tasks run one by one ({', '.join(setup.fifo)})",
        f'apply_async(..., MessageGroupId="customer-7"), or task_routes = [lambda name, args, kwargs, options, **rest: '
        f'{{"queue": "{setup.fifo[0]}", "MessageGroupId": str(args[0])}}]',
        True,
    )


def _unconfirmed(setup: Setup) -> Hint | None:
    if not setup.broker.is_rabbitmq or setup.options.get("confirm_publish"):
        return None
    return Hint(
        "confirm_publish",
        "False",
        "RabbitMQ confirms no message, so one that it cannot take, or that it gets before it dies, is lost, also where "
        "a task is postponed",
        _option(confirm_publish=True),
        "confirm_publish" not in setup.options,
        is_grave=True,
    )


def _channels(setup: Setup) -> Hint | None:
    if not setup.broker.is_rabbitmq or setup.retries_channels:
        return None
    return Hint(
        "broker_channel_error_retry",
        "False",
        "RabbitMQ closes the channel of a worker that has a message for more than half an hour (consumer_timeout), and "
        "Celery ends such a worker",
        "broker_channel_error_retry = True",
        is_default=True,
        is_grave=True,
    )


def _of_queues(setup: Setup) -> Iterator[Hint]:
    for name, queue in setup.queues.items():
        arguments = queue.queue_arguments or {}
        if arguments.get("x-queue-type") == "quorum" and queue.exchange.type == "direct":
            yield Hint(
                f"exchange of the quorum queue {name}",
                "direct",
                "what is postponed waits in a worker and takes up its prefetch count",
                'a topic exchange, or task_default_exchange_type = "topic"',
                is_default=False,
            )
        timeout, limit = arguments.get("x-consumer-timeout"), setup.time_limit
        if isinstance(timeout, int) and (limit is None or limit * 1000 >= timeout):
            longest = "any time, as task_time_limit is not set" if limit is None else f"{limit:g} s (task_time_limit)"
            yield Hint(
                f"x-consumer-timeout of the queue {name}",
                str(timeout),
                f"RabbitMQ delivers a message again after {timeout / 1000:g} s, and a body may take {longest}",
                "a shorter task_time_limit, or a longer x-consumer-timeout",
                is_default=False,
            )


def _number(setup: Setup, option: str, default: float) -> float:
    return float(setup.options.get(option, default))  # kombu takes text, too, as out of an environment variable


def _option(**options: Any) -> str:
    written = ", ".join(f'"{name}": {value}' for name, value in options.items())
    return f"broker_transport_options = {{..., {written}}}"


_HINTS: tuple[Callable[[Setup], Hint | None], ...] = (
    _long_visibility,
    _polling,
    _mutex,
    _restore,
    _waiting,
    _groups,
    _unconfirmed,
    _channels,
)
