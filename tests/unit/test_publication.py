"""The publisher's decision table, row by row."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.engine.claim import claim
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, Replay, ReplayFailure, Run, decide
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.publishing import (
    Announce,
    Outgoing,
    Publication,
    Send,
    Underway,
    announcement,
    publication,
    shown_status,
)
from celery_idempotent.protocol.record import Record, Status, bounded
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record

NOW = 1_800_000_100_000
PATIENCE = 60_000

OPERATION = Operation(
    identity=Identity("k", "f" * 64),
    policy=Policy(publish="once"),
    task="orders.charge",
    task_id="mine",
    worker="",
    app="shop",
    process="here:1:2",
)
GRACE = OPERATION.policy.grace_ms
LATER = NOW // 1000 + 1


def _publish(record: Record | None, *, is_gone: bool = False, **changes: Any) -> Publication:
    outgoing = replace(Outgoing(operation=OPERATION, patience=PATIENCE), **changes)
    return publication(record, outgoing, NOW, "new", is_gone=is_gone)


def _record(**changes: Any) -> Record:
    return replace(a_record(), key="k", task_id="theirs", **changes)


def _queued(**changes: Any) -> Record:
    first = _publish(None)
    assert isinstance(first, Announce)
    return replace(first.record, **{"task_id": "theirs", "revision": "old", **changes})


def test_a_new_operation_is_announced_as_released_without_an_attempt() -> None:
    """With what a claim would say of it, but for what only an attempt has; its word is good for the patience."""
    assert _publish(None) == Announce(
        Record(
            key="k",
            status=Status.RELEASED,
            revision=f"announced:{NOW}:new",
            owner="",
            fencing_token=0,
            lease_until=NOW + PATIENCE,
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
        "mine",
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
        pytest.param(OVER, Send("mine"), id="lease and grace over"),
        pytest.param(COMPLETED, Replay(COMPLETED), id="completed"),
        pytest.param(FAILED, ReplayFailure(FAILED), id="failed"),
        pytest.param(UNKNOWN, Send("mine"), id="unknown"),
        pytest.param(replace(RUNNING, **CUT), Send("mine"), id="running under an id that was too long to keep"),
        pytest.param(replace(OVER, task_id="list[]"), Send("mine"), id="lease over, as an item of a list"),
        pytest.param(replace(RUNNING, task_id="list[]"), Send("mine"), id="running as an item of a list"),
        pytest.param(replace(RUNNING, task_id=""), Send("mine"), id="running under no id"),
        pytest.param(replace(OVER, **CUT), Send("mine"), id="lease over, id too long to keep"),
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
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_in_doubt_the_operation_is_announced_again_under_the_new_message(
    seen: Record, attempts: int, is_gone: bool
) -> None:
    """One message per patience, and what the operation has of attempts, tokens and steps stays."""
    decision = _publish(seen, is_gone=is_gone)

    assert isinstance(decision, Announce)
    assert (decision.task_id, decision.seen) == ("mine", seen)
    assert decision.record == replace(
        _queued(task_id="mine", revision="new"),
        fencing_token=seen.fencing_token,
        attempts=attempts,
        steps=seen.steps,
        created_at=seen.created_at,
        label=seen.label,
    )


def test_a_publisher_that_is_gone_is_stood_in_for_under_its_message() -> None:
    """Who was told that its message is on its way gets the result; the doubt comes when it would have come."""
    decision = _publish(QUEUED, is_gone=True)

    assert isinstance(decision, Announce)
    assert decision.task_id == decision.record.task_id == "theirs"
    assert (decision.record.process, decision.record.lease_until) == ("here:1:2", NOW + 1)


def test_observing_stands_in_for_nobody() -> None:
    """The message is sent under its own id, and the record says what it would under the policy as enforced."""
    observed = replace(OPERATION, policy=replace(OPERATION.policy, mode="observe"))
    enforced = _publish(QUEUED, is_gone=True)

    assert isinstance(enforced, Announce)
    assert _publish(QUEUED, is_gone=True, operation=observed) == replace(enforced, task_id="mine")


def test_a_process_that_is_gone_runs_no_body() -> None:
    """The message is sent under its own id: that of the attempt may have been revoked, and then workers drop it."""
    assert _publish(RUNNING, is_gone=True) == Send("mine")


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_message_is_no_evidence_of_itself(is_gone: bool) -> None:
    """Who publishes it again cannot tell whether it was sent; a body that runs has received it."""
    assert _publish(replace(QUEUED, task_id="mine"), is_gone=is_gone) == Send("mine")
    running = replace(RUNNING, task_id="mine")
    assert _publish(running) == Underway(running)


@pytest.mark.parametrize("seen", [RUNNING, OVER])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_body_whose_message_does_not_come_back_is_no_reason_to_send_none(seen: Record, is_gone: bool) -> None:
    """Nobody would run it again if its worker died; and the result of its message may be that death."""
    assert _publish(seen, comes_back=False, is_gone=is_gone) == Send("mine")


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
    assert _publish(seen, awaited=True, is_gone=is_gone) == Send("mine")


def test_a_message_that_is_waited_for_is_announced_if_it_is_the_first() -> None:
    """So that those after it are spared."""
    assert _publish(None, awaited=True) == _publish(None)


@pytest.mark.parametrize("seen", [QUEUED, RUNNING, OVER, RELEASED, COMPLETED, FAILED, UNKNOWN])
def test_other_arguments_are_sent_for_the_delivery_to_refuse(seen: Record) -> None:
    """Under their own id, as a message of the first call would be a lie."""
    assert _publish(replace(seen, fingerprint="other")) == Send("mine")


@pytest.mark.parametrize("seen", [STALE, replace(RELEASED, steps={})])
def test_other_arguments_take_the_place_of_what_binds_nobody(seen: Record) -> None:
    """Of a stale announcement, whose message may never come, and of a claim that was given back without a step."""
    decision = _publish(replace(seen, fingerprint="other", label="old card"))

    assert isinstance(decision, Announce)
    assert (decision.task_id, decision.record.fingerprint, decision.record.label) == ("mine", "f" * 64, "")
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


NONCE = "0123456789abcdef" * 2


def _told(announced: str) -> Operation:
    return replace(OPERATION, announced=announced)


def test_claim_of_the_first_message_needs_no_look_at_the_record() -> None:
    """What the message tells is enough for the very record that a look would have led to."""
    outgoing = Outgoing(operation=OPERATION, patience=PATIENCE)
    first = publication(None, outgoing, NOW, NONCE)
    assert isinstance(first, Announce)
    guessed = announcement(_told(first.record.revision))

    seen = decide(first.record, OPERATION, NOW + 5, owner="o", revision="r")
    assert seen == decide(guessed, OPERATION, NOW + 5, owner="o", revision="r")
    assert isinstance(seen, Run)
    assert seen.expected == first.record.revision


def test_announcement_keeps_what_a_person_has_said() -> None:
    """A verdict and a label are of the operation, whoever publishes it next."""
    judged = replace(RELEASED, verdict={"action": "rerun", "by": "ann"}, label="order 1")
    decision = _publish(judged)
    assert isinstance(decision, Announce)
    assert (decision.record.verdict, decision.record.label) == (judged.verdict, "order 1")


@pytest.mark.parametrize("follows", ["released", "forgotten"])
def test_announcement_that_follows_another_record_cannot_be_guessed(follows: str) -> None:
    """It takes over steps and a token, which no message tells."""
    changes: dict[str, dict[str, Any]] = {
        "released": {"status": Status.RELEASED},
        "forgotten": {"status": Status.COMPLETED, "expires_at": 1},
    }
    outgoing = Outgoing(operation=OPERATION, patience=PATIENCE)
    decision = publication(_record(**changes[follows]), outgoing, NOW, NONCE)
    assert isinstance(decision, Announce)
    assert announcement(_told(decision.record.revision)) is None


@pytest.mark.parametrize(
    "announced",
    [
        "",
        NONCE,
        f"announced:{NOW}",
        f"announced:{NOW}:{NONCE[1:]}",
        f"announced:{NOW}:{NONCE}0",
        f"announced:-1:{NONCE}",
        f"announced:{'9' * 16}:{NONCE}",
        f" announced:{NOW}:{NONCE}",
        f"announced:{NOW}:{NONCE}\n",
    ],
)
def test_what_is_no_announcement_is_no_guess(announced: str) -> None:
    """A message tells what somebody has put there; nothing but the form that a publisher writes counts."""
    assert announcement(_told(announced)) is None


@pytest.mark.parametrize("told", ["the truth", "a lie", "nothing"])
@pytest.mark.parametrize(
    "stored",
    [
        None,
        {"status": Status.COMPLETED},
        {"status": Status.IN_PROGRESS},
        {"status": Status.RELEASED, "steps": {"a": {}}},
    ],
)
def test_what_a_message_tells_changes_no_answer(told: str, stored: dict[str, Any] | None) -> None:
    """A guess only ever loses to a record that is not the one that was announced, and is then asked again."""
    clock = FakeClock()
    store = MemoryStore(clock.now)
    revision = f"announced:{NOW}:{NONCE}"
    if stored is not None:
        assert store.swap(_record(**{"fingerprint": "f" * 64, "lease_until": clock.now() + 1000, **stored}), None)
    operation = _told({"the truth": revision, "a lie": f"announced:{NOW}:{'f' * 32}", "nothing": ""}[told])
    plain = MemoryStore(clock.now)
    for record in store.scan():
        plain.swap(record, None)

    found, expected = claim(store, operation), claim(plain, OPERATION)

    assert type(found) is type(expected)
    nonces = {"revision": "", "owner": "", "process": ""}
    assert found.record.but(**nonces) == expected.record.but(**nonces)


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
