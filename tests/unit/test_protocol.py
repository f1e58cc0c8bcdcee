"""The decision table and the settlement table, row by row."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import (
    Decision,
    Ending,
    GiveUp,
    Lost,
    Mismatch,
    Operation,
    Rebase,
    Replay,
    ReplayFailure,
    Run,
    Superseded,
    Unknown,
    Vanished,
    Wait,
    Written,
    abandoned,
    decide,
    ended,
    ending,
    forgotten,
    given_up,
    is_forgotten,
    released,
    renewed,
    settle,
)
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.testing.contract import a_record

NOW = 1_800_000_100_000

OPERATION = Operation(
    identity=Identity("k", "f" * 64),
    policy=Policy(),
    task="orders.charge",
    task_id="id",
    worker="here",
    app="shop",
)
GRACE = OPERATION.grace


def _decide(record: Record | None, now: int = NOW, fingerprint: str | None = "f" * 64, **policy: Any) -> Decision:
    operation = replace(OPERATION, identity=Identity("k", fingerprint), policy=Policy(**policy))
    return decide(record, operation, now, owner="me", revision="new")


def _record(**changes: object) -> Record:
    return replace(a_record(), key="k", **changes)  # type: ignore[arg-type]


def test_absent_record_runs() -> None:
    """The first delivery of a key claims it with a token from the store's clock."""
    decision = _decide(None)

    assert isinstance(decision, Run)
    assert decision.expected is None
    assert decision.record == Record(
        key="k",
        status=Status.IN_PROGRESS,
        revision="new",
        owner="me",
        fencing_token=NOW,
        lease_until=NOW + 60_000,
        fingerprint="f" * 64,
        attempts=1,
        created_at=NOW,
        updated_at=NOW,
        task="orders.charge",
        task_id="id",
        worker="here",
        app="shop",
    )


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
def test_forgotten_outcome_runs_as_a_new_operation(status: Status) -> None:
    """Past its retention an outcome counts as absent, even if still stored; only the token goes on growing."""
    seen = _record(status=status, expires_at=NOW // 1000, fencing_token=NOW + 5, attempts=7, fingerprint="other")

    decision = _decide(seen)

    assert isinstance(decision, Run)
    assert decision.expected == seen.revision
    assert (decision.record.attempts, decision.record.fencing_token) == (1, NOW + 6)
    assert decision.record.created_at == NOW
    assert decision.record.takeovers == 0


@pytest.mark.parametrize("early", [1, 1000])
def test_outcome_counts_until_its_very_last_millisecond(early: int) -> None:
    """A retained outcome is replayed up to its expiry, not a moment less."""
    seen = _record(status=Status.COMPLETED, expires_at=NOW // 1000 + 1)

    assert _decide(seen, NOW // 1000 * 1000 + 1000 - early) == Replay(seen)
    assert not is_forgotten(seen, NOW // 1000 * 1000 + 1000 - early)
    assert is_forgotten(seen, NOW // 1000 * 1000 + 1000)


@pytest.mark.parametrize("steps", [{}, {"text": {"begun_at": 1, "attempt": 1}}])
@pytest.mark.parametrize("status", list(Status))
def test_arguments_bind_from_the_first_step_or_outcome_on_and_while_a_body_may_run(
    status: Status, steps: dict[str, Any]
) -> None:
    """Then the key with others is an error; only what was given back without a step had no effect that is recorded."""
    seen = _record(status=status, fingerprint="another", steps=steps, attempts=3, label="old card")
    decision = _decide(seen)

    if status is not Status.RELEASED or steps:
        assert decision == Mismatch(seen)
        return
    assert isinstance(decision, Run)
    claimed = decision.record
    assert (claimed.fingerprint, claimed.label, claimed.attempts) == ("f" * 64, "", 4)
    assert (claimed.created_at, claimed.verdict) == (seen.created_at, seen.verdict)
    assert claimed.fencing_token > seen.fencing_token
    assert _decide(replace(claimed, fingerprint="another")) == Mismatch(replace(claimed, fingerprint="another"))


@pytest.mark.parametrize(("stored", "asked"), [(None, "f"), ("f", None), (None, None)])
def test_absent_fingerprint_compares_with_nothing(stored: str | None, asked: str | None) -> None:
    """Where one side declares no arguments there is nothing to compare."""
    seen = _record(status=Status.COMPLETED, fingerprint=stored)

    assert _decide(seen, fingerprint=asked) == Replay(seen)


def test_final_states_answer() -> None:
    """Every final state has its one answer."""
    assert isinstance(_decide(_record(status=Status.COMPLETED)), Replay)
    assert isinstance(_decide(_record(status=Status.FAILED)), ReplayFailure)
    assert isinstance(_decide(_record(status=Status.UNKNOWN)), Unknown)


@pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
def test_released_runs_again_and_keeps_its_steps(on_takeover: str) -> None:
    """A released operation runs at once, with the next token, its steps and its age."""
    seen = _record(
        status=Status.RELEASED,
        fencing_token=NOW + 9,
        attempts=2,
        takeovers=2,
        steps={"charge": 1},
        lease_until=NOW * 2,
    )

    decision = _decide(seen, on_takeover=on_takeover)

    assert isinstance(decision, Run)
    assert decision.expected == seen.revision
    assert decision.record.fencing_token == NOW + 10
    assert decision.record.attempts == 3
    assert decision.record.steps == {"charge": 1}
    assert decision.record.created_at == seen.created_at
    assert decision.record.takeovers == 0


@pytest.mark.parametrize("left", [1, 59_999, 61_000])
def test_running_lease_conflicts(left: int) -> None:
    """Up to the last millisecond of lease and grace, others wait, and are told how long."""
    seen = _record(lease_until=NOW - GRACE + left)

    assert _decide(seen) == Wait(seen, left, NOW - seen.fencing_token)


@pytest.mark.parametrize("over", [0, 1, 10_000_000])
def test_lease_over_is_taken_over(over: int) -> None:
    """From the first millisecond after lease and grace another runs, and the record counts the takeover."""
    seen = _record(lease_until=NOW - GRACE - over, steps={"charge": 1}, takeovers=2)

    decision = _decide(seen)

    assert isinstance(decision, Run)
    assert decision.expected == seen.revision
    assert decision.record.takeovers == 3
    assert decision.record.owner == "me"
    assert decision.record.fencing_token > seen.fencing_token
    assert decision.record.attempts == 2
    assert decision.record.steps == {"charge": 1}


def test_lease_over_is_given_up_under_refuse() -> None:
    """What must not be repeated becomes UNKNOWN, keeps its owner and never expires."""
    seen = _record(lease_until=0)

    decision = _decide(seen, on_takeover="refuse")

    assert isinstance(decision, GiveUp)
    assert decision.expected == seen.revision
    assert decision.record.status is Status.UNKNOWN
    assert decision.record.owner == seen.owner
    assert decision.record.expires_at is None
    assert decision.record.error


def test_claim_in_the_future_has_run_for_no_time() -> None:
    """The store's clock went back since; a duplicate must not wait for less than nothing."""
    seen = _record(lease_until=NOW + 1, fencing_token=NOW + 5)

    assert _decide(seen) == Wait(seen, GRACE + 1, 0)


def test_first_token_is_greater_than_that_of_no_claim() -> None:
    """Even where the store's clock stands at 0, which is the token of what a publisher has recorded."""
    decision = _decide(None, now=0)

    assert isinstance(decision, Run)
    assert decision.record.fencing_token == 1


def test_abandoned_claim_is_taken_over_without_grace() -> None:
    """Nobody waits for a process that is certainly gone; it counts as a takeover all the same."""
    decision = _decide(abandoned(_record(lease_until=NOW + 60_000), NOW, "ended"))

    assert isinstance(decision, Run)
    assert (decision.expected, decision.record.takeovers) == ("ended", 1)


def test_token_grows_even_if_the_clock_goes_back() -> None:
    """A fencing token is never smaller than the one before, whatever the store's clock says."""
    seen = _record(status=Status.RELEASED, fencing_token=NOW * 2)

    decision = _decide(seen)

    assert isinstance(decision, Run)
    assert decision.record.fencing_token == NOW * 2 + 1


def test_only_outcomes_expire() -> None:
    """Renewed, released and given-up records have no expiry; completed and failed ones have, rounded up."""
    seen = _record()

    for record in (
        renewed(seen, NOW, 60_000, "r"),
        released(seen, NOW, "r"),
        given_up(seen, NOW, "r", "why"),
    ):
        assert record.expires_at is None
    for record in (
        ended(seen, Status.COMPLETED, 1_500, 1_000, "r", Encoded("1", "j")),
        ended(seen, Status.FAILED, 1_500, 1_000, "r", error="e"),
    ):
        assert record.expires_at == 3


def test_transitions_write_what_they_say() -> None:
    """Every transition has a new revision, the time of its write, and changes nothing else than its own fields."""
    seen = _record()

    assert renewed(seen, NOW, 60_000, "r") == replace(seen, revision="r", updated_at=NOW, lease_until=NOW + 60_000)
    assert released(seen, NOW, "r") == replace(
        seen, revision="r", updated_at=NOW, lease_until=NOW, status=Status.RELEASED
    )
    assert given_up(seen, NOW, "r", "why") == replace(
        seen, revision="r", updated_at=NOW, status=Status.UNKNOWN, error="why"
    )
    assert ended(seen, Status.COMPLETED, NOW, 1_000, "r", Encoded(b"1", "p")) == replace(
        seen,
        revision="r",
        updated_at=NOW,
        status=Status.COMPLETED,
        result=b"1",
        content_type="p",
        expires_at=NOW // 1000 + 1,
    )
    assert ended(seen, Status.FAILED, NOW, 1_000, "r", Encoded("{}", "j"), "boom") == replace(
        seen,
        revision="r",
        updated_at=NOW,
        status=Status.FAILED,
        result="{}",
        content_type="j",
        error="boom",
        expires_at=NOW // 1000 + 1,
    )


def test_settlement_of_a_write() -> None:
    """A write that did not win is still ours, ours on another base, forgotten, somebody's completion, or lost."""
    base = _record(owner="me", revision="r1")
    write = ended(base, Status.COMPLETED, NOW, 1_000, "r2", Encoded("1", "j"))
    late_renewal = renewed(base, NOW, 60_000, "r3")
    successor = _record(owner="other")

    assert settle(write, write) == Written()
    assert settle(write, None) == Vanished()
    assert settle(write, late_renewal) == Rebase(late_renewal)
    assert settle(write, successor) == Lost()
    assert settle(write, released(successor, NOW, "r5")) == Lost()
    assert settle(write, ended(successor, Status.FAILED, NOW, 1, "r6", error="e")) == Lost()
    theirs = ended(successor, Status.COMPLETED, NOW, 1, "r7", Encoded("2", "j"))
    assert settle(write, theirs) == Superseded(theirs)


@pytest.mark.parametrize(("mine", "stored"), [("f", "other"), ("f", None), (None, "f")])
def test_completion_of_other_arguments_is_nobodys_result_but_theirs(mine: str | None, stored: str | None) -> None:
    """Also where only one side tells which they are: a delivery that asks again is answered by the decision table."""
    write = ended(_record(owner="me", fingerprint=mine), Status.COMPLETED, NOW, 1_000, "r2", Encoded("1", "j"))
    theirs = ended(_record(owner="other", fingerprint=stored), Status.COMPLETED, NOW, 1, "r7", Encoded("999", "j"))

    assert settle(write, theirs) == Lost()
    assert settle(write, replace(theirs, fingerprint=mine)) == Superseded(replace(theirs, fingerprint=mine))


@pytest.mark.parametrize("fingerprint", ["f", None])
def test_what_was_forgotten_on_purpose_is_no_result_for_an_attempt_that_comes_late(fingerprint: str | None) -> None:
    """The mark is COMPLETED, and counts as absent."""
    write = ended(_record(owner="me", fingerprint=fingerprint), Status.COMPLETED, NOW, 1_000, "r2", Encoded("1", "j"))
    theirs = ended(_record(owner="other", fingerprint=fingerprint), Status.COMPLETED, NOW, 1, "r7", Encoded("2", "j"))

    assert settle(write, forgotten(theirs, NOW, "r8")) == Lost()


def test_owner_of_an_unknown_record_may_still_complete_it() -> None:
    """Nobody else can have run since; a mere renewal, and an attempt that owns it no more, cannot leave UNKNOWN."""
    base = _record(owner="me", revision="r1")
    unknown = given_up(base, NOW, "r4", "refused")

    for outcome in (
        ended(base, Status.COMPLETED, NOW, 1_000, "r2", Encoded("1", "j")),
        ended(base, Status.FAILED, NOW, 1_000, "r2", error="e"),
    ):
        assert settle(outcome, unknown) == Rebase(unknown)
        assert settle(replace(outcome, owner="other"), unknown) == Lost()
    assert settle(renewed(base, NOW, 60_000, "r3"), unknown) == Lost()
    assert settle(released(base, NOW, "r5"), unknown) == Lost()


class _Remembered(ExceptionGroup[Exception]):
    """A type of group that is an outcome as a whole."""


def _group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("", errors)


@pytest.mark.parametrize(
    ("error", "rerun", "refuse"),
    [
        (KeyboardInterrupt(), Ending.RELEASE, Ending.GIVE_UP),
        (SystemExit(1), Ending.RELEASE, Ending.GIVE_UP),
        (ValueError(), Ending.RELEASE, Ending.FAIL),
        (LookupError(), Ending.FAIL, Ending.FAIL),
        (KeyError(), Ending.FAIL, Ending.FAIL),
        (InterruptedError(), Ending.RELEASE, Ending.RELEASE),
        (TimeoutError(), Ending.RELEASE, Ending.GIVE_UP),
        (UnicodeError(), Ending.RELEASE, Ending.GIVE_UP),
        # Of a group what an author states must hold for all members; for doubt one is enough.
        (_group(InterruptedError()), Ending.RELEASE, Ending.RELEASE),
        (_group(InterruptedError(), _group(InterruptedError())), Ending.RELEASE, Ending.RELEASE),
        (_group(InterruptedError(), ValueError()), Ending.RELEASE, Ending.FAIL),
        (_group(LookupError(), _group(KeyError())), Ending.FAIL, Ending.FAIL),
        (_group(LookupError(), ValueError()), Ending.RELEASE, Ending.FAIL),
        (_group(LookupError(), InterruptedError()), Ending.RELEASE, Ending.FAIL),
        (_group(LookupError(), _group(TimeoutError())), Ending.RELEASE, Ending.GIVE_UP),
        (_group(InterruptedError(), UnicodeError()), Ending.RELEASE, Ending.GIVE_UP),
        (_group(ValueError(), SystemExit()), Ending.RELEASE, Ending.GIVE_UP),
        (_Remembered("", [ValueError()]), Ending.FAIL, Ending.FAIL),
        (_Remembered("", [TimeoutError()]), Ending.RELEASE, Ending.GIVE_UP),
    ],
)
def test_ending_of_a_body_that_raised(error: BaseException, rerun: Ending, refuse: Ending) -> None:
    """Under refuse nothing that may have begun is released; under rerun only declared outcomes are kept."""
    for on_takeover, expected in (("rerun", rerun), ("refuse", refuse)):
        assert (
            ending(
                error,
                on_takeover=on_takeover,  # type: ignore[arg-type]
                remember=(LookupError, UnicodeError, _Remembered),
                nothing_begun=(InterruptedError,),
                no_outcome=(TimeoutError, UnicodeError),
            )
            is expected
        )
