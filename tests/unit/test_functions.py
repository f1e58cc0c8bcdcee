"""Functions outside tasks: the same promises, without a message."""

import asyncio
import contextlib
import contextvars
import functools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from celery import Celery

from celery_idempotent import (
    AtMostOnce,
    InFlight,
    KeyMissing,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PolicyError,
    ReplayedFailure,
    StoreUnavailable,
    current_attempt,
    idempotent,
    signals,
)
from celery_idempotent.engine.processes import this_process
from celery_idempotent.integration.task.task import IdempotentTask
from celery_idempotent.protocol.record import Record, Status, process_of, trace_of
from celery_idempotent.protocol.steps import Step
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, FaultyStore
from tests.support.deliveries import an_app


class Declined(Exception):
    pass


class Killed(BaseException):
    pass


def _refuse_to_write(record: Record) -> None:
    raise Killed


def _die_in_the_body(shop: "Shop", policy: Policy) -> None:
    def die() -> None:
        shop.store.before_swap = _refuse_to_write  # a dead process writes nothing
        raise Killed

    with pytest.raises(Killed):
        shop.charge(policy, die)("o-1")
    shop.store.before_swap = lambda record: None


class Shop:
    """A function on a store of its own, called or awaited alike."""

    def __init__(self, kind: str) -> None:
        self.is_async = kind == "async"
        self.clock = FakeClock()
        self.store = FaultyStore(MemoryStore(self.clock.now))
        self.charged: list[str] = []

    def charge(self, policy: Policy | None = None, body: Callable[[], Any] = lambda: None, **options: Any) -> Any:
        """Charges an order: what an author would write."""
        options = {"store": self.store, **options} if "app" not in options else options

        def charge(order: str, cents: int = 1) -> Any:
            self.charged.append(order)
            return body() or f"charged {cents}"

        async def charge_async(order: str, cents: int = 1) -> Any:
            await asyncio.sleep(0)
            return charge(order, cents)

        charge_async.__qualname__ = charge.__qualname__
        decorated = idempotent(policy or Policy("order"), **options)(charge_async if self.is_async else charge)

        @functools.wraps(decorated)
        def call(*args: Any, **kwargs: Any) -> Any:
            return asyncio.run(decorated(*args, **kwargs)) if self.is_async else decorated(*args, **kwargs)

        return call

    @property
    def record(self) -> Record:
        (record,) = self.store.scan()
        return record


@pytest.fixture(params=["sync", "async"])
def shop(request: pytest.FixtureRequest) -> Shop:
    return Shop(request.param)


def test_second_call_gets_the_result_of_the_first(shop: Shop) -> None:
    """However it is written, one key is one effect."""
    charge = shop.charge()

    assert charge("o-1", 5) == charge("o-1", cents=5) == charge(order="o-1", cents=5) == "charged 5"
    assert shop.charged == ["o-1"]
    assert charge("o-2") == "charged 1"


def test_result_is_what_every_replay_gives(shop: Shop) -> None:
    """JSON has no tuples, so the first caller gets a list, too."""
    charge = shop.charge(body=lambda: (1, 2))

    assert charge("o-1") == charge("o-1") == [1, 2]


def test_other_arguments_under_one_key_are_refused(shop: Shop) -> None:
    """Nothing runs, and nobody is told of another's result."""
    charge = shop.charge()
    charge("o-1", 5)

    with pytest.raises(KeyReused):
        charge("o-1", 6)
    assert shop.charged == ["o-1"]


def test_exception_gives_the_claim_back(shop: Shop) -> None:
    """The next call runs."""
    outcomes = iter([Declined("no"), "yes"])

    def body() -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    charge = shop.charge(body=body)

    with pytest.raises(Declined, match="no"):
        charge("o-1")
    assert shop.record.status is Status.RELEASED
    assert charge("o-1") == "yes"


def test_remembered_exception_is_replayed(shop: Shop) -> None:
    """As a final outcome, of its own type."""

    def body() -> Any:
        raise Declined("no")

    charge = shop.charge(Policy("order", remember=(Declined,)), body)

    for _ in range(2):
        with pytest.raises(Declined, match="no"):
            charge("o-1")
    assert shop.charged == ["o-1"]


def test_call_without_a_key_runs_nothing_and_is_told(shop: Shop) -> None:
    """A null is no key, and somebody may be watching."""
    told = []

    def receive(**about: Any) -> None:
        told.append((about["sender"], about["task_id"]))

    signals.key_missing.connect(receive)
    charge = shop.charge()

    with pytest.raises(KeyMissing):
        charge(None)
    assert not shop.charged
    assert told == [(charge.__wrapped__, None)]
    signals.key_missing.disconnect(receive)


def test_store_that_does_not_answer_runs_nothing(shop: Shop) -> None:
    """The caller hears of it, and calls again."""
    charge = shop.charge()
    shop.store.faults.extend(["request lost"] * 2)

    with pytest.raises(StoreUnavailable):
        charge("o-1")
    assert not shop.charged
    assert charge("o-1") == "charged 1"


def test_body_that_was_taken_over_reports_nothing_as_done(shop: Shop) -> None:
    """Another call owns the key by then, and has no outcome yet."""

    def body() -> Any:
        shop.clock.advance(120_000)
        later = replace(shop.record, owner="another", revision="later", fencing_token=shop.record.fencing_token + 1)
        assert shop.store.swap(later, shop.record.revision) == later

    charge = shop.charge(body=body)

    with pytest.raises(LeaseLost):
        charge("o-1")


def test_step_is_made_once(shop: Shop) -> None:
    """Its result is recorded, so an attempt after a failure goes on behind it."""
    made = []
    fails = iter([True, False])

    def charge_card(step: Step) -> str:
        made.append(step.key)
        return "ch_1"

    def body() -> Any:
        token = current_attempt().step("charge", charge_card)
        if next(fails):
            raise Declined
        return token

    charge = shop.charge(body=body)

    with pytest.raises(Declined):
        charge("o-1")
    assert charge("o-1") == "ch_1"
    assert len(made) == 1


def test_recursion_is_a_function_call(shop: Shop) -> None:
    """A body that calls itself with the same key would wait for itself."""
    depth = iter([True, False])

    @idempotent(Policy("order"), store=shop.store)
    def charge(order: str) -> str:
        shop.charged.append(order)
        return charge(order) if next(depth) else f"by attempt {current_attempt().number}"

    assert charge("o-1") == "by attempt 1"
    assert shop.charged == ["o-1", "o-1"]


def test_context_that_outlives_its_body_makes_no_recursion(shop: Shop) -> None:
    """Such as that of a task which the body left on the event loop: what it calls is answered as everybody is."""
    copied = []
    charge = shop.charge(body=lambda: copied.append(contextvars.copy_context()))

    charge("o-1")

    assert copied[0].run(charge, "o-1") == "charged 1"
    assert shop.charged == ["o-1"]


def test_process_that_was_forked_in_a_body_makes_no_recursion(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a pool that the body has made: it has a copy of the context, and nothing tells it of the end."""
    pid = os.getpid()
    policy = Policy("order", fingerprint="order", scope="charges")

    def body() -> Any:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(InFlight):
                again("o-1")

    @idempotent(policy, store=shop.store)
    def again(order: str) -> None:
        raise AssertionError

    shop.charge(policy, body)("o-1")
    assert shop.charged == ["o-1"]


@pytest.mark.parametrize(("mode", "order"), [("off", "o-1"), ("off", None), ("observe", None)])
def test_body_without_a_claim_leaves_what_it_calls_protected(
    shop: Shop, mode: Literal["off", "observe"], order: str | None
) -> None:
    """It holds nothing that a call in it could wait for, whether it has that key or none at all."""
    charge = shop.charge(Policy("order", scope="charges"))

    @idempotent(Policy("order", scope="charges", mode=mode), store=shop.store)
    def sell(order: str | None) -> Any:
        return charge("o-1")

    assert sell(order) == sell(order) == "charged 1"
    assert shop.charged == ["o-1"]


def test_recursion_by_way_of_another_function_is_one_too() -> None:
    """However many operations lie between, it would wait for itself."""
    shop = Shop("sync")
    depth = iter([True, False])
    charge: Any = shop.charge(name="charge", body=lambda: other("o-2") if next(depth) else None)
    other = shop.charge(name="other", body=lambda: charge("o-1"))

    assert charge("o-1") == "charged 1"
    assert shop.charged == ["o-1", "o-2", "o-1"]


def test_another_operation_in_a_body_is_its_own() -> None:
    """What surrounds it is another key's."""
    shop = Shop("sync")
    other = shop.charge(name="other")
    charge = shop.charge(body=lambda: other("o-2"))

    charge("o-1")

    assert shop.charged == ["o-1", "o-2"]
    assert len(list(shop.store.scan())) == 2


def test_observed_function_runs_each_time_and_tells(shop: Shop) -> None:
    """Whatever is wrong, observing changes nothing of what a function does."""
    told = []

    def receive(**about: Any) -> None:
        told.append(about["observed"])

    signals.replayed.connect(receive)
    charge = shop.charge(Policy("order", mode="observe"))

    assert charge("o-1") == charge("o-1") == "charged 1"
    assert charge(None) == "charged 1"
    assert shop.charged == ["o-1", "o-1", None]
    assert told == [True]
    signals.replayed.disconnect(receive)


@pytest.mark.parametrize("redacted", [True, False])
def test_what_is_not_observed_is_logged_as_the_policy_allows(
    shop: Shop, caplog: pytest.LogCaptureFixture, redacted: bool
) -> None:
    """Its reason names the error, and its text only where that may be told."""
    charge = shop.charge(Policy("order", mode="observe", private=redacted))

    charge(None)

    (line,) = [each.getMessage() for each in caplog.records if "not_observed" in each.getMessage()]
    assert ("KeyMissing(" in line) is not redacted


def test_function_that_is_switched_off_asks_no_store(shop: Shop) -> None:
    """It runs as it would without this library, and its attempt knows its key all the same."""
    keys = []

    def body() -> None:
        keys.append(current_attempt().key)

    charge = shop.charge(Policy("order", mode="off"), body)

    charge("o-1")
    charge("o-1")

    assert shop.charged == ["o-1", "o-1"]
    assert keys == [charge.idempotency_key_for("o-1")] * 2
    assert not list(shop.store.scan())


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_key_of_an_unprotected_body_stays_whatever_that_does_to_its_arguments(mode: Any) -> None:
    """A receiver that honours keys would take a changed one for another effect."""
    store = FaultyStore(MemoryStore(), "request lost", "request lost")  # under which observing runs without a claim

    @idempotent(Policy("order.id", mode=mode), store=store)
    def charge(order: dict[str, str]) -> list[str]:
        before = current_attempt().key
        order["id"] = "changed"
        return [before, current_attempt().key]

    expected = charge.idempotency_key_for({"id": "o-1"})  # type: ignore[attr-defined]
    assert charge({"id": "o-1"}) == [expected] * 2


def test_asking_for_a_key_tells_nobody_that_it_is_missing(shop: Shop) -> None:
    """No call came without one."""
    told = []

    def receive(**about: Any) -> None:
        told.append(about)

    signals.key_missing.connect(receive)
    with pytest.raises(KeyMissing):
        shop.charge().idempotency_key_for(None)
    shop.charge(Policy("order", mode="off"))(None)
    signals.key_missing.disconnect(receive)

    assert told == []


def test_call_in_flight_raises_at_once_or_after_a_wait(shop: Shop) -> None:
    """Both tell how long it can take; one that waits gets the result if the body ends in time."""
    begun, go_on = threading.Event(), threading.Event()

    def body() -> None:
        begun.set()
        go_on.wait(20)

    policy = Policy("order", backoff=0.01)
    charge = shop.charge(policy, body)
    running = threading.Thread(target=charge, args=("o-1",))
    running.start()
    begun.wait(20)

    with pytest.raises(InFlight):
        shop.charge(policy)("o-1")
    with pytest.raises(InFlight):
        shop.charge(policy, wait=0.05)("o-1")
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(shop.charge(policy, wait=20)("o-1")))
    waiting.start()
    go_on.set()
    running.join(20)
    waiting.join(20)

    assert answers == ["charged 1"]
    assert shop.charged == ["o-1"]


def test_wait_asks_ever_more_seldom_and_ends_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pause is what is left of it."""
    shop = Shop("sync")
    _die_in_the_body(shop, Policy("order"))
    pauses: list[float] = []
    shop.clock.on_sleep = pauses.append
    monkeypatch.setattr("celery_idempotent.integration.task.functions.clock", shop.clock)
    monkeypatch.setattr("celery_idempotent.integration.task.guard.random", SimpleNamespace(random=lambda: 0.0))

    with pytest.raises(InFlight):
        shop.charge(Policy("order", backoff=1), wait=3)("o-1")
    assert pauses == [1.0, 1.5, 0.5]


def test_record_names_trace_and_process_of_its_caller(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a thread asks the store: the trace is the one that the call belongs to."""
    trace = contextvars.ContextVar("trace", default="")
    monkeypatch.setattr("celery_idempotent.integration.events.read_trace", trace.get)
    charge = shop.charge()

    def call() -> None:
        trace.set("00-of-the-caller-01")
        charge("o-1")

    contextvars.Context().run(call)

    assert trace_of(shop.record) == "00-of-the-caller-01"
    assert process_of(shop.record) == this_process() != ""


def test_store_that_is_down_is_asked_by_one_call_at_a_time(shop: Shop) -> None:
    """Functions of one store share its circuit breaker."""
    charge, refund = shop.charge(name="charge"), shop.charge(name="refund")
    shop.store.faults.extend(["request lost"] * 1_000)

    for number in range(100):
        with pytest.raises(StoreUnavailable):
            (charge, refund)[number % 2](f"o-{number}")

    assert len(shop.store.swaps) < 100


def test_app_gives_store_policy_namespace_and_serialiser(shop: Shop) -> None:
    """One setting serves its tasks and its functions, and they can share an operation."""
    app = an_app(
        idempotency_store=shop.store, idempotency_policy=Policy("order", scope="pay"), idempotency_namespace="eu"
    )

    @app.task(base=IdempotentTask, name="charge", shared=False)
    def charge_task(order: str, cents: int = 1) -> str:
        return "never"

    @idempotent(app=app)
    def charge(order: str, cents: int = 1) -> str:
        return "by the function"

    assert charge("o-1") == "by the function"
    assert charge_task.apply(("o-1",)).get() == "by the function"
    assert charge.idempotency_key_for("o-1").startswith("eu:pay:1:")  # type: ignore[attr-defined]


def test_current_app_counts_when_the_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are imported before an app is configured."""

    @idempotent(Policy("order"))
    def charge(order: str) -> str:
        return "charged"

    app = an_app()
    monkeypatch.setattr("celery_idempotent.integration.task.guard.current_app", app)

    assert charge("o-1") == "charged"
    (record,) = app.conf.idempotency_store.scan()
    assert record.task == charge.name  # type: ignore[attr-defined]


def test_function_without_a_store_is_told_that_it_may_be_given_one() -> None:
    """Who has no app has no setting to set."""
    charge: Any = idempotent(Policy("order"), app=Celery(set_as_current=False), name="charge")(lambda order: "charged")

    with pytest.raises(PolicyError, match=r"may be given store=\.\.\."):
        charge("o-1")


def test_functions_of_one_url_share_a_store() -> None:
    """It is opened once in a process, at the first call."""
    first: Any = idempotent(Policy("order"), store="memory://shared", name="charge")(lambda order: "by the first")
    second: Any = idempotent(Policy("order"), store="memory://shared", name="charge")(lambda order: "by the second")

    assert (first("o-1"), second("o-1")) == ("by the first", "by the first")


def test_store_without_an_app_keeps_what_the_policy_says(shop: Shop) -> None:
    """Its own options count here, too, and its default keys by all arguments."""
    charge = shop.charge(Policy("order", private=True))

    assert charge("o-1") == "charged 1"
    assert charge("o-1") is None


@pytest.mark.parametrize("redacted", [True, False])
def test_store_without_an_app_keeps_no_text_that_the_policy_redacts(shop: Shop, redacted: bool) -> None:
    """An error can quote what is secret."""

    def body() -> None:
        raise Declined("of Ada's card")

    with pytest.raises(Declined):
        shop.charge(Policy("order", remember=(Declined,), private=redacted), body)("o-1")
    assert ("Ada" in str(shop.record)) is not redacted


def test_function_without_a_policy_is_keyed_by_all_arguments() -> None:
    """As a task is."""
    store = MemoryStore()
    charged = []

    @idempotent(store=store)
    def charge(order: str, cents: int) -> str:
        charged.append((order, cents))
        return "charged"

    charge("o-1", 1)
    charge("o-1", 2)
    charge("o-1", 1)

    assert charged == [("o-1", 1), ("o-1", 2)]


class Account:
    """Has methods of all three kinds."""

    store = MemoryStore()

    @idempotent(Policy("order"), store=store)
    def of_instance(self, order: str) -> list[str]:
        return [type(self).__name__, order]

    @classmethod
    @idempotent(Policy("order"), store=store)
    def of_class(cls, order: str) -> list[str]:
        return [cls.__name__, order]

    @staticmethod
    @idempotent(Policy("order"), store=store)
    def of_nobody(order: str) -> list[str]:
        return [order]


def test_methods_are_keyed_without_their_instance() -> None:
    """Which instance is called says nothing of the effect."""
    assert Account().of_instance("o-1") == Account().of_instance("o-1") == ["Account", "o-1"]
    assert Account.of_class("o-1") == Account().of_class("o-1") == ["Account", "o-1"]
    assert Account.of_nobody("o-1") == Account().of_nobody("o-1") == ["o-1"]
    assert Account().of_instance.idempotency_key_for("o-1").startswith(f"{__name__}.Account.of_instance:1:")  # type: ignore[attr-defined]


def test_function_that_was_written_in_another_is_no_method() -> None:
    """Whatever it calls its first argument, that is an argument."""

    @idempotent(store=MemoryStore())
    def charge(self: str) -> str:
        return self

    assert (charge("o-1"), charge("o-2")) == ("o-1", "o-2")


@pytest.mark.parametrize("policy", [None, Policy()])
def test_method_has_to_name_its_key(policy: Policy | None) -> None:
    """Two instances may mean two effects, and all arguments of both can be equal."""
    with pytest.raises(PolicyError, match="two may mean two effects"):

        class Account:
            @idempotent(policy, store=MemoryStore())
            def charge(self, cents: int) -> None: ...


def a_generator(order: str) -> Iterator[str]:
    yield order


async def an_async_generator(order: str) -> AsyncIterator[str]:
    yield order


class CallableGenerator:
    def __call__(self, order: str) -> Iterator[str]:
        yield order


@pytest.mark.parametrize(
    ("function", "named", "remedy"),
    [
        (a_generator, "function", "return a list"),
        (an_async_generator, "function", "return a list"),
        (functools.partial(a_generator), "function", "return a list"),
        (CallableGenerator(), "function", "return a list"),
        (contextlib.contextmanager(a_generator), "function", "return a list"),
        (contextlib.asynccontextmanager(an_async_generator), "function", "return a list"),
        (Account, "function", "must be a function"),
        ("charge", "function", "must be a function"),
        (staticmethod(len), "function", "write @staticmethod above"),
        (classmethod(lambda cls: cls), "function", "write @classmethod above"),
        (SimpleNamespace(apply_async=1), "function", "base=IdempotentTask"),
        (lambda order: 1, "name", "write name="),
        (functools.partial(len), "name", "write name="),
    ],
    ids=[
        *("generator", "async generator", "partial of a generator", "object that is one"),
        *("context manager", "async context manager", "class", "text"),
        *("staticmethod", "classmethod", "task", "lambda", "partial"),
    ],
)
def test_what_cannot_be_protected_is_refused_where_it_is_written(function: Any, named: str, remedy: str) -> None:
    """Before any call, with what to write instead."""
    with pytest.raises(PolicyError, match=remedy) as refused:
        idempotent(Policy("order"), store="memory://")(function)
    assert refused.value.option == named


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "order"}, "policy"),
        ({"policy": len}, "policy"),
        ({"wait": -1}, "wait"),
        ({"store": "memory://", "app": Celery(set_as_current=False)}, "store"),
        ({"app": "shop"}, "app"),
    ],
    ids=["text for a policy", "no brackets", "negative wait", "two stores", "name of an app"],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], named: str) -> None:
    """Each error names its option; ``@idempotent`` without brackets is one of them."""
    with pytest.raises(PolicyError) as refused:
        idempotent(**options)
    assert refused.value.option == named


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (Policy("order", publish="once"), "publish"),
        (Policy("order", on_conflict="skip"), "on_conflict"),
        (Policy("no_such"), "key"),
    ],
)
def test_policy_that_cannot_be_a_functions_is_refused(policy: Policy, named: str) -> None:
    """What is about messages means nothing here, and keys name arguments."""
    with pytest.raises(PolicyError, match="charge") as refused:

        @idempotent(policy, store="memory://")
        def charge(order: str) -> None: ...

    assert refused.value.option == named


@pytest.mark.parametrize("unfinished", [lambda: (each for each in [1]), lambda: asyncio.sleep(0)])
def test_unfinished_result_is_refused(shop: Shop, unfinished: Callable[[], Any]) -> None:
    """Nobody would ever run it."""
    charge = shop.charge(body=unfinished)

    with pytest.raises(PolicyError, match="unfinished"):
        charge("o-1")
    assert shop.record.status is Status.RELEASED


def test_partials_and_callable_objects_can_be_protected(shop: Shop) -> None:
    """They need a name; what is awaited stays so."""

    class Charge:
        async def __call__(self, order: str) -> str:
            return "awaited"

    def charge(cents: int, order: str) -> str:
        return f"{cents}"

    options: Any = {"store": shop.store}
    assert idempotent(Policy("order"), name="partial", **options)(functools.partial(charge, 5))("o-1") == "5"
    awaited: Any = idempotent(Policy("order"), name="object", **options)(Charge())
    assert asyncio.iscoroutinefunction(awaited)
    assert asyncio.run(awaited("o-1")) == "awaited"


@pytest.mark.parametrize(
    ("main", "name"),
    [
        (SimpleNamespace(__spec__=SimpleNamespace(name="shop.charges")), "shop.charges"),
        (SimpleNamespace(__spec__=None, __file__="/srv/charges.py"), "charges"),
        (SimpleNamespace(__spec__=None), "__main__"),
    ],
)
def test_script_is_named_as_others_import_it(monkeypatch: pytest.MonkeyPatch, main: Any, name: str) -> None:
    """Under another name the same call would have another key, and happen again."""

    def charge(order: str) -> None: ...

    charge.__module__, charge.__qualname__ = "__main__", "charge"
    monkeypatch.setitem(sys.modules, "__main__", main)

    assert idempotent(Policy("order"), store="memory://")(charge).name == f"{name}.charge"  # type: ignore[attr-defined]


def test_guarantee_speaks_of_the_function(shop: Shop) -> None:
    """As a task's does."""
    policy = Policy("order", effects={"text": AtMostOnce()})
    charge = shop.charge(policy)

    assert charge.guarantee() == policy.guarantee(charge.name)
    assert charge.guarantee().startswith(f"{charge.name}: calls with the same idempotency key are one operation")


def test_operation_in_doubt_stops(shop: Shop) -> None:
    """A process that died in its body leaves what a person has to resolve, under a policy that says so."""
    policy = Policy("order", on_takeover="refuse")
    _die_in_the_body(shop, policy)
    shop.clock.advance(120_000)

    with pytest.raises(OutcomeUnknown):
        shop.charge(policy)("o-1")
    with pytest.raises(OutcomeUnknown):
        shop.charge(policy)("o-1")
    assert shop.charged == ["o-1"]


def test_failure_of_another_type_is_told_by_name(shop: Shop) -> None:
    """A type that this policy does not remember is never built from a record."""

    def body() -> Any:
        raise Declined("no")

    with pytest.raises(Declined):
        shop.charge(Policy("order", remember=(Declined,)), body)("o-1")
    with pytest.raises(ReplayedFailure, match="Declined"):
        shop.charge(Policy("order"))("o-1")
