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
from lab.proof.scripted import Deliveries

PLAIN = (Program(Policy()), Program(Policy(on_takeover="refuse")), Program(Policy(), effect=Effect.COMMIT))


_EXPLORED: dict[str, Exploration] = {}


def quickly(program: Program) -> Exploration:
    """Several claims are about the same worlds: a process explores each program once."""
    name = repr(program)
    if name not in _EXPLORED:
        _EXPLORED[name] = explore(program, deliveries=program.deliveries, faults=program.few_faults)
    return _EXPLORED[name]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_no_interleaving_breaks_a_rule(program: Program) -> None:
    """A few deliveries under a few faults, fewer where a delivery does more; every kind of fault is met."""
    found = quickly(program)

    assert found.missed == set()
    assert found.most_effects == (1 if program.at_most_once else 2)
    assert found.ended["finished" if program.raises is None else "raised"]


@pytest.mark.parametrize("program", NOT_ENOUGH, ids=lambda program: program.name)
def test_half_of_a_fenced_step_is_not_enough(program: Program) -> None:
    """A fencing token alone, or a probe alone, repeats the effect: the explorer shows the way there."""
    with pytest.raises(Violation, match="must not be repeated was repeated"):
        explore(program, deliveries=2, faults=1)


@pytest.mark.parametrize(
    ("forgotten", "effect", "rule"),
    [
        ({"fencing_token": 0}, Effect.BARE, "the fencing token shrank"),
        ({"steps": {}}, Effect.REFUSED_STEP, "must not be repeated was repeated"),
    ],
)
def test_publisher_that_forgets_what_it_follows_is_seen(
    monkeypatch: pytest.MonkeyPatch, forgotten: dict[str, Any], effect: Effect, rule: str
) -> None:
    """What it records is replaced by deliveries, whose rules hold all the same."""

    def forgetting(*asked: Any) -> Publication:
        decision = publication(*asked)
        if isinstance(decision, Announce):
            return replace(decision, record=replace(decision.record, **forgotten))
        return decision

    monkeypatch.setattr(explorer, "publication", forgetting)
    program = Program(Policy(), effect=effect, raises=Declined, besides=(Fault.PUBLISHED,))

    with pytest.raises(Violation, match=rule):
        explore(program, deliveries=2, faults=0)


@pytest.mark.parametrize("renews", [False, True])
@pytest.mark.parametrize("effect", [each for each in Effect if each not in {each.effect for each in NOT_ENOUGH}])
def test_delivery_alone_has_one_effect_and_reports_it_though_the_store_forgets_twice(
    effect: Effect, renews: bool
) -> None:
    """At any two moments, under both promises. A transaction that is open then goes with its server, and has none."""
    for policy in (Policy(), Policy(on_takeover="refuse")):
        program = Program(policy, effect=effect, renews=renews, besides=(Fault.FORGOTTEN, Fault.FORGOTTEN))

        found = explore(program, deliveries=1, faults=0)

        ends = {"finished", "OutcomeUnknown", "StoreUnavailable"} if effect is Effect.TRANSACTION else {"finished"}
        assert set(found.ended) <= ends
        assert found.ended["finished"]
        assert found.most_effects == 1
        assert found.noted["an outcome is written where there is nothing"]


def test_store_that_forgets_lets_two_bodies_run_also_under_refuse() -> None:
    """What was never promised: who comes meanwhile cannot know. It takes no other fault, and no end of a lease."""
    program = Program(Policy(on_takeover="refuse"), besides=(Fault.FORGOTTEN,), claims_once=True)

    with pytest.raises(Violation, match="must not be repeated was repeated") as raised:
        explore(program, deliveries=2, faults=0)

    assert not any("killed" in step or "lost" in step for step in raised.value.trace)


@pytest.mark.parametrize(
    "program",
    [each for each in PROGRAMS if each.policy.on_takeover == "refuse" or each.policy.max_takeovers == 1],
    ids=lambda program: program.name,
)
def test_owner_of_what_became_unknown_ends_it(program: Program) -> None:
    """By its outcome, refused or poisoned, and every later delivery gets that: among these worlds are such."""
    found = quickly(program)

    assert found.noted["the owner completes what was UNKNOWN"]
    assert found.ended["OutcomeUnknown"]


def test_step_in_doubt_is_left_unknown_by_its_owner() -> None:
    """Who gave up itself comes back to nothing: only an outcome leaves UNKNOWN, and it has none."""
    found = quickly(Program(Policy(), effect=Effect.REFUSED_STEP))

    assert found.ended["OutcomeUnknown"]
    assert not found.noted["the owner completes what was UNKNOWN"]


@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.name)
def test_message_given_again_while_its_body_lives_is_a_delivery_like_any_other(program: Program) -> None:
    """A parent dies and its broker gives the message again: the same worlds, whether or not the task id is the same."""
    apart, together = quickly(program), quickly(replace(program, one_message=True))

    assert (together.states, together.transitions) == (apart.states, apart.transitions)
    assert (together.most_effects, together.ended) == (apart.most_effects, apart.ended)


@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.name)
def test_leases_end_over_the_living_and_over_the_dead(program: Program) -> None:
    """Who knows for certain that a child is dead ends its lease; worlds do that at any moment, and to the living."""
    found = quickly(program)

    assert found.noted["a lease ends, its owner lives"]
    assert found.noted["a lease ends, its owner is dead"]


@pytest.mark.parametrize(
    "program", [each for each in PROGRAMS if each.retries], ids=lambda program: program.policy.key_selector.option
)
def test_retry_whose_arguments_have_changed_has_the_record_of_its_message(program: Program) -> None:
    """The body has written into the argument from which the key, or its fingerprint, was derived."""
    assert len(Deliveries(program).keys) == 1


def test_violation_tells_the_way_there() -> None:
    """A broken rule comes with the steps that lead to it."""
    mutant = next(each for each in MUTANTS if each.name == "completion without a condition")

    with mutant.applied(), pytest.raises(Violation) as raised:
        explore(Program(Policy()), deliveries=2, faults=0)

    assert raised.value.rule == "a final state was changed"
    assert len(raised.value.trace) > 3
    assert "1. delivery 0 swaps IN_PROGRESS" in str(raised.value)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_noticed(mutant: Mutant) -> None:
    """Explorer, contract or oracle notices each mistake; a survivor would be a hole in the evidence."""
    assert judge(mutant)[0]


def test_there_are_enough_mutants() -> None:
    """They differ, and each says where its like was seen."""
    assert len({each.name for each in MUTANTS}) == len(MUTANTS) >= 12
    assert all(each.seen_in for each in MUTANTS)
    assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)


def test_mutant_of_a_name_that_is_gone_from_the_code_is_an_error() -> None:
    """Nothing would be broken."""
    with pytest.raises(LookupError, match="not there"):
        judge(Mutant("no mistake", "nowhere", protocol, "renewed_by_nobody", lambda right: None))


def test_what_is_noticed_without_the_mutants_code_is_an_error() -> None:
    """Then it was something else that was noticed, or the name is imported elsewhere under another owner."""
    real = next(each for each in MUTANTS if each.name == "completion without a condition")
    with real.applied(), pytest.raises(LookupError, match="never called"):
        judge(Mutant("never called", "nowhere", protocol, "decide", lambda right: None))
