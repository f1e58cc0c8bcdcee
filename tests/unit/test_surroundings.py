"""What a guard meets besides its store: signals in a write, clocks that stand, heartbeats that cannot start, poison."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict, Delivery, Event, Outcome
from celery_idempotent.errors import (
    LeaseLost,
    OutcomeUnknown,
    PolicyError,
    SafeToRetry,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import Record, Status, bounded
from celery_idempotent.protocol.store import RecordTooLarge
from tests.support.scene import Again, Scene, an_operation


class SoftTimeLimit(Exception):
    """Stands for billiard's, which a signal raises wherever the main thread is."""


class Killed(BaseException):
    """Stands for a death that nobody outlives."""


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


def test_record_that_vanished_costs_no_second_body(scene: Scene) -> None:
    """A fail-over or a FLUSHALL within the body: the delivery did everything right, so its outcome counts."""

    def body(attempt: Claim | None) -> str:
        scene.store.delete("k", scene.record.revision)
        return "charged"

    assert scene.run(body) == Outcome("charged")
    assert scene.run(lambda attempt: "again") == Outcome("charged")
    assert scene.runs == 1


def test_steps_of_a_record_that_vanished_are_kept(scene: Scene) -> None:
    """What the attempt knows of its steps is written again with the record."""

    def body(handle: ProtectedAttempt) -> str:
        handle.step("charge", lambda step: "c-1")
        scene.store.delete("k", scene.record.revision)
        handle.step("ship", lambda step: "s-1")
        raise Again

    with pytest.raises(Again):
        scene.perform(body)

    assert set(scene.record.steps) == {"charge", "ship"}


def test_claim_born_expired_is_renewed_before_the_body(scene: Scene) -> None:
    """A clock that had fallen behind wrote the claim; the reply showed it, and nobody may take over from a new body."""
    slow_by = 3_600_000
    scene.clock.advance(slow_by)
    now, behind = scene.store.now, [True]
    scene.store.now = lambda: now() - (slow_by if behind[0] else 0)  # type: ignore[method-assign]
    scene.store.before_swap = lambda record: behind.__setitem__(0, False)  # the reply tells the time

    def body(attempt: Claim | None) -> int:
        return scene.record.lease_until - now()

    assert scene.run(body).value == 60_000


@pytest.mark.parametrize(("behind", "left"), [(0, 60_000), (29_000, 31_000), (31_000, 60_000)])
def test_claim_whose_lease_is_half_over_is_renewed_before_the_body(scene: Scene, behind: int, left: int) -> None:
    """The heartbeat comes after a third; what is left must last until then, with room for a try that fails."""
    scene.store.before_swap = lambda record: None
    swap, once = scene.store.swap, [behind]

    def slow(new: Record, expected: str | None) -> Record | None:
        stored = swap(new, expected)
        scene.clock.advance(once.pop() if once else 0)
        return stored

    scene.store.swap = slow  # type: ignore[method-assign]

    assert scene.run(lambda attempt: scene.record.lease_until - scene.store.now()).value == left


def test_store_that_needs_somebody_is_not_asked_for_minutes(scene: Scene) -> None:
    """No pause mends a missing permission: the completion fails at once, and nothing is reported as done."""
    slept: list[float] = []
    scene.clock.on_sleep = slept.append

    def refuse(record: Record) -> None:
        if record.status is Status.COMPLETED:
            raise StoreMisconfigured("s", "write", "no permission")

    scene.store.before_swap = refuse

    with pytest.raises(StoreMisconfigured):
        scene.run(lambda attempt: "charged")

    assert slept == []


def test_claim_that_was_lost_before_its_body_asks_who_took_over(scene: Scene) -> None:
    """A worker that stalls between its claim and its body runs nothing, and gets its successor's outcome."""
    stolen: list[bool] = []

    def stall(record: Record) -> None:
        if record.status is Status.IN_PROGRESS and not stolen:
            stolen.append(True)
            swap = scene.store.swap

            def then_stall(new: Record, expected: str | None) -> Record | None:
                scene.store.swap = swap  # type: ignore[method-assign]
                scene.store.before_swap = lambda record: None
                stored = swap(new, expected)
                scene.steal()
                return stored

            scene.store.swap = then_stall  # type: ignore[method-assign]
            raise StoreUnavailable("s", "swap", "lost")

    scene.store.before_swap = stall

    assert scene.run(lambda attempt: "ours") == Outcome("theirs")
    assert scene.runs == 0


@pytest.mark.parametrize("on_outage", ["retry", "run"])
def test_heartbeat_that_cannot_start_is_an_outage(
    scene: Scene, on_outage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would renew the lease, so the claim is given back at once and the policy for outages decides."""

    def refuse(attempt: Claim) -> None:
        raise StoreUnavailable("memory", "heartbeat", "can't start new thread")

    monkeypatch.setattr(scene.heartbeat, "start", refuse)
    seen: list[Claim | None] = []

    def body(attempt: Claim | None) -> str:
        seen.append(attempt)
        return "unprotected"

    if on_outage == "retry":
        with pytest.raises(StoreUnavailable, match="can't start new thread"):
            scene.run(body, on_outage=on_outage)
        assert seen == []
    else:
        assert scene.run(body, on_outage=on_outage) == Outcome("unprotected")
        assert seen == [None]
    assert scene.record.status is Status.RELEASED
    assert scene.names == ["store_unavailable"]


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


def test_poison_ends_unknown(scene: Scene) -> None:
    """A body that ends its process each time is not run for ever; a person looks at it."""
    for _ in range(3):
        scene.abandon()

    with pytest.raises(OutcomeUnknown, match="3 attempts in a row ended without an outcome, the last, number 3"):
        scene.run(lambda attempt: "never", max_takeovers=2)

    assert (scene.runs, scene.record.status) == (0, Status.UNKNOWN)


def test_an_attempt_that_ended_begins_the_count_of_takeovers_anew(scene: Scene) -> None:
    """Only deaths in a row are poison."""

    def fail(attempt: Claim | None) -> None:
        raise LookupError

    scene.abandon()
    with pytest.raises(LookupError):
        scene.run(fail, max_takeovers=1)
    scene.abandon()

    assert scene.run(lambda attempt: "done", max_takeovers=1) == Outcome("done")


def test_takeovers_without_a_bound(scene: Scene) -> None:
    """None: for ever, as it always was."""
    for _ in range(6):
        scene.abandon()

    assert scene.run(lambda attempt: "done", max_takeovers=None) == Outcome("done")


def test_owner_of_a_record_that_became_unknown_completes_it_late(scene: Scene) -> None:
    """A stalled body that goes on is the answer that a person would have looked for."""

    def body(attempt: Claim | None) -> str:
        scene.clock.advance(61_000)
        with pytest.raises(OutcomeUnknown):
            scene.run(lambda attempt: "never", on_takeover="refuse")
        assert scene.record.status is Status.UNKNOWN
        return "charged"

    assert scene.run(body, on_takeover="refuse") == Outcome("charged")
    assert scene.run(lambda attempt: "never", on_takeover="refuse") == Outcome("charged")


def test_remembered_failure_after_large_steps_is_the_users_own(scene: Scene) -> None:
    """A record that is full of steps has room for the failure, as an outcome needs no steps."""
    limit = 2_000

    def refuse_large(record: Record) -> None:
        if len(str(record.to_fields())) > limit:
            raise RecordTooLarge("over the limit")

    scene.store.before_swap = refuse_large

    def body(handle: ProtectedAttempt) -> None:
        handle.step("charge", lambda step: "x" * 1_400)
        raise LookupError("declined " * 50)

    for _ in range(2):
        with pytest.raises(LookupError, match="declined"):
            scene.perform(body, remember=(LookupError,))

    assert scene.record.steps == {}


def test_failure_that_is_too_large_is_recorded_by_its_type(scene: Scene) -> None:
    """Its text may be left out; that it is an outcome may not."""

    def refuse_large(record: Record) -> None:
        if len(record.error or "") > 100:
            raise RecordTooLarge("over the limit")

    scene.store.before_swap = refuse_large

    def fail(attempt: Claim | None) -> None:
        raise LookupError("declined " * 50)

    with pytest.raises(LookupError):
        scene.run(fail, remember=(LookupError,))

    assert (scene.record.status, scene.record.error) == (Status.FAILED, "LookupError")


def test_doubt_that_is_too_large_is_recorded_by_its_type(scene: Scene) -> None:
    """So does the reason of an UNKNOWN outcome."""

    def refuse_large(record: Record) -> None:
        if len(record.error or "") > 20:
            raise RecordTooLarge("over the limit")

    scene.store.before_swap = refuse_large

    def end(attempt: Claim | None) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        scene.run(end, on_takeover="refuse")

    assert (scene.record.status, scene.record.error) == (Status.UNKNOWN, "SystemExit")


def test_record_that_leaves_no_room_for_another_claim_is_told_to_an_operator(scene: Scene) -> None:
    """An internal error would be nobody's to understand."""
    scene.abandon()

    def refuse(record: Record) -> None:
        raise RecordTooLarge("400 KB")

    scene.store.before_swap = refuse

    with pytest.raises(StoreMisconfigured, match="leave no room"):
        scene.run(lambda attempt: "never")


def test_names_for_people_are_bounded(scene: Scene) -> None:
    """A publisher may choose a task id of any length; two long ones stay different."""
    long = "i" * 390_000
    operation = replace(an_operation(), task_id=long, worker=long, task=long, app=long)
    scene.delivery_of(operation).run(lambda claim: 1)

    for name in (scene.record.task_id, scene.record.worker, scene.record.task, scene.record.app):
        assert name == bounded(long)
        assert len(name) == 255
    assert bounded(long) != bounded(long + "i")


def test_conflict_names_the_bounded_id_of_its_holder(scene: Scene) -> None:
    """Which is what a redelivery of the same message is compared by."""

    def meet(attempt: Claim | None) -> Any:
        return scene.run(lambda attempt: "never")

    conflict = scene.run(meet).value
    assert isinstance(conflict, Conflict)
    assert conflict.task_id == "id"


class TestBeforeEffects:
    """``attempt.before_effects()``: the author's word that nothing has begun yet."""

    def test_bug_before_any_effect_releases_under_refuse(self, scene: Scene) -> None:
        """The delivery fails with it, and the next one runs."""
        fixed: list[bool] = []

        def body(handle: ProtectedAttempt) -> str:
            with handle.before_effects():
                if not fixed:
                    raise TypeError("a bug")
            return handle.step("charge", lambda step: "charged")

        with pytest.raises(TypeError, match="a bug"):
            scene.perform(body, on_takeover="refuse")
        assert scene.record.status is Status.RELEASED

        fixed.append(True)
        assert scene.perform(body, on_takeover="refuse") == Outcome("charged")

    def test_process_exit_before_any_effect_releases_under_refuse(self, scene: Scene) -> None:
        """A cold shutdown there leaves nothing for a person to look at."""

        def body(handle: ProtectedAttempt) -> None:
            with handle.before_effects():
                raise SystemExit

        with pytest.raises(SystemExit):
            scene.perform(body, on_takeover="refuse")

        assert scene.record.status is Status.RELEASED

    def test_error_after_the_block_is_final_under_refuse(self, scene: Scene) -> None:
        """The word is for what leaves the block, also where the body raises something else of it later."""

        def after(handle: ProtectedAttempt) -> None:
            with handle.before_effects():
                pass
            raise TypeError("after")

        def instead(handle: ProtectedAttempt) -> None:
            try:
                with handle.before_effects():
                    raise TypeError("inside")
            except TypeError as error:
                raise ValueError("perhaps after an effect") from error

        for body in (after, instead):
            fresh = Scene()
            with pytest.raises((TypeError, ValueError)):
                fresh.perform(body, on_takeover="refuse")
            assert fresh.record.status is Status.FAILED

    def test_error_of_the_block_that_is_raised_after_an_effect_is_final_under_refuse(self, scene: Scene) -> None:
        """It may be the same object; something has begun since."""

        def body(handle: ProtectedAttempt) -> None:
            try:
                with handle.before_effects():
                    raise TypeError("inside")
            except TypeError as error:
                saved = error
            handle.step("charge", lambda step: "charged")
            raise saved

        with pytest.raises(TypeError):
            scene.perform(body, on_takeover="refuse")

        assert scene.record.status is Status.FAILED

    def test_attempt_that_dies_in_the_block_is_unknown_under_refuse(self, scene: Scene) -> None:
        """Nothing recorded that it was in the block, so nobody may trust that it was."""

        def body(handle: ProtectedAttempt) -> None:
            with handle.before_effects():
                pass

        scene.abandon(body)

        with pytest.raises(OutcomeUnknown):
            scene.run(lambda attempt: "never", on_takeover="refuse")

    @pytest.mark.parametrize(
        "effect",
        [
            lambda handle: handle.step("charge", lambda step: "charged"),
            lambda handle: handle.commit("done", writes=[]),
            lambda handle: handle.transaction(),
        ],
    )
    def test_effects_inside_the_block_are_refused(
        self, scene: Scene, effect: Callable[[ProtectedAttempt], Any]
    ) -> None:
        """The library holds the author to the word where it can."""

        def body(handle: ProtectedAttempt) -> None:
            with handle.before_effects():
                effect(handle)

        with pytest.raises(PolicyError, match=r"inside before_effects\(\)"):
            scene.perform(body, on_takeover="refuse")

    @pytest.mark.parametrize("is_caught", [False, True])
    def test_block_after_an_effect_is_refused(self, scene: Scene, is_caught: bool) -> None:
        """Also after one that failed: it may have happened. What it raises there is no word that nothing began."""

        def decline(step: Any) -> None:
            raise LookupError

        def body(handle: ProtectedAttempt) -> None:
            if is_caught:
                with pytest.raises(LookupError):
                    handle.step("charge", decline)
            else:
                handle.step("charge", lambda step: "charged")
            with handle.before_effects():
                raise AssertionError

        with pytest.raises(PolicyError, match="after an effect"):
            scene.perform(body, on_takeover="refuse")
        assert scene.record.status is Status.FAILED


def test_observing_changes_nothing_whatever_is_wrong(scene: Scene) -> None:
    """A store that breaks at the claim, at the release or at the completion: the body's own result and error pass."""

    def fail(attempt: Claim | None) -> None:
        raise LookupError("its own")

    for status in (Status.IN_PROGRESS, Status.RELEASED, Status.COMPLETED):
        for error in (RuntimeError, StoreUnavailable, RecordTooLarge, LeaseLost):

            def broken(record: Record, status: Status = status, error: type[Exception] = error) -> None:
                if record.status is status:
                    raise error("s", "w", "r") if error is not LeaseLost else LeaseLost("k", 1)

            returning, raising = Scene(), Scene()
            returning.store.before_swap = raising.store.before_swap = broken
            assert returning.observe(lambda attempt: "done") == "done"
            with pytest.raises(LookupError, match="its own"):
                raising.observe(fail)
            assert returning.runs == raising.runs == 1


def test_answer_that_cannot_be_read_never_runs_a_body(scene: Scene) -> None:
    """It may be an outcome. No answer is another thing: there ``on_outage`` decides."""

    def unreadable(record: Record) -> None:
        raise StoreMisconfigured("s", "read", "schema 2")

    scene.store.before_swap = unreadable

    with pytest.raises(StoreMisconfigured):
        scene.run(lambda attempt: "never", on_outage="run")

    assert scene.runs == 0
    assert scene.observe(lambda attempt: "as ever") == "as ever"


def test_safe_to_retry_still_releases(scene: Scene) -> None:
    """The other way to say that nothing has begun."""

    def body(attempt: Claim | None) -> None:
        raise SafeToRetry

    with pytest.raises(SafeToRetry):
        scene.run(body, on_takeover="refuse")

    assert scene.record.status is Status.RELEASED


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
    """kombu takes it for an error of the serialiser; what cannot be encoded fails twice."""
    assert scene.run(lambda attempt: Grudging()) == Outcome("charged")
    assert scene.run(lambda attempt: "again") == Outcome("charged")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_limit_between_two_lines_after_the_body_leaves_its_outcome(
    scene: Scene, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the completion is sent, or when it is stored and noted: it is made again, and counts once."""
    complete, strikes = Delivery._complete, [SoftTimeLimit()]

    def struck(*args: Any) -> Any:
        if strikes and moment == "before":
            raise strikes.pop()
        finished = complete(*args)
        if strikes:
            raise strikes.pop()
        return finished

    monkeypatch.setattr(Delivery, "_complete", struck)

    with pytest.raises(SoftTimeLimit):
        scene.run(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED
    assert "lease_lost" not in scene.names


def test_observing_does_not_wait_for_a_store_that_is_away_at_the_end(scene: Scene) -> None:
    """The task ends when its body does."""
    scene.store.faults.extend(["none", "request lost", "request lost", "request lost", "request lost"])
    slept: list[float] = []
    scene.clock.on_sleep = slept.append

    assert scene.observe(lambda attempt: "done") == "done"
    assert slept == []


def test_exit_while_an_observed_body_is_recorded_is_an_exit(scene: Scene) -> None:
    """What observing must not change, too: a worker that is told to end ends."""
    strike(scene, Status.COMPLETED, error=SystemExit)

    with pytest.raises(SystemExit):
        scene.observe(lambda attempt: "charged")

    assert scene.record.status is Status.COMPLETED


def test_error_of_the_store_that_the_body_survives_does_not_come_back(scene: Scene) -> None:
    """It was raised where it happened, once."""

    def body(handle: ProtectedAttempt) -> str:
        with pytest.raises(TypeError):
            handle.step("charge", lambda step: strike(scene, Status.IN_PROGRESS, times=3, error=TypeError))
        return "without it"

    assert scene.perform(body) == Outcome("without it")


def test_doubt_about_what_another_has_completed_is_none(scene: Scene) -> None:
    """The outcome that is recorded counts, and nobody is told to resolve it."""

    def body(attempt: Claim | None) -> None:
        assert attempt is not None
        scene.steal()
        raise OutcomeUnknown(attempt.key, "a step may have had its effect")

    assert scene.run(body) == Outcome("theirs")
    assert scene.names == ["claimed", "lease_lost"]


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
