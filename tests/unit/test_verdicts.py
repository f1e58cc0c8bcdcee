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

CH_1 = Encoded('"ch_1"', "application/json")
GRACE = 1_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock.now)


def _stored(store: MemoryStore, **changes: Any) -> Record:
    record = replace(a_record(), fencing_token=store.now(), lease_until=0, **changes)
    store.swap(record, None)
    return record


def test_a_verdict_is_kept_with_what_it_judged(store: MemoryStore, clock: FakeClock) -> None:
    """The record says who decided what, why and when, of which status and error; the outcome itself has no error."""
    seen = _stored(store, status=Status.UNKNOWN, error="attempt 1 never ended", attempts=1)
    clock.advance(5)

    judged = judge(store, seen.key, Action.COMPLETED, result=CH_1, retain=9_000, by="ann", reason="provider: ch_1")

    assert (judged.status, judged.error, judged.result) == (Status.COMPLETED, None, '"ch_1"')
    assert judged.verdict == {
        "action": "completed",
        "by": "ann",
        "reason": "provider: ch_1",
        "at": clock.now(),
        "status": "UNKNOWN",
        "attempt": 1,
        "error": "attempt 1 never ended",
    }


def test_a_release_and_a_rerun_say_who_and_why(store: MemoryStore) -> None:
    """Both lead to the same status, and only the verdict tells them apart."""
    unknown, abandoned = _stored(store, status=Status.UNKNOWN, error="?"), _stored(store)

    rerun = judge(store, unknown.key, Action.RERUN, by="ann", reason="not there: \udcff")
    released = judge(store, abandoned.key, Action.RELEASE, grace=0, by="bob", reason="worker is gone")

    assert [(each.status, each.verdict["action"], each.verdict["by"]) for each in (rerun, released)] == [
        (Status.RELEASED, "rerun", "ann"),
        (Status.RELEASED, "release", "bob"),
    ]
    assert rerun.verdict["reason"] == "not there: \\udcff"


def test_verdicts_outlive_the_next_attempt_and_its_outcome(store: MemoryStore) -> None:
    """Whoever asks later why an operation ran twice finds the verdict in its record."""
    seen = _stored(store, status=Status.UNKNOWN, error="?")
    judge(store, seen.key, Action.RERUN, by="ann", reason="not there")
    operation = Operation(
        identity=Identity(seen.key, seen.fingerprint), policy=Policy(), task="t", task_id="i", worker="w"
    )

    decision = decide(store.get(seen.key), operation, store.now(), owner="o", revision="r")

    assert isinstance(decision, Run)
    assert decision.record.verdict["by"] == "ann"


YEAR = 365 * 86_400_000


def _delivered(store: MemoryStore, seen: Record, retain: int) -> Record:
    """The record after the next delivery, which runs the body."""
    operation = Operation(
        identity=Identity(seen.key, seen.fingerprint), policy=Policy(), task="t", task_id="i", worker="w"
    )
    decision = decide(store.get(seen.key), operation, store.now(), owner="o", revision=new_nonce())
    assert isinstance(decision, Run)
    done = ended(decision.record, Status.COMPLETED, store.now(), retain, new_nonce())
    assert store.swap(decision.record, decision.expected) == decision.record
    assert store.swap(done, decision.record.revision) == done
    return done


@pytest.mark.parametrize("action", [Action.COMPLETED, Action.RERUN, Action.RELEASE])
def test_a_judged_record_proves_it_for_a_year_and_its_outcome_counts_for_retain(
    store: MemoryStore, clock: FakeClock, action: Action
) -> None:
    """Whoever asks after ``retain`` finds who has decided; a key that is used again runs again, and keeps it."""
    seen = _stored(store, status=Status.IN_PROGRESS if action is Action.RELEASE else Status.UNKNOWN)
    told: dict[str, Any] = {"keep": YEAR, "by": "ann", "reason": "asked"}
    judged_at = clock.now()
    match action:
        case Action.COMPLETED:
            outcome = judge(store, seen.key, Action.COMPLETED, result=CH_1, retain=9_000, **told)
        case Action.RERUN:
            judge(store, seen.key, Action.RERUN, **told)
            outcome = _delivered(store, seen, 9_000)
        case _:
            judge(store, seen.key, Action.RELEASE, grace=0, **told)
            outcome = _delivered(store, seen, 9_000)

    for _ in range(2):
        assert not is_forgotten(outcome, clock.now() + 8_999)
        assert is_forgotten(outcome, clock.now() + 9_000)
        assert outcome.expires_at is not None
        assert outcome.expires_at * 1000 >= judged_at + YEAR
        assert outcome.verdict["by"] == "ann"
        clock.advance(10_000)
        outcome = _delivered(store, seen, 9_000)

    clock.advance(YEAR)
    last = _delivered(store, seen, 9_000)
    assert last.verdict == {}
    assert last.expires_at == (clock.now() + 9_999) // 1000


def test_an_outcome_may_count_for_longer_than_the_proof_of_an_earlier_verdict(
    store: MemoryStore, clock: FakeClock
) -> None:
    """The end of the outcome that was judged is not that of the next."""
    seen = _stored(store, status=Status.UNKNOWN)
    judge(store, seen.key, Action.COMPLETED, result=CH_1, retain=0, keep=YEAR)
    clock.advance(1)

    outcome = _delivered(store, seen, 2 * YEAR)

    assert not is_forgotten(outcome, clock.now() + 2 * YEAR - 1)


def test_a_publisher_keeps_the_proof_of_a_verdict_on_an_outcome_that_no_longer_counts(store: MemoryStore) -> None:
    """By ``publish="once"`` its record comes before the next claim."""
    seen = _stored(store, status=Status.UNKNOWN)
    judged = judge(store, seen.key, Action.COMPLETED, result=CH_1, retain=0, keep=YEAR, by="ann")
    operation = Operation(identity=Identity(seen.key, None), policy=Policy(), task="t", task_id="i", worker="w")

    found = publication(judged, Outgoing(operation=operation, queued_for=1), store.now(), "r")

    assert isinstance(found, Announce)
    assert found.record.verdict["by"] == "ann"


def test_a_purge_leaves_what_proves_a_verdict(store: MemoryStore, clock: FakeClock) -> None:
    """Given back, or begun again and never ended."""
    released, begun = (_stored(store, status=Status.UNKNOWN, app="shop") for _ in range(2))
    for each in (released, begun):
        judge(store, each.key, Action.RERUN, keep=YEAR, by="ann")
    at = store.get(begun.key)
    assert at is not None
    store.swap(replace(at, status=Status.IN_PROGRESS, revision="begun"), at.revision)
    clock.advance(86_400_000)

    def purged() -> int:
        abandoned = sweep_abandoned(store, lambda _: Policy(), age=1)
        return len([*sweep_released(store, age=1), *abandoned])

    assert purged() == 0
    clock.advance(YEAR)
    assert purged() == 2


@pytest.mark.parametrize("until", ["?", None, 10**30, -1])
def test_whatever_stands_in_a_verdict_no_outcome_counts_for_longer_than_its_record(until: object) -> None:
    """Who can write the store may end an outcome, and not make one last."""
    record = replace(
        a_record(), status=Status.COMPLETED, expires_at=5, verdict={"kept_until": until, "counts_until": until}
    )

    assert is_forgotten(record, 5_000)
    assert isinstance(kept_until(record), int)


@pytest.mark.parametrize("until", [10**30, 2**63, 2**63 - 1])
def test_no_verdict_gives_an_outcome_a_time_that_no_store_holds(until: int) -> None:
    """Or it could not be recorded after its effect, and the effect would come again."""
    record = ended(replace(a_record(), verdict={"kept_until": until}), Status.COMPLETED, 1_000, 5_000, "r")

    assert record.expires_at == 6


def test_the_proof_of_a_verdict_outlasts_a_purge_in_memory_too(store: MemoryStore, clock: FakeClock) -> None:
    """As in every store: what says when a record goes is its ``expires_at``."""
    seen = _stored(store, status=Status.UNKNOWN)
    judge(store, seen.key, Action.COMPLETED, result=CH_1, retain=0, keep=YEAR, by="ann")
    clock.advance(1)

    assert store.purge(10) == 0
    clock.advance(YEAR + 1_000)
    assert store.purge(10) == 1


def test_long_names_and_reasons_are_cut() -> None:
    """They stand in every later write of the record."""
    told = given(Action.FORGET, a_record(), 1, by="n" * 300, reason="r" * 3000)

    assert (len(told["by"]), len(told["reason"])) == (255, 2000)


def test_names_and_reasons_that_no_store_can_keep_are_kept_as_their_escapes() -> None:
    """A verdict that is refused for its text would be taken for an outage."""
    told = given(Action.FORGET, a_record(), 1, by="an\0n", reason="\ud83d")

    assert (told["by"], told["reason"]) == (r"an\x00n", r"\ud83d")


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.RELEASED])
def test_forgetting_leaves_a_larger_token_to_come_and_who_did_it(store: MemoryStore, status: Status) -> None:
    """The next delivery is a new operation; nothing of the old call is left, in the texts of verdicts either."""
    seen = _stored(
        store,
        status=status,
        error="secret",
        result="secret",
        steps={"secret": {}},
        attempts=7,
        trace="secret",
        process="secret",
    )
    seen = replace(seen, verdict={"action": "rerun", "error": "secret"})
    store._records[seen.key] = seen
    operation = Operation(
        identity=Identity(seen.key, "of other arguments"), policy=Policy(), task="t", task_id="i", worker="w"
    )

    left = judge(store, seen.key, Action.FORGET, by="ann", reason="asked to")
    decision = decide(left, operation, store.now(), owner="o", revision="r")

    assert is_erased(left)
    assert is_forgotten(left, store.now())
    assert "secret" not in str(left)
    assert seen.label not in str(left)
    assert seen.task_id not in str(left)
    assert (left.verdict["action"], left.verdict["by"], left.verdict["reason"]) == ("forget", "ann", "asked to")
    assert isinstance(decision, Run)
    assert (decision.record.fencing_token, decision.record.attempts) == (seen.fencing_token + 1, 1)
    assert decision.record.verdict == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": Status.UNKNOWN}, "then resolve it"),
        ({"status": Status.IN_PROGRESS}, "an attempt owns it"),
    ],
)
def test_what_may_still_run_or_is_in_doubt_is_not_forgotten(
    store: MemoryStore, changes: dict[str, Any], reason: str
) -> None:
    """Forgotten, it would run again beside itself, or after an effect that nobody has looked for."""
    seen = _stored(store, **changes)

    with pytest.raises(PolicyError, match=reason):
        judge(store, seen.key, Action.FORGET)

    assert store.get(seen.key) == seen


def test_a_token_ahead_of_the_clock_is_not_forgotten(store: MemoryStore, clock: FakeClock) -> None:
    """A store may delete what is forgotten at once, and the next token is then the time of its claim."""
    seen = _stored(store, status=Status.COMPLETED)
    clock.advance(-1)

    with pytest.raises(PolicyError, match="1 ms ahead of the store's clock"):
        judge(store, seen.key, Action.FORGET)

    clock.advance(1)
    assert judge(store, seen.key, Action.FORGET)
