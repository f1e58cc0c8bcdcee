"""The specification allows what the production code does, and not what its mutants do."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import BLANK, Status
from lab.proof.programs import PROGRAMS, Effect
from lab.proof.recorder import NO_ANSWER, Line, pair
from lab.proof.specification import checker
from lab.proof.traces import CONTROLS, READING, UNSEEN, Judge, Trace, numbers, run, trace_processes
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


def test_driver_may_send_a_request_twice() -> None:
    """The first was stored, and the second is answered what another has written over it since."""
    first, other = (Line(each, BLANK.but(revision=each), expected, NO_ANSWER, 0) for each, expected in ("x0", "yx"))
    notes = [first, other, replace(other, answer=other.new), replace(first, answer=other.new)]
    assert [line.answer for line in pair(notes)] == [NO_ANSWER, other.new, other.new]


_DELIVERS = """
import os, sys
from celery_idempotent.engine.claim import claim
from celery_idempotent.stores import open_store
from lab.proof.recorder import record_if_wanted
from lab.proof.verdicts import PROMISES, operation

store = open_store(sys.argv[1])
store.provision()
if "dies" in sys.argv:
    type(store).swap = lambda *asked, swap=type(store).swap: swap(*asked) and os.kill(os.getpid(), 9)
record_if_wanted(sys.argv[1])
claim(store, operation("at least once:key", PROMISES["at least once"], 1))
"""


def test_request_of_a_killed_process_has_no_answer(tmp_path: Path) -> None:
    """Its write was stored, and that is what the next process is answered."""

    def deliver() -> None:
        command = [sys.executable, "-c", _DELIVERS, f"sqlite:///{tmp_path}/store"]
        assert [subprocess.run([*command, each], check=False).returncode for each in ("dies", "lives")] == [-9, 0]

    ((died, lives),) = (each.lines for each in trace_processes(deliver, lambda record: (Policy(), Effect.BARE)))
    assert (died.answer, died.earliest, lives.earliest) == (NO_ANSWER, 0, 1)
    assert getattr(lives.answer, "revision", None) == died.new.revision != lives.new.revision


@pytest.mark.nightly
def test_specification_allows_the_code_and_not_its_mutants() -> None:
    """One of them breaks no rule of the explorer: what a person needs to resolve an UNKNOWN outcome is lost."""
    program("spin")
    programs = [each for each in PROGRAMS if each.effect in {Effect.BARE, Effect.REFUSED_STEP} and not each.besides]
    found = list(run([(each, 2, 1) for each in programs], 1, 20, {"memory": 100}, ()))
    assert [bool(each.rejected) for each in found] == [False, False, *(True for _ in CONTROLS)]
    with UNSEEN.applied() as calls:
        assert not explored(next(each for each in programs if each.effect is Effect.REFUSED_STEP)).missed
    assert calls
