"""Signals, limits and exits strike wherever the thread is: what has happened is recorded before they are raised."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from celery_idempotent import Policy, current_attempt, idempotent
from celery_idempotent.engine.attempt import Execution, ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Delivery, Outcome
from celery_idempotent.engine.events import Event
from celery_idempotent.errors import (
    SafeToRetry,
    StoreUnavailable,
)
from celery_idempotent.integration.context import at_once
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from tests.support.scene import Scene


class SoftTimeLimit(Exception):
    """Stands for billiard's, which a signal raises wherever the main thread is."""


@pytest.fixture
def scene() -> Scene:
    return Scene()


def strike(scene: Scene, status: Status, *, times: int = 1, error: type[BaseException] = SoftTimeLimit) -> None:
    """Let a signal strike in the next writes of a record in ``status``, before they are sent."""
    left = [times]

    def before(record: Record) -> None:
        if record.status is status and left[0]:
            left[0] -= 1
            raise error

    scene.store.before_swap = before


def strike_after(scene: Scene, status: Status) -> None:
    """Let a signal strike once when the write is stored and its reply is on the way."""
    swap, left = scene.store.swap, [1]

    def struck(new: Record, expected: str | None) -> Record | None:
        stored = swap(new, expected)
        if new.status is status and left[0]:
            left[0] -= 1
            raise SoftTimeLimit
        return stored

    scene.store.swap = struck  # type: ignore[method-assign]


@pytest.mark.parametrize("strikes", [strike, strike_after])
def test_body_that_returned_is_completed_before_the_limit_is_raised(
    scene: Scene, strikes: Callable[[Scene, Status], None]
) -> None:
    """The effect has happened: the limit fails this delivery, and the next one gets the outcome without a body."""
    strikes(scene, Status.COMPLETED)

    with pytest.raises(SoftTimeLimit):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED
    assert scene.names[-1] == "completed"
    assert scene.run(lambda attempt: "again") == Outcome("charged")
    assert scene.runs == 1


def test_process_exit_during_the_completion_completes_first(scene: Scene) -> None:
    """So does a cold shutdown, which raises SystemExit."""
    strike(scene, Status.COMPLETED, error=SystemExit)

    with pytest.raises(SystemExit):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED


def test_limit_that_follows_an_exit_does_not_take_its_place(scene: Scene) -> None:
    """The process is to end, whatever strikes after that."""
    strikes: list[BaseException] = [SoftTimeLimit(), SystemExit()]

    def before(record: Record) -> None:
        if record.status is Status.COMPLETED and strikes:
            raise strikes.pop()

    scene.store.before_swap = before

    with pytest.raises(SystemExit):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED


def test_limit_during_a_pause_between_tries_of_a_completion_waits_for_it(scene: Scene) -> None:
    """A store that is away for a while, and a limit that strikes while the completion waits for it."""
    scene.store.faults.extend(["none", "request lost", "request lost"])
    sleep, left = scene.clock.sleep, [1]

    def struck(seconds: float) -> None:
        if left[0]:
            left[0] -= 1
            raise SoftTimeLimit
        sleep(seconds)

    scene.clock.sleep = struck  # type: ignore[method-assign]

    with pytest.raises(SoftTimeLimit):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED


def test_store_with_a_bug_is_not_asked_for_ever(scene: Scene) -> None:
    """What comes again and again is no signal: it is raised, and nothing is reported as done."""
    strike(scene, Status.COMPLETED, times=1000, error=TypeError)

    with pytest.raises(TypeError):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.IN_PROGRESS


def test_limit_during_the_record_of_a_step_leaves_the_step_recorded(scene: Scene) -> None:
    """The step's effect has happened; the body is then interrupted, and the next attempt does not call again."""
    calls = []

    def call(step: Any) -> str:
        calls.append(step.key)
        return "charge-1"

    def strike_at_the_record(record: Record) -> None:
        if record.steps and len(calls) == 1 and not struck:
            struck.append(True)
            raise SoftTimeLimit

    struck: list[bool] = []
    scene.store.before_swap = strike_at_the_record

    with pytest.raises(SoftTimeLimit):
        scene.perform(lambda handle: handle.step("charge", call))
    assert scene.record.status is Status.RELEASED

    assert scene.perform(lambda handle: handle.step("charge", call)) == Outcome("charge-1")
    assert len(calls) == 1


def test_limit_during_a_pause_between_tries_of_a_steps_record_leaves_the_step_recorded(scene: Scene) -> None:
    """The store is away as the step's call returns, and the limit strikes while its record waits for it."""
    calls: list[str] = []

    def call(step: Any) -> str:
        calls.append(step.key)
        scene.store.faults.extend(["request lost", "request lost"])
        return "charge-1"

    def strike_once(seconds: float) -> None:
        scene.clock.on_sleep = lambda seconds: None
        raise SoftTimeLimit

    scene.clock.on_sleep = strike_once

    with pytest.raises(SoftTimeLimit):
        scene.perform(lambda handle: handle.step("charge", call))

    assert scene.perform(lambda handle: handle.step("charge", call)) == Outcome("charge-1")
    assert len(calls) == 1


def test_limit_during_the_record_of_a_failure_leaves_the_failure_recorded(scene: Scene) -> None:
    """A failure that is an outcome is one, whatever strikes while it is written."""
    strike(scene, Status.FAILED)

    def fail(attempt: Claim | None) -> None:
        raise LookupError("declined")

    with pytest.raises(SoftTimeLimit):
        scene.run(fail, remember=(LookupError,))

    assert scene.record.status is Status.FAILED


@pytest.mark.parametrize(("on_takeover", "status"), [("rerun", Status.RELEASED), ("refuse", Status.UNKNOWN)])
def test_limit_while_a_claim_is_given_back_or_up_does_not_leave_it_to_its_lease(
    scene: Scene, on_takeover: str, status: Status
) -> None:
    """The write is made again, once."""
    strike(scene, status)

    def end(attempt: Claim | None) -> None:
        raise SystemExit

    with pytest.raises((SoftTimeLimit, SystemExit)):
        scene.run(end, on_takeover=on_takeover)

    assert scene.record.status is status


@pytest.mark.parametrize("mode", ["run", "observe"])
def test_receiver_that_ends_the_process_leaves_no_claim_and_no_heartbeat(scene: Scene, mode: str) -> None:
    """A signal strikes wherever the thread is: also in a receiver that is told of the claim, before the body."""

    def exit_once_claimed(event: Event) -> None:
        if event.name == "claimed":
            raise SystemExit

    scene.tell = exit_once_claimed

    with pytest.raises(SystemExit):
        getattr(scene, mode)(lambda attempt: "never")

    assert (scene.runs, scene.record.status) == (0, Status.RELEASED)
    assert not scene.heartbeat._beats


@pytest.mark.parametrize("mode", ["run", "observe"])
def test_limit_between_the_first_beat_and_the_body_leaves_no_heartbeat(scene: Scene, mode: str) -> None:
    """It would renew a claim that nobody ends, for as long as the pool process lives."""
    start = scene.heartbeat.start

    def struck(claim: Claim) -> None:
        start(claim)
        raise SystemExit

    scene.heartbeat.start = struck  # type: ignore[method-assign]

    with pytest.raises(SystemExit):
        getattr(scene, mode)(lambda attempt: "never")

    assert scene.runs == 0
    assert not scene.heartbeat._beats


def test_limit_in_the_exit_of_an_execution_leaves_the_next_call_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims, and is answered from then on; a recursion would run without a claim, each time."""
    leave, strikes, runs = Execution.__exit__, [SoftTimeLimit()], list[int]()

    def struck(self: Execution, *error: object) -> None:
        if strikes:
            raise strikes.pop()
        leave(self, *error)

    @idempotent(Policy("order"), store=MemoryStore(), name="charge")
    def charge(order: str) -> str:
        runs.append(current_attempt().number)
        return "charged"

    monkeypatch.setattr(Execution, "__exit__", struck)
    with pytest.raises(SoftTimeLimit) as report:  # which keeps the traceback, and the frames in it
        charge("o-1")

    assert [charge("o-1"), charge("o-1")] == ["charged", "charged"]
    assert runs == [1, 2]
    assert report.value.__traceback__


def test_limit_while_an_identity_is_derived_is_raised_at_once() -> None:
    """Kept as what deriving raises, it would be taken for a call without a key: unobserved, or retried without one."""
    strikes = [SoftTimeLimit()]

    def derive() -> Identity:
        if strikes:
            raise strikes.pop()
        return Identity("k", "f")

    with pytest.raises(SoftTimeLimit):
        at_once(derive)
    assert at_once(derive)() == Identity("k", "f")


class Grudging:
    """A result in whose encoding a signal strikes once: a serialiser's author would say that it cannot be encoded."""

    def __init__(self) -> None:
        self.strikes = 1

    def __json__(self) -> str:
        if self.strikes:
            self.strikes = 0
            raise SoftTimeLimit
        return "charged"


def test_limit_during_the_encoding_of_a_result_costs_no_outcome(scene: Scene) -> None:
    """kombu takes it for an error of the serialiser; what cannot be encoded fails twice, so the limit is not lost."""
    with pytest.raises(SoftTimeLimit):
        scene.run(lambda attempt: Grudging())

    assert scene.record.status is Status.COMPLETED
    assert scene.run(lambda attempt: "again") == Outcome("charged")


def _fails(attempt: Claim | None) -> None:
    raise LookupError


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("method", "body", "status"),
    [("_complete", lambda attempt: "charged", Status.COMPLETED), ("_end", _fails, Status.RELEASED)],
)
def test_limit_between_two_lines_after_the_body_leaves_its_outcome(
    scene: Scene, moment: str, method: str, body: Any, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the end is sent, or when it is stored and noted: it is made again, and counts once."""
    complete, strikes = getattr(Delivery, method), [SoftTimeLimit()]

    def struck(*args: Any) -> Any:
        if strikes and moment == "before":
            raise strikes.pop()
        finished = complete(*args)
        if strikes:
            raise strikes.pop()
        return finished

    monkeypatch.setattr(Delivery, method, struck)

    with pytest.raises(SoftTimeLimit):
        scene.run(body)

    assert scene.record.status is status
    assert "lease_lost" not in scene.names


def test_exit_while_an_observed_body_is_recorded_is_an_exit(scene: Scene) -> None:
    """What observing must not change, too: a worker that is told to end ends."""
    strike(scene, Status.COMPLETED, error=SystemExit)

    with pytest.raises(SystemExit):
        scene.observe(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED


def test_limit_while_an_observed_call_is_claimed_is_raised(scene: Scene) -> None:
    """Told as an outage, it would be lost, and the body run without it."""
    strike(scene, Status.IN_PROGRESS)

    with pytest.raises(SoftTimeLimit):
        scene.observe(lambda attempt: "charged")

    assert (scene.runs, scene.names) == (0, [])


def test_limit_behind_the_last_write_of_an_observed_body_is_raised(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, where nothing makes it wait any more."""
    uninterrupted, strikes, inner = Claim.uninterrupted, [SoftTimeLimit()], list[object]()

    def struck(self: Claim, act: Callable[[], Any]) -> Any:
        inner.append(act)
        done = uninterrupted(self, act)
        inner.pop()
        if strikes and not inner:
            raise strikes.pop()
        return done

    monkeypatch.setattr(Claim, "uninterrupted", struck)

    with pytest.raises(SoftTimeLimit):
        scene.observe(lambda attempt: "charged")

    assert (scene.record.status, scene.names[-1]) == (Status.COMPLETED, "completed")


def test_outage_at_the_end_of_an_observed_body_is_told_and_not_raised(scene: Scene) -> None:
    """Also where the store answers again a moment later."""
    scene.store.faults.extend(["none", "request lost", "request lost"])

    assert scene.observe(lambda attempt: "charged") == "charged"
    assert scene.names == ["claimed", "store_unavailable"]


def test_error_of_the_store_that_the_body_survives_does_not_come_back(scene: Scene) -> None:
    """It was raised where it happened, once."""

    def body(handle: ProtectedAttempt) -> str:
        with pytest.raises(TypeError):
            handle.step("charge", lambda step: strike(scene, Status.IN_PROGRESS, times=3, error=TypeError))
        return "without it"

    assert scene.perform(body) == Outcome("without it")


def test_limit_while_a_step_is_forgotten_is_raised_after_it(scene: Scene) -> None:
    """The body is interrupted there, and does not go on to the next effect."""
    reached = []

    def body(handle: ProtectedAttempt) -> None:
        def call(step: Any) -> None:
            strike(scene, Status.IN_PROGRESS)
            raise SafeToRetry

        with suppress(SafeToRetry):
            handle.step("sms", call)
        reached.append("the next effect")

    with pytest.raises(SoftTimeLimit):
        scene.perform(body)

    assert reached == []
    assert scene.record.steps == {}


def test_exit_while_a_claim_that_nobody_could_renew_is_given_back_is_an_exit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outage of the heartbeat would only postpone the delivery, and the process would go on."""

    def refuse(attempt: Claim) -> None:
        raise StoreUnavailable("m", "heartbeat", "no thread")

    monkeypatch.setattr(scene.heartbeat, "start", refuse)
    strike(scene, Status.RELEASED, error=SystemExit)

    with pytest.raises(SystemExit):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.RELEASED
    assert scene.runs == 0


def test_exit_while_the_result_of_a_step_is_encoded_makes_the_step_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call has returned, so it is recorded before the process ends."""
    keep, exits, calls = Codec.keep, [SystemExit], []

    def struck(self: Codec, value: Any) -> Any:
        if exits:
            raise exits.pop()
        return keep(self, value)

    monkeypatch.setattr(Codec, "keep", struck)

    def call(step: Any) -> str:
        calls.append(step.key)
        return "charged"

    def body(handle: ProtectedAttempt) -> Any:
        return handle.step("charge", call)

    with pytest.raises(SystemExit):
        scene.perform(body)

    assert scene.perform(body) == Outcome("charged")
    assert len(calls) == 1
