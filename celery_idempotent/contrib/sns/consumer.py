"""Takes notifications from queues of SQS, publishes their calls, and only then deletes them.

A death between the two brings the notification again, and it becomes the same call: the same task id and the same
idempotency key, so the operation is one.
"""

import logging
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from celery import Celery, bootsteps

from celery_idempotent import clock
from celery_idempotent.contrib.sns.routing import Notification, NotRouted, Route, call_of, unwrap
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.binding import body_signature, is_enforced
from celery_idempotent.integration.headers import KEY_HEADER, wire_form
from celery_idempotent.integration.operating.periodic import fork_between_looks, looking
from celery_idempotent.integration.operating.startup import StoreCheck
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe
from celery_idempotent.troubleshooting import with_link

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

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
    """One queue's consumer: everything of it but the thread.

    Args:
        app: The app of the tasks.
        routes: Those of one queue, of whose tasks each was found idempotent.
        sqs: The client.
        stopping: Set when it shall come to its end.
    """

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
        """Make a call of it; False if it stays in the queue, and with it those of its group, which has an order.

        Raises:
            Exception: The broker does not answer.
        """
        notification = arrived(message)
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


def arrived(message: "MessageTypeDef") -> Notification:
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
