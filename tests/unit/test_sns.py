"""Notifications of SNS: which call each becomes, if any, and what a consumer of their queue does with them."""
# mypy: allow-untyped-decorators

import inspect
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import click
import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.contrib import sns as module
from celery_idempotent.contrib.sns import By, Notification, Route, Subscriber, Subscribers, TaskCall, consume, unwrap
from celery_idempotent.errors import KeyMissing, PolicyError
from celery_idempotent.integration import settings
from celery_idempotent.integration.operating.worker import looking
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import an_app, published
from tests.support.scene import raising
from tests.support.waiting import wait_until

TOPIC = "arn:aws:sns:eu-west-1:123456789012:orders"
URL = "https://sqs.eu-west-1.amazonaws.com/1/orders"


def charge(order_id: str, cents: int = 0) -> None: ...
def anything(**arguments: Any) -> None: ...


def _of(text: str, **fields: Any) -> Notification:
    return replace(Notification(message_id="m-1", topic=TOPIC, text=text), **fields)


PLACED = _of('{"order_id": "o-1", "cents": 500, "other": 1}', attributes={"event": "placed"}, subject="new")
RAW = replace(PLACED, message_id="", topic="")
HASH = sha256(PLACED.text.encode()).hexdigest()


def _routed(notification: Notification, *routes: Route, task: Any = charge) -> TaskCall:
    return module.call_of(notification, [(each, inspect.signature(task)) for each in routes], delivered_as="sqs-1")


def _route(**options: Any) -> Route:
    return Route(**{"queue": "orders", "task": "charge", **options})


def _call(notification: Notification, task: Any = charge, **options: Any) -> TaskCall:
    return _routed(notification, _route(**options), task=task)


ATTRIBUTES = {"event": ("String", "placed"), "cents": ("Number", "500"), "seal": ("Binary", "AAE=")}
ENVELOPE = {
    "Type": "Notification",
    "MessageId": "m-1",
    "TopicArn": TOPIC,
    "Subject": "placed",
    "Message": "text",
    "MessageAttributes": {name: {"Type": kind, "Value": value} for name, (kind, value) in ATTRIBUTES.items()},
}
"""As the Developer Guide of SNS shows it."""
NONE: dict[str, str] = {}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"Subject": None, "MessageAttributes": None}, {"subject": "", "attributes": NONE}),
        ({"MessageAttributes": {"a": "b", "c": {"Type": "String"}}}, {"attributes": NONE}),
        ({"Type": "UnsubscribeConfirmation"}, {"kind": "UnsubscribeConfirmation"}),
    ],
)
def test_notification_comes_out_of_its_envelope(change: dict[str, Any], found: dict[str, Any]) -> None:
    """With subject and attributes as text, if it has any; a word about a subscription is told apart."""
    unwrapped = _of("text", subject="placed", attributes={name: value for name, (_, value) in ATTRIBUTES.items()})
    assert unwrap(json.dumps({**ENVELOPE, **change})) == replace(unwrapped, **found)


@pytest.mark.parametrize(
    "body",
    [
        *("", "no JSON", "[" * 100_000, "1", "[]", "{}", '{"Type": "Notification"}', '{"Type": []}'),
        *({"Type": "Event"}, {"MessageId": 1}, {"TopicArn": None}, {"Message": {"order_id": "o-1"}}),
    ],
)
def test_anything_else_is_no_envelope(body: Any) -> None:
    """Raw message delivery has any body, and so have strangers."""
    assert unwrap(body if isinstance(body, str) else json.dumps({**ENVELOPE, **body})) is None


@given(st.dictionaries(st.sampled_from(["order_id", "cents", "other"]), st.integers()))
def test_members_of_the_message_are_the_arguments_of_their_names(message: dict[str, Any]) -> None:
    """Others are not meant for this task, unless it takes anything or a function has chosen them."""
    notification = _of(json.dumps(message))
    assert _call(notification).arguments == {name: each for name, each in message.items() if name != "other"}
    assert _call(notification, task=anything).arguments == message
    assert _call(notification, arguments=lambda each: each.message).arguments == message
    assert _call(notification, arguments=lambda each: {"cents": 1}).arguments == {"cents": 1}


def test_first_route_that_fits_has_it() -> None:
    """Whatever its function looks at; none has what a person has to confirm."""
    with pytest.raises(module.NotRouted, match="SubscriptionConfirmation"):
        _call(replace(PLACED, kind="SubscriptionConfirmation"))
    routes = [_route(when=lambda each: each.attributes["event"] == "paid"), _route(when=lambda each: each.subject)]
    assert _routed(PLACED, *routes, _route()).route is routes[1]


@pytest.mark.parametrize(
    ("notification", "key", "found"),
    [
        (PLACED, By.MESSAGE, "m-1"),
        (replace(PLACED, deduplication_id="d-1"), By.MESSAGE, "orders:d-1"),
        (replace(RAW, deduplication_id="d-1"), By.MESSAGE, "orders:d-1"),
        (replace(PLACED, deduplication_id=HASH), By.MESSAGE, "m-1"),  # an equal text later is another message
        (RAW, By.MESSAGE, PolicyError),  # SQS's id would be another one where SNS delivers twice
        (replace(RAW, deduplication_id=HASH), By.MESSAGE, PolicyError),
        (PLACED, By.POLICY, None),
        (PLACED, "message.order_id", "o-1"),
        (PLACED, "message.cents", "i500"),
        (PLACED, ("message.order_id", "attributes.event"), "l2[s3:o-1,s6:placed]"),
        (PLACED, lambda each: each.attributes["event"], "placed"),
        (PLACED, "subject", "new"),
        *((RAW, key, KeyMissing) for key in ("message.missing", "message_id", ("topic", "subject"), lambda each: None)),
    ],
)
def test_key_is_what_is_named(notification: Notification, key: Any, found: Any) -> None:
    """A text as it stands, anything else in its canonical form; otherwise the publisher's or SNS's id."""
    for queue in ("orders", URL):
        if isinstance(found, type):
            with pytest.raises(found):
                _call(notification, key=key, queue=queue)
        else:
            assert _call(notification, key=key, queue=queue).key == found


def test_each_delivery_of_a_notification_has_one_task_id() -> None:
    """Another for another task or notification; of a raw one by SQS's id of it. The ids are frozen."""
    calls = [
        *(_call(PLACED), _call(PLACED), _call(replace(PLACED, message_id="m-2"))),
        _routed(PLACED, _route(task="other")),
    ]
    assert len({each.task_id for each in calls}) == 3
    assert calls[0].task_id == "53bc39f2-0b7e-5ea5-b219-b34d0c611f15"
    assert _call(RAW, key="message.order_id").task_id == _call(replace(PLACED, message_id="sqs-1")).task_id


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        *(("queue", value, "queue") for value in ("", URL.removesuffix("orders"), None)),
        ("key", "order_id", "'order_id'; the signature is .*message, attributes, subject"),
        ("key", ("topic", "order_id"), "'order_id'"),
        ("key", None, "key=None"),
        ("when", "subject", "when='subject'"),
        ("options", {"task_id": "t"}, "options='task_id'"),
    ],
)
def test_route_that_cannot_work_is_refused(option: str, value: Any, told: str) -> None:
    """In words that say what is there."""
    with pytest.raises(PolicyError, match=told):
        _route(**{option: value})


def a_notification(message: Any = None) -> str:
    text = message if isinstance(message, str) else json.dumps(message or {"order_id": "o-1"})
    return json.dumps({"Type": "Notification", "MessageId": uuid4().hex, "TopicArn": TOPIC, "Message": text})


class Queue:
    """SQS, of one queue: whoever asks gets everything that is visible, and all that was asked of it is noted."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.given_back: list[str] = []
        self.fails: Exception | None = None

    def put(self, *bodies: str, group: str = "") -> None:
        for body in bodies:
            name = f"m-{len(self.messages)}"
            attributes = {"ApproximateReceiveCount": "1", **({"MessageGroupId": group} if group else {})}
            self.messages.append({"MessageId": name, "ReceiptHandle": name, "Body": body, "Attributes": attributes})

    def put_orders(self, number: int) -> None:
        self.put(*(a_notification({"order_id": f"o-{each}"}) for each in range(number)))

    def get_queue_url(self, QueueName: str) -> dict[str, str]:  # noqa: N803
        return {"QueueUrl": f"https://sqs.eu-west-1.amazonaws.com/1/{QueueName}"}

    def receive_message(self, **options: Any) -> dict[str, Any]:
        self.asked.append(options)
        if self.fails is not None:
            raise self.fails
        most = options["MaxNumberOfMessages"]
        taken, self.messages = self.messages[:most], self.messages[most:]
        return {"Messages": taken} if taken else {}

    def delete_message_batch(self, QueueUrl: str, Entries: list[Any]) -> dict[str, Any]:  # noqa: N803
        self.deleted += [each["ReceiptHandle"] for each in Entries]
        return {"Failed": [{"Code": "ReceiptHandleIsInvalid"}]}

    def change_message_visibility_batch(self, QueueUrl: str, Entries: list[Any]) -> None:  # noqa: N803
        assert {each["VisibilityTimeout"] for each in Entries} == {0}
        self.given_back += [each["ReceiptHandle"] for each in Entries]


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def app() -> Celery:
    app = an_app()
    for name, policy in {
        "charge": Policy(key="order_id"),
        "secret": Policy(private=True),
        "observe": Policy(mode="observe"),
        "off": Policy(mode="off"),
    }.items():
        app.task(base=IdempotentTask, shared=False, name=name, idempotent=policy)(charge)
    app.task(shared=False, name="plain")(charge)
    return app


Consumer = Callable[..., Subscriber]


@pytest.fixture
def consumer(app: Celery, queue: Any) -> Consumer:
    def make(*tasks: str, **route: Any) -> Subscriber:
        routes = [_route(**{"task": task, **route}) for task in tasks or ("charge",)]
        return Subscriber(app, routes, queue, threading.Event())

    return make


Publishing = Callable[[Callable[[dict[str, Any]], Any]], list[dict[str, Any]]]


@pytest.fixture
def publishing(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Publishing:
    """Let something happen before a call is published; the options of all that were."""
    publish, calls = app.tasks["charge"].apply_async, list[dict[str, Any]]()

    def before(act: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        def asked(**options: Any) -> Any:
            act(options)
            calls.append(options)
            return publish(**options)

        monkeypatch.setattr(app.tasks["charge"], "apply_async", asked)
        return calls

    return before


away = raising(OperationalError("connection refused"))


def test_a_fork_waits_for_publishing_and_not_for_a_poll(
    consumer: Consumer, queue: Queue, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child would inherit the locks of a publisher; a poll takes seconds, and a pool process that died waits."""
    queue.put_orders(1)
    held, receive = list[bool](), queue.receive_message
    monkeypatch.setattr(queue, "receive_message", lambda **each: held.append(looking.locked()) or receive(**each))  # type: ignore[func-returns-value]
    publishing(lambda options: held.append(looking.locked()))
    consumer().look()
    assert held == [False, True]


@pytest.mark.parametrize(
    ("message", "route", "told"),
    [
        ("no JSON", {}, "no object"),
        ({"cents": 500}, {}, "order_id"),
        ({"order_id": None}, {"key": By.POLICY}, "KeyMissing"),
        ({"order_id": "o-1"}, {"key": "message.order_id", "arguments": lambda each: 1 // 0}, "ZeroDivisionError"),
        ({"order_id": "o-1"}, {"when": lambda each: "cents" in each.message}, "no route"),
        ({"order_id": "o-1"}, {"options": {"countdown": "soon"}}, "TypeError"),
    ],
)
def test_notification_of_which_no_call_can_be_made_stays(
    consumer: Consumer, queue: Queue, caplog: pytest.LogCaptureFixture, message: Any, route: Any, told: str
) -> None:
    """It is neither deleted nor given back, so it comes again later; others are published."""
    queue.put(a_notification(message), a_notification({"order_id": "o-2"}))

    consumer(**route).look()

    assert "m-0" not in queue.deleted + queue.given_back
    line = next(each for each in caplog.records if "idempotency.sns_stays" in each.getMessage())
    assert line.levelno == logging.ERROR
    assert told in line.getMessage()
    assert "deliveries=1" in line.getMessage()


def test_reason_keeps_the_secrets_of_a_task(consumer: Consumer, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Only the type of the error, as its text can quote a message; of several tasks nobody knows whose it was."""
    queue.put_orders(1)
    consumer("charge", "secret", when=lambda each: {}[each.text]).look()
    assert "reason=KeyError" in caplog.text
    assert "o-0" not in caplog.text


@pytest.mark.parametrize(
    ("name", "deleted", "sizes"), [("orders.fifo", ["m-2"], [10, 1]), ("orders", ["m-1", "m-2"], [10, 10])]
)
def test_group_of_a_fifo_queue_waits_for_its_first(
    consumer: Consumer, queue: Queue, name: str, deleted: list[str], sizes: list[int]
) -> None:
    """Others would use up deliveries, so it is read one by one; groups of a standard queue have no order."""
    queue.put("no JSON", a_notification(), group="g")
    queue.put(a_notification(), group="h")
    subject = consumer(queue=name)

    subject.look()
    subject.look()

    assert queue.deleted == deleted
    assert [each["MaxNumberOfMessages"] for each in queue.asked] == sizes


@pytest.mark.parametrize("own", [{}, {"MessageGroupId": "own"}])
def test_call_keeps_its_group_on_a_broker_of_sqs(
    consumer: Consumer, queue: Queue, publishing: Publishing, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    """Unless the route names one. Other brokers know no groups."""
    calls = publishing(lambda options: None)
    for is_sqs in (False, True):
        runtime = SimpleNamespace(broker=SimpleNamespace(is_sqs=is_sqs))
        monkeypatch.setattr(module, "runtime_of", lambda _, runtime=runtime: runtime)
        queue.put(a_notification(), group="g")
        consumer(queue="orders.fifo", options=own).look()

    assert [each.get("MessageGroupId") for each in calls] == [own.get("MessageGroupId"), "own" if own else "g"]


def test_batch_is_given_back_when_the_broker_goes(
    app: Celery, consumer: Consumer, queue: Queue, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before are deleted. Then nothing is taken: a delivery counts on its way to the dead letter queue."""
    queue.put_orders(1)
    subject = consumer()
    calls = publishing(lambda options: len(calls) == 2 and away())
    subject.look()
    queue.put_orders(3)
    monkeypatch.setattr(app, "connection_for_write", away)
    monkeypatch.setattr(subject._stopping, "wait", Mock(side_effect=[False, False, True]))
    subject.run()

    assert (queue.deleted, queue.given_back) == (["m-0", "m-0"], ["m-1", "m-2"])
    assert len(queue.asked) == 2


def test_message_that_a_broker_refuses_stays_alone(
    consumer: Consumer, queue: Queue, publishing: Publishing, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker is there, so it was this message's fault; that SQS did not delete one is told."""
    queue.put_orders(2)
    publishing(lambda options: options["kwargs"]["order_id"] == "o-0" and away())
    consumer().look()
    assert "ReceiptHandleIsInvalid" in caplog.text
    assert (queue.deleted, queue.given_back) == (["m-1"], [])


def test_batch_ends_with_its_visibility(
    consumer: Consumer, queue: Queue, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on another consumer may have the rest; the queue is asked by its URL, which a name is turned into."""
    queue.put_orders(2)
    now = [0.0]
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: now[0]))
    publishing(lambda options: now.__setitem__(0, now[0] + 60))

    consumer().look()

    assert (queue.deleted, queue.given_back) == (["m-0"], ["m-1"])
    ((url, visible),) = [(each["QueueUrl"], each["VisibilityTimeout"]) for each in queue.asked]
    assert (url, visible) == ("https://sqs.eu-west-1.amazonaws.com/1/orders", 60)


def test_it_goes_on_whatever_fails_with_growing_pauses(
    consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to a minute, and from the beginning once it has looked in vain for nothing."""
    queue.fails = ConnectionError("no route to host")
    subject, pauses = consumer(), list[float]()

    def wait(pause: float) -> bool:
        pauses.append(pause)
        queue.fails = {9: None, 10: ConnectionError("again")}.get(len(pauses), queue.fails)
        return len(pauses) == 12

    monkeypatch.setattr(subject._stopping, "wait", wait)
    subject.run()

    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 0, 1, 2]
    assert caplog.text.count("sns_failed") == 10
    assert "no route to host" in caplog.text


def test_it_stops_after_the_call_at_hand(app: Celery, consumer: Consumer, queue: Queue, publishing: Publishing) -> None:
    """What it did not try is there for others at once."""
    queue.put_orders(3)
    subject = consumer()
    publishing(lambda options: subject._stopping.set())
    subject.run()
    assert len(published(app)) == 1
    assert (queue.deleted, queue.given_back) == (["m-0"], ["m-1", "m-2"])


def step_of(app: Celery) -> Subscribers:
    subject = Subscribers(SimpleNamespace(app=app))
    subject.create(SimpleNamespace(app=app))
    return subject


@pytest.mark.parametrize("task", ["plain", "observe", "off", "celery.ping", "none"])
def test_worker_does_not_start_for_a_task_that_would_run_twice(app: Celery, task: str) -> None:
    """It says which one."""
    consume(app, Route(queue="orders", task=task))
    with pytest.raises(click.ClickException, match=f"task='{task}'"):
        step_of(app)


def test_consumers_begin_and_end_with_the_worker(app: Celery, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread and a client for each queue, however many routes it has; a task or its name. A poll is waited for."""
    asked, client = list[str](), Mock(return_value=queue)
    monkeypatch.setattr(queue, "receive_message", lambda **each: asked.append(each["QueueUrl"]) or {})  # type: ignore[func-returns-value]
    tasks = {URL: ["charge", app.tasks["secret"]], f"{URL}-2": ["charge"]}
    consume(app, *(Route(queue=each, task=task) for each in tasks for task in tasks[each]), client=client)
    consume(app, Route(queue=URL, task="charge", when=lambda each: each.subject))
    subject = step_of(app)

    subject.start(SimpleNamespace(app=app))
    wait_until(lambda: set(asked) == set(tasks), "both queues are asked")
    assert [each.name for each in subject._threads] == [f"celery-idempotent-sns-{each}" for each in tasks]
    subject.stop(SimpleNamespace(app=app))

    assert not any(each.is_alive() for each in subject._threads)
    assert client.call_count == 2


def test_store_is_opened_before_forks_wait(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered later comes earlier before a fork: first the look ends, then the store lets go."""
    done: list[str] = []
    app.conf.idempotency_store = "memory://"
    monkeypatch.setattr(settings, "open_store", lambda url: done.append("store") or MemoryStore())  # type: ignore[func-returns-value]
    monkeypatch.setattr(module, "fork_between_looks", lambda: done.append("forks"))
    monkeypatch.setattr(Subscriber, "run", lambda _: None)
    consume(app, Route(queue="orders", task="charge"), client=Queue)  # type: ignore[arg-type]

    step_of(app).start(SimpleNamespace(app=app))

    assert done == ["store", "forks"]


def test_worker_that_lacks_the_extra_does_not_start(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the client is the author's own affair."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    consume(app, Route(queue="orders", task="charge"), client=Queue)  # type: ignore[arg-type]
    step_of(app)
    consume(app, Route(queue="returns", task="charge"))
    with pytest.raises(click.ClickException, match=r"celery-idempotent\[sns\].*errors\.html#package-missing"):
        step_of(app)
