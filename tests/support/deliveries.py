"""Deliveries in this process: Celery's own tracer on a message's fields, with a broker in memory behind it."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.utils.imports import symbol_by_name
from kombu.serialization import loads, prepare_accept_content

from celery_idempotent.stores.memory import MemoryStore


def an_app(**settings: Any) -> Celery:
    """An app with a broker, a result backend and a store in memory, and the settings a worker should have."""
    app = Celery(f"app-{uuid4().hex[:8]}", set_as_current=False, broker="memory://", backend="cache+memory://")
    usual = {
        "idempotency_store": MemoryStore(),
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_default_queue": uuid4().hex,  # the broker in memory is shared by all apps of the process
        "broker_transport_options": {"polling_interval": 0},
    }
    app.conf.update({**usual, **settings})
    return app


@dataclass(frozen=True, slots=True)
class Ended:
    """How Celery saw a delivery end: state, and the result, exception or control flow."""

    state: str
    value: Any


def deliver(task: Task, *args: Any, task_id: str | None = None, request: Any = None, **kwargs: Any) -> Ended:
    """Deliver one message of ``task`` to this process, as a pool process would execute it.

    Args:
        task: The task.
        args: Its positional arguments.
        task_id: Its id; a new one by default.
        request: Further fields of the message, ``headers`` among them.
        kwargs: Its keyword arguments.
    """
    task_id = task_id or str(uuid4())
    fields = {
        "id": task_id,
        "root_id": task_id,
        "args": list(args),
        "kwargs": kwargs,
        "hostname": "celery@here",
        "delivery_info": {"exchange": "", "routing_key": task.app.conf.task_default_queue, "redelivered": False},
        **(request or {}),
    }
    return _traced(task, task_id, list(args), kwargs, fields)


def redeliver(app: Celery, message: Any) -> Ended:
    """Deliver a message that was published, by the request class and the steps of a worker and its pool process."""
    task = app.tasks[message.headers["task"]]
    request = symbol_by_name(task.Request)(message, app=app, task=task, hostname="celery@here")
    accept = prepare_accept_content(app.conf.accept_content)
    args, kwargs, embed = loads(message.body, message.content_type, message.content_encoding, accept=accept)
    fields = {**request.request_dict, **embed, "args": args, "kwargs": kwargs}
    return _traced(task, request.id, args, kwargs, fields)


def settle(app: Celery, task: Task, ended: Ended) -> Ended:
    """Deliver what was published on behalf of ``task`` until one delivery is no retry; its end."""
    while ended.state == "RETRY":
        (message,) = (each for each in published(app) if each.headers["task"] == task.name)
        ended = redeliver(app, message)
    return ended


def _traced(task: Task, task_id: str, args: Any, kwargs: Any, fields: Any) -> Ended:
    traced = build_tracer(task.name, task, app=task.app)(task_id, args, kwargs, fields)
    if traced.info is None:
        return Ended("SUCCESS", traced.retval)
    return Ended(traced.info.state, traced.info.retval)


def published(app: Celery, queue: str | None = None) -> list[Any]:
    """The messages that wait in the app's queue, oldest first; they are taken out."""
    found = []
    with app.connection_for_read() as connection:
        waiting = connection.SimpleQueue(queue or app.conf.task_default_queue)
        while waiting.qsize():
            found.append(waiting.get_nowait())
            found[-1].ack()
            found[-1].accept = prepare_accept_content(app.conf.accept_content)
        waiting.close()
    return found
