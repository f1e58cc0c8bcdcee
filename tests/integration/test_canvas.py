"""Celery's canvas does with IdempotentTask what it does with Celery's Task, and what comes twice goes on as it did.

Where a claim takes `canvas` it holds on Redis, also for tasks that are published once.
"""

from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.canvas import StampingVisitor
from celery.exceptions import ChordError
from celery.result import AsyncResult

from tests.integration.canvas import HELD, Canvas, got, idempotent_only, ran
from tests.integration.cluster import on
from tests.integration.idempotent_tasks import charge, note
from tests.support.celeries import since_celery
from tests.support.ledger import Ledger
from tests.support.waiting import wait_until

replaces_in_order = since_celery("5.6", "the order of a group that replaces a task")


@on("redis", at_night=("sqs",))
@pytest.mark.worker
@pytest.mark.usefixtures("celery_setup")
@pytest.mark.compat
def test_duplicates_in_a_chord_and_a_chain_are_answered_and_go_on(ledger: Ledger) -> None:
    """Members that conflict or are replayed count like any other; what follows gets the recorded result each time."""
    result = chord([charge.s("a", gate="go"), charge.s("a", gate="go"), charge.s("b")])(note.s())
    ledger.wait_for("conflicted")
    ledger.open("go:1")
    assert result.get(timeout=60) == f"noted: {['a by attempt 1', 'a by attempt 1', 'b by attempt 1']}"
    assert chain(charge.s("b"), note.s()).delay().get(timeout=60) == "noted: b by attempt 1"
    charge.apply_async(("b",), link=note.s())
    assert len(ledger.wait_for("note", count=3)) == 3
    assert len(ledger.rows("effect")) == 2


def test_a_chain_ends_at_the_first_failure(canvas: Canvas, of: str) -> None:
    """What follows a failure does not run, and its error callbacks run once each."""
    steps = chain(canvas.say.si(1, of), canvas.fail.si(of), canvas.say.si(2, of))
    steps.on_error(canvas.mourn.s(of)).on_error(canvas.mourn_at_once.s(of))
    result = steps.delay()
    with pytest.raises(ValueError, match="as asked"):
        got(result)
    bodies = canvas.wait_for_bodies(of, 4)
    assert ran(canvas, of) == ["fail", "mourn", "mourn_at_once", "say"]
    assert {body.get("failed") for body in bodies} - {None} == {result.parent.id}


def test_canvases_nest(canvas: Canvas, of: str) -> None:
    """Chords in chains in groups in chords: every result arrives where it is needed, and every body runs once."""
    inner = chord([canvas.add.s(1, 1, of), canvas.add.s(2, 2, of)], canvas.total.s(of))
    steps = chain(canvas.add.s(3, 3, of), canvas.add.s(4, of), group(canvas.add.s(5, of), canvas.add.s(6, of)))
    outer = chord([inner, chain(steps, canvas.total.s(of)), group(canvas.add.s(7, 7, of))], canvas.say.s(of))
    after = chain(outer, canvas.total.s(of), chord([canvas.say.si(8, of), canvas.say.si(9, of)], canvas.total.s(of)))
    assert got(after.delay()) == 17
    said = [body["said"] for body in canvas.bodies(of) if body["task"] == "say"]
    assert sorted(map(str, said)) == ["8", "9", "[6, 31, 14]"]
    assert ran(canvas, of) == ["add"] * 7 + ["say"] * 3 + ["total"] * 4


def test_a_failing_member_fails_the_chord(canvas: Canvas, of: str) -> None:
    """The body of a chord does not run for a failed header; it fails, and its error callback runs once."""
    body = canvas.total.s(of).on_error(canvas.mourn.s(of))
    result = chord([canvas.add.s(1, 1, of), canvas.fail.s(of)], body).delay()
    with pytest.raises(ValueError, match="as asked"):
        got(result)
    canvas.wait_for_bodies(of, 3)
    assert isinstance(wait_until(lambda: result.result, "the body has failed"), ChordError)
    assert ran(canvas, of) == ["add", "fail", "mourn"]


@pytest.mark.parametrize("how", ["starmap", "chunks"])
def test_each_item_of_a_map_is_an_operation(canvas: Canvas, of: str, how: str) -> None:
    """Replayed after a call of its own, another map, or the same one delivered again; the results are in order."""

    def sums(numbers: range) -> Any:
        items = [[n, n, of] for n in numbers]
        return canvas.add.starmap(items) if how == "starmap" else canvas.add.chunks(items, 5).group()

    assert got(canvas.add.delay(0, 0, of)) == 0
    in_a_chain = chain(canvas.say.si(1, of), sums(range(6)), canvas.say.s(of))
    assert got(in_a_chain.delay()) == ([[0, 2, 4, 6, 8], [10]] if how == "chunks" else [0, 2, 4, 6, 8, 10])
    again = sums(range(4, 8)).apply_async(queue=HELD)
    canvas.deliver(canvas.held(), copies=2)
    assert got(again) == ([[8, 10, 12, 14]] if how == "chunks" else [8, 10, 12, 14])
    canvas.wait_for_ends(again[0].id if how == "chunks" else again.id, 2)
    assert len(ran(canvas, of)) == 8 + 2


@pytest.mark.parametrize("kind", ["chain", pytest.param("group", marks=replaces_in_order), "chord", "itself"])
def test_a_replaced_task_has_the_result_of_its_replacement(canvas: Canvas, of: str, kind: str) -> None:
    """Under its own id, and what follows it goes on with that: alone, in a chain and in a chord."""

    def replaced(of: str) -> Any:
        parts = [canvas.add.s(1, 0, of), canvas.add.s(2, 0, of)]
        replacements: dict[str, Any] = {
            "chain": chain(canvas.add.s(1, 1, of), canvas.add.s(1, of)),
            "group": group(parts),
            "chord": chord(parts, canvas.total.s(of)),
        }
        return canvas.become_itself.s(2, of) if kind == "itself" else canvas.become.s(replacements[kind], of)

    value: Any = {"group": [1, 2], "itself": "done"}.get(kind, 3)
    assert got(replaced(of).apply_async()) == value
    assert got(chain(replaced(f"{of} 2"), canvas.say.s(of)).delay()) == value
    assert got(chord([replaced(f"{of} 3"), canvas.say.s("x", of)], canvas.say.s(of)).delay()) == [value, "x"]
    bodies = {"chain": 3, "group": 3, "chord": 4, "itself": 3}[kind]
    assert [len(ran(canvas, each)) for each in (f"{of} 2", f"{of} 3")] == [bodies, bodies]


def test_a_replacement_inherits_links_nesting_and_failures(canvas: Canvas, of: str) -> None:
    """The links and error callbacks of the replaced task run after its replacement, once."""
    replaced = canvas.become.s(canvas.become.s(canvas.add.s(1, 2, of), of), of)
    links = {"link": canvas.say.s(of), "link_error": canvas.mourn.s(of)}
    assert got(replaced.apply_async(**links)) == 3
    with pytest.raises(ValueError, match="as asked"):
        got(canvas.become.s(canvas.fail.s(of), of).apply_async(**links))
    canvas.wait_for_bodies(of, 7)
    assert ran(canvas, of) == ["add", "become", "become", "become", "fail", "mourn", "say"]
    assert sorted(body["nesting"] for body in canvas.bodies(of) if body["task"] == "become") == [0, 0, 1]


def test_stamps_reach_every_task(canvas: Canvas, of: str) -> None:
    """Members, retries, bodies and links carry the stamps of their canvas."""

    class Stamp(StampingVisitor):
        def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
            return {"stamp": "mark"}

    members = [canvas.see.si(of, "member"), canvas.retry_with.si(of, {"countdown": 0})]
    stamped = chord(members, canvas.see_after.s(of, "body"))
    stamped.link(canvas.see_after.s(of, "link"))
    stamped.stamp(Stamp())
    got(stamped.apply_async())
    bodies = canvas.wait_for_bodies(of, 5)
    assert [body["stamps"] for body in bodies] == [{"stamp": "mark"}] * 5


@idempotent_only
def test_a_member_that_is_delivered_twice_counts_once(canvas: Canvas, of: str) -> None:
    """Two deliveries of one header task, at a time: one body, one result, and one body of the chord."""
    members = [canvas.hold.s("a", of, gate=of).set(queue=HELD), canvas.say.s("b", of)]
    result = chord(members, canvas.say.s(of)).delay()
    canvas.deliver(canvas.held(), copies=2)
    canvas.wait_for_bodies(of, 2)
    canvas.ledger.open(of)
    assert got(result) == ["a", "b"]
    canvas.wait_for_ends(result.parent[0].id, 2)
    assert ran(canvas, of) == ["hold", "say", "say"]


@idempotent_only
def test_a_chord_body_that_is_delivered_twice_runs_once(canvas: Canvas, of: str) -> None:
    """Also that of an empty header."""
    for members in ([canvas.say.s("a", of), canvas.say.s("b", of)], []):
        result = chord(members, canvas.say.s(of).set(queue=HELD)).delay()
        canvas.deliver(canvas.held(), copies=2)
        assert got(result) == ["a", "b"][: len(members)]
        canvas.wait_for_ends(result.id, 2)
    assert ran(canvas, of) == ["say"] * 4


@idempotent_only
@pytest.mark.compat
def test_a_chain_whose_member_comes_three_times_runs_each_once(canvas: Canvas, of: str) -> None:
    """Each replay publishes the next member again, and that one, being idempotent, runs once."""
    result = chain(canvas.say.s("a", of).set(queue=HELD), canvas.see_after.s(of), canvas.add.si(1, 2, of)).delay()
    canvas.deliver(canvas.held(), copies=3)
    for each in (result.parent.parent, result.parent, result):
        canvas.wait_for_ends(each.id, 3)
    assert got(result) == 3
    assert ran(canvas, of) == ["add", "say", "see_after"]


@idempotent_only
def test_a_replaced_task_that_comes_twice_has_one_replacement(canvas: Canvas, of: str) -> None:
    """The body that replaces may run again; what takes its place is an operation and runs once."""
    result = canvas.become.s(canvas.add.s(1, 2, of), of).apply_async(queue=HELD)
    message = canvas.held()
    canvas.deliver(message)
    assert got(result) == 3
    canvas.deliver(message)
    canvas.wait_for_ends(result.id, 2)
    assert ran(canvas, of).count("add") == 1


@idempotent_only
def test_nothing_is_skipped_that_a_canvas_waits_for(canvas: Canvas, of: str) -> None:
    """Every canvas goes on whose first member, however deep, met its operation running; a call by itself is dropped."""
    holder = canvas.hold_or_skip.delay(of, of, of)
    canvas.wait_for_bodies(of, 1)
    alone = canvas.hold_or_skip.delay(of, of, of)
    met: list[str] = []

    def meets() -> Any:
        met.append(uuid4().hex)
        return canvas.hold_or_skip.s(of, of, of).set(task_id=met[-1])

    tail, say = canvas.say.s(of), canvas.say.s(of)
    published = [
        chain(meets(), tail).delay(),
        chain(chain(meets(), tail), canvas.become.si(canvas.say.si(of, of), of)).delay(),
        chord([chain(meets(), tail)], say).delay(),
        chord([group(chain(meets(), tail), chain(meets(), tail))], say).delay(),
        chord([chord([chain(meets(), tail)], say)], say).delay(),
        chain(group(chain(meets(), tail), chain(meets(), group(tail, tail))), say).delay(),
        canvas.become.s(chord([chain(meets(), tail)], say), of).apply_async(),
    ]
    meets().apply_async(link=canvas.add.si(1, 2, of))
    met_first = [AsyncResult(each, app=canvas.app) for each in met]
    wait_until(lambda: {each.state for each in met_first} == {"RETRY"}, "all are postponed")
    canvas.ledger.open(of)
    inner = [of]
    assert [got(each) for each in published] == [of, of, inner, [of, of], [inner], [of, [of, of]], inner]
    wait_until(lambda: "add" in ran(canvas, of), "the link runs")
    assert (got(holder), alone.state) == (of, "PENDING")
    assert ran(canvas, of).count("hold_or_skip") == 1
