"""Declared effects: what they promise, in words, and what they make of a step."""

import re
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce, Committed, Effect, Fenced, Keyed, in_words
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.steps import Terms, terms_of

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
