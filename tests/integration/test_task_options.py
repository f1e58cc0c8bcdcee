"""Retries, options and ends of a task are Celery's, whichever kind of task it is, on Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.integration.canvas import HELD, OTHER, Canvas, got, idempotent_only, ran
from tests.support.waiting import wait_until

# ---- retry


@pytest.mark.parametrize("name", ["walk", "walk_by_name", "walk_by_key"])
def test_each_retry_with_other_arguments_runs_the_body(canvas: Canvas, of: str, name: str) -> None:
    """`self.retry(args=..., kwargs=...)` goes on with them, whatever the key selects, and finishes."""
    result = getattr(canvas, name).delay(1, of)
    assert got(result) == ([1, 2, 3] if name == "walk" else [3])
    assert [body["page"] for body in canvas.bodies(of)] == [1, 2, 3]
    assert [body["retries"] for body in canvas.bodies(of)] == [0, 1, 2]


def test_an_automatic_retry_repeats_a_body_that_changed_its_argument(canvas: Canvas, of: str) -> None:
    """`autoretry_for` publishes what the body left of its arguments, and every try runs."""
    order = got(canvas.amend.delay({"id": 7}, of))
    bodies = canvas.bodies(of)
    assert [body["retries"] for body in bodies] == [0, 1, 2]
    assert order == {**bodies[-1]["order"], "tries": bodies[-1]["order"].get("tries", 0) + 1}
    assert [body["order"] for body in bodies] == [{"id": 7}, {"id": 7, "tries": 1}, {"id": 7, "tries": 2}]


def test_a_task_that_uses_up_its_retries_fails_with_its_error(canvas: Canvas, of: str) -> None:
    """`max_retries` counts the tries of the body, and the last error is the task's."""
    with pytest.raises(KeyError, match="in vain"):
        got(canvas.never.delay(of))
    assert [body["retries"] for body in canvas.bodies(of)] == [0, 1, 2]


def test_a_retry_takes_its_options(canvas: Canvas, of: str) -> None:
    """Countdown, queue, priority, headers, time limits and expiry of `retry` are those of the message it publishes."""
    options = {
        "countdown": 0.1,
        "queue": OTHER,
        "priority": 3,
        "headers": {"trace": "second"},
        "time_limit": 50,
        "soft_time_limit": 40,
        "expires": 600,
        "shadow": "another name",
    }
    seen = got(canvas.retry_with.apply_async((of, options), headers={"trace": "first"}))
    first, second = canvas.bodies(of)
    assert (first["queue"], first["trace"], first["eta"]) == (canvas.app.conf.task_default_queue, "first", False)
    assert second == {"task": "retry_with", **seen}
    assert (seen["queue"], seen["priority"], seen["trace"], seen["limits"]) == (OTHER, 3, "second", [50, 40])
    assert seen["id"] == first["id"]
    assert seen["eta"]
    assert seen["expires"]


def test_a_retry_keeps_what_its_message_had(canvas: Canvas, of: str) -> None:
    """Headers, expiry, time limits and links survive a retry that does not name them."""
    published = canvas.retry_with.apply_async(
        (of, {"countdown": 0}),
        headers={"trace": "kept"},
        expires=600,
        time_limit=50,
        soft_time_limit=40,
        priority=5,
        link=canvas.see_after.s(of),
    )
    got(published)
    first, second, linked = canvas.wait_for_bodies(of, 3)
    kept = ("id", "root", "trace", "limits", "priority", "queue")
    assert {name: second[name] for name in kept} == {name: first[name] for name in kept}
    assert (second["trace"], second["limits"], second["priority"]) == ("kept", [50, 40], 5)
    assert second["expires"]
    assert linked["task"] == "see_after"


def test_a_retry_at_a_time_waits_for_it(canvas: Canvas, of: str) -> None:
    """`retry(eta=...)` publishes for that time."""
    assert got(canvas.retry_with.delay(of, {}, eta_in=0.3))["eta"]


def test_a_retry_that_expired_does_not_run(canvas: Canvas, of: str) -> None:
    """`retry(expires=...)`: a second try that comes too late is revoked, as a first one is."""
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
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_retry_comes_in_the_form_of_its_message(canvas: Canvas, of: str, compression: str | None) -> None:
    """What JSON cannot carry is there again: a plain Task's retry would fail, or change it."""
    result = canvas.recall.apply_async(({1: {2, 3}}, of), serializer="pickle", compression=compression)
    assert got(result) == ["int: set"]


@idempotent_only
@pytest.mark.parametrize(("name", "arguments"), [("walk", (1,)), ("walk_by_key", (1,)), ("amend", ({"id": 7},))])
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


def test_a_task_id_is_the_callers(canvas: Canvas, of: str) -> None:
    """`task_id`, `root_id`, `parent_id` and `shadow` are as the caller says."""
    given = {"task_id": f"id-{of}", "root_id": "the-root", "parent_id": "the-parent", "shadow": "another"}
    seen = got(canvas.see.apply_async((of,), **given))
    assert (seen["id"], seen["root"], seen["parent"], seen["shadow"]) == tuple(given.values())


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_every_serializer_and_compression_arrives(canvas: Canvas, of: str, serializer: str, compression: str) -> None:
    """What can be sent arrives: keys that are numbers, only by pickle."""
    sent = {"1": "a"} if serializer == "json" else {1: "a", "s": {2, 3}}
    result = canvas.untyped.apply_async((sent,), {"of": of}, serializer=serializer, compression=compression)
    expected = sent if serializer == "json" else None
    if expected is not None:
        assert got(result) == [[expected], {}]
    else:
        canvas.wait_for_bodies(of, 1)


def test_options_reach_the_body(canvas: Canvas, of: str) -> None:
    """Queue, priority, headers, expiry, countdown and time limits of the caller are those of the delivery."""
    seen = got(
        canvas.see.apply_async(
            (of,),
            queue=OTHER,
            priority=7,
            headers={"trace": "t-1"},
            expires=600,
            countdown=0.1,
            time_limit=50,
            soft_time_limit=40,
        )
    )
    assert (seen["queue"], seen["priority"], seen["trace"], seen["limits"]) == (OTHER, 7, "t-1", [50, 40])
    assert seen["expires"]
    assert seen["eta"]


def test_a_soft_time_limit_is_raised_in_the_body(canvas: Canvas, of: str) -> None:
    """A body that answers it returns its own result."""
    assert got(canvas.outlast.apply_async((of,), soft_time_limit=1)) == "soft"


def test_a_hard_time_limit_fails_the_task(canvas: Canvas, of: str) -> None:
    """The process is ended, and the result says why."""
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        got(canvas.hold.apply_async(("x", of, f"closed-{of}"), time_limit=1))
    assert ran(canvas, of) == ["hold"]


def test_an_ignored_result_is_not_kept(canvas: Canvas, of: str) -> None:
    """By the task's option and by the caller's; the caller's wins, and neither hinders what follows."""
    whispered = canvas.whisper.delay(of, "a")
    ignored = canvas.say.apply_async(("b", of), ignore_result=True, link=canvas.say.si("after b", of))
    kept = canvas.whisper.apply_async((of, "c"), ignore_result=False)
    canvas.wait_for_bodies(of, 4)
    assert got(kept) == "c"
    for each in (whispered, ignored):
        canvas.wait_for_ends(each.id, 1)
    assert [AsyncResult(each.id, app=canvas.app).state for each in (whispered, ignored)] == ["PENDING", "PENDING"]


def test_a_revoked_task_does_not_run(canvas: Canvas, of: str) -> None:
    """Revoked before it is delivered, it never runs, and its result says so."""
    result = canvas.say.apply_async(("x", of), queue=HELD)
    message = canvas.held()
    result.revoke()
    wait_until(lambda: result.id in str(canvas.app.control.inspect(timeout=0.3).revoked()), "the worker knows")
    canvas.deliver(message)
    with pytest.raises(TaskRevokedError):
        got(result)
    assert canvas.bodies(of) == []


def test_a_running_task_is_terminated(canvas: Canvas, of: str) -> None:
    """`revoke(terminate=True)` ends the body, and the result is revoked."""
    result = canvas.hold.delay("x", of, f"closed-{of}")
    canvas.wait_for_bodies(of, 1)
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        got(result)
    assert len(canvas.bodies(of)) == 1


@pytest.mark.parametrize(("error", "state", "bodies"), [("Reject", "FAILURE", 1), ("Ignore", "PENDING", 1)])
def test_the_authors_other_ends_are_celerys(canvas: Canvas, of: str, error: str, state: str, bodies: int) -> None:
    """`Ignore` and `Reject` end a delivery as they do anywhere."""
    result = canvas.end_with.delay(error, of)
    canvas.wait_for_bodies(of, bodies)
    got(canvas.say.delay("after", of))
    wait_until(lambda: AsyncResult(result.id, app=canvas.app).state == state, f"{error} ends {state}")


def test_a_rejected_message_comes_back(canvas: Canvas, of: str) -> None:
    """`Reject(requeue=True)`: the next delivery of the same message runs the body."""
    assert got(canvas.end_with.delay("requeue", of)) is None
    assert [body["redelivered"] for body in canvas.bodies(of)] == [False, True]


def test_a_state_of_the_authors_own_is_seen(canvas: Canvas, of: str) -> None:
    """`update_state` shows while the body runs."""
    result = canvas.report_progress.delay(of, of)
    wait_until(lambda: result.state == "PROGRESS", "the state is set")
    assert result.info == {"of": of}
    canvas.ledger.open(of)
    assert got(result) == "done"
