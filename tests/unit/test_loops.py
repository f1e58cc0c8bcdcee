"""Code that blocks around a call that is awaited: the loop goes on, and cancellations mean what they say."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from celery_idempotent import AtMostOnce, Policy, current_attempt, idempotent
from celery_idempotent.engine import loops
from celery_idempotent.engine.attempt import Attempt
from celery_idempotent.engine.loops import awaited
from celery_idempotent.errors import LeaseLost, OutcomeUnknown, PolicyError, StoreUnavailable
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished, Step
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.scene import raising

TIMEOUT = 20
ONCE = {"text": AtMostOnce()}


class Slow(FaultyStore):
    """Writes wait until they may go on; the loop hears of each one that waits."""

    def __init__(self, *, may_write: bool = True) -> None:
        super().__init__(MemoryStore())
        self.waiting = threading.Semaphore(0)
        self.may_write = threading.Event()
        if may_write:
            self.may_write.set()
        self.before_swap = self._wait

    def _wait(self, record: Record) -> None:
        self.waiting.release()
        assert self.may_write.wait(TIMEOUT)

    async def until_waiting(self, writes: int = 1) -> None:
        """Until so many writes have begun."""
        for _ in range(writes):
            assert await asyncio.to_thread(self.waiting.acquire, timeout=TIMEOUT)

    @property
    def told(self) -> list[tuple[Status, int]]:
        """Status and number of steps of each record."""
        return [(each.status, len(each.steps)) for each in self.scan()]

    def function(self, body: Callable[[], Coroutine[Any, Any, Any]], **policy: Any) -> Any:
        """What an author would write."""

        @idempotent(Policy("order", **policy), store=self)
        async def charge(order: str) -> Any:
            return await body()

        return charge


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT))


async def _never() -> None:
    raise AssertionError


def _join_threads() -> None:
    for each in threading.enumerate():
        if each.name == "celery-idempotent":
            each.join(TIMEOUT)


def test_loop_goes_on_while_the_store_is_waited_for() -> None:
    """A claim, a step and a completion that hang block nobody else."""
    store, beats = Slow(may_write=False), 0

    async def body() -> str:
        return await current_attempt().astep("charge", lambda step: asyncio.sleep(0, "ch_1"))

    async def test() -> None:
        nonlocal beats
        charged = asyncio.create_task(store.function(body)("o-1"))
        while not charged.done():
            await asyncio.sleep(0.001)
            beats += 1
            store.may_write.set() if beats > 5 else None
        assert await charged == "ch_1"

    run(test())
    assert beats > 5
    assert store.told == [(Status.COMPLETED, 0)]


@pytest.mark.parametrize(
    ("has_begun", "on_takeover", "status"),
    [(False, "refuse", Status.RELEASED), (True, "rerun", Status.RELEASED), (True, "refuse", Status.UNKNOWN)],
)
def test_cancelled_call_has_ended_when_its_caller_knows(has_begun: bool, on_takeover: str, status: Status) -> None:
    """Its claim is given back, or in doubt if its body has begun; the caller can ask again at once."""
    store = Slow(may_write=has_begun)

    async def test() -> None:
        begun = asyncio.Event()

        async def body() -> None:
            begun.set()
            await asyncio.sleep(TIMEOUT)

        charging = asyncio.create_task(store.function(body, on_takeover=on_takeover)("o-1"))
        await (begun.wait() if has_begun else store.until_waiting())
        charging.cancel()
        store.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await charging
        assert store.told == [(status, 0)]

    run(test())


def test_call_that_is_cancelled_after_its_body_is_recorded_all_the_same() -> None:
    """The effect has happened; who asked has left, and the thread goes on by itself."""
    store, complaints = Slow(), list[Any]()

    async def body() -> str:
        store.may_write.clear()
        return "charged"

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: complaints.append(about))
        charge = store.function(body)
        charging = asyncio.create_task(charge("o-1"))
        await store.until_waiting(2)  # the claim and the completion
        threads = [each for each in threading.enumerate() if each.name == "celery-idempotent"]
        assert [each.daemon for each in threads] == [False]  # or the interpreter would not wait for it
        charging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await charging
        store.may_write.set()
        while store.told != [(Status.COMPLETED, 0)]:
            await asyncio.sleep(0.001)
        assert await charge("o-1") == "charged"

    run(test())
    assert not complaints


def test_cancelled_step_is_in_doubt_only_if_it_had_begun() -> None:
    """A call that was never made had no effect, also where it may happen at most once; else a person resolves it."""
    store, made = Slow(), list[str]()

    async def send(step: Step) -> None:
        made.append(step.name)
        await asyncio.sleep(TIMEOUT)

    async def begin(*, is_slow: bool) -> None:
        if is_slow:
            store.may_write.clear()
        await current_attempt().astep("text", send)

    async def test() -> None:
        for is_slow, told in ((True, [(Status.RELEASED, 0)]), (False, [(Status.RELEASED, 1)])):
            charge = store.function(lambda: begin(is_slow=is_slow), effects=ONCE)  # noqa: B023
            charging = asyncio.create_task(charge("o-1"))
            await store.until_waiting(2)  # the claim and the step's beginning
            while not (is_slow or made):
                await asyncio.sleep(0.001)
            charging.cancel()
            store.may_write.set()
            with pytest.raises(asyncio.CancelledError):
                await charging
            assert (store.told, made) == (told, [] if is_slow else ["text"])
            while store.waiting.acquire(blocking=False):
                pass
        with pytest.raises(OutcomeUnknown):
            await charge("o-1")

    run(test())


def _stopping(loop: asyncio.AbstractEventLoop) -> Callable[[], Coroutine[Any, Any, None]]:
    async def body() -> None:
        loop.stop()
        await asyncio.sleep(TIMEOUT)

    return body


@pytest.mark.parametrize(
    ("mode", "has_begun", "told"),
    [("enforce", False, [(Status.RELEASED, 0)]), ("enforce", True, [(Status.RELEASED, 0)]), ("off", True, [])],
)
def test_coroutine_that_is_dropped_ends_its_claim(mode: str, has_begun: bool, told: Any) -> None:
    """A loop that stopped, in the body or while the store was asked, leaves no thread waiting for ever."""
    store, loop = Slow(may_write=has_begun), asyncio.new_event_loop()
    coroutine = store.function(_stopping(loop), mode=mode)("o-1")
    task: Any = loop.create_task(coroutine)
    loop.run_forever() if has_begun else loop.run_until_complete(store.until_waiting())
    coroutine.close()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    task._log_destroy_pending = False  # asyncio's own switch: it is left pending on purpose
    store.may_write.set()
    _join_threads()
    assert store.told == told


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left by its thread"])
def test_loop_that_ends_before_the_body_ends_its_claim(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    """Its program keeps the coroutine, so nothing closes that; the interpreter must not wait for the body for ever."""
    monkeypatch.setattr(loops, "_LOOK_EVERY", 0.01)
    store, loop = Slow(), asyncio.new_event_loop()
    coroutine = store.function(_stopping(loop))("o-1")

    def leave() -> None:
        task: Any = loop.create_task(coroutine)
        loop.run_forever()
        task._log_destroy_pending = False  # asyncio's own switch: it is left pending on purpose
        if is_closed:
            loop.close()

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(TIMEOUT)

    _join_threads()
    assert store.told == [(Status.RELEASED, 0)]
    coroutine.close()
    loop.close()


@pytest.mark.parametrize("limit", [RuntimeError("can't start new thread"), MemoryError()], ids=["threads", "memory"])
def test_call_that_no_thread_can_wait_for_runs_nothing_and_may_be_made_again(
    monkeypatch: pytest.MonkeyPatch, limit: Exception
) -> None:
    """A process at its limit tells it as the heartbeat does."""
    store = Slow()
    monkeypatch.setattr(threading.Thread, "start", raising(limit))
    with pytest.raises(StoreUnavailable, match="thread"):
        asyncio.run(store.function(_never)("o-1"))
    assert store.told == []


def test_errors_of_the_thread_and_of_the_call_are_the_callers() -> None:
    """Each as it was raised."""
    declined = ValueError("declined")

    async def fails(given: str) -> None:
        raise declined

    async def test() -> None:
        for call in (fails, raising(declined)):
            with pytest.raises(ValueError, match="declined") as raised:
                await awaited(lambda call: call("given"), call)
            assert raised.value is declined
        with pytest.raises(LeaseLost):
            await awaited(raising(LeaseLost("key", 1)), fails)
        assert await awaited(lambda call: "without a call", fails) == "without a call"

    run(test())


@pytest.mark.parametrize("said", [AssertionError, RuntimeError])
def test_foreign_thread_that_is_said_to_be_gone_is_gone(said: type[Exception]) -> None:
    """Of such threads Python says it by an error: an AssertionError, and from 3.13 on a RuntimeError."""

    class Dummy(threading.Thread):
        def is_alive(self) -> bool:
            raise said

    assert not loops._is_alive(Dummy())


UNPROTECTED = Attempt(lambda: Identity("key", None))


@pytest.mark.parametrize(
    ("unfinished", "remedy"), [(lambda _: asyncio.sleep(0), "astep"), (lambda _: (each for each in [1]), "a list")]
)
@pytest.mark.parametrize("effects", [{}, {"charge": AtMostOnce()}])
def test_step_whose_call_has_still_to_run_is_not_recorded_as_done(
    unfinished: Any, remedy: str, effects: dict[str, Any]
) -> None:
    """``await attempt.step(...)`` would record the step first and make its call then, or never."""
    store = Slow()

    async def body() -> Any:
        return await current_attempt().step("charge", unfinished)

    with pytest.raises(PolicyError, match=f"unfinished.*{remedy}"):
        asyncio.run(store.function(body, effects=effects)("o-1"))
    with pytest.raises(PolicyError, match=f"unfinished.*{remedy}"):
        UNPROTECTED.step("charge", unfinished)
    assert not any(isinstance(each, Finished) for record in store.scan() for each in record.steps.values())


@pytest.mark.parametrize("role", ["fence", "probe", "act"])
def test_fenced_step_runs_each_of_its_calls_or_none_counts(role: str) -> None:
    """A fence that was never awaited shuts nobody out."""
    calls: dict[str, Any] = dict.fromkeys(("fence", "probe", "act"), lambda _: None)
    with pytest.raises(PolicyError, match="unfinished"):
        UNPROTECTED.fenced_step("index", **{**calls, role: lambda _: asyncio.sleep(0)})


@pytest.mark.parametrize("call", [None, lambda: asyncio.sleep(0)], ids=["no function", "without the step"])
def test_step_that_cannot_be_called_is_refused_before_it_begins(call: Any) -> None:
    """As :meth:`Attempt.step` does: nothing has happened, also where it may happen at most once."""
    store = Slow()
    with pytest.raises(PolicyError, match="text"):
        asyncio.run(store.function(lambda: current_attempt().astep("text", call), effects=ONCE)("o-1"))
    assert store.told == [(Status.RELEASED, 0)]
