"""Functions outside tasks: the same promises, without a message; called or awaited alike."""

import asyncio
import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import InFlight, Policy, PolicyError, current_attempt, idempotent
from celery_idempotent.engine.processes import this_process
from celery_idempotent.errors import KeyMissing, KeyReused, StoreUnavailable
from celery_idempotent.protocol.record import Status, process_of, trace_of
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import Shop as TaskShop
from tests.support.deliveries import signalled

ORDER = Policy("order")


class Shop(TaskShop):
    """Functions on a store of their own, called or awaited alike."""

    def __init__(self, is_async: bool = False) -> None:
        super().__init__()
        self.is_async = is_async

    def function(self, policy: Policy = ORDER, body: Callable[[], Any] = lambda: None, **options: Any) -> Any:
        def charge(order: str, cents: int = 1) -> Any:
            self.runs.append(order)
            return body() or f"charged {cents}"

        async def charge_async(order: str, cents: int = 1) -> Any:
            await asyncio.sleep(0)
            return charge(order, cents)

        charge_async.__qualname__ = charge.__qualname__
        decorated = idempotent(policy, **{"store": self.store, **options})(charge_async if self.is_async else charge)

        @functools.wraps(decorated)
        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run(decorated(*args, **kwargs)) if self.is_async else decorated(*args, **kwargs)

        return call


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return Shop(request.param)


def test_second_call_gets_the_result_of_the_first(shop: Shop) -> None:
    """However it is written, one key is one effect, and the first caller gets what every replay gives."""
    charge, pair = shop.function(), shop.function(body=lambda: (1, 2), name="pair")

    assert charge("o-1", 5) == charge("o-1", cents=5) == charge(order="o-1", cents=5) == "charged 5"
    assert pair("o-1") == pair("o-1") == [1, 2]
    with pytest.raises(KeyReused):
        charge("o-1", 6)
    assert shop.runs == ["o-1", "o-1"]
    assert charge("o-2") == "charged 1"


def test_call_that_cannot_be_protected_runs_nothing_and_is_told(shop: Shop) -> None:
    """A null is no key, and somebody may be watching; of an outage the caller hears, and calls again."""
    charge = shop.function()
    with signalled() as told, pytest.raises(KeyMissing):
        charge(None)
    shop.store.faults.extend(["request lost"] * 2)
    with pytest.raises(StoreUnavailable):
        charge("o-1")

    ((name, about),) = told
    assert (name, about["sender"], about["task_id"], shop.runs) == ("key_missing", charge.__wrapped__, None, [])
    assert charge("o-1") == "charged 1"


def test_unfinished_result_is_refused(shop: Shop) -> None:
    """Nobody would ever run it."""
    with pytest.raises(PolicyError, match="body="):
        shop.function(body=lambda: (each for each in [1]))("o-1")
    assert shop.record.status is Status.RELEASED


def test_recursion_is_a_function_call() -> None:
    """A body that calls itself, however many operations lie between, would wait for itself; another key is its own."""
    shop, depth = Shop(), iter([True, False])
    charge: Any = shop.function(name="charge", body=lambda: other("o-2") if next(depth) else current_attempt().number)
    other = shop.function(name="other", body=lambda: charge("o-1"))
    assert charge("o-1") == 1
    assert shop.runs == ["o-1", "o-2", "o-1"]
    assert len(list(shop.memory.scan())) == 2


def test_context_that_outlives_its_body_makes_no_recursion(shop: Shop) -> None:
    """Such as that of a task which the body left on the event loop: what it calls is answered as everybody is."""
    copied: list[contextvars.Context] = []
    charge = shop.function(body=lambda: copied.append(contextvars.copy_context()))
    charge("o-1")
    assert copied[0].run(charge, "o-1") == "charged 1"
    assert shop.runs == ["o-1"]


def test_process_that_was_forked_in_a_body_makes_no_recursion(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a pool that the body has made: it has a copy of the context, and nothing tells it of the end."""
    pid, policy = os.getpid(), Policy("order", fingerprint="order", scope="charges")
    again: Any = idempotent(policy, store=shop.store, name="again")(lambda order: shop.runs.append("again"))

    def body() -> None:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(InFlight):
                again("o-1")

    shop.function(policy, body)("o-1")
    assert shop.runs == ["o-1"]


@pytest.mark.parametrize(("mode", "order"), [("off", "o-1"), ("off", None), ("observe", None)])
def test_body_without_a_claim_leaves_what_it_calls_protected(shop: Shop, mode: Any, order: str | None) -> None:
    """It holds nothing that a call in it could wait for, whether it has that key or none at all."""
    charge = shop.function(Policy("order", scope="charges"))
    policy = Policy("order", scope="charges", mode=mode)
    sell: Any = idempotent(policy, store=shop.store, name="sell")(lambda order: charge("o-1"))
    assert sell(order) == sell(order) == "charged 1"
    assert shop.runs == ["o-1"]


@pytest.mark.parametrize("private", [True, False])
def test_observed_function_runs_always_and_tells(shop: Shop, private: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong, observing changes nothing of what a function does; a reason's text is told where it may be."""
    charge = shop.function(Policy("order", mode="observe", private=private))
    with signalled() as told:
        assert {charge("o-1"), charge("o-1"), charge(None)} == {"charged 1"}

    assert shop.runs == ["o-1", "o-1", None]
    assert [about["observed"] for name, about in told if name == "replayed"] == [True]
    (line,) = [each for each in caplog.messages if "not_observed" in each]
    assert ("KeyMissing(" in line) is not private


def test_call_in_flight_raises_at_once_or_after_a_wait(shop: Shop) -> None:
    """Both tell how long it can take; one that waits gets the result if the body ends in time."""
    begun, go_on, policy = threading.Event(), threading.Event(), Policy("order", backoff=0.01)
    body = shop.function(policy, lambda: (begun.set(), go_on.wait(20), None)[-1])  # type: ignore[func-returns-value]
    with ThreadPoolExecutor() as threads:
        threads.submit(body, "o-1")
        begun.wait(20)
        for wait in (0, 0.05):
            with pytest.raises(InFlight):
                shop.function(policy, wait=wait)("o-1")
        waiting = threads.submit(shop.function(policy, wait=20), "o-1")
        go_on.set()

    assert (waiting.result(), shop.runs) == ("charged 1", ["o-1"])


def test_wait_asks_ever_more_seldom_and_ends_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pause is what is left of it."""
    shop, pauses = Shop(), list[float]()
    shop.function(body=lambda: 1)("o-1")
    shop.change(status=Status.IN_PROGRESS, owner="a", lease_until=shop.clock.now() + 60_000)
    shop.clock.on_sleep = pauses.append
    monkeypatch.setattr("celery_idempotent.integration.task.functions.clock", shop.clock)
    monkeypatch.setattr("celery_idempotent.integration.task.guard.random", SimpleNamespace(random=lambda: 0.0))

    with pytest.raises(InFlight):
        shop.function(Policy("order", backoff=1), wait=3)("o-1")
    assert pauses == [1.0, 1.5, 0.5]


def test_record_names_trace_and_process_of_its_caller(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a thread asks the store: the trace is the one that the call belongs to."""
    trace = contextvars.ContextVar("trace", default="")
    monkeypatch.setattr("celery_idempotent.integration.events.read_trace", trace.get)

    def call() -> None:
        trace.set("00-of-the-caller-01")
        shop.function()("o-1")

    contextvars.Context().run(call)
    assert (trace_of(shop.record), process_of(shop.record)) == ("00-of-the-caller-01", this_process())
    assert this_process()


def test_app_gives_store_policy_namespace_and_serialiser() -> None:
    """One setting serves its tasks and its functions, and they can share an operation."""
    policy = Policy("order_id", scope="pay")
    shop = TaskShop(policy, idempotency_policy=policy, idempotency_namespace="eu")

    @idempotent(app=shop.app)
    def charge(order_id: str, cents: int = 1) -> str:
        return "by the function"

    assert (charge("o-1"), shop.deliver("o-1").value) == ("by the function", "by the function")
    assert charge.idempotency_key_for("o-1").startswith("eu:pay:1:")  # type: ignore[attr-defined]


def test_current_app_counts_when_the_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are imported before an app is configured; without a policy all arguments are the key."""
    placed = TaskShop()
    charge: Any = idempotent(name="charge")(lambda order, cents=1: placed.runs.append(cents))
    monkeypatch.setattr("celery_idempotent.integration.task.guard.current_app", placed.app)
    for cents in (1, 2, 1):
        charge("o-1", cents)

    assert placed.runs == [1, 2]
    assert {record.task for record in placed.memory.scan()} == {"charge"}


class Account:
    store = MemoryStore()

    @idempotent(ORDER, store=store)
    def of_instance(self, order: str) -> list[str]:
        return [type(self).__name__, order]

    @classmethod
    @idempotent(ORDER, store=store)
    def of_class(cls, order: str) -> list[str]:
        return [cls.__name__, order]

    @staticmethod
    @idempotent(ORDER, store=store)
    def of_nobody(order: str) -> list[str]:
        return [order]


def test_methods_are_keyed_without_their_instance() -> None:
    """Which instance is called says nothing of the effect; the first argument of any other function is one."""
    assert Account().of_instance("o-1") == Account().of_instance("o-1") == ["Account", "o-1"]
    assert Account.of_class("o-1") == Account().of_class("o-1") == ["Account", "o-1"]
    assert Account.of_nobody("o-1") == Account().of_nobody("o-1") == ["o-1"]
    key = Account().of_instance.idempotency_key_for("o-1")  # type: ignore[attr-defined]
    assert key.startswith(f"{__name__}.Account.of_instance:1:")

    @idempotent(store=MemoryStore())
    def charge(self: str) -> str:
        return self

    assert (charge("o-1"), charge("o-2")) == ("o-1", "o-2")


def test_partials_and_callable_objects_can_be_protected() -> None:
    """They need a name; what is awaited stays so."""

    class Charge:
        async def __call__(self, order: str) -> str:
            return "awaited"

    for each in (functools.partial(Charge.__call__, Charge()), Charge()):
        charge: Any = idempotent(ORDER, name="charge", store=MemoryStore())(each)
        assert asyncio.run(charge("o-1")) == "awaited"


@pytest.mark.parametrize(
    ("main", "name"),
    [
        (SimpleNamespace(__spec__=SimpleNamespace(name="shop.charges")), "shop.charges"),
        (SimpleNamespace(__spec__=None, __file__="/srv/charges.py"), "charges"),
    ],
)
def test_script_is_named_as_others_import_it(monkeypatch: pytest.MonkeyPatch, main: Any, name: str) -> None:
    """Under another name the same call would have another key, and happen again."""

    def charge(order: str) -> None: ...

    charge.__module__, charge.__qualname__ = "__main__", "charge"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert idempotent(ORDER, store="memory://")(charge).name == f"{name}.charge"  # type: ignore[attr-defined]
