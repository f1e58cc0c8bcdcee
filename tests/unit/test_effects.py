"""Declared effects: what they promise, in words, and what they make of a step."""

import re
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.effects import (
    AtLeastOnce,
    AtMostOnce,
    Committed,
    Effect,
    Fenced,
    Keyed,
    in_words,
    promise,
)
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.steps import Terms, terms_of

DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        (Committed(), "exactly once: it is committed together with the record of the operation"),
        (Keyed(), "exactly once, as long as the receiver honours the step's key"),
        (Keyed(DAY), "exactly once within 1 day of the first call, .*; after that at least once"),
        (Keyed(90, "refuse"), "exactly once within 90 s .*; after that at most once"),
        (Fenced(), "exactly once: earlier attempts are fenced off"),
        (AtLeastOnce(), "at least once: it is repeated if the call raises, or a worker dies"),
        (AtMostOnce(), "at most once: .* ends UNKNOWN"),
    ],
)
def test_every_kind_of_effect_has_its_promise(effect: Effect, words: str) -> None:
    """One sentence that says no more than is true."""
    assert re.fullmatch(f"{words}.*", promise(effect))


@pytest.mark.parametrize(
    ("effect", "terms"),
    [
        (Keyed(), Terms("rerun", None)),
        (Keyed(DAY), Terms("rerun", 86_400_000)),
        (Keyed(DAY, "refuse"), Terms("refuse", 86_400_000)),
        (AtMostOnce(), Terms("refuse", None)),
        (AtLeastOnce(), Terms("rerun", None)),
    ],
)
def test_step_is_made_as_declared(effect: Effect, terms: Terms) -> None:
    """The declaration is what guarantee() tells, so it is what happens."""
    assert terms_of("charge", {"charge": effect}) == terms


def test_fenced_step_is_made_as_declared() -> None:
    """Fence and probe are in the call; a fenced step may also keep a weaker declaration."""
    assert terms_of("index", {"index": Fenced()}, is_fenced=True) == Terms("rerun", None)
    assert terms_of("index", {"index": AtMostOnce()}, is_fenced=True) == Terms("refuse", None)


@pytest.mark.parametrize(
    ("effect", "is_fenced", "remedy"),
    [
        (Committed(), False, r"attempt\.commit\(\) or \.transaction\(\)"),
        (Committed(), True, r"attempt\.commit\(\) or \.transaction\(\)"),
        (Fenced(), False, r"attempt\.fenced_step\(\)"),
    ],
)
def test_bare_step_does_not_pass_for_a_stronger_one(effect: Effect, is_fenced: bool, remedy: str) -> None:
    """guarantee() says exactly once of it, and a step alone would not keep that."""
    with pytest.raises(PolicyError, match=remedy):
        terms_of("index", {"index": effect}, is_fenced=is_fenced)


def test_undeclared_step_is_refused() -> None:
    """If effects are declared, all are: a guarantee that leaves one out is none."""
    with pytest.raises(
        PolicyError, match="^step='mail': is not declared by Policy.*, which has 'charge', 'text'; see "
    ):
        terms_of("mail", {"charge": Keyed(), "text": AtMostOnce()})


def test_misspelt_step_is_told_the_nearest_name() -> None:
    """The declared names as a plain list, and the one that was probably meant."""
    with pytest.raises(PolicyError, match=r"which has 'charge', 'text to \*'; did you mean 'charge'\?; see "):
        terms_of("chrage", {"charge": Keyed(), "text to *": AtMostOnce()})


def test_pattern_that_can_never_count_is_refused() -> None:
    """guarantee() would tell of it what no step is made with."""
    with pytest.raises(PolicyError, match=r"'text to \*': is never reached behind '\*'"):
        Policy(effects={"*": AtLeastOnce(), "text to *": AtMostOnce()})


def test_only_an_asterisk_is_special_in_a_pattern() -> None:
    """Brackets and question marks are part of a name."""
    effects: dict[str, Effect] = {"charge [EUR]": AtMostOnce(), "sure? *": AtMostOnce()}

    assert terms_of("charge [EUR]", effects) == terms_of("sure? yes", effects) == Terms("refuse", None)
    for name in ("charge E", "surer yes", "Sure? yes"):
        with pytest.raises(PolicyError, match="is not declared"):
            terms_of(name, effects)


def test_pattern_declares_steps_of_a_loop() -> None:
    """Their names are made as the body runs; a name of its own comes first, then the first pattern that fits."""
    effects: dict[str, Effect] = {"text to *": AtMostOnce(), "*": AtLeastOnce(), "text to none": Keyed(DAY)}

    assert terms_of("text to 0160", effects) == Terms("refuse", None)
    assert terms_of("text to none", effects) == Terms("rerun", 86_400_000)
    assert terms_of("mail", effects) == Terms("rerun", None)


@pytest.mark.parametrize(
    ("effects", "sentence"),
    [
        (["charge"], r"effects=\['charge'\]: must map names of steps to Committed\(\), Keyed\(\), "),
        ({"text": AtMostOnce(), "charge": "keyed"}, r"effects\['charge'\]='keyed': must be Committed\(\), Keyed\(\), "),
        ({"charge": dict}, r"effects\['charge'\]=<class 'dict'>: must be "),
        (
            {"charge": Keyed(), "": Keyed()},
            r"effects=\{'': ...\}: the name of a step must be a text that is not empty; see ",
        ),
        ({1: Keyed()}, r"effects=\{1: ...\}: the name of a step must be a text"),
        (
            {"charge": Keyed(), "text": AtMostOnce},
            r"effects\['text'\]=AtMostOnce: is the class; write AtMostOnce\(\); see ",
        ),
    ],
)
def test_no_declaration_is_refused(effects: Any, sentence: str) -> None:
    """Where it is written, by the entry at fault, and saying what one looks like."""
    with pytest.raises(PolicyError, match=f"^{sentence}"):
        Policy(effects=effects)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"window": 0}, "window=0"), ({"window": "day"}, "window"), ({"on_takeover": "retry"}, "on_takeover='retry'")],
)
def test_unusable_declaration_is_refused(arguments: dict[str, Any], match: str) -> None:
    """As a step's own arguments are."""
    with pytest.raises(PolicyError, match=match):
        Keyed(**arguments)


def test_guarantee_tells_all() -> None:
    """The task, every effect by name, the rest of the body, and an outage."""
    policy = Policy(effects={"charge": Keyed(DAY), "sms": AtMostOnce()})

    assert policy.guarantee("orders.charge").splitlines() == [
        "orders.charge: calls with the same idempotency key are one operation; an outcome counts for 7 days",
        "  key: ALL ARGUMENTS: two equal calls are one operation, and a new parameter makes every call a new one",
        "  charge: exactly once within 1 day of the first call, while the receiver honours the step's key; "
        "after that at least once",
        "  sms: at most once: if the call raises, or a worker dies between the records of its beginning and its end, "
        "the operation ends UNKNOWN and a person decides",
        "  anything else in the body: exactly once unless a worker dies in it or it raises; then it runs again "
        "(at least once)",
        "  when the store does not answer: nothing runs; a task is postponed",
    ]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("order.id", "order.id"),
        (("tenant", "order_id"), "tenant, order_id"),
        (len, "what len returns"),
        (partial(len), "what functools.partial(<built-in function len>) returns"),
    ],
)
def test_guarantee_tells_the_key(key: Any, told: str) -> None:
    """Whoever reads it sees what makes two calls one operation."""
    assert f"  key: {told}" in Policy(key).guarantee("t").splitlines()


def test_guarantee_tells_which_results_duplicates_do_not_get() -> None:
    """The gate of a deploy shows it to whoever waits for a result."""
    assert (
        "  a duplicate returns None, or fails without a text: neither is kept"
        in Policy(private=True).guarantee("t").splitlines()
    )
    assert "result" not in Policy().guarantee("t")


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_guarantee_promises_nothing_where_nothing_is_enforced(mode: Any) -> None:
    """A task that only observes says so, and nothing else."""
    assert "nothing is promised" in Policy(mode=mode, effects={"charge": Keyed()}).guarantee("t")
    assert "charge" not in Policy(mode=mode, effects={"charge": Keyed()}).guarantee("t")


def test_guarantee_follows_the_policy() -> None:
    """Each option that changes a promise changes the words."""
    assert "the body: at most once" in Policy(on_takeover="refuse").guarantee("t")
    assert "runs unprotected" in Policy(on_outage="run").guarantee("t")
    assert "counts for 12 hours" in Policy(retain=timedelta(hours=12)).guarantee("t")


@pytest.mark.parametrize(
    ("duration", "words"),
    [(0.5, "0.5 s"), (1, "1 s"), (60, "1 minute"), (90, "90 s"), (7_200, "2 hours"), (timedelta(days=1.5), "36 hours")],
)
def test_durations_are_said_as_people_do(duration: float | timedelta, words: str) -> None:
    """In the largest unit that is whole."""
    assert in_words(duration) == words
