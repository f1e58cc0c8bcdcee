"""What a task's body sees of its attempt, and how code deep inside it finds it.

A context variable and not Celery's request: it is right in threads, in greenlets and in nested calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from celery_idempotent.engine.attempt import effect_key
from celery_idempotent.engine.protected import fenced, sending
from celery_idempotent.engine.transaction import BodyTransaction
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.effects import Duration
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import OnTakeover
from celery_idempotent.protocol.steps import Step, terms_of

__all__ = ["AttemptHandle", "Execution", "Unprotected", "current_attempt", "executed_by", "execution", "passing"]

T = TypeVar("T")


class AttemptHandle(Protocol):
    """What a body may know and ask about the attempt that executes it."""

    @property
    def key(self) -> str:
        """The idempotency key."""

    @property
    def fencing_token(self) -> int:
        """Larger than that of every earlier attempt; 0 where the body runs unprotected.

        Send it to receivers that check it. It shuts out late writers; it does not make an effect happen once.
        """

    @property
    def number(self) -> int:
        """1 for the operation's first attempt; 0 where the body runs unprotected."""

    @property
    def is_takeover(self) -> bool:
        """Whether the attempt before this one ended without a word, so that its effects may have happened.

        False proves nothing: an attempt that raised gave its claim back, whatever it had done before.
        """

    def effect_key(self, name: str) -> str:
        """A key for a receiver that honours idempotency keys, 64 hexadecimal digits.

        The same on every attempt of the operation, and different for every other name.
        """

    def ensure_owned(self) -> None:
        """Return if the attempt still owns its key; call it right before an effect.

        Ownership can end right after the answer, so this makes a second effect unlikely, not impossible.

        Raises:
            LeaseLost: It does not; let it pass and the delivery is put off.
            StoreUnavailable: It cannot be known; likewise.
        """

    def step(
        self,
        name: str,
        call: Callable[[Step], T],
        *,
        on_takeover: OnTakeover | None = None,
        window: Duration | None = None,
    ) -> T:
        """Make ``call`` until it has returned once; after that, return what it returned.

        Its result is recorded before this returns, and every later attempt of the operation gets it without a
        call. Between the effect and that record a worker can die, and then ``on_takeover`` decides. An
        exception of the call passes through; steps that finished stay recorded.

        Args:
            name: Identifies the step within the operation, across deployments; steps may be reordered.
            call: Has the effect. It is given the step, whose ``key`` and ``fencing_token`` are for the receiver.
                It should return something small that the app's result serialiser can encode.
            on_takeover: What happens to a step that began and did not finish. ``"rerun"``, the default: called again,
                with the same key (at least once; exactly once where the receiver honours the key).
                ``"refuse"``: it is never called again (at most once): the beginning is recorded before the
                call, and the operation ends UNKNOWN.
            window: Seconds from the first call for which the receiver honours the key. Under ``"refuse"`` the
                step is called again within it. Leave room for a call that hangs before it is sent.

        Raises:
            OutcomeUnknown: Let it pass: the operation ends UNKNOWN, and a person resolves it.
            ResultLost: The step finished in an earlier attempt, and its result could not be kept.
            LeaseLost: Somebody took over; let it pass.
            StoreUnavailable: The store did not confirm; let it pass.
            PolicyError: The name was used before in this attempt, or an argument cannot be used.
        """

    def before_effects(self) -> AbstractContextManager[None]:
        """A stretch of the body in which no effect has begun, at its beginning::

            with self.attempt.before_effects():
                order = load(order_id)
                check(order)

        An exception that leaves the block releases the claim, also under ``on_takeover="refuse"``: the delivery fails
        with it, and the next one runs. It is your word, as :exc:`~celery_idempotent.errors.SafeToRetry` is; what the
        library can see, it holds you to.

        Raises:
            PolicyError: A step or commit was made before the block, or is made in it.
        """

    def fenced_step(
        self, name: str, *, fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
    ) -> T:
        """Have one effect on a receiver that checks fencing tokens: exactly once.

        Args:
            name: As for :meth:`step`.
            fence: Makes the receiver refuse every later write with a smaller token than ``step.fencing_token``.
            probe: Looks for the effect under ``step.key``; returns what ``act`` would have, or None.
            act: Has the effect and stores ``step.key`` with it, in one write that the receiver refuses if it
                has seen a larger token than ``step.fencing_token``.

        Raises as :meth:`step` does. All three are needed: a token alone lets every new attempt pass the check
        and repeat what an earlier one did, and a probe without a fence misses an effect still on its way.
        """

    def commit(self, result: T, writes: Sequence[Mapping[str, Any]]) -> T:
        """Record ``result`` as the operation's outcome and make ``writes``, in one atomic step: exactly once.

        Make it the body's last act: ``return self.attempt.commit(...)``. Whatever the body does afterwards, the
        outcome is this result.

        Args:
            result: What this delivery and every duplicate is answered with.
            writes: Up to 99 puts, updates, deletes and condition checks in DynamoDB, as boto3's
                ``transact_write_items`` takes them; values may also be plain Python. The tables are in the same
                account and Region as the idempotency table, and no item stands in two writes.

        Returns:
            ``result`` as a replay would return it.

        Raises:
            WriteRefused: A condition of yours failed, or a write is none; nothing was written.
            LeaseLost: Somebody took over, and nothing was written; let it pass.
            StoreUnavailable: It could not be confirmed; let it pass.
            PolicyError: The store commits no writes.
        """

    def transaction(self, using: Any = None) -> AbstractContextManager[BodyTransaction]:
        """A transaction on the SQL store's database, with the operation's record in it: exactly once.

        ::

            with self.attempt.transaction() as tx:
                tx.execute(insert(ledger).values(order=order_id, cents=cents))
                tx.send(receipt, order_id)
                return tx.done({"booked": cents})

        What is done in the block is committed together with the result given to ``tx.done()``, or not at all: an
        exception undoes it, and so does a claim that somebody took over meanwhile. Make it the body's last act.

        Args:
            using: A connection or ORM session of your own to the store's database, without a transaction begun on
                it; default: a connection of the store's. It should run at READ COMMITTED: at a stricter level the
                heartbeat's renewals make long transactions fail, to be retried.

        Raises:
            LeaseLost: At the end of the block: somebody took over, and nothing was committed; let it pass.
            StoreUnavailable: Nothing was committed, or it could not be confirmed; let it pass.
            PolicyError: The store has no transactions, or the block ends without ``tx.done()``.
        """

    def send(self, name: str, task: Any, *args: Any, **kwargs: Any) -> str:
        """Publish a follow-up task in a step of its own: never again once that is recorded.

        Until then it may be published again, with the same task id. A follow-up task that is idempotent, and whose
        key follows from its arguments, then has its effect once. To publish if and only if a transaction commits,
        use ``tx.send()``.

        Args:
            name: Name of the step.
            task: A task, or a signature such as ``receipt.s(order_id).set(queue="mail")``.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The task id, which is the same on every attempt.

        Raises as :meth:`step` does, and what publishing raises.
        """


@dataclass(frozen=True, slots=True)
class Unprotected:
    """The handle of a body that no claim protects: a direct call, ``mode="off"``, or an allowed outage.

    Args:
        identity: The identity of the call, resolved before the body could change its arguments.
        outer: The attempt in whose body this call happens, if there is one.
    """

    identity: Callable[[], Identity]
    outer: AttemptHandle | None

    @property
    def key(self) -> str:
        """The key that the call would have as a delivery; raises what that would."""
        return self.identity().key

    @property
    def fencing_token(self) -> int:
        """That of the surrounding attempt, else 0."""
        return self.outer.fencing_token if self.outer else 0

    @property
    def number(self) -> int:
        """That of the surrounding attempt, else 0."""
        return self.outer.number if self.outer else 0

    @property
    def is_takeover(self) -> bool:
        """That of the surrounding attempt, else False."""
        return self.outer.is_takeover if self.outer else False

    def effect_key(self, name: str) -> str:
        """As the attempt of a delivery of the same call would derive it."""
        return effect_key(self.key, name)

    def ensure_owned(self) -> None:
        """Ask the surrounding attempt, if there is one."""
        if self.outer:
            self.outer.ensure_owned()

    def before_effects(self) -> AbstractContextManager[None]:
        """Nothing to release."""
        return nullcontext()

    def step(
        self,
        name: str,
        call: Callable[[Step], T],
        *,
        on_takeover: OnTakeover | None = None,
        window: Duration | None = None,
    ) -> T:
        """Make ``call``, with the key that an attempt of a delivery would give it; nothing is recorded."""
        terms_of(name, on_takeover, window, {})
        return call(Step(name, self.effect_key(name), self.fencing_token))

    def fenced_step(
        self, name: str, *, fence: Callable[[Step], object], probe: Callable[[Step], T | None], act: Callable[[Step], T]
    ) -> T:
        """Fence, probe and act; nothing is recorded."""
        return self.step(name, fenced(fence, probe, act))

    def commit(self, result: T, writes: Sequence[Mapping[str, Any]]) -> T:
        """Refuse: without a claim there is no record to commit the writes with.

        Raises:
            PolicyError: Always.
        """
        raise _without_claim("commit")

    def transaction(self, using: Any = None) -> AbstractContextManager[BodyTransaction]:
        """Refuse, as :meth:`commit` does; raises PolicyError always."""
        raise _without_claim("transaction")

    def send(self, name: str, task: Any, *args: Any, **kwargs: Any) -> str:
        """Publish it, under the task id that an attempt of a delivery would give it; nothing is recorded."""
        return self.step(name, sending(task, args, kwargs))


def _without_claim(option: str) -> PolicyError:
    return PolicyError(
        option,
        "without a claim",
        "this body runs unprotected (a direct call, mode='off', or an outage under on_outage='run'); deliver the task, "
        "or write without it where attempt.number is 0",
    )


@dataclass(frozen=True, slots=True)
class Execution:
    """One body being executed, within ``outer`` if there is one.

    Args:
        handle: What the body sees.
        task: Name of its task.
        task_id: Of its delivery; None for a function call.
        layer: The class whose ``__call__`` is being executed.
        item_of: Task id of the ``map`` or ``starmap`` that it is an item of, if it is one.
        outer: The execution around it.
    """

    handle: AttemptHandle
    task: str
    task_id: str | None
    layer: type
    item_of: str | None
    outer: "Execution | None"

    def is_of(self, task: str, task_id: str | None) -> bool:
        """Whether this is the execution of that very delivery."""
        return self.task == task and self.task_id == task_id

    def is_around(self, task: str, task_id: str | None) -> bool:
        """Whether this or a surrounding execution is that very delivery: the call is then a recursion."""
        return self.is_of(task, task_id) or (self.outer is not None and self.outer.is_around(task, task_id))


_executing: ContextVar[Execution | None] = ContextVar("celery_idempotent_executing", default=None)


def execution() -> Execution | None:
    """The innermost execution of an idempotent task around the calling code, if there is one."""
    return _executing.get()


def current_attempt() -> AttemptHandle:
    """The attempt that executes the calling code, wherever in the call stack of a task's body it is.

    Raises:
        LookupError: No idempotent task is executing in this thread or greenlet.
    """
    innermost = execution()
    if innermost is None:
        raise LookupError("no idempotent task is executing here; call it from a task's body, in the body's own thread")
    return innermost.handle


def executed_by(
    handle: AttemptHandle, task: str, task_id: str | None, layer: type, item_of: str | None = None
) -> AbstractContextManager[Execution]:
    """Within the block, ``handle`` is the current attempt."""
    return _innermost(Execution(handle, task, task_id, layer, item_of, _executing.get()))


def passing(around: Execution, layer: type) -> AbstractContextManager[Execution]:
    """Within the block, the same execution has come to the ``__call__`` of ``layer``."""
    return _innermost(replace(around, layer=layer))


@contextmanager
def _innermost(execution: Execution) -> Iterator[Execution]:
    token = _executing.set(execution)
    try:
        yield execution
    finally:
        _executing.reset(token)
