"""The policy: its defaults, its durations, and the delays that follow from it; test_refusals has what it refuses."""

from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest

from celery_idempotent import Policy


def test_defaults_are_as_documented() -> None:
    """A task that says nothing gets a minute's lease, a week's retention and at least once."""
    policy = Policy()
    assert (policy.lease_ms, policy.retain_ms, policy.backoff_ms) == (60_000, 7 * 86_400_000, 1_000)
    told = (policy.on_conflict, policy.on_takeover, policy.on_outage, policy.mode)
    assert told == ("retry", "rerun", "retry", "enforce")


def test_is_frozen_and_only_the_key_is_positional() -> None:
    """A policy is shared by all deliveries, so nothing may change it; a typo is a TypeError."""
    with pytest.raises(FrozenInstanceError):
        Policy().lease = 5  # type: ignore[misc]
    assert Policy("order_id") == Policy(key="order_id")
    with pytest.raises(TypeError):
        Policy("order_id", "scope")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="leese"):
        Policy(leese=5)  # type: ignore[call-arg]


def test_durations_are_seconds_or_timedeltas() -> None:
    """Both spellings of a duration are one."""
    assert Policy(lease=90).lease_ms == Policy(lease=timedelta(seconds=90)).lease_ms == 90_000
    assert Policy(retain=3600.5).retain_ms == 3_600_500
    assert "once it is done, it may run again" in Policy(publish="once", retain=0).guarantee("rebuild")


def test_scope_is_the_tasks_name_unless_set() -> None:
    """Keys survive a rename of the task only if the scope is set."""
    assert Policy().scope_of("orders.charge") == "orders.charge:1"
    assert Policy(scope="billing:3").scope_of("orders.charge") == "billing:3:1"


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
