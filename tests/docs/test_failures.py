"""The tables of docs/reference/failures.md: each row is acted out, in order, and its numbers must come out."""
# mypy: allow-untyped-decorators

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import isfunction
from typing import Any
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
from celery_idempotent.testing.scenarios import WorkerDied
from tests.support.deliveries import Ended, an_app, deliver
from tests.support.documents import DOCS, table

PAGE = DOCS / "reference/failures.md"
LEASE_AND_GRACE = 61_000
LOST = "request lost"


class Scene:
    """One task of one kind, its receiver, its store, and the means to break things at any point."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock.now))
        self.store.before_swap = self.refuse_the_dead
        self.app = an_app(idempotency_store=self.store)
        self.calls: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], Any] = lambda: "ch_1"
        self.dead = False
        self.is_keyed = kind == "keyed"
        monkeypatch.setattr(guard, "Delivery", partial(Delivery, clock=self.clock))
        on_takeover: Any = "refuse" if kind == "refuse" else "rerun"
        options = {"name": "shop.charge", "idempotent": Policy(key="order_id", on_takeover=on_takeover, **policy)}

        @self.app.task(base=IdempotentTask, bind=True, shared=False, **options)
        def charge(task: Any, order_id: int) -> Any:
            before, self.before = self.before, lambda: None
            after, self.after = self.after, lambda: "ch_1"
            before()
            self.calls.append(current_attempt().effect_key("charge"))
            return after()

        self.task = charge

    def refuse_the_dead(self, record: Record) -> None:
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

    def deliver(self) -> Ended:
        """One delivery; its state is DIED if its worker did, and STOPPED if it was."""
        try:
            return deliver(self.task, 7)
        except WorkerDied:
            self.dead = False
            return Ended("DIED", None)
        except SystemExit:
            return Ended("STOPPED", None)

    def settle(self) -> Ended:
        """Deliver until it is not postponed any more; every time it is, the lease runs out."""
        for _ in range(5):
            ended = self.deliver()
            if ended.state not in {"RETRY", "REJECTED", "DIED", "STOPPED"}:
                return ended
            self.clock.advance(LEASE_AND_GRACE)
        raise AssertionError("never settled")


Act = Callable[[Scene], None]


def ends(*states: str, faults: tuple[Any, ...] = (), effects: int | None = None) -> Act:
    """So do the first deliveries, while the store has these faults."""

    def act(scene: Scene) -> None:
        scene.store.faults.extend(faults)
        assert [scene.deliver().state for _ in states] == list(states)
        assert effects in (None, scene.effects)

    return act


def dies(place: str) -> Act:
    """At once, or before or after the effect."""

    def act(scene: Scene) -> None:
        setattr(scene, place, True if place == "dead" else scene.die)
        assert scene.deliver().state == "DIED"

    return act


def is_stopped(place: str) -> Act:
    """Before or after the effect."""

    def act(scene: Scene) -> None:
        setattr(scene, place, partial(stop, scene))
        assert scene.deliver().state == "STOPPED"

    return act


def stop(scene: Scene) -> None:
    mark(scene.task.request.id, is_stopped=True)
    raise SystemExit


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_: object) -> None:
        raise error

    return act


def stalls(scene: Scene) -> None:
    successors: list[Ended] = []

    def stall() -> str:
        scene.clock.advance(LEASE_AND_GRACE)
        successors.append(scene.deliver())
        return "late"

    scene.after = stall
    ended = scene.deliver()
    # It reports its successor's outcome, or its own where there is none.
    assert ended == (successors[0] if successors[0].state == "SUCCESS" else Ended("SUCCESS", "late"))


def stalls_before_the_body(scene: Scene) -> None:
    swap = scene.store.swap

    def stall(new: Record, expected: str | None) -> Record | None:
        scene.store.swap = swap  # type: ignore[method-assign]
        stored = swap(new, expected)
        scene.clock.advance(LEASE_AND_GRACE)
        scene.deliver()
        return stored

    scene.store.swap = stall  # type: ignore[method-assign]
    assert scene.deliver().state in {"SUCCESS", "FAILURE"}
    assert scene.effects == (0 if scene.status is Status.UNKNOWN else 1)


def loses_its_record(scene: Scene) -> None:
    def vanish() -> str:
        (record,) = scene.store.scan()
        scene.store.delete(record.key, record.revision)
        return "ch_1"

    scene.after = vanish
    assert scene.deliver().state == "SUCCESS"


def meets_its_limit(scene: Scene) -> None:
    strikes = [SoftTimeLimitExceeded()]

    def strike(record: Record) -> None:
        if record.status is Status.COMPLETED and strikes:
            raise strikes.pop()

    scene.store.before_swap = strike
    assert isinstance(scene.deliver().value, SoftTimeLimitExceeded)


def has_no_thread(scene: Scene) -> None:
    error = StoreUnavailable("memory", "heartbeat", "can't start new thread")
    with patch("celery_idempotent.integration.task.guard.heartbeat.start", side_effect=error):
        assert scene.deliver().state == "RETRY"
    assert scene.status is Status.RELEASED


def clock_was_behind(scene: Scene) -> None:
    scene.clock.advance(LEASE_AND_GRACE)
    now, behind, successors = scene.store.now, [True], list[str]()
    scene.store.now = lambda: now() - LEASE_AND_GRACE * bool(behind)  # type: ignore[method-assign]
    scene.store.before_swap = lambda record: behind.clear()
    scene.before = lambda: successors.append(scene.deliver().state)
    assert (scene.deliver().state, successors) == ("SUCCESS", ["RETRY"])


def store_is_down_for(seconds: float, state: str) -> Act:
    def act(scene: Scene) -> None:
        back_at = scene.clock.monotonic() + seconds

        def down(record: Record) -> None:
            if record.status is Status.COMPLETED and scene.clock.monotonic() < back_at:
                raise StoreUnavailable("x", "swap", "down")

        scene.store.before_swap = down
        assert scene.deliver().state == state
        scene.store.before_swap = scene.refuse_the_dead

    return act


def cannot_be_postponed(scene: Scene) -> None:
    with patch("celery.app.base.Celery.send_task", side_effect=ConnectionError):
        ends("REJECTED", faults=(LOST,) * 2)(scene)


def fails_after_the_effect(scene: Scene) -> None:
    scene.after = raising(ValueError("no"))
    assert scene.deliver().state == "FAILURE"


def result_is_lost(scene: Scene) -> None:
    scene.after = object
    scene.deliver()
    assert type(scene.settle().value).__name__ == "ResultLost"


def is_forgotten(scene: Scene) -> None:
    assert scene.deliver().state == "SUCCESS"
    scene.clock.advance(8 * 86_400_000)


completes = ends("SUCCESS")
ROWS: list[Act | tuple[Act, dict[str, Any]]] = [
    dies("dead"),
    ends("RETRY", faults=(LOST,) * 2, effects=0),
    ends("SUCCESS", faults=("reply lost",)),
    ends("RETRY", faults=("reply lost",) * 2, effects=0),
    dies("before"),
    dies("after"),
    ends("SUCCESS", faults=("none", *(LOST,) * 9)),
    ends("SUCCESS", faults=("none", *("reply lost",) * 3)),
    completes,  # and dies before the acknowledgement
    stalls,
    stalls,  # as one that alone cannot reach the store
    (stalls, {"deadline": 60}),
    stalls_before_the_body,
    loses_its_record,
    meets_its_limit,
    has_no_thread,
    clock_was_behind,
    ends("RETRY", "RETRY", faults=(LOST,) * 4, effects=0),
    (ends("SUCCESS", faults=(LOST,) * 2, effects=1), {"on_outage": "run"}),
    store_is_down_for(500, "SUCCESS"),
    store_is_down_for(700, "RETRY"),
    cannot_be_postponed,
    completes,  # in a warm shutdown
    is_stopped("before"),
    is_stopped("after"),
    is_stopped("after"),  # by a hard time limit
    fails_after_the_effect,
    result_is_lost,
    is_forgotten,
]
"""By row of the table, what breaks in it, and what its policy adds."""
CASES = list(zip(table(PAGE, "what breaks"), ROWS, strict=True))


@pytest.mark.parametrize("kind", ["rerun", "refuse", "keyed"])
@pytest.mark.parametrize(
    ("row", "broken"), CASES, ids=lambda each: each["what breaks"] if isinstance(each, dict) else ""
)
def test_number_of_effects_is_the_documented_one(
    row: dict[str, str], broken: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the fault and a further delivery, the receiver counts what the table says, and the record ends so."""
    act, policy = broken if isinstance(broken, tuple) else (broken, {})
    scene = Scene(kind, monkeypatch, **policy)

    act(scene)
    scene.settle()

    expected = {each for each in Status if f"`{each}`" in row[kind]} or {Status.COMPLETED}
    assert (scene.effects, {scene.status}) == (int(re.findall(r"\d", row[kind])[-1]), expected)


def publishes_a_retry(scene: Scene) -> None:
    scene.task.retry(throw=False, countdown=0)


def raises_before_effects(scene: Scene) -> None:
    with current_attempt().before_effects():
        raise KeyError("a bug")


def lets_its_deadline_pass(scene: Scene) -> None:
    attempt = current_attempt()
    raise DeadlineExceeded(attempt.key, attempt.fencing_token)


def is_in_doubt(scene: Scene) -> None:
    raise OutcomeUnknown(current_attempt().key, "a step of its own is in doubt")


def raises_after_doubt(scene: Scene) -> None:
    for error in (TimeoutError, OutcomeUnknown):
        with suppress(error):
            current_attempt().step("text", raising(TimeoutError()))
    raise KeyError("instead")


LEAVES = (Ignore(), Reject(), LeaseLost("k", 1), StoreUnavailable("s", "swap", "down"))
ENDINGS: list[tuple[Any, ...]] = [
    (None,),
    (Retry(), SafeToRetry()),
    (publishes_a_retry,),
    (raises_before_effects,),
    (KeyError("declined"),),
    (ValueError("x"), SoftTimeLimitExceeded()),
    (is_in_doubt, raises_after_doubt),
    LEAVES,
    (lets_its_deadline_pass,),
    (SystemExit(), KeyboardInterrupt()),
    (stop,),
    (None, Retry(), KeyError("declined"), ValueError("x"), Ignore(), LeaseLost("k", 1), SystemExit()),
]
"""By row of the table of endings, how the body ends; the last does so after a commit. A death has its row above."""
BODIES = list(zip(table(PAGE, "the body ...")[:-1], ENDINGS, strict=True))


@pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
@pytest.mark.parametrize(
    ("row", "endings"), BODIES, ids=lambda each: each["the body ..."] if isinstance(each, dict) else ""
)
def test_record_after_a_body_is_the_documented_one(
    row: dict[str, str], endings: tuple[Any, ...], on_takeover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record ends as the table says for every way in which a body can end."""
    documented = row[f'`on_takeover="{on_takeover}"`']
    expected = Status.RELEASED if documented == "released" else Status(re.findall("`(.*?)`", documented)[0])
    committed = "committed" if endings is ENDINGS[-1] else None

    for ending in endings:
        scene = Scene(on_takeover, monkeypatch, remember=(KeyError,), effects={"text": AtMostOnce()})
        scene.after = partial(end, scene, ending, committed)
        with suppress(KeyboardInterrupt):
            scene.deliver()

        assert scene.status is expected, ending
        assert committed is None or deliver(scene.task, 7).value == committed, ending


def end(scene: Scene, ending: Any, committed: str | None) -> str:
    if committed:
        current_attempt().commit(committed, [])
    if isfunction(ending):
        ending(scene)
    elif ending is not None:
        raise ending
    return "ch_1"
