"""A consumer of a queue, with SQS acted by a list: what it publishes, deletes, leaves and gives back; its worker."""
# mypy: allow-untyped-decorators

import json
import logging
import sys
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


def _notification(message: Any, **fields: str) -> str:
    text = message if isinstance(message, str) else json.dumps(message)
    return json.dumps({"Type": "Notification", "MessageId": uuid4().hex, "TopicArn": TOPIC, "Message": text, **fields})


class Queue:
    """SQS, of one queue: whoever asks gets everything that is visible, and what was asked of it is noted."""

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


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def app() -> Celery:
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(key="order_id"))
    def charge(order_id: str, cents: int = 0) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="secret", idempotent=Policy(private=True))
    def secret(order_id: str) -> None: ...

    @app.task(shared=False, name="plain")
    def plain(order_id: str) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="observe", idempotent=Policy(mode="observe"))
    def observe(order_id: str) -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="off", idempotent=Policy(mode="off"))
    def off(order_id: str) -> None: ...

    return app


Consumer = Callable[..., Subscriber]


@pytest.fixture
def consumer(app: Celery, queue: Queue) -> Consumer:
    def make(**route: Any) -> Subscriber:
        sqs: Any = queue
        return Subscriber(app, [Route(**{"queue": "orders", "task": "charge", **route})], sqs, threading.Event())

    return make


def test_queue_is_asked_by_its_url(consumer: Consumer, queue: Queue) -> None:
    """Which a name is turned into once, and a URL is already."""
    by_name, by_url = consumer(), consumer(queue="https://sqs.eu-west-1.amazonaws.com/1/orders")
    for each in (by_name, by_name, by_url):
        each.look()

    assert queue.names == ["orders"]
    assert {each["QueueUrl"] for each in queue.asked} == {"https://sqs.eu-west-1.amazonaws.com/1/orders"}
    assert {(each["VisibilityTimeout"], each["WaitTimeSeconds"]) for each in queue.asked} == {(60, 10)}


def test_call_has_the_options_of_its_route(app: Celery, consumer: Consumer, queue: Queue) -> None:
    """A queue of its own among them."""
    queue.put(_notification({"order_id": "o-1"}))
    name = uuid4().hex

    consumer(options={"queue": name, "headers": {"tenant": "acme"}}).look()

    (message,) = published(app, name)
    assert message.headers["tenant"] == "acme"
    assert queue.deleted == ["m-0"]


def test_a_fork_waits_for_what_is_published_and_not_for_a_poll(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child would inherit the locks of a publisher; a poll takes seconds, and a pool process that died waits."""
    queue.put(_notification({"order_id": "o-1"}))
    held: list[bool] = []
    receive, publish = queue.receive_message, app.tasks["charge"].apply_async
    monkeypatch.setattr(queue, "receive_message", lambda **each: held.append(looking.locked()) or receive(**each))  # type: ignore[func-returns-value]
    monkeypatch.setattr(
        app.tasks["charge"],
        "apply_async",
        lambda **each: held.append(looking.locked()) or publish(**each),  # type: ignore[func-returns-value]
    )

    consumer().look()

    assert held == [False, True]


@pytest.mark.parametrize(
    ("message", "route", "told"),
    [
        ("no JSON", {}, "no object"),
        ({"cents": 500}, {}, "order_id"),
        ({"order_id": None}, {"key": By.POLICY}, "KeyMissing"),
        ({"order_id": "o-1"}, {"key": "message.event_id"}, "KeyMissing"),
        ({"order_id": "o-1"}, {"key": "message.order_id", "arguments": lambda each: 1 // 0}, "ZeroDivisionError"),
        ({"order_id": ""}, {"key": "message.order_id"}, "KeyMissing"),
        ({"order_id": "o-1"}, {"when": lambda each: "cents" in each.message}, "no route"),
        ({"order_id": "o-1"}, {"options": {"serializer": "none such"}}, "none such"),
        ({"order_id": "o-1"}, {"options": {"countdown": "soon"}}, "TypeError"),
    ],
)
def test_notification_of_which_no_call_can_be_made_stays(
    app: Celery,
    consumer: Consumer,
    queue: Queue,
    caplog: pytest.LogCaptureFixture,
    message: Any,
    route: Any,
    told: str,
) -> None:
    """It is neither deleted nor given back, so it comes again later; others are published."""
    queue.put(_notification(message), _notification({"order_id": "o-2"}))

    consumer(**route).look()

    assert "m-0" not in queue.deleted + queue.given_back
    line = next(each for each in caplog.records if "idempotency.sns_stays" in each.getMessage())
    assert line.levelno == logging.ERROR
    assert told in line.getMessage()
    assert "deliveries=1" in line.getMessage()


def test_reason_keeps_what_a_task_redacts(consumer: Consumer, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Only the type of the error, as its text can quote a message."""
    queue.put(_notification({"order_id": "o-1"}))

    consumer(task="secret", key=lambda each: {}[each.text]).look()

    assert "reason=PolicyError" in caplog.text
    assert "o-1" not in caplog.text


def test_reason_keeps_what_one_of_several_tasks_redacts(
    app: Celery, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows whose message it was."""
    queue.put(_notification({"order_id": "o-1"}))
    broken: Any = lambda each: {}[each.text]  # noqa: E731
    routes = [Route(queue="orders", task="charge", when=broken), Route(queue="orders", task="secret")]
    sqs: Any = queue

    Subscriber(app, routes, sqs, threading.Event()).look()

    assert "reason=KeyError" in caplog.text
    assert "o-1" not in caplog.text


def test_notification_that_is_not_deleted_is_told(
    consumer: Consumer, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes again, as the same operation."""
    queue.put(_notification({"order_id": "o-1"}))
    queue.messages[0]["ReceiptHandle"] = "m-lost"

    consumer().look()

    assert "sns_not_deleted" in caplog.text
    assert "ReceiptHandleIsInvalid" in caplog.text


def test_fifo_queue_is_read_one_by_one_while_one_stays(consumer: Consumer, queue: Queue) -> None:
    """Those behind it would use up deliveries on their own way to the dead letter queue."""
    queue.put("no JSON", _notification({"order_id": "o-1"}), group="g")
    queue.put(_notification({"order_id": "o-2"}), group="h")
    ordered = consumer(queue="orders.fifo")

    ordered.look()
    ordered.look()

    assert queue.deleted == ["m-2"]
    assert [each["MaxNumberOfMessages"] for each in queue.asked] == [10, 1]


def test_groups_of_a_standard_queue_wait_for_nobody(consumer: Consumer, queue: Queue) -> None:
    """They share the queue fairly, and have no order."""
    queue.put("no JSON", _notification({"order_id": "o-1"}), group="g")

    consumer().look()

    assert queue.deleted == ["m-1"]


@pytest.mark.parametrize("given", [{}, {"MessageGroupId": "own"}])
def test_call_keeps_its_group_on_a_broker_of_sqs(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    """Unless the route names one. Other brokers know no groups."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(app.tasks["charge"], "apply_async", lambda **options: calls.append(options))
    for is_sqs in (False, True):
        monkeypatch.setattr(module, "runtime_of", lambda _, is_sqs=is_sqs: _Runtime(is_sqs))
        queue.put(_notification({"order_id": "o-1"}), group="g")
        consumer(queue="orders.fifo", options=given).look()

    assert [each.get("MessageGroupId") for each in calls] == [given.get("MessageGroupId"), "own" if given else "g"]


class _Runtime:
    def __init__(self, is_sqs: bool) -> None:
        self.broker = self
        self.is_sqs = is_sqs


# -- the broker


def _away(*_: Any, **__: Any) -> Any:
    raise OperationalError("connection refused")


def test_nothing_is_taken_while_the_broker_is_away(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each delivery would count on a notification's way to the dead letter queue."""
    queue.put(_notification({"order_id": "o-1"}))
    monkeypatch.setattr(app, "connection_for_write", _away)

    with pytest.raises(OperationalError):
        consumer().look()

    assert queue.asked == []


def test_what_was_taken_is_given_back_when_the_broker_goes(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was published before is deleted."""
    queue.put(*(_notification({"order_id": f"o-{number}"}) for number in range(3)))
    publish, sent = app.tasks["charge"].apply_async, list[str]()

    def once(**options: Any) -> Any:
        if sent:
            monkeypatch.setattr(app, "connection_for_write", _away)
            _away()
        sent.append("")
        return publish(**options)

    monkeypatch.setattr(app.tasks["charge"], "apply_async", once)

    with pytest.raises(OperationalError):
        consumer().look()

    assert queue.deleted == ["m-0"]
    assert queue.given_back == ["m-1", "m-2"]


def test_message_that_a_broker_refuses_stays_alone(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker is there, so it was this message's fault."""
    queue.put(*(_notification({"order_id": f"o-{number}"}) for number in range(2)))
    publish = app.tasks["charge"].apply_async

    def refuse_first(**options: Any) -> Any:
        return _away() if options["kwargs"]["order_id"] == "o-0" else publish(**options)

    monkeypatch.setattr(app.tasks["charge"], "apply_async", refuse_first)

    consumer().look()

    assert (queue.deleted, queue.given_back) == (["m-1"], [])
    assert "connection refused" in caplog.text


# -- its life


def test_batch_ends_with_its_visibility(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on another consumer may have the rest."""
    queue.put(*(_notification({"order_id": f"o-{number}"}) for number in range(2)))
    now = [0.0]
    monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: now[0]))
    publish = app.tasks["charge"].apply_async

    def slowly(**options: Any) -> Any:
        now[0] += 60
        return publish(**options)

    monkeypatch.setattr(app.tasks["charge"], "apply_async", slowly)

    consumer().look()

    assert (queue.deleted, queue.given_back) == (["m-0"], ["m-1"])


def test_it_goes_on_whatever_fails_with_growing_pauses(
    consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to a minute, and from the beginning once it has looked in vain for nothing."""
    queue.fails = ConnectionError("no route to host")
    subject, pauses = consumer(), list[float]()

    def wait(pause: float) -> bool:
        pauses.append(pause)
        queue.fails = None if len(pauses) == 9 else queue.fails
        queue.fails = ConnectionError("again") if len(pauses) == 10 else queue.fails
        return len(pauses) == 12

    monkeypatch.setattr(subject._stopping, "wait", wait)
    subject.run()

    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 0, 1, 2]
    assert caplog.text.count("sns_failed") == 10
    assert "no route to host" in caplog.text


def test_broker_is_asked_again_after_a_failure(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had room for before says nothing; while it is away, nothing more is taken."""
    queue.put(*(_notification({"order_id": f"o-{number}"}) for number in range(2)))
    subject, pauses = consumer(), list[float]()
    subject.look()
    queue.put(_notification({"order_id": "o-3"}))
    monkeypatch.setattr(app, "connection_for_write", _away)
    monkeypatch.setattr(app.tasks["charge"], "apply_async", _away)

    def wait(pause: float) -> bool:
        pauses.append(pause)
        return len(pauses) == 3

    monkeypatch.setattr(subject._stopping, "wait", wait)
    subject.run()

    assert len(queue.asked) == 2


def test_it_stops_after_the_call_at_hand(
    app: Celery, consumer: Consumer, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did not try is there for others at once."""
    queue.put(*(_notification({"order_id": f"o-{number}"}) for number in range(3)))
    subject, publish = consumer(), app.tasks["charge"].apply_async

    def last(**options: Any) -> Any:
        subject._stopping.set()
        return publish(**options)

    monkeypatch.setattr(app.tasks["charge"], "apply_async", last)

    subject.run()

    assert len(published(app)) == 1
    assert (queue.deleted, queue.given_back) == (["m-0"], ["m-1", "m-2"])


# -- in a worker


def _step(app: Celery) -> Subscribers:
    subject = Subscribers(SimpleNamespace(app=app))
    subject.create(SimpleNamespace(app=app))
    return subject


@pytest.mark.parametrize("task", ["plain", "observe", "off", "celery.ping", "none"])
def test_worker_does_not_start_for_a_task_that_would_run_twice(app: Celery, task: str) -> None:
    """It says which one, and what to write."""
    consume(app, Route(queue="orders", task=task))

    with pytest.raises(click.ClickException, match=f"task='{task}': (it is not idempotent|the app has no such task)"):
        _step(app)


def test_consumers_begin_and_end_with_the_worker(app: Celery, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread and a client for each queue, however many routes it has; a task or its name. A poll is waited for."""
    asked: list[str] = []
    monkeypatch.setattr(queue, "receive_message", lambda **each: asked.append(each["QueueUrl"]) or {})  # type: ignore[func-returns-value]
    made = list[Queue]()

    def client() -> Any:
        made.append(queue)
        return queue

    url = "https://sqs.eu-west-1.amazonaws.com/1/orders"
    tasks = {url: ["charge", app.tasks["secret"]], f"{url}-2": ["charge"]}
    consume(app, *(Route(queue=each, task=task) for each in tasks for task in tasks[each]), client=client)
    consume(app, Route(queue=url, task="charge", when=lambda each: each.subject))
    subject = _step(app)

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

    _step(app).start(SimpleNamespace(app=app))

    assert done == ["store", "forks"]


def test_worker_that_is_terminated_waits_for_nothing(app: Celery) -> None:
    """What a poll brings then comes again."""
    consume(app, Route(queue="orders", task="charge"))
    subject = _step(app)
    subject._threads.append(threading.Thread())  # it cannot be joined

    subject.terminate(SimpleNamespace(app=app))

    assert subject._stopping.is_set()


def test_client_is_boto3s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SQS, with the Region and credentials of the environment."""
    monkeypatch.setitem(sys.modules, "boto3", SimpleNamespace(client=lambda service: [service]))
    assert list(module._boto3_client()) == ["sqs"]  # type: ignore[call-overload]


def test_worker_that_lacks_the_extra_does_not_start(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the client is the author's own affair."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    consume(app, Route(queue="orders", task="charge"), client=Queue)  # type: ignore[arg-type]
    _step(app)
    consume(app, Route(queue="returns", task="charge"))

    with pytest.raises(click.ClickException, match=r"celery-idempotent\[sns\]\"; see .*errors\.html#package-missing"):
        _step(app)
