"""Which task a notification of SNS calls, with which arguments, and what it is the same as: pure.

Nothing is verified. For a queue SNS's signature proves nothing that the queue's own policy does not enforce: only a
topic that the policy names (``aws:SourceArn``) can send to it. A signature matters where anybody can post, as to an
HTTP address.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid5

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.keys import Selector, Spec


@dataclass(frozen=True, kw_only=True)
class Notification:
    """A message of an SNS topic, without its envelope.

    Args:
        message_id: SNS's id of the message: one for all queues that it reaches, and for every delivery. Empty with raw
            message delivery, which does not tell it.
        topic: The topic's ARN; empty with raw delivery.
        text: The message as it was published.
        subject: Its subject; empty without one.
        attributes: Its attributes as text, by name: numbers as they were written, binary ones in base64, arrays as
            JSON. So they are the same with an envelope and with raw delivery.
        kind: What SNS says that it is. Only a ``"Notification"`` was published by somebody; a
            ``"SubscriptionConfirmation"`` or an ``"UnsubscribeConfirmation"`` is about a subscription.
        deduplication_id: Of a FIFO topic, what the publisher calls the message, or a hash of its text. SQS tells it
            beside the body, and so it does ``group_id``.
        group_id: Of a FIFO topic, within what messages keep their order.
    """

    message_id: str
    topic: str
    text: str
    subject: str = ""
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    kind: str = "Notification"
    deduplication_id: str = ""
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
        """The ``idempotency_key`` of its call; None for what the task's policy selects.

        Raises:
            KeyMissing: It has none.
            PolicyError: The key cannot be told from it.
        """
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
        raise PolicyError(
            "key",
            str(By.MESSAGE),
            "with raw delivery SNS does not tell its id of a message; name a part of the message, such as "
            "key='message.id', or switch raw delivery off",
        )


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
    """The call that a notification asks for.

    Args:
        notification: What the queue's message holds.
        routes: Those of the queue, each with the signature of its task.
        delivered_as: SQS's id of the queue's message.

    Raises:
        NotRouted: It asks for none.
        Exception: What a route's function raises, or :meth:`Route.key_of`.
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
