"""Which attempt executes the calling code, however deep inside a body it is.

A context variable and not Celery's request: it is right in threads, in greenlets and in nested calls.
"""

import os
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace

from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.troubleshooting import with_link


@dataclass(slots=True, eq=False)
class Execution:
    """One body being executed, within ``outer`` if there is one.

    ``delivery`` is an object that lasts as long as the delivery, or None for a function call. A redelivery has the same
    task id, and would pass for a recursion where a time limit has left an execution behind. ``layer`` is the class
    whose ``__call__`` is being executed; ``item_of`` lasts as long as the delivery of the ``map`` or ``starmap`` that
    it is an item of, if it is one.

    It can be found when it is over: where a context outlives the body that it was copied in, as a task of an event loop
    can; and where a signal struck before the block could be left. Its delivery is over then.
    """

    attempt: Attempt
    task: str
    delivery: object | None
    layer: type
    item_of: object | None
    outer: "Execution | None"
    is_left: bool = False
    process: int = field(default_factory=os.getpid)

    @property
    def is_over(self) -> bool:
        """Whether nothing runs within it any more."""
        return self.is_left or (isinstance(self.attempt, ProtectedAttempt) and not self.attempt.is_underway)

    def is_of(self, task: str, delivery: object | None) -> bool:
        return self.task == task and self.delivery is delivery

    def is_around(self, task: str, delivery: object | None) -> bool:
        """Whether this or a surrounding execution is that very delivery: the call is then a recursion."""
        return self.is_of(task, delivery) or (self.outer is not None and self.outer.is_around(task, delivery))

    def holds(self, key: str) -> bool:
        """Whether this or a surrounding body is running under a claim of that key: to ask for it would be to wait for
        itself. In a process that was forked in a body nothing tells when that one ends, so it holds nothing."""
        is_running = not self.is_over and self.process == os.getpid()
        holds = is_running and isinstance(self.attempt, ProtectedAttempt) and self.attempt.key == key
        return holds or (self.outer is not None and self.outer.holds(key))


_executing: ContextVar[Execution | None] = ContextVar("celery_idempotent_executing", default=None)


def execution() -> Execution | None:
    """The innermost execution of an idempotent task around the calling code, if there is one."""
    innermost = _executing.get()
    while innermost is not None and innermost.is_over:
        innermost = innermost.outer
    return innermost


def current_attempt() -> Attempt:
    """The attempt that executes the calling code, wherever in the call stack of a task's body it is.

    Raises:
        LookupError: Nothing idempotent is executing in this thread, greenlet or task of an event loop.
    """
    innermost = execution()
    if innermost is None:
        raise LookupError(
            with_link(
                "nothing idempotent is executing here; call it from the body of a task or function, in its own context",
                "errors#no-attempt",
            )
        )
    return innermost.attempt


def executed_by(
    attempt: Attempt, task: str, delivery: object | None, layer: type, item_of: object | None = None
) -> AbstractContextManager[Execution]:
    """Within the block, ``attempt`` is the current attempt."""
    return _Innermost(Execution(attempt, task, delivery, layer, item_of, execution()))


def passing(around: Execution, layer: type) -> AbstractContextManager[Execution]:
    """Within the block, the same execution has come to the ``__call__`` of ``layer``."""
    return _Innermost(replace(around, layer=layer))


class _Innermost(AbstractContextManager[Execution]):
    """A class, as every delivery pays for it; what ``contextmanager`` makes takes three times as long."""

    __slots__ = ("_execution", "_token")

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def __enter__(self) -> Execution:
        self._token: Token[Execution | None] = _executing.set(self._execution)
        return self._execution

    def __exit__(self, *_: object) -> None:
        self._execution.is_left = True
        try:  # noqa: SIM105 - as above
            _executing.reset(self._token)
        except ValueError:
            pass  # a coroutine that was dropped is closed in another context than its own
