"""The tables of the protocol, row by row: decisions, transitions, settlements, endings, and what follows of a step."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.protocol import operation as op
from celery_idempotent.protocol import steps
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.effects import OnTakeover
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Ending
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import BLANK, Record, Status, bounded
from celery_idempotent.protocol.steps import Begin, Begun, Call, Doubt, Finished, Recall, from_plain
from celery_idempotent.testing.contract import a_record

NOW, GRACE, LEASE = 1_800_000_100_000, 1_000, 60_000
F, ANOTHER = "f" * 64, "another"
STEPS = {"charge": {"begun_at": 1, "attempt": 1}}


def _decide(record: Record | None, now: int = NOW, fingerprint: str | None = F, **policy: Any) -> op.Decision:
    names: Any = {"task": "orders.charge", "task_id": "id", "worker": "here", "app": "shop"}
    operation = op.Operation(identity=Identity("k", fingerprint, "label"), policy=Policy(**policy), **names)
    return op.decide(record, operation, now, owner="me", revision="new")


def _record(**changes: Any) -> Record:
    return replace(a_record(), **{"key": "k", "fingerprint": F, **changes})


def test_absent_record_is_claimed_with_a_token_from_the_stores_clock() -> None:
    """The first token is greater than that of no claim, also where the clock stands at 0."""
    times = {"fencing_token": NOW, "lease_until": NOW + LEASE, "created_at": NOW, "updated_at": NOW}
    names = {"task": "orders.charge", "task_id": "id", "worker": "here", "app": "shop", "label": "label"}
    claimed = BLANK.but(
        key="k", status=Status.IN_PROGRESS, revision="new", owner="me", fingerprint=F, attempts=1, **times, **names
    )
    assert _decide(None) == op.Run(claimed, None)
    first = _decide(None, now=0)
    assert isinstance(first, op.Run)
    assert first.record.fencing_token == 1


def test_names_for_people_are_bounded() -> None:
    """A publisher may choose a task id of any length; two long ones stay different."""
    long = "i" * 390_000
    names: dict[str, Any] = dict.fromkeys(("task", "task_id", "worker", "app", "process"), long)
    operation = op.Operation(identity=Identity("k", None), policy=Policy(), **names)
    claimed = op.decide(None, operation, NOW, owner="me", revision="new")
    assert isinstance(claimed, op.Run)
    kept = [getattr(claimed.record, name) for name in names]
    assert kept[:4] == [bounded(long)] * 4
    assert [len(each) for each in kept] == [255] * 5
    assert bounded(long) != bounded(long + "i")


@pytest.mark.parametrize(
    ("changes", "policy", "decision"),
    [
        ({"status": Status.COMPLETED}, {}, op.Replay),
        ({"status": Status.FAILED}, {}, op.ReplayFailure),
        ({"status": Status.UNKNOWN}, {}, op.Unknown),
        ({"status": Status.RELEASED, "lease_until": 2 * NOW}, {"on_takeover": "refuse"}, op.Run),
        ({"status": Status.COMPLETED, "expires_at": NOW // 1000}, {}, op.Run),
        ({"status": Status.COMPLETED, "expires_at": NOW // 1000 + 1}, {}, op.Replay),
        ({"status": Status.FAILED, "expires_at": NOW // 1000}, {}, op.Run),
        ({"lease_until": NOW - GRACE + 1}, {}, op.Wait),
        ({"lease_until": NOW - GRACE}, {}, op.Run),
        ({"lease_until": 0, "takeovers": 2}, {"max_takeovers": 3}, op.Run),
        ({"lease_until": 0, "takeovers": 3}, {"max_takeovers": 3}, op.GiveUp),
        # Arguments bind from the first step or outcome on, and while a body may run.
        ({"status": Status.COMPLETED, "fingerprint": ANOTHER}, {}, op.Mismatch),
        ({"status": Status.UNKNOWN, "fingerprint": ANOTHER}, {}, op.Mismatch),
        ({"lease_until": 0, "fingerprint": ANOTHER}, {}, op.Mismatch),
        ({"status": Status.RELEASED, "fingerprint": ANOTHER, "steps": STEPS}, {}, op.Mismatch),
        ({"status": Status.COMPLETED, "fingerprint": ANOTHER, "expires_at": NOW // 1000}, {}, op.Run),
        # Where one side declares no arguments there is nothing to compare.
        ({"status": Status.COMPLETED, "fingerprint": None}, {}, op.Replay),
        ({"status": Status.COMPLETED}, {"fingerprint": None}, op.Replay),
    ],
)
def test_decision(changes: dict[str, Any], policy: dict[str, Any], decision: type) -> None:
    """What a delivery does about the record that it met; whoever writes expects what it has seen."""
    seen = _record(**changes)
    decided = _decide(seen, **policy)
    assert type(decided) is decision
    if isinstance(decided, op.Run | op.GiveUp):
        assert decided.expected == seen.revision
    else:
        assert decided.record is seen


@pytest.mark.parametrize(
    ("changes", "fingerprint", "claimed"),
    [
        # what was recorded, who asks, and of its claim: attempts, takeovers, steps, label, whether it is as old
        ({"lease_until": 0, "takeovers": 2}, F, (5, 3, STEPS, "old", True)),
        ({"status": Status.RELEASED, "takeovers": 2}, F, (5, 0, STEPS, "old", True)),
        ({"status": Status.RELEASED, "steps": {}}, ANOTHER, (5, 0, {}, "label", True)),
        ({"status": Status.COMPLETED, "expires_at": 1}, F, (1, 0, {}, "label", False)),
    ],
)
@pytest.mark.parametrize("token", [1, NOW, 2 * NOW])
def test_claim_of_what_was_recorded(changes: dict[str, Any], fingerprint: str, claimed: Any, token: int) -> None:
    """The token grows, even if the clock goes back; a new operation goes on with nothing else."""
    seen = _record(**{"attempts": 4, "steps": STEPS, "label": "old", "fencing_token": token, **changes})
    decided = _decide(seen, fingerprint=fingerprint)
    assert isinstance(decided, op.Run)
    new = decided.record
    assert (new.attempts, new.takeovers, new.steps, new.label, new.created_at == seen.created_at) == claimed
    assert (new.owner, new.fingerprint, new.fencing_token) == ("me", fingerprint, max(NOW, token + 1))


def test_conflict_tells_how_long_to_wait_and_how_long_the_body_has_run() -> None:
    """For no time, where the store's clock went back since the claim."""
    for token, ran in ((NOW - 7, 7), (NOW + 5, 0)):
        seen = _record(lease_until=NOW + 1, fencing_token=token)
        assert _decide(seen) == op.Wait(seen, GRACE + 1, ran)


@pytest.mark.parametrize(("takeovers", "named"), [(0, "attempt 7 on w ended"), (2, "3 attempts .* number 7, on w")])
def test_given_up_operation_says_which_attempts_never_ended(takeovers: int, named: str) -> None:
    """It keeps its owner and never expires."""
    seen = _record(lease_until=0, takeovers=takeovers, attempts=7, worker="w")
    decided = _decide(seen, on_takeover="refuse")
    assert isinstance(decided, op.GiveUp)
    assert decided.record == op.given_up(seen, NOW, "new", str(decided.record.error))
    assert re.match(named, str(decided.record.error))


def test_abandoned_claim_is_taken_over_without_grace() -> None:
    """Nobody waits for a process that is certainly gone; it counts as a takeover all the same."""
    decided = _decide(op.abandoned(_record(lease_until=NOW + LEASE), NOW, "ended"))
    assert isinstance(decided, op.Run)
    assert (decided.expected, decided.record.takeovers) == ("ended", 1)


SEEN, R = _record(steps=STEPS), "r"
EXTENDED: dict[str, Any] = {"lease_until": NOW + LEASE}
ENDED: dict[str, Any] = {"status": Status.COMPLETED, "steps": {}}
KEPT = {"result": b"1", "content_type": "p", "expires_at": NOW // 1000 + 2}


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        (lambda: op.renewed(SEEN, NOW, LEASE, R), EXTENDED),
        (lambda: op.checkpointed(SEEN, NOW, LEASE, R, step="b", state={}), {**EXTENDED, "steps": {**STEPS, "b": {}}}),
        (lambda: op.checkpointed(SEEN, NOW, LEASE, R, step="charge", state=None), {**EXTENDED, "steps": {}}),
        (lambda: op.abandoned(SEEN, NOW, R), {"lease_until": 0}),
        (lambda: op.released(SEEN, NOW, R), {"lease_until": NOW, "status": Status.RELEASED}),
        (lambda: op.given_up(SEEN, NOW, R, "why"), {"status": Status.UNKNOWN, "error": "why"}),
        (lambda: op.ended(SEEN, Status.COMPLETED, NOW, 1_001, R, Encoded(b"1", "p")), {**ENDED, **KEPT}),
        (
            lambda: op.ended(SEEN, Status.FAILED, NOW, 1_000, R, None, "boom"),
            {**ENDED, "status": Status.FAILED, "error": "boom", "expires_at": NOW // 1000 + 1},
        ),
        # What is retained for no time has stopped to count, whatever another machine's clock says.
        (lambda: op.ended(SEEN, Status.COMPLETED, NOW, 0, R), {**ENDED, "expires_at": NOW // 1000 - 60}),
    ],
)
def test_transition(new: Any, changes: dict[str, Any]) -> None:
    """Every transition has a new revision, the time of its write, and changes nothing else than its own fields."""
    assert new() == replace(SEEN, **{"revision": R, "updated_at": NOW, **changes})


@pytest.mark.parametrize(("now", "is_over"), [(4_999, False), (5_000, True)])
def test_outcome_counts_until_its_very_last_millisecond(now: int, is_over: bool) -> None:
    """Physically present or not."""
    assert op.is_forgotten(_record(status=Status.COMPLETED, expires_at=5), now) is is_over


MINE, THEIRS = _record(owner="me", revision="r1"), _record(owner="other")


def _done(record: Record, status: Status = Status.COMPLETED, revision: str = "r2") -> Record:
    return op.ended(record, status, NOW, 1_000, revision, Encoded("1", "j"))


_UNKNOWN = op.given_up(MINE, NOW, "r4", "refused")
FORGOTTEN = op.forgotten(_done(THEIRS), NOW, "r8")
_OF_OTHERS = THEIRS.but(fingerprint=ANOTHER)


@pytest.mark.parametrize(
    ("write", "stored", "settlement"),
    [
        (_done(MINE), _done(MINE), op.Written()),
        (_done(MINE), None, op.Vanished()),
        (_done(MINE), op.renewed(MINE, NOW, LEASE, "r3"), op.Rebase(op.renewed(MINE, NOW, LEASE, "r3"))),
        (_done(MINE), _done(MINE, revision="r9"), op.Superseded(_done(MINE, revision="r9"))),
        (_done(MINE), THEIRS, op.Lost()),
        (_done(MINE), op.released(THEIRS, NOW, "r5"), op.Lost()),
        (_done(MINE), op.released(MINE, NOW, "r5"), op.Lost()),
        (_done(MINE), _done(THEIRS, Status.FAILED), op.Written()),
        (_done(MINE), _done(THEIRS, Status.FAILED, "r6"), op.Lost()),
        (_done(MINE), _done(THEIRS, revision="r7"), op.Superseded(_done(THEIRS, revision="r7"))),
        # The key may have come to a call with other arguments since; who cannot tell asks again, as a delivery.
        (_done(MINE), _done(_OF_OTHERS, revision="r7"), op.Lost()),
        (_done(MINE.but(fingerprint=None)), _done(THEIRS, revision="r7"), op.Lost()),
        (_done(MINE), _done(THEIRS.but(fingerprint=None), revision="r7"), op.Lost()),
        # What was forgotten on purpose is no result for an attempt that comes late, though its mark is COMPLETED.
        (_done(MINE), FORGOTTEN, op.Lost()),
        (_done(MINE.but(fingerprint=None)), FORGOTTEN, op.Lost()),
        # Nobody can have run since it became UNKNOWN: its owner's outcome is what a person would look for.
        (_done(MINE), _UNKNOWN, op.Rebase(_UNKNOWN)),
        (_done(MINE, Status.FAILED), _UNKNOWN, op.Rebase(_UNKNOWN)),
        (_done(THEIRS), _UNKNOWN, op.Lost()),
        (op.renewed(MINE, NOW, LEASE, "r3"), _UNKNOWN, op.Lost()),
        (op.released(MINE, NOW, "r5"), _UNKNOWN, op.Lost()),
    ],
)
def test_settlement(write: Record, stored: Record | None, settlement: object) -> None:
    """A write that did not win is still ours, ours on another base, forgotten, somebody's completion, or lost."""
    assert op.settle(write, stored) == settlement


class _Remembered(ExceptionGroup[Exception]):
    """A type of group that is an outcome as a whole."""


def _group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("", errors)


@pytest.mark.parametrize(
    ("error", "rerun", "refuse"),
    [
        (KeyboardInterrupt(), Ending.RELEASE, Ending.GIVE_UP),
        (ValueError(), Ending.RELEASE, Ending.FAIL),
        (LookupError(), Ending.FAIL, Ending.FAIL),
        (InterruptedError(), Ending.RELEASE, Ending.RELEASE),
        (TimeoutError(), Ending.RELEASE, Ending.GIVE_UP),
        (UnicodeError(), Ending.RELEASE, Ending.GIVE_UP),
        # Of a group what an author states must hold for all members; for doubt one is enough.
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
def test_ending_of_a_body_that_raised(error: BaseException, rerun: op.Ending, refuse: op.Ending) -> None:
    """Under refuse nothing that may have begun is released; under rerun only declared outcomes are kept."""
    given: Any = {"nothing_begun": (InterruptedError,), "no_outcome": (TimeoutError, UnicodeError)}
    given["remember"] = (LookupError, UnicodeError, _Remembered)
    assert [op.ending(error, on_takeover=each, **given) for each in ("rerun", "refuse")] == [rerun, refuse]


BEGUN, NO_END = Begun(at=1_000, attempt=2), "step 'mail' began in attempt 2 and did not end"
FINISHED = Finished(Encoded('"ch_1"', "application/json"))


@pytest.mark.parametrize(
    ("seen", "on_takeover", "window", "decision"),
    [
        (None, "rerun", None, Call()),
        (None, "rerun", 500, Call()),
        (None, "refuse", None, Begin()),
        (None, "refuse", 500, Begin()),
        (BEGUN, "rerun", None, Call()),
        (BEGUN, "refuse", None, Doubt(NO_END)),
        (BEGUN, "refuse", 1_001, Call()),
        (BEGUN, "refuse", 1_000, Doubt(f"{NO_END}, and its window of 1 s is over")),
        (FINISHED, "rerun", None, Recall(FINISHED)),
        (FINISHED, "refuse", None, Recall(FINISHED)),
        (FINISHED, "refuse", 1, Recall(FINISHED)),
    ],
)
def test_step(seen: Begun | Finished | None, on_takeover: OnTakeover, window: int | None, decision: object) -> None:
    """A finished step is never called again; one that began is called again only where that is safe or chosen."""
    assert steps.decide_step("mail", seen, terms=steps.Terms(on_takeover, window), now=2_000) == decision


@given(
    st.builds(Begun, st.integers(0), st.integers(1))
    | st.builds(Finished, st.builds(Encoded, st.text() | st.binary(), st.just("application/x")), st.none())
    | st.builds(Finished, st.none(), st.text())
)
def test_states_of_steps_round_trip_through_a_record(state: Begun | Finished) -> None:
    """Text and bytes alike; who says that a step had no effect lets only those that began run again."""
    plain = steps.to_plain(state)
    assert (from_plain(plain), from_plain(None)) == (state, None)
    assert steps.only_finished({"a": plain}) == ({} if isinstance(state, Begun) else {"a": plain})


@pytest.mark.parametrize("plain", [{}, {"begun_at": "soon", "attempt": 1}, {"text": "1"}, {"state": "new"}])
def test_foreign_state_of_a_step_is_refused(plain: dict[str, Any]) -> None:
    """A state of another shape is an error, not a step that may be called."""
    with pytest.raises(ValueError, match="not a state of a step"):
        from_plain(plain)
