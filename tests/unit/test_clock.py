"""Clocks: time in which the machine was suspended counts, and a server's clock is read off its replies."""
# mypy: allow-untyped-decorators

import sys
import time
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent import clock
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.claim import Claim, end_lease
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.stores.clock import ServerClock
from celery_idempotent.testing import FakeClock
from tests.support.scene import raising

NEVER = raising(AssertionError("the server was asked although a reply had told its time"))


@pytest.mark.parametrize(("platform", "name"), [("linux", "CLOCK_BOOTTIME"), ("darwin", "CLOCK_MONOTONIC")])
def test_the_clock_is_the_one_that_goes_on_in_suspend(platform: str, name: str, monkeypatch: Any) -> None:
    """Each system has it under another name; on most machines nobody would see that it is the wrong one."""
    asked: list[object] = []
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, name, 42, raising=False)
    monkeypatch.setattr(time, "clock_gettime", asked.append)
    clock.counting_suspend()
    assert asked == [42]


@pytest.mark.parametrize(("platform", "gettime"), [("win32", time.clock_gettime), (sys.platform, raising(OSError()))])
def test_a_system_without_such_a_clock_has_pythons_own(platform: str, gettime: object, monkeypatch: Any) -> None:
    """Windows has no such function; an old kernel or a sandbox refuses."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(time, "clock_gettime", gettime)
    assert clock.counting_suspend() is time.monotonic


@pytest.mark.parametrize("owner", [Claim.__init__, Delivery.__init__, Heartbeat.__init__, Breaker.__init__, end_lease])
def test_whatever_counts_a_lease_counts_by_that_clock(owner: FunctionType) -> None:
    """By default; a test of theirs gives another."""
    assert clock in (*(owner.__defaults__ or ()), *(owner.__kwdefaults__ or {}).values())


def test_a_servers_time_goes_on_while_this_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once: what was learned of its clock is an offset to a clock that goes on."""
    ask = Mock(return_value=1_000_000)
    server = ServerClock(ask)
    before = server.now()
    monkeypatch.setattr(clock, "monotonic", lambda: time.monotonic() + 3600)  # Python's own has stood still
    assert server.now() - before >= 3_600_000
    ask.assert_called_once_with()


@given(
    st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=1, max_size=20),
)
def test_a_servers_time_is_never_further_off_than_the_fastest_trip(offsets: Any, trips: list[tuple[int, int]]) -> None:
    """Plus the millisecond that is cut off; also after its clock was set, far enough for it to be seen."""
    local = FakeClock(5_000)
    server, offset = ServerClock(NEVER, local.now), offsets[0]
    for each in offsets:
        offset = each if abs(each - offset) > 20_000 else offset
        for there, back in trips:
            asked_at = server.before_asking()
            local.advance(there)
            answered = local.now() + offset
            local.advance(back)
            server.learn(answered, asked_at)
        assert abs(server.now() - (local.now() + offset)) <= min(map(sum, trips)) + 1
