"""Real processes die by SIGKILL at every point of every kind of effect, over real stores."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.engine.claim import Claim
from celery_idempotent.protocol.codec import Kept
from celery_idempotent.protocol.contents import Slot, pack
from lab.proof.effects_sweep import Kind, Sweep, kinds_of, sweep
from lab.proof.targets import start, why_not
from tests.support.documents import ROOT

STORES = ("dynamodb", "sqlite", "postgres")
"""Where a commit is, where a transaction is one file's, and where it is a server's."""

LARGE = {Kind.LARGE_RESULT, Kind.LARGE_COMMIT, Kind.LARGE_TRANSACTION}
EXACTLY_ONCE = {Kind.KEYED, Kind.FENCED, Kind.COMMIT, Kind.TRANSACTION, *LARGE}


BETWEEN = ("checkpoint stored, reply not read", "before the effect", "after the effect", "before the checkpoint")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[] if each == "sqlite" else [pytest.mark.nightly]) for each in STORES],
)
def swept(request: pytest.FixtureRequest) -> dict[Kind, Sweep]:
    name = request.param
    if reason := why_not(name):
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(reason)
    with start(name) as site:
        return {each.kind: each for each in sweep(site.url, kinds_of(name), pairs=False)}


@pytest.mark.timeout(300)
def test_every_kind_keeps_its_promise(swept: dict[Kind, Sweep]) -> None:
    """Wherever a process dies, and nothing is stuck."""
    kept = {kind: each.problems for kind, each in swept.items() if kind is not Kind.TOKEN_ALONE}

    assert kept == {kind: [] for kind in kept}


def test_exactly_once_is_exactly_once(swept: dict[Kind, Sweep]) -> None:
    """By key, by fence, by commit and by transaction: one effect per task, and none ends UNKNOWN."""
    for kind in EXACTLY_ONCE & set(swept):
        assert set(swept[kind].effects) == {1}, kind
        assert swept[kind].unknown == 0


def test_refused_steps_are_never_two(swept: dict[Kind, Sweep]) -> None:
    """And they end UNKNOWN exactly where a process died between the records of beginning and end."""
    refused = swept[Kind.AT_MOST_ONCE]

    assert max(refused.effects) == 1
    assert refused.unknown == 4 == len(BETWEEN)
    assert all(refused.points[name] for name in BETWEEN)


def test_what_is_not_enough_is_shown_to_repeat(swept: dict[Kind, Sweep]) -> None:
    """The zeroes above would say nothing if no death could repeat an effect, and nobody noticed."""
    alone = swept[Kind.TOKEN_ALONE]

    assert swept[Kind.AT_LEAST_ONCE].effects[2] > 0
    assert len(alone.problems) == alone.effects[2] > 0


def test_every_point_was_died_at(swept: dict[Kind, Sweep]) -> None:
    """Each kind was attacked within its effect, and before and after every write of the record."""
    for kind, each in swept.items():
        is_transaction = kind in {Kind.TRANSACTION, Kind.LARGE_TRANSACTION}
        within = "before the commit" if is_transaction else "before the completion"
        assert each.points[within], kind
        assert each.points["claim stored, reply not read"] == 1


def test_objects_are_there_before_anything_points_to_them(swept: dict[Kind, Sweep]) -> None:
    """Processes died before and after each was written: of a step, of a result, before a commit."""
    for kind in LARGE & set(swept):
        assert not swept[kind].problems
        written = 2 if kind is Kind.LARGE_RESULT else 1
        assert swept[kind].points["before the object is written"] == written
        assert swept[kind].points["object written, reply not read"] == written


def _object_after_record(claim: Claim, kept: Kept, slot: Slot, write: Callable[[Kept], Any]) -> tuple[Any, Kept]:
    assert kept.encoded is not None
    packed = pack(claim.store, kept.encoded, slot)
    assert packed.write is not None
    kept = replace(kept, encoded=packed.encoded)
    written = write(kept)
    packed.write()
    return written, kept


def test_object_that_is_written_after_the_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zeroes above would say nothing otherwise."""
    monkeypatch.setattr(Claim, "recorded", _object_after_record)
    with start("sqlite") as site:
        (broken,) = sweep(site.url, [Kind.LARGE_RESULT], pairs=False)

    assert any("the record points to what is not there" in each for each in broken.problems)
    assert any("stuck" in each for each in broken.problems)


def test_command_ends_well_where_only_the_control_repeats() -> None:
    """``python -m lab.proof effects`` fails on a broken promise, and on a control that noticed nothing."""
    command = [sys.executable, "-m", "lab.proof", "effects", "--quick", "--store", "sqlite"]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert ended.returncode == 0, ended.stdout + ended.stderr
