"""Time in which the machine was suspended counts: a lease goes on in it, and so do other workers."""

import sys
import time
from types import FunctionType

import pytest

from celery_idempotent import clock
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.claim import Claim, end_lease
from celery_idempotent.engine.delivery import Delivery, Outcome
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.stores.clock import ServerClock
from tests.support.scene import Scene


@pytest.fixture
def suspended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which the machine has been suspended: Python's own clock has stood still."""
    slept = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: time.monotonic() + slept[0])
    return slept


@pytest.mark.parametrize(("platform", "name"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC")])
def test_the_clock_is_the_one_that_goes_on_in_suspend(
    platform: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system has it under another name; on most machines nobody would see that it is the wrong one."""
    asked: list[object] = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, name, 42, raising=False)
    monkeypatch.setattr(time, "clock_gettime", asked.append)

    clock.counting_suspend()

    assert asked == [42]


@pytest.mark.parametrize("absent", ["the name", "the clock"])
def test_a_system_without_such_a_clock_has_pythons_own(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no such function; an old kernel or a sandbox refuses."""

    def refuse(clock: int) -> float:
        raise OSError

    if absent == "the name":
        monkeypatch.setattr(sys, "platform", "win32")
    else:
        monkeypatch.setattr(time, "clock_gettime", refuse)

    assert clock.counting_suspend() is time.monotonic


def test_an_attempt_that_slept_past_its_lease_asks_before_it_acts(suspended: list[float]) -> None:
    """Another worker has completed meanwhile: the call of the next step is not made."""
    scene, calls = Scene(), list[object]()
    scene.clock.monotonic = lambda: clock.monotonic()  # type: ignore[method-assign]
    scene.heartbeat = Heartbeat(time)  # it sleeps, and does not renew as soon as the machine is awake

    def body(attempt: object) -> None:
        suspended[0] = 3600
        scene.steal()
        attempt.step("charge", calls.append)  # type: ignore[attr-defined]

    assert scene.perform(body) == Outcome("theirs")
    assert not calls


@pytest.mark.parametrize("owner", [Claim.__init__, Delivery.__init__, Heartbeat.__init__, Breaker.__init__, end_lease])
def test_whatever_counts_a_lease_counts_by_that_clock(owner: FunctionType) -> None:
    """By default; a test of theirs gives another."""
    defaults = (*(owner.__defaults__ or ()), *(owner.__kwdefaults__ or {}).values())

    assert clock in defaults


def test_the_servers_time_goes_on_while_this_machine_is_suspended(suspended: list[float]) -> None:
    """What was learned of its clock is an offset to a clock that goes on, too."""
    server = ServerClock(lambda: 1_000_000)
    before = server.now()
    suspended[0] = 3600

    assert server.now() - before >= 3_600_000
