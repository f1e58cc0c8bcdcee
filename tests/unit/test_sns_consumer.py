"""A consumer of a queue, with SQS acted by a list: what it publishes, deletes, leaves and gives back; its worker."""
# mypy: allow-untyped-decorators

import json
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import click
import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.contrib import sns as module
from celery_idempotent.contrib.sns import By, Route, Subscriber, Subscribers, consume
from celery_idempotent.integration import settings
from celery_idempotent.integration.operating.worker import looking
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import an_app, published
from tests.support.waiting import wait_until

TOPIC = "arn:aws:sns:eu-west-1:123456789012:orders"
URL = "https://sqs.eu-west-1.amazonaws.com/1/orders"


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
        self.names: list[str] = []

    def put(self, *bodies: str, group: str = "") -> None:
        for body in bodies:
            name = f"m-{len(self.messages)}"
            attributes = {"ApproximateReceiveCount": "1", **({"MessageGroupId": group} if group else {})}
            self.messages.append({"MessageId": name, "ReceiptHandle": name, "Body": body, "Attributes": attributes})

    def put_orders(self, number: int) -> None:
        self.put(*(a_notification({"order_id": f"o-{each}"}) for each in range(number)))

    def get_queue_url(self, QueueName: str) -> dict[str, str]:  # noqa: N803
        self.names.append(QueueName)
        return {"QueueUrl": f"https://sqs.eu-west-1.amazonaws.com/1/{QueueName}"}

    def receive_message(self, **options: Any) -> dict[str, Any]:
        self.asked.append(options)
        if self.fails is not None:
            raise self.fails
        most = options["MaxNumberOfMessages"]
        taken, self.messages = self.messages[:most], self.messages[most:]
        return {"Messages": taken} if taken else {}

    def delete_message_batch(self, QueueUrl: str, Entries: list[Any]) -> dict[str, Any]:  # noqa: N803
        gone = [each for each in Entries if each["ReceiptHandle"] != "m-lost"]
        self.deleted += [each["ReceiptHandle"] for each in gone]
        return {"Failed": [{"Code": "ReceiptHandleIsInvalid"}]} if len(gone) < len(Entries) else {}

    def change_message_visibility_batch(self, QueueUrl: str, Entries: list[Any]) -> None:  # noqa: N803
        assert {each["VisibilityTimeout"] for each in Entries} == {0}
        self.given_back += [each["ReceiptHandle"] for each in Entries]

    @property
    def done(self) -> tuple[list[str], list[str]]:
        """What was deleted, and what was given back."""
        return self.deleted, self.given_back


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def app() -> Celery:
    app = an_app()

    def charge(order_id: str, cents: int = 0) -> None: ...

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
def consumer(app: Celery, queue: Queue) -> Consumer:
    def make(*tasks: str, **route: Any) -> Subscriber:
        sqs: Any = queue
        routes = [Route(**{"queue": "orders", "task": task, **route}) for task in tasks or ("charge",)]
        return Subscriber(app, routes, sqs, threading.Event())

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


def away(*_: Any, **__: Any) -> Any:
    raise OperationalError("connection refused")


def test_queue_is_asked_by_its_url(consumer: Consumer, queue: Queue) -> None:
    """Which a name is turned into once, and a URL is already."""
    by_name, by_url = consumer(), consumer(queue=URL)
    for each in (by_name, by_name, by_url):
        each.look()

    assert queue.names == ["orders"]
    asked = {(each["QueueUrl"], each["VisibilityTimeout"], each["WaitTimeSeconds"]) for each in queue.asked}
    assert asked == {(URL, 60, 10)}


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


def test_notification_that_is_not_deleted_is_told(
    consumer: Consumer, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes again, as the same operation."""
    queue.put_orders(1)
    queue.messages[0]["ReceiptHandle"] = "m-lost"
    consumer().look()
    assert "ReceiptHandleIsInvalid" in caplog.text


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


@pytest.mark.parametrize("given", [{}, {"MessageGroupId": "own"}])
def test_call_keeps_its_group_on_a_broker_of_sqs(
    consumer: Consumer,
    queue: Queue,
    publishing: Publishing,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
) -> None:
    """Unless the route names one. Other brokers know no groups."""
    calls = publishing(lambda options: None)
    for is_sqs in (False, True):
        runtime = SimpleNamespace(broker=SimpleNamespace(is_sqs=is_sqs))
        monkeypatch.setattr(module, "runtime_of", lambda _, runtime=runtime: runtime)
        queue.put(a_notification(), group="g")
        consumer(queue="orders.fifo", options=given).look()

    assert [each.get("MessageGroupId") for each in calls] == [given.get("MessageGroupId"), "own" if given else "g"]


def test_nothing_is_taken_while_the_broker_is_away(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each delivery would count on a notification's way to the dead letter queue."""
    queue.put_orders(1)
    monkeypatch.setattr(app, "connection_for_write", away)

    with pytest.raises(OperationalError):
        consumer().look()

    assert queue.asked == []


def test_batch_is_given_back_when_the_broker_goes(
    app: Celery, consumer: Consumer, queue: Queue, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before are deleted. A broker that has answered is asked again when a call fails, and then before a look."""
    queue.put_orders(1)
    subject, pauses = consumer(), list[float]()
    calls = publishing(lambda options: len(calls) == 2 and away())
    subject.look()
    queue.put_orders(3)
    monkeypatch.setattr(app, "connection_for_write", away)

    def wait(pause: float) -> bool:
        pauses.append(pause)
        return len(pauses) == 3

    monkeypatch.setattr(subject._stopping, "wait", wait)
    subject.run()

    assert queue.done == (["m-0", "m-0"], ["m-1", "m-2"])
    assert len(queue.asked) == 2


def test_message_that_a_broker_refuses_stays_alone(consumer: Consumer, queue: Queue, publishing: Publishing) -> None:
    """The broker is there, so it was this message's fault."""
    queue.put_orders(2)
    publishing(lambda options: options["kwargs"]["order_id"] == "o-0" and away())
    consumer().look()
    assert queue.done == (["m-1"], [])


def test_batch_ends_with_its_visibility(
    consumer: Consumer, queue: Queue, publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on another consumer may have the rest."""
    queue.put_orders(2)
    now = [0.0]
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: now[0]))
    publishing(lambda options: now.__setitem__(0, now[0] + 60))

    consumer().look()

    assert queue.done == (["m-0"], ["m-1"])


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
    assert queue.done == (["m-0"], ["m-1", "m-2"])


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
    asked, made = list[str](), list[Queue]()
    monkeypatch.setattr(queue, "receive_message", lambda **each: asked.append(each["QueueUrl"]) or {})  # type: ignore[func-returns-value]

    def client() -> Any:
        made.append(queue)
        return queue

    tasks = {URL: ["charge", app.tasks["secret"]], f"{URL}-2": ["charge"]}
    consume(app, *(Route(queue=each, task=task) for each in tasks for task in tasks[each]), client=client)
    consume(app, Route(queue=URL, task="charge", when=lambda each: each.subject))
    subject = step_of(app)

    subject.start(SimpleNamespace(app=app))
    wait_until(lambda: set(asked) == set(tasks), "both queues are asked")
    assert [each.name for each in subject._threads] == [f"celery-idempotent-sns-{each}" for each in tasks]
    subject.stop(SimpleNamespace(app=app))

    assert not any(each.is_alive() for each in subject._threads)
    assert len(made) == 2


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
