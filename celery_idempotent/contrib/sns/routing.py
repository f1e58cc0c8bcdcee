"""Which task a notification calls, with which arguments, and what it is the same as: pure."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from hashlib import sha256
from typing import Any
from uuid import UUID, uuid5

from celery_idempotent.contrib.sns.notification import Notification
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.paths import LENIENT, root_names
from celery_idempotent.protocol.selector import Selector, Spec, compiled


class By(Enum):
    """What identifies the operation that a notification asks for, where no part of it is named."""

    MESSAGE = "message"
    """The deduplication id that its publisher gave it; otherwise SNS's own id of the message."""

    POLICY = "policy"
    """The task's policy, as of any other call."""


_DERIVED = {"args", "kwargs", "task_id", "idempotency_key"}
"""Options of ``apply_async`` that a route cannot give."""

Choice = str | Callable[[Notification], Any]
"""A JMESPath over what a notification tells, or a function of it."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """Notifications of one queue that call one task.

    A JMESPath sees ``message`` (the parsed JSON, or the text where it is none), ``attributes``, ``subject``, ``topic``,
    ``message_id``, ``deduplication_id`` and ``group_id``. A function gets the
    :class:`~celery_idempotent.contrib.sns.Notification`.

    Args:
        queue: The name of an SQS queue, or its URL.
        task: An idempotent task of the app, or its name.
        key: What identifies the operation: a JMESPath, such as ``"message.order_id"``, several, a function, or
            :class:`By`. A text is the ``idempotency_key`` as it stands, so a caller who gives the same means the same.
        arguments: A JMESPath of an object, or a function that returns a dict: the arguments by name. Default: those
            members of the message, which must be an object, that have the names of the task's parameters.
        when: Only notifications for which this is true. The first route that fits a notification has it.
        options: Of ``apply_async``, such as ``{"queue": "payments"}``.

    Raises:
        PolicyError: An expression cannot be used.
    """

    queue: str
    task: Any
    key: By | Spec = By.MESSAGE
    arguments: Choice | None = None
    when: Choice | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.queue, str) and self.queue_name):
            raise PolicyError(
                "queue",
                repr(self.queue),
                "must be the name or the URL of an SQS queue",
                see="sns#a-route-cannot-be-used",
            )
        for name in _DERIVED & self.options.keys():
            raise PolicyError(
                "options",
                repr(name),
                "it follows from the notification; leave it out",
                see="sns#a-route-cannot-be-used",
            )
        for name in ("arguments", "when"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name))
        if not isinstance(self.key, By):
            Selector("key", self.key)
            for each in self.key if isinstance(self.key, tuple) else (self.key,):
                _check("key", each)

    @property
    def queue_name(self) -> str:
        """The name of the queue, also where its URL is given."""
        return self.queue.rpartition("/")[2]

    @property
    def task_name(self) -> str:
        """The name of the task."""
        return str(getattr(self.task, "name", self.task))

    @cached_property
    def selector(self) -> Selector | None:
        """What selects the key, if a part of the notification is one."""
        return None if isinstance(self.key, By) else Selector("key", self.key)


@dataclass(frozen=True, slots=True)
class TaskCall:
    """Publish this call and then delete the notification.

    Args:
        route: What it fits.
        arguments: By name.
        key: The ``idempotency_key``; None for what the task's policy selects.
        task_id: The same for each delivery of the notification.
    """

    route: Route
    arguments: Mapping[str, Any]
    key: str | None
    task_id: str


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Delete it: it asks for nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stays:
    """Leave it in the queue, which comes with it again, and ends by giving it to its dead letter queue."""

    reason: str


Decision = TaskCall | PassedOver | Stays


def decide(
    notification: Notification, routes: Iterable[tuple[Route, inspect.Signature]], *, delivered_as: str
) -> Decision:
    """What becomes of a notification.

    Args:
        notification: What the queue's message holds.
        routes: Those of the queue, each with the signature of its task.
        delivered_as: SQS's id of the queue's message.
    """
    if notification.kind != "Notification":
        return PassedOver(f"{notification.kind} of {notification.topic}; {_ABOUT_SUBSCRIPTIONS}")
    document = _document(notification)
    for route, signature in routes:
        if route.when is None or _is_true(_chosen(route.when, notification, document)):
            arguments = _arguments(route, signature, notification, document)
            if not isinstance(arguments, Mapping):
                return Stays(f"the arguments of {route.task_name} are no object: {type(arguments).__name__}")
            key = _key(route, notification, document)
            return TaskCall(route, dict(arguments), key, _task_id(route, notification.message_id or delivered_as))
    return Stays("no route fits it")


_ABOUT_SUBSCRIPTIONS = "SNS asks nobody to confirm what the owner of the queue subscribes"

_NAMESPACE = UUID("b4f1a8f0-6c86-5f0a-9d0e-9c1a6f6f2d11")
"""Of the task ids; it is frozen, as redeliveries outlive a deployment."""


def _task_id(route: Route, message_id: str) -> str:
    return str(uuid5(_NAMESPACE, f"{route.task_name}\0{message_id}"))


def _document(notification: Notification) -> Mapping[str, Any]:
    try:
        message = json.loads(notification.text)
    except (ValueError, RecursionError):
        message = notification.text
    return {
        "message": message,
        "attributes": dict(notification.attributes),
        "subject": notification.subject or None,
        "topic": notification.topic or None,
        "message_id": notification.message_id or None,
        "deduplication_id": notification.deduplication_id or None,
        "group_id": notification.group_id or None,
    }


_NAMES = tuple(_document(Notification(message_id="", topic="", text="")))
_OF_A_PATH = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _NAMES])
_OF_A_FUNCTION = inspect.Signature([inspect.Parameter("notification", inspect.Parameter.POSITIONAL_ONLY)])


def _check(option: str, choice: Any) -> None:
    if isinstance(choice, str):
        unknown = root_names(compiled(option, choice).parsed) - set(_NAMES)
        if unknown:
            raise PolicyError(
                option,
                repr(choice),
                f"there is no {min(unknown)!r}; there are {', '.join(_NAMES)}",
                see="sns#a-selector-cannot-be-used",
            )
        return
    if not callable(choice):
        raise PolicyError(
            option,
            repr(choice),
            "must be a JMESPath, or a function of the notification",
            see="sns#a-selector-cannot-be-used",
        )
    try:
        inspect.signature(choice).bind(None)
    except TypeError as error:
        raise PolicyError(
            option, repr(choice), f"must take the notification alone: {error}", see="sns#a-selector-cannot-be-used"
        ) from error
    except ValueError:
        pass  # a function of C's may not tell its signature; the first notification will


def _chosen(choice: Choice, notification: Notification, document: Mapping[str, Any]) -> Any:
    if callable(choice):
        return choice(notification)
    return LENIENT.visit(compiled("", choice).parsed, document)


def _is_true(value: Any) -> bool:
    """JMESPath's own rule, by which 0 is true, as a number that is there."""
    return value is not None and value is not False and value not in ("", [], {})


def _arguments(
    route: Route, signature: inspect.Signature, notification: Notification, document: Mapping[str, Any]
) -> Any:
    if route.arguments is not None:
        return _chosen(route.arguments, notification, document)
    message = document["message"]
    parameters = signature.parameters.values()
    if not isinstance(message, Mapping) or any(each.kind is each.VAR_KEYWORD for each in parameters):
        return message
    return {each.name: message[each.name] for each in parameters if each.name in message}


def _key(route: Route, notification: Notification, document: Mapping[str, Any]) -> str | None:
    match route.key:
        case By.POLICY:
            return None
        case By.MESSAGE:
            return _name_of(route, notification)
        case _:
            return _selected(route, notification, document)


def _name_of(route: Route, notification: Notification) -> str:
    given = notification.deduplication_id
    # A hash of the text names no message: an equal one, some days later, is another.
    if given and given != sha256(notification.text.encode("utf-8", "surrogatepass")).hexdigest():
        return f"{route.queue_name}:{given}"
    if notification.message_id:
        return notification.message_id
    raise PolicyError(
        "key",
        str(By.MESSAGE),
        "with raw delivery SNS does not tell its id of a message; name a part of the message, such as "
        "key='message.id', or switch raw delivery off",
        see="sns#raw-delivery-has-no-id",
    )


def _selected(route: Route, notification: Notification, document: Mapping[str, Any]) -> str:
    assert route.selector is not None
    is_function = callable(route.key)
    bound = inspect.BoundArguments(
        _OF_A_FUNCTION if is_function else _OF_A_PATH,
        {"notification": notification} if is_function else document,  # type: ignore[arg-type]
    )
    form = route.selector.canonical(bound, route.task_name)
    # Of a text, the text: whoever gives apply_async the same key means the same operation.
    return form.partition(":")[2] if form.startswith("s") else form
