"""What is added to a message when it is published: the caller's key, and SQS FIFO's ids.

Headers survive every Celery retry and arbitrary options do not, so an explicit key travels as a header.

An SQS FIFO queue drops a second message of the same deduplication id for five minutes and delivers a
group's messages one after the other. So the id is made of the idempotency key, which lets SQS itself drop
a double publish, and it changes with every retry, which must not be dropped. Celery keeps neither the id
nor the group on a retry; :func:`fifo_options` does.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from celery import Task
from kombu import serialization

from celery_idempotent.errors import KeyMissing, PolicyError
from celery_idempotent.runtime import runtime_of

__all__ = [
    "CONFLICTS_HEADER",
    "KEY_HEADER",
    "OUTAGES_HEADER",
    "checked_key",
    "fifo_options",
    "is_fifo",
    "prepared",
    "wire_form",
    "with_key_in_headers",
]

KEY_HEADER = "idempotency_key"
"""Message header with the key that the publisher gave."""

CONFLICTS_HEADER = "idempotency_conflicts"
"""Message header that counts how often the delivery met another one in flight."""

OUTAGES_HEADER = "idempotency_outages"
"""Message header that counts how often the delivery met no store."""

_WAITED_FOR = ("link", "link_error", "chord", "chain", "group_id")
"""Options by which something else waits for this very message; dropping it would lose what waits."""


def prepared(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str) -> dict[str, Any]:
    """The options of ``apply_async`` with an explicit key moved to the headers and FIFO's id added.

    Raises:
        KeyMissing: ``idempotency_key`` was given and is null or empty.
        PolicyError: ``idempotency_key`` is no text.
    """
    merged = with_key_in_headers(task, options)
    if runtime_of(task.app).broker.is_sqs and "MessageDeduplicationId" not in merged and _goes_to_fifo(task, merged):
        merged["MessageDeduplicationId"] = _deduplication_id(task, args, kwargs, merged, task_id)
    return merged


def with_key_in_headers(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with an explicit key moved to the headers; raises as :func:`checked_key` does."""
    merged = dict(options)
    if KEY_HEADER in merged:
        explicit = checked_key(merged.pop(KEY_HEADER), task.name)
        merged["headers"] = {**(merged.get("headers") or {}), KEY_HEADER: explicit}
    return merged


def checked_key(explicit: Any, task: str) -> str:
    """An explicit key, if it can be one.

    Raises:
        KeyMissing: It is null or empty.
        PolicyError: It is no text.
    """
    if explicit is None or explicit == "":
        raise KeyMissing(task, "the option idempotency_key")
    if not isinstance(explicit, str):
        raise PolicyError("idempotency_key", repr(explicit), "must be a text; write str(...) around it")
    return explicit


def wire_form(task: Task, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments as a worker will get them, so that publisher and worker derive one key."""
    serializer = task.serializer or "json"
    if task._dump_pydantic_arguments is not None and serializer != "pickle":
        args, kwargs = task._dump_pydantic_arguments(args, kwargs)
    content_type, encoding, data = serialization.dumps((args or (), kwargs or {}), serializer)
    received = serialization.loads(data, content_type, encoding, accept={content_type})
    return received[0], received[1]


def is_fifo(request: Any) -> bool:
    """Whether the message of ``request`` came from an SQS FIFO queue."""
    delivery = (request.properties or {}).get("delivery_info") or request.delivery_info or {}
    return str(delivery.get("sqs_queue") or delivery.get("routing_key") or "").endswith(".fifo")


def fifo_options(request: Any) -> dict[str, Any]:
    """What a retry must pass on of the message it repeats: its group, on SQS."""
    group = (request.properties or {}).get("MessageGroupId")
    return {} if group is None else {"MessageGroupId": group}


def _goes_to_fifo(task: Task, options: Mapping[str, Any]) -> bool:
    queue = options.get("queue") or options.get("routing_key")
    if queue is None:
        queue = task.app.amqp.router.route(dict(options), task.name).get("queue")
    return str(getattr(queue, "name", queue) or "").endswith(".fifo")


def _deduplication_id(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str) -> str:
    headers = options.get("headers") or {}
    received = wire_form(task, args, kwargs)
    key = task.idempotency_identity(*received, headers=headers, task_id=task_id).key
    if any(options.get(each) for each in _WAITED_FOR):
        key = f"{key}\0{task_id}"
    repeats = (options.get("retries") or 0, headers.get(CONFLICTS_HEADER, 0), headers.get(OUTAGES_HEADER, 0))
    return f"{sha256(key.encode()).hexdigest()}:{':'.join(map(str, repeats))}"
