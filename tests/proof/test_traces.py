"""The specification allows what the production code does, and not what its mutants do."""

from typing import Any

import pytest

from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import BLANK, Status
from lab.proof.programs import PROGRAMS, Effect
from lab.proof.specification import checker
from lab.proof.traces import CONTROLS, NO_ANSWER, READING, UNSEEN, Judge, Line, Trace, numbers, run
from tests.proof.test_explorer import explored
from tests.support.packages import program


def test_trace_is_made_small() -> None:
    """A claim whose answer is lost, one that finds it, and its end by somebody else, once its time is over."""
    first = BLANK.but(key="k", status=Status.IN_PROGRESS, revision="x", owner="a", fencing_token=70, lease_until=100)
    other, ended = first.but(revision="y", owner="b", fencing_token=90), first.but(revision="z", lease_until=0)
    lines = (
        Line("A", first, None, NO_ANSWER, 70),
        Line("B", other, None, first, 1_100),
        Line("C", ended, "x", ended, 1_100),
    )
    given = numbers(Trace("", Policy(on_takeover="refuse", max_takeovers=None), Effect.BARE, lines))
    assert given[:5] == (1, 1, 200, 0, 3)
    assert given[5:22] == (0, 0, 1, *(0, 1, 0, 101, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0))
    assert given[22:39] == (0, 0, 1, *(1, 2, 0, 201, 1, 2, 2, 0, 0, 0, 0, 1, 101, 1))
    assert given[39:] == (1, 0, 1, *(2, 3, 101, 3, 1, 1, 1, 0, 0, 0, 1, 1, 3, 1))


def test_forged_outcome_is_rejected() -> None:
    """Of a record that vanished under its owner: it is written again as it was, but for its end."""
    program("spin")
    claim = BLANK.but(key="k", status=Status.IN_PROGRESS, revision="x", owner="a", fencing_token=70, fingerprint="f")
    claim = claim.but(lease_until=100)
    end = claim.but(status=Status.COMPLETED, revision="y")
    forged: dict[str, dict[str, Any]] = {
        "right": {},
        "arguments": {"fingerprint": None},
        "token": {"fencing_token": 71},
        "takeovers": {"takeovers": 1},
    }
    first = Line("A", claim, None, claim, 70), Line("A", end, "x", None, 71)
    ends = [(name, end.but(**changes)) for name, changes in forged.items()]
    lines = {name: (*first, Line("A", each, None, each, 72)) for name, each in ends}
    traces = [Trace(name, Policy(), Effect.BARE, each, forgetful=True) for name, each in lines.items()]
    with checker(READING, ["-O0", "-DSAFETY", "-DNOREDUCE"]) as folder:
        rejected = Judge(folder).judge("forged", traces).rejected
    assert [each.partition(":")[0] for each in rejected] == ["arguments", "token", "takeovers"]


@pytest.mark.nightly
def test_specification_allows_the_code_and_not_its_mutants() -> None:
    """One of them breaks no rule of the explorer: what a person needs to resolve an UNKNOWN outcome is lost."""
    program("spin")
    programs = [each for each in PROGRAMS if each.effect in {Effect.BARE, Effect.REFUSED_STEP} and not each.besides]
    found = list(run([(each, 2, 1) for each in programs], 1, 20, {"memory": 100}))
    assert [bool(each.rejected) for each in found] == [False, False, *(True for _ in CONTROLS)]
    with UNSEEN.applied() as calls:
        assert not explored(next(each for each in programs if each.effect is Effect.REFUSED_STEP)).missed
    assert calls
