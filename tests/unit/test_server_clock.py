"""The clock of a server, read off its replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.stores.clock import ServerClock


class _Local:
    """A local clock that is moved by hand."""

    def __init__(self) -> None:
        self.milliseconds = 5_000

    def __call__(self) -> int:
        return self.milliseconds


def _never() -> int:
    pytest.fail("the server was asked although a reply had told its time")


def test_asks_once_when_nothing_is_known() -> None:
    """The first look costs a request, the next ones none."""
    local, asked = _Local(), []
    clock = ServerClock(lambda: asked.append(1) or 1_800_000_000_000, local)  # type: ignore[func-returns-value]

    assert abs(clock.now() - 1_800_000_000_000) <= 1
    local.milliseconds += 250
    assert abs(clock.now() - 1_800_000_000_250) <= 1
    assert asked == [1]


def test_a_reply_teaches_it_for_free() -> None:
    """Who has had a reply need not ask."""
    local = _Local()
    clock = ServerClock(_never, local)

    asked_at = clock.before_asking()
    local.milliseconds += 10
    clock.learn(1_800_000_000_000, asked_at)

    assert 1_800_000_000_000 <= clock.now() <= 1_800_000_000_011


def test_slow_replies_do_not_move_it() -> None:
    """A reply that agrees with what is known changes nothing, however long it was on its way."""
    local = _Local()
    clock = ServerClock(_never, local)
    clock.learn(1_800_000_000_000, clock.before_asking())
    before = clock.now() - local()

    asked_at = clock.before_asking()
    local.milliseconds += 2_000
    clock.learn(1_800_000_001_900, asked_at)

    assert clock.now() - local() == before


def test_follows_a_server_whose_clock_was_set() -> None:
    """Another server, or the same with another time: its word counts, in both directions."""
    local = _Local()
    clock = ServerClock(_never, local)
    for server in (1_800_000_000_000, 1_800_000_300_000, 1_799_999_000_000):
        clock.learn(server, clock.before_asking())
        assert abs(clock.now() - server) <= 1


@given(
    true_offset=st.integers(-(10**12), 10**12),
    trips=st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=1, max_size=20),
)
def test_is_never_further_off_than_the_fastest_trip(true_offset: int, trips: list[tuple[int, int]]) -> None:
    """The error is bounded by the shortest round trip seen, plus the millisecond that is cut off."""
    local = _Local()
    clock = ServerClock(_never, local)
    for there, back in trips:
        asked_at = clock.before_asking()
        local.milliseconds += there
        server = local() + true_offset
        local.milliseconds += back
        clock.learn(server, asked_at)

    assert abs(clock.now() - (local() + true_offset)) <= min(there + back for there, back in trips) + 1
