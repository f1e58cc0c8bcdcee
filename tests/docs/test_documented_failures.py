"""The tables of docs/reference/failures.md and endings.md: each row is acted out, and its numbers must come out."""
# mypy: allow-untyped-decorators

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import isfunction
from typing import Any, Literal
from unittest.mock import patch

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_idempotent import (
    AtMostOnce,
    DeadlineExceeded,
    IdempotentTask,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    SafeToRetry,
    Status,
    StoreUnavailable,
    current_attempt,
)
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.integration.broker.recovery import mark
from celery_idempotent.integration.task import guard
from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import Ended, an_app, deliver
from tests.support.documents import DOCS, table

Kind = Literal["rerun", "refuse", "keyed"]

LEASE_AND_GRACE = 61_000


class WorkerDied(BaseException):
    """The process is gone: it writes nothing any more."""


class Scene:
    """One task of one kind, its receiver, its store, and the means to break things at any point."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock.now))
        self.app = an_app()
        self.app.conf.idempotency_store = self.store
        self.calls: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], Any] = lambda: "ch_1"
        self.dead = False
        self.successors: list[Ended | None] = []
        self.is_keyed = kind == "keyed"
        self.monkeypatch = monkeypatch
        self.store.before_swap = self._refuse_the_dead
        monkeypatch.setattr(guard, "Delivery", partial(Delivery, clock=self.clock))

        @self.app.task(
            base=IdempotentTask,
            bind=True,
            shared=False,
            name="shop.charge",
            idempotent=Policy(key="order_id", on_takeover="refuse" if kind == "refuse" else "rerun", **policy),
        )
        def charge(task: Any, order_id: int) -> Any:
            before, self.before = self.before, lambda: None
            after, self.after = self.after, lambda: "ch_1"
            before()
            self.calls.append(current_attempt().effect_key("charge"))
            return after()

        self.task = charge

    def _refuse_the_dead(self, record: Record) -> None:
        if self.dead:
            raise WorkerDied

    def die(self) -> None:
        self.dead = True
        raise WorkerDied

    @property
    def effects(self) -> int:
        return len(set(self.calls)) if self.is_keyed else len(self.calls)

    @property
    def status(self) -> Status | None:
        record = next(self.store.scan(), None)
        return record.status if record else None

    def deliver(self) -> Ended | None:
        """One delivery; None if its worker died."""
        try:
            return deliver(self.task, 7)
        except WorkerDied:
            self.dead = False
        except SystemExit:
            pass
        return None

    def settle(self) -> Ended:
        """Deliver until it is not postponed any more; every time it is, the lease runs out."""
        for _ in range(5):
            end = self.deliver()
            if end is not None and end.state not in {"RETRY", "REJECTED"}:
                return end
            self.clock.advance(LEASE_AND_GRACE)
        raise AssertionError("never settled")


def _dies_before_the_claim(scene: Scene) -> None:
    scene.dead = True
    assert scene.deliver() is None


def _claim_lost(scene: Scene) -> None:
    scene.store.faults.extend(["request lost", "request lost"])
    assert _state(scene.deliver()) == "RETRY"
    assert scene.effects == 0


def _reply_of_claim_lost(scene: Scene) -> None:
    scene.store.faults.extend(["reply lost"])
    assert _state(scene.deliver()) == "SUCCESS"


def _every_reply_of_claim_lost(scene: Scene) -> None:
    scene.store.faults.extend(["reply lost", "reply lost"])
    assert _state(scene.deliver()) == "RETRY"
    assert scene.effects == 0


def _dies_before_the_effect(scene: Scene) -> None:
    scene.before = scene.die
    assert scene.deliver() is None


def _dies_after_the_effect(scene: Scene) -> None:
    scene.after = scene.die
    assert scene.deliver() is None


def _completion_lost(scene: Scene) -> None:
    scene.store.faults.append("none")
    scene.store.faults.extend(["request lost"] * 9)
    assert _state(scene.deliver()) == "SUCCESS"


def _reply_of_completion_lost(scene: Scene) -> None:
    scene.store.faults.extend(["none", "reply lost", "reply lost", "reply lost"])
    assert _state(scene.deliver()) == "SUCCESS"


def _dies_after_the_completion(scene: Scene) -> None:
    assert _state(scene.deliver()) == "SUCCESS"


def _stalls(scene: Scene) -> None:
    def stall() -> str:
        scene.clock.advance(LEASE_AND_GRACE)
        scene.successor = scene.deliver()  # type: ignore[attr-defined]  # only this scene has one
        return "late"

    scene.after = stall
    end = scene.deliver()
    # It reports its successor's outcome, or its own where there is none.
    assert end is not None
    successor = scene.successor  # type: ignore[attr-defined]
    assert end == (successor if _state(successor) == "SUCCESS" else Ended("SUCCESS", "late"))


def _stalls_before_the_body(scene: Scene) -> None:
    def stall(new: Record, expected: str | None) -> Record | None:
        scene.store.swap = swap  # type: ignore[method-assign]
        stored = swap(new, expected)
        scene.clock.advance(LEASE_AND_GRACE)
        scene.deliver()
        return stored

    swap = scene.store.swap
    scene.store.swap = stall  # type: ignore[method-assign]
    assert _state(scene.deliver()) in {"SUCCESS", "FAILURE"}
    assert scene.effects == (0 if scene.status is Status.UNKNOWN else 1)


def _record_vanishes(scene: Scene) -> None:
    def vanish() -> str:
        (record,) = scene.store.scan()
        scene.store.delete(record.key, record.revision)
        return "ch_1"

    scene.after = vanish
    assert _state(scene.deliver()) == "SUCCESS"


def _limit_strikes(scene: Scene) -> None:
    strikes = [SoftTimeLimitExceeded()]

    def strike(record: Record) -> None:
        if record.status is Status.COMPLETED and strikes:
            raise strikes.pop()

    scene.store.before_swap = strike
    ended = scene.deliver()
    assert ended is not None
    assert isinstance(ended.value, SoftTimeLimitExceeded)


def _no_thread(scene: Scene) -> None:
    error = StoreUnavailable("memory", "heartbeat", "can't start new thread")
    with patch("celery_idempotent.integration.task.guard.heartbeat.start", side_effect=error):
        assert _state(scene.deliver()) == "RETRY"
    assert scene.status is Status.RELEASED


def _clock_was_behind(scene: Scene) -> None:
    scene.clock.advance(LEASE_AND_GRACE)
    now, behind = scene.store.now, [True]

    def told(record: Record) -> None:
        behind.clear()

    scene.store.now = lambda: now() - LEASE_AND_GRACE * bool(behind)  # type: ignore[method-assign]
    scene.store.before_swap = told
    scene.before = lambda: scene.successors.append(scene.deliver())
    assert _state(scene.deliver()) == "SUCCESS"
    assert [_state(each) for each in scene.successors] == ["RETRY"]


def _store_down_at_the_claim(scene: Scene) -> None:
    scene.store.faults.extend(["request lost"] * 4)
    assert _state(scene.deliver()) == _state(scene.deliver()) == "RETRY"
    assert scene.effects == 0


def _runs_unprotected(scene: Scene) -> None:
    scene.store.faults.extend(["request lost"] * 2)
    assert _state(scene.deliver()) == "SUCCESS"
    assert scene.status is None


def _store_down_for(scene: Scene, seconds: float) -> None:
    back_at = scene.clock.monotonic() + seconds

    def down(record: Record) -> None:
        if record.status is Status.COMPLETED and scene.clock.monotonic() < back_at:
            raise StoreUnavailable("x", "swap", "down")

    scene.store.before_swap = down
    end = scene.deliver()
    scene.store.before_swap = scene._refuse_the_dead
    assert _state(end) == ("SUCCESS" if seconds < 600 else "RETRY")


def _put_off_fails(scene: Scene) -> None:
    scene.store.faults.extend(["request lost"] * 2)
    with patch("celery.app.base.Celery.send_task", side_effect=ConnectionError):
        assert _state(scene.deliver()) == "REJECTED"


def _cold_shutdown(scene: Scene, point: Literal["before", "after"]) -> None:
    setattr(scene, point, partial(_is_stopped, scene))
    scene.deliver()


def _raises_after_the_effect(scene: Scene) -> None:
    def fail() -> None:
        raise ValueError("no")

    scene.after = fail
    assert _state(scene.deliver()) == "FAILURE"


def _not_encodable(scene: Scene) -> None:
    scene.after = object
    assert isinstance(scene.deliver(), Ended)
    assert type(scene.settle().value).__name__ == "ResultLost"


def _forgotten(scene: Scene) -> None:
    assert _state(scene.deliver()) == "SUCCESS"
    scene.clock.advance(8 * 86_400_000)


def _nothing_breaks(scene: Scene) -> None:
    assert _state(scene.deliver()) == "SUCCESS"


def _state(end: Ended | None) -> str:
    return "DIED" if end is None else end.state


ROWS: dict[str, tuple[Callable[[Scene], None], dict[str, Any]]] = {
    "worker dies before the claim": (_dies_before_the_claim, {}),
    "request of the claim is lost": (_claim_lost, {}),
    "reply of the claim is lost": (_reply_of_claim_lost, {}),
    "every reply of the claim is lost": (_every_reply_of_claim_lost, {}),
    "worker dies in the body, before the effect": (_dies_before_the_effect, {}),
    "worker dies after the effect, before the completion": (_dies_after_the_effect, {}),
    "request of the completion is lost": (_completion_lost, {}),
    "reply of the completion is lost": (_reply_of_completion_lost, {}),
    "worker dies after the completion, before the acknowledgement": (_dies_after_the_completion, {}),
    "worker stalls past its lease in the body, then goes on": (_stalls, {}),
    "only this worker cannot reach the store": (_stalls, {}),
    "body runs past its `deadline`, and ends after its lease": (_stalls, {"deadline": 60}),
    "worker stalls past its lease between the claim and the body": (_stalls_before_the_body, {}),
    "the record vanishes in the body (fail-over, `FLUSHALL`), and nobody claims meanwhile": (_record_vanishes, {}),
    "a soft time limit or a shutdown strikes while the completion is written": (_limit_strikes, {}),
    "no thread can be started to renew the lease": (_no_thread, {}),
    "the clock that a claim was written by had fallen behind": (_clock_was_behind, {}),
    "store is down at the claim": (_store_down_at_the_claim, {}),
    '... with `on_outage="run"`': (_runs_unprotected, {"on_outage": "run"}),
    "store is down at the completion, under 10 minutes": (partial(_store_down_for, seconds=500), {}),
    "store is down at the completion for longer": (partial(_store_down_for, seconds=700), {}),
    "publishing a postponed delivery fails": (_put_off_fails, {}),
    "warm shutdown (SIGTERM)": (_nothing_breaks, {}),
    "cold shutdown (SIGQUIT) in the body, before the effect": (partial(_cold_shutdown, point="before"), {}),
    "cold shutdown in the body, after the effect": (partial(_cold_shutdown, point="after"), {}),
    "hard time limit, or `revoke(terminate=True)`": (partial(_cold_shutdown, point="after"), {}),
    "body raises after the effect": (_raises_after_the_effect, {}),
    "result too large or not encodable": (_not_encodable, {}),
    "a duplicate comes after `retain`": (_forgotten, {}),
}
"""By row of the table, what breaks in it and what its policy adds."""

TABLE = table(DOCS / "reference/failures.md", "what breaks")


def test_every_row_of_the_failure_matrix_is_acted_out() -> None:
    """No row stands in the table without a test, and none is tested that is not there."""
    assert [row["what breaks"] for row in TABLE] == list(ROWS)


@pytest.mark.parametrize("kind", ["rerun", "refuse", "keyed"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["what breaks"])
def test_number_of_effects_is_the_documented_one(
    row: dict[str, str], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the fault and a further delivery, the receiver counts what the table says, and the record ends so."""
    act, policy = ROWS[row["what breaks"]]
    scene = Scene(kind, monkeypatch, **policy)

    act(scene)
    scene.settle()

    documented = row[kind]
    assert scene.effects == int(re.findall(r"\d", documented)[-1])
    ends = {each for each in Status if f"`{each}`" in documented} or {Status.COMPLETED}
    assert {scene.status} == ends


def _retries_unthrown(scene: Scene) -> None:
    scene.task.retry(throw=False, countdown=0)


def _is_stopped(scene: Scene) -> None:
    mark(scene.task.request.id, is_stopped=True)
    raise SystemExit


def _raises_before_effects(scene: Scene) -> None:
    with current_attempt().before_effects():
        raise KeyError("a bug")


def _lets_its_deadline_pass(scene: Scene) -> None:
    attempt = current_attempt()
    raise DeadlineExceeded(attempt.key, attempt.fencing_token)


def _raises_after_doubt(scene: Scene) -> None:
    with suppress(TimeoutError):
        current_attempt().step("text", _times_out)
    with pytest.raises(OutcomeUnknown):
        current_attempt().step("text", _times_out)
    raise KeyError("instead")


def _times_out(step: object) -> None:
    raise TimeoutError


AFTER_A_COMMIT = "does any of these after `attempt.commit` or the end of `attempt.transaction`"
ENDINGS: dict[str, tuple[Any, ...]] = {
    "returns": (None,),
    "raises `Retry` (by `self.retry()` or `autoretry_for`), or `SafeToRetry`": (Retry(), SafeToRetry()),
    "publishes a retry by `self.retry(throw=False)` and returns": (_retries_unthrown,),
    "raises anything inside `with attempt.before_effects():`": (_raises_before_effects,),
    "raises an exception in `remember`": (KeyError("declined"),),
    "raises any other `Exception`, a soft time limit included": (ValueError("x"), SoftTimeLimitExceeded()),
    "raises, whatever it raises, after one of its own steps has raised `OutcomeUnknown`": (
        OutcomeUnknown,
        _raises_after_doubt,
    ),
    "raises `Ignore` or `Reject`, calls `self.replace()`, or lets an error of `attempt.ensure_owned()` pass": (
        Ignore(),
        Reject(),
        LeaseLost("k", 1),
        StoreUnavailable("s", "swap", "down"),
    ),
    "lets `DeadlineExceeded` of its own attempt pass": (_lets_its_deadline_pass,),
    "of a task raises `SystemExit` or another `BaseException`; or is stopped by anybody's signal but its worker's, "
    "or by a hard time limit that gives the message back": (SystemExit(), KeyboardInterrupt()),
    "of a task is stopped by a cold shutdown, `revoke(terminate=True)` or a hard time limit "
    "that acknowledges the message; or raises `BaseException`, and is no task's": (_is_stopped,),
    AFTER_A_COMMIT: (None, Retry(), KeyError("declined"), ValueError("x"), Ignore(), LeaseLost("k", 1), SystemExit()),
}
"""By row of the table of endings, what the body raises; the last row is the matrix's own."""

ENDINGS_TABLE = table(DOCS / "reference/failures.md", "the body ...")


def test_every_ending_of_a_body_is_acted_out() -> None:
    """No row stands in the table without a test."""
    assert [row["the body ..."] for row in ENDINGS_TABLE[:-1]] == list(ENDINGS)


@pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
@pytest.mark.parametrize("row", ENDINGS_TABLE[:-1], ids=lambda row: row["the body ..."])
def test_record_after_a_body_is_the_documented_one(
    row: dict[str, str], on_takeover: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record ends as the table says for every way in which a body can end."""
    documented = row[f'`on_takeover="{on_takeover}"`']
    expected = Status.RELEASED if documented == "released" else Status(re.findall("`(.*?)`", documented)[0])

    for error in ENDINGS[row["the body ..."]]:
        scene = Scene(on_takeover, monkeypatch, remember=(KeyError,), effects={"text": AtMostOnce()})
        committed = "committed" if row["the body ..."] == AFTER_A_COMMIT else None
        scene.after = partial(_end, scene, error, committed)
        with suppress(KeyboardInterrupt):
            scene.deliver()

        assert scene.status is expected, error
        assert committed is None or deliver(scene.task, 7).value == committed, error


def _end(scene: Scene, error: Any, committed: str | None) -> str:
    attempt = current_attempt()
    if committed:
        attempt.commit(committed, [])
    if isfunction(error):
        error(scene)
    elif error is not None:
        raise error(attempt.key, "a step of its own is in doubt") if error is OutcomeUnknown else error
    return "ch_1"


def test_documents_are_where_this_file_looks() -> None:
    """The tables are found, so that an empty one cannot pass for a tested one."""
    assert len(TABLE) > 20
    assert len(ENDINGS_TABLE) > 5
