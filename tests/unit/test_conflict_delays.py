"""How often a delivery asks that meets a running body, and how soon after its end: a simulation of many of them."""

import heapq
import math
import random
from statistics import fmean

import pytest

from celery_idempotent.protocol.policy import Policy

SEEDS = 400


def _waited(policy: Policy, body: float, arrival: float, draws: random.Random) -> tuple[int, float]:
    """How often a duplicate asks until the body has ended, and how long after the end; the lease is renewed."""
    now, asked = arrival, 1
    while now < body:
        now += _delay(policy, asked - 1, now, draws)
        asked += 1
    return asked, now - body


def _delay(policy: Policy, postponed: int, now: float, draws: random.Random) -> float:
    # A heartbeat renews the lease every third of it.
    third = policy.lease_ms / 3
    rest = policy.lease_ms - (now * 1000) % third + 1000
    drawn = draws.random()
    return policy.conflict_delay_ms(postponed, round(now * 1000), round(rest), bounds=(), draw=drawn) / 1000


@pytest.mark.parametrize("lease", [1, 60])
@pytest.mark.parametrize("body", [2, 10, 60, 600])
@pytest.mark.parametrize("arrives", [0, 0.5])
def test_duplicate_asks_once_for_every_doubling(body: float, lease: float, arrives: float) -> None:
    """Twice more at most, and every half a minute or more where the longest delay is reached."""
    draws, policy = random.Random(body), Policy(lease=lease)
    found = [_waited(policy, body, arrives * body + draws.random() / 10, draws) for _ in range(SEEDS)]
    bound = 2 + math.log2(body) + max(0.0, body - 60) / 30
    assert fmean(asked for asked, _ in found) <= bound + 0.5
    assert max(asked for asked, _ in found) <= bound + 2


@pytest.mark.parametrize("lease", [1, 60])
@pytest.mark.parametrize(("body", "arrives"), [(10, 0.5), (60, 0.5), (60, 0.9), (600, 0), (600, 0.5)])
def test_duplicate_is_answered_soon_after_the_end(body: float, arrives: float, lease: float) -> None:
    """Within a third of the body's duration in the mean, and half a minute: it comes late, or the body is long."""
    draws, policy = random.Random(body), Policy(lease=lease)
    found = [_waited(policy, body, arrives * body + draws.random() / 10, draws) for _ in range(SEEDS)]
    assert fmean(late for _, late in found) <= min(body / 3, 30)
    assert max(late for _, late in found) <= min(1.25 * body, 60)


@pytest.mark.parametrize("lease", [1, 2, 5, 10, 30, 60])
def test_storm_of_duplicates_asks_less_than_sixty_times_a_second(lease: float) -> None:
    """A thousand duplicates of one long body, whatever its lease: once they have been waiting for two minutes."""
    draws, policy = random.Random(1), Policy(lease=lease)
    waiting = [(draws.random(), 0) for _ in range(1000)]
    heapq.heapify(waiting)
    asked = 0
    while waiting[0][0] < 300:
        now, postponed = heapq.heappop(waiting)
        asked += now >= 120
        heapq.heappush(waiting, (now + _delay(policy, postponed, now, draws), postponed + 1))
    assert asked / 180 < 60


def test_overdue_renewal_is_waited_for_and_no_longer() -> None:
    """Whoever has not renewed its lease in time is likely to be dead: the next try comes right after the lease."""
    policy = Policy(lease=60, backoff=1)
    assert policy.conflict_delay_ms(99, 600_000, 20_000, bounds=(), draw=0.5) == 20_500
    assert policy.conflict_delay_ms(99, 600_000, 40_000, bounds=(), draw=0.5) == 40_500
    assert policy.conflict_delay_ms(99, 600_000, 61_000, bounds=(), draw=0.5) == 45_000
    # The grace comes after the lease, and is no sign of life.
    assert Policy(lease=100, backoff=1).conflict_delay_ms(99, 600_000, 14_000, bounds=(), draw=0.5) == 14_500


def test_short_lease_that_is_renewed_is_not_asked_for_again_and_again() -> None:
    """It says nothing of how long the body still takes."""
    policy = Policy(lease=1, backoff=1)
    assert policy.conflict_delay_ms(99, 600_000, 1_900, bounds=(), draw=0.0) == 30_000


def test_delay_is_never_shorter_than_the_first_nor_longer_than_its_bounds() -> None:
    """Right after a claim nothing is known; a broker may not hold a message for long."""
    policy = Policy(backoff=2)
    assert policy.conflict_delay_ms(0, 0, 61_000, bounds=(), draw=0.0) == 2_000
    assert policy.conflict_delay_ms(9, 0, 61_000, bounds=(), draw=1.0) == 5_000
    assert policy.conflict_delay_ms(9, 10**9, 10**9, bounds=(), draw=1.0) == 60_000
    assert policy.conflict_delay_ms(9, 10**9, 10**9, bounds=(900,), draw=1.0) == 900
    assert policy.conflict_delay_ms(9, 10**9, 10**9, bounds=(900,), draw=0.0) == 450


def test_delivery_that_has_asked_seldom_asks_soon() -> None:
    """One that comes late to a long body has its questions left, and spends them on being answered soon."""
    policy = Policy(backoff=1)
    assert policy.conflict_delay_ms(0, 32_000, 61_000, bounds=(), draw=0.5) == 8_000
    assert policy.conflict_delay_ms(5, 32_000, 61_000, bounds=(), draw=0.0) == 24_000
