"""The author's word that nothing has begun yet."""

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.errors import (
    OutcomeUnknown,
    PolicyError,
    SafeToRetry,
)
from celery_idempotent.protocol.record import Status
from tests.support.scene import Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()


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


def test_safe_to_retry_still_releases(scene: Scene) -> None:
    """The other way to say that nothing has begun."""

    def body(attempt: Claim | None) -> None:
        raise SafeToRetry

    with pytest.raises(SafeToRetry):
        scene.run(body, on_takeover="refuse")

    assert scene.record.status is Status.RELEASED
