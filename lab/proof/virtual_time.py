"""Virtual time: a thread is a greenlet that stands while it waits, and the clock is moved to whoever is next.

What Python has of threads, locks, clocks and chance is replaced beneath everybody's code, as gevent does it, so that
Celery, kombu and the library run as they are. Between two waits nobody else runs.
"""

import _thread
import heapq
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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

EPOCH = 1_800_000_000  # the date when every world begins, in seconds


class Dead(BaseException):
    """Unwinds a thread whose process was killed; nothing that it asks for meanwhile happens."""


class World:
    """What happens when, in seconds; all chance comes from its seed."""

    def __init__(self, seed: object) -> None:
        self.now, self.draw, self.hub = 0.0, random.Random(str(seed)), getcurrent()
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
    def replacing(self, others: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
        """Within the block, threads, time and chance are those of this world, and so are ``others``, by attribute."""
        nonces = random.Random(self.draw.random())  # Who makes one more than before changes nothing else.
        doubles: Mapping[Any, Mapping[str, Any]] = {
            **others,
            threading: {"Thread": Thread, "Lock": Lock, "_allocate_lock": Lock},
            _thread: {"start_new_thread": lambda target, args: Thread(target, args).start()},
            time: {"time": date, "monotonic": monotonic, "sleep": wait},
            clock: {"monotonic": monotonic},
            random: {"random": self.draw.random},
            os: {"urandom": nonces.randbytes},
        }
        with ExitStack() as stack:
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable()
            for whole, each in doubles.items():
                stack.enter_context(patch.multiple(whole, **each))
            yield


@dataclass(eq=False)
class Machine:
    """Its date may be wrong, and its monotonic clock stand while it is suspended; hindrances are from when to when."""

    world: World
    counts_suspend: bool = True
    resumes_at: float = 0.0
    stood: float = 0.0
    date_error: float = 0.0
    hindrances: list[tuple[str, float, float]] = field(default_factory=list)

    def hinder(self, what: str, seconds: float) -> None:
        """Set its date, suspend it, or have it not reach ``what``, for so long."""
        if what == "date":
            self.date_error += self.world.draw.uniform(-3600, 3600)
            return
        self.hindrances.append((what, self.world.now, self.world.now + seconds))
        if what == "suspended":
            self.stood += seconds * (not self.counts_suspend)
            self.resumes_at = self.world.now + seconds

    def hindered(self, server: str, begin: float, end: float) -> float:
        """For how many seconds between these times nothing on it could reach ``server``."""
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
        super().__init__(partial(self._run, partial(target, *args)), self.world.hub)
        self.ident, self.waits = id(self), 0

    def start(self) -> None:
        self.process.threads[self] = None
        self.wake(0)

    def _run(self, act: Callable[[], object]) -> None:
        with suppress(Dead):
            act()
        del self.process.threads[self]

    def wake(self, seconds: float) -> None:
        """End its present wait in so many seconds, unless that is over, and its machine is suspended no more."""
        self.world.after(seconds, partial(self._go_on, self.waits))

    def _go_on(self, number: int) -> None:
        suspended = self.process.machine.resumes_at - self.world.now
        if suspended > 0:
            self.world.after(suspended, partial(self._go_on, number))
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
    thread.wake(seconds)
    thread.world.hub.switch()


def monotonic() -> float:
    process = here()
    return process.machine.world.now - process.machine.stood if process else perf_counter()


class Lock:
    """As ``threading.Lock``, of which Python makes its conditions and events."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[Any] = []

    def acquire(self, blocking: bool = True, timeout: float = inf) -> bool:
        until = monotonic() + (timeout if timeout >= 0 else inf)
        while self._is_held and blocking and monotonic() < until:
            self._waiting.append(getcurrent())
            wait(until - monotonic())
            self._waiting.remove(getcurrent())
        is_free, self._is_held = not self._is_held, True
        return is_free

    def release(self) -> None:
        self._is_held = False
        for thread in self._waiting:
            thread.wake(0)

    def locked(self) -> bool:
        return self._is_held

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def date() -> float:
    process = here()
    return EPOCH + (process.machine.world.now + process.machine.date_error if process else 0.0)
