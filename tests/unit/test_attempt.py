"""Steps and commits in a body: what is done once, what is remembered, and what a crash leaves behind."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn
from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.engine.transaction import derived_id
from celery_idempotent.errors import (
    DeadlineExceeded,
    LeaseLost,
    OutcomeUnknown,
    PolicyError,
    ResultLost,
    SafeToRetry,
    StoreUnavailable,
    WriteRefused,
)
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.effects import AtMostOnce, Fenced, Keyed
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Step
from celery_idempotent.protocol.store import RecordTooLarge, WriteFailed
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from tests.support.deliveries import published
from tests.support.scene import Again, Scene


class Declined(Exception):
    pass


class _Receiver:
    """Counts its effects, and keeps what it was given."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(self, step: Step) -> str:
        self.steps.append(step)
        return f"receipt {len(self.steps)}"


def _never(_: object) -> Any:
    pytest.fail("this was not to be called")


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def receiver() -> _Receiver:
    return _Receiver()


def test_step_is_done_once_however_often_the_body_runs(scene: Scene, receiver: _Receiver) -> None:
    """Its result is recorded before the body goes on, and later attempts get it without a call."""

    def fail_after(handle: ProtectedAttempt) -> None:
        handle.step("charge", receiver)
        raise Declined

    with pytest.raises(Declined):
        scene.perform(fail_after)
    outcome = scene.perform(lambda handle: handle.step("charge", receiver))

    assert outcome == Outcome("receipt 1")
    assert len(receiver.steps) == 1


def test_step_gives_its_receiver_the_same_key_and_a_larger_token(scene: Scene, receiver: _Receiver) -> None:
    """The key is the same on every attempt, fits payment APIs, and the token grows."""
    scene.abandon(lambda handle: receiver(Step("charge", handle.effect_key("charge"), handle.fencing_token)))
    scene.perform(lambda handle: handle.step("charge", receiver))

    first, second = receiver.steps
    assert first.key == second.key
    assert len(first.key) == 64
    assert second.fencing_token > first.fencing_token


def test_steps_may_be_reordered_between_deployments(scene: Scene) -> None:
    """A step is known by its name, not by its place."""
    calls: list[str] = []

    def step(handle: ProtectedAttempt, name: str) -> Any:
        return handle.step(name, lambda step: calls.append(step.name) or step.name)  # type: ignore[func-returns-value]

    scene.abandon(lambda handle: (step(handle, "a"), step(handle, "b")))
    scene.perform(lambda handle: [step(handle, "c"), step(handle, "b"), step(handle, "a")])

    assert calls == ["a", "b", "c"]


def test_step_under_rerun_is_called_again_after_a_crash_within(scene: Scene, receiver: _Receiver) -> None:
    """Between effect and record a worker can die; under rerun the call is made again."""

    def die_within(handle: ProtectedAttempt) -> None:
        def call(step: Step) -> None:
            receiver(step)
            scene.store.before_swap = lambda record: (_ for _ in ()).throw(KeyboardInterrupt)

        handle.step("charge", call)

    with pytest.raises(KeyboardInterrupt):
        scene.perform(die_within)
    scene.store.before_swap = lambda record: None
    scene.clock.advance(61_000)

    assert scene.perform(lambda handle: handle.step("charge", receiver)) == Outcome("receipt 2")


def test_step_under_refuse_is_recorded_before_its_call(scene: Scene) -> None:
    """What a call sees in the store is that it has begun."""
    seen: list[Any] = []
    scene.perform(lambda handle: handle.step("sms", lambda step: seen.append(dict(scene.record.steps))))

    assert seen == [{"sms": {"begun_at": scene.clock.now(), "attempt": 1}}]


def _timing_out(receiver: _Receiver) -> Callable[[Step], Any]:
    def call(step: Step) -> None:
        receiver(step)
        raise TimeoutError

    return call


def test_step_under_refuse_that_began_ends_unknown(scene: Scene, receiver: _Receiver) -> None:
    """The next attempt does not call: the operation waits for a person."""
    with pytest.raises(TimeoutError):
        scene.perform(lambda handle: handle.step("sms", _timing_out(receiver)))
    assert scene.names[-1] == "released"

    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="'sms' began in attempt 1"):
            scene.perform(lambda handle: handle.step("sms", receiver))

    assert scene.record.status is Status.UNKNOWN
    assert len(receiver.steps) == 1
    assert scene.names.count("outcome_unknown") == 2


def test_step_under_refuse_that_timed_out_is_not_repeated_by_its_own_body(scene: Scene, receiver: _Receiver) -> None:
    """A loop in the body cannot talk its way around the promise."""

    def stubborn(handle: ProtectedAttempt) -> Any:
        try:
            return handle.step("sms", _timing_out(receiver))
        except TimeoutError:
            return handle.step("sms", receiver)

    with pytest.raises(OutcomeUnknown):
        scene.perform(stubborn)

    assert len(receiver.steps) == 1


def _in_a_group(error: Exception) -> NoReturn:
    raise ExceptionGroup("of a TaskGroup", [error])


def _in_a_group_with_others(error: Exception) -> NoReturn:
    raise BaseExceptionGroup("", [ExceptionGroup("", [SafeToRetry(), ExceptionGroup("", [error])]), SystemExit()])


def _as_another(error: Exception) -> NoReturn:
    raise Declined from error


def _as_a_retry(error: Exception) -> NoReturn:
    raise Again


def _split(error: Exception) -> NoReturn:
    try:
        raise ExceptionGroup("", [error, LookupError(), ValueError()])
    except* LookupError:
        pass
    raise AssertionError


@pytest.mark.parametrize("policy", [{}, {"on_takeover": "refuse"}, {"remember": (Exception,)}])
@pytest.mark.parametrize("leave", [_in_a_group, _in_a_group_with_others, _as_another, _as_a_retry, _split])
def test_doubt_is_a_state_whatever_leaves_the_body(
    scene: Scene, receiver: _Receiver, leave: Callable[[Exception], NoReturn], policy: dict[str, Any]
) -> None:
    """Alone, in a group, or as another exception: what an attempt met of its steps ends the operation UNKNOWN."""

    def body(handle: ProtectedAttempt) -> None:
        try:
            handle.step("sms", _timing_out(receiver))
        except TimeoutError:
            with pytest.raises(OutcomeUnknown) as raised:
                handle.step("sms", receiver)
            leave(raised.value)

    with pytest.raises((BaseExceptionGroup, Declined, Again)):
        scene.perform(body, **policy)

    assert (scene.record.status, scene.names[-1]) == (Status.UNKNOWN, "outcome_unknown")
    assert scene.record.error == "step 'sms' began in attempt 1 and did not end"
    with pytest.raises(OutcomeUnknown):
        scene.perform(_never, **policy)
    assert len(receiver.steps) == 1


def test_doubt_that_a_body_has_dealt_with_is_none(scene: Scene, receiver: _Receiver) -> None:
    """Who returns has said what happened, perhaps by having asked the receiver."""

    def asking(handle: ProtectedAttempt) -> str:
        with pytest.raises(OutcomeUnknown):
            handle.step("sms", receiver)
        return "asked: it was sent"

    with pytest.raises(TimeoutError):
        scene.perform(lambda handle: handle.step("sms", _timing_out(receiver)))
    assert scene.perform(asking) == Outcome("asked: it was sent")


def test_doubt_met_by_one_of_the_tasks_of_a_group_ends_unknown(scene: Scene, receiver: _Receiver) -> None:
    """A real TaskGroup, of which another task goes well."""
    effects = {"sms": AtMostOnce(), "charge": Keyed()}

    async def both(handle: ProtectedAttempt, send: Callable[[Step], Awaitable[Any]]) -> None:
        async def charge(step: Step) -> str:
            return receiver(step)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(handle.astep("charge", charge))
            tasks.create_task(handle.astep("sms", send))

    async def lost(step: Step) -> None:
        receiver(step)
        raise TimeoutError

    for status in (Status.RELEASED, Status.UNKNOWN):
        with pytest.raises(ExceptionGroup):
            scene.perform(lambda handle: asyncio.run(both(handle, lost)), effects=effects)
        assert scene.record.status is status

    assert sorted({step.name for step in receiver.steps}) == ["charge", "sms"]
    assert [step.name for step in receiver.steps].count("sms") == 1


def test_step_that_had_no_effect_may_say_so_in_a_group(scene: Scene, receiver: _Receiver) -> None:
    """Then it has not begun, and is called again; one member that says less is doubt."""

    def refused(step: Step) -> None:
        raise ExceptionGroup("", [SafeToRetry(), ExceptionGroup("", [Again()])])

    with pytest.raises(ExceptionGroup):
        scene.perform(lambda handle: handle.step("sms", refused), on_takeover="refuse")
    assert (scene.record.status, scene.record.steps) == (Status.RELEASED, {})

    assert scene.perform(lambda handle: handle.step("sms", receiver), on_takeover="refuse") == Outcome("receipt 1")


def test_what_leaves_before_effects_in_a_group_releases_under_refuse(scene: Scene) -> None:
    """As alone; together with anything else it is final."""

    def body(handle: ProtectedAttempt, *others: Exception) -> None:
        try:
            with handle.before_effects():
                raise Declined
        except Declined as error:
            raise ExceptionGroup("", [error, *others]) from None

    with pytest.raises(ExceptionGroup):
        scene.perform(body, on_takeover="refuse")
    assert scene.record.status is Status.RELEASED

    with pytest.raises(ExceptionGroup):
        scene.perform(lambda handle: body(handle, ValueError()), on_takeover="refuse")
    assert scene.names[-1] == "failed"


def test_what_an_attempt_is_told_leaves_its_delivery_alone_when_a_group_has_it(scene: Scene) -> None:
    """So that the delivery is postponed as without a group, and is no failure of the task."""

    def asking(handle: ProtectedAttempt) -> None:
        scene.steal()
        try:
            handle.ensure_owned()
        except LeaseLost as error:
            raise ExceptionGroup("", [ValueError(), error]) from None

    def unanswered(handle: ProtectedAttempt) -> None:
        raise ExceptionGroup("", [StoreUnavailable("s", "get", "gone")])

    def ending(handle: ProtectedAttempt) -> None:
        raise BaseExceptionGroup("", [StoreUnavailable("s", "get", "gone"), SystemExit()])

    with pytest.raises(BaseExceptionGroup):
        scene.perform(ending)  # it is to end its process all the same
    with pytest.raises(StoreUnavailable):
        scene.perform(unanswered)
    assert scene.record.status is Status.RELEASED
    assert scene.perform(asking) == Outcome("theirs")


def test_late_body_in_a_group_of_tasks_is_taken_over(scene: Scene) -> None:
    """As a body that lets DeadlineExceeded pass alone: a body that is too slow again and again ends UNKNOWN."""

    def late(handle: ProtectedAttempt) -> None:
        scene.clock.advance(61_000)
        try:
            handle.ensure_owned()
        except DeadlineExceeded as error:
            raise ExceptionGroup("", [error]) from None

    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            scene.perform(late, deadline=60, max_takeovers=1)
    with pytest.raises(OutcomeUnknown):
        scene.perform(late, deadline=60, max_takeovers=1)


def test_doubt_is_not_an_outcome_to_remember(scene: Scene, receiver: _Receiver) -> None:
    """Also under remember=(Exception,) a step in doubt ends UNKNOWN, not FAILED."""
    with pytest.raises(TimeoutError):
        scene.perform(lambda handle: handle.step("sms", _timing_out(receiver)))

    with pytest.raises(OutcomeUnknown):
        scene.perform(lambda handle: handle.step("sms", receiver), remember=(Exception,))

    assert scene.record.status is Status.UNKNOWN


def test_doubt_of_another_operation_is_an_ordinary_error(scene: Scene) -> None:
    """OutcomeUnknown that a body got from elsewhere says nothing about its own effects."""

    def ask_another(handle: ProtectedAttempt) -> None:
        raise OutcomeUnknown("another key", "?")

    with pytest.raises(OutcomeUnknown):
        scene.perform(ask_another)

    assert scene.record.status is Status.RELEASED


WITHIN_AN_HOUR = {"charge": Keyed(window=3_600, on_takeover="refuse")}


def test_window_lets_a_step_be_called_again_until_it_is_over(scene: Scene, receiver: _Receiver) -> None:
    """While the receiver honours the key, a repetition is safe; then it is not."""

    def attempt(call: Callable[[Step], Any]) -> Any:
        return scene.perform(lambda handle: handle.step("charge", call), effects=WITHIN_AN_HOUR)

    with pytest.raises(TimeoutError):
        attempt(_timing_out(receiver))
    scene.clock.advance(3_599_000)
    with pytest.raises(TimeoutError):
        attempt(_timing_out(receiver))
    scene.clock.advance(1_000)

    with pytest.raises(OutcomeUnknown, match="window of 3600 s is over"):
        attempt(receiver)
    assert len(receiver.steps) == 2
    assert receiver.steps[0].key == receiver.steps[1].key


@pytest.mark.parametrize("error", [SafeToRetry, Again])
def test_call_that_had_no_effect_says_so(scene: Scene, receiver: _Receiver, error: type[Exception]) -> None:
    """SafeToRetry and Celery's Retry take the beginning back, so the next attempt calls."""

    def refused(step: Step) -> None:
        raise error

    with pytest.raises(error):
        scene.perform(lambda handle: handle.step("sms", refused))

    assert scene.perform(lambda handle: handle.step("sms", receiver)) == Outcome("receipt 1")


def test_earlier_beginning_is_not_taken_back(scene: Scene, receiver: _Receiver) -> None:
    """That this call had no effect says nothing about an earlier one."""
    within_a_minute = {"sms": Keyed(window=60, on_takeover="refuse")}

    def refused(step: Step) -> None:
        raise SafeToRetry

    with pytest.raises(TimeoutError):
        scene.perform(lambda h: h.step("sms", _timing_out(receiver)), effects=within_a_minute)
    with pytest.raises(SafeToRetry):
        scene.perform(lambda h: h.step("sms", refused), effects=within_a_minute)

    with pytest.raises(OutcomeUnknown):
        scene.perform(lambda handle: handle.step("sms", receiver))


def test_name_is_used_once_per_attempt(scene: Scene, receiver: _Receiver) -> None:
    """A loop over one name would get the first result for all; it is refused instead."""
    with pytest.raises(PolicyError, match="made a step of that name"):
        scene.perform(lambda handle: [handle.step("mail", receiver) for _ in range(2)])


def test_failed_step_may_be_made_again_by_the_same_body(scene: Scene, receiver: _Receiver) -> None:
    """A body may catch what its call raised and try again, where repeating is allowed."""

    def patient(handle: ProtectedAttempt) -> Any:
        with pytest.raises(TimeoutError):
            handle.step("charge", _timing_out(receiver))
        return handle.step("charge", receiver)

    assert scene.perform(patient) == Outcome("receipt 2")


def test_concurrent_steps_of_one_name_are_one(scene: Scene) -> None:
    """While a step is being made, a second of its name is refused."""

    def racing(handle: ProtectedAttempt) -> Any:
        refused: list[Exception] = []

        def call(step: Step) -> None:
            def second() -> None:
                try:
                    handle.step("mail", lambda step: None)
                except PolicyError as error:
                    refused.append(error)

            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

        handle.step("mail", call)
        return len(refused)

    assert scene.perform(racing) == Outcome(1)


def test_steps_of_several_threads_are_all_recorded(scene: Scene) -> None:
    """Each write of the record goes on from the one before it, whichever thread made that."""
    names = [f"item {number}" for number in range(16)]

    def made(handle: ProtectedAttempt, call: Callable[[Step], Any]) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda name: handle.step(name, call), names))

    scene.abandon(lambda handle: made(handle, lambda step: step.name))

    assert scene.perform(lambda handle: made(handle, _never)) == Outcome(names)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 201}, "1 to 200 characters"),
        ({"name": 7}, "name"),
    ],
)
def test_unusable_names_are_refused(scene: Scene, arguments: dict[str, Any], match: str) -> None:
    """Before anything happens, and naming the argument."""
    with pytest.raises(PolicyError, match=match):
        scene.perform(lambda handle: handle.step(**{"name": "a", "call": _never, **arguments}))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (None, "None cannot be called; write lambda step"),
        ("sent", "'sent' cannot be called"),
        (lambda: None, "its call takes one argument, the step"),
        (lambda step, other: None, "its call takes one argument, the step"),
    ],
)
def test_call_that_cannot_be_made_is_refused_before_it_counts_as_begun(scene: Scene, call: Any, match: str) -> None:
    """A slip of the author's is mended and tried again; as a beginning without an end it would be UNKNOWN."""
    with pytest.raises(PolicyError, match=match):
        scene.perform(lambda handle: handle.step("text", call), effects={"text": AtMostOnce()})
    assert scene.perform(lambda handle: handle.step("text", lambda step: 1), effects={"text": AtMostOnce()}) == Outcome(
        1
    )


@pytest.mark.parametrize("arguments", [("receipt", "o-1"), ("receipt", None), (lambda: None, "receipt")])
def test_sending_what_is_no_task_tells_the_order_of_arguments(scene: Scene, arguments: Any) -> None:
    """The step's name comes first here, and is not asked for by ``tx.send`` and ``outbox.send``."""
    with pytest.raises(PolicyError, match="is neither a task nor a signature; write attempt.send"):
        scene.perform(lambda handle: handle.send(*arguments))


def test_call_of_c_that_tells_no_signature_is_made(scene: Scene) -> None:
    """Not everything that can be called says how."""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(type)
    assert scene.perform(lambda handle: str(handle.step("text", type))) == Outcome(str(Step))


def test_value_is_the_same_for_first_and_later_attempts(scene: Scene) -> None:
    """A tuple becomes a list at once, not only when it is read back."""

    def pair(handle: ProtectedAttempt) -> Any:
        return handle.step("pair", lambda step: (1, 2))

    scene.abandon(pair)

    assert scene.perform(pair) == Outcome([1, 2])
    assert Scene().perform(pair) == Outcome([1, 2])


@pytest.mark.parametrize("value", [None, 0, False, "", []])
def test_empty_results_are_results(scene: Scene, value: Any) -> None:
    """A step that returned nothing has returned."""
    calls: list[int] = []

    def body(handle: ProtectedAttempt) -> Any:
        return handle.step("a", lambda step: calls.append(1) or value)  # type: ignore[func-returns-value]

    scene.abandon(body)

    assert scene.perform(body) == Outcome(value)
    assert calls == [1]


class _Small(MemoryStore):
    """A store whose records take so many characters of steps."""

    room = 10_000

    def swap_with(self, new: Record, expected: str | None, writes: Any) -> Record | None:
        if len(str(new.steps)) > self.room or len(new.result or "") > self.room:
            raise RecordTooLarge("full")
        return super().swap_with(new, expected, writes)


@pytest.mark.parametrize("value", ["x" * 10_000, object()])
def test_unkeepable_value_does_not_undo_a_step(scene: Scene, receiver: _Receiver, value: Any) -> None:
    """This attempt gets it; later ones learn that it is lost, and the call is not repeated."""
    scene.store.store = _Small(scene.clock.now)
    got: list[Any] = []

    def body(handle: ProtectedAttempt) -> None:
        got.append(handle.step("report", lambda step: receiver(step) and value))
        raise Declined

    with pytest.raises(Declined):
        scene.perform(body)
    with pytest.raises(ResultLost, match="step 'report'"):
        scene.perform(body)

    assert got == [value]
    assert len(receiver.steps) == 1


def test_full_record_refuses_a_step_before_its_effect(scene: Scene) -> None:
    """Where the beginning is recorded, there must be room for it."""
    small = scene.store.store = _Small(scene.clock.now)
    small.room = 10

    with pytest.raises(PolicyError, match="no room"):
        scene.perform(lambda handle: handle.step("sms", _never))


def test_step_whose_format_is_not_accepted_here_is_lost(scene: Scene) -> None:
    """A worker that does not decode the recorded format says so instead of calling again."""
    pickling = Scene(Codec("pickle", frozenset({"application/json", "application/x-python-serialize"})))
    pickling.abandon(lambda handle: handle.step("a", lambda step: {1}))
    scene.store.store, scene.clock.milliseconds = pickling.store.store, pickling.clock.milliseconds

    with pytest.raises(ResultLost, match="cannot be decoded"):
        scene.perform(lambda handle: handle.step("a", _never))


def test_step_extends_the_lease(scene: Scene, receiver: _Receiver) -> None:
    """A checkpoint is a renewal, too."""
    until: list[int] = []

    def body(handle: ProtectedAttempt) -> None:
        until.append(scene.record.lease_until)
        scene.clock.advance(30_000)
        handle.step("a", receiver)
        until.append(scene.record.lease_until)

    scene.perform(body)

    assert until[1] - until[0] == 30_000


@pytest.mark.parametrize("name", ["charge", "sms"])
def test_zombie_begins_no_step(scene: Scene, receiver: _Receiver, name: str) -> None:
    """An attempt that has outlived its lease asks before the call, and makes none if it was taken over."""

    def body(handle: ProtectedAttempt) -> None:
        scene.steal()
        with pytest.raises(LeaseLost):
            handle.step(name, receiver)
        raise Declined

    assert scene.perform(body) == Outcome("theirs")
    assert receiver.steps == []
    assert scene.record.result == '"theirs"'


@pytest.mark.parametrize(("name", "calls"), [("charge", 1), ("sms", 0)])
def test_attempt_that_is_taken_over_within_its_lease_records_nothing(
    scene: Scene, receiver: _Receiver, name: str, calls: int
) -> None:
    """By its own clock it need not ask, so it learns so after the call; one made at most once is not called."""

    def body(handle: ProtectedAttempt) -> None:
        here = scene.clock.milliseconds
        scene.steal()
        scene.clock.milliseconds = here
        with pytest.raises(LeaseLost):
            handle.step(name, receiver)
        raise Declined

    assert scene.perform(body) == Outcome("theirs")
    assert len(receiver.steps) == calls
    assert scene.record.result == '"theirs"'


def test_step_heals_lost_replies(scene: Scene, receiver: _Receiver) -> None:
    """A lost reply to a checkpoint costs another write, no call."""
    scene.store.faults.extend(["none", "reply lost", "none", "reply lost", "none"])

    assert scene.perform(lambda h: h.step("sms", receiver)) == Outcome("receipt 1")
    assert len(receiver.steps) == 1


def test_effect_is_remembered_through_an_outage(scene: Scene, receiver: _Receiver) -> None:
    """After an effect the record of it is worth more patience than any fail-over takes."""

    def body(handle: ProtectedAttempt) -> Any:
        scene.store.faults.extend(["request lost"] * 20)
        return handle.step("a", receiver)

    assert scene.perform(body) == Outcome("receipt 1")


def test_no_call_without_a_recorded_beginning(scene: Scene) -> None:
    """Under refuse an unreachable store means: do not begin."""

    def body(handle: ProtectedAttempt) -> None:
        scene.store.faults.extend(["request lost", "request lost"])
        handle.step("sms", _never)

    with pytest.raises(StoreUnavailable):
        scene.perform(body)


def test_completion_drops_the_steps(scene: Scene, receiver: _Receiver) -> None:
    """They have served their purpose, and every byte is paid for."""
    scene.perform(lambda handle: handle.step("a", receiver))

    assert scene.record.steps == {}


def test_fenced_step_fences_probes_and_acts(scene: Scene) -> None:
    """In that order, and acts only if the probe finds nothing."""
    calls: list[str] = []
    found: list[str | None] = [None]

    def note(name: str, value: Any = None) -> Callable[[Step], Any]:
        return lambda step: calls.append(name) or value  # type: ignore[func-returns-value]

    def probe(step: Step) -> str | None:
        calls.append("probe")
        return found[0]

    def body(handle: ProtectedAttempt) -> Any:
        return handle.fenced_step("index", fence=note("fence"), probe=probe, act=note("act", "mine"))

    assert scene.perform(body) == Outcome("mine")
    assert calls == ["fence", "probe", "act"]

    found[0] = "theirs"
    assert Scene().perform(body) == Outcome("theirs")
    assert calls[3:] == ["fence", "probe"]


@pytest.mark.parametrize("found", [0, "", False])
def test_whatever_a_probe_finds_is_the_effect(scene: Scene, found: object) -> None:
    """Only None says that there is none: a receipt number 0 is not charged again."""
    fenced: dict[str, Any] = {"fence": lambda step: None, "probe": lambda step: found, "act": _never}

    assert scene.perform(lambda handle: handle.fenced_step("index", **fenced)) == Outcome(found)


def test_declared_fence_is_kept(scene: Scene, receiver: _Receiver) -> None:
    """A step declared Fenced is refused without fence and probe, before anything is called."""
    fenced: dict[str, Any] = {"fence": receiver, "probe": lambda step: None, "act": receiver}

    def body(handle: ProtectedAttempt) -> Any:
        with pytest.raises(PolicyError, match="declared Fenced"):
            handle.step("index", _never)
        return handle.fenced_step("index", **fenced)

    assert scene.perform(body, effects={"index": Fenced()}) == Outcome("receipt 2")


WRITES = [{"Put": {"TableName": "stock", "Item": {"sku": "a"}}}]


def test_commit_records_result_and_writes_in_one_step(scene: Scene) -> None:
    """One swap carries both, and the outcome is the committed result."""
    outcome = scene.perform(lambda handle: handle.commit({"shipped": 1}, WRITES))

    assert outcome == Outcome({"shipped": 1})
    assert scene.record.status is Status.COMPLETED
    assert scene.store.store.committed == WRITES  # type: ignore[attr-defined]
    assert len(scene.store.swaps) == 2
    assert scene.names == ["claimed", "completed"]


def test_committed_result_that_cannot_be_encoded_is_lost(scene: Scene) -> None:
    """The writes are made, and the first caller gets it."""
    result = object()
    assert scene.perform(lambda handle: handle.commit(result, WRITES)) == Outcome(result)
    assert scene.store.store.committed == WRITES  # type: ignore[attr-defined]
    assert scene.names == ["claimed", "completed", "result_dropped"]
    with pytest.raises(ResultLost, match="not encodable"):
        scene.perform(_never)


def test_committed_result_that_is_lost_is_told_of_a_body_that_fails_too(scene: Scene) -> None:
    """Its duplicates fail like those of any other."""
    result = object()

    def fails(handle: ProtectedAttempt) -> None:
        handle.commit(result, WRITES)
        raise Declined

    assert scene.perform(fails) == Outcome(result)
    assert scene.names == ["claimed", "completed", "result_dropped"]


def test_committed_result_is_the_outcome_whatever_follows(scene: Scene) -> None:
    """A body that returns something else, or fails after its commit, does not change what is recorded."""

    def fails(handle: ProtectedAttempt) -> None:
        handle.commit((1, 2), WRITES)
        raise Declined

    assert scene.perform(lambda handle: handle.commit("kept", WRITES) and "other") == Outcome("kept")
    assert scene.perform(_never) == Outcome("kept")
    assert Scene().perform(fails) == Outcome([1, 2])


def test_commit_that_nobody_heard_of_is_the_outcome_of_a_body_that_goes_on(scene: Scene) -> None:
    """Whoever is answered by this delivery gets what every duplicate gets."""

    def body(handle: ProtectedAttempt) -> str:
        scene.store.faults.append("reply lost")
        scene.store.faults.extend(["request lost"] * 1_000)
        with pytest.raises(StoreUnavailable):
            handle.commit("committed", WRITES)
        scene.store.faults.clear()
        return "instead"

    assert scene.perform(body) == Outcome("committed")
    assert scene.perform(_never) == Outcome("committed")


def test_interrupt_after_a_commit_is_still_an_interrupt(scene: Scene) -> None:
    """A worker that is told to exit exits; the operation is completed all the same."""

    def interrupted(handle: ProtectedAttempt) -> None:
        handle.commit("kept", WRITES)
        raise SystemExit

    with pytest.raises(SystemExit):
        scene.perform(interrupted)

    assert scene.record.status is Status.COMPLETED


def test_commit_heals_lost_replies(scene: Scene) -> None:
    """A commit whose reply was lost is recognised, and not made twice."""
    scene.store.faults.extend(["none", "reply lost", "reply lost", "none"])

    assert scene.perform(lambda handle: handle.commit(1, WRITES)) == Outcome(1)
    assert scene.store.store.committed == WRITES  # type: ignore[attr-defined]


def test_zombie_commits_nothing(scene: Scene) -> None:
    """Who was taken over writes neither record nor effect."""

    def body(handle: ProtectedAttempt) -> Any:
        scene.steal()
        with pytest.raises(LeaseLost):
            handle.commit("mine", WRITES)
        raise Declined

    assert scene.perform(body) == Outcome("theirs")
    assert scene.store.store.committed == []  # type: ignore[attr-defined]
    assert scene.record.result == '"theirs"'


class _Picky(MemoryStore):
    """Refuses writes as DynamoDB does."""

    def swap_with(self, new: Record, expected: str | None, writes: Any) -> Record | None:
        for position, write in enumerate(writes):
            if write == "bad":
                raise WriteFailed(position, "ConditionalCheckFailed")
            if "Delete" in write:
                raise WriteFailed(position, "ConditionalCheckFailed")
        if len(writes) > 2:
            raise WriteFailed(None, "too many")
        return super().swap_with(new, expected, writes)


@pytest.mark.parametrize(
    ("writes", "named"),
    [
        ([*WRITES, {"Delete": {"TableName": "stock"}}], r"writes\[1\] \(Delete of stock\)"),
        (["bad"], r"writes\[0\] was"),
        ([*WRITES] * 3, "writes was"),
    ],
)
def test_refused_write_is_the_bodys_own_error(scene: Scene, writes: Any, named: str) -> None:
    """It names the write, nothing is written, and the claim is released."""
    scene.store.store = _Picky(scene.clock.now)

    with pytest.raises(WriteRefused, match=named):
        scene.perform(lambda handle: handle.commit(1, writes))

    assert scene.record.status is Status.RELEASED
    assert scene.perform(lambda handle: handle.commit(2, WRITES)) == Outcome(2)


def test_commit_happens_once(scene: Scene) -> None:
    """A second commit would be a second effect without a record."""

    refusals = []

    def body(handle: ProtectedAttempt) -> None:
        handle.commit(1, WRITES)
        try:
            handle.commit(2, WRITES)
        except PolicyError as error:  # what a body raises after its commit changes nothing, so it is noted
            refusals.append(error.remedy)

    assert scene.perform(body) == Outcome(1)
    assert refusals == ["an operation commits once; give all writes to one commit()"]


def test_commit_keeps_effects_whose_result_is_too_large(scene: Scene) -> None:
    """The writes are made, and the result is marked lost."""
    scene.store.store = _Small(scene.clock.now)

    assert scene.perform(lambda handle: handle.commit("x" * 10_001, WRITES)) == Outcome("x" * 10_001)
    assert scene.store.store.committed == WRITES
    with pytest.raises(ResultLost):
        scene.perform(_never)


class _Plain(StoreWrapper):
    """A store that offers what every store must, and no more."""


def test_store_without_transactions_says_so(scene: Scene) -> None:
    """Before anything happens, and naming what is needed."""

    def body(handle: ProtectedAttempt) -> Any:
        handle._claim.store = _Plain(scene.store)
        return handle.commit(1, WRITES)

    with pytest.raises(PolicyError, match="needs a DynamoDB store"):
        scene.perform(body)


def test_follow_up_task_is_published_once(scene: Scene) -> None:
    """In a step of its own: with a task id that follows from the key, and not again once that is recorded."""
    app = Celery("follow-up", broker="memory://", set_as_current=False)
    queue = app.conf.task_default_queue = uuid4().hex

    def receipt(order: str) -> None:
        pass

    task = app.task(name="receipt", shared=False)(receipt)
    ids: list[str] = []

    def body(handle: ProtectedAttempt) -> None:
        ids.append(handle.send("receipt", task, "o-1"))
        ids.append(handle.send("copy", task.s("o-2").set(queue=queue)))
        ids.append(handle.effect_key("receipt"))

    scene.abandon(body)
    scene.perform(body)

    messages = published(app)
    assert [each.headers["id"] for each in messages] == ids[:2]
    assert ids[3:] == ids[:3]
    assert ids[0] == derived_id(ids[2])


def test_call_within_a_body_knows_what_the_bodys_attempt_is(scene: Scene) -> None:
    """Its key is its own. Whether effects may have happened, and what shuts out late writers, is the outer one's."""
    scene.abandon()

    def body(outer: ProtectedAttempt) -> list[tuple[str, bool, int, int]]:
        called = Attempt(lambda: Identity("called", None), outer)
        within = Attempt(lambda: Identity("within", None), called)
        return [(each.key, each.is_takeover, each.number, each.fencing_token) for each in (outer, called, within)]

    seen = scene.perform(body).value

    token = scene.record.fencing_token
    assert seen == [["k", True, 2, token], ["called", True, 2, token], ["within", True, 2, token]]
