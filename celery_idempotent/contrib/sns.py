"""Amazon SNS: notifications in a queue of SQS become calls of idempotent tasks; consuming needs the extra ``sns``.

Which task a notification calls, with which arguments, and what it is the same as, is decided without asking anybody. A
consumer publishes the call, and only then deletes the message. A death between the two brings the notification again,
and it becomes the same call: the same task id and the same idempotency key, so the operation is one.

Nothing is verified. For a queue SNS's signature proves nothing that the queue's own policy does not enforce: only a
topic that the policy names (``aws:SourceArn``) can send to it. A signature matters where anybody can post, as to an
HTTP address.
"""

import inspect
import json
import logging
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

import click
from celery import Celery, bootsteps

from celery_idempotent import clock
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.binding import body_signature, is_enforced
from celery_idempotent.integration.headers import KEY_HEADER, wire_form
from celery_idempotent.integration.operating.worker import StoreCheck, fork_between_looks, looking
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe
from celery_idempotent.protocol.keys import Selector, Spec
from celery_idempotent.troubleshooting import with_link


@dataclass(frozen=True, kw_only=True)
class Notification:
    """A message of an SNS topic, without its envelope."""

    #: SNS's id of the message: one for all queues that it reaches, and for every delivery. Empty with raw message
    #: delivery, which does not tell it.
    message_id: str
    #: The topic's ARN; empty with raw delivery.
    topic: str
    #: The message as it was published.
    text: str
    #: Its subject; empty without one.
    subject: str = ""
    #: Its attributes as text, by name: numbers as they were written, binary ones in base64, arrays as JSON. So they
    #: are the same with an envelope and with raw delivery.
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    #: What SNS says that it is. Only a ``"Notification"`` was published by somebody; a
    #: ``"SubscriptionConfirmation"`` or an ``"UnsubscribeConfirmation"`` is about a subscription.
    kind: str = "Notification"
    #: Of a FIFO topic, what the publisher calls the message, or a hash of its text. SQS tells it beside the body,
    #: and so it does ``group_id``.
    deduplication_id: str = ""
    #: Of a FIFO topic, within what messages keep their order.
    group_id: str = ""

    @cached_property
    def message(self) -> Any:
        """The parsed JSON, or the text where it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return self.text


_KINDS = {"Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"}


def unwrap(body: str) -> Notification | None:
    """The notification whose envelope is ``body``; None if that is no envelope, as with raw message delivery."""
    envelope = Notification(message_id="", topic="", text=body).message
    texts = {name: each for name, each in envelope.items() if isinstance(each, str)} if type(envelope) is dict else {}
    if texts.get("Type") not in _KINDS or not texts.keys() >= {"MessageId", "TopicArn", "Message"}:
        return None
    attributes = envelope.get("MessageAttributes")
    described = attributes.items() if isinstance(attributes, dict) else ()
    values = {name: each.get("Value") for name, each in described if isinstance(each, dict)}
    return Notification(
        message_id=texts["MessageId"],
        topic=texts["TopicArn"],
        text=texts["Message"],
        subject=texts.get("Subject", ""),
        attributes=MappingProxyType({name: each for name, each in values.items() if isinstance(each, str)}),
        kind=texts["Type"],
    )


class By(Enum):
    """What identifies the operation that a notification asks for, where no part of it is named."""

    MESSAGE = "message"
    """The deduplication id that its publisher gave it; otherwise SNS's own id of the message."""

    POLICY = "policy"
    """The task's policy, as of any other call."""


_NAMES = ("message", "attributes", "subject", "topic", "message_id", "deduplication_id", "group_id")
_OF_A_PATH = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _NAMES])
_OF_A_FUNCTION = inspect.Signature([inspect.Parameter("notification", inspect.Parameter.POSITIONAL_ONLY)])

_NAMESPACE = UUID("b4f1a8f0-6c86-5f0a-9d0e-9c1a6f6f2d11")
"""Of the task ids; it is frozen, as redeliveries outlive a deployment."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """Notifications of one queue that call one task.

    Args:
        queue: The name of an SQS queue, or its URL.
        task: An idempotent task of the app, or its name.
        key: What identifies the operation: a path such as ``"message.order_id"``, several, a function of the
            :class:`Notification`, or :class:`By`. A path starts at ``message`` (the parsed JSON, or the text),
            ``attributes``, ``subject``, ``topic``, ``message_id``, ``deduplication_id`` or ``group_id``. A text is the
            ``idempotency_key`` as it stands, so a caller who gives the same means the same.
        arguments: A function of the notification that returns the arguments by name. Default: those members of the
            message, which must be an object, that have the names of the task's parameters.
        when: Only notifications for which this function is true. The first route that fits a notification has it.
        options: Of ``apply_async``, such as ``{"queue": "payments"}``.

    Raises:
        PolicyError: An option cannot be used.
    """

    queue: str
    task: Any
    key: By | Spec = By.MESSAGE
    arguments: Callable[[Notification], Mapping[str, Any]] | None = None
    when: Callable[[Notification], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.queue, str) and self.queue_name):
            raise PolicyError("queue", repr(self.queue), "must be the name or the URL of an SQS queue")
        for name in {"args", "kwargs", "task_id", "idempotency_key"} & self.options.keys():
            raise PolicyError("options", repr(name), "it follows from the notification; leave it out")
        for option in ("arguments", "when"):
            function = getattr(self, option)
            if not (function is None or callable(function)):
                raise PolicyError(option, repr(function), "must be a function of the notification")
        if self.selector is not None:
            self.selector.check(_OF_A_FUNCTION if callable(self.key) else _OF_A_PATH)

    @property
    def queue_name(self) -> str:
        """The name of the queue, also where its URL is given."""
        return self.queue.rpartition("/")[2]

    @property
    def task_name(self) -> str:
        return str(getattr(self.task, "name", self.task))

    @cached_property
    def selector(self) -> Selector | None:
        """What selects the key, if a part of the notification is one."""
        return None if isinstance(self.key, By) else Selector("key", self.key)

    def key_of(self, notification: Notification) -> str | None:
        """The ``idempotency_key`` of its call; None for what the task's policy selects. Raises ``KeyMissing``."""
        if self.key is By.POLICY:
            return None
        if self.selector is not None:
            found = {name: getattr(notification, name) or None for name in _NAMES}
            found["attributes"] = dict(notification.attributes)
            of_a_path = inspect.BoundArguments(_OF_A_PATH, found)
            bound = _OF_A_FUNCTION.bind(notification) if callable(self.key) else of_a_path
            form = self.selector.canonical(bound, self.task_name)
            # Of a text, the text: whoever gives apply_async the same key means the same operation.
            return form.partition(":")[2] if form.startswith("s") else form
        given = notification.deduplication_id
        # A hash of the text names no message: an equal one, some days later, is another.
        if given and given != sha256(notification.text.encode("utf-8", "surrogatepass")).hexdigest():
            return f"{self.queue_name}:{given}"
        if notification.message_id:
            return notification.message_id
        why = "with raw delivery SNS does not tell its id of a message"
        remedy = f"{why}; name a part of the message, such as key='message.id', or switch raw delivery off"
        raise PolicyError("key", str(By.MESSAGE), remedy)


class NotRouted(Exception):
    """It asks for no call; the text says why, and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class TaskCall:
    """What a notification asks for: this task, with these arguments, under this key and always this task id."""

    route: Route
    arguments: Mapping[str, Any]
    key: str | None
    task_id: str


def call_of(
    notification: Notification, routes: Iterable[tuple[Route, inspect.Signature]], *, delivered_as: str
) -> TaskCall:
    """The call that a notification asks for, by the queue's ``routes``, each with its task's signature.

    ``delivered_as`` is SQS's id of the queue's message. Raises ``NotRouted``, and what a route's function raises.
    """
    if notification.kind != "Notification":
        raise NotRouted(f"it is a {notification.kind} of {notification.topic}, which nobody published")
    for route, signature in routes:
        if route.when is None or route.when(notification):
            message = notification.message if route.arguments is None else route.arguments(notification)
            if not isinstance(message, Mapping):
                raise NotRouted(f"the arguments of {route.task_name} are no object: {type(message).__name__}")
            parameters = signature.parameters
            takes_all = route.arguments or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            arguments = {name: each for name, each in message.items() if takes_all or name in parameters}
            name = f"{route.task_name}\0{notification.message_id or delivered_as}"
            return TaskCall(route, arguments, route.key_of(notification), str(uuid5(_NAMESPACE, name)))
    raise NotRouted("no route fits it")


if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

__all__ = ["By", "Notification", "Route", "consume", "unwrap"]

logger = logging.getLogger(__name__)

VISIBILITY = 60
"""Seconds for which a worker has what it took; after that, another may take it."""

WAIT = 10
"""Seconds for which SQS waits for messages. A worker that stops waits for the end of that."""

_LONGEST_PAUSE = 60.0
"""Seconds before the next look after one that failed; from one second on, every further failure doubles them."""

_CONSUMED = "_celery_idempotent_sns"
"""Attribute of an app: its routes, each with what makes the client."""


def consume(app: Celery, route: Route, *routes: Route, client: "Callable[[], SQSClient] | None" = None) -> None:
    """Have every worker of ``app`` make calls of the notifications in the routes' queues.

    Args:
        app: The Celery app. What is wrong with a task, its workers say when they start.
        route: The first that fits a notification has it.
        routes: More of them.
        client: Makes a boto3 client of SQS; each worker calls it once for a queue. Default: ``boto3.client("sqs")``.
    """
    vars(app).setdefault(_CONSUMED, []).extend((each, client) for each in (route, *routes))
    app.steps["worker"].add(Subscribers)


class Subscribers(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """A thread of the worker's main process for each queue."""

    # What can be wrong with the store and the settings, StoreCheck has reported by then.
    requires = ("celery.worker.components:Pool", StoreCheck)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        super().__init__(parent, **kwargs)

    def create(self, parent: Any) -> None:
        """Refuse to start a worker for a task that would run more than once, or one that cannot ask SQS."""
        for route, client in getattr(parent.app, _CONSUMED):
            name, tasks = route.task_name, parent.app.tasks
            remedy = ""
            if name not in tasks:
                remedy = "the app has no such task; import it, or name another"
            elif not is_enforced(tasks[name]):  # SNS and SQS deliver at least once
                remedy = (
                    "it is not idempotent, and a notification can come more than once; write base=IdempotentTask, "
                    'without mode="off" or "observe"'
                )
            if remedy:
                raise click.ClickException(f"celery-idempotent: {PolicyError('task', repr(name), remedy)}")
            if client is None and find_spec("boto3") is None:
                message = 'boto3 is not installed; run: pip install "celery-idempotent[sns]"'
                raise click.ClickException(with_link(message, "errors#package-missing"))

    def start(self, parent: Any) -> None:
        _ = runtime_of(parent.app).store  # what is registered later comes earlier before a fork
        fork_between_looks()
        consumed = getattr(parent.app, _CONSUMED)
        for queue in dict.fromkeys(route.queue for route, _ in consumed):
            routes = [route for route, _ in consumed if route.queue == queue]
            client = next((client for route, client in consumed if route.queue == queue and client), _boto3_client)
            subscriber = Subscriber(parent.app, routes, client(), self._stopping)
            name = f"celery-idempotent-sns-{queue}"
            self._threads.append(threading.Thread(target=subscriber.run, name=name, daemon=True))
            self._threads[-1].start()

    def stop(self, parent: Any) -> None:
        """Stop after the call at hand. What a request brings now is given back, so its answer is waited for."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(WAIT + 5)

    def terminate(self, parent: Any) -> None:
        """Wait for nothing: what a request brings now comes again."""
        self._stopping.set()


def _boto3_client() -> "SQSClient":
    import boto3

    return boto3.client("sqs")


class Subscriber:
    """One queue's consumer: everything of it but the thread. It comes to its end once ``stopping`` is set."""

    def __init__(self, app: Celery, routes: Sequence[Route], sqs: "SQSClient", stopping: threading.Event) -> None:
        self._app = app
        self._routes = [(route, body_signature(type(app.tasks[route.task_name]))) for route in routes]
        self._redacts = any(app.tasks[each.task_name].idempotency_policy.private for each in routes)
        self._queue = routes[0].queue
        self._url = self._queue if "://" in self._queue else ""
        self._sqs = sqs
        self._stopping = stopping
        self._is_broker_away = True  # until it has answered once
        self._careful_until = 0.0

    def run(self) -> None:
        """Look until it shall stop. Whatever goes wrong, the next look may fare better."""
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                self.look()
                pause = 0.0
            except Exception as error:  # noqa: BLE001 - it is told, and what was taken comes back
                pause = min(2 * pause or 1.0, _LONGEST_PAUSE)
                reason = f"{type(error).__name__}: {describe(error)}"
                say(logger.error, "sns_failed", queue=self._queue, pause=pause, reason=reason)

    def look(self) -> None:
        """Make calls of what has come, delete what was published, and give back what was not tried."""
        if self._is_broker_away:
            with looking:
                self._ask_broker()
        self._url = self._url or self._sqs.get_queue_url(QueueName=self._queue)["QueueUrl"]
        answer = self._sqs.receive_message(
            QueueUrl=self._url,
            MaxNumberOfMessages=1 if clock.monotonic() < self._careful_until else 10,
            VisibilityTimeout=VISIBILITY,
            WaitTimeSeconds=WAIT,
            MessageAttributeNames=["All"],
            AttributeNames=["ApproximateReceiveCount", "MessageDeduplicationId", "MessageGroupId"],
        )
        ends_at = clock.monotonic() + VISIBILITY
        untried, done, held_groups = deque(answer.get("Messages", [])), list["MessageTypeDef"](), set[str]()
        try:
            with looking:
                while untried and not self._stopping.is_set() and clock.monotonic() < ends_at:
                    if self._publish(untried[0], held_groups):
                        done.append(untried[0])
                    untried.popleft()
        finally:
            if done:
                deleted = self._sqs.delete_message_batch(QueueUrl=self._url, Entries=_entries(done))
                for each in deleted.get("Failed", []):  # it comes again and is published again, as the same operation
                    reason = each.get("Message", each["Code"])
                    say(logger.warning, "sns_not_deleted", queue=self._queue, reason=reason)
            if untried:
                given_back = _entries(untried, VisibilityTimeout=0)
                self._sqs.change_message_visibility_batch(QueueUrl=self._url, Entries=given_back)

    def _publish(self, message: "MessageTypeDef", held_groups: set[str]) -> bool:
        """Make a call of it; False if it stays in the queue, and with it those of its group, which has an order."""
        notification = notification_in(message)
        if notification.group_id in held_groups:
            return False
        try:
            call = call_of(notification, self._routes, delivered_as=message["MessageId"])
            task, options = self._app.tasks[call.route.task_name], dict(call.route.options)
            if notification.group_id and runtime_of(self._app).broker.is_sqs:
                options.setdefault("MessageGroupId", notification.group_id)
            headers = {} if call.key is None else {KEY_HEADER: call.key}
            # What has no key or does not fit the task is refused here: people look for it in the notification's DLQ.
            received = wire_form(task, (), call.arguments, options.get("serializer"))
            task.idempotency_identity(*received, headers=headers, task_id=call.task_id)
            task.apply_async(kwargs=call.arguments, task_id=call.task_id, **headers, **options)
            return True
        except NotRouted as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a function of the author's may raise anything; it is told
            self._ask_broker()  # if that answers, it is this message's fault
            # Where a task redacts errors, only the type is told, as a text can quote arguments.
            reason = type(error).__name__ if self._redacts else f"{type(error).__name__}: {describe(error)}"
        if self._queue.endswith(".fifo"):
            held_groups.add(notification.group_id)
            # Those behind it were taken for nothing, and each time counts on their own way to the dead letter queue.
            self._careful_until = clock.monotonic() + 2 * VISIBILITY
        about = {
            "message_id": notification.message_id or message["MessageId"],
            "deliveries": int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
        }
        say(logger.error, "sns_stays", queue=self._queue, **about, reason=reason)
        return False

    def _ask_broker(self) -> None:
        self._is_broker_away = True
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
        self._is_broker_away = False


def notification_in(message: "MessageTypeDef") -> Notification:
    """What a message of SQS holds, with an envelope or without."""
    body, told = message.get("Body", ""), message.get("Attributes", {})
    attributes = {
        name: b64encode(each["BinaryValue"]).decode() if "BinaryValue" in each else each.get("StringValue", "")
        for name, each in message.get("MessageAttributes", {}).items()
    }
    raw = Notification(message_id="", topic="", text=body, attributes=MappingProxyType(attributes))
    return replace(
        unwrap(body) or raw,
        deduplication_id=told.get("MessageDeduplicationId", ""),
        group_id=told.get("MessageGroupId", ""),
    )


def _entries(messages: Iterable["MessageTypeDef"], **more: int) -> list[Any]:
    return [{"Id": str(index), "ReceiptHandle": each["ReceiptHandle"], **more} for index, each in enumerate(messages)]
