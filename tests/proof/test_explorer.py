"""The explorer finds no broken rule in the library, reaches every fault, and sees what is broken on purpose."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.publishing import Announce, Publication, publication
from lab.proof import explorer
from lab.proof.explorer import Exploration, Violation, explore
from lab.proof.mutants import MUTANTS, Mutant, judge
from lab.proof.programs import NOT_ENOUGH, PROGRAMS, Declined, Effect, Fault, Program

EFFECTS = [each for each in Effect if each not in {each.effect for each in NOT_ENOUGH}]
UNCONDITIONAL = next(each for each in MUTANTS if each.name == "completion without a condition")
SLOW = {
    *("rerun, failing, published once", "rerun, step, failing, published once", "rerun, fenced step, forgetful store"),
    *("rerun, failing, forgetful store", "rerun, forgetful store", "rerun, published once", "rerun, failing"),
    *("rerun, step under refuse, with a deadline", "rerun, 1 takeover, with a deadline, asking"),
    *("rerun, step under refuse, struck amid and after", "rerun, step under refuse, forgetful store"),
    "rerun, step under refuse, receiver honours its key",
}
REPEATED = "must not be repeated was repeated"


def explored(program: Program) -> Exploration:
    return explore(program, deliveries=program.deliveries, faults=program.few_faults)


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, id=each.name, marks=[pytest.mark.nightly] * (each.name in SLOW)) for each in PROGRAMS],
)
def test_no_interleaving_breaks_a_rule(program: Program) -> None:
    """A few deliveries under a few faults; every kind of fault is met, and the owner of what became unknown ends it."""
    found = explored(program)
    assert found.missed == set()
    assert found.most_effects == (1 if program.at_most_once else 2)
    assert found.ended["finished" if program.raises is None else "raised"]
    if program.policy.on_takeover == "refuse" or program.policy.max_takeovers == 1:
        assert found.noted["the owner completes what was UNKNOWN"]
        assert found.ended["OutcomeUnknown"]


def test_a_message_given_again_is_a_delivery_like_any_other_and_leases_end_over_living_and_dead() -> None:
    """A parent dies and its broker gives the message again: the same worlds, whether or not the task id is the same."""
    apart, together = explored(Program(Policy())), explored(Program(Policy(), one_message=True))
    for name in ("states", "transitions", "most_effects", "ended"):
        assert getattr(together, name) == getattr(apart, name)
    assert apart.noted["a lease ends, its owner lives"]
    assert apart.noted["a lease ends, its owner is dead"]


@pytest.mark.parametrize("program", NOT_ENOUGH, ids=lambda program: program.name)
def test_half_of_a_fenced_step_is_not_enough(program: Program) -> None:
    """A fencing token alone, or a probe alone, repeats the effect: the explorer shows the way there."""
    with pytest.raises(Violation, match=REPEATED):
        explore(program, deliveries=2, faults=1)


@pytest.mark.parametrize(
    ("forgotten", "effect", "rule"),
    [({"fencing_token": 0}, Effect.BARE, "the fencing token shrank"), ({"steps": {}}, Effect.REFUSED_STEP, REPEATED)],
)
def test_publisher_that_forgets_what_it_follows_is_seen(
    monkeypatch: pytest.MonkeyPatch, forgotten: dict[str, Any], effect: Effect, rule: str
) -> None:
    """What it records is replaced by deliveries, whose rules hold all the same."""

    def forgetting(*asked: Any) -> Publication:
        decision = publication(*asked)
        if isinstance(decision, Announce):
            return decision._replace(record=replace(decision.record, **forgotten))
        return decision

    monkeypatch.setattr(explorer, "publication", forgetting)
    program = Program(Policy(), effect=effect, raises=Declined, besides=(Fault.PUBLISHED,))
    with pytest.raises(Violation, match=rule):
        explore(program, deliveries=2, faults=0)


@pytest.mark.parametrize("renews", [False, True])
@pytest.mark.parametrize("effect", EFFECTS)
def test_delivery_alone_has_one_effect_and_reports_it_though_the_store_forgets_twice(
    effect: Effect, renews: bool
) -> None:
    """At any two moments, under both promises. A transaction that is open then goes with its server, and has none."""
    for policy in (Policy(), Policy(on_takeover="refuse")):
        program = Program(policy, effect=effect, renews=renews, besides=(Fault.FORGOTTEN, Fault.FORGOTTEN))
        found = explore(program, deliveries=1, faults=0)
        ends = {"finished", "OutcomeUnknown", "StoreUnavailable"} if effect is Effect.TRANSACTION else {"finished"}
        assert set(found.ended) <= ends
        assert (bool(found.ended["finished"]), found.most_effects) == (True, 1)
        assert found.noted["an outcome is written where there is nothing"]


def test_store_that_forgets_lets_two_bodies_run_also_under_refuse() -> None:
    """What was never promised: who comes meanwhile cannot know. It takes no other fault, and no end of a lease."""
    program = Program(Policy(on_takeover="refuse"), besides=(Fault.FORGOTTEN,), claims_once=True)
    with pytest.raises(Violation, match=REPEATED) as raised:
        explore(program, deliveries=2, faults=0)
    assert not any("killed" in step or "lost" in step for step in raised.value.trace)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_noticed(mutant: Mutant) -> None:
    """Explorer, contract or oracle notices each mistake; a survivor would be a hole in the evidence."""
    assert judge(mutant)[0]


def test_mutant_whose_code_is_gone_or_never_runs_is_an_error() -> None:
    """Nothing would be broken; or it was something else that was noticed. Each says where its like was seen."""
    assert len({each.name for each in MUTANTS if each.seen_in}) == len(MUTANTS) > 30
    with pytest.raises(LookupError, match="not there"):
        judge(Mutant("no mistake", "nowhere", protocol, "renewed_by_nobody", lambda right: None))
    with UNCONDITIONAL.applied(), pytest.raises(LookupError, match="never called"):
        judge(Mutant("never called", "nowhere", protocol, "decide", lambda right: None))
