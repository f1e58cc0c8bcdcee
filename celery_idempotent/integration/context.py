"""What is noted of a delivery when it arrives: its identity, and its arguments as they were.

Celery hands one set of arguments to signal receivers, to ``before_start`` and to the body, and each may change it. So
the identity is resolved, and the arguments are kept, when the request is pushed: nothing of the author's has run then.
"""

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from celery import Task
from celery.app.task import Context
from celery.utils.threads import LocalStack

from celery_idempotent.protocol.codec import own_failure
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.troubleshooting import with_link

T = TypeVar("T")
Args = TypeVarTuple("Args")

CONTENT_TYPE = "idempotency_content_type"
"""Attribute of a request by which a worker tells the content type of its message."""


def whole_headers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All headers of a message, found among those that it was sent with, or among the fields of its request."""
    # ddtrace and Sentry nest a dict "headers" there, and Celery then shows a task that dict alone.
    beside: dict[str, Any] = Context({**fields, "headers": None}).headers or {}
    return unnested({**beside, "headers": fields.get("headers")})


def unnested(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The headers with those that are nested among them."""
    # Of ours, a tracer's dict may hold those of an earlier message; of a trace, it holds the latest.
    beside = {name: each for name, each in headers.items() if name != "headers"}
    nested = headers["headers"]
    if not isinstance(nested, Mapping):
        return beside
    return {**beside, **nested, **{name: each for name, each in beside.items() if str(name).startswith("idempotency_")}}


class DeliveryContext:
    """What is known of a delivery besides its message."""

    body_began = False  # which ``before_start`` belongs to
    is_completed = False  # the operation has its outcome, whatever Celery makes of the result
    is_retried = False  # the body published a retry and went on, by ``self.retry(throw=False)``
    is_answered = False  # the library answers in the body's place, or postpones the delivery

    def __init__(self, task: str, derive: Callable[[], Identity], request: Context) -> None:
        self.task = task
        self._message = request.id, request.properties
        # One that runs eagerly is never postponed; a serialiser of the user's can make what pickle cannot take.
        given = request.args, request.kwargs
        self._arguments = None if request.is_eager else or_none(pickle.dumps, given, pickle.HIGHEST_PROTOCOL)
        self.identity = at_once(derive)

    def is_of(self, task: str, request: Context) -> bool:
        """Whether it was noted of the message of ``request``: celery-aio-pool has one request for all of a task."""
        task_id, properties = self._message
        return self.task == task and task_id == request.id and properties is request.properties

    def arguments(self, request: Context) -> tuple[Any, Any]:
        """The arguments as they came, whatever the body has done to those of ``request``."""
        if self._arguments is None:
            return request.args, request.kwargs
        args, kwargs = pickle.loads(self._arguments)  # noqa: S301 - this process wrote it
        return args, kwargs


def at_once(derive: Callable[[], Identity]) -> Callable[[], Identity]:
    """Derive an identity now, to be asked for later: what deriving raises, only asking raises."""
    try:
        identity = derive()
    except Exception as first:  # noqa: BLE001 - a function of the author's may raise anything
        error = own_failure(derive, first)

        def fail() -> NoReturn:
            raise error

        return fail
    return lambda: identity


def or_none(act: Callable[[*Args], T], *args: *Args) -> T | None:
    """What ``act`` gives; None where it always fails."""
    try:
        return act(*args)
    except Exception as first:  # noqa: BLE001 - as above
        own_failure(partial(act, *args), first)
    return None


class RequestStack(LocalStack):  # type: ignore[misc]  # Celery has no types
    """A task's stack of requests, which notes each delivery before anybody else sees it."""

    def __init__(self, task: Callable[[], Task | None]) -> None:
        super().__init__()
        self._task = task

    def push(self, request: Context) -> Any:
        pushed = super().push(request)
        task = None if request.called_directly else self._task()
        if task is not None:
            note_delivery(task, request)  # pushed already: a function as the key may ask for the request that it is for
        return pushed


def note_delivery(task: Task, request: Context) -> DeliveryContext:
    """The delivery of ``request``, noted at the first call."""
    found = arrival_of(request)
    if found is None or not found.is_of(task.name, request):
        # Celery takes attributes of a request that it does not know for headers, and does so in a copy without any.
        request.headers = dict(request.headers or {})
        request.headers.pop(CONTENT_TYPE, None)
        found = request.idempotency = DeliveryContext(
            task.name, partial(task.idempotency_identity_of, request), request
        )
    return found


def note_list(request: Context) -> DeliveryContext:
    """The delivery of a ``map`` or ``starmap``, noted before its items are changed by the bodies they are given to."""
    found = arrival_of(request)
    if found is None or not found.is_of("", request):
        request.headers = whole_headers(vars(request))  # of a task of Celery's own, so by its own request class
        found = request.idempotency = DeliveryContext("", _no_identity, request)
    return found


def _no_identity() -> NoReturn:
    raise LookupError(with_link("a list of items has no identity; each item has", "errors#no-attempt"))


def arrival_of(request: Context) -> DeliveryContext | None:
    """What was noted of the delivery of ``request``; None of a function call, and in a worker's main process."""
    found = getattr(request, "idempotency", None)
    return found if isinstance(found, DeliveryContext) else None  # a header of that name is an attribute, too
