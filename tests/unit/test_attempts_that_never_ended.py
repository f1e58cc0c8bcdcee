"""Attempts that never ended: how many there may be, and what a late end of one is worth."""

import pytest

from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.errors import (
    OutcomeUnknown,
)
from celery_idempotent.protocol.record import Status
from tests.support.scene import Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()


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


def test_doubt_about_what_another_has_completed_is_none(scene: Scene) -> None:
    """The outcome that is recorded counts, and nobody is told to resolve it."""

    def body(attempt: Claim | None) -> None:
        assert attempt is not None
        scene.steal()
        raise OutcomeUnknown(attempt.key, "a step may have had its effect")

    assert scene.run(body) == Outcome("theirs")
    assert scene.names == ["claimed", "lease_lost"]
