"""Nothing runs unprotected in silence: each way around the guard works as if there were none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import wraps
from threading import Thread
from typing import Any

import pytest
from celery import Task, chain, chord, group
from celery.app.task import Context
from celery.contrib.testing.mocks import task_message_from_sig
from celery.worker.request import Request

from celery_idempotent import IdempotentMixin, IdempotentTask, Policy, current_attempt
from celery_idempotent.engine.attempt import Execution
from celery_idempotent.errors import InFlight, KeyMissing, PolicyError
from celery_idempotent.integration.context import arrival_of, note_list
from celery_idempotent.integration.headers import KEY_HEADER
from celery_idempotent.stores.memory import MemoryStore
from tests.support.deliveries import Ended, Shop, deliver, settle

context: list[str] = []


@contextmanager
def app_context() -> Iterator[None]:
    context.append("pushed")
    try:
        yield
    finally:
        context.pop()


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    with app_context():
        return self.run(*args, **kwargs)


FlaskTask: Any = type("FlaskTask", (IdempotentTask,), {"__call__": _run})  # the recipe of Flask's documentation, on top


class Twice(FlaskTask):
    """Two, of which the upper one asks what is below it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with app_context():
            return super().__call__(*args, **kwargs)


Below: Any = type("Below", (), {"__call__": _run})  # a base that is no task, and does not ask what is below it
ON_TOP: Any = type("OnTop", (IdempotentMixin, Below, Task), {})


@pytest.mark.parametrize(("base", "depth"), [(FlaskTask, 1), (Twice, 2), (ON_TOP, 1)])
def test_call_of_the_authors_is_behind_the_gate(shop: Shop, base: type[Task], depth: int) -> None:
    """Whether it asks ``super()`` or calls ``self.run``: its context is there, and the claim is around all of it."""
    task = shop.task(name="t", base=base, autoretry_for=(ConnectionError,), retry_backoff=False)
    numbers = []

    def fulfil(order_id: str, cents: int) -> str:
        assert len(context) == depth
        numbers.append(current_attempt().step("charge", lambda step: current_attempt().number))
        if task.request.retries == 0:
            raise ConnectionError
        return order_id

    shop.does = fulfil
    for _ in range(2):
        assert settle(shop.app, task, deliver(task, "o-1")) == Ended("SUCCESS", "o-1")
    assert numbers == [1, 1]


def test_recursion_and_function_calls_go_through_a_call_of_the_authors(shop: Shop) -> None:
    """A call within the body, also within an item of a list, is a function call of its own, with its own key."""
    keys = []

    def down(n: int, cents: int) -> int:
        keys.append(current_attempt().key)
        return 0 if n == 0 else 1 + int(task(n - 1)) + int(task(n - 1))

    shop.does = down
    task = shop.task(name="t", base=Twice)
    expected = [task.idempotency_key_for(n) for n in (2, 1, 0, 0, 1, 0, 0)]
    assert deliver(task, 2).value == 3
    assert keys == expected
    assert task(1) == 1
    keys.clear()
    assert deliver(shop.app.tasks["celery.map"], task.s(), [3]).value == [7]
    assert keys[-7:] == expected


def test_copied_mark_of_the_gate_opens_no_way_around_it(shop: Shop) -> None:
    """``functools.wraps`` copies it, annotations bring a call when bound; nor does an unknown name or Celery's."""

    class Wrapping(IdempotentTask):
        @wraps(IdempotentTask.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    shop.app.conf.task_annotations = {"annotated": {"__call__": _run}}
    names: dict[str, Any] = {"wrapping": Wrapping, "annotated": IdempotentTask, "celery.mine": IdempotentTask}
    tasks = [shop.task(name=name, base=base) for name, base in names.items()]
    shop.app.tasks.pop("charge")
    for task in (*tasks, shop.charge):
        assert [deliver(task, "o-1").value for _ in range(2)] == ["charged 1"] * 2
    assert shop.runs == ["o-1"] * 4


def test_redelivery_is_no_recursion_where_an_execution_was_left_behind(shop: Shop, monkeypatch: Any) -> None:
    """A time limit that strikes as a body is entered or left does so; the next delivery in this process is guarded."""

    def deliver_twice() -> None:
        shop.charge.apply(("n",), task_id="same")
        monkeypatch.undo()
        shop.charge.apply(("n",), task_id="same")

    monkeypatch.setattr(Execution, "__exit__", lambda *_: None)
    copy_context().run(deliver_twice)
    assert shop.runs == ["n"]


def test_task_class_of_a_registered_one_is_another_task(shop: Shop) -> None:
    """Celery lets it inherit the stack of requests; its identity is its own, with its own scope and policy."""

    class Charge(IdempotentTask):
        name = "shop.charge"
        idempotent = Policy("order_id")

        def run(self, order_id: int) -> str:
            return current_attempt().key

    class Refund(Charge):
        name = "shop.refund"
        idempotent = Policy("refund_id")

        def run(self, refund_id: int) -> str:
            return current_attempt().key

    charge, refund = (shop.app.register_task(each()) for each in (Charge, Refund))
    keys = [charge.idempotency_key_for(1), refund.idempotency_key_for(1)]
    assert [deliver(each, 1).value for each in (charge, refund) * 2] == keys * 2


@pytest.mark.parametrize("second", ["b", "a"], ids=["another message", "the message once more"])
def test_a_request_that_serves_many_messages_is_each_time_that_of_its_message(shop: Shop, second: str) -> None:
    """celery-aio-pool updates one request for all messages of a task: what was noted of the one is not the next's."""
    shop.does = lambda order_id, cents: order_id
    request = Context(id="a", args=[1], kwargs={}, called_directly=False, properties={})
    shop.charge.request_stack.push(request)
    assert shop.charge(1) == 1
    request.update(args=[2], properties={}, id=second)
    assert shop.charge(2) == 2
    note_list(request)
    noted = arrival_of(request)
    note_list(request)
    assert arrival_of(request) is noted
    shop.charge.request_stack.pop()


def test_request_class_of_the_users_is_kept(shop: Shop) -> None:
    """It tells the content type as well, also of a mock of Celery's testing kit."""
    my_request = type("MyRequest", (Request,), {})
    own = shop.task(name="own", Request=my_request)
    shop.charge.delay("o-1")
    (message,) = shop.published()
    assert shop.charge.Request == "celery_idempotent.integration.task.requests:IdempotentRequest"
    assert issubclass(own.Request, my_request)
    for each in (message, task_message_from_sig(shop.app, shop.charge.s("o-1"))):
        request = own.Request(each, app=shop.app, task=own)
        assert request.request_dict["idempotency_content_type"] == "application/json"


@pytest.mark.parametrize(
    ("key", "store"), [(lambda order_id, cents: 1 / 0, MemoryStore()), ("order_id", "nowhere://")], ids=["key", "store"]
)
def test_observing_changes_nothing_of_what_a_task_does(key: Any, store: Any) -> None:
    """Neither a key function that raises, nor a store that cannot be opened."""
    shop = Shop(Policy(key, mode="observe"), idempotency_store=store)
    assert shop.deliver("o-1") == Ended("SUCCESS", "charged 1")


def test_two_services_on_one_store_are_kept_apart_by_a_namespace() -> None:
    """Their tasks may have one name; the record names its app."""
    store, results = MemoryStore(), {}
    for name in ("shop", "depot"):
        shop = Shop(idempotency_store=store, idempotency_namespace=name)
        shop.app.main, shop.does = name, lambda *_: name  # noqa: B023
        results[name] = shop.deliver("o-1").value
        assert shop.charge.idempotency_key_for("o-1").startswith(f"{name}:charge:1:")
    assert results == {"shop": "shop", "depot": "depot"}
    assert {record.app for record in store.scan()} == {"shop", "depot"}


def test_each_item_is_an_operation(shop: Shop) -> None:
    """The same as if it had been sent by itself, and the whole list gives the results that Celery would give."""
    shop.does, tuples = lambda order_id, cents: f"charged {order_id}", [("o-1",), ("o-2",)]
    for canvas in (shop.charge.map(["o-1", "o-2"]), shop.charge.starmap(tuples), shop.charge.chunks(tuples, 2)):
        canvas.apply_async()
        assert shop.redeliver()[0].value == ["charged o-1", "charged o-2"]
    assert shop.deliver("o-1").value == "charged o-1"
    assert shop.runs == ["o-1", "o-2"]
    # A key of an item, or none: the one of a whole list would be every item's, or nobody's.
    keyed = shop.task(Policy("order_id"), name="keyed")
    assert isinstance(deliver(shop.app.tasks["celery.map"], keyed.s(), [None]).value, KeyMissing)
    keyed.map(["o-1"]).apply_async(idempotency_key="k")
    (ended,) = shop.redeliver()
    assert (ended.state, ended.value.option, len(shop.runs)) == ("FAILURE", "idempotency_key", 2)


def test_item_in_flight_postpones_its_list_as_it_came() -> None:
    """The items that are done are replayed when it comes again, whatever bodies did to them; ``skip`` is not for it."""
    shop, ended = Shop(), list[Ended]()

    def charge(order: dict[str, Any]) -> str:
        shop.runs.append(order["id"])
        order["charge"] = "c-1"  # a changed item would be another operation
        if shop.runs == ["o-2"]:
            task.map([{"id": "o-1"}, {"id": "o-2"}]).apply_async()
            another_process = Thread(target=lambda: ended.extend(shop.redeliver()))
            another_process.start()
            another_process.join()
        return str(order["id"])

    task = shop.task(Policy("order.id", on_conflict="skip"), charge, "t")
    deliver(task, {"id": "o-2"})

    assert (ended[0].state, type(ended[0].value.exc)) == ("RETRY", InFlight)
    assert shop.redeliver()[0].value == ["o-1", "o-2"]
    assert shop.runs == ["o-2", "o-1"]


KEY = {"idempotency_key": "k"}


def _members(task: Any, **key: str) -> Any:
    return group(task.s("o-1").set(**key), task.s("o-2"))


WHOLE: list[Callable[[Any], Any]] = [
    lambda task: _members(task).set(**KEY).apply_async(),
    lambda task: chord(_members(task), task.s()).set(**KEY).apply_async(),
    lambda task: group(chain(task.s("o-1"), task.s()), task.s("o-2")).apply_async(**KEY),
    lambda task: chain(_members(task), task.s()).apply_async(**KEY),
    lambda task: _members(task, idempotency_key="k-1").apply_async(**KEY),
    lambda task: chord(_members(task), task.s()).set(headers=KEY).apply_async(),
]
TO_FOLLOW: list[Callable[[Any], Any]] = [
    # A worker that refuses it has run the first task, which then counts as failed, and a chain goes no further.
    lambda task: chain(task.s("o-0"), _members(task).set(**KEY)).apply_async(),
    lambda task: chord([task.s("o-0")], _members(task).set(**KEY)).apply_async(),
    lambda task: task.apply_async(("o-0",), link=_members(task).set(**KEY)),
]


@pytest.mark.parametrize(
    ("how", "is_eager"),
    [*((each, eager) for each in WHOLE for eager in (False, True)), *((each, False) for each in TO_FOLLOW)],
)
def test_key_given_to_a_whole_group_is_refused_before_anything_is_published(how: Any, is_eager: bool) -> None:
    """One member would run and the others get its result, as nothing tells them apart under that key."""
    shop = Shop(Policy(fingerprint=None), task_always_eager=is_eager, task_eager_propagates=True)
    with pytest.raises(PolicyError) as raised:
        how(shop.charge)
    assert (raised.value.option, shop.runs, shop.published(), [*shop.memory.scan()]) == ("idempotency_key", [], [], [])
    assert "to a whole group" in raised.value.remedy


@pytest.mark.parametrize("is_eager", [False, True], ids=["published", "eager"])
def test_each_member_of_a_group_or_chord_may_have_a_key_of_its_own(is_eager: bool) -> None:
    """Also one that was frozen before."""
    shop = Shop(Policy(fingerprint=None), task_always_eager=is_eager, task_eager_propagates=True)
    shop.does = lambda order_id, cents: order_id
    frozen = shop.charge.s(3)
    frozen.freeze()
    keyed = [shop.charge.s(n).set(idempotency_key=f"k-{n}") for n in (1, 2)]
    result = group(*keyed, frozen.set(idempotency_key="k-3")).apply_async()
    if is_eager:
        assert result.get() == [1, 2, 3]
    else:
        assert [each.headers[KEY_HEADER] for each in shop.published()] == ["k-1", "k-2", "k-3"]
