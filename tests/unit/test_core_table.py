"""The protocol as tables: what a delivery meets, what goes wrong at which moment, and what becomes of the operation.

Every body has one effect, which gives the number of its receipt. So an effect that happened twice would show as
``"receipt 2"``. ``answer`` is what the caller of the delivery gets: a value, or the type of what is returned or raised.
"""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from celery_idempotent import KeyReused, LeaseLost, OutcomeUnknown, PolicyError
from celery_idempotent.engine.attempt import Attempt
from celery_idempotent.engine.delivery import Conflict, Outcome
from celery_idempotent.errors import ReplayedFailure, ResultLost, SafeToRetry, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import RecordUnreadable, Status
from tests.support.scene import Again, Elsewhere, Scene, SoftTimeLimit, raising

COMPLETED, FAILED, RELEASED = Status.COMPLETED, Status.FAILED, Status.RELEASED
UNKNOWN, IN_PROGRESS = Status.UNKNOWN, Status.IN_PROGRESS


class Bug(Exception): ...


class Declined(Exception): ...  # which the policy remembers


class Local(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


RERUN: dict[str, Any] = {"remember": (Declined, Local)}
REFUSE: dict[str, Any] = {"on_takeover": "refuse"}
GREEDY: dict[str, Any] = {"remember": (Exception,)}
OUTAGE_RUNS: dict[str, Any] = {"on_outage": "run"}
DOUBT = OutcomeUnknown("k", "a step may have had its effect")
OUTAGE, LOSS = StoreUnavailable("s", "swap", "down"), LeaseLost("k", 1)
GROUP = ExceptionGroup("", [Bug(), ExceptionGroup("", [OUTAGE])])

Body = Callable[[Scene, Any], Any]


effect: Body
effect, charging, texting, unsent, committing, unkept = (
    lambda scene, handle: scene.call(),
    lambda scene, handle: handle.step("charge", scene.call),
    lambda scene, handle: handle.step("sms", scene.call),  # which is declared as made at most once
    lambda scene, handle: handle.step("sms", raising(Bug())),
    lambda scene, handle: handle.commit(scene.call(), [{"Put": {}}]),
    lambda scene, handle: object(),
)


def then(first: Body, error: BaseException) -> Body:
    """A body that raises after something else."""
    return lambda scene, handle: (first(scene, handle), raising(error)())


def fails(error: BaseException) -> Body:
    """A body that raises after its effect."""
    return then(effect, error)


def before_effects(error: BaseException | None, instead: BaseException | None = None, *, step: bool = False) -> Body:
    """A body that raises where its author says that nothing has begun; it may go on, and raise something else."""

    def body(scene: Scene, handle: Attempt) -> None:
        try:
            with handle.before_effects():
                raising(error)() if error else None
        except BaseException:
            if step:
                handle.step("charge", scene.call)
            if instead is None:
                raise
        raising(instead)() if instead else None

    return body


EARLY = Bug()

ENDINGS = [
    # body, policy, answer, status, events, answer to the next delivery
    (effect, RERUN, "receipt 1", COMPLETED, "claimed completed", "receipt 1"),
    (fails(Bug()), RERUN, Bug, RELEASED, "claimed released", "receipt 2"),
    (fails(Bug()), REFUSE, Bug, FAILED, "claimed failed", Bug),
    (fails(Declined("no", 42)), RERUN, Declined, FAILED, "claimed failed", Declined),
    (fails(Local(code=1)), RERUN, Local, FAILED, "claimed failed", ReplayedFailure),
    (fails(Again()), REFUSE, Again, RELEASED, "claimed released", "receipt 2"),
    (fails(SafeToRetry()), REFUSE, SafeToRetry, RELEASED, "claimed released", "receipt 2"),
    (fails(Elsewhere()), RERUN, Elsewhere, RELEASED, "claimed released", "receipt 2"),
    (fails(Elsewhere()), REFUSE, Elsewhere, UNKNOWN, "claimed outcome_unknown", OutcomeUnknown),
    (fails(SystemExit()), RERUN, SystemExit, RELEASED, "claimed released", "receipt 2"),
    (fails(SystemExit()), REFUSE, SystemExit, UNKNOWN, "claimed outcome_unknown", OutcomeUnknown),
    (fails(DOUBT), GREEDY, OutcomeUnknown, UNKNOWN, "claimed outcome_unknown", OutcomeUnknown),
    (fails(OutcomeUnknown("another", "")), RERUN, OutcomeUnknown, RELEASED, "claimed released", "receipt 2"),
    # What a body met when it asked its attempt is no outcome, and postpones its delivery, in a group as well.
    (fails(OUTAGE), GREEDY, StoreUnavailable, RELEASED, "claimed released", "receipt 2"),
    (fails(LOSS), REFUSE, LeaseLost, UNKNOWN, "claimed outcome_unknown", OutcomeUnknown),
    (fails(GROUP), GREEDY, StoreUnavailable, RELEASED, "claimed released", "receipt 2"),
    (fails(BaseExceptionGroup("", [OUTAGE, SystemExit()])), RERUN, BaseExceptionGroup, RELEASED, ANY, "receipt 2"),
    # The author's word is for what leaves the block, and only while nothing has begun since.
    (before_effects(Bug()), REFUSE, Bug, RELEASED, "claimed released", "receipt 1"),
    (before_effects(SystemExit()), REFUSE, SystemExit, RELEASED, "claimed released", "receipt 1"),
    (before_effects(EARLY, ExceptionGroup("", [EARLY])), REFUSE, ExceptionGroup, RELEASED, ANY, "receipt 1"),
    (before_effects(EARLY, ExceptionGroup("", [EARLY, OSError()])), REFUSE, ExceptionGroup, FAILED, ANY, ANY),
    (before_effects(Bug(), OSError()), REFUSE, OSError, FAILED, "claimed failed", OSError),
    (before_effects(Bug(), step=True), REFUSE, Bug, FAILED, "claimed failed", Bug),
    (before_effects(None, Bug()), REFUSE, Bug, FAILED, "claimed failed", Bug),
]


@pytest.mark.parametrize(("body", "policy", "answer", "status", "told", "again"), ENDINGS)
def test_how_a_body_ends(
    scene: Scene, body: Body, policy: Any, answer: Any, status: Status, told: Any, again: Any
) -> None:
    """Two writes, whose second says what follows from the end; the next delivery runs or is answered by that."""
    ended = scene.answer(lambda: scene.perform(lambda handle: body(scene, handle), **policy))
    assert (ended, scene.status, scene.told) == (answer, status, told)
    assert [moment.status for moment in scene.store.swaps if not moment.steps] == [IN_PROGRESS, status]
    assert scene.answer(lambda: scene.perform(lambda handle: effect(scene, handle), **policy)) == again


def ended_by(body: Body, fingerprint: str = "f", **policy: Any) -> Callable[[Scene], None]:
    """An earlier delivery has ended."""

    def before(scene: Scene) -> None:
        given = {**RERUN, **policy, "fingerprint": fingerprint}
        scene.answer(lambda: scene.perform(lambda handle: body(scene, handle), **given))

    return before


def dead(*times: int, fails_between: bool = False) -> Callable[[Scene], None]:
    """So many deliveries died, one after the other."""

    def before(scene: Scene) -> None:
        for number in range(*times):
            if number and fails_between:
                ended_by(fails(Bug()))(scene)
            scene.abandon()

    return before


def pickled(body: Body) -> Callable[[Scene], None]:
    """An earlier outcome was written by a worker that pickles."""

    def before(scene: Scene) -> None:
        json, scene.codec = scene.codec, Codec("pickle", frozenset({"application/x-python-serialize"}))
        ended_by(body)(scene)
        scene.codec = json

    return before


def later(milliseconds: int, before: Callable[[Scene], None] = Scene.abandon) -> Callable[[Scene], None]:
    """So much later; or earlier, in front of the end of a lease."""
    return lambda scene: (before(scene), scene.clock.advance(milliseconds))[0]  # type: ignore[func-returns-value]


nothing, running, unknown, expired = (
    lambda scene: None,
    later(-51_000),
    ended_by(fails(SystemExit()), on_takeover="refuse"),
    later(8 * 86_400_000, ended_by(effect)),
)
TAKEOVER, NEW = "claimed taken_over completed", "claimed completed"
ONE_TAKEOVER, ANY_NUMBER = {"max_takeovers": 1}, {"max_takeovers": None}

MEETINGS = [
    # what came before, policy, answer, status, events, writes, events where it is only observed
    (nothing, RERUN, "mine", COMPLETED, NEW, 2, NEW),
    (ended_by(effect), RERUN, "receipt 1", COMPLETED, "replayed", 1, "replayed"),
    (ended_by(fails(Declined())), RERUN, Declined, FAILED, "replayed", 1, "replayed"),
    (ended_by(unkept), RERUN, ResultLost, COMPLETED, "replayed result_lost", 1, "replayed"),
    (pickled(effect), RERUN, ResultLost, COMPLETED, "replayed result_lost", 1, "replayed"),
    (pickled(fails(Declined())), RERUN, ResultLost, FAILED, "replayed result_lost", 1, "replayed"),
    (expired, RERUN, "mine", COMPLETED, NEW, 3, NEW),
    (running, REFUSE, Conflict, IN_PROGRESS, "conflicted", 1, "conflicted"),
    (unknown, RERUN, OutcomeUnknown, UNKNOWN, "outcome_unknown", 1, "outcome_unknown"),
    (ended_by(fails(Bug())), RERUN, "mine", COMPLETED, NEW, 3, NEW),
    # Arguments bind from the first step or outcome on: another card may come after one that was declined.
    (ended_by(effect, "other"), RERUN, KeyReused, COMPLETED, "key_reused", 1, "key_reused"),
    (ended_by(fails(Bug()), "other"), RERUN, "mine", COMPLETED, NEW, 3, NEW),
    (ended_by(then(charging, Bug()), "other"), RERUN, KeyReused, RELEASED, "key_reused", 1, "key_reused"),
    (ended_by(unsent, "other"), RERUN, KeyReused, RELEASED, "key_reused", 1, "key_reused"),
    # Dead attempts: observed, nothing is left UNKNOWN, which would stop the operation once the policy is enforced.
    (dead(1), RERUN, "mine", COMPLETED, TAKEOVER, 3, TAKEOVER),
    (dead(1), REFUSE, OutcomeUnknown, UNKNOWN, "outcome_unknown", 2, TAKEOVER),
    (dead(1), ONE_TAKEOVER, "mine", COMPLETED, TAKEOVER, 3, TAKEOVER),
    (dead(2), ONE_TAKEOVER, OutcomeUnknown, UNKNOWN, "outcome_unknown", 2, TAKEOVER),
    (dead(2, fails_between=True), ONE_TAKEOVER, "mine", COMPLETED, TAKEOVER, 3, TAKEOVER),
    (dead(6), ANY_NUMBER, "mine", COMPLETED, TAKEOVER, 3, TAKEOVER),
]


@pytest.mark.parametrize(("before", "policy", "answer", "status", "told", "writes", "observed"), MEETINGS)
def test_what_a_delivery_meets(
    before: Any, policy: Any, answer: Any, status: Status, told: str, writes: int, observed: str
) -> None:
    """A new key costs two writes, a duplicate or a conflict one, a takeover three; observed, the body always runs."""
    enforced, watched = Scene(), Scene()
    for scene in (enforced, watched):
        before(scene)
        scene.events.clear()
        scene.store.swaps.clear()
        scene.runs = 0
    assert enforced.answer(lambda: enforced.run(lambda claim: "mine", **policy)) == answer
    assert (enforced.status, enforced.told, len(enforced.store.swaps)) == (status, told, writes)
    assert enforced.runs == (answer == "mine")
    assert watched.delivery(**policy).observe(lambda claim: "mine") == "mine"
    assert watched.told == observed


def refused_text(scene: Scene, handle: Attempt) -> Any:
    """A body whose first step says that it had no effect, and which goes on to a second."""
    if not scene.calls:
        with pytest.raises(SafeToRetry):
            handle.step("sms", raising(SafeToRetry()))
    return handle.step("charge", scene.call)


declining, failing, exiting = fails(Declined("no money")), fails(Bug()), fails(SystemExit())
DONE, WAITED = "claimed completed", "claimed store_unavailable completed"
DROPPED = "claimed completed result_dropped"
LATER, AGAIN = "claimed store_unavailable store_unavailable", "receipt 2"
ONE, TWICE, TWENTY = "receipt 1", ["request lost"] * 2, ["request lost"] * 20

FAULTS = [
    # moment, what its writes meet, body, policy, answer, status, events, writes, answer to the next delivery
    ("claim", ["request lost"], effect, RERUN, ONE, COMPLETED, DONE, 3, ONE),
    ("claim", ["reply lost"], effect, RERUN, ONE, COMPLETED, DONE, 3, ONE),
    ("claim", TWICE, effect, RERUN, StoreUnavailable, None, "store_unavailable", 2, ONE),
    ("claim", TWICE, effect, OUTAGE_RUNS, ONE, None, "store_unavailable", 2, AGAIN),
    ("claim", ["reply lost", "request lost"], effect, RERUN, StoreUnavailable, IN_PROGRESS, ANY, 2, Conflict),
    ("claim", ["refused"], effect, OUTAGE_RUNS, StoreMisconfigured, None, "store_unavailable", 1, ONE),
    ("claim", ["too large"], effect, OUTAGE_RUNS, StoreMisconfigured, None, "store_unavailable", 1, ONE),
    ("claim", ["unreadable"], effect, OUTAGE_RUNS, RecordUnreadable, None, "record_unreadable", 1, ONE),
    ("claim", ["struck before"], effect, OUTAGE_RUNS, SoftTimeLimit, None, "", 1, ONE),
    ("COMPLETED", ["request lost"], effect, RERUN, ONE, COMPLETED, DONE, 3, ONE),
    ("COMPLETED", ["reply lost"], effect, RERUN, ONE, COMPLETED, DONE, 3, ONE),
    ("COMPLETED", TWENTY, effect, RERUN, ONE, COMPLETED, WAITED, 22, ONE),
    ("COMPLETED", ["away"], effect, RERUN, StoreUnavailable, IN_PROGRESS, LATER, ANY, AGAIN),
    ("COMPLETED", ["away"], effect, OUTAGE_RUNS, StoreUnavailable, IN_PROGRESS, LATER, ANY, AGAIN),
    ("COMPLETED", ["refused"], effect, RERUN, StoreMisconfigured, IN_PROGRESS, "claimed store_unavailable", 2, ANY),
    ("COMPLETED", ["unreadable"], effect, RERUN, RecordUnreadable, IN_PROGRESS, "claimed record_unreadable", 2, ANY),
    ("COMPLETED", ["too large"] * 2, effect, RERUN, ONE, COMPLETED, DROPPED, 4, ResultLost),
    # The effect has happened: whatever strikes then is raised when that is recorded; an exit stays one.
    ("COMPLETED", ["struck before"], effect, RERUN, SoftTimeLimit, COMPLETED, DONE, 3, ONE),
    ("COMPLETED", ["struck after"], effect, RERUN, SoftTimeLimit, COMPLETED, DONE, 3, ONE),
    ("COMPLETED", ["exit", "struck before"], effect, RERUN, SystemExit, COMPLETED, DONE, 4, ONE),
    ("COMPLETED", ["struck before", "exit"], effect, RERUN, SystemExit, COMPLETED, DONE, 4, ONE),
    ("COMPLETED", ["bug"] * 1000, effect, RERUN, TypeError, IN_PROGRESS, "claimed", 10, ANY),
    ("FAILED", ["reply lost"], declining, RERUN, Declined, FAILED, "claimed failed", 3, Declined),
    ("FAILED", ["struck before"], declining, RERUN, SoftTimeLimit, FAILED, "claimed failed", 3, Declined),
    ("FAILED", ["too large"], declining, RERUN, Declined, FAILED, "claimed failed", 3, ReplayedFailure),
    ("FAILED", ["away"], declining, RERUN, StoreUnavailable, IN_PROGRESS, LATER, ANY, Declined),
    ("RELEASED", ["request lost"], failing, RERUN, Bug, RELEASED, "claimed released", 3, Bug),
    ("RELEASED", ["struck before"], failing, RERUN, SoftTimeLimit, RELEASED, "claimed released", 3, Bug),
    ("RELEASED", TWICE, failing, RERUN, Bug, IN_PROGRESS, "claimed store_unavailable", 3, Bug),
    ("UNKNOWN", ["struck before"], exiting, REFUSE, SoftTimeLimit, UNKNOWN, ANY, 3, OutcomeUnknown),
    ("UNKNOWN", ["too large"], exiting, REFUSE, SystemExit, UNKNOWN, ANY, 3, OutcomeUnknown),
    # A step that is made at most once begins when that is recorded, and not before.
    ("begin", ["request lost"], texting, RERUN, ONE, COMPLETED, DONE, 5, ONE),
    ("begin", ["reply lost"], texting, RERUN, ONE, COMPLETED, DONE, 5, ONE),
    ("begin", TWICE, texting, RERUN, StoreUnavailable, RELEASED, "claimed released", 4, ONE),
    ("begin", ["too large"], texting, RERUN, PolicyError, RELEASED, "claimed released", 3, ONE),
    ("begin", ["bug"], texting, RERUN, TypeError, RELEASED, "claimed released", 3, ONE),
    ("finish", ["reply lost"], texting, RERUN, ONE, COMPLETED, DONE, 5, ONE),
    ("finish", TWENTY, texting, RERUN, ONE, COMPLETED, WAITED, 24, ONE),
    ("finish", ["away"], texting, RERUN, StoreUnavailable, RELEASED, ANY, ANY, OutcomeUnknown),
    ("finish", ["away"], charging, RERUN, StoreUnavailable, RELEASED, ANY, ANY, AGAIN),
    ("finish", ["too large"], charging, RERUN, ONE, COMPLETED, DONE, 4, ONE),
    ("finish", ["struck before"], charging, RERUN, SoftTimeLimit, RELEASED, "claimed released", 4, ONE),
    ("finish", ["struck after"], charging, RERUN, SoftTimeLimit, RELEASED, "claimed released", 4, ONE),
    ("finish", ["exit"], texting, REFUSE, SystemExit, UNKNOWN, "claimed outcome_unknown", 5, OutcomeUnknown),
    ("finish", ["struck before"], refused_text, RERUN, SoftTimeLimit, RELEASED, "claimed released", 5, ONE),
    ("COMPLETED", ["reply lost", "reply lost"], committing, RERUN, ONE, COMPLETED, WAITED, 4, ONE),
    ("COMPLETED", ["request lost"], committing, RERUN, ONE, COMPLETED, DONE, 3, ONE),
    ("COMPLETED", ["struck after"], committing, RERUN, ONE, COMPLETED, DONE, 3, ONE),
    ("COMPLETED", ["too large"] * 2, committing, RERUN, ONE, COMPLETED, DROPPED, 4, ResultLost),
    ("COMPLETED", ["away"], committing, RERUN, StoreUnavailable, RELEASED, ANY, ANY, AGAIN),
]


@pytest.mark.parametrize(("moment", "faults", "body", "policy", "answer", "status", "told", "writes", "again"), FAULTS)
def test_what_a_write_meets(
    moment: str, faults: Any, body: Body, policy: Any, answer: Any, status: Any, told: Any, writes: Any, again: Any
) -> None:
    """Nothing runs without a certain claim, nothing is reported without a certain record, no recorded effect recurs."""
    scene = Scene()
    scene.plan(moment, *faults)
    assert scene.answer(lambda: scene.perform(lambda handle: body(scene, handle), **policy)) == answer
    assert (scene.status, scene.told, len(scene.store.swaps)) == (status, told, writes)
    scene.heal()
    scene.clock.advance(61_000 if again is not Conflict else 0)
    assert again == scene.answer(lambda: scene.perform(lambda handle: body(scene, handle), **policy))


def rewritten(**changes: Any) -> Callable[[Scene], None]:
    """Another attempt took over; what it has written since."""

    def meanwhile(scene: Scene) -> None:
        scene.clock.advance(61_000)
        stored = scene.record
        theirs = stored.but(owner="other", revision="theirs", fencing_token=2**60, **changes)
        assert scene.store.store.swap(theirs, stored.revision) == theirs

    return meanwhile


def used_anew(scene: Scene) -> None:
    """A duplicate has completed the operation, it was forgotten, and the key came with other arguments."""
    scene.steal()
    scene.clock.advance(8 * 86_400_000)
    assert scene.delivery("other").run(lambda claim: "theirs").value == "theirs"  # type: ignore[union-attr]


def vanished_and_claimed(scene: Scene) -> None:
    """Another delivery has begun since."""
    assert scene.store.delete("k", scene.record.revision)
    later(-51_000)(scene)
    scene.runs, scene.clock.milliseconds = 1, scene.clock.milliseconds + 51_000


def thought_dead(scene: Scene) -> None:
    """Another delivery has marked the operation UNKNOWN, as nothing may be repeated."""
    scene.clock.advance(61_000)
    assert scene.answer(lambda: scene.run(lambda claim: "never", on_takeover="refuse")) is OutcomeUnknown


completed, vanished, taken_over, failed, given_back = (
    Scene.steal,
    lambda scene: scene.store.delete("k", scene.record.revision),
    rewritten(),
    rewritten(status=FAILED),
    rewritten(status=RELEASED),
)
LOST, TOLD_UNKNOWN = "claimed lease_lost", "claimed outcome_unknown"

ZOMBIES = [
    # what happens while the body runs, how it ends, policy, answer, status, events
    (completed, effect, RERUN, "theirs", COMPLETED, LOST),
    (completed, fails(Bug()), RERUN, "theirs", COMPLETED, LOST),
    (completed, fails(Bug()), REFUSE, "theirs", COMPLETED, LOST),
    (completed, fails(Declined()), RERUN, "theirs", COMPLETED, LOST),
    (completed, fails(DOUBT), RERUN, "theirs", COMPLETED, LOST),
    (completed, fails(Again()), RERUN, Again, COMPLETED, LOST),
    (completed, fails(Elsewhere()), RERUN, Elsewhere, COMPLETED, LOST),
    (completed, fails(SystemExit()), RERUN, SystemExit, COMPLETED, LOST),
    (taken_over, effect, RERUN, LeaseLost, IN_PROGRESS, LOST),
    (taken_over, fails(Bug()), RERUN, LeaseLost, IN_PROGRESS, LOST),
    (taken_over, fails(SystemExit()), REFUSE, SystemExit, IN_PROGRESS, LOST),
    (failed, effect, RERUN, LeaseLost, FAILED, LOST),
    (given_back, effect, RERUN, LeaseLost, RELEASED, LOST),
    (used_anew, effect, RERUN, LeaseLost, COMPLETED, "claimed claimed completed lease_lost"),
    (vanished, effect, RERUN, ONE, COMPLETED, "claimed completed"),
    (vanished, fails(Declined()), RERUN, Declined, FAILED, "claimed failed"),
    (vanished, fails(Bug()), RERUN, Bug, RELEASED, "claimed released"),
    (vanished_and_claimed, effect, RERUN, LeaseLost, IN_PROGRESS, "lease_lost"),
    # Nobody can have run since: a late outcome is what a person would have looked for.
    (thought_dead, effect, REFUSE, ONE, COMPLETED, f"{TOLD_UNKNOWN} completed"),
    (thought_dead, fails(Bug()), REFUSE, Bug, FAILED, f"{TOLD_UNKNOWN} failed"),
    (thought_dead, fails(SystemExit()), REFUSE, SystemExit, UNKNOWN, f"{TOLD_UNKNOWN} lease_lost"),
]


@pytest.mark.parametrize(("meanwhile", "body", "policy", "answer", "status", "told"), ZOMBIES)
def test_what_happens_while_a_body_runs(
    meanwhile: Callable[[Scene], None], body: Body, policy: Any, answer: Any, status: Status, told: str
) -> None:
    """An attempt that was taken over writes nothing and reports its successor's outcome, or nothing as done."""
    scene, met = Scene(), []

    def stalling(handle: Attempt) -> Any:
        meanwhile(scene)
        met.append(scene.record if scene.status else None)
        return body(scene, handle)

    assert scene.answer(lambda: scene.perform(stalling, **policy)) == answer
    assert (scene.status, scene.told) == (status, told)
    assert (scene.record == met[0]) == ("lease_lost" in told)


@pytest.mark.parametrize(
    ("moment", "faults", "answer", "status", "told", "runs"),
    [
        ("claim", ["bug"] * 99, "done", None, "store_unavailable", 1),
        ("claim", ["refused"], "done", None, "store_unavailable", 1),
        ("RELEASED", TWICE, Bug, IN_PROGRESS, "claimed store_unavailable", 1),
        ("RELEASED", ["bug"] * 99, Bug, IN_PROGRESS, "claimed store_unavailable", 1),
        ("COMPLETED", ["bug"] * 99, "done", IN_PROGRESS, "claimed store_unavailable", 1),
        ("COMPLETED", ["refused"], "done", IN_PROGRESS, "claimed store_unavailable", 1),
        ("claim", TWICE, "done", None, "store_unavailable", 1),
        ("claim", ["unreadable"], "done", None, "record_unreadable", 1),
        ("claim", ["struck before"], SoftTimeLimit, IN_PROGRESS, "", 0),  # it is left to its lease
        ("COMPLETED", TWICE, "done", IN_PROGRESS, "claimed store_unavailable", 1),
        ("COMPLETED", ["exit"], SystemExit, COMPLETED, "claimed completed", 1),
        ("COMPLETED", ["struck after"], SoftTimeLimit, COMPLETED, "claimed completed", 1),
    ],
)
def test_what_is_told_of_an_observed_body(
    moment: str, faults: list[str], answer: Any, status: Any, told: str, runs: int
) -> None:
    """Its own result and error pass, and nobody waits; an outage is told and not raised, and what strikes is raised."""
    scene = Scene()
    scene.clock.on_sleep = raising(AssertionError("a pause"))
    scene.plan(moment, *faults)
    body = raising(Bug()) if answer is Bug else lambda claim: "done"
    ended = scene.answer(lambda: Outcome(scene.observe(body)))
    assert (ended, scene.status, scene.told, scene.runs) == (answer, status, told, runs)


def test_a_conflict_tells_whom_to_wait_for_and_how_long(scene: Scene) -> None:
    """The time until a takeover, the holder's worker and task id, and since when it has been running."""

    def body(claim: Any) -> Any:
        scene.clock.advance(10_000)
        return scene.run(lambda claim: "never")

    found = scene.run(body).value
    assert (found.error.retry_after, found.error.holder) == (51_000, "w")
    assert (found.task_id, found.running_for) == ("id", 10_000)


def test_a_failure_is_recorded_and_replayed_with_its_arguments(scene: Scene) -> None:
    """A declared outcome is raised again with its type; who is refused is told whose key it is."""
    for _ in range(2):
        with pytest.raises(Declined) as declined:
            scene.run(raising(Declined("no money", 42)), remember=(Declined,))
        assert declined.value.args == ("no money", 42)
    with pytest.raises(KeyReused) as reused:
        scene.run(lambda claim: "never", fingerprint="other")
    assert (scene.record.error, reused.value.task_id) == ("Declined: ('no money', 42)", "id")


@pytest.mark.parametrize("value", [None, 0, False, "", [], (1, 2), {1: "x"}])
def test_first_caller_and_replays_get_the_same(scene: Scene, value: Any) -> None:
    """Falsy values, tuples and odd keys: what the first caller gets is exactly what every duplicate gets."""
    answers = [scene.run(lambda claim: value).value for _ in range(2)]
    assert [repr(each) for each in answers] == [repr(json.loads(json.dumps(value)))] * 2
    assert scene.runs == 1


def test_events_name_the_operation_and_no_values(scene: Scene) -> None:
    """Key and token, of the claim or of what is recorded; never results. A lost claim takes none from its observer."""
    for _ in range(2):
        scene.run(lambda claim: "secret result")
    token = scene.record.fencing_token
    told = [(event.key, event.fencing_token, event.attempt, event.done_by) for event in scene.events]
    assert told == [("k", token, 1, None), ("k", token, 1, None), ("k", token, 1, "id")]
    assert "secret" not in repr(scene.events)
    watched = Scene()
    assert watched.observe(lambda claim: watched.steal() or "mine") == "mine"  # type: ignore[func-returns-value]
    assert watched.told == "claimed lease_lost"
