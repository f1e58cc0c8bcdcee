"""Deliveries in this process: Celery's own tracer on a message's fields, with a broker in memory behind it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.utils.imports import symbol_by_name
from kombu.serialization import loads, prepare_accept_content

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore


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
    """Deliver one message of ``task``, as a pool process would execute it; ``request`` adds fields of the message."""
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


def _counted(name: str) -> Any:
    """A request to a store that counts it, and raises what is planned for it."""

    def ask(self: Any, *args: Any, **selected: Any) -> Any:
        self.asked.append(name)
        if name in self.away:
            raise self.away[name]
        return getattr(FaultyStore, name)(self, *args, **selected)

    return ask


class CountedStore(FaultyStore):
    """A faulty store that counts all requests and can be away."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.asked: list[str] = []
        self.away: dict[str, Exception] = {}  # what a request raises, by its name

    swap, get, scan, delete = map(_counted, ("swap", "get", "scan", "delete"))


class Shop:
    """An app in memory with the task ``charge``, which notes its calls and does what a test says."""

    def __init__(self, policy: Policy | None = None, **settings: Any) -> None:
        self.clock = FakeClock()
        self.memory = MemoryStore(self.clock.now)
        self.store = CountedStore(self.memory)
        self.app = an_app(**{"idempotency_store": self.store, **settings})
        self.runs: list[Any] = []
        """The order of each call of a body."""
        self.does: Callable[..., Any] = lambda order_id, cents: f"charged {cents}"
        self.charge = self.task(policy)

    def task(self, policy: Policy | None = None, body: Any = None, name: str = "charge", **options: Any) -> Any:
        """A task with this policy; without a body of its own it is another ``charge``."""

        def charge(order_id: Any, cents: Any = 1) -> Any:
            self.runs.append(order_id)
            return self.does(order_id, cents)

        body = body or charge
        body.__name__ = body.__name__.replace("<lambda>", name)  # Celery takes no lambda
        usual = {"base": IdempotentTask, "shared": False, "lazy": False}
        return self.app.task(name=name, **{**usual, "idempotent": policy or Policy(), **options})(body)

    def deliver(self, *args: Any, **kwargs: Any) -> Ended:
        """Deliver a message of ``charge``."""
        return deliver(self.charge, *args, **kwargs)

    def published(self) -> list[Any]:
        """The messages at the broker, taken out."""
        return published(self.app)

    def redeliver(self) -> list[Ended]:
        """Deliver the messages at the broker."""
        return [redeliver(self.app, message) for message in self.published()]

    @property
    def record(self) -> Record:
        """The only one."""
        (record,) = self.memory.scan()
        return record

    def record_of(self, *args: Any, **kwargs: Any) -> Record | None:
        """The one of this call of ``charge``."""
        return self.memory.get(self.charge.idempotency_key_for(*args, **kwargs))

    def change(self, record: Record | None = None, **changes: Any) -> Record:
        """Change a record, by default the only one, as time or another process does."""
        record = record or self.record
        changed = replace(record, **{"revision": "changed", **changes})
        assert self.memory.swap(changed, record.revision) == changed
        return changed


@contextmanager
def signalled() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Every signal that is sent meanwhile, by name, with what it tells."""
    told: list[tuple[str, dict[str, Any]]] = []

    def receive(*, signal: Any, **about: Any) -> None:
        told.append((signal.name.removeprefix("idempotency."), about))

    for each in SIGNALS.values():
        each.connect(receive)
    try:
        yield told
    finally:
        for each in SIGNALS.values():
            each.disconnect(receive)
