"""Code that blocks, around a call that does not: a delivery in a thread of its own, its body on the event loop.

Claims, renewals and outcomes are waited for by that thread, so the loop is never blocked. The body is awaited by the
very task that asked, in its own context, so cancellations and context variables are what they are without this.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from celery_idempotent.errors import SafeToRetry

T = TypeVar("T")
G = TypeVar("G")


class _NobodyWaits(SafeToRetry):
    """Whoever asked was cancelled before the call began."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """The thread has come to the call, which gets ``given``."""

    given: Any


@dataclass(frozen=True, slots=True)
class _Done:
    """The thread has ended, with a value or an error."""

    value: Any = None
    error: BaseException | None = None


class _Thread:
    """``act`` in a thread of its own, which leaves its one call to the loop."""

    def __init__(self, act: Callable[[Callable[[G], Any]], Any]) -> None:
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._returned: Future[Any] = Future()
        self.heard: asyncio.Future[_Turn | _Done] = self._loop.create_future()

    def start(self) -> None:
        """Begin. The interpreter waits for the thread: an effect that happened is recorded."""
        threading.Thread(target=copy_context().run, args=(self._run,), name="celery-idempotent").start()

    def returns(self, value: Any) -> "asyncio.Future[_Turn | _Done]":
        """Tell what the call returned; what is heard next is the end."""
        self.heard = self._loop.create_future()
        self._returned.set_result(value)
        return self.heard

    def raises(self, error: BaseException) -> "asyncio.Future[_Turn | _Done]":
        """Likewise what it raised."""
        self.heard = self._loop.create_future()
        self._returned.set_exception(error)
        return self.heard

    def _run(self) -> None:
        try:
            end = _Done(self._act(self._call))
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            end = _Done(error=error)
        self._tell(end)

    def _call(self, given: Any) -> Any:
        self._tell(_Turn(given))
        return self._returned.result()

    def _tell(self, what: _Turn | _Done) -> None:
        def hear() -> None:
            if not self.heard.done():
                self.heard.set_result(what)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(hear)


async def awaited(act: Callable[[Callable[[G], Any]], T], call: Callable[[G], Awaitable[Any]]) -> T:
    """``act(call)`` for an ``act`` that blocks, without blocking the event loop; it calls at most once.

    Cancelled before the call has begun, the call raises ``SafeToRetry`` in ``act``, as nothing has happened; cancelled
    in the call, ``act`` gets what the call made of that. Either way the end of ``act`` is waited for. Cancelled after
    the call, or once more, ``act`` goes on by itself.
    """
    thread = _Thread(act)
    thread.start()
    try:
        heard = await asyncio.shield(thread.heard)
    except GeneratorExit as error:
        thread.raises(error)  # this coroutine is being closed, and must not wait
        raise
    except asyncio.CancelledError:
        await asyncio.shield(thread.raises(_NobodyWaits("cancelled before it began")))
        raise
    if isinstance(heard, _Turn):
        heard = await _made(thread, call, heard.given)
    assert isinstance(heard, _Done)
    if heard.error is not None:
        raise heard.error
    value: T = heard.value
    return value


async def _made(thread: _Thread, call: Callable[[G], Awaitable[Any]], given: Any) -> _Turn | _Done:
    try:
        value = await call(given)
    except GeneratorExit as error:
        thread.raises(error)
        raise
    except BaseException as error:  # noqa: BLE001 - the thread raises it again, or what is to be raised instead
        ended = thread.raises(error)
    else:
        ended = thread.returns(value)
    return await asyncio.shield(ended)
