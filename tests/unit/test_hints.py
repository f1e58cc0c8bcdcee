"""What is said of the broker's settings: each hint where it is due, with the line to write, and else nothing."""
# mypy: allow-untyped-decorators

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, _state
from kombu.entity import Exchange, Queue

from celery_idempotent import IdempotencyWarning, IdempotentTask, Policy, StoreUnavailable
from celery_idempotent.integration.broker.hints import Hint, hints
from celery_idempotent.integration.operating import worker
from celery_idempotent.stores.memory import MemoryStore
from tests.support.commands import run
from tests.support.deliveries import an_app, published

REDIS, SQS, AMQP = "redis://127.0.0.1:1", "sqs://a:b@127.0.0.1:1//", "amqp://127.0.0.1:1"
RIGHT: dict[str, dict[str, Any]] = {
    REDIS: {"visibility_timeout": 60, "unacked_mutex_expire": 60},
    SQS: {"visibility_timeout": 60, "polling_interval": 0},
    AMQP: {"confirm_publish": True},
    "sentinel://127.0.0.1:1": {"visibility_timeout": 60, "unacked_mutex_expire": 60},
    "memory://": {},
}
"""By broker, transport options of which there is nothing to say."""
NONE = object()
UNHELD: dict[str, Any] = {"idempotency_hold_messages": False}
PLAIN: dict[str, Any] = {"plain": True}
GROUPED = {"queue": "orders.fifo", "MessageGroupId": "orders"}


@pytest.fixture(autouse=True)
def _only_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Celery's: shared tasks, such as pytest-celery's, would be plain tasks of every app."""
    builtins = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr("celery._state._on_app_finalizers", builtins)


def _app(
    broker: str, options: dict[str, Any], *, plain: bool = False, delay: int = 180, mode: Any = "enforce", **given: Any
) -> Celery:
    """An app whose broker has the right options but for ``options``, where NONE leaves one out."""
    chosen = {name: value for name, value in {**RIGHT[broker], **options}.items() if value is not NONE}
    app = an_app(**{"broker_channel_error_retry": True, **given})
    app.conf.update(broker_url=broker, worker_pool="solo", broker_transport_options=chosen)

    def body() -> None: ...

    app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(mode=mode))(body)
    if plain:
        app.task(shared=False, name="report", default_retry_delay=delay)(body)
    return app


def _said(broker: str, options: dict[str, Any], pool: str = "prefork", **given: Any) -> list[Hint]:
    app = _app(broker, options, **given)
    app.finalize(auto=True)
    return hints(app, f"celery.concurrency.{pool}", worker.unheld_tasks(app))


def _queue(kind: str = "topic", **arguments: Any) -> dict[str, Any]:
    named = {f"x-{name.replace('_', '-')}": value for name, value in {"queue_type": "quorum", **arguments}.items()}
    return {"task_queues": [Queue("orders", Exchange("work", kind), "orders", queue_arguments=named)]}


@pytest.mark.parametrize(
    ("broker", "options", "settings"),
    [
        *((each, {"visibility_timeout": 300}, {"idempotency_hold_messages": "all"}) for each in RIGHT),
        *((each, {}, {}) for each in RIGHT),
        *((each, {"visibility_timeout": 3600}, given) for each in (REDIS, SQS) for given in (UNHELD, PLAIN)),
        *((each, {"visibility_timeout": 3600}, {"mode": "off"}) for each in (REDIS, SQS)),
        *((each, {}, _queue("direct", consumer_timeout=1)) for each in (REDIS, SQS)),
        (SQS, {"polling_interval": 1}, {}),
        (SQS, {"visibility_timeout": 301}, UNHELD),
        (REDIS, {"visibility_timeout": 200, "unacked_restore_interval": 20}, UNHELD),
        (AMQP, {}, _queue()),
        (AMQP, {}, {"task_queues": [Queue("orders", Exchange("work"), "orders")]}),
        (AMQP, {}, _queue(consumer_timeout="soon")),
        (AMQP, {}, {**_queue(consumer_timeout=60_000), "task_time_limit": 59}),
        (REDIS, {}, {"task_default_queue": "orders.fifo"}),
    ],
)
def test_a_setting_that_is_right_where_it_stands_is_silent(broker: str, options: Any, settings: Any) -> None:
    """A long timeout where nobody holds the messages; what only another broker knows; what RabbitMQ will refuse."""
    assert _said(broker, options, **settings) == []


LONG, POLL, LOCK = "visibility_timeout", "polling_interval", "unacked_mutex_expire"
LOOKS, HOLD = "unacked_restore_interval x unacked_restore_throttle", "idempotency_hold_messages"
THROTTLE, CHANNEL = "unacked_restore_throttle", "broker_channel_error_retry"
CONSUMER = "x-consumer-timeout of the queue orders"


@pytest.mark.parametrize(
    ("broker", "options", "settings", "setting", "found", "is_advice", "instead"),
    [
        (REDIS, {LONG: NONE}, {}, LONG, "3600", True, '"visibility_timeout": 60, "unacked_mutex_expire": 60}'),
        (SQS, {LONG: NONE}, {}, LONG, "1800", True, '"visibility_timeout": 60}, and set it on queues that exist'),
        (REDIS, {LONG: 301}, {}, LONG, "301", False, '"visibility_timeout": 60, '),
        (SQS, {LONG: 3600}, {**PLAIN, HOLD: "all"}, LONG, "3600", False, '"visibility_timeout": 60}'),
        (SQS, {POLL: NONE}, {}, POLL, "1", True, '{..., "polling_interval": 0}'),
        (SQS, {POLL: None}, {"pool": "gevent"}, POLL, "1", True, '{..., "polling_interval": 0.1}'),
        (REDIS, {LONG: 60.5, LOCK: NONE}, {}, LOCK, "300", True, '{..., "unacked_mutex_expire": 60}'),
        (REDIS, {LONG: 60.5, LOCK: "61"}, {}, LOCK, "61", False, '{..., "unacked_mutex_expire": 60}'),
        (REDIS, {LONG: 0.5}, {}, LOCK, "60", False, '{..., "unacked_mutex_expire": 1}'),
        (REDIS, {LONG: 99}, UNHELD, LOOKS, "100", True, 'l": 33, "unacked_restore_throttle": 1}'),
        (REDIS, {LONG: 99, THROTTLE: 11}, UNHELD, LOOKS, "110", False, '"unacked_restore_thrott'),
        (SQS, {LONG: 179}, UNHELD, HOLD, "False", False, "idempotency_hold_messages = True"),
        (SQS, {LONG: 179}, {**UNHELD, **PLAIN}, HOLD, "False", False, 'idempotency_hold_messages = "all"'),
        (SQS, {LONG: 179}, PLAIN, HOLD, "True", False, 'idempotency_hold_messages = "all"'),
        (SQS, {LONG: 60}, {**PLAIN, "delay": 1}, HOLD, "True", False, 'idempotency_hold_messages = "all"'),
        (SQS, {LONG: NONE}, {**PLAIN, "delay": 7200}, HOLD, "True", True, "longer than all of these"),
        (AMQP, {"confirm_publish": NONE}, {}, "confirm_publish", "False", False, '{..., "confirm_publish": True}'),
        (AMQP, {}, {CHANNEL: False}, CHANNEL, "False", False, "broker_channel_error_retry = True"),
        (AMQP, {}, _queue("direct"), "exchange of the quorum queue orders", "direct", False, '_type = "topic"'),
        (AMQP, {}, _queue(consumer_timeout=60_000), CONSUMER, "60000", False, "longer x-consumer-timeout"),
        (AMQP, {}, {**_queue(consumer_timeout=6000), "task_time_limit": 6}, CONSUMER, "6000", False, "shorter task"),
    ],
)
def test_a_setting_that_costs_something_is_told_with_the_line_to_write(
    broker: str, options: Any, settings: Any, setting: str, found: str, is_advice: bool, instead: str
) -> None:
    """A default that breaks no promise is advice; what somebody wrote, and what loses messages, is worth a warning."""
    said = _said(broker, options, **settings)
    assert (said[0].setting, said[0].found, said[0].is_advice) == (setting, found, is_advice)
    assert instead in said[0].instead
    assert ("no message of any task" in said[0].cost) is (setting == HOLD and found == "False")
    assert len(said) == (2 if setting == LOOKS else 1), "where kombu alone looks, no message is held, which is told too"


@pytest.mark.parametrize(
    "settings",
    [
        {"task_default_queue": "orders.fifo"},
        {"task_queues": [Queue("mail"), Queue("orders.fifo")]},
        {"task_routes": {"shop.charge": "orders.fifo"}},
        {"task_routes": ([("shop.*", {"queue": Queue("orders.fifo")})],)},
        {"predefined_queues": {"orders.fifo": {"url": "https://sqs.eu-west-1.amazonaws.com/1/orders.fifo"}}},
    ],
)
def test_one_message_group_for_all_is_told_wherever_the_queue_is_named(settings: dict[str, Any]) -> None:
    """Unless a route names a group, or a router of one's own may."""
    options = {name: settings.pop(name) for name in list(settings) if name == "predefined_queues"}
    (hint,) = _said(SQS, options, **settings)
    assert (hint.setting, hint.found, hint.is_advice) == ("MessageGroupId", "'default'", True)
    for routes in ({"shop.*": GROUPED}, [len], len, "shop.routes.to_a_group", ["shop.routes.Router"]):
        assert _said(SQS, options, **{**settings, "task_routes": routes}) == []


def test_the_line_for_message_groups_makes_one_of_the_arguments() -> None:
    """What the hint says to write is what Celery takes."""
    (hint,) = _said(SQS, {}, task_default_queue="orders.fifo")
    written: dict[str, Any] = {}
    exec(hint.instead.partition(", or ")[2], written)
    app = an_app(task_routes=written["task_routes"], task_default_queue="orders.fifo")

    @app.task(base=IdempotentTask, shared=False, name="charge")
    def charge(customer: int) -> None: ...

    charge.delay(7)
    (message,) = published(app)
    assert message.properties["MessageGroupId"] == "7"


def test_worker_warns_once_of_what_somebody_wrote_and_logs_what_nobody_wrote(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO: it costs time, never the promise, and most workers would warn of it at each start."""
    caplog.set_level("INFO", "celery_idempotent")
    app = _app(SQS, {"visibility_timeout": 1800, "polling_interval": NONE})
    pool = type("TaskPool", (), {"__module__": "celery.concurrency.solo"})
    with pytest.warns(IdempotencyWarning, match="^visibility_timeout=1800: .* write broker_transport_options") as told:
        worker.StoreCheck(None).create(SimpleNamespace(app=app, pool_cls=pool))
    assert len(told) == 1
    (line,) = [each for each in caplog.records if "idempotency.hint" in each.getMessage()]
    assert (line.levelname, "setting=polling_interval found=1 cost=" in line.getMessage()) == ("INFO", True)
    assert r'instead="broker_transport_options = {..., \"polling_interval\": 0}' in line.getMessage()


def test_hints_do_not_wait_for_the_store() -> None:
    """A worker that starts in an outage warns, too."""
    store: Any = MemoryStore()
    store.verify = Mock(side_effect=StoreUnavailable("s", "verify", "timed out"))
    app = _app(SQS, {"visibility_timeout": 1800}, idempotency_store=store)
    with pytest.warns(IdempotencyWarning, match="visibility_timeout=1800"), pytest.raises(StoreUnavailable):
        worker.check(app, "celery.concurrency.solo")


def test_check_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody wrote as a warning, and what nobody wrote as advice; it succeeds all the same."""
    monkeypatch.setattr("kombu.Connection.connect", lambda self: None)
    app = _app(SQS, {"visibility_timeout": 1800, "polling_interval": NONE})
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        told = run(app, "check")
    said = [each.partition("=")[0] for each in sorted(told.stderr.splitlines())]
    assert (told.exit_code, said) == (0, ["Advice: polling_interval", "Warning: visibility_timeout"])
    assert run(_app(SQS, {}), "check").stderr == ""
