"""The claim: asked for, renewed and ended over a store that loses requests and replies."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_idempotent.engine.claim import Claim, claim, effect_key, new_nonce
from celery_idempotent.errors import LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.operation import (
    Lost,
    Operation,
    Replay,
    Run,
    Superseded,
    Unknown,
    Wait,
    Written,
    ended,
    released,
)
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Finished
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from celery_idempotent.testing.contract import a_record
from celery_idempotent.testing.stores import Fault
from tests.support.links import unlinked
from tests.support.scene import an_operation

LEASE = 60_000
RETAIN = 600_000
ONE = Encoded("1", "application/json")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> FaultyStore:
    return FaultyStore(MemoryStore(clock.now))


def _operation(on_takeover: str = "rerun") -> Operation:
    return an_operation(lease=LEASE / 1000, on_takeover=on_takeover)


def _claimed(store: FaultyStore, clock: FakeClock, lease: int = LEASE) -> Claim:
    claimed_at = clock.monotonic()
    decision = claim(store, _operation())
    assert isinstance(decision, Run)
    return Claim(store, decision.record, lease=lease, retain=RETAIN, claimed_at=claimed_at, clock=clock)


def _stored(store: FaultyStore) -> Record:
    record = store.get("k")
    assert record is not None
    return record


def test_claim_of_a_new_key_is_one_swap(store: FaultyStore) -> None:
    """The optimistic claim needs no read before it."""
    decision = claim(store, _operation())

    assert isinstance(decision, Run)
    assert store.swaps == [decision.record]
    assert _stored(store) == decision.record


def test_claim_of_a_running_key_is_one_swap(store: FaultyStore, clock: FakeClock) -> None:
    """A conflict is read out of the failed swap."""
    _claimed(store, clock)
    store.swaps.clear()

    assert isinstance(claim(store, _operation()), Wait)
    assert len(store.swaps) == 1


@pytest.mark.parametrize("faults", [("reply lost",), ("request lost",)])
def test_claim_heals_one_lost_message(store: FaultyStore, faults: tuple[Fault, ...]) -> None:
    """A lost request or reply costs a second swap, no attempt, and no waiting for the lease."""
    store.faults.extend(faults)

    decision = claim(store, _operation())

    assert isinstance(decision, Run)
    assert decision.record.attempts == 1
    assert _stored(store) == decision.record


def test_takeover_heals_a_lost_reply_and_stays_a_takeover(store: FaultyStore, clock: FakeClock) -> None:
    """Whether it took over is in the record it wrote, whichever reply arrived."""
    _claimed(store, clock)
    clock.advance(LEASE + 1_000)
    store.faults.extend(["none", "reply lost"])

    decision = claim(store, _operation())

    assert isinstance(decision, Run)
    assert decision.record.takeovers == 1
    assert decision.record.attempts == 2


def test_claim_without_any_answer_is_an_outage(store: FaultyStore) -> None:
    """Without a certain answer nothing may run."""
    store.faults.extend(["reply lost", "request lost"])

    with pytest.raises(StoreUnavailable):
        claim(store, _operation())


def test_misconfigured_store_is_not_asked_twice(store: FaultyStore) -> None:
    """What needs a person does not get better by asking again."""

    def refuse(record: Record) -> None:
        raise StoreMisconfigured("store", "swap", "no table")

    store.before_swap = refuse

    with pytest.raises(StoreMisconfigured):
        claim(store, _operation())
    assert len(store.swaps) == 1


def test_lost_race_asks_the_table_again(store: FaultyStore, clock: FakeClock) -> None:
    """A claim that loses the race for a released key meets the winner and conflicts with it."""
    attempt = _claimed(store, clock)
    attempt.release()
    rival = iter([None, None])

    def interfere(record: Record) -> None:
        if store.swaps[-1].attempts == 2 and next(rival, "done") is None:
            store.before_swap = lambda record: None
            assert isinstance(claim(store.store, replace(_operation(), worker="rival")), Run)

    store.before_swap = interfere

    decision = claim(store, _operation())

    assert isinstance(decision, Wait)
    assert decision.record.worker == "rival"


def test_record_that_vanishes_during_a_claim_is_claimed_anew(store: FaultyStore, clock: FakeClock) -> None:
    """A record deleted between two swaps counts as absent; the swap that expected it writes nothing."""
    _claimed(store, clock).complete(ONE)
    clock.advance(RETAIN + 1_000)
    store.swaps.clear()

    def collect(record: Record) -> None:
        if len(store.swaps) == 2:
            assert store.delete("k", _stored(store).revision)

    store.before_swap = collect

    decision = claim(store, _operation())

    assert isinstance(decision, Run)
    assert decision.expected is None
    assert len(store.swaps) == 3


def test_broken_store_does_not_loop_for_ever(store: FaultyStore) -> None:
    """A store that never lets anybody win ends in an error, not in a hot loop."""
    flip = [a_record(), replace(a_record(), status=Status.RELEASED)]

    class Liar(FaultyStore):
        def swap(self, new: Record, expected: str | None) -> Record | None:
            flip.reverse()
            return replace(flip[0], status=Status.RELEASED, fingerprint=None)

    with pytest.raises(StoreUnavailable, match="races"):
        claim(Liar(MemoryStore()), _operation())


def test_refused_takeover_becomes_unknown_for_everybody(store: FaultyStore, clock: FakeClock) -> None:
    """The first to find the dead attempt marks it; it and all later ones are told."""
    _claimed(store, clock)
    clock.advance(LEASE + 1_000)

    for _ in range(2):
        assert isinstance(claim(store, _operation("refuse")), Unknown)
    assert _stored(store).status is Status.UNKNOWN
    assert isinstance(claim(store, _operation("rerun")), Unknown)


def test_handle_tells_what_the_record_says(store: FaultyStore, clock: FakeClock) -> None:
    """Key, token, number and takeover flag are those of the claim that was stored."""
    first = _claimed(store, clock)
    clock.advance(LEASE + 1_000)
    second = _claimed(store, clock)

    assert (first.key, first.number, first.is_takeover) == ("k", 1, False)
    assert (second.key, second.number, second.is_takeover) == ("k", 2, True)
    assert second.fencing_token > first.fencing_token


def test_effect_key_is_stable_over_attempts_and_fits_payment_apis(store: FaultyStore, clock: FakeClock) -> None:
    """Every attempt of an operation derives the same key, another per name, of 64 plain characters."""
    first = _claimed(store, clock)
    clock.advance(LEASE + 1_000)
    second = _claimed(store, clock)

    assert effect_key(first.key, "charge") == effect_key(second.key, "charge")
    assert effect_key(first.key, "charge") != effect_key(first.key, "mail")
    assert len(effect_key(first.key, "charge")) == 64
    assert effect_key(first.key, "charge").isalnum()
    assert len(effect_key("k", "half of a pair: \ud83d")) == 64


@pytest.mark.parametrize("fault", ["none", "reply lost", "request lost"])
def test_completion_is_recorded_through_one_lost_message(store: FaultyStore, clock: FakeClock, fault: Fault) -> None:
    """A lost request or reply of the completion is healed, and costs no attempt."""
    attempt = _claimed(store, clock)
    store.faults.append(fault)

    assert attempt.complete(ONE) == Written()
    stored = _stored(store)
    assert (stored.status, stored.result, stored.attempts) == (Status.COMPLETED, "1", 1)
    assert attempt.is_over


def test_completion_is_tried_until_the_store_is_back(store: FaultyStore, clock: FakeClock) -> None:
    """An outage after the effect is waited out; the record of the first confirmed try counts."""
    attempt = _claimed(store, clock)
    store.faults.extend(["request lost"] * 20)

    assert attempt.complete(ONE) == Written()
    assert _stored(store).status is Status.COMPLETED


def test_log_says_that_a_result_waits_and_when_it_was_recorded(
    store: FaultyStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each, however often the store is asked; and nothing where the second request of a try is answered."""
    attempt = _claimed(store, clock)
    store.faults.append("request lost")
    attempt.finish_step("charge", Finished(ONE))
    assert caplog.messages == []

    store.faults.extend(["request lost"] * 20)
    attempt.complete(ONE)

    waits, recorded = caplog.records
    assert (waits.levelname, recorded.levelname) == ("WARNING", "WARNING")
    assert waits.getMessage().startswith("event=idempotency.result_waits key=k seconds=600.0 reason=")
    assert re.fullmatch(r"event=idempotency.result_recorded key=k seconds=1\d\.\d", unlinked(recorded.getMessage()))


def test_limit_that_strikes_while_the_log_is_written_does_not_lose_the_result(
    store: FaultyStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect has happened; the limit is raised once that is recorded."""
    attempt = _claimed(store, clock)
    store.faults.extend(["request lost"] * 4)
    strikes = [TimeoutError(), TimeoutError()]

    def strike(text: str, *_: object, **__: object) -> None:
        if len(strikes) == ("waits" in text) + 1:
            raise strikes.pop()

    monkeypatch.setattr("celery_idempotent.engine.claim.logger.warning", strike)

    assert attempt.complete(ONE) == Written()
    assert (_stored(store).status, strikes) == (Status.COMPLETED, [])
    with pytest.raises(TimeoutError):
        attempt.raise_interruption()


@pytest.mark.parametrize("completes", [False, True])
def test_log_does_not_say_that_a_lost_result_was_recorded(
    store: FaultyStore, clock: FakeClock, caplog: pytest.LogCaptureFixture, completes: bool
) -> None:
    """Somebody took over in the outage, and perhaps has a result, which counts instead."""
    attempt = _claimed(store, clock)
    store.faults.extend(["request lost"] * 2)

    def take_over(seconds: float) -> None:
        clock.on_sleep = lambda seconds: None
        clock.advance(LEASE + 1_000)
        successor = _claimed(store, clock)
        if completes:
            successor.complete(ONE)

    clock.on_sleep = take_over
    if completes:
        assert isinstance(attempt.complete(ONE), Superseded)
    else:
        with pytest.raises(LeaseLost):
            attempt.complete(ONE)

    assert [each.partition(" ")[0] for each in caplog.messages] == ["event=idempotency.result_waits"]


def test_heartbeat_keeps_the_lease_while_a_completion_waits(store: FaultyStore, clock: FakeClock) -> None:
    """Between two tries the lease can be renewed, and the completion then builds on the renewal."""
    attempt = _claimed(store, clock)
    store.faults.extend(["request lost", "request lost"])

    def beat(seconds: float) -> None:
        clock.on_sleep = lambda seconds: None
        attempt.renew()
        assert _stored(store).status is Status.IN_PROGRESS

    clock.on_sleep = beat

    assert attempt.complete(ONE) == Written()
    assert _stored(store).status is Status.COMPLETED


@pytest.mark.parametrize(("lease", "patience"), [(LEASE, 600), (3_600_000, 3_600)])
def test_unconfirmed_completion_is_not_reported(
    store: FaultyStore, clock: FakeClock, lease: int, patience: int
) -> None:
    """When the store stays away for ten minutes, or a longer lease, it raises instead of claiming success."""
    attempt = _claimed(store, clock, lease)
    began = clock.monotonic()
    store.faults.extend(["request lost"] * 10_000)

    with pytest.raises(StoreUnavailable):
        attempt.complete(ONE)

    assert patience <= clock.monotonic() - began < patience + 10
    assert _stored(store).status is Status.IN_PROGRESS


def test_wait_for_the_store_ends_when_the_time_of_the_worker_is_over(store: FaultyStore, clock: FakeClock) -> None:
    """Its process is about to be killed anyway; its message goes back before."""
    decision = claim(store, _operation())
    assert isinstance(decision, Run)
    began = clock.monotonic()
    given = {"lease": LEASE, "retain": RETAIN, "claimed_at": began, "clock": clock}
    attempt = Claim(store, decision.record, is_stopped=lambda: clock.monotonic() >= began + 30, **given)  # type: ignore[arg-type]
    store.faults.extend(["request lost"] * 10_000)
    with pytest.raises(StoreUnavailable):
        attempt.complete(ONE)
    assert 30 <= clock.monotonic() - began < 33
    assert _stored(store).status is Status.IN_PROGRESS


def test_misconfiguration_at_completion_is_raised_at_once(store: FaultyStore, clock: FakeClock) -> None:
    """A table deleted under a running task does not hold its worker for ten minutes."""
    attempt = _claimed(store, clock)

    def refuse(record: Record) -> None:
        raise StoreMisconfigured("store", "swap", "no table")

    store.before_swap = refuse
    with pytest.raises(StoreMisconfigured):
        attempt.complete(ONE)


def test_renewal_whose_reply_was_lost_does_not_block_the_completion(store: FaultyStore, clock: FakeClock) -> None:
    """A renewal that landed unseen is recognised as our own write, and written over."""
    attempt = _claimed(store, clock)
    store.faults.extend(["reply lost", "request lost"])
    with pytest.raises(StoreUnavailable):
        attempt.renew()

    assert attempt.complete(ONE) == Written()
    assert _stored(store).status is Status.COMPLETED


def test_what_landed_unseen_is_built_upon(store: FaultyStore, clock: FakeClock) -> None:
    """The next write keeps what the one before has recorded, though nobody heard of it: here, that a step has begun."""
    attempt = _claimed(store, clock)
    store.faults.extend(["reply lost", "request lost"])
    with pytest.raises(StoreUnavailable):
        attempt.begin_step("sms")

    attempt.begin_step("mail")

    assert set(_stored(store).steps) == {"sms", "mail"}


def test_renewal_extends_the_lease(store: FaultyStore, clock: FakeClock) -> None:
    """The stored lease runs from the time of the renewal."""
    attempt = _claimed(store, clock)
    clock.advance(LEASE // 3)

    attempt.renew()

    assert _stored(store).lease_until == clock.now() + LEASE
    assert not attempt.is_over


def test_renewal_after_the_lease_is_good_while_nobody_took_over(store: FaultyStore, clock: FakeClock) -> None:
    """The end of a lease permits a takeover; only the takeover ends the ownership."""
    attempt = _claimed(store, clock)
    clock.advance(LEASE * 5)

    attempt.ensure_owned()

    assert _stored(store).lease_until == clock.now() + LEASE
    assert attempt.complete(ONE) == Written()


def test_renewal_finds_its_own_unseen_completion(store: FaultyStore, clock: FakeClock) -> None:
    """A heartbeat that meets our own completion stops, and does not cry wolf."""
    attempt = _claimed(store, clock)
    store.faults.extend(["reply lost", "request lost"])

    def beat(seconds: float) -> None:
        clock.on_sleep = lambda seconds: None
        attempt.renew()
        assert attempt.is_over
        attempt.ensure_owned()

    clock.on_sleep = beat

    assert attempt.complete(ONE) == Written()


@pytest.fixture
def zombie(store: FaultyStore, clock: FakeClock) -> tuple[Claim, Claim]:
    """An attempt that slept through its lease, and its successor."""
    stale = _claimed(store, clock)
    clock.advance(LEASE + 1_000)
    return stale, _claimed(store, clock)


@pytest.mark.parametrize(
    "act",
    [
        lambda attempt: attempt.complete(ONE),
        lambda attempt: attempt.fail(ONE, "boom"),
    ],
)
def test_zombie_reports_nothing_of_its_own(
    zombie: tuple[Claim, Claim], store: FaultyStore, act: Callable[[Claim], object]
) -> None:
    """While its successor runs, a zombie's outcome is refused and the record stays the successor's."""
    stale, successor = zombie
    before = _stored(store)

    with pytest.raises(LeaseLost):
        act(stale)

    assert _stored(store) == before
    assert successor.complete(ONE) == Written()


def test_zombie_neither_releases_nor_gives_up_nor_renews(zombie: tuple[Claim, Claim], store: FaultyStore) -> None:
    """No write of a zombie touches its successor's record."""
    stale, _ = zombie
    before = _stored(store)

    assert stale.release() == Lost()
    assert stale.give_up("why") == Lost()
    stale.renew()

    assert _stored(store) == before


def test_zombie_gets_its_successors_result(zombie: tuple[Claim, Claim], store: FaultyStore) -> None:
    """Once the successor completed, the zombie's delivery has the successor's result."""
    stale, successor = zombie
    successor.complete(Encoded('"theirs"', "application/json"))

    settlement = stale.complete(ONE)

    assert isinstance(settlement, Superseded)
    assert settlement.record.result == '"theirs"'
    assert _stored(store).result == '"theirs"'


def test_zombie_is_told_when_it_asks(zombie: tuple[Claim, Claim]) -> None:
    """A body can find out before its effect that it no longer owns the key."""
    stale, successor = zombie

    with pytest.raises(LeaseLost):
        stale.ensure_owned()
    assert stale.is_over
    with pytest.raises(LeaseLost):
        stale.ensure_owned()
    successor.ensure_owned()


def test_completed_successor_is_a_lost_lease_for_the_heartbeat(zombie: tuple[Claim, Claim], clock: FakeClock) -> None:
    """The heartbeat of a zombie stops at its successor's completion."""
    stale, successor = zombie
    successor.complete(ONE)

    stale.renew()

    assert stale.is_over


def test_attempt_that_knows_of_its_loss_asks_no_more(zombie: tuple[Claim, Claim], store: FaultyStore) -> None:
    """A loss is for ever, whatever becomes of the successor."""
    stale, _ = zombie
    stale.renew()
    store.swaps.clear()

    stale.renew()
    with pytest.raises(LeaseLost):
        stale.begin_step("charge")

    assert store.swaps == []


def test_late_reply_extends_no_lease(store: FaultyStore, clock: FakeClock) -> None:
    """A step's end landed, and its reply came a lease later: who took over owns the key, and the body is told."""
    attempt = _claimed(store, clock)
    store.faults.extend(["reply lost", "request lost"])
    clock.on_sleep = lambda seconds: clock.advance(LEASE + 1_000)

    attempt.finish_step("charge", Finished(ONE))

    successor = _claimed(store, clock)
    with pytest.raises(LeaseLost):
        attempt.ensure_owned()
    successor.ensure_owned()


def test_late_reply_leaves_what_is_left_of_the_lease(store: FaultyStore, clock: FakeClock) -> None:
    """Within the lease that the first try has stored nobody is asked; once it is over, it is renewed."""
    attempt = _claimed(store, clock)
    clock.advance(LEASE // 2)
    store.faults.extend(["reply lost", "request lost"])
    clock.on_sleep = lambda seconds: clock.advance(LEASE // 2 - round(seconds * 1000))
    attempt.finish_step("charge", Finished(ONE))
    store.swaps.clear()

    clock.advance(LEASE // 2 - 1)
    attempt.ensure_owned()
    assert store.swaps == []
    clock.advance(1)
    attempt.ensure_owned()

    assert _stored(store).lease_until == clock.now() + LEASE


def test_ensuring_ownership_costs_nothing_within_the_lease(store: FaultyStore, clock: FakeClock) -> None:
    """While the lease runs by the local clock, nobody is asked."""
    attempt = _claimed(store, clock)
    store.swaps.clear()

    attempt.ensure_owned()

    assert store.swaps == []


@pytest.mark.parametrize("write", ["complete", "ensure_owned", "release", "finish_step"])
def test_vanished_record_is_written_again_by_its_living_owner(store: FaultyStore, clock: FakeClock, write: str) -> None:
    """A store that forgot, as in a fail-over, costs the attempt nothing: it writes the record as for the first time."""
    writes: dict[str, Callable[[Claim], object]] = {
        "complete": lambda attempt: attempt.complete(ONE),
        "ensure_owned": lambda attempt: attempt.ensure_owned(),
        "release": lambda attempt: attempt.release(),
        "finish_step": lambda attempt: attempt.finish_step("charge", Finished(ONE)),
    }
    attempt = _claimed(store, clock)
    store.delete("k", _stored(store).revision)
    clock.advance(LEASE)

    writes[write](attempt)

    assert _stored(store).owner == attempt._record.owner
    assert _stored(store).fencing_token == attempt.fencing_token


def test_heartbeat_leaves_a_vanished_record_to_the_body(store: FaultyStore, clock: FakeClock) -> None:
    """It may be invisible from another connection only; that it was not renewed is no loss."""
    attempt = _claimed(store, clock)
    store.delete("k", _stored(store).revision)

    attempt.renew()

    assert store.get("k") is None
    assert not attempt.is_over
    attempt.ensure_owned()
    assert attempt.complete(ONE) == Written()


def test_vanished_record_that_somebody_claimed_since_is_theirs(store: FaultyStore, clock: FakeClock) -> None:
    """Writing again is a compare-and-swap as every write: whoever claimed meanwhile wins."""
    attempt = _claimed(store, clock)
    store.delete("k", _stored(store).revision)
    other = _claimed(store, clock)

    with pytest.raises(LeaseLost):
        attempt.complete(ONE)
    assert other.complete(ONE) == Written()


@pytest.mark.parametrize("end", [lambda attempt: attempt.complete(ONE), lambda attempt: attempt.release()])
def test_attempt_ends_once(store: FaultyStore, clock: FakeClock, end: Callable[[Claim], object]) -> None:
    """What an attempt recorded is final for itself, too: nothing it does afterwards is written."""
    attempt = _claimed(store, clock)
    end(attempt)
    before = _stored(store)

    with pytest.raises(LeaseLost):
        attempt.complete(Encoded("2", "application/json"))
    with pytest.raises(LeaseLost):
        attempt.fail(None, "boom")
    assert attempt.abandon() == attempt.give_up("why") == Lost()

    assert _stored(store) == before


@pytest.mark.parametrize(
    "end",
    [
        lambda attempt: attempt.complete(ONE),
        lambda attempt: attempt.fail(None, "boom"),
        lambda attempt: attempt.release(),
        lambda attempt: attempt.give_up("why"),
    ],
)
def test_end_that_is_made_again_is_the_same_end(
    store: FaultyStore, clock: FakeClock, end: Callable[[Claim], object]
) -> None:
    """Something struck after it, and it is made once more, later: no lost lease, also beside the proof of a verdict."""
    judged = {"action": "rerun", "kept_until": clock.now() + 10 * RETAIN}
    store.swap(replace(a_record(), key="k", fingerprint=None, status=Status.RELEASED, verdict=judged), None)
    attempt = _claimed(store, clock)
    assert end(attempt) == Written()
    before = _stored(store)

    clock.advance(5_000)

    assert end(attempt) == Written()
    assert _stored(store) == before


def test_settled_attempt_is_not_renewed(store: FaultyStore, clock: FakeClock) -> None:
    """A late heartbeat does not write over an outcome."""
    attempt = _claimed(store, clock)
    attempt.complete(ONE)
    before = _stored(store)

    attempt.renew()

    assert _stored(store) == before


def test_oversized_result_is_refused_and_can_be_dropped(store: FaultyStore, clock: FakeClock) -> None:
    """A result too large for the store is completed without it, still by the same claim."""
    attempt = _claimed(store, clock)

    def limit(record: Record) -> None:
        if record.result is not None:
            raise RecordTooLarge("too large")

    store.before_swap = limit

    with pytest.raises(RecordTooLarge):
        attempt.complete(ONE)
    assert attempt.complete(None, "too large") == Written()
    stored = _stored(store)
    assert (stored.status, stored.result, stored.error) == (Status.COMPLETED, None, "too large")


def test_release_lets_the_next_run_at_once(store: FaultyStore, clock: FakeClock) -> None:
    """After a release nobody waits, and the next token is larger."""
    first = _claimed(store, clock)
    assert first.release() == Written()

    second = _claimed(store, clock)

    assert second.fencing_token > first.fencing_token
    assert not second.is_takeover


def test_given_up_attempt_stays_unknown(store: FaultyStore, clock: FakeClock) -> None:
    """An outcome that is unknown has no expiry and says why."""
    attempt = _claimed(store, clock)

    assert attempt.give_up("killed") == Written()

    stored = _stored(store)
    assert (stored.status, stored.error, stored.expires_at) == (Status.UNKNOWN, "killed", None)


def test_late_claim_of_a_dead_sender_is_harmless(store: FaultyStore, clock: FakeClock) -> None:
    """A claim that lands after its sender gave up cannot replace what was stored meanwhile."""
    store.faults.extend(["request lost", "request lost"])
    with pytest.raises(StoreUnavailable):
        claim(store, _operation())
    late = store.swaps[0]
    _claimed(store, clock).complete(ONE)

    store.store.swap(late, None)

    assert isinstance(claim(store, _operation()), Replay)


def test_write_gives_up_on_a_store_that_always_moves(clock: FakeClock) -> None:
    """A store that shows another revision of our own record every time ends in an error."""
    honest = FaultyStore(MemoryStore(clock.now))
    attempt = _claimed(honest, clock)
    mine = attempt._record

    class Liar(MemoryStore):
        def swap(self, new: Record, expected: str | None) -> Record | None:
            return replace(mine, revision=new_nonce())

    attempt.store = Liar(clock.now)

    with pytest.raises(StoreUnavailable, match="races"):
        attempt.release()


def test_released_by_another_is_lost(store: FaultyStore, clock: FakeClock) -> None:
    """A record released by a successor is not ours to complete."""
    attempt = _claimed(store, clock)
    stored = _stored(store)
    store.store.swap(released(replace(stored, owner="other"), clock.now(), "r"), stored.revision)

    with pytest.raises(LeaseLost):
        attempt.complete(ONE)


def test_completion_by_another_with_our_revision_unseen(store: FaultyStore, clock: FakeClock) -> None:
    """Somebody else's completion is returned, not overwritten, even before our first try."""
    attempt = _claimed(store, clock)
    stored = _stored(store)
    theirs = ended(
        replace(stored, owner="other"),
        Status.COMPLETED,
        clock.now(),
        RETAIN,
        "r",
        Encoded('"theirs"', "application/json"),
    )
    store.store.swap(theirs, stored.revision)

    assert attempt.complete(ONE) == Superseded(theirs)
