"""One task, rehearsed: all the ways in which a broker and a dying worker can treat its message.

Its messages are delivered to this process by Celery's own tracer, without a broker or backend. What the task publishes
again for itself, by a retry or because it met a conflict, is caught and delivered as the next message. Everything else
that a body publishes goes where it always goes.

A worker's death is acted. An exception that nobody should catch unwinds the delivery, and whatever handlers
run on its way, the store takes nothing from the dead attempt any more.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Literal, NoReturn
from unittest.mock import patch
from uuid import uuid4

from celery import Task
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend

from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration.headers import KEY_HEADER, wire_form
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.task.task import IdempotentMixin
from celery_idempotent.integration.versions import comes_back_from_lost_worker
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, from_plain
from celery_idempotent.protocol.store import OutboxMessage, Store, Transaction, TransactionalStore
from celery_idempotent.stores import open_store
from celery_idempotent.testing.stores import FakeStore


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

    def published_by(self, message: Message) -> list[Message]:
        """What the task has published in the place of ``message``, also where its delivery has not ended."""
        return self._published.get(message.task_id, [])

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


_MAX_DELIVERIES = 50
"""Of one message. A task that is still postponed after so many leases will not settle."""

_MEETS_WITHIN = 10.0
"""Seconds that the first delivery waits in its body for the second one to come in or be sent away."""

Kind = Literal["delivery", "lost", "death"]
"""What a scenario is about: deliveries alone, one lost message, or the end of a worker or of its patience."""

Moment = Literal["before_body", "after_body"]


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario, what came of it, and how its deliveries ended, in order."""

    kind: Kind
    name: str
    effects: int
    endings: tuple[DeliveryResult, ...]


Fate = Literal["request lost", "reply lost", "two answers lost", "dies before", "dies after"]

_FATES: tuple[tuple[Fate, Kind, str], ...] = (
    ("request lost", "lost", "one request is lost at"),
    ("reply lost", "lost", "one reply is lost at"),
    ("two answers lost", "death", "two answers are lost at"),
    ("dies before", "death", "the worker dies before"),
    ("dies after", "death", "the worker dies after"),
)

_WRITES = {
    Status.COMPLETED: "the completion",
    Status.FAILED: "the failure",
    Status.RELEASED: "the release",
    Status.UNKNOWN: "giving up",
}


class ScenarioStore(FakeStore):
    """A store that deals a fate to one write of one operation, in the thread that executes it.

    ``own`` is the app's own store, or its URL: in its database are the transactions of bodies, and none of our records.
    """

    def __init__(self, own: str | Store | None = None) -> None:
        super().__init__()
        self._setting = own
        self._own: Store | None = None
        #: The operation's writes so far, by the name that people know.
        self.writes: list[str] = []
        self._fate: tuple[int, Fate] | None = None
        self._thread = 0
        self._deliveries = 0
        self._has_claim = False
        self._owner = ""
        self._dead_owners: set[str] = set()
        self._dead_threads: set[int] = set()

    def plan(self, fate: tuple[int, Fate] | None) -> None:
        """Begin an operation; ``fate`` is for its write of that number."""
        self.writes, self._fate, self._deliveries = [], fate, 0

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Within the block the calling thread executes a delivery of the operation."""
        thread = threading.get_ident()
        self._thread, self._has_claim, self._owner = thread, False, ""
        self._deliveries += 1
        try:
            yield
        finally:
            self._dead_threads.discard(thread)  # another may get its number
            if self._thread == thread:  # one that died may come to its end in the midst of the next
                self._thread = 0

    def bury(self) -> None:
        """Take nothing from the attempt of the delivery any more, neither from its thread nor from its heartbeat."""
        self._dead_owners.add(self._owner)
        self._dead_threads.add(threading.get_ident())

    def die(self) -> NoReturn:
        """End the delivery: nothing of it is written from now on."""
        self.bury()
        raise WorkerDied

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`."""
        what = self._describe(new) if new.status is Status.IN_PROGRESS else _WRITES[new.status]
        return self._meet_fate(new, what, partial(super().swap, new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        """See :meth:`celery_idempotent.stores.CommittingStore.swap_with`; ``writes`` are kept in :attr:`committed`."""
        return self._meet_fate(new, "the commit", partial(super().swap_with, new, expected, writes))

    def begin(self, using: Any = None) -> Transaction:
        """A transaction on the database of the app's own store, in which the record is the only thing rehearsed."""
        if self._own is None and self._setting is not None:
            self._own = open_store(self._setting)
        own: object = self._own
        if not isinstance(own, TransactionalStore):
            raise PolicyError(
                "idempotency_store",
                repr(own),
                "has no transactions; to rehearse attempt.transaction(), give the test's app an SQL store, such as "
                "sqlite:////tmp/test.sqlite: the body's statements go to its database",
            )
        return _ScenarioTransaction(self, own.begin(using))

    def commit(self, new: Record, expected: str, own: Callable[[], None]) -> Record | None:
        """Write ``new`` together with what ``own`` commits, by the fate of that write."""

        def both() -> Record | None:
            own()
            return super(ScenarioStore, self).swap(new, expected)

        return self._meet_fate(new, "the commit", both)

    def close(self) -> None:
        """Close the app's own store, if it was opened here."""
        if self._own is not None and self._own is not self._setting:
            self._own.close()

    def _meet_fate(self, new: Record, what: str, swap: Callable[[], Record | None]) -> Record | None:
        if threading.get_ident() in self._dead_threads:
            raise WorkerDied
        if threading.get_ident() != self._thread:
            if new.owner in self._dead_owners:  # the heartbeat's thread must see an error that it knows
                raise StoreUnavailable(repr(self), "swap", "the worker is dead")
            return swap()
        self._owner = new.owner
        number = len(self.writes)
        self.writes.append(self._name(what))
        fate = self._fate[1] if self._fate and self._fate[0] == number else None
        is_repetition = self._fate == (number - 1, "two answers lost")
        if fate == "dies before":
            self.die()
        if fate == "request lost" or is_repetition:
            raise StoreUnavailable(repr(self), "swap", "the request is lost")
        stored = swap()
        self._has_claim |= stored is not None and stored.revision == new.revision
        if fate == "dies after":
            self.die()
        if fate in ("reply lost", "two answers lost"):
            raise StoreUnavailable(repr(self), "swap", "the reply is lost")
        return stored

    def _describe(self, new: Record) -> str:
        """A write that does not end the claim, by the step that it is about, if it is about one."""
        stored = self.get(new.key)
        before = stored.steps if stored else {}
        for name in sorted({*before, *new.steps}):
            state = from_plain(new.steps.get(name))
            if state != from_plain(before.get(name)):
                what = "the withdrawal" if state is None else "the beginning" if isinstance(state, Begun) else "the end"
                return f"{what} of step {name!r}"
        return "a write of the body"

    def _name(self, what: str) -> str:
        name = what if self._has_claim else "the claim"
        if self._deliveries > 1:
            name += f" of delivery {self._deliveries}"
        return name if name not in self.writes else f"{name}, again"


class _ScenarioTransaction:
    """See :class:`celery_idempotent.stores.Transaction`. The user's rows are in a database, the record is in memory.

    They are written together all the same: a worker's death is acted, so nothing comes between.
    """

    def __init__(self, store: ScenarioStore, own: Transaction) -> None:
        self._store = store
        self._own = own
        self._write: tuple[Record, str] | None = None
        self._is_open = True

    @property
    def connection(self) -> Any:
        return self._own.connection

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self._store.get(new.key)
        if expected is None or stored is None or stored.revision != expected:
            return stored
        self._write = (new, expected)
        return new

    def enqueue(self, message: OutboxMessage) -> None:
        self._own.enqueue(message)

    def commit(self) -> None:
        assert self._write is not None, "swap() comes before commit()"
        try:
            self._store.commit(*self._write, self._commit)
        finally:
            if self._is_open:
                self._own.rollback()

    def rollback(self) -> None:
        self._own.rollback()

    def _commit(self) -> None:
        self._is_open = False
        self._own.commit()


DeliverOnce = Callable[[Message], tuple[DeliveryResult, list[Message]]]


@dataclass
class Scenarios:
    """All scenarios of one call."""

    deliveries: Deliveries
    store: ScenarioStore
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    count: Callable[[], int] = int
    reset: Callable[[], object] = nothing

    def __post_init__(self) -> None:
        task = self.deliveries.task
        policy = task.idempotency_policy if isinstance(task, IdempotentMixin) else None
        self._lease = (policy.lease_ms + runtime_of(task.app).grace) / 1000 if policy else 0.0
        self.redelivers = comes_back_from_lost_worker(task)

    def play_all(self) -> list[Row]:
        """What came of each; only the first if that says nothing about one effect."""
        once = self._play("delivery", "delivered once", self.deliver)
        if once.effects != 1:
            return [once]
        writes = self.store.writes
        return [
            once,
            self._play("delivery", "delivered twice", self._deliver_and_duplicate),
            self._play("delivery", "delivered again as the body begins", partial(self._deliver_two, "before_body")),
            self._play("delivery", "delivered again as the body ends", partial(self._deliver_two, "after_body")),
            self._play("death", "the worker dies as the body begins", partial(self._die, "before_body")),
            self._play("death", "the worker dies as the body ends", partial(self._die, "after_body")),
            *(
                self._play(kind, f"{what} {write}", self._deliver_and_duplicate, (number, fate))
                for number, write in enumerate(writes)
                for fate, kind, what in _FATES
            ),
        ]

    def _play(
        self,
        kind: Kind,
        name: str,
        act: Callable[[Message], list[DeliveryResult]],
        fate: tuple[int, Fate] | None = None,
    ) -> Row:
        self.reset()
        before = self.count()
        self.store.plan(fate)
        endings = act(self.deliveries.message(f"rehearsal:{uuid4()}", *self.args, **self.kwargs))
        return Row(kind, name, self.count() - before, tuple(endings))

    def deliver(self, message: Message, deliver_once: DeliverOnce | None = None) -> list[DeliveryResult]:
        """Deliver until nothing is left to deliver; every time after the lease."""
        deliver_once = deliver_once or self.deliver_once
        endings: list[DeliveryResult] = []
        waiting = [message]
        while waiting and len(endings) < _MAX_DELIVERIES:
            message = waiting.pop(0)
            ending, published = deliver_once(message)
            endings.append(ending)
            waiting += self._next(message, ending, published)
            self.store.advance(self._lease if waiting else 0)
        return endings

    def deliver_once(self, message: Message) -> tuple[DeliveryResult, list[Message]]:
        """One delivery, how it ended, and what was published in its place."""
        with self.store.delivering():
            return self.deliveries.deliver(message)

    def _next(self, message: Message, ending: DeliveryResult, published: Sequence[Message]) -> list[Message]:
        """What a broker delivers then."""
        given_back = ending.how == "REJECTED" and ending.value.requeue
        if given_back or (ending.how == "DIED" and self.redelivers):
            return [*published, replace(message, is_redelivered=True)]
        return list(published)

    def _deliver_and_duplicate(self, message: Message) -> list[DeliveryResult]:
        """All its deliveries, and another message of the operation, as a publisher sends it who got no answer.

        But that one must not make up for a message that is lost.
        """
        endings = self.deliver(message)
        return endings if endings[-1].how == "DIED" else endings + self.deliver(_duplicate(message))

    def _deliver_two(self, moment: Moment, message: Message) -> list[DeliveryResult]:
        """While the first delivery is at ``moment``, a second one comes, and gets as far or is sent away."""
        first, second = message, _duplicate(message)
        comings = itertools.count()
        is_settled = threading.Event()
        delivered: list[Future[tuple[DeliveryResult, list[Message]]]] = []

        def come() -> None:
            if next(comings):
                is_settled.set()  # it is the second itself, which waits for nobody: both are in the body
                return
            delivered.append(thread.submit(self.deliveries.deliver, second))
            delivered[0].add_done_callback(lambda _: is_settled.set())
            is_settled.wait(_MEETS_WITHIN)

        with patch.object(self.deliveries, moment, come), ThreadPoolExecutor(1) as thread:
            ended = [(first, *self.deliveries.deliver(first))]
        ended += [(second, *each.result()) for each in delivered]
        endings = [ending for _, ending, _ in ended]
        for each in [waiting for one in ended for waiting in self._next(*one)]:
            self.store.advance(self._lease)
            endings += self.deliver(each)
        return endings

    def _die(self, moment: Moment, message: Message) -> list[DeliveryResult]:
        """The first delivery that comes to ``moment`` dies there."""
        deaths = iter((self.store.die,))
        with patch.object(self.deliveries, moment, lambda: next(deaths, nothing)()):
            return self._deliver_and_duplicate(message)


def _duplicate(message: Message) -> Message:
    return replace(message, task_id=str(uuid4()))
