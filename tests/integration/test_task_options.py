"""Retries, options and ends of a task are Celery's, whichever kind of task it is, on Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.integration.canvas import HELD, OTHER, Canvas, got, idempotent_only, ran
from tests.support.waiting import wait_until

LIMITS = {"expires": 600, "time_limit": 50, "soft_time_limit": 40}


def _facts(seen: Any, *names: str) -> tuple[Any, ...]:
    return tuple(seen[name] for name in names)


# ---- retry


@pytest.mark.parametrize("name", ["walk", "walk_by_key"])
def test_each_retry_with_other_arguments_runs_the_body(canvas: Canvas, of: str, name: str) -> None:
    """`self.retry(args=..., kwargs=...)` goes on with them, whatever the key selects, and finishes."""
    assert got(getattr(canvas, name).delay(1, of)) == ([1, 2, 3] if name == "walk" else [3])
    assert [_facts(body, "page", "retries") for body in canvas.bodies(of)] == [(1, 0), (2, 1), (3, 2)]


def test_an_automatic_retry_repeats_a_body_that_changed_its_argument(canvas: Canvas, of: str) -> None:
    """`autoretry_for` publishes what the body left of its arguments, and every try runs."""
    assert got(canvas.amend.delay({"id": 7}, of)) == {"id": 7, "tries": 3}
    orders = [{"id": 7}, {"id": 7, "tries": 1}, {"id": 7, "tries": 2}]
    assert [_facts(body, "retries", "order") for body in canvas.bodies(of)] == [*enumerate(orders)]


def test_a_task_that_uses_up_its_retries_fails_with_its_error(canvas: Canvas, of: str) -> None:
    """`max_retries` counts the tries of the body, and the last error is the task's."""
    with pytest.raises(KeyError, match="in vain"):
        got(canvas.never.delay(of))
    assert [body["retries"] for body in canvas.bodies(of)] == [0, 1, 2]


def test_a_retry_takes_its_options(canvas: Canvas, of: str) -> None:
    """Countdown, queue, priority, headers, time limits and expiry of `retry` are those of the message it publishes."""
    options = {"countdown": 0.1, "queue": OTHER, "priority": 3, "headers": {"trace": "second"}, "shadow": "another"}
    seen = got(canvas.retry_with.apply_async((of, {**options, **LIMITS}), headers={"trace": "first"}))
    first, second = canvas.bodies(of)
    assert _facts(first, "queue", "trace", "eta") == (canvas.app.conf.task_default_queue, "first", False)
    assert second == {"task": "retry_with", **seen}
    assert _facts(seen, "queue", "priority", "trace", "limits", "id") == (OTHER, 3, "second", [50, 40], first["id"])
    assert all(_facts(seen, "eta", "expires"))


def test_a_retry_keeps_what_its_message_had(canvas: Canvas, of: str) -> None:
    """Headers, expiry, time limits and links survive a retry that does not name them."""
    options = {"headers": {"trace": "kept"}, "priority": 5, **LIMITS}
    got(canvas.retry_with.apply_async((of, {"countdown": 0}), link=canvas.see_after.s(of), **options))
    first, second, linked = canvas.wait_for_bodies(of, 3)
    kept = ("id", "root_id", "trace", "limits", "priority", "queue")
    assert _facts(second, *kept) == _facts(first, *kept)
    assert _facts(second, "trace", "limits", "priority") == ("kept", [50, 40], 5)
    assert (second["expires"], linked["task"]) == (True, "see_after")


def test_a_retry_at_a_time_waits_for_it_and_one_that_expired_does_not_run(canvas: Canvas, of: str) -> None:
    """A second try that comes too late is revoked, as a first one is."""
    assert got(canvas.retry_with.delay(f"{of} eta", {}, eta_in=0.3))["eta"]
    for late in (
        canvas.retry_with.delay(of, {"expires": -10, "countdown": 0}),
        canvas.see.apply_async((of,), expires=datetime.now(UTC) - timedelta(seconds=10)),
    ):
        with pytest.raises(TaskRevokedError, match="expired"):
            got(late)
    assert len(canvas.bodies(of)) == 1


def test_a_retry_inside_a_chord_and_a_chain_counts_once(canvas: Canvas, of: str) -> None:
    """What follows a retried member gets its last result, once."""
    assert got(chord([canvas.walk.s(1, of), canvas.say.s("x", of)], canvas.say.s(of)).delay()) == [[1, 2, 3], "x"]
    assert got(chain(canvas.walk.s(1, of + "2"), canvas.say.s(of + "2")).delay()) == [1, 2, 3]
    assert ran(canvas, of + "2") == ["say", "walk", "walk", "walk"]
    assert ran(canvas, of) == ["say", "say", "walk", "walk", "walk"]


def test_a_retry_beside_the_result_runs_the_body_again(canvas: Canvas, of: str) -> None:
    """`retry(throw=False)`: the first body's result is the task's, and the retry comes all the same."""
    result = canvas.retry_on_the_side.delay(of)
    assert got(result) == "went on"
    canvas.wait_for_ends(result.id, 2)
    assert [body["retries"] for body in canvas.bodies(of)] == [0, 1]
    assert AsyncResult(result.id, app=canvas.app).result == "went on"


@idempotent_only
def test_a_retry_comes_in_the_form_of_its_message(canvas: Canvas, of: str) -> None:
    """What JSON cannot carry is there again: a plain Task's retry would fail, or change it."""
    result = canvas.recall.apply_async(({1: {2, 3}}, of), serializer="pickle", compression="gzip")
    assert got(result) == ["int: set"]


@idempotent_only
@pytest.mark.parametrize(("name", "arguments"), [("walk_by_key", (1,)), ("amend", ({"id": 7},))])
def test_a_message_that_comes_after_its_retries_runs_nothing(
    canvas: Canvas, of: str, name: str, arguments: tuple[object, ...]
) -> None:
    """All tries are one operation, whatever arguments they had: a copy of the first message gets its result."""
    result = getattr(canvas, name).apply_async((*arguments, of), queue=HELD)
    message = canvas.held()
    canvas.deliver(message)
    value = got(result)
    canvas.deliver(message)
    canvas.wait_for_ends(result.id, 2)
    assert len(canvas.bodies(of)) == 3
    assert got(AsyncResult(result.id, app=canvas.app)) == value


# ---- options of apply_async


def test_options_reach_the_body(canvas: Canvas, of: str) -> None:
    """Ids, shadow, queue, priority, headers, expiry, countdown and time limits of the caller are the delivery's."""
    ids = {"task_id": f"id-{of}", "root_id": "the-root", "parent_id": "the-parent", "shadow": "another"}
    options = {"queue": OTHER, "priority": 7, "headers": {"trace": "t-1"}, "countdown": 0.1, **LIMITS}
    seen = got(canvas.see.apply_async((of,), **ids, **options))
    assert _facts(seen, "id", "root_id", "parent_id", "shadow") == tuple(ids.values())
    assert _facts(seen, "queue", "priority", "trace", "limits") == (OTHER, 7, "t-1", [50, 40])
    assert all(_facts(seen, "expires", "eta"))


def test_a_body_may_answer_a_soft_time_limit(canvas: Canvas, of: str) -> None:
    """It is raised in the body, which returns its own result."""
    assert got(canvas.outlast.apply_async((of,), soft_time_limit=1)) == "soft"


def test_an_ignored_result_is_not_kept(canvas: Canvas, of: str) -> None:
    """By the task's option and by the caller's; the caller's wins, and neither hinders what follows."""
    whispered = canvas.whisper.delay(of, "a")
    ignored = canvas.say.apply_async(("b", of), ignore_result=True, link=canvas.say.si("after b", of))
    kept = canvas.whisper.apply_async((of, "c"), ignore_result=False)
    canvas.wait_for_bodies(of, 4)
    assert got(kept) == "c"
    for each in (whispered, ignored):
        canvas.wait_for_ends(each.id, 1)
        assert AsyncResult(each.id, app=canvas.app).state == "PENDING"


def test_a_revoked_task_does_not_run(canvas: Canvas, of: str) -> None:
    """Revoked before it is delivered; the result says so."""
    result = canvas.say.apply_async(("x", of), queue=HELD)
    message = canvas.held()
    result.revoke()
    wait_until(lambda: result.id in str(canvas.app.control.inspect(timeout=0.3).revoked()), "the worker knows")
    canvas.deliver(message)
    with pytest.raises(TaskRevokedError):
        got(result)
    assert canvas.bodies(of) == []


def test_the_authors_other_ends_are_celerys(canvas: Canvas, of: str) -> None:
    """`Ignore` and `Reject` end a delivery as they do anywhere; a message that is given back runs the body again."""
    rejected, ignored = canvas.end_with.delay("Reject", f"{of} R"), canvas.end_with.delay("Ignore", f"{of} I")
    assert got(canvas.end_with.delay("requeue", of)) is None
    assert [body["redelivered"] for body in canvas.bodies(of)] == [False, True]
    wait_until(lambda: AsyncResult(rejected.id, app=canvas.app).state == "FAILURE", "it has failed")
    canvas.wait_for_bodies(f"{of} I", 1)
    got(canvas.say.delay("after", of))
    assert AsyncResult(ignored.id, app=canvas.app).state == "PENDING"
