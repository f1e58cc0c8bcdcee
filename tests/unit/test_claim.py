"""The claim: its lease, its renewals and its end, where another delivery, a clock or a signal comes between."""

import re
from collections.abc import Callable
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from celery_idempotent.engine.claim import Claim, claim, effect_key, new_nonce
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.errors import LeaseLost, StoreUnavailable
from celery_idempotent.protocol.codec import Encoded, Kept
from celery_idempotent.protocol.operation import Lost, Run, Superseded, Wait, Written
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished
from celery_idempotent.testing.contract import a_record
from tests.support.links import unlinked
from tests.support.scene import Scene, Swap, an_operation, raising

LEASE, RETAIN = 60_000, 600_000
ONE, TWO = Encoded("1", "application/json"), Encoded("2", "application/json")
UNSEEN = ("reply lost", "request lost")
"""A write that landed, of which nobody has heard."""

ENDS: list[Callable[[Claim], object]] = [
    lambda claim: claim.complete(ONE),
    lambda claim: claim.fail(None, "boom"),
    lambda claim: claim.release(),
    lambda claim: claim.give_up("why"),
]


def claimed(scene: Scene, lease: int = LEASE, **options: Any) -> Claim:
    """A claim that was granted just now."""
    claimed_at = scene.clock.monotonic()
    decision = claim(scene.store, an_operation(lease=lease / 1000, retain=2 * lease / 1000))
    assert isinstance(decision, Run)
    given = {"lease": lease, "retain": RETAIN, "claimed_at": claimed_at, "clock": scene.clock, **options}
    return Claim(scene.store, decision.record, **given)


def taken_over(scene: Scene) -> Claim:
    """A successor, after the lease."""
    scene.clock.advance(LEASE + 1_000)
    return claimed(scene)


def left(scene: Scene) -> int:
    """Milliseconds of the stored lease."""
    return scene.record.lease_until - scene.store.now()


def test_lost_race_is_a_conflict_with_the_winner(scene: Scene) -> None:
    """Both met a released record, and one wrote first."""
    claimed(scene).release()
    rival = an_operation()._replace(worker="rival")

    def race(swap: Swap) -> Record | None:
        assert isinstance(claim(scene.store.store, rival), Run)
        return swap()

    scene.plan("claim", "none", race)
    decision = claim(scene.store, an_operation())
    assert isinstance(decision, Wait)
    assert decision.record.worker == "rival"


def test_record_that_vanishes_meanwhile_is_claimed_anew(scene: Scene) -> None:
    """The swap that expected it writes nothing."""
    claimed(scene).complete(ONE)
    scene.clock.advance(RETAIN + 1_000)
    scene.store.swaps.clear()

    def vanish(swap: Swap) -> Record | None:
        assert scene.store.delete("k", scene.record.revision)
        return swap()

    scene.plan("claim", "none", vanish)
    decision = claim(scene.store, an_operation())
    assert isinstance(decision, Run)
    assert (decision.expected, len(scene.store.swaps)) == (None, 3)


def test_store_that_always_moves_ends_in_an_error(scene: Scene) -> None:
    """Neither a claim nor the write of an owner loops for ever."""
    mine = claimed(scene)
    scene.store.swap = lambda new, expected: a_record().but(status=Status.RELEASED, revision=new_nonce())  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="races"):
        claim(scene.store, an_operation())
    scene.store.swap = lambda new, expected: mine._record.but(revision=new_nonce())  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="races"):
        mine.release()


@pytest.mark.parametrize(("is_takeover", "status"), [(False, Status.RELEASED), (True, Status.IN_PROGRESS)])
def test_stored_claim_that_could_be_forgotten_holds_nobody_off(scene: Scene, is_takeover: bool, status: Status) -> None:
    """Nothing has run for it, so it is given back; but not where something may have run before it."""

    def unconfirmed(swap: Swap) -> NoReturn:
        swap()
        error = StoreUnavailable("s", "swap", "0 of 1 replicas")
        error.is_stored = True
        raise error

    if is_takeover:
        claimed(scene)
        scene.clock.advance(LEASE + 1_000)
        scene.plan("claim", "none")  # it finds what is there
    scene.plan("claim", unconfirmed, unconfirmed)
    with pytest.raises(StoreUnavailable):
        claim(scene.store, an_operation())
    assert scene.status is status


def test_takeover_heals_a_lost_reply_and_stays_a_takeover(scene: Scene) -> None:
    """Whether it took over is in the record it wrote, whichever reply arrived."""
    first = claimed(scene)
    scene.plan("claim", "none", "reply lost")
    second = taken_over(scene)
    seen = [(each.key, each.number, each.is_takeover) for each in (first, second)]
    assert seen == [("k", 1, False), ("k", 2, True)]
    assert second.fencing_token > first.fencing_token


def test_effect_key_fits_payment_apis() -> None:
    """The same for an operation and a name, whatever text that is; 64 plain characters."""
    keys = {effect_key("k", name) for name in ("charge", "charge", "mail", "half of a pair: \ud83d")}
    assert len(keys) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in keys)


@pytest.mark.parametrize(("behind", "rest"), [(0, 60_000), (29_000, 31_000), (31_000, 60_000), (3_600_000, 60_000)])
def test_lease_half_over_is_renewed_before_the_body(scene: Scene, behind: int, rest: int) -> None:
    """The heartbeat comes after a third; and a clock that fell behind may write a claim that is born expired."""
    scene.reply_takes(behind)
    assert scene.run(lambda attempt: left(scene)).value == rest


@pytest.mark.parametrize("is_renewed", [False, True])
def test_lease_counts_from_the_request_and_not_from_its_reply(scene: Scene, is_renewed: bool) -> None:
    """An attempt that believes in 20 s more than it has would go on beside its successor."""

    def body(attempt: Any) -> None:
        if is_renewed:
            scene.clock.advance(60_000)
            scene.reply_takes(20_000)
            attempt.ensure_owned()
        scene.steal(after=41_000)
        with pytest.raises(LeaseLost):
            attempt.ensure_owned()

    if not is_renewed:
        scene.reply_takes(20_000)
    assert scene.run(body) == Outcome("theirs")


def test_lease_costs_no_request_while_it_runs(scene: Scene) -> None:
    """After it the store is asked, and renews what nobody took over."""
    attempt = claimed(scene)
    scene.store.swaps.clear()
    attempt.ensure_owned()
    assert scene.store.swaps == []
    scene.clock.advance(5 * LEASE)
    attempt.ensure_owned()
    assert (left(scene), attempt.is_over) == (LEASE, False)


def test_late_reply_extends_no_lease(scene: Scene) -> None:
    """A step's end landed, and its reply came a lease later: who took over owns the key, and the body is told."""
    attempt = claimed(scene)
    scene.plan("finish", *UNSEEN)
    scene.clock.on_sleep = lambda seconds: scene.clock.advance(LEASE + 1_000)
    attempt.finish_step("charge", Finished(ONE))
    successor = claimed(scene)
    with pytest.raises(LeaseLost):
        attempt.ensure_owned()
    successor.ensure_owned()


def test_late_reply_leaves_what_is_left_of_the_lease(scene: Scene) -> None:
    """Within the lease that the first try has stored nobody is asked; once it is over, it is renewed."""
    attempt = claimed(scene)
    scene.clock.advance(LEASE // 2)
    scene.plan("finish", *UNSEEN)
    scene.clock.on_sleep = lambda seconds: scene.clock.advance(LEASE // 2 - round(seconds * 1000))
    attempt.finish_step("charge", Finished(ONE))
    scene.store.swaps.clear()
    for more, asked in ((LEASE // 2 - 1, 0), (1, 1)):
        scene.clock.advance(more)
        attempt.ensure_owned()
        assert len(scene.store.swaps) == asked


def test_lease_lost_before_the_body_asks_who_took_over(scene: Scene) -> None:
    """A worker that stalls between its claim and its body runs nothing, and gets its successor's outcome."""

    def stall(swap: Swap) -> Record | None:
        stored = swap()
        scene.steal()
        return stored

    scene.plan("claim", stall)
    assert scene.run(lambda attempt: "ours") == Outcome("theirs")
    assert scene.runs == 0


@pytest.mark.parametrize(
    ("on_outage", "fault", "answer"),
    [("retry", "none", StoreUnavailable), ("run", "none", None), ("run", "exit", SystemExit)],
)
def test_claim_that_nobody_can_renew_is_an_outage(scene: Scene, on_outage: str, fault: str, answer: Any) -> None:
    """The claim is given back at once, and the policy for outages decides; an exit meanwhile stays one."""
    scene.heartbeat.start = raising(StoreUnavailable("memory", "heartbeat", "no thread"))  # type: ignore[method-assign]
    scene.plan("RELEASED", fault)
    assert scene.answer(lambda: scene.run(lambda attempt: attempt, on_outage=on_outage)) == answer
    assert (scene.runs, scene.status) == (answer is None, Status.RELEASED)


@pytest.mark.parametrize(
    ("ends_after", "rests"), [(90, [60_000, 50_000, 5_000, 5_000]), (10, [60_000, 40_000, 20_000, 20_000])]
)
def test_lease_ends_with_its_process(scene: Scene, ends_after: int, rests: list[int]) -> None:
    """Neither a renewal nor a step extends it beyond that, nor shortens what the claim was granted for."""
    scene.until, seen = scene.clock.monotonic() + ends_after, list[int]()

    def body(attempt: Any) -> None:
        rests = []
        for passed in (20, 20, 45) if ends_after == 90 else (0, 20, 20):
            scene.clock.advance(passed * 1000)
            attempt.renew()
            rests.append(left(scene))
        attempt.begin_step("sms")
        rests.append(left(scene))
        # By the local clock it ends then, and the store is asked.
        scene.steal(after=rests[-1] + 1_001)
        with pytest.raises(LeaseLost):
            attempt.ensure_owned()
        seen.extend(rests)

    assert (scene.run(body, lease=60), seen) == (Outcome("theirs"), rests)


@pytest.mark.parametrize("moment", ["renewal", "begin"])
def test_what_landed_unseen_is_built_upon(scene: Scene, moment: str) -> None:
    """The next write keeps what the one before has recorded, though nobody heard of it."""
    attempt = claimed(scene)
    scene.plan(moment, *UNSEEN)
    with pytest.raises(StoreUnavailable):
        attempt.renew() if moment == "renewal" else attempt.begin_step("sms")
    attempt.begin_step("mail")
    assert set(scene.record.steps) == {"sms", "mail"} - ({"sms"} if moment == "renewal" else set())
    assert attempt.complete(ONE) == Written()


@pytest.mark.parametrize("faults", [("request lost", "request lost"), UNSEEN])
def test_heartbeat_beside_a_completion_that_waits(scene: Scene, faults: Any) -> None:
    """It keeps the lease; or it finds the completion that nobody heard of, stops, and does not cry wolf."""
    attempt = claimed(scene)
    scene.plan("COMPLETED", *faults)

    def beat(seconds: float) -> None:
        scene.clock.on_sleep = lambda seconds: None
        attempt.renew()
        attempt.ensure_owned()
        assert attempt.is_over is (scene.status is Status.COMPLETED) is (faults == UNSEEN)

    scene.clock.on_sleep = beat
    assert attempt.complete(ONE) == Written()
    assert scene.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("lease", "limit", "patience"),
    [(LEASE, "", 600), (3_600_000, "", 3_600), (LEASE, "until", 30), (LEASE, "is_stopped", 30)],
)
def test_unconfirmed_outcome_is_not_reported(scene: Scene, lease: int, limit: str, patience: int) -> None:
    """It is tried for ten minutes, or a longer lease, or until its process ends or is stopped; then it raises."""
    began = scene.clock.monotonic()
    limits = {"until": began + 30, "is_stopped": lambda: scene.clock.monotonic() >= began + 30}
    attempt = claimed(scene, lease, **{name: value for name, value in limits.items() if name == limit})
    scene.plan("COMPLETED", "away")
    with pytest.raises(StoreUnavailable):
        attempt.complete(ONE)
    assert patience <= scene.clock.monotonic() - began < patience + 3
    assert scene.status is Status.IN_PROGRESS


@pytest.mark.parametrize(("successor", "ends"), [("none", Written), ("running", LeaseLost), ("completed", Superseded)])
def test_log_says_that_a_result_waits_and_when_it_was_recorded(
    scene: Scene, caplog: pytest.LogCaptureFixture, successor: str, ends: type
) -> None:
    """Once each, however often the store is asked; not where it answers at once, nor of a result that is lost."""
    attempt = claimed(scene)
    scene.plan("finish", "request lost")
    attempt.finish_step("charge", Finished(ONE))
    assert caplog.messages == []

    def take_over(seconds: float) -> None:
        scene.clock.on_sleep = lambda seconds: None
        theirs = taken_over(scene) if successor != "none" else None
        if theirs and successor == "completed":
            theirs.complete(TWO)

    scene.clock.on_sleep = take_over
    scene.plan("COMPLETED", *["request lost"] * (20 if successor == "none" else 2))
    assert scene.answer(lambda: attempt.complete(ONE)) is ends
    waits, *recorded = [unlinked(each) for each in caplog.messages]
    assert waits.startswith("event=idempotency.result_waits key=k seconds=600.0 reason=")
    assert len(recorded) == (ends is Written)
    assert all(re.fullmatch(r"event=idempotency.result_recorded key=k seconds=1\d\.\d", each) for each in recorded)


@pytest.mark.parametrize("is_completed", [False, True])
def test_zombie_that_knows_of_its_loss_asks_no_more(scene: Scene, is_completed: bool) -> None:
    """Its heartbeat has met its successor, or that one's completion, which is then its own outcome."""
    stale, successor = claimed(scene), taken_over(scene)
    if is_completed:
        successor.complete(TWO)
    stale.renew()
    scene.store.swaps.clear()
    stale.renew()
    for ask in (stale.ensure_owned, lambda: stale.begin_step("sms")):
        with pytest.raises(LeaseLost):
            ask()
    assert (scene.store.swaps, stale.is_over) == ([], True)
    if is_completed:
        assert stale.complete(ONE) == Superseded(scene.record)


@pytest.mark.parametrize("end", [*ENDS[2:], lambda claim: claim.abandon()])
def test_zombie_that_knows_of_its_loss_gives_nothing_back(scene: Scene, end: Any) -> None:
    """What it wrote where the store forgot its successor's record would cost that one its outcome."""
    stale, successor = claimed(scene), taken_over(scene)
    stale.renew()
    scene.store.delete("k", scene.record.revision)
    assert (end(stale), scene.status) == (Lost(), None)
    assert (successor.complete(TWO), scene.record.result) == (Written(), TWO.data)


@pytest.mark.parametrize("hears", [False, True])
def test_zombie_whose_transaction_came_too_late_gives_nothing_back(scene: Scene, hears: bool) -> None:
    """The transaction tells it of its loss, or does not answer, and what it asks then does."""
    stale = claimed(scene)
    taken_over(scene)
    transaction: Any = Mock(**{"commit.side_effect": StoreUnavailable("Store", "commit", "no answer")})
    transaction.swap = lambda new, expected: scene.record if hears else new
    with pytest.raises(LeaseLost):
        stale.commit_in(transaction, Kept(ONE, 1, None))
    scene.store.delete("k", scene.record.revision)
    assert (stale.release(), scene.status) == (Lost(), None)


@pytest.mark.parametrize(
    "write", [ENDS[0], ENDS[2], lambda claim: claim.ensure_owned(), lambda claim: claim.finish_step("a", Finished(ONE))]
)
def test_vanished_record_is_written_again_by_its_living_owner(scene: Scene, write: Any) -> None:
    """But not by the heartbeat: it may be invisible from another connection only, which is no loss."""
    attempt = claimed(scene)
    attempt.begin_step("sms")
    written = scene.record
    scene.store.delete("k", written.revision)
    attempt.renew()
    assert (scene.status, attempt.is_over) == (None, False)
    scene.clock.advance(LEASE)
    write(attempt)
    assert (scene.record.owner, scene.record.fencing_token) == (written.owner, written.fencing_token)
    assert "sms" in scene.record.steps or scene.status is Status.COMPLETED


@pytest.mark.parametrize("end", ENDS)
def test_attempt_ends_once(scene: Scene, end: Any) -> None:
    """What struck after the end may have it made again; nothing else is written, also by a late heartbeat."""
    judged = {"action": "rerun", "kept_until": scene.clock.now() + 10 * RETAIN}  # which an outcome outlasts
    released = a_record().but(key="k", fingerprint=None, status=Status.RELEASED, verdict=judged, lease_until=0)
    scene.store.swap(released, None)
    attempt = claimed(scene)
    assert (end(attempt), attempt.is_over) == (Written(), True)
    before = scene.record
    scene.clock.advance(5_000)
    assert end(attempt) == Written()
    attempt.renew()
    assert attempt.abandon() == Lost()
    others: list[Any] = [lambda: attempt.complete(TWO), lambda: attempt.fail(None, "another")]
    for another in others:
        with pytest.raises(LeaseLost):
            another()
    assert scene.record == before
