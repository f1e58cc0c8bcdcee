"""A stage: what a worker asks of stores and receivers passes here, and the worker may die on either side of it.

A death is acted: an exception that nobody catches unwinds the delivery, and whatever handlers run on its way, nothing
that the dead worker asks arrives anywhere any more.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

from celery import Task

from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, from_plain
from celery_idempotent.protocol.store import CommittingStore, OutboxMessage, Store, Transaction, TransactionalStore
from celery_idempotent.testing import StoreWrapper
from celery_idempotent.testing.scenarios import WorkerDied
from tests.support.deliveries import Ended, deliver

T = TypeVar("T")

LEASE_AND_GRACE = 61_000
"""Milliseconds, of the default policy."""


class Stage:
    """What is to happen before a request arrives, or before its answer does; each plan once, in order."""

    def __init__(self) -> None:
        #: Milliseconds by which the clocks of all stores and receivers are ahead.
        self.ahead = 0
        #: By point, the request that was sent last: it may arrive late.
        self.sent: dict[str, Callable[[], Any]] = {}
        self._is_dead = False
        self._closed: set[str] = set()
        self._plans: dict[str, deque[Callable[[], object]]] = defaultdict(deque)

    def plan(self, moment: str, *acts: Callable[[], object]) -> None:
        """Let ``acts`` happen at the next times of ``moment``, such as ``"before claim"``, one at each."""
        self._plans[moment].extend(acts)

    def close(self, *points: str) -> None:
        """From now on, nothing is to be asked at these points."""
        self._closed.update(points)

    @property
    def unplayed(self) -> list[str]:
        """The moments that were planned and did not come."""
        return [moment for moment, acts in self._plans.items() if acts]

    def ask(self, point: str, request: Callable[[], T]) -> T:
        """``request()``, unless the worker is dead or dies of it."""
        if self._is_dead:
            raise WorkerDied
        assert point not in self._closed, f"{point} is asked once more"
        self.sent[point] = request
        self.reach(f"before {point}")
        answer = request()
        self.reach(f"after {point}")
        return answer

    def reach(self, moment: str) -> None:
        """Do what is planned for this time of ``moment``."""
        if acts := self._plans[moment]:
            acts.popleft()()

    def die(self) -> NoReturn:
        """End the worker that asks."""
        self._is_dead = True
        raise WorkerDied

    def revive(self) -> None:
        """Another worker begins."""
        self._is_dead = False


class _StagedTransaction:
    def __init__(self, transaction: Transaction, stage: Stage) -> None:
        self._transaction = transaction
        self._stage = stage

    @property
    def connection(self) -> Any:
        return self._transaction.connection

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._stage.ask("record in the transaction", lambda: self._transaction.swap(new, expected))

    def enqueue(self, message: OutboxMessage) -> None:
        self._stage.ask("message in the transaction", lambda: self._transaction.enqueue(message))

    def commit(self) -> None:
        try:
            self._stage.ask("commit", self._transaction.commit)
        except WorkerDied:
            self.rollback()
            raise

    def rollback(self) -> None:
        self._transaction.rollback()  # of a dead worker, the database itself does it


def _outbox(name: str) -> Any:
    """A method of the outbox behind, which is a point of the stage, such as ``give back``."""
    return lambda self, *args: self._stage.ask(name.replace("_", " "), lambda: getattr(self.store, name)(*args))


class StagedStore(StoreWrapper):
    """A store whose every write is a point of the stage (``claim``, ``begin NAME``), and whose clock is the stage's."""

    def __init__(self, store: Store, stage: Stage) -> None:
        super().__init__(store)
        self._stage = stage
        now = store.now
        setattr(store, "now", lambda: now() + stage.ahead)  # noqa: B010 - it is a method

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._stage.ask(self._point_of(new), lambda: self.store.swap(new, expected))

    def swap_with(self, new: Record, expected: str, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        assert isinstance(self.store, CommittingStore)
        committing = self.store
        return self._stage.ask("commit", lambda: committing.swap_with(new, expected, writes))

    def begin(self, using: Any = None) -> Transaction:
        assert isinstance(self.store, TransactionalStore)
        transactional, begun = self.store, list[Transaction]()
        try:
            self._stage.ask("transaction", lambda: begun.append(transactional.begin(using)))
        except WorkerDied:
            for each in begun:
                each.rollback()  # of a dead worker, the database itself does it
            raise
        return _StagedTransaction(begun[0], self._stage)

    enqueue, waiting, take, forget = map(_outbox, ("enqueue", "waiting", "take", "forget"))
    give_back, postpone = map(_outbox, ("give_back", "postpone"))

    def _point_of(self, new: Record) -> str:
        if new.status is not Status.IN_PROGRESS:
            return str(new.status)
        stored = self.store.get(new.key)
        if stored is None or stored.owner != new.owner:
            return "claim"
        for name, plain in new.steps.items():
            if plain != stored.steps.get(name):
                return f"{'begin' if isinstance(from_plain(plain), Begun) else 'end'} {name}"
        return "renewal"


class Play:
    """Deliveries of one message of ``task`` by workers that may die, and one duplicate at the end."""

    def __init__(self, stage: Stage, task: Task, *args: Any) -> None:
        self.stage = stage
        self.task = task
        self.args = args
        self.task_id = str(uuid4())
        #: How the deliveries ended, in order; of those that did.
        self.ends: list[Ended] = []

    def deliver(self, task_id: str | None = None) -> Ended | None:
        """One delivery; None if its worker died."""
        self.stage.revive()
        try:
            ended = deliver(self.task, *self.args, task_id=task_id or self.task_id)
        except WorkerDied:
            return None
        finally:
            self.stage.revive()
        self.ends.append(ended)
        return ended

    def settle(self) -> Ended:
        """Deliver until there is an outcome, each time after the lease; the outcome."""
        for _ in range(5):
            ended = self.deliver()
            if ended is not None and ended.state not in {"RETRY", "REJECTED"}:
                return ended
            self.stage.ahead += LEASE_AND_GRACE
        raise AssertionError(f"never settled: {self.ends}")

    def until_all_is_known(self) -> None:
        """Deliver until there is an outcome, and then a duplicate, which must get the same."""
        outcome = self.settle()
        duplicate = self.deliver(str(uuid4()))
        assert duplicate is not None
        assert (duplicate.state, str(duplicate.value)) == (outcome.state, str(outcome.value))
        assert self.stage.unplayed == []

    def stall(self) -> None:
        """Let the lease run out and a successor come to its end, while the calling worker waits."""
        self.stage.ahead += LEASE_AND_GRACE
        # In a thread, as a process of its own has nothing of this one's context.
        successor = Thread(target=self.deliver)
        successor.start()
        successor.join()
        assert self.ends, "the successor did not end"
