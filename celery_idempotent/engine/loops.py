"""Code that blocks, around a call that does not: a delivery in a thread of its own, its body on the event loop.

Claims, renewals and outcomes are waited for by that thread, so the loop is never blocked. The body is awaited by the
very task that asked, in its own context, so cancellations and context variables are what they are without this.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from celery_idempotent.engine.heartbeat import NO_THREAD
from celery_idempotent.errors import SafeToRetry, StoreUnavailable

T = TypeVar("T")
G = TypeVar("G")

_LOOK_EVERY = 1.0
"""Seconds between two looks whether the loop of a call is still there: one that ends tells nobody."""


class _NobodyWaits(SafeToRetry):
    """Whoever asked was cancelled before the call began."""


class _Thread:
    """``act`` in a thread of its own, which leaves its one call to the loop."""

    def __init__(self, act: Callable[[Callable[[G], Any]], Any]) -> None:
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._home = threading.current_thread()
        self._is_called = False
        #: Held while somebody awaits the call. Written in C, so no signal strikes while it is let go.
        self.awaited = threading.Lock()
        #: What the call returned or raised, for the thread.
        self.returned: Future[Any] = Future()
        #: What the call is given, once the thread has come to it; None where it ended without.
        self.given: asyncio.Future[tuple[Any] | None] = self._loop.create_future()
        #: What the thread ended with, a value or an error.
        self.end: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()

    def start(self) -> None:
        """Begin, or raise ``StoreUnavailable``. The interpreter waits for the thread: what happened is recorded."""
        thread = threading.Thread(target=copy_context().run, args=(self._run,), name="celery-idempotent")
        try:
            thread.start()
        except NO_THREAD as error:
            why = (
                f"no thread can be started to wait for the store: {error!r}; give the process more "
                "threads (ulimit -u, pids.max) or memory, or let fewer calls in at a time"
            )
            raise StoreUnavailable("celery-idempotent", "waiting", why) from error

    def _run(self) -> None:
        value, raised = None, None
        try:
            value = self._act(self._call)
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            raised = error
        if not self._is_called:
            self._tell(self.given, None)
        self._tell(self.end, (value, raised))

    def _call(self, given: Any) -> Any:
        self._is_called = True
        self._tell(self.given, (given,))
        while not self.returned.done():
            if self._is_abandoned() and not self.returned.done():
                raise asyncio.CancelledError("nobody awaits it any more")
            wait([self.returned], _LOOK_EVERY)
        return self.returned.result()

    def _is_abandoned(self) -> bool:
        """Whether the call will never go on: whoever waited for it would keep the interpreter from ending."""
        is_gone = self._loop.is_closed() or not (self._loop.is_running() or _is_alive(self._home))
        return is_gone or not self.awaited.locked()

    def _tell(self, future: "asyncio.Future[Any]", what: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            # No function of ours: the loop takes what a signal raises in one for its own error, and goes on.
            self._loop.call_soon_threadsafe(future.set_result, what)


def _is_alive(thread: threading.Thread) -> bool:
    """False only if it is certain. A greenlet or a thread of foreign code may be said to live when it is gone."""
    try:
        return thread.is_alive()
    except (AssertionError, RuntimeError):
        return False  # how Python says it of a foreign thread


async def awaited(act: Callable[[Callable[[G], Any]], T], call: Callable[[G], Awaitable[Any]]) -> T:
    """``act(call)`` for an ``act`` that blocks, without blocking the event loop; it calls at most once.

    Cancelled before the call has begun, the call raises ``SafeToRetry`` in ``act``, as nothing has happened; cancelled
    in the call, ``act`` gets what the call made of that. Either way the end of ``act`` is waited for. Cancelled after
    the call, or once more, ``act`` goes on by itself. Where the loop ends in the call, ``act`` gets ``CancelledError``.
    """
    thread = _Thread(act)
    with thread.awaited:
        thread.start()
        try:
            given = await asyncio.shield(thread.given)
        except BaseException as error:
            thread.returned.set_exception(_NobodyWaits("cancelled before it began"))
            if not isinstance(error, GeneratorExit):  # a coroutine that is being closed must not wait
                await asyncio.shield(thread.end)
            raise
        if given is not None:
            try:
                returned = await call(*given)
            except BaseException as error:  # the thread raises it again, or what is to be raised instead
                thread.returned.set_exception(error)
                if isinstance(error, GeneratorExit):
                    raise
            else:
                thread.returned.set_result(returned)
        value, raised = await asyncio.shield(thread.end)
    if raised is not None:
        raise raised
    result: T = value
    return result
