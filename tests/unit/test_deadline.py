"""A body's deadline: what it may still do when that is over, what is told, and who may take over."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from celery_idempotent import DeadlineExceeded, LeaseLost
from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished, from_plain
from tests.support.scene import Scene, raising

LIMITED: dict[str, Any] = {"lease": 60, "deadline": 120}
NEVER = raising(AssertionError("called"))


def _late(scene: Scene, handle: Any) -> None:
    """Let the deadline pass, and ask."""
    scene.clock.advance(120_000)
    handle.ensure_owned()


def test_body_may_ask_until_the_deadline(scene: Scene) -> None:
    """Counted from before the claim was sent; the lease is renewed meanwhile."""

    def body(attempt: ProtectedAttempt) -> str:
        assert attempt.remaining == 100
        assert Attempt(lambda: Identity("k", None), attempt).remaining == 100, "a call within it has that, too"
        scene.clock.advance(99_999)
        attempt.ensure_owned()
        assert attempt.remaining == pytest.approx(0.001, rel=0.01)
        return attempt.step("*", lambda step: "done")

    scene.reply_takes(20_000)
    assert scene.perform(body, **LIMITED) == Outcome("done")
    assert scene.told == "claimed completed"


def test_body_is_refused_from_then_on_and_told_once(scene: Scene) -> None:
    """Whatever it tries, nothing is called."""

    def body(attempt: ProtectedAttempt) -> None:
        scene.clock.advance(120_000)
        assert attempt.remaining == 0
        steps = [partial(attempt.step, each, NEVER) for each in ("*", "sms")]  # the latter at most once
        fenced = partial(attempt.fenced_step, "other", fence=NEVER, probe=NEVER, act=NEVER)
        begins: list[Any] = [attempt.ensure_owned, *steps, fenced]
        for begin in begins:
            with pytest.raises(DeadlineExceeded):
                begin()
        attempt.ensure_owned()

    assert scene.answer(lambda: scene.perform(body, **LIMITED)) is DeadlineExceeded
    assert scene.told == "claimed deadline_exceeded released"
    assert "2 minutes" in scene.events[1].reason
    assert scene.events[1].fencing_token == scene.record.fencing_token


def test_body_that_was_taken_over_is_told_that(scene: Scene) -> None:
    """The stronger of two reasons."""

    def body(attempt: ProtectedAttempt) -> None:
        scene.steal(after=61_000)
        for _ in range(2):
            with pytest.raises(LeaseLost) as lost:
                attempt.ensure_owned()
            assert type(lost.value) is LeaseLost
            scene.clock.advance(120_000)

    scene.perform(body, **LIMITED)


def test_step_that_was_under_way_is_recorded(scene: Scene) -> None:
    """Its effect has happened, and the next attempt recalls it; the lease stays as it was."""
    leases: list[int] = []

    def body(attempt: ProtectedAttempt) -> None:
        def slow(step: Any) -> str:
            leases.append(scene.record.lease_until)
            scene.clock.advance(120_000)
            attempt._claim.renew()  # the heartbeat sees it first
            return "receipt"

        assert attempt.step("sms", slow) == "receipt"
        leases.append(scene.record.lease_until)
        assert from_plain(scene.record.steps["sms"]) == Finished(scene.codec.keep("receipt").encoded)
        attempt.step("next", NEVER)

    assert scene.answer(lambda: scene.perform(body, **LIMITED)) is DeadlineExceeded
    assert leases[0] == leases[1]

    def late(attempt: Attempt) -> Any:
        scene.clock.advance(120_000)
        return attempt.step("sms", NEVER)

    assert scene.perform(late, **LIMITED) == Outcome("receipt")


def test_body_without_a_deadline_or_a_claim_has_none(scene: Scene) -> None:
    """A year is fine, as long as the lease is renewed."""

    def body(attempt: ProtectedAttempt) -> Any:
        scene.clock.advance(365 * 86_400_000)
        attempt.ensure_owned()
        return Attempt(lambda: Identity("k", None), attempt).remaining

    assert scene.perform(body) == Outcome(None)
    assert Attempt(lambda: Identity("k", None)).remaining is None


def test_body_is_not_refused_anything_while_it_is_only_observed(scene: Scene) -> None:
    """Observing changes nothing of what a task does."""
    scene.observe(lambda claimed: _late(scene, claimed), **LIMITED)
    assert scene.told == "claimed completed"


def before_effects(scene: Scene, handle: ProtectedAttempt) -> None:
    """A body that is late where nothing has begun."""
    with handle.before_effects():
        _late(scene, handle)


REFUSE = {"on_takeover": "refuse", **LIMITED}
LATE = "claimed deadline_exceeded"


@pytest.mark.parametrize(
    ("body", "policy", "answer", "status", "told"),
    [
        (lambda scene, handle: scene.clock.advance(900_000), LIMITED, None, Status.COMPLETED, f"{LATE} completed"),
        (lambda scene, handle: scene.steal(after=181_001), LIMITED, "theirs", Status.COMPLETED, f"{LATE} lease_lost"),
        (_late, LIMITED, DeadlineExceeded, Status.IN_PROGRESS, f"{LATE} released"),
        (_late, REFUSE, DeadlineExceeded, Status.UNKNOWN, f"{LATE} outcome_unknown"),
        (before_effects, LIMITED, DeadlineExceeded, Status.RELEASED, f"{LATE} released"),
        (before_effects, REFUSE, DeadlineExceeded, Status.RELEASED, f"{LATE} released"),
        (raising(DeadlineExceeded("another", 1)), LIMITED, DeadlineExceeded, Status.RELEASED, "claimed released"),
    ],
)
def test_how_a_late_body_ends(scene: Scene, body: Any, policy: Any, answer: Any, status: Status, told: str) -> None:
    """While nobody took over its result counts; one that lets the error pass is as one that died."""
    assert scene.answer(lambda: scene.perform(lambda handle: body(scene, handle), **policy)) == answer
    assert (scene.status, scene.told) == (status, told)
    assert status is not Status.IN_PROGRESS or scene.record.lease_until == 0
    assert scene.record.error == ("DeadlineExceeded ended attempt 1" if status is Status.UNKNOWN else None)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_a_body_that_ends_on_time_is_not_late(scene: Scene, status: Status) -> None:
    """However long the store takes to record its outcome; the heartbeat renews all the while."""
    back_at = scene.clock.monotonic() + 300

    def away(record: Record) -> None:
        if record.status is status and scene.clock.monotonic() < back_at:
            scene.store.faults.append("request lost")

    def body(claimed: Any) -> str:
        scene.store.before_swap = away
        scene.clock.on_sleep = lambda seconds: claimed.renew()
        if status is Status.FAILED:
            raise LookupError
        return "done"

    with suppress(LookupError):
        scene.run(body, remember=(LookupError,), **LIMITED)
    assert (scene.status, scene.clock.monotonic() >= back_at) == (status, True)
    assert "deadline_exceeded" not in scene.names
