"""Takes notifications from a queue of SQS, publishes their calls, and only then deletes them.

A death between the two brings the notification again, and it becomes the same call: the same task id and the same
idempotency key, so the operation is one.
"""

import logging
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, assert_never

from celery import Celery

from celery_idempotent import clock
from celery_idempotent.contrib.sns.notification import Notification, unwrap
from celery_idempotent.contrib.sns.routing import PassedOver, Route, Stays, TaskCall, decide
from celery_idempotent.integration.binding import body_signature
from celery_idempotent.integration.messages import KEY_HEADER, wire_form
from celery_idempotent.integration.periodic import looking
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

logger = logging.getLogger(__name__)

_MOST = 10
"""Messages of one request, by SQS's own limit."""

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
"""Seconds before the next look after one that failed; doubled by every further failure, until it is the longest."""

_FULL_PAUSE = 1.0
"""Seconds until somebody looks again whether tasks still wait."""

_COUNT_EVERY = 10.0
"""Seconds for which a count of the tasks that wait is good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a consumer takes what has come.

    Args:
        visibility: Seconds for which it has what it took; after that, another consumer may take it.
        wait: Seconds for which SQS waits for a message before it answers that there is none.
        backlog: How many tasks may wait at the broker; None for any number.
    """

    visibility: int = 60
    wait: int = 10
    backlog: int | None = 1000


@dataclass(slots=True)
class _Batch:
    """What was taken by one request, and what became of it."""

    messages: Sequence["MessageTypeDef"]
    ends_at: float
    done: list["MessageTypeDef"] = field(default_factory=list)
    untried: list["MessageTypeDef"] = field(default_factory=list)
    stuck_groups: set[str] = field(default_factory=set)


class Subscriber:
    """One queue's consumer: everything of it but the thread.

    Args:
        app: The app of the tasks.
        routes: Those of one queue, of whose tasks each was found idempotent.
        sqs: This process's client.
        pace: How much it takes at a time.
        stopping: Set when it shall come to its end.
    """

    def __init__(
        self,
        app: Celery,
        routes: Sequence[Route],
        sqs: "Callable[[], SQSClient]",
        pace: Pace,
        stopping: threading.Event,
    ) -> None:
        self._app = app
        self._routes = [(route, body_signature(type(app.tasks[route.task_name]))) for route in routes]
        self._queue = routes[0].queue
        self._sqs = sqs
        self._pace = pace
        self._stopping = stopping
        self._room, self._counted_at = 0, 0.0
        self._is_full = False
        self._careful_until = 0.0
        self._url = ""

    def run(self) -> None:
        """Look until it shall stop. Whatever goes wrong, the next look may fare better."""
        pause, failures = 0.0, 0
        while not self._stopping.wait(pause):
            try:
                pause, failures = self.look(), 0
            except Exception as error:  # noqa: BLE001 - it is told, and what was taken comes back
                pause = min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE)
                failures = min(failures + 1, 30)
                self._room = 0
                say(logger.error, "sns_failed", page="sns", queue=self._queue, pause=pause, reason=_told(error))

    def look(self) -> float:
        """Make calls of what has come; how many seconds to wait before the next look."""
        with looking:
            has_room = self._has_room()
        if not has_room:
            return _FULL_PAUSE
        batch = self._received()
        try:
            with looking:
                self._publish(batch)
        finally:
            self._end(batch)
        return 0.0

    # -- taking and deleting

    def _received(self) -> _Batch:
        answer = self._sqs().receive_message(
            QueueUrl=self._queue_url(),
            MaxNumberOfMessages=1 if clock.monotonic() < self._careful_until else min(_MOST, self._room),
            VisibilityTimeout=self._pace.visibility,
            WaitTimeSeconds=self._pace.wait,
            MessageAttributeNames=["All"],
            AttributeNames=["ApproximateReceiveCount", "MessageDeduplicationId", "MessageGroupId"],
        )
        return _Batch(answer.get("Messages", []), clock.monotonic() + self._pace.visibility)

    def _queue_url(self) -> str:
        if not self._url:
            is_url = "://" in self._queue
            self._url = self._queue if is_url else self._sqs().get_queue_url(QueueName=self._queue)["QueueUrl"]
        return self._url

    def _end(self, batch: _Batch) -> None:
        """Delete what was published, and give back what was not tried. What is refused stays away for a while."""
        if batch.done:
            answer = self._sqs().delete_message_batch(QueueUrl=self._queue_url(), Entries=_entries(batch.done))
            for each in answer.get("Failed", []):
                # It comes again and is published again, as the same operation.
                say(
                    logger.warning,
                    "sns_not_deleted",
                    page="sns",
                    queue=self._queue,
                    reason=each.get("Message", each["Code"]),
                )
        if batch.untried:
            self._sqs().change_message_visibility_batch(
                QueueUrl=self._queue_url(),
                Entries=_entries(batch.untried, VisibilityTimeout=0),
            )

    # -- publishing

    def _publish(self, batch: _Batch) -> None:
        for index, message in enumerate(batch.messages):
            if self._stopping.is_set() or clock.monotonic() >= batch.ends_at:
                batch.untried.extend(batch.messages[index:])
                return
            try:
                self._pass_on(message, batch)
            except Exception:
                batch.untried.extend(batch.messages[index:])
                raise

    def _pass_on(self, message: "MessageTypeDef", batch: _Batch) -> None:
        notification = arrived(message)
        if notification.group_id in batch.stuck_groups:
            return  # one before it stays, and a group keeps its order
        reason = self._made(notification, message["MessageId"])
        if reason is None:
            batch.done.append(message)
            return
        if self._queue.endswith(".fifo"):
            batch.stuck_groups.add(notification.group_id)
            # Those behind it were taken for nothing, and each time counts on their own way to the dead letter queue.
            self._careful_until = clock.monotonic() + 2 * self._pace.visibility
        say(
            logger.error,
            "sns_stays",
            page="sns",
            queue=self._queue,
            message_id=notification.message_id or message["MessageId"],
            deliveries=int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1)),
            reason=reason,
        )

    def _made(self, notification: Notification, delivered_as: str) -> str | None:
        """Make a call of it, or pass it over; why neither can be done, if so."""
        try:
            decision = decide(notification, self._routes, delivered_as=delivered_as)
        except Exception as error:  # noqa: BLE001 - a function of the author's may raise anything
            return self._reason(error, [route for route, _ in self._routes])
        match decision:
            case TaskCall():
                return self._called(decision, notification)
            case PassedOver(reason):
                say(logger.warning, "sns_passed_over", page="sns", queue=self._queue, reason=reason)
                return None
            case Stays(reason):
                return reason
            case unreachable:
                assert_never(unreachable)

    def _called(self, call: TaskCall, notification: Notification) -> str | None:
        task, options = self._app.tasks[call.route.task_name], dict(call.route.options)
        if notification.group_id and runtime_of(self._app).broker.is_sqs:
            options.setdefault("MessageGroupId", notification.group_id)
        if call.key is not None:
            options[KEY_HEADER] = call.key
        try:
            _check(task, call, options)
        except Exception as error:  # noqa: BLE001 - a function of the policy's may raise anything
            return self._reason(error, [call.route])
        try:
            task.apply_async(kwargs=call.arguments, task_id=call.task_id, **options)
        except Exception as error:  # noqa: BLE001 - it is told
            self._ask_broker()  # which raises if it is away; otherwise it was this message's fault
            return self._reason(error, [call.route])
        self._room -= 1
        return None

    def _reason(self, error: Exception, routes: Iterable[Route]) -> str:
        """Why a notification stays: where a task redacts errors only the type, as a text can quote arguments."""
        redacts = any(self._app.tasks[each.task_name].idempotency_policy.redact_errors for each in routes)
        return type(error).__name__ if redacts else _told(error)

    # -- what the broker can take

    def _has_room(self) -> bool:
        """Whether the broker is there, and fewer tasks wait than may."""
        if self._room > 0 and clock.monotonic() < self._counted_at + _COUNT_EVERY:
            return True
        self._room, self._counted_at = self._ask_broker(), clock.monotonic()
        was_full, self._is_full = self._is_full, self._room <= 0
        if self._is_full and not was_full:
            say(logger.info, "sns_waits", queue=self._queue, backlog=self._pace.backlog)
        elif was_full and not self._is_full:
            say(logger.info, "sns_goes_on", queue=self._queue)
        return self._room > 0

    def _ask_broker(self) -> int:
        """How many tasks it can take.

        Raises:
            Exception: It does not answer.
        """
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            if self._pace.backlog is None:
                return sys.maxsize
            names = {_queue_of(self._app, route) for route, _ in self._routes}
            return self._pace.backlog - max(_waiting(connection, name) for name in names)


def _check(task: Any, call: TaskCall, options: Mapping[str, Any]) -> None:
    """Refuse what has no key or does not fit the task: people look for it in the notification's dead letter queue."""
    received = wire_form(task, (), call.arguments, options.get("serializer"))
    headers = {} if call.key is None else {KEY_HEADER: call.key}
    task.idempotency_identity(*received, headers=headers, task_id=call.task_id)


def arrived(message: "MessageTypeDef") -> Notification:
    """What a message of SQS holds, with an envelope or without."""
    body = message.get("Body", "")
    notification = unwrap(body)
    if notification is None:
        attributes = {name: _text_of(each) for name, each in message.get("MessageAttributes", {}).items()}
        notification = Notification(message_id="", topic="", text=body, attributes=MappingProxyType(attributes))
    told: Mapping[Any, str] = message.get("Attributes", {})
    return replace(
        notification,
        deduplication_id=told.get("MessageDeduplicationId", ""),
        group_id=told.get("MessageGroupId", ""),
    )


def _text_of(attribute: Mapping[str, Any]) -> str:
    """An attribute as the envelope would have it."""
    binary = attribute.get("BinaryValue")
    return str(attribute.get("StringValue", "")) if binary is None else b64encode(binary).decode()


def _entries(messages: Iterable["MessageTypeDef"], **more: int) -> list[Any]:
    return [{"Id": str(index), "ReceiptHandle": each["ReceiptHandle"], **more} for index, each in enumerate(messages)]


def _queue_of(app: Celery, route: Route) -> str:
    """The broker's queue that its calls go to."""
    queue = app.amqp.router.route(dict(route.options), route.task_name, (), {})["queue"]
    return str(getattr(queue, "name", queue))


def _waiting(connection: Any, queue: str) -> int:
    channel = connection.channel()
    try:
        return int(channel.queue_declare(queue=queue, passive=True).message_count)
    except connection.channel_errors as error:
        if str(getattr(error, "reply_code", "")) != "404":
            raise
        return 0  # publishing makes the queue
    finally:
        with suppress(Exception):
            channel.close()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {describe(error)}"
