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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from types import MappingProxyType
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
from celery_idempotent.protocol.store import Store, Transaction, TransactionalStore
from celery_idempotent.stores import open_store
from celery_idempotent.testing.stores import FakeStore, installed

Fate = Literal["request lost", "reply lost", "dies before", "dies after"]
_NO_FATES: Mapping[int, Fate] = MappingProxyType({})


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


class Deliveries:
    """Delivers messages of ``task`` as a broker and its workers would, also in several threads at once; see :meth:`of`.

    Its records are in ``store``.
    """

    def __init__(self, task: Task, store: "ScenarioStore") -> None:
        self.task = task
        self.store = store
        #: Called in the delivering thread right before and right after the body.
        self.before_body: Callable[[], object] = lambda: None
        self.after_body: Callable[[], object] = lambda: None
        #: What the bodies returned that have run to their end.
        self.results: list[Any] = []
        self.redelivers = comes_back_from_lost_worker(task)
        policy = task.idempotency_policy if isinstance(task, IdempotentMixin) else None
        self._lease = (policy.lease_ms + runtime_of(task.app).grace) / 1000 if policy else 0.0
        self._published: dict[str, list[Message]] = {}

    @classmethod
    @contextmanager
    def of(cls, task: Task) -> Iterator["Deliveries"]:
        """Within the block nothing of ``task`` reaches its broker, its backend or the records of its store."""
        task = task.app.tasks[task.name]  # what was given may be a promise of the task
        with closing(ScenarioStore(task.app.conf.get("idempotency_store"))) as store, installed(store, task.app):
            deliveries = cls(task, store)
            run, apply_async = deliveries._watch(task.run), deliveries._catch(task.apply_async)
            # A task is one instance per process, and Celery takes all three from it.
            with patch.multiple(task, run=run, apply_async=apply_async, _backend=DisabledBackend(app=task.app)):
                yield deliveries

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any], fates: Mapping[int, Fate] = _NO_FATES) -> Message:
        """The message of a new operation; ``fates`` are those of its writes, by number."""
        self.store.plan(fates)
        return Message(tuple(args), kwargs, {KEY_HEADER: f"rehearsal:{uuid4()}"})

    def deliver(
        self, message: Message, deliver_once: Callable[[Message], DeliveryResult] | None = None
    ) -> list[DeliveryResult]:
        """Deliver until nothing is left to deliver."""
        deliver_once = deliver_once or self.deliver_once
        endings: list[DeliveryResult] = []
        waiting = [message]
        while waiting and len(endings) < _MAX_DELIVERIES:
            message = waiting.pop(0)
            endings.append(deliver_once(message))
            waiting += self.after(message, endings[-1])
        return endings

    def after(self, message: Message, ending: DeliveryResult) -> list[Message]:
        """What a broker delivers after ``message`` ended so; the lease is over by then."""
        coming = self._published[message.task_id]
        if ending.value.requeue if ending.how == "REJECTED" else ending.how == "DIED" and self.redelivers:
            coming = [*coming, replace(message, is_redelivered=True)]
        self.store.advance(self._lease if coming else 0)
        return coming

    def deliver_once(self, message: Message) -> DeliveryResult:
        """How one delivery ended."""
        self._published[message.task_id] = []
        with self.store.delivering():
            try:
                return self._trace(message)
            except WorkerDied as death:
                return DeliveryResult("DIED", death)

    def _trace(self, message: Message) -> DeliveryResult:
        task = self.task
        args, kwargs = wire_form(task, message.args, message.kwargs)
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
        traced = build_tracer(task.name, task, app=task.app)(message.task_id, args, kwargs, request)
        info = traced.info
        return DeliveryResult("SUCCESS", traced.retval) if info is None else DeliveryResult(info.state, info.retval)

    def _watch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.before_body()
            try:
                self.results.append(result := run(*args, **kwargs))
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


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario, what came of it, and how its deliveries ended, in order."""

    name: str
    #: Whether it is the end of a worker, or of its patience.
    is_death: bool
    effects: int
    endings: tuple[DeliveryResult, ...]


_FATES: tuple[tuple[str, bool, tuple[Fate, ...]], ...] = (
    ("one request is lost at", False, ("request lost",)),
    ("one reply is lost at", False, ("reply lost",)),
    ("two answers are lost at", True, ("reply lost", "request lost")),
    ("the worker dies before", True, ("dies before",)),
    ("the worker dies after", True, ("dies after",)),
)
"""What may happen at a write, and at the next one; whether it is a death."""

_WRITES = {
    Status.COMPLETED: "the completion",
    Status.FAILED: "the failure",
    Status.RELEASED: "the release",
    Status.UNKNOWN: "giving up",
}


@dataclass
class _Here:
    """What the store knows of the delivery that a thread executes."""

    number: int
    owner: str = ""
    has_claim: bool = False
    is_dead: bool = False


class ScenarioStore(FakeStore):
    """A store that deals fates to the writes of one operation, in the threads that execute its deliveries.

    ``own`` is the app's own store, or its URL: in its database are the transactions of bodies, and none of our records.
    """

    def __init__(self, own: str | Store | None = None) -> None:
        super().__init__()
        self._own = own
        self._opened = ExitStack()
        #: The operation's writes so far, by the name that people know.
        self.writes: list[str] = []
        self._fates: Mapping[int, Fate] = _NO_FATES
        self._deliveries = 0
        self._dead_owners: set[str] = set()
        self._thread = threading.local()

    def plan(self, fates: Mapping[int, Fate] = _NO_FATES) -> None:
        """Begin an operation; ``fates`` are those of its writes, by number."""
        self.writes, self._fates, self._deliveries = [], fates, 0

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Within the block the calling thread executes a delivery of the operation."""
        self._deliveries += 1
        self._thread.here = _Here(self._deliveries)
        try:
            yield
        finally:
            del self._thread.here

    def bury(self) -> None:
        """Take nothing from the attempt of the delivery any more, neither from its thread nor from its heartbeat."""
        self._thread.here.is_dead = True
        self._dead_owners.add(self._thread.here.owner)

    def die(self) -> NoReturn:
        """End the delivery: nothing of it is written from now on."""
        self.bury()
        raise WorkerDied

    def swap(self, new: Record, expected: str | None) -> Record | None:
        what = self._describe(new) if new.status is Status.IN_PROGRESS else _WRITES[new.status]
        return self.meet_fate(new, what, partial(super().swap, new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        """See :meth:`celery_idempotent.stores.CommittingStore.swap_with`; ``writes`` are kept in :attr:`committed`."""
        return self.meet_fate(new, "the commit", partial(super().swap_with, new, expected, writes))

    def begin(self, using: Any = None) -> Transaction:
        """A transaction on the database of the app's own store, in which the record is the only thing rehearsed."""
        if isinstance(self._own, str):
            self._own = self._opened.enter_context(closing(open_store(self._own)))
        own: object = self._own
        if not isinstance(own, TransactionalStore):
            raise PolicyError(
                "idempotency_store",
                repr(own),
                "has no transactions; to rehearse attempt.transaction(), give the test's app an SQL store, such as "
                "sqlite:////tmp/test.sqlite: the body's statements go to its database",
            )
        return _ScenarioTransaction(self, own.begin(using))

    def close(self) -> None:
        """Close the app's own store, if it was opened here."""
        self._opened.close()

    def meet_fate(self, new: Record, what: str, swap: Callable[[], Record | None]) -> Record | None:
        """Make a write of ``new``, which people know as ``what``, or do not, as it was planned."""
        here: _Here | None = getattr(self._thread, "here", None)
        if here is None:
            if new.owner in self._dead_owners:  # the heartbeat's thread must see an error that it knows
                raise StoreUnavailable(repr(self), "swap", "the worker is dead")
            return swap()
        if here.is_dead:
            raise WorkerDied
        here.owner = new.owner
        fate = self._fates.get(len(self.writes))
        self.writes.append(self._name(what, here))
        if fate == "dies before":
            self.die()
        if fate == "request lost":
            raise StoreUnavailable(repr(self), "swap", "the request is lost")
        stored = swap()
        here.has_claim |= stored is not None and stored.revision == new.revision
        if fate == "dies after":
            self.die()
        if fate == "reply lost":
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

    def _name(self, what: str, here: _Here) -> str:
        name = what if here.has_claim else "the claim"
        if here.number > 1:
            name += f" of delivery {here.number}"
        return name if name not in self.writes else f"{name}, again"


class _ScenarioTransaction:
    """See :class:`celery_idempotent.stores.Transaction`. The user's rows are in a database, the record is in memory.

    They are written together all the same: a worker's death is acted, so nothing comes between.
    """

    def __init__(self, store: ScenarioStore, own: Transaction) -> None:
        self._store = store
        self._own = own
        self._write: tuple[Record, str] | None = None
        self.connection, self.enqueue, self.rollback = own.connection, own.enqueue, own.rollback

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self._store.get(new.key)
        if expected is None or stored is None or stored.revision != expected:
            return stored
        self._write = (new, expected)
        return new

    def commit(self) -> None:
        assert self._write is not None, "swap() comes before commit()"
        new, expected = self._write

        def both() -> Record | None:
            self._own.commit()
            return FakeStore.swap(self._store, new, expected)

        try:
            self._store.meet_fate(new, "the commit", both)
        finally:
            self._own.rollback()  # unless it was committed


Act = Callable[[Deliveries, Message], list[DeliveryResult]]


def rehearse(
    deliveries: Deliveries,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    count: Callable[[], int],
    reset: Callable[[], object],
) -> list[Row]:
    """What came of each scenario; only of the first if that says nothing about one effect."""

    def play(name: str, act: Act, is_death: bool = False, fates: Mapping[int, Fate] = _NO_FATES) -> Row:
        reset()
        before = count()
        endings = act(deliveries, deliveries.begin(args, kwargs, fates))
        return Row(name, is_death, count() - before, tuple(endings))

    once = play("delivered once", Deliveries.deliver)
    if once.effects != 1:
        return [once]
    writes = deliveries.store.writes
    return [
        once,
        play("delivered twice", _deliver_and_duplicate),
        play("delivered again as the body begins", partial(_deliver_two, "before_body")),
        play("delivered again as the body ends", partial(_deliver_two, "after_body")),
        play("the worker dies as the body begins", partial(_die, "before_body"), is_death=True),
        play("the worker dies as the body ends", partial(_die, "after_body"), is_death=True),
        *(
            play(f"{what} {write}", _deliver_and_duplicate, is_death, dict(enumerate(fates, number)))
            for number, write in enumerate(writes)
            for what, is_death, fates in _FATES
        ),
    ]


def _deliver_and_duplicate(deliveries: Deliveries, message: Message) -> list[DeliveryResult]:
    """All its deliveries, and another message of the operation, as a publisher sends it who got no answer.

    But that one must not make up for a message that is lost.
    """
    endings = deliveries.deliver(message)
    return endings if endings[-1].how == "DIED" else endings + deliveries.deliver(_duplicate(message))


def _deliver_two(moment: str, deliveries: Deliveries, first: Message) -> list[DeliveryResult]:
    """While the first delivery is at ``moment``, a second one comes, and gets as far or is sent away."""
    second = _duplicate(first)
    comings = itertools.count()
    is_settled = threading.Event()
    delivered: list[Future[DeliveryResult]] = []

    def come() -> None:
        if next(comings):
            is_settled.set()  # it is the second itself, which waits for nobody: both are in the body
            return
        delivered.append(thread.submit(deliveries.deliver_once, second))
        delivered[0].add_done_callback(lambda _: is_settled.set())
        is_settled.wait(_MEETS_WITHIN)

    with patch.object(deliveries, moment, come), ThreadPoolExecutor(1) as thread:
        ended = [(first, deliveries.deliver_once(first))]
    ended += [(second, each.result()) for each in delivered]
    coming = [each for one in ended for each in deliveries.after(*one)]
    return [ending for _, ending in ended] + [end for each in coming for end in deliveries.deliver(each)]


def _die(moment: str, deliveries: Deliveries, message: Message) -> list[DeliveryResult]:
    """The first delivery that comes to ``moment`` dies there."""
    deaths = [deliveries.store.die]
    with patch.object(deliveries, moment, lambda: deaths and deaths.pop()()):
        return _deliver_and_duplicate(deliveries, message)


def _duplicate(message: Message) -> Message:
    return replace(message, task_id=str(uuid4()))
