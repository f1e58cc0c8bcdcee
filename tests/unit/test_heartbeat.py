"""The heartbeat: real threads, a real clock, short leases; every wait is for a condition."""

import _thread
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest

import celery_idempotent.engine.heartbeat as heartbeat_module
from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.engine.heartbeat import Heartbeat, _Beat
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.operation import Run, Written
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.scene import an_operation, raising
from tests.support.waiting import wait_until

LEASE, LONG = 300, 3_600_000


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def beats() -> Iterator[Heartbeat]:
    beats = Heartbeat()
    yield beats
    _stop_all(beats)


def _stop_all(beats: Heartbeat) -> None:
    for each in [*beats._beats]:
        beats.stop(each)


def _attempt(store: FaultyStore, key: str = "k", lease: int = LEASE, **options: Any) -> Claim:
    claimed_at = time.monotonic()
    decision = claim(store, an_operation(key))
    assert isinstance(decision, Run)
    # Shorter than any policy may have it: these tests wait for renewals.
    brief = decision.record.but(lease_until=store.now() + lease, revision=new_nonce())
    assert store.store.swap(brief, decision.record.revision) == brief
    return Claim(store, brief, lease=lease, retain=60_000, **{"claimed_at": claimed_at, **options})


@contextmanager
def _no_threads() -> Iterator[None]:
    """The system refuses each new thread: there is no address space for such a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def _renewals(store: FaultyStore, key: str = "k", since: int = 0) -> int:
    return sum(record.key == key for record in store.swaps[since:]) - (since == 0)


def _held(store: FaultyStore, key: str = "k") -> bool:
    """Whether the lease has been extended by that of three."""
    claimed = next(each for each in store.swaps if each.key == key)
    record = store.get(key)
    return record is not None and record.lease_until >= claimed.updated_at + 4 * LEASE


def _asleep(beats: Heartbeat) -> None:
    wait_until(lambda: beats._changed._waiters, "the coordinator sleeps")  # type: ignore[attr-defined]


def test_two_threads_renew_all_that_outlive_a_third_of_their_leases(store: FaultyStore, beats: Heartbeat) -> None:
    """Again and again until they are stopped; what ends earlier costs no write, and no renewal leaves a thread."""
    threads = psutil.Process().num_threads
    before = threads()
    for number in range(50):
        brief = _attempt(store, f"brief {number}", lease=LONG)
        beats.start(brief)
        assert threads() == before + 2
        beats.stop(brief)
        beats.stop(brief)
    for number in range(20):
        beats.start(_attempt(store, f"k{number}"))
    wait_until(lambda: all(_held(store, f"k{number}") for number in range(20)), "they are held")
    _stop_all(beats)
    wait_until(lambda: threads() == before + 2, "only the two that watch are left")
    assert not any(_renewals(store, f"brief {number}") for number in range(50))


def test_shorter_lease_that_comes_later_is_renewed_in_time(store: FaultyStore, beats: Heartbeat) -> None:
    """The thread that sleeps for a lease of years, and not for longer than the system can, is woken for a short one."""
    beats.start(_attempt(store, "ages", lease=1 << 53))
    _asleep(beats)
    beats.start(_attempt(store, "short"))
    wait_until(lambda: _renewals(store, "short") > 1, "the short lease is renewed")


def test_short_attempts_wake_nobody(store: FaultyStore, beats: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost a switch of threads, which takes longer than all else that a short task pays for."""
    looks, wait = list[float](), beats._changed.wait

    def look(seconds: float) -> bool:
        looks.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(beats._changed, "wait", look)
    attempt = _attempt(store, lease=600_000)
    for _ in range(20):
        beats.start(attempt)
        beats.stop(attempt)
        with beats._lock:  # whoever was woken has the next turn
            beats._changed.notify(0)
        _asleep(beats)
    assert len(looks) <= 3


def test_attempt_whose_start_is_struck_costs_the_next_no_renewal(store: FaultyStore, beats: Heartbeat) -> None:
    """Where a time limit strikes in the bell, the coordinator sleeps on, and nobody may count on its having heard."""
    brief = _attempt(store, "brief", lease=LONG)
    beats.start(brief)
    beats.stop(brief)
    _asleep(beats)
    ring = beats._changed.notify

    def struck(n: int = 1) -> None:
        beats._changed.notify = ring  # type: ignore[method-assign]
        raise TimeoutError

    beats._changed.notify = struck  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        beats.start(_attempt(store, "struck", lease=30_000))
    _stop_all(beats)
    following = _attempt(store, "following", lease=45_000)
    beats.start(following)
    assert beats._sleeps_until == beats._beats[following].due


def _hang(store: FaultyStore, *keys: str) -> tuple[Counter[str], Callable[[], None]]:
    """Let requests about some keys hang; how many there were of each, and what ends it."""
    is_over, requests = threading.Event(), Counter[str]()

    def wait(record: Record) -> None:
        if record.key in keys:
            requests[record.key] += 1
            is_over.wait()

    store.before_swap = wait
    return requests, is_over.set


def test_a_renewal_that_hangs_costs_no_other_key_its_lease(store: FaultyStore, beats: Heartbeat) -> None:
    """Sixty keys are on a shard that answers nothing, and none waits for another; ten others are renewed on and on."""
    attempts = [_attempt(store, f"k{number}") for number in range(70)]
    hung = {f"k{number}": 1 for number in range(60)}
    requests, end = _hang(store, *hung)
    for attempt in attempts:
        beats.start(attempt)
    wait_until(lambda: all(_held(store, f"k{number}") for number in range(60, 70)), "the others are held")
    wait_until(lambda: requests == hung, "all were asked for")
    assert requests == hung, "an attempt has one renewal under way at most"
    _stop_all(beats)
    end()


def test_a_body_may_end_while_its_renewal_is_under_way(store: FaultyStore, beats: Heartbeat) -> None:
    """Its outcome is recorded as soon as the store answers, and nothing is renewed afterwards."""
    attempt, outcomes = _attempt(store), list[object]()
    beats.start(_attempt(store, "watch"))
    requests, end = _hang(store, "k")
    beats.start(attempt)
    wait_until(lambda: requests["k"], "a renewal is under way")
    body = threading.Thread(target=lambda: outcomes.append(attempt.complete(Encoded("1", "application/json"))))
    body.start()
    beats.stop(attempt)
    end()
    body.join()
    assert outcomes == [Written()]
    asked = len(store.swaps)
    wait_until(lambda: _renewals(store, "watch", asked) > 3, "time enough for a renewal passes")
    assert not _renewals(store, "k", asked)


def test_renewal_is_retried_well_within_the_lease(store: FaultyStore, beats: Heartbeat, caplog: Any) -> None:
    """A renewal that fails is logged and tried again soon, and the lease is kept."""
    attempt = _attempt(store, lease=10 * LEASE)
    first = attempt._record.lease_until
    store.faults.extend(["request lost"] * 4)
    beats.start(attempt)
    wait_until(lambda: attempt._record.lease_until > first, "renewed after the outage")
    assert attempt._record.updated_at < first
    assert "idempotency.renewal_failed key=k" in caplog.text


def test_a_heartbeat_that_cannot_start_is_an_outage(store: FaultyStore, beats: Heartbeat) -> None:
    """Nothing is renewed, so nothing may run; the next attempt tries anew."""
    attempt = _attempt(store)
    for _ in range(2):
        with _no_threads(), pytest.raises(StoreUnavailable, match="ulimit -u") as caught:
            beats.start(attempt)
        assert (caught.value.store, caught.value.operation) == (repr(store), "heartbeat")
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert attempt not in beats._beats
    beats.start(attempt)
    wait_until(lambda: _held(store), "it is renewed after all")


def test_renews_where_no_further_thread_can_be_started(store: FaultyStore, beats: Heartbeat, caplog: Any) -> None:
    """Whoever was let begin is renewed to the end, whatever limit the process has reached meanwhile."""
    attempts = [_attempt(store, f"k{number}") for number in range(10)]
    beats.start(attempts[0])
    with _no_threads():
        for attempt in attempts:
            beats.start(attempt)
        wait_until(lambda: all(_held(store, f"k{number}") for number in range(10)), "all held")
    assert 'idempotency.renewal_delayed key=k9 reason="no thread can be started: ' in caplog.text


def test_a_reserve_that_hangs_stops_nobody_once_threads_can_be_started_again(store: Any, beats: Heartbeat) -> None:
    """It hangs where no thread could be started for it; the others go on as soon as threads can be started."""
    hung, other = _attempt(store, "hung"), _attempt(store, "other")
    requests, end = _hang(store, "hung")
    beats.start(other)
    beats.stop(other)
    with _no_threads():
        beats.start(hung)
        wait_until(lambda: requests["hung"], "the reserve hangs")
        beats.start(other)
        wait_until(lambda: beats._beats[other].left, "no thread can be started for the other")
    wait_until(lambda: _renewals(store, "other") > 3, "the other one is renewed")
    assert requests["hung"] == 1
    _stop_all(beats)
    end()


class _Clock:
    """A clock that can leap; the coordinator, who is the first to look at it, finds there what was put there for it."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0
        self.pending: list[BaseException] = []
        self._readers: dict[int, None] = {threading.get_ident(): None}

    def monotonic(self) -> float:
        self._readers.setdefault(threading.get_ident())
        if self.pending and threading.get_ident() == list(self._readers)[1]:
            raise self.pending.pop()
        return time.monotonic() + self.ahead


@pytest.mark.parametrize("interruption", [type("GreenletExit", (BaseException,), {})(), MemoryError()], ids=repr)
@pytest.mark.parametrize("where", ["in the coordinator", "in a renewal"])
def test_an_interruption_ends_no_renewals(store: Any, where: str, interruption: Any, caplog: Any) -> None:
    """Everybody is renewed all the same, and somebody is told; a store that has a bug counts as one that failed."""
    clock, in_store = _Clock(), list[BaseException]()
    beats = Heartbeat(clock)
    store.before_swap = lambda record: raising(in_store.pop())() if in_store else None
    beats.start(_attempt(store))
    wait_until(lambda: _renewals(store) > 1, "it is renewed")
    pending, event = (in_store, "renewal_failed") if where == "in a renewal" else (clock.pending, "heartbeat_failed")
    pending.append(interruption)
    wait_until(lambda: not pending, "it has arrived")
    renewals = _renewals(store)
    wait_until(lambda: _renewals(store) > renewals + 3, "it is renewed on")
    assert f"idempotency.{event}" in caplog.text
    assert type(interruption).__name__ in caplog.text
    _stop_all(beats)


def test_a_thread_that_dies_before_its_first_step_is_an_outage(store: Any, beats: Heartbeat, monkeypatch: Any) -> None:
    """``threading`` would wait for it for ever; a renewal is made all the same, as it has not begun."""
    attempt = _attempt(store)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat_module, "_BEGINS_WITHIN", 0.01)
        patch.setattr(_thread, "start_new_thread", lambda *_: 0)  # before its first step
        with pytest.raises(StoreUnavailable, match="0.01 s"):
            beats.start(attempt)
    beats.start(attempt)
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", lambda *_: 0)  # before its first step
        wait_until(lambda: beats._beats[attempt].is_handed_over, "its thread was started")
    wait_until(lambda: _renewals(store), "it is renewed")


def test_a_renewal_that_a_slow_thread_has_taken_is_not_left_to_the_reserve(
    store: FaultyStore, beats: Heartbeat, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A thread that was started earlier begins just when no other can be started: nothing is delayed."""
    beats.start(_attempt(store))
    slow: list[Callable[[], object]] = []

    def start(function: Callable[..., object], arguments: tuple[object, ...]) -> int:
        if slow:
            slow[0]()
            raise RuntimeError("can't start new thread")
        slow.append(partial(function, *arguments))
        return 0

    monkeypatch.setattr(_thread, "start_new_thread", start)
    wait_until(lambda: _renewals(store) > 1, "the slow thread renews it, again and again")
    _stop_all(beats)
    assert "idempotency.renewal_delayed" not in caplog.text


def test_a_thread_that_is_dead_is_replaced_by_the_next_attempt(store: FaultyStore) -> None:
    """Whatever it died of: attempts that were running before are renewed again, too."""
    clock = _Clock()
    beats = Heartbeat(clock)
    beats.start(_attempt(store))
    log, deadly = logging.getLogger("celery_idempotent.engine.heartbeat"), raising(SystemExit())
    log.addFilter(deadly)  # the thread dies as it logs
    try:
        clock.pending.append(KeyboardInterrupt())
        wait_until(lambda: not beats._coordinator.is_alive, "it is dead")
    finally:
        log.removeFilter(deadly)
    renewals = _renewals(store)
    beats.start(_attempt(store, "later"))
    wait_until(lambda: _renewals(store) > renewals and _renewals(store, "later"), "both are renewed")
    _stop_all(beats)


def test_a_clock_that_leaps_is_noticed_by_the_next_attempt(store: FaultyStore) -> None:
    """The machine slept, say: what has become due meanwhile is renewed, although nobody was to look so soon."""
    clock = _Clock()
    beats = Heartbeat(clock)
    beats.start(_attempt(store, lease=LONG))
    _asleep(beats)
    clock.ahead = 3_600.0
    beats.start(_attempt(store, "next", lease=LONG))
    wait_until(lambda: _renewals(store), "it is renewed", timeout=20)  # nobody is to look again for a minute
    _stop_all(beats)


def test_renewal_that_takes_a_while_is_followed_by_the_next(store: FaultyStore, beats: Heartbeat) -> None:
    """While the only one is under way the coordinator sleeps without an end, and is woken when it is done."""
    attempt = _attempt(store)

    def take_a_while(record: Record) -> None:
        wait_until(lambda: beats._sleeps_until == math.inf, "it sleeps without an end")
        _asleep(beats)

    store.before_swap = take_a_while
    beats.start(attempt)
    wait_until(lambda: _renewals(store) > 1, "it is renewed again", timeout=20)  # not only a minute later


def test_the_reserve_renews_first_what_is_most_urgent(store: FaultyStore, beats: Heartbeat) -> None:
    """It makes one renewal at a time, and a short lease has less time to wait for it."""
    for key, due in (("later", 2.0), ("urgent", 1.0), ("last", 3.0)):
        attempt = _attempt(store, key, lease=60_000)
        beats._beats[attempt] = _Beat(attempt, due, is_handed_over=True, left="no thread")
    beats._renew_left()
    assert [_renewals(store, key) for key in ("later", "urgent", "last")] == [0, 1, 0]


def test_stops_at_a_lost_lease_and_when_the_delivery_is_over(store: FaultyStore, beats: Heartbeat) -> None:
    """A beat that a signal kept from being stopped does not keep its claim for ever, and does not count."""
    delivery = threading.Lock()
    lost, over = _attempt(store, "lost"), _attempt(store, "over", is_underway=delivery.locked)
    mine = lost._record
    store.store.swap(mine.but(owner="other", revision="theirs"), mine.revision)
    with delivery:
        beats.start(lost)
        beats.start(over)
        wait_until(lambda: lost.is_over and lost not in beats._beats, "the loss was noticed")
        wait_until(lambda: _renewals(store, "over"), "it is renewed")
        assert beats.in_flight == 1
    assert beats.in_flight == 0
    wait_until(lambda: over not in beats._beats, "the beat was dropped")


def test_heartbeat_of_a_child_begins_anew(store: FaultyStore, beats: Heartbeat, monkeypatch: Any) -> None:
    """What runs after a fork: the same object, which whoever imported it still has, without beats or threads."""
    monkeypatch.setattr(heartbeat_module, "heartbeat", beats)
    beats.start(_attempt(store, lease=60_000))
    heartbeat_module._start_anew()
    assert (beats._beats, beats._coordinator.is_alive, beats._reserve.is_alive) == ({}, False, False)


def test_the_next_renewal_counts_from_the_request_and_not_from_its_reply(store: FaultyStore) -> None:
    """The lease does, too; and a renewal that was handed over is not made once its attempt has ended."""
    clock = FakeClock()
    beats, attempt = Heartbeat(clock), _attempt(store, lease=60_000)
    beat = beats._beats[attempt] = _Beat(attempt, due=0.0, is_handed_over=True)
    store.before_swap = lambda record: clock.advance(15_000)
    asked_at = clock.monotonic()
    beats._renew(beat)
    assert (_renewals(store), beat.due) == (1, asked_at + 20)
    beat.is_handed_over = True
    beats.stop(attempt)
    beats._renew(beat)
    assert _renewals(store) == 1


def test_renews_until_the_deadline_and_then_tells(store: FaultyStore, beats: Heartbeat) -> None:
    """At once and once, though the body does nothing; then the lease runs out."""
    late, began = list[float](), time.monotonic()
    attempt = _attempt(store, deadline=750, tell_late=lambda claim: late.append(time.monotonic()))
    beats.start(attempt)
    wait_until(lambda: attempt not in beats._beats, "it is renewed no more")
    assert _renewals(store) > 0
    assert [each >= began + 0.75 for each in late] == [True]
    assert attempt.complete(None) == Written()


def test_looks_at_the_deadline_and_no_earlier_than_it(store: FaultyStore) -> None:
    """A look at a third of a lease of an hour would come too late; a moment too early would renew once more."""
    clock = FakeClock()
    beats, began = Heartbeat(clock), clock.monotonic()
    attempt = _attempt(store, lease=LONG, claimed_at=began, clock=clock, deadline=3_700_000)
    beats.start(attempt)
    beat = beats._beats[attempt]
    dues = [beat.due - began]
    clock.advance(3_600_000)
    beat.is_handed_over = True
    beats._renew(beat)
    beats.start(attempt)
    dues += [beat.due - began, beats._beats[attempt].due - began]
    beats.stop(attempt)
    assert dues == pytest.approx([1200, 3700, 3700])
