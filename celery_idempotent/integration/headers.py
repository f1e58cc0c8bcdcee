"""What a message carries: the caller's key, its delivery's identity, and SQS FIFO's ids.

Headers survive every Celery retry, and arbitrary options do not. An identity travels in all that is published on behalf
of its delivery: a body that changes its arguments, or retries with others, means the same operation.

An SQS FIFO queue drops a second message of the same deduplication id for five minutes and delivers a group's messages
one after the other. So the id is made of the idempotency key, which lets SQS itself drop a double publish, and it
changes with every retry, which must not be dropped. Celery keeps neither the id nor the group on a retry.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import FrameType
from typing import Any

from celery import Task
from celery.app.task import Context
from celery.canvas import chord, group
from celery.utils.functional import maybe_list
from kombu import serialization

from celery_idempotent.errors import KeyMissing, PolicyError
from celery_idempotent.integration import versions
from celery_idempotent.integration.context import CONTENT_TYPE, unnested
from celery_idempotent.integration.settings import OptionUnknown, runtime_of
from celery_idempotent.protocol.keys import Identity

# Message headers.
KEY_HEADER = "idempotency_key"  # the key that the publisher gave
IDENTITY_HEADER = "idempotency_identity"  # that of the delivery that the message was published for
CONFLICTS_HEADER = "idempotency_conflicts"  # how often the delivery met another one in flight
OUTAGES_HEADER = "idempotency_outages"  # how often it met no store
DELIVERIES_HEADER = "idempotency_deliveries"  # those before this message: a broker counts each new one from one
TICK_HEADER = "idempotency_tick"  # that of a schedule that the message was published for
WAITING_HEADER = "idempotency_waiting_since"
"""When the delivery was first postponed, in milliseconds since the epoch on the clock of the worker that postponed it.
It serves metrics; nothing else follows from it."""

HEADERS = (KEY_HEADER, IDENTITY_HEADER, CONFLICTS_HEADER, OUTAGES_HEADER, DELIVERIES_HEADER, TICK_HEADER)
"""Those of the library's own that stay with the operation through every message."""


def is_awaited(options: Mapping[str, Any]) -> bool:
    """Whether dropping this very message would lose what waits for it: something of canvas, or a frozen signature."""
    # Celery freezes signatures with a ``reply_to``, such as the last of a chain, or the body of a chord.
    waiting = ("link", "link_error", "chord", "chain", "group_id")
    return "reply_to" in options or any(options.get(each) for each in waiting)


def publish_options(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str) -> dict[str, Any]:
    """The options of ``apply_async`` with an explicit key moved to the headers and FIFO's id added."""
    merged = _with_key_in_headers(task, options)
    if KEY_HEADER in (merged.get("headers") or {}):
        _refuse_shared_key(task)
    for name in ("link", "chord", "chain"):
        for canvas in maybe_list(options.get(name)) or ():
            if isinstance(canvas, group | chord):  # a worker would refuse its key when the first task has run
                _refuse_key_among(task, canvas.options)
    if runtime_of(task.app).broker.is_sqs and "MessageDeduplicationId" not in merged:
        queue = merged.get("queue") or merged.get("routing_key")
        if queue is None:
            queue = task.app.amqp.router.route(dict(merged), task.name, args, kwargs, task).get("queue")
        if str(getattr(queue, "name", queue) or "").endswith(".fifo"):
            merged["MessageDeduplicationId"] = _deduplication_id(task, args, kwargs, merged, task_id)
    return merged


def eager_options(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    # There is no message, and of a chord's header Celery keeps no options.
    _refuse_shared_key(task)
    return _with_key_in_headers(task, options)


def _with_key_in_headers(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(options)
    headers = merged.get("headers") or {}
    if "headers" in headers:
        headers = merged["headers"] = unnested(headers)  # or a tracer would write a key into the author's own dict
    _refuse_misspelt(merged, headers, task.name)
    explicit_key(headers, task.name)
    if KEY_HEADER in merged:
        merged["headers"] = {**headers, KEY_HEADER: explicit_key(merged, task.name)}
        merged["headers"].pop(IDENTITY_HEADER, None)
        del merged[KEY_HEADER]
    return merged


def explicit_key(given: Mapping[str, Any], task: str) -> str | None:
    """The key among headers or options; one that is null or empty is missing."""
    if KEY_HEADER not in given:
        return None
    explicit = given[KEY_HEADER]
    if explicit is None or explicit == "":
        raise KeyMissing(task, "the option idempotency_key")
    if not isinstance(explicit, str):
        raise PolicyError("idempotency_key", repr(explicit), "must be a string; write str(...) around it")
    return explicit


def _refuse_misspelt(options: Iterable[str], headers: Iterable[str], task: str) -> None:
    alike = [each for each in map(str, options) if each.lower().startswith("idempot")]
    alike += [each for each in map(str, headers) if each.lower().replace("-", "_") == KEY_HEADER]
    for name in alike:
        if name != KEY_HEADER:
            raise OptionUnknown(name, "...", f"{task}: unknown option; there is idempotency_key='...'")


def _refuse_shared_key(task: Task) -> None:
    """Refuse a key of a whole group or chord: one member would run, and the others would get its result."""
    # Celery merges the options of a group into those of each member. Only its own frames still tell them apart, and
    # only there the key is seen before the first member is published.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        canvas = frame.f_locals.get("self") if frame.f_globals is _CANVAS else None
        if isinstance(canvas, group | chord):
            _refuse_key_among(task, {**canvas.options, **(frame.f_locals.get("options") or {})})
        frame = frame.f_back


def _refuse_key_among(task: Task, options: Mapping[str, Any]) -> None:
    given = {**(options.get("headers") or {}), **options}
    if KEY_HEADER in given:
        raise PolicyError(
            "idempotency_key",
            repr(given[KEY_HEADER]),
            f"{task.name}: it was given to a whole group, so only one member would run; give each its own: "
            "group(task.s(...).set(idempotency_key=...), ...)",
        )


_CANVAS = vars(sys.modules[group.__module__])


def wire_form(task: Task, args: Any, kwargs: Any, serializer: str | None = None) -> tuple[Any, Any]:
    """The arguments as a worker will get them, so that publisher and worker derive one key."""
    serializer = serializer or task.serializer or "json"
    args, kwargs = versions.dumped_models(task, args, kwargs, serializer)
    content_type, encoding, data = serialization.dumps((args or (), kwargs or {}), serializer)
    received = serialization.loads(data, content_type, encoding, accept={content_type})
    return received[0], received[1]


def headers_of(request: Context, task: str) -> Mapping[str, Any]:
    """The headers of a delivery, with a key that was given to ``send_task``; one that it misspelt is refused here."""
    headers, properties = request.headers or {}, request.properties or {}
    _refuse_misspelt(properties, headers, task)
    if KEY_HEADER in properties and KEY_HEADER not in headers:
        return {**headers, KEY_HEADER: properties[KEY_HEADER]}
    return headers


def bound_header(content: str, owner: str, task_id: str) -> str:
    """A header that counts for its owner under one task id only: people forward all headers to other tasks, too."""
    binding = sha256(f"{owner}\0{task_id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{binding}:{content}"


def _in_bound_header(headers: Mapping[str, Any], name: str, owner: str, task_id: str) -> str:
    if name not in headers:
        return ""
    told = str(headers[name])
    content = told.partition(":")[2]
    return content if content and told == bound_header(content, owner, task_id) else ""


def identity_header(identity: Identity, scope: str, task_id: str) -> str:
    """The header by which what is published on behalf of a delivery is the same operation."""
    return bound_header(f"{identity.key.rpartition(':')[2]}:{identity.fingerprint or ''}", scope, task_id)


def identity_in(headers: Mapping[str, Any], scope: str, task_id: str) -> Identity | None:
    """The identity that the headers carry for this very scope and task id."""
    if IDENTITY_HEADER not in headers:
        return None
    found = _IDENTITY.fullmatch(_in_bound_header(headers, IDENTITY_HEADER, scope, task_id))
    return found and Identity(f"{scope}:{found['key']}", found["fingerprint"] or None)


_IDENTITY = re.compile("(?P<key>[0-9a-f]{64}):(?P<fingerprint>([0-9a-f]{64})?)")


def tick_in(headers: Mapping[str, Any], task: str, task_id: str) -> str | None:
    """The tick of a schedule that the headers name for this very task and task id."""
    return _in_bound_header(headers, TICK_HEADER, task, task_id) or None


def republish_options(request: Context, options: Mapping[str, Any], identity: str | None) -> dict[str, Any]:
    """The options for a message on behalf of the delivery of ``request``, with all that Celery would drop.

    Celery keeps what stands in the headers, but drops all of them where ``options`` has some, and always drops the
    serialiser, the compression and the message group of SQS. ``identity`` is as :func:`identity_header` writes it.
    """
    kept = {
        "serializer": serialization.registry.type_to_name.get(getattr(request, CONTENT_TYPE, None)),
        "compression": getattr(request, "compression", None),
        "MessageGroupId": (request.properties or {}).get("MessageGroupId"),
    }
    merged = {**{name: value for name, value in kept.items() if value is not None}, **options}
    ours = {name: value for name, value in headers_of(request, "").items() if name in HEADERS}
    if identity is not None:
        ours[IDENTITY_HEADER] = identity
    given = merged.get("headers")
    merged["headers"] = {**ours, **(versions.headers_again(request) if given is None else given)}
    if given is None:
        merged["headers"].pop(WAITING_HEADER, None)  # a body that retries has not waited
    return merged


def waiting_since(headers: Mapping[str, Any]) -> int | None:
    """When the delivery was first postponed; None if it never was, or somebody put something else there."""
    since = headers.get(WAITING_HEADER)
    # At most in 33658: JSON has integers beyond all floats, and what reckons with one of those raises.
    return since if type(since) is int and 0 < since < 10**15 else None


def deliveries(request: Context) -> int:
    """How often the operation's message was delivered, this time included, as far as the broker tells."""
    message = ((request.properties or {}).get("delivery_info") or {}).get("sqs_message") or {}
    headers = request.headers or {}
    # Of a quorum queue, RabbitMQ tells how often it has delivered the message before.
    before = count_in(headers, "x-delivery-count")
    received = (message.get("Attributes") or {}).get("ApproximateReceiveCount") or before + 1
    return count_in(headers, DELIVERIES_HEADER) + int(received)


def count_in(headers: Mapping[str, Any], name: str) -> int:
    """The count in a header; 0 where a publisher has put something else there."""
    found = headers.get(name)
    return found if type(found) is int and 0 <= found < 1_000_000 else 0  # no message has more deliveries


def is_fifo(request: Context) -> bool:
    """Whether the message of ``request`` came from an SQS FIFO queue."""
    delivery = (request.properties or {}).get("delivery_info") or request.delivery_info or {}
    return str(delivery.get("sqs_queue") or delivery.get("routing_key") or "").endswith(".fifo")


def _deduplication_id(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str) -> str:
    headers = options.get("headers") or {}
    received = wire_form(task, args, kwargs, options.get("serializer"))
    key = task.idempotency_identity(*received, headers=headers, task_id=task_id).key
    if is_awaited(options):
        key = f"{key}\0{task_id}"
    repeats = (options.get("retries") or 0, *(count_in(headers, each) for each in (CONFLICTS_HEADER, OUTAGES_HEADER)))
    return f"{sha256(key.encode()).hexdigest()}:{':'.join(map(str, repeats))}"
