"""Retries, options and ends of a task are Celery's, whichever kind of task it is, on Redis."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.integration.canvas import HELD, OTHER, Canvas, got, idempotent_only
from tests.support.waiting import wait_until

LIMITS = {"expires": 600, "time_limit": 50, "soft_time_limit": 40}


def _facts(seen: Any, *names: str) -> tuple[Any, ...]:
    return tuple(seen[name] for name in names)


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


def test_the_authors_other_ends_are_celerys(canvas: Canvas, of: str) -> None:
    """`Ignore` and `Reject` end a delivery as they do anywhere; a message that is given back runs the body again."""
    rejected, ignored = canvas.end_with.delay("Reject", f"{of} R"), canvas.end_with.delay("Ignore", f"{of} I")
    assert got(canvas.end_with.delay("requeue", of)) is None
    assert [body["redelivered"] for body in canvas.bodies(of)] == [False, True]
    wait_until(lambda: AsyncResult(rejected.id, app=canvas.app).state == "FAILURE", "it has failed")
    canvas.wait_for_bodies(f"{of} I", 1)
    got(canvas.say.delay("after", of))
    assert AsyncResult(ignored.id, app=canvas.app).state == "PENDING"
