"""What a store says besides yes and no: records that vanished, answers nobody can read, and what needs a person."""

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.errors import (
    LeaseLost,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from tests.support.scene import Again, Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()


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


def test_observing_does_not_wait_for_a_store_that_is_away_at_the_end(scene: Scene) -> None:
    """The task ends when its body does."""
    scene.store.faults.extend(["none", "request lost", "request lost", "request lost", "request lost"])
    slept: list[float] = []
    scene.clock.on_sleep = slept.append

    assert scene.observe(lambda attempt: "done") == "done"
    assert slept == []
