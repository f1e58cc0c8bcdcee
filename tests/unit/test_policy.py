"""The policy and its effects: what they promise, in words, and what follows; test_refusals has what is refused."""

import math
import random
import re
from dataclasses import FrozenInstanceError
from datetime import timedelta
from functools import partial
from statistics import fmean
from typing import Any

import pytest

from celery_idempotent import Policy
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce, Committed, Effect, Fenced, Keyed, in_words
from celery_idempotent.protocol.steps import Terms, terms_of


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
        now += policy.conflict_delay_ms(asked - 1, bounds=(), grace=1000, **waits) / 1000
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
    found = policy.conflict_delay_ms(postponed, running_for, retry_after, bounds=bounds, draw=draw, grace=1000)
    assert found == delay


DAY = timedelta(days=1)
RERUN, REFUSE, WITHIN_A_DAY = Terms("rerun", None), Terms("refuse", None), Terms("rerun", 86_400_000)


@pytest.mark.parametrize(
    ("effect", "terms", "fenced", "promise"),
    [
        # the terms of a step and of a fenced step, or the tool that the refusal names
        (Committed(), "attempt.commit()", "attempt.commit()", "exactly once: "),
        (Keyed(), RERUN, RERUN, "exactly once, "),
        (Keyed(DAY), WITHIN_A_DAY, WITHIN_A_DAY, "exactly once within 1 day .* at least once"),
        (Keyed(90, "refuse"), *[Terms("refuse", 90_000)] * 2, "exactly once within 90 s .* at most once"),
        (Fenced(), "attempt.fenced_step()", RERUN, "exactly once: "),
        (AtLeastOnce(), RERUN, RERUN, "at least once: "),
        (AtMostOnce(), REFUSE, REFUSE, "at most once: .* ends UNKNOWN"),
    ],
)
def test_step_is_made_as_declared(effect: Effect, terms: Any, fenced: Any, promise: str) -> None:
    """guarantee() says no more than is true; where a step alone would not keep that, another tool is named."""
    for is_fenced, expected in ((False, terms), (True, fenced)):
        if isinstance(expected, Terms):
            assert terms_of("index", {"index": effect}, is_fenced=is_fenced) == expected
        else:
            with pytest.raises(PolicyError, match=re.escape(expected)):
                terms_of("index", {"index": effect}, is_fenced=is_fenced)
    (told,) = (each for each in Policy(effects={"index": effect}).guarantee("t").splitlines() if "  index: " in each)
    assert re.match(f"  index: {promise}", told)


def test_undeclared_step_is_refused_with_the_nearest_name() -> None:
    """If effects are declared, all are: a guarantee that leaves one out is none."""
    effects: dict[str, Effect] = {"charge": Keyed(), "text to *": AtMostOnce()}
    with pytest.raises(PolicyError, match=r"step='chrage'.* has 'charge', 'text to \*'; did you mean 'charge'\?"):
        terms_of("chrage", effects)
    with pytest.raises(PolicyError, match=r"step='mail'.* has 'charge', 'text to \*'; see"):
        terms_of("mail", effects)


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("text to 0160", REFUSE),
        ("text to none", WITHIN_A_DAY),  # a name of its own comes first, then the first pattern that fits
        ("charge [EUR]", REFUSE),
        ("sure? yes", REFUSE),
        ("charge E", RERUN),
        ("surer yes", RERUN),
        ("Sure? yes", RERUN),
        ("mail", RERUN),
    ],
)
def test_pattern_declares_steps_of_a_loop(name: str, terms: Terms) -> None:
    """Their names are made as the body runs; only an asterisk is special."""
    once = dict.fromkeys(("text to *", "charge [EUR]", "sure? *"), AtMostOnce())
    assert terms_of(name, {**once, "*": AtLeastOnce(), "text to none": Keyed(DAY)}) == terms


@pytest.mark.parametrize(
    ("effects", "option", "value"),
    [
        (["charge"], "effects", "['charge']"),
        ({"text": AtMostOnce(), "charge": "keyed"}, "effects['charge']", "'keyed'"),
        ({"charge": dict}, "effects['charge']", "<class 'dict'>"),
        ({"charge": Keyed(), "": Keyed()}, "effects", "{'': ...}"),
        ({1: Keyed()}, "effects", "{1: ...}"),
        ({"charge": Keyed(), "text": AtMostOnce}, "effects['text']", "AtMostOnce"),
        ({"*": AtLeastOnce(), "text to *": AtMostOnce()}, "effects", "'text to *'"),  # it is never reached
    ],
)
def test_what_declares_nothing_is_refused(effects: Any, option: str, value: str) -> None:
    """Where it is written, by the entry at fault."""
    with pytest.raises(PolicyError) as raised:
        Policy(effects=effects)
    assert (raised.value.option, raised.value.value) == (option, value)


@pytest.mark.parametrize(("option", "value"), [("window", 0), ("window", "day"), ("on_takeover", "retry")])
def test_unusable_declaration_is_refused(option: str, value: Any) -> None:
    """As a policy's own options are."""
    with pytest.raises(PolicyError) as raised:
        Keyed(**{option: value})
    assert (raised.value.option, raised.value.value) == (option, repr(value))


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (Policy(), "  key: ALL ARGUMENTS"),
        (Policy(("tenant", "order_id")), "  key: tenant, order_id"),
        (Policy(partial(len)), "  key: what functools.partial(<built-in function len>) returns"),
        (Policy(private=True), "  a duplicate returns None"),
        (Policy(retain=timedelta(hours=12)), "t: calls with the same idempotency key .* for 12 hours"),
        (Policy(retain=0, publish="once"), "t: .*; once it is done, it may run again"),
        (Policy(mode="observe"), "t: nothing is promised; .* reported$"),
        (Policy(), "  the body: exactly once unless"),
        (Policy(on_takeover="refuse"), "  the body: at most once"),
        (Policy(), "  when the store does not answer: nothing runs"),
        (Policy(on_outage="run"), "  when the store does not answer: .* unprotected"),
        (Policy(deadline=600), "  a body that runs for longer than 10 minutes: .* take over$"),
        (Policy(deadline=600, on_takeover="refuse"), "  a body that runs for longer than 10 minutes: .* UNKNOWN$"),
    ],
)
def test_guarantee_follows_the_policy(policy: Policy, told: str) -> None:
    """Each option that changes a promise has its line, and no other policy that line."""
    pattern = re.compile(f"^{re.escape(told) if 'partial' in told else told}", re.MULTILINE)
    assert pattern.search(policy.guarantee("t"))
    assert len(policy.guarantee("t").splitlines()) == {"enforce": 4 + bool(policy.deadline) + policy.private}.get(
        policy.mode, 1
    )


@pytest.mark.parametrize(
    ("duration", "words"),
    [(0.5, "0.5 s"), (1, "1 s"), (60, "1 minute"), (90, "90 s"), (7_200, "2 hours"), (timedelta(days=1.5), "36 hours")],
)
def test_durations_are_said_as_people_do(duration: float | timedelta, words: str) -> None:
    """In the largest unit that is whole."""
    assert in_words(duration) == words
