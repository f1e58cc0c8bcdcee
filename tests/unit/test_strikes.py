"""Signals, limits and exits strike wherever the thread is: what has happened is recorded before they are raised.

Those that strike in a write of the store are rows of the core table.
"""

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent import Policy, current_attempt, idempotent
from celery_idempotent.engine.attempt import Execution, ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Delivery, Outcome
from celery_idempotent.integration.context import at_once
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.memory import MemoryStore
from tests.support.scene import Scene, SoftTimeLimit, raising

LIMIT = SoftTimeLimit()


def strike(patch: Any, owner: Any, name: str, *, at: str = "before", error: BaseException = LIMIT) -> None:
    """Let a signal strike once, at the beginning of a method's calls, or when one is done."""
    act, left = getattr(owner, name), [error]

    def struck(*args: Any) -> Any:
        if left and at == "before":
            raise left.pop()
        done = act(*args)
        if left:
            raise left.pop()
        return done

    patch.setattr(owner, name, struck)


def charge(scene: Scene, handle: ProtectedAttempt) -> Any:
    """A body of one step."""
    return handle.step("charge", scene.call)


@pytest.mark.parametrize("moment", ["finish", "COMPLETED"])
def test_limit_in_a_pause_between_two_tries_waits_for_the_write(scene: Scene, moment: str) -> None:
    """The store is away for a while, and the limit strikes while an effect waits to be recorded."""
    scene.plan(moment, "request lost", "request lost")

    def struck(seconds: float) -> None:
        scene.clock.on_sleep = lambda seconds: None
        raise LIMIT

    scene.clock.on_sleep = struck
    with pytest.raises(SoftTimeLimit):
        scene.perform(lambda handle: charge(scene, handle))
    assert scene.perform(lambda handle: charge(scene, handle)) == Outcome("receipt 1")


@pytest.mark.parametrize("error", [LIMIT, SystemExit()])
@pytest.mark.parametrize(
    ("owner", "name", "at", "body", "status"),
    [
        (Codec, "keep", "before", charge, Status.RELEASED),
        (Codec, "encode", "before", charge, Status.RELEASED),
        (Codec, "decode", "before", charge, Status.RELEASED),
        (Delivery, "_complete", "before", charge, Status.COMPLETED),
        (Delivery, "_complete", "after", charge, Status.COMPLETED),
        (Delivery, "_end", "before", raising(LookupError()), Status.RELEASED),
        (Delivery, "_end", "after", raising(LookupError()), Status.RELEASED),
    ],
)
def test_what_strikes_between_two_lines_costs_no_outcome(
    scene: Scene, owner: Any, name: str, at: str, body: Any, status: Status, error: BaseException, monkeypatch: Any
) -> None:
    """Where a call has returned, or a body has ended: the end is made again, counts once, and is no lost lease."""
    strike(monkeypatch, owner, name, at=at, error=error)
    assert scene.answer(lambda: scene.perform(lambda handle: body(scene, handle))) is type(error)
    assert (scene.status, "lease_lost" in scene.names) == (status, False)
    assert scene.perform(lambda handle: charge(scene, handle)) == Outcome("receipt 1")


def test_limit_in_the_encoding_of_a_result_is_not_taken_for_the_serialisers_error(scene: Scene) -> None:
    """kombu would say that it cannot be encoded: the outcome is kept, and the limit raised."""
    strikes: list[BaseException] = [LIMIT]
    result = type("Result", (), {"__json__": lambda self: raising(strikes.pop())() if strikes else "charged"})()
    answers = [scene.answer(lambda: scene.run(lambda claim: result)) for _ in range(2)]
    assert (answers, scene.runs) == ([SoftTimeLimit, "charged"], 1)


@pytest.mark.parametrize("mode", ["run", "observe"])
@pytest.mark.parametrize("struck", ["the receiver of an event", "behind the first beat"])
def test_exit_between_the_claim_and_the_body_leaves_no_heartbeat(
    scene: Scene, mode: str, struck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would renew a claim that nobody ends, for as long as the pool process lives."""
    if struck == "behind the first beat":
        strike(monkeypatch, scene.heartbeat, "start", at="after", error=SystemExit())
    else:
        strike(monkeypatch, scene, "tell", error=SystemExit())
    assert scene.answer(lambda: getattr(scene, mode)(lambda claim: "never")) is SystemExit
    assert (scene.runs, scene.heartbeat._beats) == (0, {})
    assert (scene.status is Status.RELEASED) is (struck == "the receiver of an event")


def test_limit_behind_the_last_write_of_an_observed_body_is_raised(scene: Scene, monkeypatch: Any) -> None:
    """Where nothing makes it wait any more."""
    uninterrupted, strikes, inner = Claim.uninterrupted, [LIMIT], list[object]()

    def struck(self: Claim, act: Callable[..., Any], *args: Any) -> Any:
        inner.append(act)
        done = uninterrupted(self, act, *args)
        inner.pop()
        if strikes and not inner:
            raise strikes.pop()
        return done

    monkeypatch.setattr(Claim, "uninterrupted", struck)
    with pytest.raises(SoftTimeLimit):
        scene.observe(lambda claim: "charged")
    assert (scene.status, scene.names[-1]) == (Status.COMPLETED, "completed")


@pytest.mark.parametrize("line", ["result_waits", "result_recorded"])
def test_limit_while_the_log_is_written_does_not_lose_the_result(scene: Scene, line: str, monkeypatch: Any) -> None:
    """The limit is raised once the outcome is recorded."""
    strikes = [LIMIT]

    def write(text: str, *_: object, **__: object) -> None:
        if line in text and strikes:
            raise strikes.pop()

    monkeypatch.setattr("celery_idempotent.engine.claim.logger.warning", write)
    scene.plan("COMPLETED", *["request lost"] * 4)
    with pytest.raises(SoftTimeLimit):
        scene.run(lambda claim: "charged")
    assert (scene.status, strikes) == (Status.COMPLETED, [])


def test_error_of_the_store_that_the_body_survives_does_not_come_back(scene: Scene) -> None:
    """It was raised where it happened, once."""
    scene.plan("finish", *["bug"] * 3)

    def body(handle: ProtectedAttempt) -> str:
        with pytest.raises(TypeError):
            handle.step("charge", scene.call)
        return "without it"

    assert scene.perform(body) == Outcome("without it")


def test_limit_in_the_exit_of_an_execution_leaves_the_next_call_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims, and is answered from then on; a recursion would run without a claim, each time."""
    runs = list[int]()

    @idempotent(Policy("order"), store=MemoryStore(), name="charge")
    def charge(order: str) -> str:
        runs.append(current_attempt().number)
        return "charged"

    strike(monkeypatch, Execution, "__exit__")
    with pytest.raises(SoftTimeLimit) as report:  # which keeps the traceback, and the frames in it
        charge("o-1")
    assert [charge("o-1"), charge("o-1"), runs] == ["charged", "charged", [1, 2]]
    assert report.value.__traceback__


def test_limit_while_an_identity_is_derived_is_raised_at_once() -> None:
    """Kept as what deriving raises, it would be taken for a call without a key: unobserved, or retried without one."""
    strikes = [LIMIT]

    def derive() -> Identity:
        if strikes:
            raise strikes.pop()
        return Identity("k", "f")

    with pytest.raises(SoftTimeLimit):
        at_once(derive)
    assert at_once(derive)() == Identity("k", "f")
