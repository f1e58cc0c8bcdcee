"""What Celery changed between 5.4 and 5.7 and this library depends on; nothing else asks for Celery's version."""

import re
from collections.abc import Mapping
from typing import Any

from celery import Celery, Task
from celery.app.defaults import DEFAULTS
from celery.app.task import Context


def dumped_models(task: Task, args: Any, kwargs: Any, serializer: str) -> tuple[Any, Any]:
    """The arguments as Celery publishes them, with pydantic's models of ``pydantic=True`` as plain data."""
    # Celery publishes models since 5.7, and validates in the worker since 5.5. Before, callers dump them.
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None or serializer == "pickle" else dump(args, kwargs)


def headers_again(request: Context) -> Mapping[str, Any]:
    """The headers of the message of ``request``, for a message that is published again."""
    # RabbitMQ takes a message that tells of its deaths for one that goes round in circles, and drops it. Celery leaves
    # that out since 5.6. It also tells how often it has delivered a message, which is another one from now on.
    headers = request.as_execution_options()["headers"] or {}
    return {name: value for name, value in headers.items() if not _OF_RABBITMQ.match(str(name))}


_OF_RABBITMQ = re.compile("x-((first|last)-)?death|x-delivery-count")


def has_quorum_queues(app: Celery) -> bool:
    """Whether Celery delays messages of ``app`` in RabbitMQ itself."""
    # Since Celery 5.5. Before, a queue may be one, and nothing follows from it.
    types = ((each.queue_arguments or {}).get("x-queue-type") for each in app.amqp.queues.values())
    return "worker_detect_quorum_queues" in DEFAULTS and "quorum" in types


def comes_back_from_lost_worker(task: Any) -> bool:
    """Whether the message of ``task``, a task or its class, is delivered again when its pool process dies."""
    # Celery knows retry_on_worker_lost since 5.7; before, it is an option like any other that nobody reads.
    retries = hasattr(Task, "retry_on_worker_lost") and task.retry_on_worker_lost
    return bool(task.acks_late and (task.reject_on_worker_lost or retries))


class KeepsRequest:
    """Gives a body the request that it is executed for, where ``super().__call__`` pushes another one.

    Celery 5.4 pushes an empty one outside of its worker, so that an eager body has no task id and cannot retry. Since
    5.5 Celery itself does what this does, so this class goes with the support of 5.4.
    """

    request: Any

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's since 5.5."""
        super().push_request(*args, **{**vars(self.request), **kwargs})  # type: ignore[misc]  # of Celery's Task
