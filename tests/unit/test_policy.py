"""The policy: what follows from its options, and how long a delivery waits; test_refusals has what it refuses."""

import math
import random
from dataclasses import FrozenInstanceError
from datetime import timedelta
from statistics import fmean
from typing import Any

import pytest

from celery_idempotent import Policy


def test_scope_is_the_tasks_name_unless_set() -> None:
    """Keys survive a rename of the task only if the scope is set."""
    assert Policy().scope_of("orders.charge") == "orders.charge:1"
    assert Policy(scope="billing:3").scope_of("orders.charge") == "billing:3:1"


def test_is_frozen_and_only_the_key_is_positional() -> None:
    """All deliveries share a policy, so nothing may change it; a typo is a TypeError."""
    with pytest.raises(FrozenInstanceError):
        Policy().lease = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        Policy("order_id", "scope")  # type: ignore[call-arg]
    assert Policy(lease=90).lease_ms == Policy(lease=timedelta(seconds=90)).lease_ms == 90_000
    assert (Policy("a"), Policy(retain=3600.5).retain_ms) == (Policy(key="a"), 3_600_500)


@pytest.mark.parametrize(
    ("backoff", "postponed", "bounds", "draw", "delay"),
    [
        *((1, number, (), 1.0, min(2**number, 60) * 1_000) for number in range(8)),
        (1, 10_000, (), 1.0, 60_000),
        (90, 10_000, (), 1.0, 90_000),
        (1, 7, (900_000, 250), 1.0, 250),
        # Full jitter, so that a crowd does not come back at once; and never none.
        (1, 3, (), 0.5, 4_000),
        (1, 3, (), 0.0, 50),
        (1, 3, (1,), 1.0, 50),
    ],
)
def test_delay_after_an_outage_doubles_up_to_its_bounds(
    backoff: float, postponed: int, bounds: tuple[int, ...], draw: float, delay: int
) -> None:
    """The bound doubles with every outage and never exceeds any cap."""
    assert Policy(backoff=backoff).outage_delay_ms(postponed, bounds=bounds, draw=draw) == delay


SEEDS = 400


def _waited(policy: Policy, body: float, arrival: float, draws: random.Random) -> tuple[int, float]:
    """How often a duplicate asks until the body has ended, and how long after the end; the lease is renewed."""
    now, asked = arrival, 1
    while now < body:
        rest = policy.lease_ms - (now * 1000) % (policy.lease_ms / 3) + 1000  # a heartbeat comes every third of it
        waits: dict[str, Any] = {"running_for": round(now * 1000), "retry_after": round(rest), "draw": draws.random()}
        now += policy.conflict_delay_ms(asked - 1, bounds=(), **waits) / 1000
        asked += 1
    return asked, now - body


@pytest.mark.parametrize("lease", [1, 60])
@pytest.mark.parametrize(
    ("body", "arrives", "is_soon"),
    [(2, 0, False), (10, 0, False), (10, 0.5, True), (60, 0, False), (60, 0.5, True), (60, 0.9, True), (600, 0, True)],
)
def test_duplicate_asks_seldom_and_is_answered_soon(body: float, arrives: float, is_soon: bool, lease: float) -> None:
    """Once for every doubling, twice more at most; within a third of the body's duration in the mean."""
    draws, policy = random.Random(body), Policy(lease=lease)
    asked, late = zip(
        *(_waited(policy, body, arrives * body + draws.random() / 10, draws) for _ in range(SEEDS)), strict=True
    )
    bound = 2 + math.log2(body) + max(0.0, body - 60) / 30  # every half a minute where the longest delay is reached
    assert fmean(asked) <= bound + 0.5
    assert max(asked) <= bound + 2
    if is_soon:  # it comes late, or the body is long
        assert fmean(late) <= min(body / 3, 30)
        assert max(late) <= min(1.25 * body, 60)


@pytest.mark.parametrize(
    ("policy", "postponed", "running_for", "retry_after", "bounds", "draw", "delay"),
    [
        # An overdue renewal is waited for and no longer: its owner is likely to be dead.
        (Policy(lease=60), 99, 600_000, 20_000, (), 0.5, 20_500),
        (Policy(lease=60), 99, 600_000, 40_000, (), 0.5, 40_500),
        (Policy(lease=60), 99, 600_000, 61_000, (), 0.5, 45_000),
        (Policy(lease=100), 99, 600_000, 14_000, (), 0.5, 14_500),  # the grace after the lease is no sign of life
        (Policy(lease=1), 99, 600_000, 1_900, (), 0.0, 30_000),  # a short lease says nothing of how long it takes
        # Right after a claim nothing is known; a broker may not hold a message for long.
        (Policy(backoff=2), 0, 0, 61_000, (), 0.0, 2_000),
        (Policy(backoff=2), 9, 0, 61_000, (), 1.0, 5_000),
        (Policy(backoff=2), 9, 10**9, 10**9, (), 1.0, 60_000),
        (Policy(backoff=2), 9, 10**9, 10**9, (900,), 1.0, 900),
        (Policy(backoff=2), 9, 10**9, 10**9, (900,), 0.0, 450),
        # One that comes late to a long body has its questions left, and spends them on being answered soon.
        (Policy(), 0, 32_000, 61_000, (), 0.5, 8_000),
        (Policy(), 5, 32_000, 61_000, (), 0.0, 24_000),
    ],
)
def test_delay(
    policy: Policy, postponed: int, running_for: int, retry_after: int, bounds: tuple[int, ...], draw: float, delay: int
) -> None:
    """In proportion to how long the body has been running."""
    assert policy.conflict_delay_ms(postponed, running_for, retry_after, bounds=bounds, draw=draw) == delay
