"""Nothing runs unprotected in silence: each way around the guard works, or is refused with the line to change."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import wraps
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery, Task, chain, chord, group
from celery.app.task import Context
from celery.contrib.testing.mocks import task_message_from_sig
from celery.worker.request import Request

from celery_idempotent import (
    IdempotentMixin,
    IdempotentTask,
    InFlight,
    KeyMissing,
    Policy,
    PolicyError,
    current_attempt,
)
from celery_idempotent.engine.attempt import Execution
from celery_idempotent.integration.context import arrival_of, note_list
from celery_idempotent.integration.headers import KEY_HEADER
from celery_idempotent.integration.operating.worker import StoreCheck, check
from celery_idempotent.integration.task.requests import IdempotentRequest
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import Ended, an_app, deliver, published, redeliver, settle


@pytest.fixture
def app() -> Celery:
    return an_app()


def _name() -> str:
    return f"task-{uuid4()}"


context: list[str] = []


@contextmanager
def app_context() -> Iterator[None]:
    context.append("pushed")
    try:
        yield
    finally:
        context.pop()


class FlaskTask(IdempotentTask):
    """The recipe of Flask's documentation, on top."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with app_context():
            return self.run(*args, **kwargs)


class Polite(IdempotentTask):
    """One that asks what is below it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with app_context():
            return super().__call__(*args, **kwargs)


class Twice(Polite):
    """Two of them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with app_context():
            return super().__call__(*args, **kwargs)


class Below:
    """A base that is no task, and does not ask what is below it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with app_context():
            return self.run(*args, **kwargs)  # type: ignore[attr-defined]


class OnTop(IdempotentMixin, Below, Task):
    """The mixin first."""


class SecondPlace(Below, IdempotentTask):
    """A base that is no task of Celery's goes before."""


@pytest.mark.parametrize(("base", "depth"), [(FlaskTask, 1), (Polite, 1), (Twice, 2), (OnTop, 1), (SecondPlace, 1)])
def test_call_of_the_authors_is_behind_the_gate(app: Celery, base: type[Task], depth: int) -> None:
    """Whether it asks ``super()`` or calls ``self.run``: its context is there, and the claim is around all of it."""
    runs = []

    def fulfil(self: Any, order_id: str) -> str:
        assert len(context) == depth
        runs.append(current_attempt().step("charge", lambda step: current_attempt().number))
        if self.request.retries == 0:
            raise ConnectionError
        return order_id

    task = app.task(
        bind=True, base=base, name=_name(), shared=False, autoretry_for=(ConnectionError,), retry_backoff=False
    )(fulfil)

    for _ in range(2):
        assert settle(app, task, deliver(task, "o-1")) == Ended("SUCCESS", "o-1")

    assert runs == [1, 1]


@pytest.mark.parametrize("base", [FlaskTask, Polite, Twice])
def test_recursion_and_function_calls_go_through_a_call_of_the_authors(app: Celery, base: type[Task]) -> None:
    """A call within the body is a function call of its own, with a key of its own."""
    keys = []

    def down(self: Any, n: int) -> int:
        keys.append(current_attempt().key)
        return 0 if n == 0 else 1 + int(self(n - 1))

    task = app.task(bind=True, base=base, name=_name(), shared=False)(down)

    assert deliver(task, 2).value == 2
    assert keys == [task.idempotency_key_for(n) for n in (2, 1, 0)]
    assert task(1) == 1


def test_redelivery_is_no_recursion_where_an_execution_was_left_behind(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit that strikes as a body is entered or left does so; the next delivery in this process is guarded."""
    runs: list[str] = []

    def body(name: str) -> None:
        runs.append(name)

    task = app.task(base=IdempotentTask, name=_name(), shared=False)(body)

    def deliver_twice() -> None:
        task.apply(("n",), task_id="same")
        monkeypatch.undo()
        task.apply(("n",), task_id="same")

    monkeypatch.setattr(Execution, "__exit__", lambda *_: None)
    copy_context().run(deliver_twice)

    assert runs == ["n"]


def test_mixin_in_second_place_is_refused() -> None:
    """Celery's own ``__call__`` would go before the guard, and so would all else of Celery's."""

    class MyBase(Task):
        pass

    with pytest.raises(PolicyError, match=r"write class Charge\(IdempotentMixin, MyBase\)"):

        class Charge(MyBase, IdempotentMixin):
            pass


def test_policy_without_a_base_is_refused_when_bound(app: Celery) -> None:
    """Celery takes any option of a task."""

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match="write base=IdempotentTask"):
        app.task(name=_name(), shared=False, idempotent=Policy(key="order_id"), lazy=False)(charge)

    class Charge(Task):
        name = _name()
        idempotent = Policy()

        def run(self) -> None: ...

    with pytest.raises(PolicyError, match="write base=IdempotentTask"):
        app.register_task(Charge())


def test_policy_of_something_that_is_no_task_is_left_alone() -> None:
    """A class may hold policies for whatever purpose."""

    class Defaults:
        idempotent = Policy()
        payments = Policy("order_id")

    assert Defaults.payments.key == "order_id"


def test_policy_under_another_name_is_refused(app: Celery) -> None:
    """A typo in the one option."""

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match="idempotant=Policy.*the option is called idempotent"):
        app.task(name=_name(), shared=False, base=IdempotentTask, idempotant=Policy(), lazy=False)(charge)


def test_policy_that_annotations_bring_is_checked(app: Celery) -> None:
    """They are set after the class was made."""
    name = _name()
    app.conf.task_annotations = {name: {"idempotent": "order_id"}}

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match="must be a Policy"):
        app.task(name=name, shared=False, base=IdempotentTask, lazy=False)(charge)


@pytest.mark.parametrize(
    "option",
    [
        "idempotencykey",
        "idempotency-key",
        "Idempotency_Key",
        "idempotent",
        "idempotency",
        "idempotence_key",
    ],
)
def test_misspelt_key_is_refused_when_publishing(app: Celery, option: str) -> None:
    """Celery would make a property of the message of it, which nobody reads."""

    def charge(order_id: str) -> None: ...

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)

    for publish in (task.apply_async, task.apply, task.s("o-1").apply_async):
        with pytest.raises(PolicyError, match="there is idempotency_key="):
            publish(**{option: "k"})
    with pytest.raises(PolicyError, match="there is idempotency_key="):
        task.s("o-1").set(**{option: "k"}).delay()
    with pytest.raises(PolicyError, match="there is idempotency_key="):
        task.apply_async(("o-1",), headers={"Idempotency-Key": "k"})
    assert published(app) == []


def test_other_options_and_headers_are_left_alone(app: Celery) -> None:
    """Only what looks like the key is taken for a mistake."""

    def charge(order_id: str) -> None: ...

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)

    task.apply_async(("o-1",), countdown=0, priority=3, MessageGroupId="g", headers={"x-request-key": "r", "id_key": 1})

    (message,) = published(app)
    assert message.headers["x-request-key"] == "r"


LATE = {"CELERY_TASK_ACKS_LATE": True, "CELERY_TASK_REJECT_ON_WORKER_LOST": True}


def _configured(namespace: str | None, **settings: Any) -> Celery:
    module = ModuleType("settings")
    vars(module).update(settings)
    app = Celery(f"app-{uuid4().hex[:8]}", set_as_current=False, broker="memory://")
    app.config_from_object(module, namespace=namespace)
    return app


@pytest.mark.parametrize(
    ("namespace", "setting", "right"),
    [
        (None, "idempotency_polcy", "idempotency_policy"),
        (None, "IDEMPOTENCY_POLICY", "idempotency_policy"),
        (None, "idempotency_ttl", "idempotency_policy"),
        ("CELERY", "CELERY_IDEMPOTENCY_POLCY", "CELERY_IDEMPOTENCY_POLICY"),
        ("CELERY", "IDEMPOTENCY_POLICY", "CELERY_IDEMPOTENCY_POLICY"),
    ],
)
def test_unknown_setting_is_refused_when_a_task_is_bound(namespace: str | None, setting: str, right: str) -> None:
    """Nothing would read it, and the tasks would run under defaults."""
    app = _configured(namespace, **{setting: Policy()})

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match=f"^{setting}=.*nothing reads this setting; there are .*{right}, "):
        app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False)(charge)


def test_setting_of_another_library_is_left_alone() -> None:
    """Under a namespace, what is not in it belongs to somebody else."""
    app = _configured("CELERY", IDEMPOTENCY_KEY={"STORAGE": "x"}, CELERY_IDEMPOTENCY_STORE="memory://", **LATE)

    def charge(order_id: str) -> None: ...

    assert app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False)(charge).guarantee()


@pytest.mark.parametrize("kind", ["map", "starmap", "chunks"])
def test_each_item_is_an_operation(app: Celery, kind: str) -> None:
    """The same as if it had been sent by itself, and the whole list gives the results that Celery would give."""
    runs = []

    def charge(order_id: str) -> str:
        runs.append(order_id)
        return f"charged {order_id}"

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    items = ["o-1", "o-2"]
    for _ in range(2):
        if kind == "map":
            task.map(items).apply_async()
        elif kind == "starmap":
            task.starmap([(each,) for each in items]).apply_async()
        else:
            task.chunks([(each,) for each in items], 2).apply_async()
        (message,) = published(app)
        assert redeliver(app, message).value == ["charged o-1", "charged o-2"]

    assert runs == items
    assert deliver(task, "o-1").value == "charged o-1"
    assert runs == items


def test_item_of_a_map_within_an_item_is_an_operation_of_its_own(app: Celery) -> None:
    """It is no recursion of the item around it."""
    runs = []

    def charge(order_id: str) -> None:
        runs.append(order_id)

    def book(order_id: str) -> None:
        charges.map([order_id, order_id]).apply(throw=True)

    charges = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    books = app.task(name=_name(), shared=False, base=IdempotentTask)(book)

    books.map(["o-1", "o-2"]).apply(throw=True)

    assert runs == ["o-1", "o-2"]


def test_item_in_flight_postpones_its_list(app: Celery) -> None:
    """The items that are done are replayed when it comes again; ``on_conflict`` is not the list's."""
    store: MemoryStore = app.conf.idempotency_store
    runs = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        if order_id == "o-2" and len(runs) == 1:
            self.starmap([("o-1",), ("o-2",)]).apply_async()
            (message,) = published(app)
            another_process = Thread(target=lambda: ended.append(redeliver(app, message)))
            another_process.start()
            another_process.join()
        return order_id

    ended: list[Ended] = []
    task = app.task(bind=True, name=_name(), shared=False, base=IdempotentTask, idempotent=Policy(on_conflict="skip"))(
        charge
    )

    deliver(task, "o-2")

    assert ended[0].state == "RETRY"
    assert isinstance(ended[0].value.exc, InFlight)
    (again,) = published(app)
    assert redeliver(app, again).value == ["o-1", "o-2"]
    assert runs == ["o-2", "o-1"]
    assert {record.status for record in store.scan()} == {Status.COMPLETED}


def test_item_under_other_modes(app: Celery) -> None:
    """Observed items run each time; items of a policy that is off are function calls."""
    runs = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(current_attempt().number)
        return order_id

    for policy, numbers in ((Policy(mode="observe"), [1, 0]), (Policy(mode="off"), [0, 0])):
        runs.clear()
        task = app.task(bind=True, name=_name(), shared=False, base=IdempotentTask, idempotent=policy)(charge)
        for _ in range(2):
            assert deliver(app.tasks["celery.map"], task.s(), ["o-1"]).value == ["o-1"]
        assert runs == numbers


def test_function_call_within_an_item_is_a_function_call(app: Celery) -> None:
    """Also behind a ``__call__`` of the author's, which Celery does not see."""
    inner_runs = []

    def inner(n: int) -> int:
        inner_runs.append(n)
        return n

    inner_task = app.task(name=_name(), shared=False, base=FlaskTask)(inner)

    def outer(n: int) -> list[int]:
        return [inner_task(n), inner_task(n)]

    outer_task = app.task(name=_name(), shared=False, base=FlaskTask)(outer)

    assert deliver(app.tasks["celery.map"], outer_task.s(), [1]).value == [[1, 1]]
    assert inner_runs == [1, 1]


def test_key_for_a_whole_list_is_refused(app: Celery) -> None:
    """It would be every item's, or nobody's."""

    def charge(order_id: str) -> str:
        return order_id

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    task.map(["o-1"]).apply_async(idempotency_key="k")
    (message,) = published(app)

    ended = redeliver(app, message)

    assert ended.state == "FAILURE"
    assert "each item is an operation of its own" in str(ended.value)


def test_item_without_a_key_runs_nothing(app: Celery) -> None:
    """As by itself."""

    def charge(order_id: str | None) -> None:
        raise AssertionError

    task = app.task(name=_name(), shared=False, base=IdempotentTask, idempotent=Policy("order_id"))(charge)

    assert isinstance(deliver(app.tasks["celery.map"], task.s(), [None]).value, KeyMissing)


class _Batches(Task):  # as celery-batches': it collects messages and calls the body itself
    def Strategy(self, task: Any, app: Celery, consumer: Any) -> Any:  # noqa: N802
        raise NotImplementedError


class _Traced(Task):
    @property
    def __trace__(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("base", [_Batches, _Traced])
@pytest.mark.parametrize("bases", [(IdempotentMixin, 0), (0, IdempotentMixin), (IdempotentTask, 0)])
def test_base_class_that_runs_bodies_by_itself_is_refused(base: type, bases: tuple[Any, ...]) -> None:
    """Wherever it stands: its calls would go around the guard, while the worker says that the task is protected."""
    with pytest.raises(PolicyError, match=rf"base=T: {base.__name__} runs bodies by itself"):
        type("T", tuple(each or base for each in bases), {})


@pytest.mark.parametrize("brought_by", ["option", "annotation"])
def test_task_that_is_given_a_strategy_is_refused(app: Celery, brought_by: str) -> None:
    """When it is defined or bound."""

    def charge() -> None: ...

    given: dict[str, Any] = {"option": {}, "annotation": {}} | {brought_by: {"Strategy": "shop.batches:Strategy"}}
    app.conf.task_annotations = {"*": given["annotation"]}
    options = {"base": IdempotentTask, "lazy": False, "shared": False, **given["option"]}
    with pytest.raises(PolicyError, match="runs bodies by itself, by a Strategy of its own"):
        app.task(name=_name(), **options)(charge)


@pytest.mark.parametrize("second", [{"id": "b"}, {"id": "a"}], ids=["another message", "the message once more"])
def test_a_request_that_serves_many_messages_is_each_time_that_of_its_message(
    app: Celery, second: dict[str, Any]
) -> None:
    """celery-aio-pool updates one request for all messages of a task: what was noted of the one is not the next's."""

    def charge(order_id: int) -> int:
        return order_id

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    request = Context(id="a", args=[1], kwargs={}, called_directly=False, properties={})
    task.request_stack.push(request)
    assert task(1) == 1
    request.update(args=[2], properties={}, **second)
    assert task(2) == 2

    note_list(request)
    noted = arrival_of(request)
    note_list(request)
    assert arrival_of(request) is noted
    task.request_stack.pop()


@pytest.mark.parametrize("is_eager", [False, True], ids=["published", "eager"])
@pytest.mark.parametrize(
    "how",
    ["group", "set", "chord", "chord set", "inner", "of chains", "in a chain", "own", "headers", "chord headers"],
)
def test_key_given_to_a_whole_group_is_refused_before_anything_is_published(
    app: Celery, how: str, is_eager: bool
) -> None:
    """One member would run and the others get its result, as nothing tells them apart under that key."""
    runs = []

    def charge(order_id: Any) -> Any:
        runs.append(order_id)
        return order_id

    app.conf.update(task_always_eager=is_eager, task_eager_propagates=True)
    task = app.task(name=_name(), shared=False, base=IdempotentTask, idempotent=Policy(fingerprint=None))(charge)
    members, body = group(task.s("o-1"), task.s("o-2")), task.s()
    keyed = group(task.s("o-1").set(idempotency_key="k-1"), task.s("o-2").set(idempotency_key="k-2"))
    shared = {"idempotency_key": "k"}
    canvas: Any = {
        "group": lambda: members.apply_async(**shared),
        "set": lambda: members.set(**shared).apply_async(),
        "chord": lambda: chord(members, body).apply_async(**shared),
        "chord set": lambda: chord(members, body).set(**shared).apply_async(),
        "inner": lambda: group(group(task.s("o-1")), task.s("o-2")).apply_async(**shared),
        "of chains": lambda: group(chain(task.s("o-1"), body), task.s("o-2")).apply_async(**shared),
        "in a chain": lambda: chain(members, body).apply_async(**shared),
        "own": lambda: keyed.apply_async(**shared),
        "headers": lambda: members.apply_async(headers=shared),
        "chord headers": lambda: chord(members, body).set(headers=shared).apply_async(),
    }

    with pytest.raises(PolicyError, match="to a whole group"):
        canvas[how]()
    assert (runs, published(app), app.conf.idempotency_store._records) == ([], [], {})


def test_key_of_a_group_that_is_to_follow_is_refused_before_anything_is_published(app: Celery) -> None:
    """A worker that refuses it has run the first task, which then counts as failed, and a chain goes no further."""

    def charge(order_id: Any) -> None: ...

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    members = group(task.s("o-1"), task.s("o-2")).set(idempotency_key="k")

    with pytest.raises(PolicyError, match="to a whole group"):
        chain(task.s("o-0"), members).apply_async()
    with pytest.raises(PolicyError, match="to a whole group"):
        chord([task.s("o-0")], members).apply_async()
    with pytest.raises(PolicyError, match="to a whole group"):
        task.apply_async(("o-0",), link=members)
    assert published(app) == []


@pytest.mark.parametrize("is_eager", [False, True], ids=["published", "eager"])
def test_each_member_of_a_group_or_chord_may_have_a_key_of_its_own(app: Celery, is_eager: bool) -> None:
    """Also of one chord within the body of a task that was given another key."""

    def charge(order_id: Any) -> Any:
        return order_id

    app.conf.update(task_always_eager=is_eager, task_eager_propagates=True)
    task = app.task(name=_name(), shared=False, base=IdempotentTask, idempotent=Policy(fingerprint=None))(charge)
    keyed = [task.s(n).set(idempotency_key=f"k-{n}") for n in (1, 2)]
    frozen = task.s(3)
    frozen.freeze()
    result = group(*keyed, frozen.set(idempotency_key="k-3")).apply_async()
    if is_eager:
        assert result.get() == [1, 2, 3]
    else:
        assert [each.headers[KEY_HEADER] for each in published(app)] == ["k-1", "k-2", "k-3"]


def test_app_that_drops_headers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two explicit keys would be one operation; what the package excludes keeps its headers."""

    def charge(order_id: str) -> None: ...

    app = an_app()
    monkeypatch.setattr(app, "__class__", type("OutboxCelery", (Celery,), {"__module__": "django_celery_outbox.app"}))
    settings = SimpleNamespace(CELERY_OUTBOX_EXCLUDE_TASKS={"excluded"})
    monkeypatch.setitem(sys.modules, "django.conf", SimpleNamespace(settings=settings))
    assert app.task(name="excluded", shared=False, base=IdempotentTask)(charge).name == "excluded"
    with pytest.raises(PolicyError, match="drops the headers"):
        app.task(name="charge", shared=False, base=IdempotentTask)(charge).delay("o-1")


def test_two_services_on_one_store_are_kept_apart_by_a_namespace() -> None:
    """Their tasks may have one name; the record names its app."""
    store = MemoryStore()
    results = {}
    for name, settings in (("shop", {"idempotency_namespace": "shop"}), ("depot", {"idempotency_namespace": "depot"})):
        app = an_app(**settings)
        app.main = name
        app.conf.idempotency_store = store

        def send(order_id: str, name: str = name) -> str:
            return name

        task = app.task(name="orders.send", base=IdempotentTask, shared=False)(send)
        results[name] = deliver(task, "o-1").value
        assert task.idempotency_key_for("o-1").startswith(f"{name}:orders.send:1:")

    assert results == {"shop": "shop", "depot": "depot"}
    assert {record.app for record in store.scan()} == {"shop", "depot"}


@pytest.mark.parametrize("namespace", ["", "a:b", 7, "x" * 65, " ", "b\n"])
def test_unusable_namespace_is_refused(namespace: Any) -> None:
    """It stands before every key."""
    app = an_app(idempotency_namespace=namespace)

    def send(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match="idempotency_namespace"):
        app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False)(send).idempotency_key_for("o-1")


class MyRequest(Request):
    """A request class of the user's."""


def test_request_class_of_the_users_is_kept(app: Celery) -> None:
    """It tells the content type as well, also where it does so already."""

    def send(order_id: str) -> None: ...

    plain = app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False)(send)
    own = app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False, Request=MyRequest)(send)
    telling = app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False, Request=IdempotentRequest)(send)

    assert plain.Request == "celery_idempotent.integration.task.requests:IdempotentRequest"
    assert issubclass(own.Request, MyRequest)
    assert telling.Request is IdempotentRequest
    own.apply_async(("o-1",))
    (message,) = published(app)
    assert own.Request(message, app=app, task=own).request_dict["idempotency_content_type"] == "application/json"


def test_headers_that_a_tracer_nests_hide_none(app: Celery) -> None:
    """Of two keys there are two operations, also where the nested dict is left from an earlier message; it is seen."""
    seen: list[Any] = []

    def charge(self: Any, order_id: str) -> None:
        seen.append(self.request.headers["x-trace"])

    task = app.task(bind=True, name=_name(), shared=False, base=IdempotentTask, lazy=False)(charge)
    for key in ("k-1", "k-2", "k-2"):
        task.apply_async(("o-1",), idempotency_key=key)
        (message,) = published(app)
        message.headers["headers"] = {"x-trace": key, "idempotency_key": "k-1"}
        redeliver(app, message)

    assert seen == ["k-1", "k-2"]


def test_message_of_celerys_testing_kit_is_received(app: Celery) -> None:
    """It has no properties that anybody could read: a mock stands for them."""

    def send(order_id: str) -> None: ...

    task = app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False)(send)
    request = IdempotentRequest(task_message_from_sig(app, task.s("o-1")), app=app, task=task)
    assert request.request_dict["idempotency_content_type"] == "application/json"


def test_observe_mode_survives_a_key_function_that_raises(app: Celery) -> None:
    """Observing changes nothing of what a task does."""

    def key(order_id: str) -> str:
        raise ZeroDivisionError

    def charge(order_id: str) -> str:
        return "charged"

    task = app.task(name=_name(), shared=False, base=IdempotentTask, idempotent=Policy(key, mode="observe"))(charge)

    assert deliver(task, "o-1") == Ended("SUCCESS", "charged")


def test_observe_mode_survives_a_store_that_cannot_be_opened(app: Celery) -> None:
    """Nor does a setting of the library's."""

    def charge(order_id: str) -> str:
        return "charged"

    task = app.task(name=_name(), shared=False, base=IdempotentTask, idempotent=Policy(mode="observe"))(charge)
    app.conf.idempotency_store = "nowhere://"

    assert deliver(task, "o-1") == Ended("SUCCESS", "charged")


def test_task_that_was_never_registered_is_guarded(app: Celery) -> None:
    """Its delivery is noted when it is called, at the latest."""

    def charge(order_id: str) -> str:
        return "charged"

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    task.app.tasks.pop(task.name)

    assert deliver(task, "o-1").value == "charged"


def test_task_class_of_a_registered_one_is_another_task(app: Celery) -> None:
    """Celery lets it inherit the stack of requests; its identity is its own, with its own scope and policy."""
    done = []

    class Charge(IdempotentTask):
        name = _name()
        idempotent = Policy("order_id")

        def run(self, order_id: int) -> str:
            done.append("charge")
            return "charged"

    app.register_task(Charge())

    class Refund(Charge):
        name = _name()
        idempotent = Policy("refund_id")

        def run(self, refund_id: int) -> str:
            done.append("refund")
            return "refunded"

    app.register_task(Refund())

    assert deliver(app.tasks[Charge.name], 1).value == "charged"
    assert deliver(app.tasks[Refund.name], 1).value == "refunded"
    assert done == ["charge", "refund"]


def test_copied_mark_of_the_gate_opens_no_way_around_it(app: Celery) -> None:
    """``functools.wraps`` copies what stands on the function that it is given."""
    runs = []

    class Wrapping(IdempotentTask):
        @wraps(IdempotentTask.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    def charge(order_id: str) -> None:
        runs.append(order_id)

    task = app.task(base=Wrapping, name=_name(), shared=False)(charge)
    for _ in range(2):
        deliver(task, "o-1")

    assert runs == ["o-1"]


def test_call_that_annotations_bring_is_behind_the_gate(app: Celery) -> None:
    """It is set when the task is bound."""
    runs = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def charge(order_id: str) -> None:
        runs.append(order_id)

    name = _name()
    app.conf.task_annotations = {name: {"__call__": call}}
    task = app.task(base=IdempotentTask, name=name, shared=False)(charge)
    for _ in range(2):
        deliver(task, "o-1")

    assert runs == ["o-1"]


def test_task_of_the_users_may_have_a_name_like_celerys(app: Celery) -> None:
    """Celery's own are told by where they come from, not by their name alone."""
    runs = []

    def charge(order_id: str) -> None:
        runs.append(order_id)

    task = app.task(base=IdempotentTask, name=f"celery.{_name()}", shared=False)(charge)
    for _ in range(2):
        deliver(task, "o-1")

    assert runs == ["o-1"]


@pytest.mark.parametrize("option", ["on_takeover", "lease", "retain", "remember", "max_takeovers"])
def test_field_of_a_policy_as_an_option_is_refused(app: Celery, option: str) -> None:
    """Celery would make an attribute of it, and the task would run under the defaults."""

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match=rf"write idempotent=Policy\({option}=...\)"):
        app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False, **{option: 5})(charge)


def test_refusal_holds_each_time(app: Celery) -> None:
    """Celery registers a task before it binds it, so what was refused once is there when it is used again."""
    runs = []

    def charge(order_id: str) -> None:
        runs.append(order_id)

    plain, wrong = _name(), _name()
    for name, options, remedy in (
        (plain, {"idempotent": Policy()}, "write base=IdempotentTask"),
        (wrong, {"idempotent": Policy("order"), "base": IdempotentTask}, "there is no argument"),
    ):
        with pytest.raises(PolicyError, match=remedy):
            app.task(name=name, shared=False, lazy=False, **options)(charge)
        for _ in range(2):
            ended = deliver(app._tasks[name], "o-1")
            assert isinstance(ended.value, PolicyError)
    assert runs == []


def test_refusal_names_the_task(app: Celery) -> None:
    """An app has many, and a lazy one is bound far from where it is written."""

    def charge(order_id: str) -> None: ...

    name = _name()
    with pytest.raises(PolicyError, match=f"{name}: there is no argument 'order'"):
        app.task(name=name, shared=False, base=IdempotentTask, lazy=False, idempotent=Policy("order"))(charge)


def test_refusal_names_the_task_once(app: Celery) -> None:
    """Where the message has the name already, it is not said again."""

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match="^idempotant=.*: charge: nothing reads it"):
        app.task(name="charge", shared=False, base=IdempotentTask, lazy=False, idempotant=Policy())(charge)
    app.conf.task_annotations = {"charge": {"idempotent": 5}}
    with pytest.raises(PolicyError, match="^idempotent=5: must be a Policy: charge"):
        app.task(name="charge", shared=False, base=IdempotentTask, lazy=False)(charge)


def test_field_of_a_policy_as_a_setting_is_told_where_it_belongs() -> None:
    """Not into the settings."""
    app = an_app(idempotency_lease=5)

    def charge(order_id: str) -> None: ...

    with pytest.raises(PolicyError, match=r"write it in Policy\(lease=...\)"):
        app.task(name=_name(), shared=False, base=IdempotentTask, lazy=False)(charge)


def test_policy_of_an_app_without_idempotent_tasks_stops_its_worker() -> None:
    """Somebody thinks that they are protected."""
    app = an_app(idempotency_policy=Policy("order_id"))

    def charge(order_id: str) -> None: ...

    app.task(name=_name(), shared=False)(charge)

    with pytest.raises(PolicyError, match="no task of the app is idempotent"):
        check(app, "celery.concurrency.solo")
    assert StoreCheck.include_if(Mock(), SimpleNamespace(app=app))
    assert not StoreCheck.include_if(Mock(), SimpleNamespace(app=an_app()))


def test_policy_of_an_app_that_does_not_fit_a_task_stops_its_worker() -> None:
    """Each delivery would fail."""
    app = an_app(idempotency_policy=Policy("order_id"))

    def fits(order_id: str) -> None: ...

    def charge(order: str) -> None: ...

    app.task(name=_name(), shared=False, base=IdempotentTask)(fits)
    name = _name()
    app.task(name=name, shared=False, base=IdempotentTask)(charge)

    told = rf"^idempotency_policy=Policy\(key='order_id'\): {name}: there is no argument 'order_id'"
    with pytest.raises(PolicyError, match=told):
        check(app, "celery.concurrency.solo")


@pytest.mark.parametrize(
    ("published", "error"),
    [
        ({"headers": {"idempotency_key": None}}, KeyMissing),
        ({"headers": {"idempotency_key": ""}}, KeyMissing),
        ({"headers": {"idempotency_key": 5}}, PolicyError),
        ({"headers": {"Idempotency-Key": "k"}}, PolicyError),
        ({"headers": {}, "properties": {"idempotency_key": None}}, KeyMissing),
        ({"headers": {}, "properties": {"idempotencykey": "k"}}, PolicyError),
    ],
)
def test_key_that_cannot_be_used_is_refused_by_the_worker(
    app: Celery, published: dict[str, Any], error: type[Exception]
) -> None:
    """A publisher in another language, and ``send_task``, have nobody else to tell them."""

    def charge(order_id: str) -> None:
        raise AssertionError

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)

    assert isinstance(deliver(task, "o-1", request=published).value, error)
    if published["headers"]:
        with pytest.raises(error):
            task.apply_async(("o-1",), headers=published["headers"])


def test_items_are_published_again_as_they_came(app: Celery) -> None:
    """The bodies of the items before have changed them, and a changed item would be another operation."""
    store: MemoryStore = app.conf.idempotency_store
    runs = []

    def charge(order: dict[str, Any]) -> int:
        runs.append(order["id"])
        order["charge"] = "c-1"
        return int(order["id"])

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)
    running = next(iter(_claim_of(task, {"id": 2}, store)))
    task.map([{"id": 1}, {"id": 2}]).apply_async()
    (message,) = published(app)

    assert redeliver(app, message).state == "RETRY"
    (again,) = published(app)
    store.delete(running.key, running.revision)
    assert redeliver(app, again).value == [1, 2]
    assert runs == [1, 2]


def _claim_of(task: Task, order: dict[str, Any], store: MemoryStore) -> Iterator[Record]:
    now = store.now()
    claim = replace(a_record(), key=task.idempotency_key_for(order), fingerprint=None, lease_until=now + 60_000)
    store.swap(claim, None)
    yield claim


@pytest.mark.parametrize("header", ["idempotency", "idempotency_conflicts", "idempotency_deliveries"])
@pytest.mark.parametrize("value", ["yes", -4, [1]])
def test_header_of_a_stranger_ends_no_delivery(app: Celery, header: str, value: Any) -> None:
    """Celery makes attributes of headers, and anybody may write them."""
    app.conf.idempotency_store = FaultyStore(app.conf.idempotency_store, "request lost", "request lost")

    def charge(order_id: str) -> str:
        return "charged"

    task = app.task(name=_name(), shared=False, base=IdempotentTask)(charge)

    ended = deliver(task, "o-1", request={"headers": {header: value}, header: value})

    assert settle(app, task, ended).value == "charged"
