"""The task class on Celery's own tracer: identity, replays, control flow, modes, nesting."""

import warnings
from asyncio import CancelledError
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery, Task, chain
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError, WorkerShutdown, WorkerTerminate
from greenlet import GreenletExit

from celery_idempotent import IdempotencyWarning, IdempotentMixin, IdempotentTask, Policy, Status, current_attempt
from celery_idempotent.errors import InFlight, KeyMissing, KeyReused, OutcomeUnknown, SafeToRetry, StoreUnavailable
from celery_idempotent.integration.broker.recovery import mark
from tests.support.deliveries import Ended, Shop, an_app, deliver, redeliver, signalled
from tests.support.scene import raising

REFUSE = Policy("order_id", on_takeover="refuse")


def test_duplicates_of_any_origin_get_the_first_result() -> None:
    """A redelivery, a second publish, and a call of another task of its scope are all answered by the first run."""
    shop = Shop(Policy(scope="billing"))
    other = shop.task(Policy(scope="billing"), lambda order_id, cents=1: "other", "other")
    ends = [shop.deliver(7, task_id="a"), shop.deliver(7, 1, task_id="a"), shop.deliver(order_id=7, task_id="b")]
    ends.append(deliver(other, 7))
    assert ends == [Ended("SUCCESS", "charged 1")] * 4
    assert shop.runs == [7]


def test_explicit_key_travels_with_the_message(shop: Shop) -> None:
    """The publisher's key takes the place of the derived one, for ``apply_async``, signatures and eager calls."""
    key = {"idempotency_key": "order-1"}
    shop.charge.apply_async((1,), **key)
    shop.charge.s(1).set(**key).apply_async()
    shop.charge.signature((1,), headers={"mine": 1}, **key).apply_async()
    messages = shop.published()
    sent = [(each.headers["idempotency_key"], each.headers.get("mine")) for each in messages]
    assert sent == [("order-1", None), ("order-1", None), ("order-1", 1)]
    for message in messages:
        redeliver(shop.app, message)
    shop.charge.apply((1,), **key)
    assert shop.runs == [1]
    shop.charge.apply((1,), idempotency_key="order-2")
    assert shop.runs == [1, 1]


@pytest.mark.parametrize("publish", ["always", "once"])
def test_base_that_takes_its_options_by_name_publishes(publish: Any) -> None:
    """As celery-once's, and many of the authors' own: ``apply_async(self, args, kwargs, **options)``."""

    class Ours(Task):
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            return super().apply_async(args, kwargs, **{**options, "headers": {"tenant": 1}})

    shop = Shop()
    task = shop.task(Policy(publish=publish), name="t", base=type("Base", (IdempotentMixin, Ours), {"abstract": True}))
    for order, send in enumerate((task.delay, lambda n: task.s(n).apply_async(), lambda n: task.apply_async((n,)))):
        send(order)
    task.apply_async((3,), {}, "id", None, [])
    assert [message.headers["tenant"] for message in shop.published()] == [1] * 4


def test_direct_calls_pass_through(shop: Shop) -> None:
    """Calling a task is calling a function, also from within another; its handle has a key of its own and no record."""
    seen: list[tuple[str, int, bool]] = []

    def note(order_id: int, cents: int) -> str:
        attempt = current_attempt()
        attempt.ensure_owned()
        seen.append((attempt.key, attempt.number, attempt.is_takeover))
        return str(order_id // bool(order_id))

    def outer() -> list[str]:
        own, found = current_attempt(), [shop.charge(1), shop.charge(2)]
        with pytest.raises(ZeroDivisionError):
            shop.charge(0)
        assert current_attempt() is own
        return found

    shop.does = note
    assert shop.charge(1) == "1"
    assert deliver(shop.task(body=outer, name="outer")).value == ["1", "2"]
    keys = [shop.charge.idempotency_key_for(order) for order in (1, 1, 2, 0)]
    assert seen == [(keys[0], 0, False), *((key, 1, False) for key in keys[1:])]
    assert [record.task for record in shop.memory.scan()] == ["outer"]
    with pytest.raises(LookupError):
        current_attempt()


ABANDONED = Status.IN_PROGRESS
"""With its lease ended."""


@pytest.mark.parametrize(
    ("error", "policy", "state", "status"),
    [
        (ValueError("no outcome"), Policy("order_id"), "FAILURE", Status.RELEASED),
        (Reject("x", requeue=True), Policy("order_id"), "REJECTED", Status.RELEASED),
        (Ignore("x"), REFUSE, "IGNORED", Status.UNKNOWN),
        (SafeToRetry("gateway not reached"), REFUSE, "RETRY", Status.RELEASED),
        (Retry("later"), REFUSE, "RETRY", Status.RELEASED),
        (MemoryError(), Policy("order_id"), "FAILURE", ABANDONED),
        (WorkerLostError("the process of the task that the body asked"), Policy("order_id"), "FAILURE", ABANDONED),
    ],
    ids=repr,
)
def test_exception_steers_delivery_and_record(error: Exception, policy: Policy, state: str, status: Status) -> None:
    """By default what is no outcome gives the claim back; under refuse nobody knows whether the effect happened."""
    shop = Shop()
    shop.does = raising(error)
    shop.charge = shop.task(policy, name="t", autoretry_for=(SafeToRetry,))
    ended = shop.deliver(1, task_id="id")
    assert (ended.state, shop.record.status, shop.record.lease_until == 0) == (state, status, status is ABANDONED)
    if status is Status.UNKNOWN:
        assert isinstance(shop.deliver(1).value, OutcomeUnknown)


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
        (GreenletExit(), True, Status.RELEASED),
        (GreenletExit(), False, ABANDONED),
    ],
    ids=repr,
)
def test_exit_counts_as_a_death_unless_somebody_else_ends_the_process(
    shop: Shop, error: BaseException, is_stopped: bool, status: Status
) -> None:
    """What the worker has marked gives the claim back: cold shutdown, a hard time limit, a terminating revoke."""
    shop.does = raising(error)
    mark("id", is_stopped=is_stopped)
    if isinstance(error, GreenletExit):  # Celery would take it for a success
        ended = shop.deliver(1, task_id="id")
        assert (ended.state, ended.value.requeue) == ("REJECTED", True)
    else:
        with suppress(type(error)):
            shop.deliver(1, task_id="id")
    assert (shop.record.status, shop.record.lease_until == 0) == (status, status is ABANDONED)


def test_autoretry_is_seen_as_a_retry() -> None:
    """A failure that autoretry turned into a retry releases; the last one is an outcome if it is remembered."""
    shop = Shop()
    options = {"autoretry_for": (ValueError,), "max_retries": 1, "retry_backoff": False}
    shop.charge = shop.task(Policy("order_id", remember=(ValueError,)), name="t", **options)
    shop.does = lambda *_: int(f"run {len(shop.runs)}")
    shop.charge.delay(1)
    ends = [shop.redeliver()[0], shop.redeliver()[0], shop.deliver(1, request={"retries": 1})]
    assert [each.state for each in ends] == ["RETRY", "FAILURE", "FAILURE"]
    assert "run 2" in str(ends[1].value)
    assert (str(ends[2].value), shop.runs) == (str(ends[1].value), [1, 1])
    assert shop.charge.idempotency_key_for(1) == shop.charge.idempotency_key_for(order_id=1, cents=9)


def test_replaced_task_is_not_completed(shop: Shop) -> None:
    """``self.replace`` hands the task's id to another task; the claim is given back, not completed."""
    shop.does = lambda order_id, cents: shop.charge.replace(other.s(order_id))
    other = shop.task(name="other")
    assert shop.deliver(1, task_id="same").state == "IGNORED"
    (message,) = shop.published()
    assert (message.headers["id"], message.headers["task"]) == ("same", "other")
    assert shop.record.status is Status.RELEASED


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_call_that_is_refused_fails_once_and_is_told_once(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Other arguments under one key are no conflict, and never retried; a call without a key runs nothing."""
    shop = Shop(Policy("order_id", mode=mode))
    shop.deliver(1, 100, task_id="first")
    caplog.clear()
    with signalled() as told:
        reused, missing = shop.deliver(1, 999), shop.deliver(None)
    is_enforced = mode == "enforce"
    assert (isinstance(reused.value, KeyReused), isinstance(missing.value, KeyMissing)) == (is_enforced, is_enforced)
    assert [(name, about["done_by"]) for name, about in told] == [("key_reused", "first"), ("key_missing", None)]
    assert (shop.runs, shop.published()) == ([1] if is_enforced else [1, 1, None], [])
    line = next(each for each in caplog.messages if each.startswith("event=idempotency.key_reused"))
    assert f" observed={str(not is_enforced).lower()} " in line


def test_eager_calls_are_guarded(shop: Shop) -> None:
    """``apply`` and always-eager mode run once and replay, as a worker would; a conflict or an outage raises."""
    assert shop.charge.apply((1,)).get() == shop.charge.apply((1,)).get() == "charged 1"
    shop.app.conf.task_always_eager = True
    assert shop.charge.delay(1).get() == "charged 1"
    shop.does = lambda order_id, cents: repr(shop.charge.apply((order_id,), task_id="another").result)
    assert InFlight.__name__ in shop.deliver(2).value
    shop.store.away["swap"] = StoreUnavailable("s", "swap", "away")
    assert isinstance(shop.charge.apply((3,)).result, StoreUnavailable)
    assert shop.runs == [1, 2]


@pytest.mark.parametrize("error", [GreenletExit, KeyboardInterrupt])
def test_exit_from_an_eager_call_is_its_callers(shop: Shop, error: type[BaseException]) -> None:
    """There is no message to give back, and none that comes again."""
    shop.does = raising(error())
    with pytest.raises(error):
        shop.charge.apply((1,))
    assert shop.record.status is Status.RELEASED


def test_links_and_chains_follow_a_replay(shop: Shop) -> None:
    """What waits for a duplicate's result gets it: the callback and the next link of the chain are published."""
    two = shop.task(body=lambda n: n, name="two")
    chain(shop.charge.s(1), two.s()).apply_async()
    (message,) = shop.published()
    for number in range(2):
        shop.deliver(1, request={"callbacks": [two.s().set(task_id=f"callback {number}")]})
        # Celery before 5.7 empties the list of a chain.
        shop.deliver(1, request={"chain": list(message.payload[2]["chain"])})
        callback, following = shop.published()
        assert callback.headers["id"] == f"callback {number}"
        for each in (callback, following):
            assert (each.headers["task"], each.payload[0]) == ("two", ["charged 1"])
    assert shop.runs == [1]


def test_whole_app_by_task_cls() -> None:
    """With ``task_cls`` every task of the app is guarded, and Celery's own tasks are left alone."""
    app, runs = Celery("whole", set_as_current=False, task_cls="celery_idempotent:IdempotentTask"), []
    policy = Policy(key="order_id")
    app.conf.update(broker_url="memory://", idempotency_store="memory://", idempotency_policy=policy)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)

    @app.task(shared=False)
    def charge(order_id: int, cents: int) -> None:
        runs.append(order_id)

    for _ in range(2):
        deliver(charge, 1, cents=5)
        assert deliver(app.tasks["celery.accumulate"], 1, 2).value == (1, 2)
    assert (runs, charge.idempotency_policy) == ([1], policy)


def _nothing() -> None: ...


NO_LATE = {"task_acks_late": False, "task_reject_on_worker_lost": False}
BOTH = "set task_acks_late=True; set task_reject_on_worker_lost=True"
REFUSING = {"idempotent": Policy(on_takeover="refuse")}
REMOVE = "remove reject_on_worker_lost=False from the task"


@pytest.mark.parametrize(
    ("settings", "options", "option", "remedy"),
    [
        ({}, {}, "", ""),
        ({}, {"acks_late": False}, "acks_late", "remove acks_late=False from the task"),
        ({}, {"reject_on_worker_lost": False}, "acks_late", REMOVE),
        (NO_LATE, {}, "acks_late", BOTH),
        ({}, {"acks_late": False, "idempotent": Policy(mode="off")}, "", ""),
        ({}, {"autoretry_for": (ValueError, SafeToRetry), **REFUSING}, "autoretry_for", ""),
        ({}, {"autoretry_for": (SafeToRetry,), **REFUSING}, "", ""),
        ({"broker_url": "sqs://a:b@127.0.0.1:1//"}, {"idempotent": Policy(retain=100)}, "retain", "(100 s)"),
        ({"broker_url": "sqs://a:b@127.0.0.1:1//"}, {"idempotent": Policy(lease=121)}, "", ""),
    ],
)
def test_settings_that_make_the_promise_weaker_are_warned_about(
    settings: dict[str, Any], options: dict[str, Any], option: str, remedy: str
) -> None:
    """When a task is bound its author hears what Celery or the broker can lose, and which line to change."""
    transport = {"visibility_timeout": 120, "region": "us-east-1"}
    app = an_app(broker_transport_options=transport, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        app.task(base=IdempotentTask, shared=False, name="t", lazy=False, **options)(_nothing)
    warned = [each.message for each in caught]
    assert [each.option for each in warned if isinstance(each, IdempotencyWarning)] == [option] * bool(option)
    assert len(warned) == bool(option)
    assert all(remedy in str(each) for each in warned)


def test_warning_stands_at_the_authors_line_and_once() -> None:
    """Celery binds a task when an app is finalized, and again in a worker; neither place is where to change it."""
    app = an_app(task_acks_late=False)
    task = app.task(base=IdempotentTask, shared=False, name="t")(_nothing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        app.finalize()
        task.bind(app)
    (warned,) = caught
    assert (warned.filename, warned.lineno) == (__file__, _nothing.__code__.co_firstlineno)
