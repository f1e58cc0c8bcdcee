"""The audit of the proof sees what it is there to see: a zero in its table is worth what these tests are worth."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from celery_idempotent.protocol.record import Record, Status
from lab.demo.ledger import Row
from lab.proof import soak
from lab.proof.audit import Evidence, Judgement, Nemesis, Promise, judge, judge_effects
from lab.proof.soak_settings import VISIBILITY_TIMEOUT
from lab.proof.verdicts import ending

OPERATION = "o"
PID = 7
WORKER = "w"
RESULT = "o by 1"


def record(status: Status = Status.COMPLETED, result: str = RESULT) -> Record:
    """What the store says about the operation."""
    return Record(
        key="k",
        status=status,
        revision="r",
        owner="a",
        fencing_token=1,
        lease_until=0,
        fingerprint=None,
        attempts=1,
        created_at=0,
        updated_at=0,
        task="t",
        task_id="i",
        worker=WORKER,
        result=f'"{result}"' if status is Status.COMPLETED else None,
    )


def row(what: str, at: float, *, pid: int = PID, reference: str = "") -> Row:
    """One line of the ledger."""
    return Row(what=what, order=OPERATION, time=at, pid=pid, reference=reference)


CHILDREN = [Row(what="child", task=WORKER, pid=pid, time=0.0) for pid in (PID, PID + 1)]
CLEAN = [
    row("delivery", 10),
    row("claimed", 11),
    row("effect", 12),
    row("completed", 13),
    row("told", 14, reference=RESULT),
    row("returned", 15),
]
AGAIN = [row("delivery", 20, pid=PID + 1), row("claimed", 21, pid=PID + 1), row("effect", 22, pid=PID + 1)]


def judged(
    *rows: Row,
    promise: Promise = Promise.EXACTLY_ONCE,
    nemeses: tuple[Nemesis, ...] = (),
    drained: Record | None = None,
    final: Record | None = None,
) -> Judgement:
    """What the audit says about one operation; its record is completed, unless said otherwise."""
    before, after = drained or record(), final or drained or record()
    evidence = Evidence(
        promises={OPERATION: promise},
        rows=[*CHILDREN, *rows],
        nemeses=nemeses,
        drained={OPERATION: before},
        final={OPERATION: after},
    )
    (judgement,) = judge(evidence)
    return judgement


def killed(at: float, pid: int = PID) -> Nemesis:
    """A process was killed."""
    return Nemesis(kind="kill", began=at, ended=at, pids=frozenset({pid}))


@pytest.mark.parametrize("promise", list(Promise))
def test_one_effect_one_outcome_one_answer_keeps_every_promise(promise: Promise) -> None:
    """Nothing is reported where nothing is wrong."""
    assert judged(*CLEAN, promise=promise).broken == ()


@pytest.mark.parametrize("promise", list(Promise))
def test_a_planted_duplicate_is_seen_under_every_promise(promise: Promise) -> None:
    """A second effect that no nemesis accounts for breaks even "at least once"."""
    judgement = judged(*CLEAN, *AGAIN, promise=promise)
    assert judgement.effects == 2
    assert judgement.broken


@pytest.mark.parametrize("promise", [Promise.EXACTLY_ONCE, Promise.AT_MOST_ONCE])
def test_a_kill_excuses_no_duplicate_where_none_may_happen(promise: Promise) -> None:
    """Only "at least once" allows a repetition after a crash."""
    crashed = [row("delivery", 1), row("effect", 2)]
    assert judged(*crashed, *AGAIN, promise=promise, nemeses=(killed(3),)).broken


def test_a_kill_after_the_effect_excuses_one_repetition_and_not_two() -> None:
    """An effect was cut off once, so it may happen twice."""
    crashed = [row("delivery", 1), row("effect", 2)]
    allowed = {"promise": Promise.AT_LEAST_ONCE, "nemeses": (killed(3),)}
    assert judged(*crashed, *AGAIN, **allowed).broken == ()  # type: ignore[arg-type]
    assert judged(*crashed, *AGAIN, row("effect", 23, pid=PID + 1), **allowed).broken  # type: ignore[arg-type]


def test_the_kill_of_another_process_or_of_another_time_excuses_nothing() -> None:
    """A nemesis counts only for the delivery it hit."""
    crashed = [row("delivery", 5), row("effect", 6), row("returned", 7)]
    for elsewhere in (killed(6, pid=99), killed(1), killed(8)):
        assert judged(*crashed, *AGAIN, promise=Promise.AT_LEAST_ONCE, nemeses=(elsewhere,)).broken


def test_a_clock_that_was_set_excuses_only_processes_that_cannot_know_yet() -> None:
    """Once a process has heard the server's time, a wrong clock of its machine is no excuse."""
    skewed = Nemesis(kind="skew", began=8.0, ended=8.0, skewed=WORKER)
    allowed = {"promise": Promise.AT_LEAST_ONCE, "nemeses": (skewed,)}
    assert judged(*CLEAN, *AGAIN, **allowed).broken == ()  # type: ignore[arg-type]
    heard = [
        Row(what=what, order="another", time=at, pid=pid)
        for pid in (PID, PID + 1)
        for what, at in (("delivery", 9.6), ("replayed", 9.7), ("returned", 9.8))
    ]
    assert judged(*heard, *CLEAN, *AGAIN, **allowed).broken  # type: ignore[arg-type]


@pytest.mark.parametrize("promise", list(Promise))
def test_a_planted_loss_is_seen_under_every_promise(promise: Promise) -> None:
    """A success without an effect is the worst of all."""
    assert judged(*(each for each in CLEAN if each.what != "effect"), promise=promise).broken


def test_a_planted_stuck_record_is_seen() -> None:
    """The queue is empty, everybody is gone, and the record still says IN_PROGRESS."""
    judgement = judged(*CLEAN[:3], drained=record(Status.IN_PROGRESS))
    assert judgement.is_stuck
    assert len(judgement.broken) == 2


def test_an_operation_that_only_a_further_delivery_finishes_was_lost() -> None:
    """Somebody acknowledged its message without an outcome."""
    judgement = judged(*CLEAN, drained=record(Status.IN_PROGRESS), final=record())
    assert not judgement.is_stuck
    assert judgement.broken == ("the queue ran empty and it had no outcome",)


def test_an_unknown_outcome_needs_a_nemesis_and_the_right_promise() -> None:
    """UNKNOWN is the price of "at most once", paid only after a fault."""
    crashed, unknown = [row("delivery", 1), row("claimed", 2)], record(Status.UNKNOWN)
    hit = judged(*crashed, promise=Promise.AT_MOST_ONCE, nemeses=(killed(3),), drained=unknown)
    assert (hit.is_unknown, hit.is_unexplained, hit.broken) == (True, False, ())
    unhit = judged(*crashed, promise=Promise.AT_MOST_ONCE, drained=unknown)
    assert unhit.is_unexplained
    assert unhit.broken
    assert judged(*CLEAN[:3], promise=Promise.AT_LEAST_ONCE, nemeses=(killed(13),), drained=unknown).broken


def test_callers_that_are_told_different_things_are_seen() -> None:
    """Every success is the same success, and the record's."""
    assert judged(*CLEAN, row("told", 30, reference="o by 2")).broken
    assert judged(*CLEAN, drained=record(result="o by 2")).broken
    assert judged(*CLEAN, drained=record(Status.UNKNOWN), promise=Promise.AT_MOST_ONCE, nemeses=(killed(12),)).broken
    assert judged(*CLEAN, row("told failure", 30, reference="ResultLost")).broken


def test_owner_that_comes_back_may_have_an_outcome_after_somebody_was_told_that_it_is_unknown() -> None:
    """A stopped child goes on: only where UNKNOWN may be told, and only if a nemesis explains it."""
    refused = row("told failure", 13.5, reference="OutcomeUnknown")
    stopped = (killed(12),)

    assert judged(*CLEAN, refused, promise=Promise.AT_MOST_ONCE, nemeses=stopped).broken == ()
    assert judged(*CLEAN, refused, promise=Promise.AT_MOST_ONCE).broken
    assert judged(*CLEAN, refused, promise=Promise.EXACTLY_ONCE, nemeses=stopped).broken


def test_unknown_is_the_one_final_state_that_may_be_left_and_only_by_its_owner() -> None:
    """Whatever the order in which both were seen."""
    unknown, completed = record(Status.UNKNOWN), replace(record(), revision="r2")

    assert ending([]) is None
    assert ending([unknown, unknown]) == unknown
    for finals in ([unknown, completed], [completed, unknown]):
        assert ending(finals) == completed
    for changed in (replace(completed, owner="b"), replace(unknown, revision="r3")):
        with pytest.raises(ValueError, match="a final state was changed"):
            ending([unknown, completed, changed])


def test_systems_without_records_are_judged_by_their_effects() -> None:
    """The same counting for the baselines."""
    promises = dict.fromkeys(("never", "once", "twice"), Promise.AT_LEAST_ONCE)
    rows = [replace(row("effect", 1), order=order) for order in ("once", "twice", "twice")]
    judgements = {each.operation: each for each in judge_effects(promises, rows)}
    assert {name: each.effects for name, each in judgements.items()} == {"never": 0, "once": 1, "twice": 2}
    assert [name for name, each in judgements.items() if each.broken] == ["never"]
    exactly = dict.fromkeys(promises, Promise.EXACTLY_ONCE)
    assert [each.operation for each in judge_effects(exactly, rows) if each.broken] == ["never", "twice"]


@pytest.mark.parametrize("store", soak.STORES)
def test_a_seed_chooses_load_and_nemeses(store: str) -> None:
    """The same seed, the same campaign; another seed, another one; every kind that a store can meet in two minutes."""
    assert soak.plan(2, 1, store) == soak.plan(2, 1, store)
    assert soak.plan(2, 1, store) != soak.plan(2, 2, store)
    assert {strike.kind for strike in soak.plan(2, 1, store).strikes} == soak.STORES[store]
    assert set(soak.plan(2, 1, store).promises.values()) == set(Promise)


def test_tick_that_nobody_has_sent_is_missed() -> None:
    """Ticks are promised from the first that came until shortly before the beats were stopped; extra ones count too."""
    began, late = (f"tick@2026-03-04T12:00:{second}+00:00" for second in ("05", "20"))
    rows = [Row(what="delivery", task="tick", order=each) for each in (began, late, began)]
    end = datetime.fromisoformat("2026-03-04T12:00:23+00:00").timestamp()
    seconds = [each[-8:-6] for each in soak.ticks(rows, end)]
    assert sorted(seconds) == ["05", "10", "15", "20"]
    assert judge_effects(soak.ticks(rows, end), [replace(rows[0], what="effect")])[-1].broken
    assert not soak.ticks([], end)


def test_half_of_the_operations_are_published_once_and_none_of_plain_celery() -> None:
    """An operation comes from one publisher, however often; the control knows of none."""
    planned = soak.plan(2, 1)
    once = {each.operation for each in planned.published_once}
    others = {each.operation for each in planned.publications if not each.is_once}
    assert not once & (others | planned.bare)
    # SQS would give a longer one again for ever.
    assert max(each.seconds for each in planned.publications if each.operation in planned.bare) < VISIBILITY_TIMEOUT / 4
    assert abs(len(once) - len(planned.promises) / 2) <= len(soak.PROMISES)
    assert len(planned.published_once) > len(once)


def test_every_kind_of_nemesis_meets_some_store() -> None:
    """No nemesis is there for nobody, and servers that can come back are killed."""
    assert set().union(*soak.STORES.values()) == set(soak.Kind)
    assert {name for name, kinds in soak.STORES.items() if soak.Kind.KILL_STORE in kinds} == {
        "redis",
        "postgres",
        "mariadb",
    }
