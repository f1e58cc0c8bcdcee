"""The heartbeat: real threads, a real clock, short leases; every wait is for a condition."""

import os
import threading
import time
from collections.abc import Callable

import pytest

from celery_idempotent.attempt import Attempt, claim
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.heartbeat import Heartbeat, heartbeat
from celery_idempotent.protocol import Run
from celery_idempotent.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.unit.test_attempt import _request

LEASE = 300


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def beats() -> Heartbeat:
    return Heartbeat()


def _attempt(store: FaultyStore, key: str = "k", lease: int = LEASE) -> Attempt:
    claimed_at = time.monotonic()
    decision = claim(store, _request(key=key, lease=lease))
    assert isinstance(decision, Run)
    return Attempt(store, decision.record, lease=lease, retain=60_000, claimed_at=claimed_at)


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def _lease(store: FaultyStore, key: str = "k") -> int:
    record = store.get(key)
    assert record is not None
    return record.lease_until


def test_renews_what_outlives_a_third_of_its_lease(store: FaultyStore, beats: Heartbeat) -> None:
    """A long attempt's lease is extended again and again until it is stopped."""
    attempt = _attempt(store)
    first = _lease(store)

    beats.start(attempt)

    _wait_until(lambda: _lease(store) >= first + 3 * LEASE, "three leases later it is still held")
    beats.stop(attempt)


def test_short_attempts_cost_no_write(store: FaultyStore, beats: Heartbeat) -> None:
    """What ends within a third of its lease is never renewed."""
    watch = _attempt(store, "long")
    for number in range(50):
        attempt = _attempt(store, f"short {number}", lease=60_000)
        beats.start(attempt)
        beats.stop(attempt)
    beats.start(watch)

    renewed = _lease(store, "long")
    _wait_until(lambda: _lease(store, "long") > renewed, "the watch was renewed")
    beats.stop(watch)

    assert all(record.key == "long" or record.attempts == 1 for record in store.swaps)
    assert sum(record.key != "long" for record in store.swaps) == 50


def test_shorter_lease_that_comes_later_is_renewed_in_time(store: FaultyStore, beats: Heartbeat) -> None:
    """The thread that sleeps for a long lease is woken for a short one."""
    long = _attempt(store, "long", lease=3_600_000)
    beats.start(long)
    _wait_until(lambda: beats._sleeps_until > time.monotonic() + 60, "the thread sleeps for long")
    short = _attempt(store, "short")
    first = _lease(store, "short")

    beats.start(short)

    _wait_until(lambda: _lease(store, "short") > first, "the short lease was renewed")
    beats.stop(short)
    beats.stop(long)


def test_one_thread_serves_all_attempts(store: FaultyStore, beats: Heartbeat) -> None:
    """However many attempts are running, there is one renewing thread."""
    attempts = [_attempt(store, f"k{number}") for number in range(20)]
    before = threading.active_count()

    for attempt in attempts:
        beats.start(attempt)

    assert threading.active_count() <= before + 1
    firsts = [record.lease_until for record in store.swaps[:20]]
    _wait_until(lambda: all(_lease(store, f"k{number}") > firsts[number] for number in range(20)), "all were renewed")
    for attempt in attempts:
        beats.stop(attempt)
        beats.stop(attempt)


def test_renewal_is_retried_well_within_the_lease(store: FaultyStore, beats: Heartbeat) -> None:
    """A renewal that fails is tried again soon, and the lease is kept."""
    attempt = _attempt(store)
    first = _lease(store)
    store.faults.extend(["request lost"] * 4)

    beats.start(attempt)

    _wait_until(lambda: _lease(store) > first, "renewed after the outage")
    assert not attempt.is_over
    beats.stop(attempt)


def test_stops_at_a_lost_lease(store: FaultyStore, beats: Heartbeat) -> None:
    """An attempt that was taken over is renewed no more, and its body can ask."""
    attempt = _attempt(store)
    record = store.get("k")
    assert record is not None
    from dataclasses import replace

    store.store.swap(replace(record, owner="other", revision="theirs"), record.revision)

    beats.start(attempt)

    _wait_until(lambda: attempt.is_over, "the loss was noticed")
    _wait_until(lambda: attempt not in beats._beats, "the beat was dropped")


def test_stops_when_the_bodys_thread_is_gone(store: FaultyStore, beats: Heartbeat) -> None:
    """A body that died without a word does not keep its claim for ever."""
    attempt = _attempt(store)
    body = threading.Thread(target=beats.start, args=(attempt,))
    body.start()
    body.join()

    _wait_until(lambda: attempt not in beats._beats, "the beat was dropped")


def test_broken_store_does_not_stop_the_other_renewals(
    store: FaultyStore, beats: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that raises what it must not is logged; every other attempt is still renewed."""
    broken = FaultyStore(MemoryStore())
    bad = _attempt(broken, "bad")

    def fail(record: Record) -> None:
        raise ZeroDivisionError

    broken.before_swap = fail
    good = _attempt(store)
    first = _lease(store)

    beats.start(bad)
    beats.start(good)

    _wait_until(lambda: _lease(store) >= first + 2 * LEASE, "the good one was renewed on")
    _wait_until(lambda: "ZeroDivisionError" in caplog.text, "the bad one was logged")
    beats.stop(bad)
    beats.stop(good)


def test_outage_is_logged_without_arguments(
    store: FaultyStore, beats: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the key and the reason."""
    attempt = _attempt(store)
    store.before_swap = lambda record: (_ for _ in ()).throw(StoreUnavailable("s", "swap", "down"))

    beats.start(attempt)

    _wait_until(lambda: "idempotency.renewal_failed key=k" in caplog.text, "the failure was logged")
    beats.stop(attempt)


def test_child_has_a_heartbeat_of_its_own(store: FaultyStore) -> None:
    """After a fork the process's heartbeat is new: no thread, no beats, no lock held in the copy."""
    attempt = _attempt(store, lease=60_000)
    heartbeat.start(attempt)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            first = _lease(store)
            short = _attempt(store, "child")
            heartbeat.start(short)
            begun = _lease(store, "child")
            _wait_until(lambda: _lease(store, "child") > begun, "the child's own attempt was renewed")
            status = 0 if attempt not in heartbeat._beats and _lease(store) == first else 2
        finally:
            os._exit(status)
    heartbeat.stop(attempt)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
