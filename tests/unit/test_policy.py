"""The policy: bad or incoherent values fail where they are written, and say what to do."""

from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest

from celery_idempotent import (
    IdempotencyError,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PolicyError,
    SafeToRetry,
    StoreMisconfigured,
    StoreUnavailable,
)


class _NotYet(SafeToRetry):
    """Of an author's own."""


def test_defaults_are_as_documented() -> None:
    """A task that says nothing gets a minute's lease, a week's retention and at least once."""
    policy = Policy()

    assert (policy.lease_ms, policy.retain_ms) == (60_000, 7 * 86_400_000)
    assert policy.backoff_ms == 1_000
    assert (policy.on_conflict, policy.on_takeover, policy.on_outage, policy.mode) == (
        "retry",
        "rerun",
        "retry",
        "enforce",
    )


def test_is_frozen_and_only_the_key_is_positional() -> None:
    """A policy is shared by all deliveries, so nothing may change it; a typo is a TypeError."""
    with pytest.raises(FrozenInstanceError):
        Policy().lease = 5  # type: ignore[misc]
    assert Policy("order_id") == Policy(key="order_id")
    with pytest.raises(TypeError):
        Policy("order_id", "scope")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="leese"):
        Policy(leese=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        {"lease": 0},
        {"lease": 0.4},
        {"lease": -1},
        {"lease": "60"},
        {"lease": True},
        {"lease": float("inf")},
        {"lease": float("nan")},
        {"backoff": timedelta(seconds=-1)},
        {"retain": 60},
        {"retain": None},
        {"backoff": 0},
        {"max_takeovers": "2"},
        {"max_takeovers": True},
        {"max_takeovers": 0},
        {"remember": ValueError},
        {"remember": [ValueError]},
        {"remember": (5,)},
        {"remember": (int,)},
        {"remember": (ValueError, SafeToRetry)},
        {"remember": (_NotYet,)},
        {"remember": (LeaseLost,)},
        {"remember": (StoreUnavailable,)},
        {"remember": (StoreMisconfigured,)},
        {"remember": (SystemExit,)},
        {"remember": (KeyboardInterrupt,)},
        {"remember": (GeneratorExit,)},
        {"remember": (BaseException,)},
        {"remember": (BaseExceptionGroup,)},
        {"scope": ""},
        {"scope": "x" * 1901},
        {"scope": 5},
        {"on_conflict": "wait"},
        {"on_takeover": "steal"},
        {"on_outage": "ignore"},
        {"mode": "on"},
        {"key": "order_id["},
        {"key": None},
        {"fingerprint": ()},
    ],
)
def test_unusable_value_names_option_value_and_remedy(options: dict[str, Any]) -> None:
    """The error says which option, what was given, and what is possible."""
    with pytest.raises(PolicyError) as raised:
        Policy(**options)

    assert raised.value.option in options
    assert raised.value.value == repr(options[raised.value.option])
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("remembered", "meaning"),
    [
        (_NotYet, "_NotYet says that no effect has begun"),
        (LeaseLost, "another attempt owns the key"),
        (StoreMisconfigured, "is an outage of the store"),
        (SystemExit, "would end every worker that reads the record"),
        (BaseException, "name types that derive from Exception"),
    ],
)
def test_what_is_never_an_outcome_is_refused_with_what_it_means(remembered: Any, meaning: str) -> None:
    """Nothing is accepted in silence that would mean nothing, or end every worker that replays it."""
    with pytest.raises(PolicyError, match=f"remember=.*{meaning}"):
        Policy(remember=(ValueError, remembered))


@pytest.mark.parametrize("base", [Exception, IdempotencyError, OutcomeUnknown, TimeoutError, ExceptionGroup])
def test_base_of_what_is_never_an_outcome_may_be_remembered(base: Any) -> None:
    """It stands for the other exceptions under it; what steers a delivery goes its own way at run time."""
    assert Policy(remember=(base,)).remember == (base,)


def test_durations_are_seconds_or_timedeltas() -> None:
    """Both spellings of a duration are one."""
    assert Policy(lease=90, retain=3600.5).lease_ms == Policy(lease=timedelta(seconds=90)).lease_ms == 90_000
    assert Policy(retain=3600.5).retain_ms == 3_600_500


def test_scope_is_the_tasks_name_unless_set() -> None:
    """Keys survive a rename of the task only if the scope is set."""
    assert Policy().scope_of("orders.charge") == "orders.charge:1"
    assert Policy(scope="billing:3").scope_of("orders.charge") == "billing:3:1"
    with pytest.raises(PolicyError, match="scope"):
        Policy().scope_of("x" * 2000)


def test_backoff_doubles_up_to_its_bounds() -> None:
    """The bound of the delay doubles with every outage and never exceeds any cap."""
    policy = Policy(backoff=1)

    bounds = [policy.outage_delay_ms(number, bounds=(), draw=1.0) for number in range(8)]

    assert bounds == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    assert policy.outage_delay_ms(10_000, bounds=(), draw=1.0) == 60_000
    assert Policy(backoff=90).outage_delay_ms(10_000, bounds=(), draw=1.0) == 90_000
    assert policy.outage_delay_ms(7, bounds=(900_000, 250), draw=1.0) == 250


def test_backoff_has_full_jitter_and_is_never_zero() -> None:
    """Any delay up to the bound is possible, so that a crowd does not come back at once."""
    policy = Policy()

    assert policy.outage_delay_ms(3, bounds=(), draw=0.5) == 4_000
    assert policy.outage_delay_ms(3, bounds=(), draw=0.0) == policy.outage_delay_ms(3, bounds=(1,), draw=1.0) == 50


def test_nothing_is_retained_only_where_a_publisher_keeps_calls_apart() -> None:
    """Elsewhere every redelivery would run; and what is refused must not be repeated."""
    assert "once it is done, it may run again" in Policy(publish="once", retain=0).guarantee("rebuild")
    for other in ({}, {"publish": "once", "on_takeover": "refuse"}):
        with pytest.raises(PolicyError, match="must be longer than the lease, or 0 with publish='once'"):
            Policy(retain=0, **other)  # type: ignore[arg-type]
