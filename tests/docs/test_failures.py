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

from celery_idempotent import AtMostOnce, IdempotentTask, Policy, Status, current_attempt
from celery_idempotent.engine.delivery import Delivery
from celery_idempotent.errors import DeadlineExceeded, LeaseLost, OutcomeUnknown, SafeToRetry, StoreUnavailable
from celery_idempotent.integration.broker.recovery import mark
from celery_idempotent.integration.task import guard
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.scenarios import WorkerDied
from tests.support.deliveries import Ended, an_app, deliver
from tests.support.documents import DOCS, table
from tests.support.scene import raising
from tests.support.stage import LEASE_AND_GRACE, Stage, StagedStore

PAGE = DOCS / "reference/failures.md"


class Scene:
    """One task of one kind and its receiver, on a stage with a clock of its own."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        self.stage, self.clock, self.is_keyed = Stage(), FakeClock(), kind == "keyed"
        self.store = StagedStore(MemoryStore(self.clock.now), self.stage)
        self.calls: list[str] = []
        self.returns: Callable[[int], Any] = "ch_{}".format
        monkeypatch.setattr(guard, "Delivery", partial(Delivery, clock=self.clock))

        def charge(order_id: int) -> Any:
            key = current_attempt().effect_key("charge")
            return self.returns(self.stage.ask("effect", lambda: self.calls.append(key) or len(self.calls)))  # type: ignore[func-returns-value]

        kinds: Any = {"on_takeover": "refuse" if kind == "refuse" else "rerun"}
        options = {"name": "shop.charge", "idempotent": Policy(key="order_id", **kinds, **policy)}
        self.task = an_app(idempotency_store=self.store).task(base=IdempotentTask, shared=False, **options)(charge)

    @property
    def effects(self) -> int:
        return len(set(self.calls)) if self.is_keyed else len(self.calls)

    @property
    def status(self) -> Status:
        (record,) = self.store.scan()
        return record.status

    def deliver(self) -> Ended:
        """One delivery; its state is DIED if its worker did, and STOPPED if it was."""
        try:
            return deliver(self.task, 7)
        except WorkerDied:
            return Ended("DIED", None)
        except SystemExit:
            return Ended("STOPPED", None)
        finally:
            self.stage.revive()

    def settle(self) -> Ended:
        """Deliver until it is not postponed any more; every time it is, the lease runs out."""
        for _ in range(5):
            ended = self.deliver()
            if ended.state not in {"RETRY", "REJECTED", "DIED", "STOPPED"}:
                return ended
            self.clock.advance(LEASE_AND_GRACE)
        raise AssertionError("never settled")


Act = Callable[[Scene], None]


def ends(*states: str, at: tuple[str, ...] = (), effects: int | None = None) -> Act:
    """So do the first deliveries, while the store does not answer at these moments."""

    def act(scene: Scene) -> None:
        for moment in at:
            scene.stage.plan(moment, raising(StoreUnavailable("store", "swap", "no answer")))
        assert [scene.deliver().state for _ in states] == list(states)
        assert (effects in (None, scene.effects), scene.stage.unplayed) == (True, [])

    return act


def dies(moment: str) -> Act:
    def act(scene: Scene) -> None:
        scene.stage.plan(moment, scene.stage.die)
        assert scene.deliver().state == "DIED"

    return act


def is_stopped(moment: str) -> Act:
    def act(scene: Scene) -> None:
        scene.stage.plan(moment, partial(stop, scene))
        assert scene.deliver().state == "STOPPED"

    return act


def stop(scene: Scene) -> None:
    mark(scene.task.request.id, is_stopped=True)
    raise SystemExit


def stalls(moment: str) -> Act:
    """It reports its successor's outcome, or its own where there is none."""

    def act(scene: Scene) -> None:
        successors: list[Ended] = []

        def stall() -> None:
            scene.clock.advance(LEASE_AND_GRACE)
            successors.append(scene.deliver())

        scene.stage.plan(moment, stall)
        ended, (successor,) = scene.deliver(), successors
        if moment == "after claim":
            assert (ended.state, scene.effects) == (successor.state, scene.status is not Status.UNKNOWN)
        else:
            assert ended == (successor if successor.state == "SUCCESS" else Ended("SUCCESS", "ch_1"))

    return act


def loses_its_record(scene: Scene) -> None:
    def vanish() -> None:
        (record,) = scene.store.scan()
        scene.store.delete(record.key, record.revision)

    scene.stage.plan("after effect", vanish)
    assert scene.deliver().state == "SUCCESS"


def meets_its_limit(scene: Scene) -> None:
    scene.stage.plan("before COMPLETED", raising(SoftTimeLimitExceeded()))
    assert isinstance(scene.deliver().value, SoftTimeLimitExceeded)


def has_no_thread(scene: Scene) -> None:
    error = StoreUnavailable("memory", "heartbeat", "can't start new thread")
    with patch("celery_idempotent.integration.task.guard.heartbeat.start", side_effect=error):
        assert scene.deliver().state == "RETRY"
    assert scene.status is Status.RELEASED


def clock_was_behind(scene: Scene) -> None:
    successors: list[str] = []
    scene.stage.ahead = -LEASE_AND_GRACE
    scene.stage.plan("before claim", partial(setattr, scene.stage, "ahead", 0))
    scene.stage.plan("before effect", lambda: successors.append(scene.deliver().state))
    assert (scene.deliver().state, successors) == ("SUCCESS", ["RETRY"])


def store_is_down_for(seconds: float, state: str) -> Act:
    def act(scene: Scene) -> None:
        back_at = scene.clock.monotonic() + seconds

        def down() -> None:
            scene.stage.plan("before COMPLETED", down)
            if scene.clock.monotonic() < back_at:
                raise StoreUnavailable("x", "swap", "down")

        scene.stage.plan("before COMPLETED", down)
        assert scene.deliver().state == state

    return act


def cannot_be_postponed(scene: Scene) -> None:
    with patch("celery.app.base.Celery.send_task", side_effect=ConnectionError):
        ends("REJECTED", at=("before claim",) * 2)(scene)


def fails_after_the_effect(scene: Scene) -> None:
    scene.stage.plan("after effect", raising(ValueError("no")))
    assert scene.deliver().state == "FAILURE"


def result_is_lost(scene: Scene) -> None:
    scene.returns = lambda number: object()
    scene.deliver()
    assert type(scene.settle().value).__name__ == "ResultLost"


def is_forgotten(scene: Scene) -> None:
    assert scene.deliver().state == "SUCCESS"
    scene.clock.advance(8 * 86_400_000)


completes = ends("SUCCESS")
ROWS: list[Act | tuple[Act, dict[str, Any]]] = [
    dies("before claim"),
    ends("RETRY", at=("before claim",) * 2, effects=0),
    ends("SUCCESS", at=("after claim",)),
    ends("RETRY", at=("after claim", "after renewal"), effects=0),  # the second is the same write once more
    dies("before effect"),
    dies("after effect"),
    ends("SUCCESS", at=("before COMPLETED",) * 9),
    ends("SUCCESS", at=("after COMPLETED",) * 3),
    completes,  # and dies before the acknowledgement
    stalls("after effect"),
    stalls("after effect"),  # as one that alone cannot reach the store
    (stalls("after effect"), {"deadline": 60}),
    stalls("after claim"),
    loses_its_record,
    meets_its_limit,
    has_no_thread,
    clock_was_behind,
    ends("RETRY", "RETRY", at=("before claim",) * 4, effects=0),
    (ends("SUCCESS", at=("before claim",) * 2, effects=1), {"on_outage": "run"}),
    store_is_down_for(500, "SUCCESS"),
    store_is_down_for(700, "RETRY"),
    cannot_be_postponed,
    completes,  # in a warm shutdown
    is_stopped("before effect"),
    is_stopped("after effect"),
    is_stopped("after effect"),  # by a hard time limit
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
        scene.returns = partial(end, scene, ending, committed)
        with suppress(KeyboardInterrupt):
            scene.deliver()

        assert scene.status is expected, ending
        assert committed is None or deliver(scene.task, 7).value == committed, ending


def end(scene: Scene, ending: Any, committed: str | None, number: int) -> str:
    if committed:
        current_attempt().commit(committed, [])
    if isfunction(ending):
        ending(scene)
    elif ending is not None:
        raise ending
    return f"ch_{number}"
