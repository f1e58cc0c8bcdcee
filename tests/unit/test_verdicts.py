"""What a verdict leaves in the record, and what forgetting leaves of it."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent import PolicyError, Status
from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.engine.verdicts import sweep_abandoned, sweep_released
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, Run, decide, ended, is_forgotten
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.publishing import Announce, Outgoing, publication
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.verdicts import Action, given, is_erased, kept_until
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.contract import a_record
from tests.support.judging import judge

COMPLETED: dict[str, Any] = {"action": Action.COMPLETED, "result": Encoded('"ch_1"', "application/json")}
RERUN: dict[str, Any] = {"action": Action.RERUN}
YEAR = 365 * 86_400_000


def _stored(store: MemoryStore, **changes: Any) -> Record:
    given = {"fencing_token": store.now(), "lease_until": 0, "status": Status.UNKNOWN, **changes}
    record = replace(a_record(), **given)
    store.swap(record, None)
    return record


def _operation(seen: Record, fingerprint: str | None = None) -> Operation:
    identity = Identity(seen.key, fingerprint or seen.fingerprint)
    return Operation(identity=identity, policy=Policy(), task="t", task_id="i", worker="w")


def _delivered(store: MemoryStore, seen: Record, retain: int) -> Record:
    """The record after the next delivery, which runs the body."""
    decision = decide(store.get(seen.key), _operation(seen), store.now(), owner="o", revision=new_nonce())
    assert isinstance(decision, Run)
    done = ended(decision.record, Status.COMPLETED, store.now(), retain, new_nonce())
    assert store.swap(decision.record, decision.expected) == decision.record
    assert store.swap(done, decision.record.revision) == done
    return done


VERDICTS = [(Status.UNKNOWN, COMPLETED), (Status.UNKNOWN, RERUN), (Status.IN_PROGRESS, {"action": Action.RELEASE})]


@pytest.mark.parametrize(("seen", "verdict"), VERDICTS)
def test_a_verdict_is_kept_with_what_it_judged(store: Any, clock: Any, seen: Any, verdict: Any) -> None:
    """The record says who decided what, why and when, of which status and error; so does the next attempt's."""
    judged_at = clock.milliseconds + 5
    record = _stored(store, status=seen, error="attempt 7 never ended", attempts=7)
    clock.advance(5)
    judged = judge(store, record.key, **verdict, retain=9_000, by="ann", reason="not there: \udcff")
    expected = {"action": str(verdict["action"]), "by": "ann", "reason": "not there: \\udcff", "at": judged_at}
    assert judged.verdict == {**expected, "status": str(seen), "attempt": 7, "error": "attempt 7 never ended"}
    if verdict is COMPLETED:
        assert (judged.status, judged.error, judged.result) == (Status.COMPLETED, None, '"ch_1"')
    else:
        assert judged.status is Status.RELEASED
        decided = decide(judged, _operation(record), store.now(), owner="o", revision="r")
        assert isinstance(decided, Run)
        assert decided.record.verdict == judged.verdict


@pytest.mark.parametrize(("status", "verdict"), VERDICTS)
def test_a_judged_record_proves_it_for_a_year_and_its_outcome_counts_for_retain(
    store: MemoryStore, clock: FakeClock, status: Status, verdict: Any
) -> None:
    """Whoever asks after ``retain`` finds who has decided; a key that is used again runs again, and keeps it."""
    seen, judged_at = _stored(store, status=status), clock.now()
    outcome = judge(store, seen.key, **verdict, retain=9_000, keep=YEAR, by="ann")
    if verdict is not COMPLETED:
        outcome = _delivered(store, seen, 9_000)
    for _ in range(2):
        assert [is_forgotten(outcome, clock.now() + each) for each in (8_999, 9_000)] == [False, True]
        assert outcome.expires_at is not None
        assert outcome.expires_at * 1000 >= judged_at + YEAR
        assert outcome.verdict["by"] == "ann"
        clock.advance(10_000)
        outcome = _delivered(store, seen, 9_000)
    clock.advance(YEAR)
    last = _delivered(store, seen, 9_000)
    assert (last.verdict, last.expires_at) == ({}, (clock.now() + 9_999) // 1000)


def test_an_outcome_may_count_for_longer_than_the_proof_of_an_earlier_verdict(store: Any, clock: Any) -> None:
    """By ``publish="once"`` the proof is kept as well, in the record before the next claim."""
    seen = _stored(store)
    judged = judge(store, seen.key, **COMPLETED, retain=0, keep=YEAR, by="ann")
    found = publication(judged, Outgoing(operation=_operation(seen), queued_for=1), store.now(), "r")
    assert isinstance(found, Announce)
    assert found.record.verdict["by"] == "ann"
    clock.advance(1)
    assert not is_forgotten(_delivered(store, seen, 2 * YEAR), clock.now() + 2 * YEAR - 1)


def test_a_purge_leaves_what_proves_a_verdict(store: MemoryStore, clock: FakeClock) -> None:
    """Given back, begun again and never ended, or completed."""
    released, begun, completed = (_stored(store, app="shop") for _ in range(3))
    for each in (released, begun):
        judge(store, each.key, **RERUN, keep=YEAR, by="ann")
    judge(store, completed.key, **COMPLETED, retain=0, keep=YEAR, by="ann")
    at = store.get(begun.key)
    assert at is not None
    store.swap(replace(at, status=Status.IN_PROGRESS, revision="begun"), at.revision)

    def purged() -> int:
        abandoned = sweep_abandoned(store, lambda _: Policy(), age=1)
        return len([*sweep_released(store, age=1), *abandoned]) + store.purge(10)

    clock.advance(86_400_000)
    assert purged() == 0
    clock.advance(YEAR)
    assert purged() == 3


@pytest.mark.parametrize("until", ["?", None, 10**30, 2**63, 2**63 - 1, -1])
def test_no_verdict_makes_an_outcome_count_for_longer(until: object) -> None:
    """Who can write the store may end an outcome; a time that no store holds would keep it from being recorded."""
    verdict = {"kept_until": until, "counts_until": until}
    record = replace(a_record(), status=Status.COMPLETED, expires_at=5, verdict=verdict)
    assert is_forgotten(record, 5_000)
    assert kept_until(record) == (-1 if until == -1 else 0)
    assert ended(replace(a_record(), verdict=verdict), Status.COMPLETED, 1_000, 5_000, "r").expires_at == 6


@pytest.mark.parametrize(
    ("by", "reason", "kept"),
    [("n" * 300, "r" * 3000, ("n" * 255, "r" * 2000)), ("an\0n", "\ud83d", (r"an\x00n", r"\ud83d"))],
)
def test_names_and_reasons_are_kept_as_every_store_can(by: str, reason: str, kept: tuple[str, str]) -> None:
    """They stand in every later write; a verdict that is refused for its text would be taken for an outage."""
    told = given(Action.FORGET, a_record(), 1, by=by, reason=reason)
    assert (told["by"], told["reason"]) == kept


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.RELEASED])
def test_forgetting_leaves_a_larger_token_to_come_and_who_did_it(store: MemoryStore, status: Status) -> None:
    """The next delivery is a new operation; nothing of the old call is left, in the texts of verdicts either."""
    fields = dict.fromkeys(("error", "result", "trace", "process", "label", "task_id"), "secret")
    verdict = {"action": "rerun", "error": "secret"}
    seen = _stored(store, status=status, steps={"secret": {}}, attempts=7, verdict=verdict, **fields)
    left = judge(store, seen.key, Action.FORGET, by="ann", reason="asked to")
    assert (is_erased(left), is_forgotten(left, store.now()), "secret" in str(left)) == (True, True, False)
    assert (left.verdict["action"], left.verdict["by"], left.verdict["reason"]) == ("forget", "ann", "asked to")
    new = decide(left, _operation(seen, "of other arguments"), store.now(), owner="o", revision="r").record
    assert (new.fencing_token, new.attempts, new.verdict) == (seen.fencing_token + 1, 1, {})


@pytest.mark.parametrize(
    ("status", "behind", "reason"),
    [
        (Status.UNKNOWN, 0, "then resolve it"),
        (Status.IN_PROGRESS, 0, "an attempt owns it"),
        (Status.COMPLETED, 1, "1 ms ahead"),  # a store may delete it at once: the next token is the time of its claim
    ],
)
def test_what_may_still_run_or_is_in_doubt_is_not_forgotten(
    store: MemoryStore, clock: FakeClock, status: Status, behind: int, reason: str
) -> None:
    """It would run again beside itself, or after an effect that nobody has looked for, or with a smaller token."""
    seen = _stored(store, status=status)
    clock.advance(-behind)
    with pytest.raises(PolicyError, match=reason):
        judge(store, seen.key, Action.FORGET)
    assert store.get(seen.key) == seen
