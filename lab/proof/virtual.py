"""Virtual time: a thread is a greenlet that stands while it waits, and the clock is moved to whoever is next.

What Python has of threads, locks, clocks and chance is replaced beneath everybody's code, as gevent does it, so that
Celery, kombu and the library run as they are. Between two waits nobody else runs.
"""

import _thread
import heapq
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from time import perf_counter
from typing import Any
from unittest.mock import patch

from greenlet import getcurrent, greenlet

from celery_idempotent import clock

EPOCH = 1_800_000_000
"""The date when every world begins, in seconds."""


class Dead(BaseException):
    """Unwinds a thread whose process was killed; nothing that it asks for meanwhile happens."""


class World:
    """What happens when, in seconds; all chance comes from its seed."""

    def __init__(self, seed: object) -> None:
        self.now, self.random, self.hub = 0.0, random.Random(str(seed)), getcurrent()
        self._coming: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Have ``act``, which waits for nothing, called in so many seconds, a microsecond at least."""
        heapq.heappush(self._coming, (self.now + max(seconds, 1e-6), next(self._order), act))

    def run(self, until: float) -> None:
        while self._coming and self._coming[0][0] <= until:
            self.now, _, act = heapq.heappop(self._coming)
            act()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Within the block, threads, time and chance are those of this world."""
        nonces = random.Random(self.random.random())  # Who makes one more than before changes nothing else.
        doubles: dict[Any, dict[str, Any]] = {
            threading: {"Thread": Thread, "Lock": Lock, "_allocate_lock": Lock},
            _thread: {"start_new_thread": lambda target, args: Thread(target, args).start()},
            time: {"time": date, "monotonic": monotonic, "sleep": wait},
            clock: {"monotonic": monotonic},
            random: {"random": self.random.random},
            os: {"urandom": nonces.randbytes},
        }
        with ExitStack() as stack:
            for module, each in doubles.items():
                stack.enter_context(patch.multiple(module, **each))
            yield


@dataclass(eq=False)
class Machine:
    """Its date can be wrong, and its monotonic clock may stand still while it is suspended."""

    world: World
    counts_suspend: bool = True
    date_error: float = 0.0
    resumes_at: float = 0.0
    stood: float = 0.0
    hindrances: list[tuple[str, float, float]] = field(default_factory=list)

    def hinder(self, what: str, seconds: float) -> None:
        """Suspend it, if ``what`` says so, or have it not reach ``what``, for so long."""
        self.hindrances.append((what, self.world.now, self.world.now + seconds))
        if what == "suspended":
            self.stood += seconds * (not self.counts_suspend)
            self.resumes_at = self.world.now + seconds

    def hindered(self, server: str, begin: float, end: float = 0.0) -> float:
        """For how many seconds between these times, or at the first, nothing on it could reach ``server``."""
        end = end or begin + 1e-6
        spans = [(since, until) for what, since, until in self.hindrances if what in (server, "suspended")]
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)


@dataclass(eq=False)
class Process:
    """Threads that are killed together."""

    machine: Machine
    is_dead: bool = False
    threads: "dict[Thread, None]" = field(default_factory=dict)

    def kill(self) -> None:
        """End it at once, as SIGKILL does; not for a thread of its own."""
        self.is_dead = True
        for thread in [each for each in self.threads if each]:
            thread.throw(Dead())


class Thread(greenlet):
    """As ``threading.Thread``, of the same process as who makes it, unless it is given another."""

    def __init__(self, target: Callable[..., object], args: Any = (), process: Process | None = None, **_: Any) -> None:
        self.process = process or here()
        self.world = self.process.machine.world
        super().__init__(parent=self.world.hub)
        self._act = partial(target, *args)
        self.ident = self.waits = 0

    def start(self) -> None:
        self.ident = id(self)
        self.process.threads[self] = None
        self.world.after(0, partial(self.go_on, 0))

    def run(self, *_: object) -> None:
        with suppress(Dead):
            self._act()
        del self.process.threads[self]

    def go_on(self, number: int) -> None:
        """End its wait of that number, unless that is over, once its machine is not suspended."""
        suspended = self.process.machine.resumes_at - self.world.now
        if suspended > 0:
            self.world.after(suspended, partial(self.go_on, number))
        elif number == self.waits and not (self.dead or self.process.is_dead):
            self.switch()

    def is_alive(self) -> bool:
        return not self.dead

    def join(self, timeout: float) -> None:
        wait(timeout)  # who joins is in no hurry here


def here() -> Any:
    """The process of the running thread; None where that is not virtual."""
    return getattr(getcurrent(), "process", None)


def wait(seconds: float = inf) -> None:
    """Stand for so many seconds, unless it is woken before."""
    thread: Any = getcurrent()
    if thread.process.is_dead:
        raise Dead
    thread.waits += 1
    if seconds < inf:
        thread.world.after(seconds, partial(thread.go_on, thread.waits))
    thread.world.hub.switch()


class Lock:
    """As ``threading.Lock``, of which Python makes its conditions and events."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[tuple[Any, int]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        until = inf if timeout < 0 else monotonic() + max(timeout, 1e-6)
        while self._is_held:
            if not blocking or monotonic() >= until:
                return False
            thread: Any = getcurrent()
            self._waiting.append((thread, thread.waits + 1))
            wait(until - monotonic())
        self._is_held = True
        return True

    def release(self) -> None:
        woken, self._waiting, self._is_held = self._waiting, [], False
        for thread, number in woken:
            thread.world.after(0, partial(thread.go_on, number))

    def locked(self) -> bool:
        return self._is_held

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def monotonic() -> float:
    process = here()
    return process.machine.world.now - process.machine.stood if process else perf_counter()


def date() -> float:
    process = here()
    return EPOCH + (process.machine.world.now + process.machine.date_error if process else 0.0)
