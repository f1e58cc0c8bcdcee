"""What a task's body sees of its attempt, and how code deep inside it finds it.

A context variable and not Celery's request: it is right in threads, in greenlets and in nested calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from celery_idempotent.attempt import effect_key

__all__ = ["AttemptHandle", "Execution", "Unprotected", "current_attempt", "executed_by", "execution"]


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


@dataclass(frozen=True, slots=True)
class Unprotected:
    """The handle of a body that no claim protects: a direct call, ``mode="off"``, or an allowed outage.

    Args:
        derive: Derives the key of the call, when somebody asks for it.
        outer: The attempt in whose body this call happens, if there is one.
    """

    derive: Callable[[], str]
    outer: AttemptHandle | None

    @property
    def key(self) -> str:
        """The key that the call would have as a delivery."""
        return self.derive()

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


@dataclass(frozen=True, slots=True)
class Execution:
    """One body being executed, within ``outer`` if there is one."""

    handle: AttemptHandle
    task: str
    task_id: str | None
    outer: "Execution | None"

    def is_delivery_of(self, task: str, task_id: str | None) -> bool:
        """Whether this or a surrounding execution is that very delivery: the call is then a recursion."""
        if self.task == task and self.task_id == task_id:
            return True
        return self.outer is not None and self.outer.is_delivery_of(task, task_id)


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


@contextmanager
def executed_by(handle: AttemptHandle, task: str, task_id: str | None) -> Iterator[None]:
    """Within the block, ``handle`` is the current attempt."""
    token = _executing.set(Execution(handle, task, task_id, _executing.get()))
    try:
        yield
    finally:
        _executing.reset(token)
