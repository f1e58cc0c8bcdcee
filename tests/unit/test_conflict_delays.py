"""How often a delivery asks that meets a running body, and how soon after its end: a simulation of many of them."""

import math
import random
from statistics import fmean
from typing import Any

import pytest

from celery_idempotent.protocol.policy import Policy

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
