"""Steps and commits in a body: what is done once and remembered, what a crash leaves, and bodies without a claim."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent import AtMostOnce, LeaseLost, OutcomeUnknown, Policy, current_attempt
from celery_idempotent.engine.attempt import Attempt, ProtectedAttempt
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.engine.transaction import derived_id
from celery_idempotent.errors import PolicyError, ResultLost, SafeToRetry, StoreUnavailable, WriteRefused
from celery_idempotent.protocol.effects import Fenced, Keyed
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Step
from celery_idempotent.protocol.store import RecordTooLarge, WriteFailed
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from tests.support.deliveries import Shop, deliver, published
from tests.support.scene import Again, Scene, raising

Declined = type("Declined", (Exception,), {})
Call = Callable[[Step], Any]
_never: Call = raising(AssertionError("this was not to be called"))
WRITES = [{"Put": {"TableName": "stock", "Item": {"sku": "a"}}}]


def _timing_out(scene: Scene) -> Call:
    return lambda step: (scene.call(step), raising(TimeoutError())())


def _step(name: str, call: Call) -> Callable[[ProtectedAttempt], Any]:
    """A body of one step."""
    return lambda handle: handle.step(name, call)


def test_steps_are_known_by_their_names_and_done_once(scene: Scene) -> None:
    """Whatever their order; each gives its receiver the same key on every attempt, and a token that grows."""

    def body(*names: str) -> Callable[[ProtectedAttempt], Any]:
        return lambda handle: [handle.step(name, scene.call) for name in names]

    scene.abandon(body("a", "b"))
    scene.abandon(lambda handle: scene.call(Step("c", handle.effect_key("c"), handle.fencing_token)))
    assert scene.perform(body("c", "b", "a")) == Outcome(["receipt 4", "receipt 2", "receipt 1"])
    assert [step and step.name for step in scene.calls] == ["a", "b", "c", "c"]
    dead, done = scene.calls[2:]
    assert dead is not None
    assert done is not None
    assert (dead.key, dead.fencing_token < done.fencing_token) == (done.key, True)


def _in_a_group(error: Exception) -> None:
    raise BaseExceptionGroup("", [ExceptionGroup("", [SafeToRetry(), ExceptionGroup("", [error])]), SystemExit()])


@pytest.mark.parametrize("policy", [{}, {"on_takeover": "refuse"}, {"remember": (Exception,)}])
@pytest.mark.parametrize("leave", [_in_a_group, raising(Declined()), raising(Again())])
def test_doubt_is_a_state_whatever_leaves_the_body(scene: Scene, leave: Any, policy: dict[str, Any]) -> None:
    """A loop in the body makes no second call; what an attempt met of its steps ends the operation UNKNOWN."""

    def body(handle: ProtectedAttempt) -> None:
        try:
            handle.step("sms", _timing_out(scene))
        except TimeoutError:
            with pytest.raises(OutcomeUnknown) as raised:
                handle.step("sms", scene.call)
            leave(raised.value)

    with pytest.raises((BaseExceptionGroup, Declined, Again)):
        scene.perform(body, **policy)
    assert (scene.status, scene.names[-1]) == (Status.UNKNOWN, "outcome_unknown")
    assert scene.record.error == "step 'sms' began in attempt 1 and did not end"
    assert (scene.answer(lambda: scene.perform(_never, **policy)), len(scene.calls)) == (OutcomeUnknown, 1)


def test_doubt_that_a_body_has_dealt_with_is_none(scene: Scene) -> None:
    """Who returns has said what happened, perhaps by having asked the receiver."""

    def asking(handle: ProtectedAttempt) -> str:
        assert scene.answer(lambda: handle.step("sms", _never)) is OutcomeUnknown
        return "it was sent"

    assert scene.answer(lambda: scene.perform(_step("sms", _timing_out(scene)))) is TimeoutError
    assert scene.perform(asking) == Outcome("it was sent")


@pytest.mark.parametrize("error", [Again(), ExceptionGroup("", [SafeToRetry(), ExceptionGroup("", [Again()])])])
def test_call_that_had_no_effect_says_so(scene: Scene, error: Exception) -> None:
    """It takes its own beginning back, also under refuse, so the next attempt calls; and no earlier one."""
    assert scene.answer(lambda: scene.perform(_step("sms", raising(error)), on_takeover="refuse")) is type(error)
    assert (scene.status, scene.record.steps) == (Status.RELEASED, {})
    assert scene.perform(_step("sms", scene.call), on_takeover="refuse") == Outcome("receipt 1")
    earlier, within_a_minute = Scene(), {"sms": Keyed(window=60, on_takeover="refuse")}
    for call in (_timing_out(earlier), raising(error)):
        with pytest.raises((TimeoutError, type(error))):
            earlier.perform(_step("sms", call), effects=within_a_minute)
    assert earlier.answer(lambda: earlier.perform(_step("sms", _never))) is OutcomeUnknown


def test_name_is_used_once_per_attempt_unless_its_call_raised(scene: Scene) -> None:
    """A loop would get the first result for all, a thread none yet; a body may catch what a call raised, and go on."""
    refused: list[object] = []

    def racing(handle: ProtectedAttempt) -> Any:
        with pytest.raises(TimeoutError):
            handle.step("mail", _timing_out(scene))
        second = threading.Thread(target=lambda: refused.append(scene.answer(lambda: handle.step("mail", _never))))
        made = handle.step("mail", lambda step: (second.start(), second.join(), scene.call())[2])  # type: ignore[func-returns-value]
        refused.append(scene.answer(lambda: handle.step("mail", _never)))
        return made

    assert (scene.perform(racing), refused) == (Outcome("receipt 2"), [PolicyError] * 2)


def test_steps_of_several_threads_are_all_recorded(scene: Scene) -> None:
    """Each write of the record goes on from the one before it, whichever thread made that."""
    names = [f"item {number}" for number in range(16)]

    def made(handle: ProtectedAttempt, call: Call) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda name: handle.step(name, call), names))

    scene.abandon(lambda handle: made(handle, lambda step: step.name))
    assert scene.perform(lambda handle: made(handle, _never)) == Outcome(names)


@pytest.mark.parametrize(
    ("step", "option"),
    [
        (("", _never), "name"),
        (("x" * 201, _never), "name"),
        ((7, _never), "name"),
        (("sms", None), "step"),
        (("sms", "sent"), "step"),
        (("sms", lambda: None), "step"),
        (("sms", lambda step, other: None), "step"),
        (("sms", "receipt", "o-1"), "task"),  # by send(), where the name comes first
    ],
)
def test_step_that_cannot_be_made_is_refused_before_it_counts_as_begun(scene: Scene, step: Any, option: str) -> None:
    """A slip of the author's is mended and tried again; as a beginning without an end it would be UNKNOWN."""
    with pytest.raises(PolicyError) as raised:
        scene.perform(lambda handle: handle.step(*step) if len(step) == 2 else handle.send(*step))
    assert raised.value.option == option
    assert scene.perform(_step("sms", scene.call)) == Outcome("receipt 1")


@pytest.mark.parametrize(("value", "kept"), [((1, 2), [1, 2]), (None, None), (0, 0)])
def test_value_of_a_step_is_the_same_for_first_and_later_attempts(scene: Scene, value: Any, kept: Any) -> None:
    """A tuple becomes a list at once; a step that returned nothing has returned."""
    body = _step("a", lambda step: scene.call(step) and value)
    scene.abandon(body)
    assert [scene.perform(body), Scene().perform(body)] == [Outcome(kept)] * 2
    assert len(scene.calls) == 2
    assert Scene().perform(lambda handle: str(handle.step("b", type))) == Outcome(str(Step)), "C tells no signature"


class _Small(MemoryStore):
    """A store whose records take so many characters of steps, and which refuses some writes as DynamoDB does."""

    def swap_with(self, new: Record, expected: str | None, writes: Any) -> Record | None:
        if len(str(new.steps)) > 10_000 or len(new.result or "") > 10_000:
            raise RecordTooLarge("full")
        for position, write in enumerate(writes):
            if "bad" in write or "Delete" in write:
                raise WriteFailed(position, "ConditionalCheckFailed")
        if len(writes) > 2:
            raise WriteFailed(None, "too many")
        return super().swap_with(new, expected, writes)


@pytest.mark.parametrize("value", ["x" * 10_000, object()])
def test_unkeepable_value_does_not_undo_a_step(scene: Scene, value: Any) -> None:
    """This attempt gets it; later ones learn that it is lost, and the call is not repeated."""
    scene.store.store = _Small(scene.clock.now)
    got: list[Any] = []

    def body(handle: ProtectedAttempt) -> None:
        got.append(handle.step("report", lambda step: scene.call(step) and value))
        raise Declined

    answers = [scene.answer(lambda: scene.perform(body)) for _ in range(2)]
    assert (answers, got, len(scene.calls)) == ([Declined, ResultLost], [value], 1)


@pytest.mark.parametrize(
    ("name", "knows", "calls"),
    [("charge", True, 0), ("sms", True, 0), ("charge", False, 1), ("sms", False, 0), ("", True, 0)],
)
def test_zombie_records_no_step_and_commits_nothing(scene: Scene, name: str, knows: bool, calls: int) -> None:
    """One that outlived its lease asks before the call; one that need not, by its own clock, learns it by its write."""

    def body(handle: ProtectedAttempt) -> None:
        here = scene.clock.milliseconds
        scene.steal()
        if not knows:
            scene.clock.milliseconds = here
        with pytest.raises(LeaseLost):
            handle.step(name, scene.call) if name else handle.commit("mine", WRITES)
        raise Declined

    assert scene.perform(body) == Outcome("theirs")
    assert (len(scene.calls), scene.record.result) == (calls, '"theirs"')
    assert scene.store.store.committed == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("found", "value", "called"),
    [
        (None, "acted", ["fence", "probe", "act"]),
        ("theirs", "theirs", ["fence", "probe"]),
        (0, 0, ["fence", "probe"]),  # only None says that there is none: a receipt number 0 is not charged again
        ("", "", ["fence", "probe"]),
    ],
)
def test_fenced_step_fences_probes_and_acts(scene: Scene, found: Any, value: Any, called: list[str]) -> None:
    """In that order, and acts only if the probe finds nothing; a bare step does not pass for one."""
    calls: list[str] = []

    def note(name: str, given: Any) -> Call:
        return lambda step: (calls.append(name), given)[1]  # type: ignore[func-returns-value]

    def body(handle: ProtectedAttempt) -> Any:
        with pytest.raises(PolicyError):
            handle.step("index", _never)
        return handle.fenced_step("index", fence=note("fence", 1), probe=note("probe", found), act=note("act", "acted"))

    assert scene.perform(body, effects={"index": Fenced()}) == Outcome(value)
    assert calls == called


def test_commit_records_result_and_writes_in_one_step(scene: Scene) -> None:
    """One swap carries both, and the outcome is the committed result, whatever the body returns."""
    assert scene.perform(lambda handle: handle.commit((1, 2), WRITES) and "other") == Outcome([1, 2])
    assert (scene.told, len(scene.store.swaps)) == ("claimed completed", 2)
    assert scene.store.store.committed == WRITES  # type: ignore[attr-defined]
    assert scene.perform(_never) == Outcome([1, 2])


LOST = object()


@pytest.mark.parametrize(
    ("result", "error", "answer", "told", "again"),
    [
        ("kept", Declined(), "kept", "claimed completed", "kept"),
        ("kept", SystemExit(), SystemExit, "claimed completed", "kept"),
        (LOST, Declined(), LOST, "claimed completed result_dropped", ResultLost),
        ("x" * 10_001, Declined(), "x" * 10_001, "claimed completed result_dropped", ResultLost),
    ],
)
def test_body_that_raises_after_its_commit_is_completed(
    scene: Scene, result: object, error: BaseException, answer: Any, told: str, again: Any
) -> None:
    """Its first caller gets the result, also one that cannot be kept; a worker that is told to exit exits."""
    scene.store.store = _Small(scene.clock.now)
    body = lambda handle: (handle.commit(result, WRITES), raising(error)())  # noqa: E731
    assert scene.answer(lambda: scene.perform(body)) == answer
    assert (scene.status, scene.told, scene.store.store.committed) == (Status.COMPLETED, told, WRITES)
    assert scene.answer(lambda: scene.perform(_never)) == again


def test_commit_that_nobody_heard_of_is_the_outcome_of_a_body_that_goes_on(scene: Scene) -> None:
    """Whoever is answered by this delivery gets what every duplicate gets."""

    def body(handle: ProtectedAttempt) -> str:
        scene.plan("COMPLETED", "reply lost", "away")
        with pytest.raises(StoreUnavailable):
            handle.commit("committed", WRITES)
        scene.heal()
        return "instead"

    assert [scene.perform(each) for each in (body, _never)] == [Outcome("committed")] * 2


@pytest.mark.parametrize(
    ("writes", "named"),
    [
        ([*WRITES, {"Delete": {"TableName": "stock"}}], "writes[1] (Delete of stock)"),
        ([{"bad": None}], "writes[0] (bad of None)"),
        (["bad"], "writes[0]"),
        ([{"bad": 1, "Put": 2}], "writes[0]"),
        ([*WRITES] * 3, "writes"),
    ],
)
def test_refused_write_is_the_bodys_own_error(scene: Scene, writes: Any, named: str) -> None:
    """It names the write, nothing is written, and the claim is released."""
    scene.store.store = _Small(scene.clock.now)
    with pytest.raises(WriteRefused) as raised:
        scene.perform(lambda handle: handle.commit(1, writes))
    assert (raised.value.args[1], scene.status) == (named, Status.RELEASED)
    assert scene.perform(lambda handle: handle.commit(2, WRITES)) == Outcome(2)


def test_commit_happens_once_and_in_a_store_that_commits(scene: Scene) -> None:
    """A second one would be an effect without a record."""
    refused: list[Any] = []

    def body(handle: ProtectedAttempt) -> None:
        store, handle._claim.store = handle._claim.store, StoreWrapper(scene.store)  # which has what every store must
        refused.append(scene.answer(lambda: handle.commit(1, WRITES)))
        handle._claim.store = store
        handle.commit(2, WRITES)
        refused.extend(scene.answer(each) for each in (lambda: handle.commit(3, WRITES), handle.transaction))

    assert (scene.perform(body), refused) == (Outcome(2), [PolicyError] * 3)


def test_follow_up_task_is_published_once(scene: Scene) -> None:
    """In a step of its own: with a task id that follows from the key, and not again once that is recorded."""
    app = Celery("follow-up", broker="memory://", set_as_current=False)
    queue = app.conf.task_default_queue = uuid4().hex

    @app.task(name="receipt", shared=False)
    def receipt(order: str) -> None: ...

    ids: list[str] = []

    def body(handle: ProtectedAttempt) -> None:
        ids.append(handle.send("receipt", receipt, "o-1"))
        ids.append(handle.send("copy", receipt.s("o-2").set(queue=queue)))
        ids.append(handle.effect_key("receipt"))

    scene.abandon(body)
    scene.perform(body)

    assert [each.headers["id"] for each in published(app)] == ids[:2]
    assert ids[3:] == ids[:3]
    assert ids[0] == derived_id(ids[2])


def test_call_within_a_body_knows_what_the_bodys_attempt_is(scene: Scene) -> None:
    """Its key is its own. Whether effects may have happened, and what shuts out late writers, is the outer one's."""
    scene.abandon()

    def body(outer: ProtectedAttempt) -> Any:
        called = Attempt(lambda: Identity("called", None), outer)
        within = Attempt(lambda: Identity("within", None), called)
        return [(each.key, each.is_takeover, each.number, each.fencing_token) for each in (outer, called, within)]

    seen, token = scene.perform(body).value, scene.record.fencing_token
    assert seen == [[key, True, 2, token] for key in ("k", "called", "within")]


@pytest.mark.parametrize("call", [None, lambda step: "charged", raising(LookupError())])
def test_before_effects_is_refused_around_and_after_an_effect(scene: Scene, call: Call | None) -> None:
    """The library holds the author to the word: also after an effect that failed, as it may have happened."""

    def body(handle: ProtectedAttempt) -> None:
        if call:
            scene.answer(lambda: handle.step("charge", call))
        with handle.before_effects():
            assert call is None
            for use in (lambda: handle.step("charge", _never), lambda: handle.commit(1, []), handle.transaction):
                with pytest.raises(PolicyError, match=r"inside before_effects\(\)"):
                    use()

    ended = scene.answer(lambda: scene.perform(body, on_takeover="refuse"))
    assert (ended, scene.status) == ((PolicyError, Status.FAILED) if call else (None, Status.COMPLETED))


def test_step_is_made_with_the_key_of_a_delivery() -> None:
    """So a receiver that honours keys recognises it, and a follow-up is one task; every call makes it again."""
    shop, seen, ids = Shop(), list[Step](), list[str]()
    receipt = shop.task(body=lambda order_id: None, name="receipt")

    def body(order_id: str, cents: int) -> None:
        current_attempt().step("charge", seen.append)
        ids.append(current_attempt().send("receipt", receipt.s(order_id)))

    shop.does = body
    for call in (shop.charge, shop.charge, shop.deliver):
        call("o-1")
    assert len({each.key for each in seen}) == 1
    assert [each.fencing_token > 0 for each in seen] == [False, False, True]
    assert [(each.headers["id"], each.payload[0]) for each in shop.published()] == [(ids[0], ["o-1"])] * 3


def test_tools_of_an_attempt_do_what_they_can_without_a_record() -> None:
    """A block is a block, a step at most once is made all the same, a fenced one has the smallest token of all."""
    shop, calls = Shop(Policy(mode="off", effects={"text": AtMostOnce()})), list[Any]()

    def body(*_: Any) -> str:
        attempt = current_attempt()
        with attempt.before_effects():
            calls.append("checked")
        attempt.step("text", lambda step: calls.append("sent"))
        return str(
            attempt.fenced_step(
                "index",
                fence=lambda step: calls.append(step.fencing_token),
                probe=lambda step: calls.append("probe"),
                act=lambda step: "entry",
            )
        )

    shop.does = body
    assert shop.deliver("o-1").value == "entry"
    assert (calls, [*shop.memory.scan()]) == (["checked", "sent", 0, "probe"], [])


@pytest.mark.parametrize("policy", [Policy(on_outage="run"), Policy(mode="observe")], ids=["outage", "observed"])
def test_what_needs_a_record_is_refused_where_there_is_none(policy: Policy) -> None:
    """Effects without a record would not be exactly once; a step has its effect all the same."""
    shop = Shop(policy)
    commits = shop.task(policy, lambda: current_attempt().commit(current_attempt().number, [{"Put": {}}]), "commits")
    shop.does = lambda *_: current_attempt().step("charge", lambda step: "ch_1")
    if policy.mode == "observe":
        assert deliver(commits).value == 1
    else:
        shop.store.away["swap"] = StoreUnavailable("store", "swap", "down")
    assert [shop.deliver("o-1").value for _ in range(2)] == ["ch_1", "ch_1"]
    assert isinstance(deliver(commits).value, PolicyError)
    assert len(shop.memory.committed) == (policy.mode == "observe")
