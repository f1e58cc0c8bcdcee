"""The audits see what they are there to see: each rule is noticed when it alone is broken."""

from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.contract import a_record
from lab.ledger import Row
from lab.proof import soak
from lab.proof.audit import Evidence, Nemesis, judge
from lab.proof.course import Plan, Task
from lab.proof.verdicts import PROMISES, Told, Verdict

DONE, OTHER, UNKNOWN = Told("finished", "receipt"), Told("finished", "another"), Told("OutcomeUnknown")
TWICE: dict[str, Any] = {"effects": [("receipt", 1), ("receipt", 2)], "begun": [1, 2], "tokens": [1, 2]}
IN_DOUBT: dict[str, Any] = {"told": [UNKNOWN], "clean": [UNKNOWN], "status": Status.UNKNOWN}


def breaches(
    promise: str = "at most once",
    *,
    deliveries: int = 2,
    moves: tuple[str, ...] = ("lease",),
    effects: Any = (("receipt", 1),),
    begun: Any = (1,),
    tokens: Any = (1,),
    told: Any = (DONE,),
    clean: Any = (DONE,),
    status: Status | None = Status.COMPLETED,
) -> list[str]:
    """What is wrong with an operation; as it stands here, a lease ended early, and nothing is."""
    task = Task(MemoryStore(), Plan(promise=PROMISES[promise], deliveries=deliveries, moves=moves))
    task.effects, task.begun, task.told = list(effects), list(begun), list(told)
    task.claims = {number: (token, "somebody") for number, token in enumerate(tokens)}
    return list(task.breaches(task.seen(list(clean), status)))


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ("2 effects", TWICE),
        ("deliveries were told different outcomes", {"told": [DONE, OTHER]}),
        ("an outcome was reported and the record says UNKNOWN", {"status": Status.UNKNOWN}),
        ("clean deliveries were told", {"clean": [DONE, OTHER]}),
        ("clean deliveries were told", {"clean": [Told("InFlight")]}),
        ("the operation has no end", {"status": None}),
        ("UNKNOWN where it may run again", {**IN_DOUBT, "promise": "at least once", "clean": [DONE]}),
        ("UNKNOWN without a cause", {**IN_DOUBT, "moves": ()}),
        ("the effect was repeated without a cause", {**TWICE, "promise": "at least once", "moves": ()}),
        ("two bodies ran under one fencing token", {"begun": [1, 1]}),
        ("a body ran without a stored claim", {"begun": [1, 2]}),
        ("fencing tokens did not grow", {"tokens": [2, 1]}),
        ("a fault that a resend outlives left a trace", {"deliveries": 1, "moves": (), "told": [Told("InFlight")]}),
    ],
)
def test_a_broken_rule_is_noticed(rule: str, seen: dict[str, Any]) -> None:
    """By that rule alone, so that none of them can be lost behind another."""
    (problem,) = breaches(**seen)
    assert problem.startswith(rule)


def test_nothing_is_wrong_where_nothing_is_and_an_outcome_without_an_effect_always_is() -> None:
    """A promise allows an effect that was repeated with a cause, and an end in doubt."""
    assert [breaches(), breaches("at least once", **TWICE), breaches(**IN_DOUBT)] == [[], [], []]
    assert all(any("there was no effect" in each for each in breaches(name, effects=())) for name in PROMISES)


RESULT = "o by 1"


def record(status: Status = Status.COMPLETED, result: str = RESULT) -> Record:
    return replace(a_record(), status=status, result=f'"{result}"' if status is Status.COMPLETED else None)


def row(what: str, at: float, *, pid: int = 7, reference: str = "", order: str = "o") -> Row:
    return Row(what=what, order=order, time=at, pid=pid, reference=reference)


BEGUN = [row("delivery", 10), row("claimed", 11)]
CLEAN = [*BEGUN, row("effect", 12), row("completed", 13), row("told", 14, reference=RESULT), row("returned", 15)]
AGAIN = [row(what, at, pid=8) for what, at in (("delivery", 20), ("claimed", 21), ("effect", 22))]
CRASHED = [row("delivery", 1), row("effect", 2)]


def judged(
    promise: str, *rows: Row, killed: tuple[float, int] | None = None, drained: Any = None, **besides: Any
) -> Verdict:
    """What the audit says about one operation, whose record is completed unless said otherwise."""
    nemeses = [Nemesis(kind="kill", began=killed[0], ended=killed[0], pids=frozenset(killed[1:]))] if killed else []
    records = {"o": drained or record()}
    evidence: Any = {"rows": list(rows), "nemeses": nemeses, "drained": records, "final": records, **besides}
    (verdict,) = judge(Evidence(promises={"o": PROMISES[promise]}, **evidence))
    return verdict


@pytest.mark.parametrize("promise", PROMISES)
def test_a_planted_duplicate_or_loss_is_seen_under_every_promise(promise: str) -> None:
    """A second effect that no nemesis accounts for breaks even "at least once"; without either nothing is reported."""
    assert judged(promise, *CLEAN).problems == ()
    assert judged(promise, *CLEAN, *AGAIN).problems
    assert judged(promise, *(each for each in CLEAN if each.what != "effect")).problems


def test_a_nemesis_excuses_one_repetition_of_the_delivery_it_hit_and_only_where_it_may_happen() -> None:
    """Not two, not of another process or time, and not where an effect must not be repeated."""
    assert judged("at least once", *CRASHED, *AGAIN, killed=(3, 7)).problems == ()
    assert judged("at least once", *CRASHED, *AGAIN, row("effect", 23, pid=8), killed=(3, 7)).problems
    for promise in ("exactly once", "at most once"):
        assert judged(promise, *CRASHED, *AGAIN, killed=(3, 7)).problems
    for elsewhere in ((2, 99), (-9, 7), (9, 7)):
        assert judged("at least once", *CRASHED, row("returned", 3), *AGAIN, killed=elsewhere).problems


def test_a_store_that_is_lost_excuses_no_repetition_and_no_message_without_an_answer() -> None:
    """Though a record has its outcome, who waits for the message is stuck."""
    assert judged("at least once", *CRASHED, *AGAIN, killed=(3, 7), may_repeat=False).problems
    unanswered = judged("at least once", *CLEAN, unanswered={"o"})
    assert (unanswered.stuck, unanswered.problems) == (True, ("a message got no answer",))


def test_what_is_stuck_lost_or_unknown_without_a_nemesis_is_seen() -> None:
    """UNKNOWN is the price of "at most once", paid only after a fault."""
    in_progress, unknown = record(Status.IN_PROGRESS), record(Status.UNKNOWN)
    stuck = judged("exactly once", *CLEAN[:3], drained=in_progress)
    assert (stuck.stuck, len(stuck.problems)) == (True, 2)
    promises, records = (
        {"o": PROMISES["exactly once"]},
        dict[str, Any](drained={"o": in_progress}, final={"o": record()}),
    )
    (lost,) = judge(Evidence(promises=promises, rows=CLEAN, nemeses=(), **records))
    assert (lost.stuck, lost.problems) == (False, ("the queue ran empty and it had no outcome",))
    hit = judged("at most once", *BEGUN, killed=(13, 7), drained=unknown)
    assert (hit.unknown, hit.unexplained, hit.problems) == (True, False, ())
    assert judged("at most once", *BEGUN, drained=unknown).problems == ("UNKNOWN without a cause",)
    assert judged("at least once", *CLEAN[:3], killed=(13, 7), drained=unknown).problems


def test_callers_that_are_told_different_things_are_seen() -> None:
    """Every success is the record's; that it is unknown may be told where it was, though its owner came back."""
    refused = row("told failure", 13.5, reference="OutcomeUnknown")
    assert judged("exactly once", *CLEAN, row("told", 30, reference="o by 2")).problems
    assert judged("exactly once", *CLEAN, drained=record(result="o by 2")).problems
    assert judged("at most once", *CLEAN, drained=record(Status.UNKNOWN), killed=(12, 7)).problems
    assert judged("exactly once", *CLEAN, row("told failure", 30, reference="ResultLost")).problems
    assert judged("at most once", *CLEAN, refused, killed=(12, 7)).problems == ()
    assert judged("at most once", *CLEAN, refused).problems
    assert judged("exactly once", *CLEAN, refused, killed=(12, 7)).problems


@pytest.mark.parametrize(("store", "broker"), [("dynamodb", "sqs"), ("redis", "redis"), ("postgres", "rabbitmq")])
def test_a_seed_chooses_load_and_nemeses(store: str, broker: str) -> None:
    """The same seed, the same campaign; every kind that a store can meet in two minutes; plain Celery's are short."""
    planned = soak.plan(2, 1, store, broker)
    assert planned == soak.plan(2, 1, store, broker) != soak.plan(2, 2, store, broker)
    assert {strike.kind for strike in planned.strikes} == soak.kinds_of(store, broker)
    # SQS would give a longer one again for ever.
    assert max(each.seconds for each in planned.operations(soak.BARE).values()) < soak.VISIBILITY_TIMEOUT / 4
