"""What a fork must not tear apart or copy: the one place that stores rely on.

A socket that crosses a fork mixes up the replies of both processes, and a lock that another thread held is never
released in the child. So a client or an engine belongs to one process, and nothing is made while a process forks.
"""

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Generic, TypeVar

_T = TypeVar("_T")

making = threading.RLock()
"""Held while something is made that a fork would tear apart."""

_before: list[Callable[[], None]] = []

inherited: list[object] = []
"""What the process that forked this one uses. It is kept: to close it, or to let it be collected, would say goodbye to
a server in the parent's name, or wait for a lock that another thread of the parent held."""


def before_fork(leave: Callable[[], None]) -> Callable[[], None]:
    """Have ``leave`` called before every fork, while nothing is being made."""
    _before.append(leave)
    return leave


def _stop_making() -> None:
    making.acquire()
    for leave in _before:
        leave()


os.register_at_fork(before=_stop_making, after_in_parent=making.release, after_in_child=making.release)

_forks: list[None] = []
"""One for each fork between the first process and this one: the id of an ancestor that is gone may come again."""

os.register_at_fork(after_in_child=partial(_forks.append, None))


def _this_process() -> tuple[int, int]:
    return os.getpid(), len(_forks)


class PerProcess(Generic[_T]):
    """A value of which every process makes its own, when it first needs it; a child never touches its parent's.

    ``alone``: the threads that come at once wait until one of them has made it, and forks too. Not for a ``make`` that
    waits for a server; there each makes one, and all take the first.
    """

    def __init__(self, make: Callable[[], _T], *, alone: bool = True) -> None:
        self._make = make
        self._lock = making if alone else nullcontext()
        #: By process; with what a child inherits, for the sake of :data:`inherited`.
        self._values: dict[tuple[int, int], _T] = {}

    def __call__(self) -> _T:
        """This process's value."""
        value = self.made()
        if value is not None:
            return value
        with self._lock:
            value = self.made()
            return self._values.setdefault(_this_process(), self._make()) if value is None else value

    def made(self) -> _T | None:
        return self._values.get(_this_process())

    def forget(self) -> _T | None:
        """The same, for the caller to close; the next use makes another."""
        return self._values.pop(_this_process(), None)
