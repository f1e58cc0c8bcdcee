"""The publisher's decision table, row by row."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, Replay, ReplayFailure, Run, decide
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.publishing import (
    Announce,
    Outgoing,
    Publication,
    Send,
    Underway,
    confirmed,
    publication,
    shown_status,
)
from celery_idempotent.protocol.record import Record, Status, bounded
from celery_idempotent.testing.contract import a_record

NOW = 1_800_000_100_000
QUEUED_FOR = 3_600_000
LEASE = 60_000

OPERATION = Operation(
    identity=Identity("k", "f" * 64),
    policy=Policy(publish="once"),
    task="orders.charge",
    task_id="mine",
    worker="",
    app="shop",
    process="here:1:2",
)
GRACE = OPERATION.grace
LATER = NOW // 1000 + 1


def _publish(record: Record | None, *, is_gone: bool = False, **changes: Any) -> Publication:
    outgoing = replace(Outgoing(operation=OPERATION, queued_for=QUEUED_FOR), **changes)
    return publication(record, outgoing, NOW, "new", is_gone=is_gone)


def _record(**changes: Any) -> Record:
    return replace(a_record(), key="k", task_id="theirs", **changes)


def _queued(**changes: Any) -> Record:
    first = _publish(None)
    assert isinstance(first, Announce)
    return replace(first.record, **{"task_id": "theirs", "revision": "old", **changes})


def test_a_new_operation_is_announced_as_released_without_an_attempt() -> None:
    """With what a claim would say of it, but for what only an attempt has; it counts for a lease."""
    assert _publish(None) == Announce(
        Record(
            key="k",
            status=Status.RELEASED,
            revision="new",
            owner="",
            fencing_token=0,
            lease_until=NOW + LEASE,
            fingerprint="f" * 64,
            attempts=0,
            created_at=NOW,
            updated_at=NOW,
            task="orders.charge",
            task_id="mine",
            worker="",
            app="shop",
            process="here:1:2",
        ),
        None,
    )


@pytest.mark.parametrize("queued_for", [QUEUED_FOR, 5_000])
def test_what_is_confirmed_counts_from_then_on_whatever_becomes_of_its_publisher(queued_for: int) -> None:
    """It names no process; a message that expires before the end of a lease is announced for no longer, either."""
    outgoing = Outgoing(operation=OPERATION, queued_for=queued_for)
    first = publication(None, outgoing, NOW, "new")
    assert isinstance(first, Announce)
    assert first.record.lease_until == NOW + min(queued_for, LEASE)

    record = confirmed(first.record, outgoing, NOW + 7, "later")

    assert record == replace(
        first.record, revision="later", lease_until=NOW + 7 + queued_for, updated_at=NOW + 7, process=""
    )


QUEUED = _queued(lease_until=NOW + 1)
STALE = _queued(lease_until=NOW)
RUNNING = _record(lease_until=NOW - GRACE + 1)
OVER = _record(lease_until=NOW - GRACE)
RELEASED = _record(status=Status.RELEASED, lease_until=NOW + 9, attempts=3, steps={"charge": {}})
COMPLETED = _record(status=Status.COMPLETED, expires_at=LATER)
FAILED = _record(status=Status.FAILED, expires_at=LATER)
UNKNOWN = _record(status=Status.UNKNOWN)
CUT: dict[str, Any] = {"task_id": bounded("x" * 300)}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(QUEUED, Underway(QUEUED), id="queued"),
        pytest.param(RUNNING, Underway(RUNNING), id="running, up to the end of the grace"),
        pytest.param(OVER, Send(), id="lease and grace over"),
        pytest.param(COMPLETED, Replay(COMPLETED), id="completed"),
        pytest.param(FAILED, ReplayFailure(FAILED), id="failed"),
        pytest.param(UNKNOWN, Send(), id="unknown"),
        pytest.param(replace(RUNNING, **CUT), Send(), id="running under an id that was too long to keep"),
        pytest.param(replace(OVER, task_id="list[]"), Send(), id="lease over, as an item of a list"),
        pytest.param(replace(RUNNING, task_id="list[]"), Send(), id="running as an item of a list"),
        pytest.param(replace(RUNNING, task_id=""), Send(), id="running under no id"),
        pytest.param(replace(OVER, **CUT), Send(), id="lease over, id too long to keep"),
    ],
)
def test_what_is_recorded_decides(seen: Record, expected: Publication) -> None:
    """What certainly is on its way, runs or has ended is not published again, and no record is touched."""
    assert _publish(seen) == expected


@pytest.mark.parametrize(
    ("seen", "attempts"),
    [
        pytest.param(STALE, 0, id="queued for too long"),
        pytest.param(RELEASED, 3, id="released by an attempt, whatever its lease says"),
        pytest.param(replace(QUEUED, **CUT), 0, id="queued under an id that was too long to keep"),
        pytest.param(replace(QUEUED, task_id="mine"), 0, id="queued, and perhaps by who died before it was sent"),
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_in_doubt_the_operation_is_announced_again(seen: Record, attempts: int, is_gone: bool) -> None:
    """What it has of attempts, tokens and steps stays."""
    decision = _publish(seen, is_gone=is_gone)

    assert isinstance(decision, Announce)
    assert decision.seen == seen
    assert decision.record == replace(
        _queued(task_id="mine", revision="new"),
        fencing_token=seen.fencing_token,
        attempts=attempts,
        steps=seen.steps,
        created_at=seen.created_at,
        label=seen.label,
    )


def test_a_publisher_that_is_gone_proves_nothing() -> None:
    """Nobody knows whether it has sent its message."""
    decision = _publish(QUEUED, is_gone=True)

    assert isinstance(decision, Announce)
    assert (decision.record.task_id, decision.seen) == ("mine", QUEUED)


def test_a_process_that_is_gone_runs_no_body() -> None:
    """The message is sent under its own id: that of the attempt may have been revoked, and then workers drop it."""
    assert _publish(RUNNING, is_gone=True) == Send()


def test_a_body_that_runs_has_received_its_message() -> None:
    """Who publishes that again need not send it."""
    running = replace(RUNNING, task_id="mine")
    assert _publish(running) == Underway(running)


@pytest.mark.parametrize("seen", [RUNNING, OVER])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_body_whose_message_does_not_come_back_is_no_reason_to_send_none(seen: Record, is_gone: bool) -> None:
    """Nobody would run it again if its worker died; and the result of its message may be that death."""
    assert _publish(seen, comes_back=False, is_gone=is_gone) == Send()


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_a_forgotten_outcome_counts_as_none(status: Status) -> None:
    """Only its fencing token stays."""
    seen = _record(status=status, expires_at=NOW // 1000, fencing_token=NOW + 5, attempts=3, fingerprint="other")

    decision = _publish(seen)

    assert isinstance(decision, Announce)
    assert (decision.record.attempts, decision.record.fencing_token, decision.seen) == (0, NOW + 5, seen)


@pytest.mark.parametrize("seen", [QUEUED, STALE, RUNNING, OVER, RELEASED, COMPLETED, FAILED, UNKNOWN])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_message_that_is_waited_for_is_sent_under_its_own_id(seen: Record, is_gone: bool) -> None:
    """Whatever is recorded: what waits for it would wait for ever."""
    assert _publish(seen, awaited=True, is_gone=is_gone) == Send()


def test_a_message_that_is_waited_for_is_announced_if_it_is_the_first() -> None:
    """So that those after it are spared."""
    assert _publish(None, awaited=True) == _publish(None)


@pytest.mark.parametrize("seen", [QUEUED, RUNNING, OVER, RELEASED, COMPLETED, FAILED, UNKNOWN])
def test_other_arguments_are_sent_for_the_delivery_to_refuse(seen: Record) -> None:
    """Under their own id, as a message of the first call would be a lie."""
    assert _publish(replace(seen, fingerprint="other")) == Send()


@pytest.mark.parametrize("seen", [STALE, replace(RELEASED, steps={})])
def test_other_arguments_take_the_place_of_what_binds_nobody(seen: Record) -> None:
    """Of a stale announcement, whose message may never come, and of a claim that was given back without a step."""
    decision = _publish(replace(seen, fingerprint="other", label="old card"))

    assert isinstance(decision, Announce)
    assert (decision.record.task_id, decision.record.fingerprint, decision.record.label) == ("mine", "f" * 64, "")
    assert (decision.record.attempts, decision.record.fencing_token) == (seen.attempts, seen.fencing_token)


@pytest.mark.parametrize("fingerprint", ["f" * 64, "other"])
def test_a_delivery_takes_an_announcement_as_its_first_attempt(fingerprint: str) -> None:
    """With the next token, no takeover, and arguments that bind nobody before they were executed."""
    seen = replace(QUEUED, fencing_token=NOW + 7, fingerprint=fingerprint)

    decision = decide(seen, OPERATION, NOW, owner="me", revision="new")

    assert isinstance(decision, Run)
    assert decision.expected == seen.revision
    claimed = decision.record
    assert (claimed.attempts, claimed.takeovers, claimed.fencing_token) == (1, 0, NOW + 8)
    assert (claimed.owner, claimed.fingerprint, claimed.created_at) == ("me", "f" * 64, seen.created_at)


def test_announcement_keeps_what_a_person_has_said() -> None:
    """A verdict and a label are of the operation, whoever publishes it next."""
    judged = replace(RELEASED, verdict={"action": "rerun", "by": "ann"}, label="order 1")
    decision = _publish(judged)
    assert isinstance(decision, Announce)
    assert (decision.record.verdict, decision.record.label) == (judged.verdict, "order 1")


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (_queued(lease_until=NOW + 1), "RELEASED, queued"),
        (_queued(lease_until=NOW), "RELEASED, message in doubt"),
        (_record(status=Status.RELEASED, lease_until=NOW + 1), "RELEASED"),
        (_queued(status=Status.UNKNOWN), "UNKNOWN"),
    ],
)
def test_people_see_whether_a_message_is_on_its_way(record: Record, shown: str) -> None:
    """Of what an attempt has given back, and of every other status, there is no more to say."""
    assert shown_status(record.status, record.owner, record.lease_until, NOW) == shown
