"""Callers at once, as threads and as forked processes."""

import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

_CHILD_ANSWERS_WITHIN = 60
"""Seconds. A driver that crossed a fork does not fail, it hangs."""

_RACERS_COME_WITHIN = 60
"""Seconds. A thread can end before its first step, and says so to nobody who waits for it."""

_T = TypeVar("_T")


def race(calls: Sequence[Callable[[], _T]]) -> list[_T]:
    """What the calls return, each made by a thread of its own, all at once; raises what the first of them raised.

    Raises:
        BrokenBarrierError: One of the threads did not come within a minute; no call was made.
    """
    barrier = threading.Barrier(len(calls), timeout=_RACERS_COME_WITHIN)

    def run(call: Callable[[], _T]) -> _T:
        barrier.wait()
        return call()

    # Code that shares this process's memory is interrupted at its weak spot only if threads are switched often.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            try:
                return list(pool.map(run, calls))
            except BaseException:
                barrier.abort()  # or those that are there would wait for ever for one that cannot come
                raise
    finally:
        sys.setswitchinterval(interval)


def in_children(works: Sequence[Callable[[], _T]]) -> list[_T]:
    """What the works return, which must be picklable, each done by a forked child, all at once.

    A work that raises, or whose child hangs for a minute, fails the assertion.
    """
    gate, opener = os.pipe()
    children = [_fork(partial(_behind, gate, opener, work)) for work in works]
    os.close(gate)
    os.close(opener)
    answers = [_answer(*each) for each in children]  # all of them, so that no child is left behind
    for is_answer, answer in answers:
        assert is_answer, f"in a forked child: {answer}"
    return [answer for _, answer in answers]


def _behind(gate: int, opener: int, work: Callable[[], _T]) -> _T:
    os.close(opener)
    os.read(gate, 1)  # ends when nobody can write any more, so when all children are there
    return work()


def _fork(work: Callable[[], object]) -> tuple[int, int]:
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where threads run; Celery forks there
        pid = os.fork()
    if not pid:
        _be_child(work, sending)
    os.close(sending)
    return pid, receiving


def _be_child(work: Callable[[], object], sending: int) -> NoReturn:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_CHILD_ANSWERS_WITHIN)
        try:
            answer: tuple[bool, object] = (True, work())
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            answer = (False, repr(error))
        with os.fdopen(sending, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(0)


def _answer(pid: int, receiving: int) -> tuple[bool, Any]:
    with os.fdopen(receiving, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not content:
        return False, f"it hung or died (status {status}) with what it inherited"
    answer: tuple[bool, Any] = pickle.loads(content)  # noqa: S301 - our own child's
    return answer


def wait_until(holds: Callable[[], bool]) -> None:
    """Return as soon as ``holds()``; fail if that takes more than ten seconds."""
    give_up_at = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < give_up_at, "waited for ten seconds"
        time.sleep(0.01)
