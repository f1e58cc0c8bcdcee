"""Records that are too large: what is left out, and what never is."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Conflict
from celery_idempotent.errors import (
    StoreMisconfigured,
)
from celery_idempotent.protocol.record import Record, Status, bounded
from celery_idempotent.protocol.store import RecordTooLarge
from tests.support.scene import Scene, an_operation


@pytest.fixture
def scene() -> Scene:
    return Scene()


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
    operation = replace(an_operation(), task_id=long, worker=long, task=long, app=long, process=long)
    scene.delivery_of(operation).run(lambda claim: 1)

    for name in (scene.record.task_id, scene.record.worker, scene.record.task, scene.record.app):
        assert name == bounded(long)
        assert len(name) == 255
    assert len(scene.record.process) == 255
    assert bounded(long) != bounded(long + "i")


def test_conflict_names_the_bounded_id_of_its_holder(scene: Scene) -> None:
    """Which is what a redelivery of the same message is compared by."""

    def meet(attempt: Claim | None) -> Any:
        return scene.run(lambda attempt: "never")

    conflict = scene.run(meet).value
    assert isinstance(conflict, Conflict)
    assert conflict.task_id == "id"
