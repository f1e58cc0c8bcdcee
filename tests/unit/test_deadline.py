"""A body's deadline: what it may still do when that is over, what is told, and who may take over."""

import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from celery_idempotent import DeadlineExceeded, IdempotentTask, LeaseLost, OutcomeUnknown, Policy, PolicyError, signals
from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Run, Written
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished, from_plain
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import an_app, deliver
from tests.support.scene import Scene, an_operation
from tests.support.waiting import wait_until

LIMITED: dict[str, Any] = {"lease": 60, "deadline": 120}


@pytest.fixture
def scene() -> Scene:
    return Scene()


def _late(scene: Scene) -> None:
    """Let the deadline pass, the lease renewed right before."""
    scene.clock.advance(120_000)


def _told(scene: Scene) -> int:
    return scene.names.count("deadline_exceeded")


@pytest.mark.parametrize("deadline", [0, -1, 59.9, True, "60", float("inf"), float("nan")])
def test_a_deadline_is_a_duration_from_the_lease(deadline: Any) -> None:
    """Before the lease is over nobody can take over, whatever is said."""
    with pytest.raises(PolicyError, match="deadline=.*: must be None, or a duration from the lease"):
        Policy(deadline=deadline)


def test_a_deadline_of_one_lease_is_allowed() -> None:
    """Then nothing is ever renewed beyond it."""
    assert Policy(deadline=60).deadline_ms == Policy().lease_ms


@pytest.mark.parametrize(
    ("on_takeover", "told"),
    [("rerun", "another attempt may take over"), ("refuse", "the operation ends UNKNOWN")],
)
def test_guarantee_tells_of_it(on_takeover: Any, told: str) -> None:
    """A line of its own, where there is a deadline."""
    (line,) = (
        each
        for each in Policy(deadline=600, on_takeover=on_takeover).guarantee("t").splitlines()
        if "runs for longer than 10 minutes" in each
    )
    assert line.endswith(told)
    assert "runs for longer" not in Policy(on_takeover=on_takeover).guarantee("t")


class TestBody:
    """What a body meets that asks."""

    def test_may_ask_until_the_deadline(self, scene: Scene) -> None:
        """Counted from the claim; the lease is renewed meanwhile."""

        def body(attempt: ProtectedAttempt) -> str:
            assert attempt.remaining == 120
            scene.clock.advance(119_999)
            attempt.ensure_owned()
            assert attempt.remaining == pytest.approx(0.001, rel=0.01)
            return attempt.step("*", lambda step: "done")

        assert scene.perform(body, **LIMITED) == Outcome("done")
        assert _told(scene) == 0

    def test_counts_from_before_the_claim_was_sent(self, scene: Scene) -> None:
        """A slow answer is part of it."""
        scene.reply_takes(20_000)
        assert scene.perform(lambda attempt: attempt.remaining, **LIMITED) == Outcome(100.0)

    def test_is_refused_from_then_on_and_told_once(self, scene: Scene) -> None:
        """Whatever it tries, nothing is called, and the error says why."""
        called: list[object] = []

        def body(attempt: ProtectedAttempt) -> None:
            _late(scene)
            assert attempt.remaining == 0
            for begin in (
                attempt.ensure_owned,
                lambda: attempt.step("*", called.append),
                lambda: attempt.step("sms", called.append),  # at most once: its beginning is recorded
                lambda: attempt.fenced_step("other", fence=called.append, probe=called.append, act=called.append),
            ):
                with pytest.raises(DeadlineExceeded, match=r"longer than its Policy\(deadline=...\) allows"):
                    begin()
            attempt.ensure_owned()

        with pytest.raises(DeadlineExceeded):
            scene.perform(body, **LIMITED)
        assert called == []
        assert _told(scene) == 1
        (event,) = (each for each in scene.events if each.name == "deadline_exceeded")
        assert event.reason == "the body has been running for 2 minutes; its lease is renewed no more"
        assert event.fencing_token == scene.record.fencing_token

    def test_that_was_taken_over_is_told_that(self, scene: Scene) -> None:
        """The stronger of two reasons."""

        def body(attempt: ProtectedAttempt) -> None:
            scene.steal(after=61_000)
            with pytest.raises(LeaseLost, match="was taken over"):
                attempt.ensure_owned()
            _late(scene)
            with pytest.raises(LeaseLost) as lost:
                attempt.ensure_owned()
            assert type(lost.value) is LeaseLost

        scene.perform(body, **LIMITED)

    def test_a_step_that_was_under_way_is_recorded(self, scene: Scene) -> None:
        """Its effect has happened, and the next attempt must not repeat it; but the lease stays as it was."""
        leases: list[int] = []
        claims: list[Claim] = []

        def slow(step: Any) -> str:
            leases.append(scene.record.lease_until)
            _late(scene)
            claims[0].renew()  # the heartbeat sees it first
            return "receipt"

        def body(attempt: ProtectedAttempt) -> None:
            claims.append(attempt._claim)
            assert attempt.step("sms", slow) == "receipt"
            leases.append(scene.record.lease_until)
            assert from_plain(scene.record.steps["sms"]) == Finished(scene.codec.keep("receipt").encoded)
            attempt.step("next", lambda step: None)

        with pytest.raises(DeadlineExceeded):
            scene.perform(body, **LIMITED)
        assert leases[0] == leases[1]
        assert scene.perform(lambda attempt: attempt.step("sms", _never), **LIMITED) == Outcome("receipt")

    def test_a_step_that_is_done_is_recalled(self, scene: Scene) -> None:
        """It has no effect any more."""

        def body(attempt: ProtectedAttempt) -> Any:
            scene.clock.advance(120_000)
            return attempt.step("sms", _never)

        with pytest.raises(RuntimeError):
            scene.perform(lambda attempt: _fail(attempt.step("sms", lambda step: "receipt")))
        assert scene.perform(body, **LIMITED) == Outcome("receipt")

    @pytest.mark.parametrize("attempt", [Attempt(lambda: Identity("k", None))])
    def test_without_a_claim_has_no_deadline(self, attempt: Attempt) -> None:
        """Nothing could be taken over."""
        assert attempt.remaining is None

    def test_without_a_deadline_has_none(self, scene: Scene) -> None:
        """A year is fine, as long as the lease is renewed."""

        def body(attempt: ProtectedAttempt) -> Any:
            scene.clock.advance(365 * 86_400_000)
            attempt.ensure_owned()
            return Attempt(lambda: Identity("k", None), attempt).remaining

        assert scene.perform(body) == Outcome(None)

    def test_a_call_within_a_body_has_that_ones(self, scene: Scene) -> None:
        """As it has its token."""
        within = scene.perform(lambda attempt: Attempt(lambda: Identity("k", None), attempt).remaining, **LIMITED)
        assert within == Outcome(120.0)

    def test_is_not_refused_anything_while_it_is_only_observed(self, scene: Scene) -> None:
        """Observing changes nothing of what a task does."""

        def body(claimed: Claim | None) -> str:
            assert claimed is not None
            _late(scene)
            claimed.ensure_owned()
            return "done"

        assert scene.observe(body, **LIMITED) == "done"
        assert _told(scene) == 0


class TestEnd:
    """How an attempt ends whose deadline is over."""

    def test_a_late_body_completes_while_nobody_took_over(self, scene: Scene) -> None:
        """Its effect has happened; the compare-and-swap decides, and people are told all the same."""

        def body(attempt: ProtectedAttempt) -> str:
            scene.clock.advance(900_000)
            return "late"

        assert scene.perform(body, **LIMITED) == Outcome("late")
        assert scene.record.status is Status.COMPLETED
        assert scene.names == ["claimed", "deadline_exceeded", "completed"]

    def test_a_late_body_reports_who_took_over(self, scene: Scene) -> None:
        """Under the ordinary rules."""
        assert scene.run(lambda attempt: scene.steal(after=181_001), **LIMITED) == Outcome("theirs")
        assert scene.names == ["claimed", "deadline_exceeded", "lease_lost"]

    @pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
    def test_a_body_that_ends_on_time_is_not_late(self, scene: Scene, status: Status) -> None:
        """However long the store takes to record its outcome; the heartbeat renews all the while."""
        back_at = scene.clock.monotonic() + 300

        def away(record: Record) -> None:
            if record.status is status and scene.clock.monotonic() < back_at:
                scene.store.faults.append("request lost")

        def body(claimed: Claim | None) -> str:
            assert claimed is not None
            scene.store.before_swap = away
            scene.clock.on_sleep = lambda seconds: claimed.renew()
            if status is Status.FAILED:
                raise LookupError
            return "done"

        with suppress(LookupError):
            scene.run(body, remember=(LookupError,), **LIMITED)
        assert scene.record.status is status
        assert scene.clock.monotonic() >= back_at
        assert _told(scene) == 0

    def test_that_lets_the_error_pass_is_as_one_that_died(self, scene: Scene) -> None:
        """The next attempt is a takeover, at once, so that endless slowness ends UNKNOWN."""

        def body(attempt: ProtectedAttempt) -> None:
            _late(scene)
            attempt.ensure_owned()

        for number in range(1, 4):
            with pytest.raises(DeadlineExceeded):
                scene.perform(body, max_takeovers=2, **LIMITED)
            assert (scene.record.attempts, scene.record.takeovers) == (number, number - 1)
            assert (scene.record.status, scene.record.lease_until) == (Status.IN_PROGRESS, 0)
        with pytest.raises(OutcomeUnknown, match="3 attempts in a row ended without an outcome"):
            scene.perform(body, max_takeovers=2, **LIMITED)
        assert scene.runs == 3

    def test_under_refuse_it_ends_unknown(self, scene: Scene) -> None:
        """Nobody can tell how far it came."""

        def body(attempt: ProtectedAttempt) -> None:
            _late(scene)
            attempt.ensure_owned()

        with pytest.raises(DeadlineExceeded):
            scene.perform(body, on_takeover="refuse", **LIMITED)
        assert (scene.record.status, scene.record.error) == (Status.UNKNOWN, "DeadlineExceeded ended attempt 1")

    @pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
    def test_before_effects_it_is_released(self, scene: Scene, on_takeover: Any) -> None:
        """By the author's word that nothing had begun."""

        def body(attempt: ProtectedAttempt) -> None:
            with attempt.before_effects():
                _late(scene)
                attempt.ensure_owned()

        with pytest.raises(DeadlineExceeded):
            scene.perform(body, on_takeover=on_takeover, **LIMITED)
        assert scene.record.status is Status.RELEASED

    def test_the_error_of_another_operation_is_any_error(self, scene: Scene) -> None:
        """A body that calls a task eagerly gets what that one raised."""

        def body(attempt: ProtectedAttempt) -> None:
            raise DeadlineExceeded("another", 1)

        with pytest.raises(DeadlineExceeded):
            scene.perform(body, **LIMITED)
        assert scene.record.status is Status.RELEASED

    def test_somebody_else_takes_over_after_the_last_renewed_lease(self, scene: Scene) -> None:
        """Not sooner."""
        conflicts: list[object] = []

        def body(claimed: Claim | None) -> str:
            assert claimed is not None
            scene.clock.advance(60_000)
            claimed.renew()
            scene.clock.advance(60_000)
            claimed.renew()  # past the deadline
            scene.clock.advance(1_000 - 1)
            other = Scene()
            other.store, other.clock = scene.store, scene.clock
            conflicts.append(other.run(lambda attempt: "theirs"))
            scene.clock.advance(1)
            conflicts.append(other.run(lambda attempt: "theirs"))
            return "mine"

        assert scene.run(body, **LIMITED) == Outcome("theirs")
        assert isinstance(conflicts[0], Conflict)
        assert conflicts[1:] == [Outcome("theirs")]


class TestHeartbeat:
    """On a real clock, with short leases."""

    def test_renews_until_the_deadline_and_then_tells(self) -> None:
        """At once and once, though the body does nothing; then the lease runs out."""
        store, beats, told = FaultyStore(MemoryStore()), Heartbeat(), threading.Semaphore(0)
        claimed_at = time.monotonic()
        decision = claim(store, an_operation())
        assert isinstance(decision, Run)
        brief = decision.record.but(lease_until=store.now() + 300, revision=new_nonce())
        assert store.store.swap(brief, decision.record.revision) == brief
        late: list[float] = []

        def tell(claimed: Claim) -> None:
            late.append(time.monotonic())
            told.release()

        attempt = Claim(store, brief, lease=300, retain=60_000, claimed_at=claimed_at, deadline=750, tell_late=tell)
        beats.start(attempt)
        assert told.acquire(timeout=60)
        assert late[0] >= claimed_at + 0.75
        wait_until(lambda: attempt not in beats._beats, "it is renewed no more")
        written = store.get("k")
        assert written is not None
        assert written.lease_until > brief.lease_until, "it was renewed before"
        assert not told.acquire(blocking=False)
        assert isinstance(attempt.complete(None), Written)

    def test_looks_at_the_deadline_and_no_earlier_than_it(self) -> None:
        """A look at a third of a lease of an hour would come too late; a moment too early would renew once more."""
        clock = FakeClock()
        beats = Heartbeat(clock)
        store = FaultyStore(MemoryStore(clock.now))
        decision = claim(store, an_operation(lease=3600))
        assert isinstance(decision, Run)
        attempt = Claim(
            store,
            decision.record,
            lease=3_600_000,
            retain=1,
            claimed_at=clock.monotonic(),
            clock=clock,
            deadline=3_700_000,
        )
        start = clock.monotonic()
        beats.start(attempt)
        (beat,) = beats._beats.values()
        assert beat.due - start == pytest.approx(1200)
        clock.advance(3_600_000)
        beat.is_handed_over = True
        beats._renew(beat)
        assert beat.due - start == pytest.approx(3700)
        beats.start(attempt)
        (beat,) = beats._beats.values()
        assert beat.due - start == pytest.approx(3700)
        beats.stop(attempt)


def test_the_signal_tells_which_task() -> None:
    """As every other one does."""
    heard: list[dict[str, Any]] = []

    def hear(sender: Any, **told: Any) -> None:
        heard.append({"task": sender.name, **told})

    def charge(order_id: str) -> str:
        (beat,) = (each for each in _beats() if each.claim.remaining is not None)
        beat.claim.late_at = 0
        return "done"

    task = an_app()._task_from_fun(
        charge, name="charge", base=IdempotentTask, idempotent=Policy(deadline=60), shared=False
    )
    signals.deadline_exceeded.connect(hear)
    deliver(task, "o", task_id="id")
    assert [(each["task"], each["task_id"], each["observed"]) for each in heard] == [("charge", "id", False)]


def _beats() -> list[Any]:
    from celery_idempotent.engine.heartbeat import heartbeat

    return list(heartbeat._beats.values())


def _never(*args: object) -> Any:
    raise AssertionError("called")


def _fail(done: str) -> None:
    raise RuntimeError(done)
