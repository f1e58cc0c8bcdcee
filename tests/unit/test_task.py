"""The task class on Celery's own tracer: identity, replays, control flow, modes, nesting."""

import threading
import warnings
from asyncio import CancelledError
from contextlib import suppress
from decimal import Decimal
from typing import Any
from weakref import WeakSet

import pydantic
import pytest
from celery import Celery, Task, chain, shared_task, states
from celery.exceptions import (
    CeleryError,
    Ignore,
    Reject,
    Retry,
    WorkerLostError,
    WorkerShutdown,
    WorkerTerminate,
)
from greenlet import GreenletExit

from celery_idempotent import (
    IdempotencyWarning,
    IdempotentMixin,
    IdempotentTask,
    InFlight,
    KeyMissing,
    KeyReused,
    OutcomeUnknown,
    Policy,
    PolicyError,
    SafeToRetry,
    Status,
    StoreUnavailable,
    current_attempt,
    signals,
)
from celery_idempotent.integration.broker.recovery import mark
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.celeries import since_celery
from tests.support.deliveries import an_app, deliver, published
from tests.support.links import unlinked


@pytest.fixture
def app() -> Celery:
    return an_app()


def _task(app: Celery, body: Any, **options: Any) -> Any:
    policy = options.pop("policy", Policy())
    base = options.pop("base", IdempotentTask)
    return app.task(base=base, shared=False, idempotent=policy, name=f"t.{body.__name__}", **options)(body)


def _nothing() -> None: ...


def _counter(app: Celery, **options: Any) -> tuple[Any, list[Any]]:
    runs: list[Any] = []

    def charge(order_id: int, cents: int = 100) -> Any:
        runs.append((order_id, cents))
        return {"order": order_id, "run": len(runs)}

    return _task(app, charge, **options), runs


def test_duplicates_of_any_origin_get_the_first_result(app: Celery) -> None:
    """A redelivery (same task id) and a second publish (another id) are both answered by the first run."""
    charge, runs = _counter(app)

    first = deliver(charge, 7, task_id="a")
    again = deliver(charge, 7, task_id="a")
    other = deliver(charge, order_id=7, cents=100, task_id="b")

    assert first == again == other
    assert first.value == {"order": 7, "run": 1}
    assert len(runs) == 1


def test_key_for_a_call_is_the_key_of_its_delivery(app: Celery) -> None:
    """``idempotency_key_for`` tells the key that a delivery of the same call uses, for values JSON rewrites too."""
    keys = []

    def body(self: Any, *args: Any, **kwargs: Any) -> None:
        keys.append(current_attempt().key)

    task = _task(app, body, bind=True)

    class Lines(pydantic.BaseModel):
        n: int

    for args, kwargs in (((1, (2, 3)), {}), ((), {"x": {"a": Decimal("1.50")}}), (({1: "int key"},), {})):
        expected = task.idempotency_key_for(*args, **kwargs)
        task.apply_async(args, kwargs)
        message = published(app)[0]
        received_args, received_kwargs, _ = message.payload
        deliver(task, *received_args, **received_kwargs)
        assert keys[-1] == expected


@pytest.mark.parametrize("publish", ["always", "once"])
def test_base_that_takes_its_options_by_name_publishes(app: Celery, publish: Any) -> None:
    """As celery-once's, and many of the authors' own: ``apply_async(self, args, kwargs, **options)``."""

    class Ours(Task):
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            return super().apply_async(args, kwargs, **{**options, "headers": {"tenant": 1}})

    class Base(IdempotentMixin, Ours):
        abstract = True

    task = _task(app, _nothing, base=Base, policy=Policy(publish=publish))
    for send in (task.delay, task.apply_async, task.s().apply_async, lambda: task.apply_async((), {}, "id", None, [])):
        app.conf.idempotency_store = MemoryStore()
        send()
        assert published(app)[0].headers["tenant"] == 1


def test_bound_and_autoretry_tasks_bind_like_plain_ones(app: Celery) -> None:
    """``self`` is no argument, and wrappers do not hide the signature."""

    def bound(self: Any, order_id: int, cents: int = 1) -> int:
        return cents

    def retrying(order_id: int, cents: int = 1) -> int:
        return cents

    for task in (
        _task(app, bound, bind=True, policy=Policy(key="order_id")),
        _task(app, retrying, autoretry_for=(ValueError,), policy=Policy(key="order_id")),
    ):
        assert task.idempotency_key_for(7) == task.idempotency_key_for(order_id=7, cents=9)
        assert task.idempotency_key_for(7) != task.idempotency_key_for(8)


@since_celery("5.7", "the publishing of models")
def test_pydantic_tasks_bind_like_plain_ones(app: Celery) -> None:
    """A model, and the data that it is made of, mean the same call."""

    class Order(pydantic.BaseModel):
        id: int
        note: str = "none"

    def typed(order: Order) -> int:
        return order.id

    def typed_and_bound(self: Any, order: Order | None = None) -> int:
        return order.id if order else 0

    for task in (
        _task(app, typed, pydantic=True, policy=Policy(key="order.id")),
        _task(app, typed_and_bound, bind=True, pydantic=True),
    ):
        assert task.idempotency_key_for({"id": 7}) == task.idempotency_key_for(order={"id": 7, "note": "none"})
        assert task.idempotency_key_for({"id": 7}) == task.idempotency_key_for(Order(id=7))
        assert deliver(task, {"id": 7}).value == 7
        assert task.apply((Order(id=7),)).get() == 7


def test_scope_shares_keys_between_tasks(app: Celery) -> None:
    """Two tasks of one scope are one operation; of two scopes they are two."""
    runs = []

    def one(order_id: int) -> str:
        runs.append("one")
        return "one"

    def two(order_id: int) -> str:
        runs.append("two")
        return "two"

    shared = Policy(scope="billing")
    first, second = _task(app, one, policy=shared), _task(app, two, policy=shared)

    assert deliver(first, 1).value == "one"
    assert deliver(second, 1).value == "one"
    assert runs == ["one"]


def test_new_scope_starts_every_operation_anew(app: Celery) -> None:
    """What a key meant before counts no more."""
    charge, runs = _counter(app)
    deliver(charge, 1)
    charge.idempotent = Policy(scope="charge:2")

    deliver(charge, 1)

    assert len(runs) == 2


def test_other_arguments_under_one_key_are_refused(app: Celery) -> None:
    """The amount of order 7 cannot change under its key; the error is final, not retried."""
    charge, runs = _counter(app, policy=Policy(key="order_id"))
    deliver(charge, 7)

    ended = deliver(charge, 7, 999)

    assert ended.state == states.FAILURE
    assert isinstance(ended.value, KeyReused)
    assert len(runs) == 1
    assert published(app) == []


def test_missing_key_runs_nothing(app: Celery) -> None:
    """A null key is an error, never an unprotected run."""
    charge, runs = _counter(app, policy=Policy(key="order_id"))

    ended = deliver(charge, None)

    assert isinstance(ended.value, KeyMissing)
    assert runs == []


def test_explicit_key_travels_with_the_message(app: Celery) -> None:
    """The publisher's key takes the place of the derived one, for ``apply_async``, signatures and eager calls."""
    charge, runs = _counter(app)

    charge.apply_async((1,), idempotency_key="order-1")
    charge.s(1).set(idempotency_key="order-1").apply_async()
    charge.signature((1,), headers={"mine": 1}, idempotency_key="order-1").apply_async()
    messages = published(app)

    assert [each.headers["idempotency_key"] for each in messages] == ["order-1"] * 3
    assert messages[2].headers["mine"] == 1
    for message in messages:
        deliver(charge, 1, request={"headers": {"idempotency_key": message.headers["idempotency_key"]}})
    charge.apply((1,), idempotency_key="order-1")
    assert len(runs) == 1
    charge.apply((1,), idempotency_key="order-2")
    assert len(runs) == 2


@pytest.mark.parametrize(("explicit", "error"), [(None, KeyMissing), ("", KeyMissing), (5, PolicyError)])
def test_unusable_explicit_key_is_refused_when_publishing(app: Celery, explicit: Any, error: type[Exception]) -> None:
    """A null key given by the publisher is not quietly replaced by a derived one."""
    charge, runs = _counter(app)

    for publish in (charge.apply_async, charge.apply):
        with pytest.raises(error):
            publish((1,), idempotency_key=explicit)

    assert published(app) == []
    assert runs == []


def test_beat_ticks_are_operations_of_their_own(app: Celery) -> None:
    """Equal periodic calls all run, while a redelivered tick does not run twice; a chosen key is respected."""
    beat = {"headers": {"celery_beat_task": True}}
    charge, runs = _counter(app)
    for task_id in ("tick 1", "tick 1", "tick 2"):
        deliver(charge, 1, task_id=task_id, request=beat)
    assert len(runs) == 2

    other = an_app()
    keyed, keyed_runs = _counter(other, policy=Policy(key="order_id"))
    for task_id in ("tick 1", "tick 2"):
        deliver(keyed, 1, task_id=task_id, request=beat)
    assert len(keyed_runs) == 1


def test_direct_calls_pass_through(app: Celery) -> None:
    """Calling a task is calling a function, also from within another; its handle still has a key of its own."""
    seen = []

    def inner(self: Any, n: int) -> str:
        seen.append(
            (
                current_attempt().key,
                current_attempt().effect_key("x"),
                current_attempt().fencing_token,
                current_attempt().number,
            )
        )
        assert not current_attempt().is_takeover
        current_attempt().ensure_owned()
        return f"inner {n}"

    task = _task(app, inner, bind=True)

    def outer(self: Any) -> list[str]:
        return [task(1), task(1), task(2)]

    assert task(1) == task(1) == "inner 1"
    assert seen[0][0] == task.idempotency_key_for(1)
    assert seen[0][2:] == (0, 0)
    seen.clear()

    assert deliver(_task(app, outer, bind=True)).value == ["inner 1", "inner 1", "inner 2"]

    assert len(seen) == 3
    assert seen[0][1] == seen[1][1] != seen[2][1]
    assert seen[0][2] > 0
    assert seen[0][3] == 1


def test_recursion_passes_through(app: Celery) -> None:
    """A task that calls itself does not meet its own claim, nor take the outer call's effect keys."""
    seen = []

    def down(self: Any, n: int) -> int:
        seen.append(current_attempt().effect_key("x"))
        return 0 if n == 0 else 1 + int(self(n - 1))

    task = _task(app, down, bind=True)

    assert deliver(task, 3).value == 3
    assert len(set(seen)) == 4
    assert task.apply((2,)).get() == 2


def test_nested_deliveries_keep_their_own_records(app: Celery) -> None:
    """A task that executes another, even with the same arguments, does not mix up keys, attempts or results."""
    store: MemoryStore = app.conf.idempotency_store

    def inner(self: Any, n: int) -> str:
        return f"inner {current_attempt().key}"

    inner_task = _task(app, inner, bind=True)

    def outer(self: Any, n: int) -> list[str]:
        before = current_attempt().key
        result = inner_task.apply((n,)).get(disable_sync_subtasks=False)
        assert current_attempt().key == before == current_attempt().key
        return [before, result]

    outer_task = _task(app, outer, bind=True)

    outer_key, inner_key = outer_task.idempotency_key_for(1), inner_task.idempotency_key_for(1)
    for _ in range(2):
        assert deliver(outer_task, 1).value == [outer_key, f"inner {inner_key}"]
        assert deliver(inner_task, 1).value == f"inner {inner_key}"
    assert {record.key for record in store.scan()} == {outer_key, inner_key}


def test_current_attempt_is_that_of_the_innermost_body(app: Celery) -> None:
    """A body that another one calls as a function has it until it returns or raises, and then the other one again."""

    def inner(order: int) -> str:
        if order == 2:
            raise LookupError(current_attempt().key)
        return current_attempt().key

    inner_task = _task(app, inner)

    def outer() -> list[str]:
        own, keys = current_attempt(), [inner_task(1)]
        assert current_attempt() is own
        with pytest.raises(LookupError) as raised:
            inner_task(2)
        assert current_attempt() is own
        return [*keys, raised.value.args[0], own.key]

    outer_task = _task(app, outer)

    keys = [*map(inner_task.idempotency_key_for, (1, 2)), outer_task.idempotency_key_for()]
    assert deliver(outer_task).value == keys


def test_threads_never_cross(app: Celery) -> None:
    """Two tasks running at once in two threads keep their own keys and results."""
    barrier = threading.Barrier(2)
    results: dict[str, Any] = {}

    def both(self: Any, name: str) -> list[str]:
        barrier.wait(30)
        key = current_attempt().key
        barrier.wait(30)
        return [name, key, current_attempt().key]

    task = _task(app, both, bind=True)
    app.finalize()

    def run(name: str) -> None:
        results[name] = deliver(task, name).value

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for name in ("a", "b"):
        assert results[name] == [name, *[task.idempotency_key_for(name)] * 2]


def test_no_attempt_outside_of_a_task() -> None:
    """Asking for the attempt where none executes is a clear error."""
    with pytest.raises(LookupError, match="nothing idempotent is executing"):
        current_attempt()


def test_failing_task_runs_again_when_redelivered(app: Celery) -> None:
    """By default an exception is no outcome: the claim is given back."""
    runs = []

    def flaky(order_id: int) -> str:
        runs.append(order_id)
        if len(runs) == 1:
            raise ValueError("first")
        return "second"

    task = _task(app, flaky)

    assert deliver(task, 1).state == states.FAILURE
    assert deliver(task, 1).value == "second"


@pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
def test_retry_of_the_body_runs_again(app: Celery, on_takeover: Any) -> None:
    """``self.retry`` releases the claim under both promises, and its message runs the task again."""
    runs = []

    def later(self: Any, order_id: int) -> int:
        runs.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return len(runs)

    task = _task(app, later, bind=True, policy=Policy(on_takeover=on_takeover))

    assert deliver(task, 1).state == states.RETRY
    (message,) = published(app)
    assert message.headers["retries"] == 1
    assert deliver(task, 1, request={"retries": 1}).state == states.RETRY
    assert deliver(task, 1, request={"retries": 2}).value == 3
    assert deliver(task, 1, request={"retries": 2}).value == 3


def test_autoretry_is_seen_as_a_retry(app: Celery) -> None:
    """A failure that autoretry turned into a retry releases; the last one is an outcome if it is remembered."""
    runs = []

    def flaky(order_id: int) -> None:
        runs.append(order_id)
        raise ValueError(f"run {len(runs)}")

    task = _task(
        app,
        flaky,
        autoretry_for=(ValueError,),
        max_retries=1,
        retry_backoff=False,
        policy=Policy(remember=(ValueError,)),
    )

    assert deliver(task, 1).state == states.RETRY
    ended = deliver(task, 1, request={"retries": 1})
    replayed = deliver(task, 1, request={"retries": 1})

    assert ended.state == replayed.state == states.FAILURE
    assert str(replayed.value) == "run 2"
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("error", "state"), [(Ignore("x"), states.IGNORED), (Reject("x", requeue=True), states.REJECTED)]
)
def test_ignore_and_reject_are_no_outcome(app: Celery, error: Exception, state: str) -> None:
    """By default they give the claim back; under refuse nobody knows whether the effect happened."""

    def body(order_id: int) -> None:
        raise error

    task = _task(app, body)
    key = task.idempotency_key_for(1)
    assert deliver(task, 1).state == state
    assert app.conf.idempotency_store.get(key).status is Status.RELEASED

    other = an_app()
    refusing = _task(other, body, policy=Policy(on_takeover="refuse"))
    assert deliver(refusing, 1).state == state
    assert isinstance(deliver(refusing, 1).value, OutcomeUnknown)


def test_replaced_task_is_not_completed(app: Celery) -> None:
    """``self.replace`` hands the task's id to another task; the claim is given back, not completed."""

    def other(order_id: int) -> str:
        return "other"

    other_task = _task(app, other)

    def replaced(self: Any, order_id: int) -> Any:
        raise self.replace(other_task.s(order_id))

    task = _task(app, replaced, bind=True)

    assert deliver(task, 1, task_id="same").state == states.IGNORED
    (message,) = published(app)
    assert message.headers["id"] == "same"
    assert message.headers["task"] == other_task.name
    assert app.conf.idempotency_store.get(task.idempotency_key_for(1)).status is Status.RELEASED


def test_safe_to_retry_can_be_autoretried(app: Celery) -> None:
    """A body that states that nothing has begun is run again even under refuse."""

    def careful(order_id: int) -> str:
        raise SafeToRetry("gateway not reached")

    task = _task(app, careful, policy=Policy(on_takeover="refuse"), autoretry_for=(SafeToRetry,))

    assert deliver(task, 1).state == states.RETRY
    assert app.conf.idempotency_store.get(task.idempotency_key_for(1)).status is Status.RELEASED


ABANDONED = Status.IN_PROGRESS
"""With its lease ended."""


@pytest.mark.parametrize(
    ("error", "is_stopped", "status"),
    [
        (SystemExit(1), False, ABANDONED),
        (KeyboardInterrupt(), False, ABANDONED),
        (CancelledError(), False, ABANDONED),
        (BaseExceptionGroup("several", [SystemExit(1)]), False, ABANDONED),
        (SystemExit(-241), True, Status.RELEASED),
        (WorkerShutdown(0), False, Status.RELEASED),
        (WorkerTerminate(1), False, Status.RELEASED),
        (ValueError("no exit"), False, Status.RELEASED),
        (MemoryError(), False, ABANDONED),
        (WorkerLostError("the process of the task that the body asked"), False, ABANDONED),
    ],
    ids=repr,
)
def test_exit_counts_as_a_death_unless_somebody_else_ends_the_process(
    app: Celery, error: BaseException, is_stopped: bool, status: Status
) -> None:
    """A body that exits again and again ends as one that is killed again and again. Cold shutdown, a hard time limit
    and a terminating revoke, which the worker has marked, give the claim back."""

    def exiting(order_id: int) -> None:
        raise error

    task = _task(app, exiting)
    mark("id", is_stopped=is_stopped)
    with suppress(type(error)):
        deliver(task, 1, task_id="id")
    record = app.conf.idempotency_store.get(task.idempotency_key_for(1))
    assert (record.status, record.lease_until == 0) == (status, status is ABANDONED)


@pytest.mark.parametrize(("is_stopped", "status"), [(True, Status.RELEASED), (False, ABANDONED)])
def test_killed_greenlet_gives_its_message_back(app: Celery, is_stopped: bool, status: Status) -> None:
    """Celery would take it for a success. It counts as a death unless it was the worker who killed it."""

    def killed(order_id: int) -> None:
        raise GreenletExit

    task = _task(app, killed)
    mark("id", is_stopped=is_stopped)
    ended = deliver(task, 1, task_id="id")
    assert (ended.state, ended.value.requeue) == (states.REJECTED, True)
    assert app.conf.idempotency_store.get(task.idempotency_key_for(1)).status is status


@pytest.mark.parametrize("error", [GreenletExit, KeyboardInterrupt])
def test_exit_from_an_eager_call_is_its_callers(app: Celery, error: type[BaseException]) -> None:
    """There is no message to give back, and none that comes again."""

    def exiting(order_id: int) -> None:
        raise error

    task = _task(app, exiting)
    with pytest.raises(error):
        task.apply((1,))
    assert app.conf.idempotency_store.get(task.idempotency_key_for(1)).status is Status.RELEASED


def test_eager_calls_are_guarded(app: Celery) -> None:
    """``apply`` and always-eager mode run once and replay, as a worker would."""
    charge, runs = _counter(app)

    assert charge.apply((1,)).get() == charge.apply((1,)).get()
    app.conf.task_always_eager = True
    assert charge.delay(1).get() == {"order": 1, "run": 1}
    assert len(runs) == 1


def test_eager_conflict_raises(app: Celery) -> None:
    """An eager duplicate of a running call cannot wait, so it raises, whatever the policy says."""
    met = []

    def body(self: Any, n: int) -> None:
        met.append(self.apply((n,), task_id="another").result)

    task = _task(app, body, bind=True)

    assert deliver(task, 1).state == states.SUCCESS
    assert isinstance(met[0], InFlight)


def test_eager_outage_raises() -> None:
    """So does an eager call that meets no store."""
    app = an_app(idempotency_policy=Policy())
    app.conf.idempotency_store = FaultyStore(MemoryStore(), "request lost", "request lost")
    charge, runs = _counter(app)

    assert isinstance(charge.apply((1,)).result, StoreUnavailable)
    assert runs == []


def test_eager_retry_of_the_body_runs_again(app: Celery) -> None:
    """An eager ``self.retry`` finds its claim released."""

    def later(self: Any) -> int:
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return int(current_attempt().number)

    assert _task(app, later, bind=True).apply().get() == 2


def test_links_and_chains_follow_a_replay(app: Celery) -> None:
    """What waits for a duplicate's result gets it: the callback and the next link of the chain are published."""

    def first(n: int) -> int:
        return n + 1

    def second(n: int) -> int:
        return n * 10

    one, two = _task(app, first), _task(app, second)
    linked = [two.s().set(task_id=f"callback {number}") for number in range(2)]
    chain(one.s(1), two.s()).apply_async()
    (message,) = published(app)
    chain_of_message = message.payload[2]["chain"]

    for number in range(2):
        assert deliver(one, 1, request={"callbacks": [linked[number]]}).value == 2
        (callback,) = published(app)
        assert (callback.headers["id"], callback.payload[0]) == (f"callback {number}", [2])
        assert deliver(one, 1, request={"chain": list(chain_of_message)}).value == 2  # Celery before 5.7 empties it
        (following,) = published(app)
        assert (following.headers["task"], following.payload[0]) == (two.name, [2])


def test_observe_mode_runs_and_counts(app: Celery) -> None:
    """Everything runs; what would have been suppressed is signalled as observed."""
    charge, _runs = _counter(app, policy=Policy(mode="observe", key="order_id"))
    seen = []

    def on_replay(sender: Any, observed: bool, **kwargs: Any) -> None:
        seen.append((sender.name, observed, kwargs["task_id"]))

    signals.replayed.connect(on_replay)
    try:
        assert [deliver(charge, 1, task_id=each).value["run"] for each in ("a", "b")] == [1, 2]
        assert deliver(charge, None).value["run"] == 3
    finally:
        signals.replayed.disconnect(on_replay)

    assert seen == [(charge.name, True, "b")]


def test_off_mode_does_nothing(app: Celery) -> None:
    """A switched-off policy runs every delivery and touches no store; the handle still derives keys."""
    keys = []

    def body(self: Any, n: int) -> None:
        keys.append(current_attempt().effect_key("x"))

    task = _task(app, body, bind=True, policy=Policy(mode="off"))
    del app.conf["idempotency_store"]

    deliver(task, 1)
    deliver(task, 1)

    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_signals_tell_task_key_token_and_reason(app: Celery) -> None:
    """Receivers get what they need to find the operation, and no arguments or results."""
    charge, _ = _counter(app)
    received = []

    def receive(**kwargs: Any) -> None:
        received.append(kwargs)

    signals.claimed.connect(receive)
    signals.completed.connect(receive)
    try:
        deliver(charge, 1, task_id="a")
    finally:
        signals.claimed.disconnect(receive)
        signals.completed.disconnect(receive)

    assert [each["signal"].name for each in received] == ["claimed", "completed"]
    for each in received:
        about = {
            "key",
            "label",
            "fencing_token",
            "attempt",
            "task_id",
            "done_by",
            "trace",
            "reason",
            "observed",
            "waited",
        }
        assert set(each) == {"signal", "sender", "observed", *about}
        assert (each["attempt"], each["done_by"], each["waited"]) == (1, None, None)
        assert each["sender"] == charge
        assert each["key"] == charge.idempotency_key_for(1)
        assert each["task_id"] == "a"


def test_result_that_is_lost_is_warned_of(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is wrong with the effect, but every replay will fail."""

    def lossy(order_id: str) -> object:
        return object()

    with caplog.at_level("WARNING", logger="celery_idempotent"):
        deliver(_task(app, lossy), "o-1")

    (line,) = (each for each in caplog.messages if each.startswith("event=idempotency."))
    assert line.startswith("event=idempotency.result_dropped ")
    assert 'reason="not encodable: ' in line


def test_logs_have_stable_event_names_and_no_values(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """A log line names event, task, id, key and token; never what the task got or returned."""
    caplog.set_level("DEBUG", logger="celery_idempotent")

    def secretive(secret: str) -> str:
        return secret

    task = _task(app, secretive)
    deliver(task, "4111-1111", task_id="a")
    deliver(task, "4111-1111", task_id="b")

    lines = [record.getMessage() for record in caplog.records if record.name.startswith("celery_idempotent.")]
    assert [line.split()[0] for line in lines] == [
        "event=idempotency.claimed",
        "event=idempotency.completed",
        "event=idempotency.replayed",
    ]
    assert all(task.idempotency_key_for("4111-1111") in line for line in lines)
    assert "4111-1111" not in "".join(lines)


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_reused_key_has_an_event_of_its_own_and_is_no_conflict(
    app: Celery, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    """Nobody else is running it; who counts conflicts counts messages that came too early."""
    charge, _ = _counter(app, policy=Policy("order_id", mode=mode))
    deliver(charge, 1, 100, task_id="first")
    sent: list[Any] = []

    def note(signal: Any, done_by: str, **kwargs: Any) -> None:
        sent.append((signal, done_by))

    for signal in SIGNALS.values():
        signal.connect(note, sender=charge)
    ended = deliver(charge, 1, 999)

    assert isinstance(ended.value, KeyReused) is (mode == "enforce")
    assert sent == [(signals.key_reused, "first")]
    (record,) = (each for each in caplog.records if each.name.startswith("celery_idempotent."))
    assert record.levelname == "WARNING"
    said = unlinked(record.getMessage())
    assert said.startswith("event=idempotency.key_reused task=t.charge ")
    assert said.endswith(
        f' observed={str(mode == "observe").lower()} reason="it belongs to other arguments: task id first"'
    )


def test_whole_app_by_task_cls() -> None:
    """With ``task_cls`` every task of the app is guarded, and Celery's own tasks are left alone."""
    runs = []
    app = Celery(
        "whole",
        set_as_current=False,
        broker="memory://",
        backend="cache+memory://",
        task_cls="celery_idempotent:IdempotentTask",
    )
    app.conf.update(
        idempotency_store="memory://",
        idempotency_policy=Policy(key="order_id"),
        task_acks_late=True,
        task_reject_on_worker_lost=True,
    )

    @app.task(shared=False)
    def charge(order_id: int, cents: int) -> None:
        runs.append(order_id)

    deliver(charge, 1, cents=5)
    deliver(charge, 1, cents=5)

    assert runs == [1]
    assert charge.idempotency_policy == Policy(key="order_id")
    for _ in range(2):
        assert deliver(app.tasks["celery.accumulate"], 1, 2).value == (1, 2)


def test_mixin_goes_on_top_of_a_base_of_the_users() -> None:
    """A user's own ``__call__`` below the mixin runs only when the body does."""
    app = an_app()
    contexts = []

    class Contextual(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            contexts.append("in")
            return super().__call__(*args, **kwargs)

    class Mine(IdempotentMixin, Contextual):
        pass

    charge, runs = _counter(app, base=Mine)

    deliver(charge, 1)
    deliver(charge, 1)

    assert len(runs) == len(contexts) == 1


def test_class_based_task_is_guarded() -> None:
    """A registered class with a ``run`` method works like a function."""
    app = an_app()
    runs = []

    class Charge(IdempotentTask):
        name = "charge"
        idempotent = Policy(key="order_id")

        def run(self, order_id: int) -> int:
            runs.append(current_attempt().key)
            return order_id

    task = app.register_task(Charge())

    assert deliver(task, 1) == deliver(task, order_id=1)
    assert runs == [task.idempotency_key_for(1)]


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async generator"])
def test_body_that_returns_before_it_runs_is_refused(app: Celery, kind: str) -> None:
    """Async functions and generators are refused when the task is defined, with the reason."""

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield 1

    async def async_generator() -> Any:
        yield 1

    body = {"coroutine": coroutine, "generator": generator, "async generator": async_generator}[kind]

    with pytest.raises(PolicyError, match="claim"):
        app.task(base=IdempotentTask, shared=False, lazy=False)(body)


def test_option_that_is_no_policy_is_refused(app: Celery) -> None:
    """The one option cannot be misspelt into silence."""
    with pytest.raises(PolicyError, match=r"idempotent=\{'key': 'order_id'\}: must be a Policy"):

        @app.task(base=IdempotentTask, shared=False, idempotent={"key": "order_id"}, lazy=False)
        def charge(order_id: int) -> None: ...

    with pytest.raises(PolicyError, match="idempotency_policy"):
        _ = _counter(an_app(idempotency_policy={"key": 1}), policy=None)[0].idempotency_policy


class _Later(Retry):
    """Of an author's own."""


@pytest.mark.parametrize(
    ("remembered", "meaning"),
    [
        (Retry, "Retry says that running again is right"),
        (_Later, "_Later says that running again is right"),
        (Ignore, "Ignore ends a delivery without an outcome"),
        (Reject, "Reject ends a delivery without an outcome"),
    ],
)
def test_control_flow_is_no_outcome_to_remember(app: Celery, remembered: Any, meaning: str) -> None:
    """Celery's control flow in ``remember`` meant nothing; it is refused at the first moment Celery is there."""
    policy = Policy(remember=(ValueError, remembered))

    with pytest.raises(PolicyError, match=f"remember=.*{meaning}.*; leave it out"):
        app.task(base=IdempotentTask, shared=False, lazy=False, idempotent=policy)(_nothing)
    with pytest.raises(PolicyError, match=meaning):
        an_app(idempotency_policy=policy).task(base=IdempotentTask, shared=False, lazy=False)(_nothing)


@pytest.mark.parametrize("base", [Exception, CeleryError])
def test_base_of_control_flow_may_be_remembered(app: Celery, base: Any) -> None:
    """It stands for the failures under it; a retry is a retry all the same."""

    def later(self: Any, order_id: int) -> None:
        if not self.request.retries:
            raise self.retry(countdown=0)
        raise CeleryError("refused")

    task = _task(app, later, bind=True, policy=Policy(remember=(base,)))

    assert deliver(task, 1).state == states.RETRY
    assert [deliver(task, 1, request={"retries": 1}).state for _ in range(2)] == [states.FAILURE] * 2
    assert app.conf.idempotency_store.get(task.idempotency_key_for(1)).status is Status.FAILED


def test_key_that_names_no_argument_is_refused_when_bound(app: Celery) -> None:
    """A misspelt key is found at definition, for functions and for classes."""
    with pytest.raises(PolicyError, match="order"):

        @app.task(base=IdempotentTask, shared=False, idempotent=Policy(key="order"), lazy=False)
        def charge(order_id: int) -> None: ...

    with pytest.raises(PolicyError, match="cent"):

        @app.task(base=IdempotentTask, shared=False, bind=True, idempotent=Policy(fingerprint="cent"), lazy=False)
        def bound(self: Any, order_id: int) -> None: ...


def test_settings_that_lose_tasks_are_warned_about() -> None:
    """At bind time the author hears which Celery setting makes the promise weaker."""
    app = an_app()

    def _warned(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            app.task(base=IdempotentTask, shared=False, name=f"t{len(app.tasks)}", lazy=False, **options)(_nothing)
        return [unlinked(str(each.message)) for each in caught if each.category is IdempotencyWarning]

    (line,) = _warned(acks_late=False)
    assert line.endswith("acks_late is off, so a task whose worker dies is lost; remove acks_late=False from the task")
    (line,) = _warned(reject_on_worker_lost=False)
    assert "reject_on_worker_lost is off" in line
    assert line.endswith("remove reject_on_worker_lost=False from the task")
    app.conf.task_acks_late = app.conf.task_reject_on_worker_lost = False
    (line,) = _warned()
    assert line.endswith("set task_acks_late=True; set task_reject_on_worker_lost=True")
    assert _warned(acks_late=True)[0].endswith("set task_reject_on_worker_lost=True")
    app.conf.task_acks_late = app.conf.task_reject_on_worker_lost = True
    assert _warned() == []
    is_heeded = hasattr(Task, "retry_on_worker_lost")  # since Celery 5.7
    assert (_warned(reject_on_worker_lost=False, retry_on_worker_lost=True) == []) is is_heeded
    assert _warned(acks_late=False, idempotent=Policy(mode="off")) == []
    refuse = Policy(on_takeover="refuse")
    assert "autoretry_for turns" in _warned(autoretry_for=(ValueError, SafeToRetry), idempotent=refuse)[0]
    assert _warned(autoretry_for=(SafeToRetry,), idempotent=refuse) == []
    assert _warned(autoretry_for=(ValueError,)) == []


def test_warning_stands_at_the_authors_line_and_once() -> None:
    """Celery binds a task when an app is finalized, and again in a worker; neither place is where to change it."""
    app = an_app()
    app.conf.task_acks_late = False
    task = _task(app, _nothing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        app.finalize()
        task.bind(app)
    (warned,) = caught
    assert (warned.filename, warned.lineno) == (__file__, _nothing.__code__.co_firstlineno)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("key", r"write idempotent=Policy\(key=...\)"),
        ("mode", r"write idempotent=Policy\(mode=...\)"),
        ("idempotency_key", "it is an option of apply_async"),
        ("once", "it is celery-once's"),
        ("unique_on", "it is celery-singleton's"),
        ("raise_on_duplicate", "no publisher is refused here"),
    ],
)
def test_option_that_nothing_reads_is_refused(app: Celery, option: str, remedy: str) -> None:
    """Celery takes any; the task would run with a key other than its author believes."""
    with pytest.raises(PolicyError, match=f"^{option}='order_id': .*{remedy}"):
        app.task(base=IdempotentTask, shared=False, name="t", lazy=False, **{option: "order_id"})(_nothing)


def test_option_that_a_base_knows_is_the_bases(app: Celery) -> None:
    """And a class of the author's may call its attributes as it likes."""

    class Base(IdempotentMixin, Task):
        abstract = True
        once: Any = None

    assert app.task(base=Base, shared=False, name="a", lazy=False, once={"keys": []})(_nothing).once == {"keys": []}

    class Own(IdempotentTask):
        name = "own"
        key = "mine"

        def run(self) -> None: ...

    assert app.register_task(Own()).key == "mine"


def test_policy_that_does_not_fit_the_broker_is_warned_about() -> None:
    """An outcome forgotten before a redelivery can come is said at bind time; a longer lease is no mistake."""
    app = Celery("sqs", set_as_current=False, broker="sqs://a:b@127.0.0.1:1//")
    app.conf.update(
        broker_transport_options={"visibility_timeout": 120, "region": "us-east-1"},
        task_acks_late=True,
        task_reject_on_worker_lost=True,
    )

    with pytest.warns(IdempotencyWarning, match=r"retain \(100 s\) is not longer") as caught:
        app.task(base=IdempotentTask, shared=False, name="short", lazy=False, idempotent=Policy(retain=100))(_nothing)
    assert len(caught) == 1
    app.task(base=IdempotentTask, shared=False, name="long", lazy=False, idempotent=Policy(lease=121))(_nothing)


def test_shared_tasks_are_bound_to_every_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reusable library's task works in the app that finalizes it."""
    monkeypatch.setattr("celery._state._on_app_finalizers", set())  # of no other test's apps
    monkeypatch.setattr("celery._state._apps", WeakSet())  # nor for those of tests that left one alive
    runs = []

    @shared_task(
        base=IdempotentTask,
        name="shared.charge",
        idempotent=Policy(key="order_id"),
        acks_late=True,
        reject_on_worker_lost=True,
    )
    def charge(order_id: int) -> None:
        runs.append(order_id)

    app = an_app()
    deliver(app.tasks["shared.charge"], 1)
    deliver(app.tasks["shared.charge"], 1)

    assert runs == [1]


def test_conflict_is_a_celery_retry(app: Celery) -> None:
    """A delivery that meets another one running ends as RETRY with the conflict as its reason."""
    met = []

    def body(self: Any, n: int) -> str:
        met.append(deliver(self, n))
        return "done"

    task = _task(app, body, bind=True)

    assert deliver(task, 1).value == "done"
    assert met[0].state == states.RETRY
    assert isinstance(met[0].value, Retry)
    assert isinstance(met[0].value.exc, InFlight)
