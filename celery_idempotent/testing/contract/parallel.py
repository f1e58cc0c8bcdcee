"""Callers at once, as threads and as forked processes; and what a compare-and-swap register can have told them.

A history is linearizable (Herlihy and Wing, 1990) if every call can be given one moment between its start
and its end such that the replies are those of a register to which the calls came one after the other, in
the order of these moments. Revisions are unique, so the search has hardly ever a choice; it is the search
of Wing and Gong (1993) with Lowe's memory of configurations seen (2017).
"""

import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call on one key, and the revision or verdict that came back; in nanoseconds of one clock."""

    kind: str
    new: str | None
    expected: str | None
    reply: str | bool | None
    started: int
    ended: int


def is_linearizable(calls: Sequence[Exchange]) -> bool:
    """Whether a register that was empty at first can have given these replies."""
    everything = (1 << len(calls)) - 1
    seen: set[tuple[int, str | None]] = set()
    configurations: list[tuple[int, str | None]] = [(0, None)]
    while configurations:
        done, stored = configurations.pop()
        if done == everything:
            return True
        if (done, stored) in seen:
            continue
        seen.add((done, stored))
        waiting = [index for index in range(len(calls)) if not done >> index & 1]
        first_end = min(calls[index].ended for index in waiting)
        for index in waiting:
            call = calls[index]
            changes = call.kind != "get" and stored == call.expected
            after = call.new if changes else stored
            if call.started <= first_end and call.reply == (changes if call.kind == "delete" else after):
                configurations.append((done | 1 << index, after))
    return False


def assert_linearizable(calls: Sequence[Exchange]) -> None:
    """Assert that :func:`is_linearizable`; a failure shows the calls in order of their starts, one a line."""
    origin = min((call.started for call in calls), default=0)
    asked = {"get": "get", "swap": "swap {0.expected} by {0.new}", "delete": "delete {0.expected}"}
    lines = [
        f"{(call.started - origin) / 1e6:9.3f} to {(call.ended - origin) / 1e6:9.3f} ms  "
        f"{asked[call.kind].format(call)} -> {call.reply}"
        for call in sorted(calls, key=lambda call: call.started)
    ]
    assert is_linearizable(calls), "\n".join(["no register behaves like this:", *lines])


_CHILD_ANSWERS_WITHIN = 60
"""Seconds. A driver that crossed a fork does not fail, it hangs."""

_RACERS_COME_WITHIN = 60
"""Seconds. A thread can end before its first step, and says so to nobody who waits for it."""

_T = TypeVar("_T")


def race(calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """What the calls return, each made by a thread of its own, all at once; raises what the first of them raised."""
    barrier = threading.Barrier(len(calls), timeout=_RACERS_COME_WITHIN)

    def run(call: Callable[[], _T]) -> _T:
        barrier.wait()
        return call()

    # Code that shares this process's memory is interrupted at its weak spot only if threads are switched often.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(len(calls)) as pool:
        try:
            return list(pool.map(run, calls))
        finally:
            barrier.abort()  # or those that are there would wait for ever for one that cannot come
            sys.setswitchinterval(interval)


def in_children(works: Sequence[Callable[[], _T]]) -> list[_T]:
    """What the works return, which must be picklable, each done by a forked child, all at once.

    A work that raises, or whose child hangs for a minute, fails the assertion.
    """
    forking = multiprocessing.get_context("fork")
    gate = forking.Barrier(len(works))

    def be_child(work: Callable[[], _T], sending: Connection) -> None:
        gate.wait(_RACERS_COME_WITHIN)
        try:
            sending.send((True, work()))
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            sending.send((False, repr(error)))
        finally:
            os._exit(0)  # what the parent does at its exit is the parent's

    pipes = [forking.Pipe(duplex=False) for _ in works]
    children = [forking.Process(target=be_child, args=(work, pipe[1])) for work, pipe in zip(works, pipes, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where threads run; Celery forks there
        for child in children:
            child.start()
    answers = [_answer(*each) for each in zip(children, pipes, strict=True)]  # all, so that no child is left behind
    for is_answer, answer in answers:
        assert is_answer, f"in a forked child: {answer}"
    return [answer for _, answer in answers]


def _answer(child: BaseProcess, pipe: tuple[Connection, Connection]) -> tuple[bool, Any]:
    receiving, sending = pipe
    sending.close()
    answer: tuple[bool, Any] = False, "it hung or died with what it inherited"
    with receiving, suppress(EOFError):
        if receiving.poll(_CHILD_ANSWERS_WITHIN):
            answer = receiving.recv()
    child.kill()
    child.join()
    return answer


def wait_until(holds: Callable[[], bool]) -> None:
    """Return as soon as ``holds()``; fail if that takes more than ten seconds."""
    give_up_at = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < give_up_at, "waited for ten seconds"
        time.sleep(0.01)
