"""Code that blocks around a call that is awaited: the loop goes on, and cancellations mean what they say."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from celery_idempotent import (
    AtMostOnce,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PolicyError,
    StoreUnavailable,
    current_attempt,
    idempotent,
)
from celery_idempotent.engine import loops
from celery_idempotent.engine.attempt import Attempt
from celery_idempotent.engine.loops import awaited
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished, Step
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore

TIMEOUT = 20


class Slow(FaultyStore):
    """Writes wait until they may go on; the loop hears of each one that waits."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.waiting = threading.Semaphore(0)
        self.may_write = threading.Event()
        self.before_swap = self._wait

    def _wait(self, record: Record) -> None:
        self.waiting.release()
        assert self.may_write.wait(TIMEOUT)

    async def until_one_waits(self) -> None:
        assert await asyncio.to_thread(self.waiting.acquire, timeout=TIMEOUT)

    @property
    def statuses(self) -> list[Status]:
        return [each.status for each in self.scan()]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, TIMEOUT))


def a_charge(store: Slow, body: Callable[[], Coroutine[Any, Any, Any]], **policy: Any) -> Any:
    @idempotent(Policy("order", **policy), store=store)
    async def charge(order: str) -> Any:
        return await body()

    return charge


def test_loop_goes_on_while_the_store_is_waited_for() -> None:
    """A claim, a step and a completion that hang block nobody else."""
    store = Slow()
    beats = 0

    async def body() -> str:
        return await current_attempt().astep("charge", lambda step: asyncio.sleep(0, "ch_1"))

    async def test() -> None:
        nonlocal beats
        charged = asyncio.create_task(a_charge(store, body)("o-1"))
        while not charged.done():
            await asyncio.sleep(0.001)
            beats += 1
            store.may_write.set() if beats > 5 else None
        assert await charged == "ch_1"

    run(test())
    assert beats > 5
    assert store.statuses == [Status.COMPLETED]


def test_body_runs_in_its_callers_task_and_context() -> None:
    """What it sets and who it is are what they are without this."""
    seen = contextvars.ContextVar("seen", default="nothing")
    store = Slow()
    store.may_write.set()
    tasks = []

    async def body() -> None:
        tasks.append(asyncio.current_task())
        seen.set("by the body")

    async def test() -> None:
        await a_charge(store, body)("o-1")
        assert tasks == [asyncio.current_task()]
        assert seen.get() == "by the body"

    run(test())


@pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
def test_call_that_is_cancelled_before_it_has_begun_gives_its_claim_back(on_takeover: str) -> None:
    """Nothing has happened, so nothing is in doubt, whatever the policy."""
    store = Slow()
    begun = []

    async def body() -> None:
        begun.append(1)

    async def test() -> None:
        charging = asyncio.create_task(a_charge(store, body, on_takeover=on_takeover)("o-1"))
        await store.until_one_waits()
        charging.cancel()
        store.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await charging
        assert store.statuses == [Status.RELEASED]

    run(test())
    assert not begun


def test_call_that_is_closed_before_it_has_begun_gives_its_claim_back() -> None:
    """A loop that stopped while the store was asked."""
    store = Slow()
    loop = asyncio.new_event_loop()

    async def body() -> None:
        raise AssertionError

    coroutine = a_charge(store, body)("o-1")
    task = loop.create_task(coroutine)
    loop.run_until_complete(store.until_one_waits())
    _drop(loop, task, coroutine)
    store.may_write.set()

    _join_threads()
    assert store.statuses == [Status.RELEASED]


@pytest.mark.parametrize(
    ("on_takeover", "status"), [("rerun", Status.RELEASED), ("refuse", Status.UNKNOWN)], ids=["rerun", "refuse"]
)
def test_call_that_is_cancelled_in_its_body_has_ended_when_its_caller_knows(on_takeover: str, status: Status) -> None:
    """Its claim is given back, or in doubt; the caller can ask again at once."""
    store = Slow()
    store.may_write.set()

    async def test() -> None:
        begun = asyncio.Event()

        async def body() -> None:
            begun.set()
            await asyncio.sleep(TIMEOUT)

        charging = asyncio.create_task(a_charge(store, body, on_takeover=on_takeover)("o-1"))
        await begun.wait()
        charging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await charging
        assert store.statuses == [status]

    run(test())


def test_call_that_is_cancelled_after_its_body_is_recorded_all_the_same() -> None:
    """The effect has happened; who asked has left, and the thread goes on by itself."""
    store = Slow()
    store.may_write.set()

    complaints: list[Any] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: complaints.append(about))

        async def body() -> str:
            store.may_write.clear()
            return "charged"

        charge = a_charge(store, body)
        charging = asyncio.create_task(charge("o-1"))
        await store.until_one_waits()  # the claim
        await store.until_one_waits()  # the completion
        assert not any(each.daemon for each in _threads())  # or the interpreter would not wait for them
        charging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await charging
        store.may_write.set()
        while store.statuses != [Status.COMPLETED]:
            await asyncio.sleep(0.001)
        assert await charge("o-1") == "charged"

    run(test())
    assert not complaints


def test_cancelled_step_is_in_doubt_only_if_it_had_begun() -> None:
    """A call that was never made had no effect, also where it may happen at most once."""
    store = Slow()
    store.may_write.set()
    made: list[str] = []

    async def send(step: Step) -> None:
        made.append(step.name)

    async def test() -> None:
        async def body() -> None:
            store.may_write.clear()
            await current_attempt().astep("text", send)

        charge = a_charge(store, body, effects={"text": AtMostOnce()})
        charging = asyncio.create_task(charge("o-1"))
        await store.until_one_waits()  # the claim
        await store.until_one_waits()  # the step's beginning
        charging.cancel()
        store.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await charging
        assert not made
        (record,) = store.scan()
        assert not record.steps

    run(test())


def test_step_that_had_begun_is_in_doubt() -> None:
    """The call was made and nobody knows of its end: a person resolves it."""
    store = Slow()
    store.may_write.set()

    async def test() -> None:
        begun = asyncio.Event()

        async def send(step: Step) -> None:
            begun.set()
            await asyncio.sleep(TIMEOUT)

        async def body() -> None:
            await current_attempt().astep("text", send)

        charge = a_charge(store, body, effects={"text": AtMostOnce()})
        charging = asyncio.create_task(charge("o-1"))
        await begun.wait()
        charging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await charging
        with pytest.raises(OutcomeUnknown):
            await charge("o-1")

    run(test())


def test_coroutine_that_is_dropped_ends_its_claim() -> None:
    """A loop that stopped in the midst leaves no thread waiting for ever."""
    store = Slow()
    store.may_write.set()
    loop = asyncio.new_event_loop()

    async def body() -> None:
        loop.stop()
        await asyncio.sleep(TIMEOUT)

    coroutine = a_charge(store, body)("o-1")
    task = loop.create_task(coroutine)
    loop.run_forever()
    _drop(loop, task, coroutine)

    _join_threads()
    assert store.statuses == [Status.RELEASED]


@pytest.mark.parametrize("limit", [RuntimeError("can't start new thread"), MemoryError()], ids=["threads", "memory"])
def test_call_that_no_thread_can_wait_for_runs_nothing_and_may_be_made_again(
    monkeypatch: pytest.MonkeyPatch, limit: Exception
) -> None:
    """A process at its limit tells it as the heartbeat does."""
    store = Slow()
    store.may_write.set()

    async def body() -> None:
        raise AssertionError

    def refuse(thread: threading.Thread) -> None:
        raise limit

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StoreUnavailable, match="no thread can be started"):
        asyncio.run(a_charge(store, body)("o-1"))
    assert store.statuses == []


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left by its thread"])
def test_loop_that_ends_before_the_body_ends_its_claim(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    """Its program keeps the coroutine, so nothing closes that; the interpreter must not wait for the body for ever."""
    monkeypatch.setattr(loops, "_LOOK_EVERY", 0.01)
    store = Slow()
    store.may_write.set()
    loop = asyncio.new_event_loop()

    async def body() -> None:
        loop.stop()
        await asyncio.sleep(TIMEOUT)

    coroutine = a_charge(store, body)("o-1")

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
    assert store.statuses == [Status.RELEASED]
    coroutine.close()
    loop.close()


def test_coroutine_of_an_unprotected_body_can_be_dropped() -> None:
    """It is closed in another context than it ran in, and says nothing of it."""
    loop = asyncio.new_event_loop()

    async def body() -> None:
        loop.stop()
        await asyncio.sleep(TIMEOUT)

    coroutine = a_charge(Slow(), body, mode="off")("o-1")
    task = loop.create_task(coroutine)
    loop.run_forever()

    _drop(loop, task, coroutine)


def _drop(loop: asyncio.AbstractEventLoop, task: Any, coroutine: Coroutine[Any, Any, Any]) -> None:
    coroutine.close()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    task._log_destroy_pending = False  # asyncio's own switch: it is left pending on purpose


def _join_threads() -> None:
    for each in _threads():
        each.join(TIMEOUT)


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "celery-idempotent"]


def test_errors_of_the_thread_and_of_the_call_are_the_callers() -> None:
    """Each as it was raised."""
    declined = ValueError("declined")

    async def fails(given: str) -> None:
        raise declined

    def is_no_coroutine_function(given: str) -> Any:
        raise declined

    def refuses(call: Callable[[str], Any]) -> str:
        raise LeaseLost("key", 1)

    async def test() -> None:
        with pytest.raises(ValueError, match="declined") as raised:
            await awaited(lambda call: call("given"), fails)
        assert raised.value is declined
        with pytest.raises(ValueError, match="declined"):
            await awaited(lambda call: call("given"), is_no_coroutine_function)
        with pytest.raises(LeaseLost):
            await awaited(refuses, fails)
        assert await awaited(lambda call: "without a call", fails) == "without a call"

    run(test())


def test_step_without_a_claim_is_awaited_too() -> None:
    """A body that runs unprotected makes it each time."""

    async def test() -> None:
        attempt = Attempt(lambda: Identity("key", None))
        assert await attempt.astep("charge", lambda step: asyncio.sleep(0, step.name)) == "charge"

    run(test())


@pytest.mark.parametrize(
    ("unfinished", "remedy"),
    [
        (lambda _: asyncio.sleep(0), r"unfinished coroutine, so it has not run; write await attempt\.astep"),
        (lambda _: (each for each in [1]), "unfinished generator, so it has not run; return a list"),
    ],
)
@pytest.mark.parametrize("effects", [{}, {"charge": AtMostOnce()}])
def test_step_whose_call_has_still_to_run_is_not_recorded_as_done(
    unfinished: Callable[[Step], Any], remedy: str, effects: dict[str, Any]
) -> None:
    """``await attempt.step(...)`` would record the step first and make its call then, or never."""
    store = Slow()
    store.may_write.set()

    async def body() -> Any:
        return await current_attempt().step("charge", unfinished)

    with pytest.raises(PolicyError, match=remedy):
        asyncio.run(a_charge(store, body, effects=effects)("o-1"))
    assert not any(isinstance(each, Finished) for record in store.scan() for each in record.steps.values())
    with pytest.raises(PolicyError, match=remedy):
        Attempt(lambda: Identity("key", None)).step("charge", unfinished)


@pytest.mark.parametrize("role", ["fence", "probe", "act"])
def test_fenced_step_runs_each_of_its_calls_or_none_counts(role: str) -> None:
    """A fence that was never awaited shuts nobody out."""
    calls: dict[str, Callable[[Step], Any]] = dict.fromkeys(("fence", "probe", "act"), lambda _: None)
    attempt = Attempt(lambda: Identity("key", None))

    with pytest.raises(PolicyError, match="unfinished coroutine"):
        attempt.fenced_step("index", **{**calls, role: lambda _: asyncio.sleep(0)})


@pytest.mark.parametrize("call", [None, lambda: asyncio.sleep(0)], ids=["no function", "without the step"])
def test_step_that_cannot_be_called_is_refused_before_it_begins(call: Any) -> None:
    """As :meth:`Attempt.step` does: nothing has happened, also where it may happen at most once."""
    store = Slow()
    store.may_write.set()

    async def body() -> None:
        await current_attempt().astep("text", call)

    async def test() -> None:
        with pytest.raises(PolicyError, match="text"):
            await a_charge(store, body, effects={"text": AtMostOnce()})("o-1")
        assert store.statuses == [Status.RELEASED]
        (record,) = store.scan()
        assert not record.steps

    run(test())


@pytest.mark.parametrize("said", [AssertionError, RuntimeError])
def test_foreign_thread_that_is_said_to_be_gone_is_gone(said: type[Exception]) -> None:
    """Of such threads Python says it by an error: an AssertionError, and from 3.13 on a RuntimeError."""

    class Dummy(threading.Thread):
        def is_alive(self) -> bool:
            raise said

    assert not loops._is_alive(Dummy())
