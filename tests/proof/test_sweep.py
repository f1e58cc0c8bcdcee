"""Real processes die by SIGKILL at every point of an attempt and of every kind of effect, over real stores."""

import os
from typing import Any

import pytest

from lab.proof import recovery
from lab.proof.sweep import Kind, kinds_of, sweep, why_no_ptrace
from lab.proof.table import CONTROL, Row
from lab.proof.targets import ALL
from lab.proof.verdicts import PROMISES, Result
from tests.support.stores import a_store

UNBEGUN = {"before the claim", "completion stored, reply not read", "everything done, not acknowledged"}
"""A death there leaves no doubt: nothing had begun, or the outcome is stored."""
POINTS = UNBEGUN | {
    *("claim stored, reply not read", "the body begins", "before the effect", "after the effect"),
    *("before the renewal", "renewal stored, reply not read", "before the completion"),
}
BETWEEN = {"checkpoint stored, reply not read", "before the effect", "after the effect", "before the checkpoint"}
# Each holds death before the claim is sent, between its sending and its reply, and at the effect itself.
TALKING = {"write 1", "write 2", "sendto 1", "sendto 2", "recvfrom 1", "recvfrom 2", "connect 1"}
WRITING = {"write 1", "write 2", "pwrite64 1", "pwrite64 2", "fdatasync 1", "fdatasync 2", "fcntl 1"}
STRUCK = {"redis": TALKING, "sqlite": WRITING, "postgres": TALKING, "dynamodb": {*TALKING, "sendto 3", "sendto 4"}}
NO_TRACE = why_no_ptrace()

pytestmark = pytest.mark.timeout(300)


def first_now(*names: str) -> list[object]:
    """The stores, all but the first of them nightly."""
    return [pytest.param(each, marks=[pytest.mark.nightly] if each != names[0] else []) for each in names]


def swept(how: str, name: str, **options: object) -> Result:
    with a_store(name) as url:
        return sweep(how, target=name, url=url, **options)  # type: ignore[arg-type]


def by_promise(found: Result) -> dict[str, Row]:
    """Of a sweep that broke nothing and left nothing stuck or unexplained."""
    ours = [each for each in found.rows if each.system != CONTROL]
    assert [each for each in found.problems if each.promise != Kind.TOKEN_ALONE] == []
    assert {(each.effects_0, each.stuck, each.unexplained) for each in ours} == {(0, 0, 0)}
    return {each.promise: each for each in found.rows}


@pytest.mark.parametrize("name", first_now("redis", *(each for each in ALL if each != "redis")))
def test_promises_survive_death_at_every_point(name: str) -> None:
    """Each point struck under every promise; an effect is repeated exactly where nobody could know of the first."""
    rows = by_promise(swept("singles", name))
    assert {promise: set(each.faults) for promise, each in rows.items()} == dict.fromkeys(PROMISES, POINTS)
    faults, refused = rows["at least once"].faults, rows["at most once"]
    between = faults["after the effect"] + faults["before the completion"]
    renewed = faults["before the renewal"] // 2 + faults["renewal stored, reply not read"] // 2
    assert rows["at least once"].effects_2 == between + renewed
    assert (refused.effects_2, refused.unknown) == (0, sum(refused.faults[each] for each in POINTS - UNBEGUN))
    assert rows["exactly once"].effects_1 == rows["exactly once"].tasks


@pytest.mark.parametrize("name", first_now("sqlite", "dynamodb", "postgres"))
def test_every_kind_of_effect_keeps_its_promise(name: str) -> None:
    """A commit, a transaction of one file, and one of a server; what is not enough is shown to repeat."""
    rows = by_promise(swept("singles", name, kinds=kinds_of(name)))
    alone = rows.pop(Kind.TOKEN_ALONE)
    for kind, row in rows.items():
        within = "before the commit" if "transaction" in kind else "before the completion"
        assert (bool(row.faults[within]), row.faults["claim stored, reply not read"]) == (True, 1)
    refused, plain = rows.pop(Kind.REFUSED_STEP), rows.pop(Kind.STEP)
    assert alone.violations == alone.effects_2 > 0 < plain.effects_2
    assert (refused.effects_2, refused.unknown, set(refused.faults) >= BETWEEN) == (0, len(BETWEEN), True)
    assert all((row.effects_1, row.unknown) == (row.tasks, 0) for row in rows.values())


# Where everything is in our hands, a sweep that does not run is a failure and not a footnote.
@pytest.mark.skipif(NO_TRACE is not None and os.environ.get("CI") != "true", reason=NO_TRACE or "")
@pytest.mark.parametrize("name", first_now(*STRUCK))
def test_promises_survive_death_at_every_system_call(name: str) -> None:
    """Some deaths left nothing behind and the next delivery ran, some left a claim and it did not."""
    found = swept("system calls", name, kinds=["at most once"])  # the others: make prove
    refused = by_promise(found)["at most once"]
    assert set(found.reached) >= STRUCK[name]
    assert refused.unknown > 0 < refused.effects_1


@pytest.mark.nightly
def test_lease_is_waited_for_only_where_nobody_can_tell() -> None:
    """A killed pool process costs a moment, and the lease where claims name no process."""
    given: dict[str, Any] = {"death": recovery.Death.CHILD, "rounds": 1, "at_once": 2, "lease": recovery.SHORT_LEASE}
    parts = [recovery.Part(system=each, **given) for each in (recovery.System.OURS, recovery.System.BEFORE)]
    with a_store("redis"):  # or the test is skipped
        ours, before = recovery.run(1, lambda news: None, parts, ["redis"])
    assert (ours.wrong, before.wrong) == (0, 0)
    assert (ours.conflicts, before.conflicts > 0) == (0, True)
    assert max(ours.seconds) < recovery.SHORT_LEASE / 2 < min(before.seconds)
    # The lease of a process that is known to be dead is ended; of the other two nobody knows, so it and the grace pass.
    assert (len(before.after_lease), before.early, ours.early) == (2, 0, len(ours.after_lease))
    assert min(before.after_lease) >= 1
