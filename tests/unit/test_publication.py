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
from celery_idempotent.protocol.record import BLANK, Record, Status, bounded
from celery_idempotent.testing.contract import a_record

NOW = 1_800_000_100_000
QUEUED_FOR = 3_600_000
LEASE = 60_000

ASKED: dict[str, Any] = {"task": "orders.charge", "task_id": "mine", "app": "shop", "process": "here:1:2"}
OPERATION = Operation(identity=Identity("k", "f" * 64), policy=Policy(publish="once"), worker="", **ASKED)
TIMES: dict[str, Any] = {"lease_until": NOW + LEASE, "created_at": NOW, "updated_at": NOW}
FIRST = BLANK.but(key="k", status=Status.RELEASED, revision="new", fingerprint="f" * 64, **TIMES, **ASKED)
"""What is announced of a new operation: what a claim would say of it, without what only an attempt has."""


def _publish(record: Record | None, *, is_gone: bool = False, **changes: Any) -> Publication:
    outgoing = replace(Outgoing(operation=OPERATION, queued_for=QUEUED_FOR), **changes)
    return publication(record, outgoing, NOW, "new", is_gone=is_gone)


_record = a_record().but(key="k", task_id="theirs").but
QUEUED = FIRST.but(task_id="theirs", revision="old", lease_until=NOW + 1)
STALE = QUEUED.but(lease_until=NOW)
RUNNING = _record(lease_until=NOW - OPERATION.grace + 1)
OVER = _record(lease_until=NOW - OPERATION.grace)
RELEASED = _record(status=Status.RELEASED, lease_until=NOW + 9, attempts=3, steps={"charge": {}})
COMPLETED, FAILED = (_record(status=each, expires_at=NOW // 1000 + 1) for each in (Status.COMPLETED, Status.FAILED))
CUT: dict[str, Any] = {"task_id": bounded("x" * 300)}
EARLY, GONE, AWAITED = {"comes_back": False}, {"is_gone": True}, {"awaited": True}


@pytest.mark.parametrize("queued_for", [QUEUED_FOR, 5_000])
def test_a_new_operation_is_announced_for_a_lease_and_confirmed_for_longer(queued_for: int) -> None:
    """What is confirmed names no process: it counts whatever becomes of its publisher, and until it expires."""
    outgoing = Outgoing(operation=OPERATION, queued_for=queued_for)
    first = FIRST.but(lease_until=NOW + min(queued_for, LEASE))
    assert publication(None, outgoing, NOW, "new") == Announce(first, None)
    assert confirmed(first, outgoing, NOW + 7, "later") == first.but(
        revision="later", lease_until=NOW + 7 + queued_for, updated_at=NOW + 7, process=""
    )


@pytest.mark.parametrize(
    ("seen", "about", "expected"),
    [
        pytest.param(QUEUED, {}, Underway(QUEUED), id="queued"),
        pytest.param(RUNNING, {}, Underway(RUNNING), id="running, up to the end of the grace"),
        pytest.param(OVER, {}, Send(), id="lease and grace over"),
        pytest.param(COMPLETED, {}, Replay(COMPLETED), id="completed"),
        pytest.param(FAILED, {}, ReplayFailure(FAILED), id="failed"),
        pytest.param(_record(status=Status.UNKNOWN), {}, Send(), id="unknown"),
        pytest.param(RUNNING.but(**CUT), {}, Send(), id="running under an id that was too long to keep"),
        pytest.param(RUNNING.but(task_id="list[]"), {}, Send(), id="running as an item of a list"),
        pytest.param(RUNNING.but(task_id=""), {}, Send(), id="running under no id"),
        pytest.param(RUNNING.but(task_id="mine"), {}, Underway(RUNNING.but(task_id="mine")), id="its own body runs"),
        pytest.param(RUNNING, GONE, Send(), id="running in a process that is gone"),
        pytest.param(RUNNING, EARLY, Send(), id="running, and its message does not come back"),
        *(
            pytest.param(each, {**AWAITED, **more}, Send(), id=f"waited for: {each.status}")
            for each in (QUEUED, STALE, RUNNING, RELEASED, COMPLETED)
            for more in ({}, GONE)
        ),
        *(
            pytest.param(each.but(fingerprint="other"), {}, Send(), id=f"other arguments: {each.status}")
            for each in (QUEUED, RUNNING, RELEASED, COMPLETED)
        ),
        pytest.param(None, AWAITED, Announce(FIRST, None), id="waited for, and the first"),
    ],
)
def test_what_is_recorded_decides(seen: Record | None, about: Any, expected: Publication) -> None:
    """What is on its way, runs or has ended is not sent; what something waits for, or a delivery refuses, is."""
    assert _publish(seen, **about) == expected


@pytest.mark.parametrize(
    ("seen", "about"),
    [
        pytest.param(STALE, {}, id="queued for too long"),
        pytest.param(RELEASED, {}, id="released by an attempt, whatever its lease says"),
        pytest.param(QUEUED.but(**CUT), {}, id="queued under an id that was too long to keep"),
        pytest.param(QUEUED.but(task_id="mine"), {}, id="queued, and perhaps by who died before it was sent"),
        pytest.param(QUEUED, GONE, id="queued by a process that is gone, before or after it was sent"),
        pytest.param(RELEASED.but(verdict={"action": "rerun"}, label="order 1"), {}, id="judged by a person"),
    ],
)
def test_in_doubt_the_operation_is_announced_again(seen: Record, about: Any) -> None:
    """Attempts, token and steps stay, and so do the verdict and the label, whoever publishes it next."""
    kept = ("fencing_token", "attempts", "steps", "created_at", "label", "verdict")
    announced = FIRST.but(**{name: getattr(seen, name) for name in kept})
    assert _publish(seen, **about) == Announce(announced, seen)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_a_forgotten_outcome_counts_as_none(status: Status) -> None:
    """Only its fencing token stays."""
    seen = _record(status=status, expires_at=NOW // 1000, fencing_token=NOW + 5, attempts=3, fingerprint="other")
    assert _publish(seen) == Announce(FIRST.but(fencing_token=NOW + 5), seen)


@pytest.mark.parametrize("seen", [STALE, RELEASED.but(steps={})])
def test_other_arguments_take_the_place_of_what_binds_nobody(seen: Record) -> None:
    """Of a stale announcement, whose message may never come, and of a claim that was given back without a step."""
    decision = _publish(seen.but(fingerprint="other", label="old card"))
    assert isinstance(decision, Announce)
    kept = {"attempts": seen.attempts, "fencing_token": seen.fencing_token, "created_at": seen.created_at}
    assert decision.record == FIRST.but(**kept)


@pytest.mark.parametrize("fingerprint", ["f" * 64, "other"])
def test_a_delivery_takes_an_announcement_as_its_first_attempt(fingerprint: str) -> None:
    """With the next token, no takeover, and arguments that bind nobody before they were executed."""
    seen = QUEUED.but(fencing_token=NOW + 7, fingerprint=fingerprint)
    decision = decide(seen, OPERATION, NOW, owner="me", revision="new")
    assert isinstance(decision, Run)
    claimed = decision.record
    assert (decision.expected, claimed.owner, claimed.created_at) == (seen.revision, "me", seen.created_at)
    assert (claimed.attempts, claimed.takeovers, claimed.fencing_token) == (1, 0, NOW + 8)
    assert claimed.fingerprint == "f" * 64


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (QUEUED, "RELEASED, queued"),
        (STALE, "RELEASED, message in doubt"),
        (_record(status=Status.RELEASED, lease_until=NOW + 1), "RELEASED"),
        (QUEUED.but(status=Status.UNKNOWN), "UNKNOWN"),
    ],
)
def test_people_see_whether_a_message_is_on_its_way(record: Record, shown: str) -> None:
    """Of what an attempt has given back, and of every other status, there is no more to say."""
    assert shown_status(record.status, record.owner, record.lease_until, NOW) == shown
