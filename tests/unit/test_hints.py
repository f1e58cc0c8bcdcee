"""What is said of the broker's settings: each hint where it is due, with the line to write, and else nothing."""
# mypy: allow-untyped-decorators

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, _state
from click.testing import CliRunner
from kombu.entity import Exchange, Queue

from celery_idempotent import IdempotencyWarning, IdempotentTask, Policy, StoreUnavailable
from celery_idempotent.integration.broker.hints import Hint, hints
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.operating import worker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import an_app, published

REDIS = "redis://127.0.0.1:1"
SQS = "sqs://a:b@127.0.0.1:1//"
RIGHT: dict[str, dict[str, Any]] = {
    REDIS: {"visibility_timeout": 60, "unacked_mutex_expire": 60},
    SQS: {"visibility_timeout": 60, "polling_interval": 0},
}
"""By broker, transport options of which there is nothing to say."""
GROUPED = {"queue": "orders.fifo", "MessageGroupId": "orders"}


@pytest.fixture(autouse=True)
def _only_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Celery's: shared tasks, such as pytest-celery's, would be plain tasks of every app."""
    builtins = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr("celery._state._on_app_finalizers", builtins)


def _app(broker: str, plain: bool = False, mode: Any = "enforce", **settings: Any) -> Celery:
    app = an_app()
    app.conf.update(broker_url=broker, worker_pool="solo", **settings)

    @app.task(base=IdempotentTask, shared=False, name="shop.charge", idempotent=Policy(mode=mode))
    def charge() -> None: ...

    if plain:

        @app.task(shared=False, name="shop.plain")
        def other() -> None: ...

    return app


def _said(broker: str, pool: str = "celery.concurrency.prefork", **options: Any) -> list[Hint]:
    app = _app(broker, **options)
    app.finalize(auto=True)
    return hints(app, pool, worker.unheld_tasks(app))


@pytest.mark.parametrize("broker", [*RIGHT, "sentinel://127.0.0.1:1", "amqp://127.0.0.1:1", "memory://"])
@pytest.mark.parametrize("held", [True, "all"])
def test_right_settings_are_silent(broker: str, held: Any) -> None:
    """Also those of brokers that take back no message by themselves."""
    options = RIGHT.get(broker, {**RIGHT[REDIS], "confirm_publish": True})
    right: dict[str, Any] = {"broker_transport_options": options, "broker_channel_error_retry": True}
    assert _said(broker, **right, idempotency_hold_messages=held) == []
    assert _said(broker, **{**right, "broker_transport_options": {**options, "visibility_timeout": 300}}) == []


@pytest.mark.parametrize("broker", RIGHT)
def test_arguments_of_queues_that_only_rabbitmq_knows_are_no_matter_elsewhere(broker: str) -> None:
    """An app that has come from RabbitMQ may still have them."""
    queue = Queue("orders", Exchange("work"), queue_arguments={"x-queue-type": "quorum", "x-consumer-timeout": 1})
    assert _said(broker, broker_transport_options=RIGHT[broker], task_queues=[queue]) == []


@pytest.mark.parametrize(("broker", "default"), [(REDIS, 3600), (SQS, 1800)])
def test_a_visibility_timeout_that_keeps_messages_of_dead_machines_away_is_told(broker: str, default: int) -> None:
    """The default as much as a value that somebody wrote when it had to be longer than any body."""
    others = {name: value for name, value in RIGHT[broker].items() if name != "visibility_timeout"}
    for options, seconds in ((others, default), ({**others, "visibility_timeout": 301}, 301)):
        (hint,) = _said(broker, broker_transport_options=options)
        assert hint.setting == "visibility_timeout"
        assert hint.found == str(seconds)
        assert f"stay away for {seconds} s" in hint.cost
        assert 'broker_transport_options = {..., "visibility_timeout": 60' in hint.instead
        assert (', "unacked_mutex_expire": 60}' in hint.instead) == (broker == REDIS)
        assert ("queues that exist" in hint.instead) == (broker == SQS)
        assert hint.is_default == (options is others)


@pytest.mark.parametrize("settings", [{"idempotency_hold_messages": False}, {"plain": True}, {"mode": "off"}])
@pytest.mark.parametrize("broker", RIGHT)
def test_a_long_visibility_timeout_is_right_where_messages_are_not_held(broker: str, settings: Any) -> None:
    """It has to be longer than the bodies of which nobody holds the message."""
    assert _said(broker, broker_transport_options={**RIGHT[broker], "visibility_timeout": 3600}, **settings) == []


def test_every_task_may_be_held() -> None:
    """Then the bodies of plain tasks do not need a long timeout, either."""
    options = {**RIGHT[SQS], "visibility_timeout": 3600}
    (hint,) = _said(SQS, broker_transport_options=options, plain=True, idempotency_hold_messages="all")
    assert hint.setting == "visibility_timeout"


@pytest.mark.parametrize(
    ("pool", "interval"),
    [("prefork", "0"), ("thread", "0"), ("solo", "0"), ("gevent", "0.1")],
)
def test_kombus_pause_on_sqs_is_told(pool: str, interval: str) -> None:
    """It caps the throughput of a worker; a value that somebody wrote is a choice. None of kombu's is a value."""
    for options in ({"visibility_timeout": 60}, {"visibility_timeout": 60, "polling_interval": None}):
        (hint,) = _said(SQS, f"celery.concurrency.{pool}", broker_transport_options=options)
        assert (hint.setting, hint.found, hint.is_default) == ("polling_interval", "1", True)
        assert "concurrency x worker_prefetch_multiplier tasks in a second" in hint.cost
        assert hint.instead == f'broker_transport_options = {{..., "polling_interval": {interval}}}'
    assert _said(SQS, broker_transport_options={"visibility_timeout": 60, "polling_interval": 1}) == []


def test_a_lock_of_redis_that_outlasts_the_visibility_timeout_is_told() -> None:
    """Also one that comes as text, out of the environment."""
    for options, found in (({}, "300"), ({"unacked_mutex_expire": 61}, "61"), ({"unacked_mutex_expire": "61"}, "61")):
        (hint,) = _said(REDIS, broker_transport_options={"visibility_timeout": 60.5, **options})
        assert (hint.setting, hint.found, hint.is_default) == ("unacked_mutex_expire", found, not options)
        assert f"from looking for {found} s" in hint.cost
        assert hint.instead == 'broker_transport_options = {..., "unacked_mutex_expire": 60}'
    (hint,) = _said(REDIS, broker_transport_options={"visibility_timeout": 0.5})
    assert hint.instead == 'broker_transport_options = {..., "unacked_mutex_expire": 1}'  # 0 would never be free


def test_kombus_pace_on_redis_is_told_where_no_keeper_looks() -> None:
    """A keeper looks every third of the timeout; kombu alone every hundred seconds."""
    base = {**RIGHT[REDIS], "visibility_timeout": 90, "unacked_mutex_expire": 90}
    for options in ({}, {"unacked_restore_interval": 100, "unacked_restore_throttle": 1}):
        said = _said(REDIS, broker_transport_options={**base, **options}, idempotency_hold_messages=False)
        hint = said[0]
        assert hint.setting == "unacked_restore_interval x unacked_restore_throttle"
        assert (hint.found, hint.is_default) == ("100", not options)
        assert "every 100 s, though the visibility timeout is 90 s" in hint.cost
        assert '{..., "unacked_restore_interval": 30, "unacked_restore_throttle": 1}' in hint.instead
    quick = {"visibility_timeout": 200, "unacked_restore_throttle": 10, "unacked_mutex_expire": 90}
    assert _said(REDIS, broker_transport_options=quick, idempotency_hold_messages=False) == []


@pytest.mark.parametrize(
    ("settings", "whose", "instead"),
    [
        ({"idempotency_hold_messages": False}, "any task", "idempotency_hold_messages = True"),
        ({"idempotency_hold_messages": False, "plain": True}, "any task", 'idempotency_hold_messages = "all"'),
        ({"plain": True}, "plain tasks", 'idempotency_hold_messages = "all"'),
    ],
)
def test_what_waits_for_longer_than_the_visibility_timeout_and_is_not_held_is_told(
    settings: Any, whose: str, instead: str
) -> None:
    """Such as a retry: Celery's default_retry_delay is three minutes."""
    (hint,) = _said(SQS, broker_transport_options={**RIGHT[SQS], "visibility_timeout": 179}, **settings)
    assert hint.setting == "idempotency_hold_messages"
    assert not hint.is_advice
    assert f"no message of {whose} is held, so what takes longer than the visibility timeout (179 s)" in hint.cost
    assert "waits for its default_retry_delay (180 s)" in hint.cost
    assert hint.instead.startswith(instead)
    assert _said(SQS, broker_transport_options={**RIGHT[SQS], "visibility_timeout": 301}, **settings) == []


@pytest.mark.parametrize("broker", RIGHT)
def test_a_short_visibility_timeout_under_plain_tasks_is_warned_of(broker: str) -> None:
    """A body of three minutes would begin three times, whatever its retries wait for; at a timeout that is written."""
    app = _app(broker, broker_transport_options=RIGHT[broker])

    @app.task(shared=False, name="shop.report", default_retry_delay=1)
    def report() -> None: ...

    with pytest.warns(IdempotencyWarning, match=r"no message of plain tasks is held.*timeout \(60 s\).* = \"all\""):
        worker.StoreCheck(None).create(_Worker(app))
    app.conf.idempotency_hold_messages = "all"
    vars(runtime_of(app)).pop("hold_messages")
    worker.StoreCheck(None).create(_Worker(app))


def test_a_delay_that_exceeds_what_nobody_wrote_is_advice() -> None:
    """kombu's timeout is long, and right for most plain tasks."""
    app = _app(SQS, broker_transport_options={"polling_interval": 0})

    @app.task(shared=False, name="shop.report", default_retry_delay=7200)
    def report() -> None: ...

    app.finalize(auto=True)
    (hint,) = hints(app, "celery.concurrency.prefork", worker.unheld_tasks(app))
    assert hint.is_advice


@pytest.mark.parametrize(
    "settings",
    [
        {"task_default_queue": "orders.fifo"},
        {"task_queues": [Queue("mail"), Queue("orders.fifo")]},
        {"task_routes": {"shop.*": {"queue": "orders.fifo"}}},
        {"task_routes": {"shop.charge": "orders.fifo"}},
        {"task_routes": ([("shop.*", {"queue": Queue("orders.fifo")})],)},
        {"predefined_queues": {"orders.fifo": {"url": "https://sqs.eu-west-1.amazonaws.com/1/orders.fifo"}}},
    ],
)
def test_one_message_group_for_all_is_told(settings: dict[str, Any]) -> None:
    """Wherever the queue is named; unless a route names a group, or a router of one's own may."""
    options = RIGHT[SQS] | {name: settings.pop(name) for name in list(settings) if name == "predefined_queues"}
    (hint,) = _said(SQS, broker_transport_options=options, **settings)
    assert (hint.setting, hint.found, hint.is_default) == ("MessageGroupId", "'default'", True)
    assert "run one by one (orders.fifo)" in hint.cost
    assert 'apply_async(..., MessageGroupId="customer-7")' in hint.instead
    for routes in ({"shop.*": GROUPED}, [_to_a_group], _to_a_group, "shop.routes.to_a_group", ["shop.routes.Router"]):
        assert _said(SQS, broker_transport_options=options, **{**settings, "task_routes": routes}) == []
    assert _said(REDIS, broker_transport_options=RIGHT[REDIS], **settings) == []


def _to_a_group(name: str, args: Any, kwargs: Any, options: Any, **rest: Any) -> dict[str, Any]:
    return GROUPED


def test_the_line_for_message_groups_makes_one_of_the_arguments() -> None:
    """What the hint says to write is what Celery takes."""
    (hint,) = _said(SQS, broker_transport_options=RIGHT[SQS], task_default_queue="orders.fifo")
    written: dict[str, Any] = {}
    exec(hint.instead.partition(", or ")[2], written)
    app = an_app(task_routes=written["task_routes"])
    app.conf.task_default_queue = "orders.fifo"

    @app.task(base=IdempotentTask, shared=False, name="shop.charge")
    def charge(customer: int) -> None: ...

    charge.delay(7)
    (message,) = published(app)
    assert message.properties["MessageGroupId"] == "7"


# -- where they are told


class _Worker:
    def __init__(self, app: Celery) -> None:
        self.app = app
        self.pool_cls = type("TaskPool", (), {"__module__": "celery.concurrency.solo"})


def test_a_worker_warns_once_of_what_somebody_wrote(caplog: pytest.LogCaptureFixture) -> None:
    """For the app, not for each of its tasks."""
    app = _app(SQS, broker_transport_options={**RIGHT[SQS], "visibility_timeout": 1800})

    @app.task(base=IdempotentTask, shared=False, name="shop.refund")
    def refund() -> None: ...

    caplog.set_level(logging.INFO, "celery_idempotent")

    with pytest.warns(IdempotencyWarning, match=r"visibility_timeout=1800: .* write broker_transport_options") as told:
        worker.StoreCheck(None).create(_Worker(app))

    assert len(told) == 1
    assert "idempotency.hint" not in caplog.text


def test_a_worker_logs_what_nobody_wrote(caplog: pytest.LogCaptureFixture) -> None:
    """At INFO: it costs time, never the promise, and most workers would warn of it at each start."""
    caplog.set_level(logging.INFO, "celery_idempotent")
    worker.StoreCheck(None).create(_Worker(_app(REDIS, broker_transport_options={"unacked_mutex_expire": 60})))

    (line,) = [each for each in caplog.records if each.getMessage().startswith("event=idempotency.hint ")]
    assert line.levelno == logging.INFO
    assert 'setting=visibility_timeout found=3600 cost="when a machine dies' in line.getMessage()
    assert r'instead="broker_transport_options = {..., \"visibility_timeout\": 60, ' in line.getMessage()


@pytest.mark.filterwarnings("default")
def test_check_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody wrote as a warning, and what nobody wrote as advice; it succeeds all the same."""
    monkeypatch.setattr("kombu.Connection.connect", lambda self: None)
    app = _app(SQS, broker_transport_options={"visibility_timeout": 1800})
    told = CliRunner().invoke(idempotency, ["check"], obj=SimpleNamespace(app=app))

    assert told.exit_code == 0
    warned, advised = sorted(told.stderr.splitlines(), reverse=True)
    assert warned.startswith("Warning: visibility_timeout=1800: ")
    assert advised.startswith("Advice: polling_interval=1 (default): ")
    assert "answers and can be used" in told.stdout

    right = _app(SQS, broker_transport_options=RIGHT[SQS])
    assert CliRunner().invoke(idempotency, ["check"], obj=SimpleNamespace(app=right)).stderr == ""


def test_hints_do_not_wait_for_the_store() -> None:
    """A worker that starts in an outage warns, too."""

    class Away(MemoryStore):
        def verify(self) -> None:
            raise StoreUnavailable("s", "verify", "timed out")

    app = _app(SQS, broker_transport_options={**RIGHT[SQS], "visibility_timeout": 1800}, idempotency_store=Away())
    with pytest.warns(IdempotencyWarning, match="visibility_timeout=1800"), pytest.raises(StoreUnavailable):
        worker.check(app, "celery.concurrency.solo")
