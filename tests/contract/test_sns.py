"""Notifications of real topics in real queues: enveloped, raw, and FIFO; each becomes one operation."""
# mypy: allow-untyped-decorators

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import boto3
import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.contrib import sns as module
from celery_idempotent.contrib.sns import By, Route, Subscriber
from lab.embedded import EmbeddedAws
from lab.embedded.aws import REGION
from lab.embedded.server import free_port
from tests.support.deliveries import an_app, published
from tests.support.documents import DOCS
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


Client = Callable[[str], Any]


@pytest.fixture
def client(aws: EmbeddedAws) -> Client:
    """Of a service of the emulator."""
    session = boto3.session.Session("test", "test", region_name=REGION)
    return lambda service: session.client(service, endpoint_url=aws.endpoint)  # type: ignore[call-overload]


class Topic:
    """A topic with one queue, and what one publishes to it."""

    def __init__(self, client: Client, *, raw: bool = False, fifo: bool = False) -> None:
        self.sqs: SQSClient = client("sqs")
        self._sns = client("sns")
        self.name = f"orders-{uuid4().hex}{'.fifo' if fifo else ''}"
        self._arn = self._sns.create_topic(Name=self.name, Attributes={"FifoTopic": "true"} if fifo else {})["TopicArn"]
        queue: Any = {"FifoQueue": "true"} if fifo else {}
        self.url = self.sqs.create_queue(QueueName=self.name, Attributes=queue)["QueueUrl"]
        arn = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        self._sns.subscribe(
            TopicArn=self._arn, Protocol="sqs", Endpoint=arn, Attributes={"RawMessageDelivery": str(raw).lower()}
        )

    def publish(self, message: Any, **options: Any) -> str:
        """Publish it as JSON; SNS's id of it."""
        text = message if isinstance(message, str) else json.dumps(message)
        return str(self._sns.publish(TopicArn=self._arn, Message=text, **options)["MessageId"])

    @property
    def held(self) -> tuple[int, int]:
        """How many notifications wait, and how many somebody has taken."""
        names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return int(found[names[0]]), int(found[names[1]])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a message, nor for one that was taken."""
    monkeypatch.setattr(module, "WAIT", 1)
    monkeypatch.setattr(module, "VISIBILITY", 2)


@pytest.fixture
def app() -> Celery:
    app = an_app()

    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy(key="order_id"))
    def charge(order_id: str, cents: int = 0) -> None: ...

    return app


def _consumer(app: Celery, topic: Topic, **route: Any) -> Subscriber:
    routes = [Route(queue=topic.url, task="charge", **route)]
    return Subscriber(app, routes, topic.sqs, threading.Event())


def _calls(app: Celery) -> list[tuple[Any, str | None, str]]:
    """Of each published call its arguments, explicit key and task id."""
    return [(each.payload[1], each.headers.get("idempotency_key"), each.headers["id"]) for each in published(app)]


@pytest.mark.parametrize("raw", [False, True])
def test_notification_becomes_a_call(app: Celery, client: Client, raw: bool) -> None:
    """Under SNS's id of it, which raw delivery does not tell; attributes choose, in base64 where they are binary."""
    topic = Topic(client, raw=raw)
    attributes = {
        "event": {"DataType": "String", "StringValue": "placed"},
        "seal": {"DataType": "Binary", "BinaryValue": b"\x00\x01"},
    }
    message_id = topic.publish({"order_id": "o-1", "cents": 500, "other": True}, MessageAttributes=attributes)
    route: Any = {"key": "message.order_id"} if raw else {}

    def when(notification: Any) -> bool:
        event, seal = (notification.attributes[name] for name in ("event", "seal"))
        return (event, seal) == ("placed", "AAE=") if raw else bool(event == "placed")  # moto's envelope has bytes

    _consumer(app, topic, when=when, **route).look()

    ((arguments, key, _),) = _calls(app)
    assert (arguments, key) == ({"order_id": "o-1", "cents": 500}, "o-1" if raw else message_id)
    assert topic.held == (0, 0)


@pytest.mark.parametrize("raw", [False, True])
def test_deduplication_id_of_a_fifo_topic_is_the_key(app: Celery, client: Client, raw: bool) -> None:
    """In the order of the group, and also after the five minutes within which SNS drops a second one."""
    topic = Topic(client, raw=raw, fifo=True)
    for number in range(3):
        topic.publish({"order_id": f"o-{number}"}, MessageGroupId="g", MessageDeduplicationId=f"d-{number}")

    _consumer(app, topic).look()

    calls = [(arguments["order_id"], key) for arguments, key, _ in _calls(app)]
    assert calls == [(f"o-{number}", f"{topic.name}:d-{number}") for number in range(3)]


def test_death_between_publishing_and_deleting_repeats_one_operation(app: Celery, client: Client) -> None:
    """The same key and the same task id."""
    topic = Topic(client)
    topic.publish({"order_id": "o-1"})
    consumer = _consumer(app, topic, key=By.POLICY)

    def die(**_: Any) -> None:
        raise SystemExit

    topic.sqs.meta.events.register("before-call.sqs.DeleteMessageBatch", die)
    with pytest.raises(SystemExit):
        consumer.look()
    topic.sqs.meta.events.unregister("before-call.sqs.DeleteMessageBatch", die)
    wait_until(lambda: consumer.look() or topic.held == (0, 0), "it is deleted")  # type: ignore[func-returns-value]

    first, second = _calls(app)
    assert first == second
    assert first[1] is None


def test_consumer_needs_only_what_its_policy_grants(app: Celery, client: Client) -> None:
    """A request about several messages takes the permission for one."""
    topic, called = Topic(client), set[str]()
    topic.sqs.meta.events.register("before-call.sqs", lambda model, **_: called.add(model.name.removesuffix("Batch")))
    routes = [Route(queue=topic.name, task="charge")]
    consumer = Subscriber(app, routes, topic.sqs, threading.Event())

    for _ in range(2):
        topic.publish({"order_id": "o-1"})
        consumer.look()
        consumer._stopping.set()

    (statement,) = json.loads((DOCS / "aws" / "iam-sns-consumer.json").read_text())["Statement"]
    assert statement["Action"] == sorted(f"sqs:{each}" for each in called)


def test_broker_that_is_gone_is_noticed() -> None:
    """At once, and not after all retries of a publisher."""
    app = Celery("shop", broker=f"redis://127.0.0.1:{free_port()}", set_as_current=False)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, idempotency_store="memory://")

    @app.task(base=IdempotentTask, shared=False, name="charge")
    def charge() -> None: ...

    sqs: Any = None
    consumer = Subscriber(app, [Route(queue="orders", task="charge")], sqs, threading.Event())

    with pytest.raises(OperationalError):
        consumer.look()
