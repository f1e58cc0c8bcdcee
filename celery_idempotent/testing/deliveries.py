"""Deliveries of one task's messages to this process, by Celery's own tracer and without a broker or backend.

What the task publishes again for itself, by a retry or because it met a conflict, is caught and delivered
as the next message. Everything else that a body publishes goes where it always goes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal
from unittest.mock import patch
from uuid import uuid4

from celery import Task
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend

from celery_idempotent.integration.headers import KEY_HEADER, wire_form


class WorkerDied(BaseException):
    """Stands for the end of a worker's process. Whatever runs after it in a body would not have run."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as a broker holds it; its arguments are not serialised yet."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    headers: Mapping[str, Any]
    retries: int = 0
    is_redelivered: bool = False
    task_id: str = field(default_factory=lambda: str(uuid4()))


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """How a delivery ended, as Celery's states say, or by ``DIED``; ``value`` is the result, or the exception."""

    how: Literal["SUCCESS", "FAILURE", "RETRY", "REJECTED", "IGNORED", "DIED"]
    value: Any


def nothing() -> None:
    """What happens before and after a body, unless somebody says otherwise."""


class Deliveries:
    """Delivers messages of ``task``, also from several threads at once; made and used within :meth:`of`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        #: Called in the delivering thread right before and right after the body.
        self.before_body: Callable[[], None] = nothing
        self.after_body: Callable[[], None] = nothing
        #: How many bodies have run to their end.
        self.completed_bodies = 0
        self._counting = threading.Lock()
        self._published: dict[str, list[Message]] = {}

    @classmethod
    @contextmanager
    def of(cls, task: Task) -> Iterator["Deliveries"]:
        task = task.app.tasks[task.name]  # what was given may be a promise of the task
        deliveries = cls(task)
        run, apply_async = deliveries._watch(task.run), deliveries._catch(task.apply_async)
        # A task is one instance per process, and Celery takes all three from it.
        with patch.multiple(task, run=run, apply_async=apply_async, _backend=DisabledBackend(app=task.app)):
            yield deliveries

    def message(self, key: str, *args: Any, **kwargs: Any) -> Message:
        return Message(args, kwargs, {KEY_HEADER: key})

    def deliver(self, message: Message) -> tuple[DeliveryResult, list[Message]]:
        """Deliver ``message`` once; how it ended, and what the task published in its place."""
        task = self.task
        args, kwargs = wire_form(task, message.args, message.kwargs)
        published: list[Message] = []
        self._published[message.task_id] = published
        request = {
            "id": message.task_id,
            "root_id": message.task_id,
            "args": args,
            "kwargs": kwargs,
            "headers": dict(message.headers),
            "retries": message.retries,
            "hostname": "celery@rehearsal",
            "delivery_info": {"exchange": "", "routing_key": "celery", "redelivered": message.is_redelivered},
        }
        try:
            traced = build_tracer(task.name, task, app=task.app)(message.task_id, args, kwargs, request)
        except WorkerDied as death:
            return DeliveryResult("DIED", death), published
        info = traced.info
        return (
            DeliveryResult("SUCCESS", traced.retval) if info is None else DeliveryResult(info.state, info.retval)
        ), published

    def _watch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.before_body()
            try:
                result = run(*args, **kwargs)
                with self._counting:
                    self.completed_bodies += 1
                return result
            finally:
                self.after_body()

        return watched

    def _catch(self, apply_async: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(apply_async)
        def caught(args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any) -> Any:
            published = self._published.get(task_id or "")
            if published is None:
                return apply_async(args, kwargs, task_id, **options)
            headers, retries = options.get("headers") or {}, options.get("retries") or 0
            published.append(Message(tuple(args or ()), kwargs or {}, headers, retries, task_id=str(task_id)))
            return self.task.AsyncResult(task_id)

        return caught
