"""Real processes die by SIGKILL at every point of an attempt and of every kind of effect, over real stores."""

import os

import pytest

from lab.proof.sweep import Kind, kinds_of, sweep, why_no_ptrace
from lab.proof.table import CONTROL, Row
from lab.proof.targets import ALL
from lab.proof.verdicts import PROMISES, Result
from tests.support.stores import a_store

pytestmark = pytest.mark.timeout(300)

POINTS = {
    *("before the claim", "claim stored, reply not read", "the body begins"),
    *("before the renewal", "renewal stored, reply not read", "before the effect", "after the effect"),
    *("before the completion", "completion stored, reply not read", "everything done, not acknowledged"),
}
NO_TRACE = why_no_ptrace()
SLOW = pytest.mark.nightly


def swept(how: str, name: str, **options: object) -> Result:
    with a_store(name) as site:
        return sweep(how, target=name, url=site.url, **options)  # type: ignore[arg-type]


def by_promise(found: Result) -> dict[str, Row]:
    """Of a sweep that broke nothing and left nothing stuck or unexplained."""
    ours = [each for each in found.rows if each.system != CONTROL]
    assert [each for each in found.tally.problems if each.promise != Kind.TOKEN_ALONE] == []
    assert {(each.effects_0, each.stuck, each.unexplained) for each in ours} == {(0, 0, 0)}
    return {each.promise: each for each in found.rows}


@pytest.mark.parametrize("name", ["redis", *(pytest.param(each, marks=SLOW) for each in ALL if each != "redis")])
def test_promises_survive_death_at_every_point(name: str) -> None:
    """Each point struck under every promise; an effect is repeated exactly where nobody could know of the first."""
    rows = by_promise(swept("singles", name))
    assert {promise: set(each.faults) for promise, each in rows.items()} == dict.fromkeys(PROMISES, POINTS)
    faults = rows["at least once"].faults
    between = faults["after the effect"] + faults["before the completion"]
    renewed = faults["before the renewal"] // 2 + faults["renewal stored, reply not read"] // 2
    assert rows["at least once"].effects_2 == between + renewed
    unfinished = POINTS - {"before the claim", "completion stored, reply not read", "everything done, not acknowledged"}
    refused = rows["at most once"]
    assert (refused.effects_2, refused.unknown) == (0, sum(refused.faults[each] for each in unfinished))
    assert rows["exactly once"].effects_1 == rows["exactly once"].tasks


BETWEEN = ("checkpoint stored, reply not read", "before the effect", "after the effect", "before the checkpoint")


@pytest.mark.parametrize("name", ["sqlite", *(pytest.param(each, marks=SLOW) for each in ("dynamodb", "postgres"))])
def test_every_kind_of_effect_keeps_its_promise(name: str) -> None:
    """A commit, a transaction of one file, and one of a server; what is not enough is shown to repeat."""
    rows = by_promise(swept("singles", name, kinds=kinds_of(name)))
    alone, refused = rows.pop(Kind.TOKEN_ALONE), rows[Kind.REFUSED_STEP]
    assert alone.violations == alone.effects_2 > 0
    assert rows[Kind.STEP].effects_2 > 0
    assert (refused.effects_2, refused.unknown, set(BETWEEN) <= set(refused.faults)) == (0, len(BETWEEN), True)
    once = set(rows) - {Kind.STEP, Kind.REFUSED_STEP}
    assert {kind: (rows[kind].effects_1, rows[kind].unknown) for kind in once} == {
        kind: (rows[kind].tasks, 0) for kind in once
    }
    for kind, row in rows.items():
        within = "before the commit" if "transaction" in kind else "before the completion"
        assert (bool(row.faults[within]), row.faults["claim stored, reply not read"]) == (True, 1)


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        ("redis", "drops completions"),
        ("redis", "takes over at once"),
        pytest.param("redis", "script claims what is taken", marks=SLOW),
        pytest.param("postgres", "INSERT over what is there", marks=SLOW),
        pytest.param("sqlite", "INSERT over what is there", marks=SLOW),
    ],
)
def test_what_is_broken_on_purpose_is_seen(name: str, flaw: str) -> None:
    """One rule of the library undone, or a mistake in a store's own script or statements."""
    assert swept("brief", name, flaw=flaw).tally.problems


# Each holds death before the claim is sent, between its sending and its reply, and at the effect itself.
TALKING = {"sendto 1", "sendto 2", "recvfrom 1", "recvfrom 2", "connect 1"}
STRUCK = {
    "dynamodb": {*TALKING, "sendto 3", "sendto 4"},
    "redis": TALKING,
    "postgres": TALKING,
    "sqlite": {"pwrite64 1", "pwrite64 2", "fdatasync 1", "fdatasync 2", "fcntl 1"},
}


# Where everything is in our hands, a sweep that does not run is a failure and not a footnote.
@pytest.mark.skipif(NO_TRACE is not None and os.environ.get("CI") != "true", reason=NO_TRACE or "")
@pytest.mark.parametrize("name", STRUCK)
def test_promises_survive_death_at_every_system_call(name: str) -> None:
    """Some deaths left nothing behind and the next delivery ran, some left a claim and it did not."""
    found = swept("system calls", name, kinds=["at most once"])  # the others: make prove
    refused = by_promise(found)["at most once"]
    assert set(found.reached) >= {"write 1", "write 2", *STRUCK[name]}
    assert refused.unknown > 0 < refused.effects_1
