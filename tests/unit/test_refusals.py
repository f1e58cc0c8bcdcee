"""What cannot work is refused at its place: the error tells option, value and remedy, and leads to a live entry."""

import contextlib
import functools
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.exceptions import Reject, Retry

from celery_idempotent import IdempotentMixin, IdempotentTask, KeyMissing, LeaseLost, Policy, PolicyError, idempotent
from celery_idempotent.engine.attempt import current_attempt
from celery_idempotent.errors import IdempotencyError, OutcomeUnknown, SafeToRetry, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.operating.worker import StoreCheck, check
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.objects import open_large_results
from tests.support.deliveries import Shop, an_app, deliver, published
from tests.support.messages import entries


def _refused(declare: Callable[[], object], option: str, value: str | None = None) -> PolicyError:
    with pytest.raises(PolicyError) as raised:
        declare()
    error = raised.value
    assert (error.option, error.value) == (option, error.value if value is None else value)
    assert error.remedy
    assert str(error).startswith(
        one_line(f"{option}={error.value}: {re.sub(r'(?<![.])[.]$', '', error.remedy)}; see https://")
    )
    assert error.see in entries()
    return error


NotYet = type("NotYet", (SafeToRetry,), {})  # of an author's own

POLICIES: dict[str, list[Any]] = {
    "lease": [0, 0.4, -1, "60", True, float("inf"), float("nan")],
    "deadline": [59, "60", True],
    "retain": [60, None, 0],
    "backoff": [timedelta(seconds=-1), 0],
    "max_takeovers": ["2", True, 0],
    "remember": [
        *(ValueError, [ValueError], (5,), (int,), (ValueError, SafeToRetry), (NotYet,), (LeaseLost,)),
        *((StoreUnavailable,), (StoreMisconfigured,), (SystemExit,), (KeyboardInterrupt,), (GeneratorExit,)),
        *((BaseException,), (BaseExceptionGroup,)),
    ],
    "scope": ["", "x" * 1901, 5],
    "on_conflict": ["wait"],
    "on_takeover": ["steal"],
    "on_outage": ["ignore"],
    "publish": ["twice"],
    "mode": ["on"],
    "private": ["yes", None],
    "key": ["order_id[", None],
    "fingerprint": [()],
    "label": ["*", "a b", 7],
}


@pytest.mark.parametrize(("option", "value"), [(each, value) for each in POLICIES for value in POLICIES[each]])
def test_policy_that_cannot_be_meant_is_refused_where_it_is_written(option: str, value: Any) -> None:
    """Nothing is accepted in silence that would mean nothing, or end every worker that replays it."""
    _refused(lambda: Policy(**{option: value}), option, repr(value))
    # What must not be repeated has to be kept.
    _refused(lambda: Policy(retain=0, publish="once", on_takeover="refuse"), "retain", "0")


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"remember": (each,)}
            for each in (Exception, IdempotencyError, OutcomeUnknown, TimeoutError, ExceptionGroup)
        ),
        *({"lease": 0.5}, {"lease": timedelta(seconds=90)}, {"deadline": 60}, {"retain": 60.1}, {"backoff": 0.001}),
        *({"max_takeovers": 1}, {"max_takeovers": None}, {"scope": "x" * 1900}, {"retain": 0, "publish": "once"}),
    ],
)
def test_policy_at_its_bounds_is_taken(options: dict[str, Any]) -> None:
    """Bases of what is never an outcome stand for the other exceptions under them."""
    assert vars(Policy(**options)).items() >= options.items()


def _charge(order_id: str) -> None: ...


async def _coroutine() -> None: ...


def _generator(order_id: str = "") -> Iterator[str]:
    yield order_id


async def _async_generator(order_id: str = "") -> AsyncIterator[str]:
    yield order_id


def _bound(body: Any = _charge, app: Celery | None = None, **options: Any) -> Any:
    app = app or an_app()
    body.__name__ = body.__name__.replace("<lambda>", "body")  # Celery takes no lambda
    options = {"base": IdempotentTask, "name": "shop.charge", "shared": False, "lazy": False, **options}
    return app.task(**options)(body)


def _annotated(**options: Any) -> Any:
    return _bound(app=an_app(task_annotations={"shop.charge": options}))


# As celery-batches': it collects messages and calls the body itself.
Batches = type("Batches", (Task,), {"Strategy": lambda self, task, app, consumer: None})
Traced = type("Traced", (Task,), {"__trace__": property(lambda self: None)})


class Registered(Task):
    name = "shop.registered"
    idempotent = Policy()

    def run(self) -> None: ...


def _class(*bases: type) -> type:
    return type("Charge", bases, {})


@pytest.mark.parametrize(
    ("declare", "option", "remedy"),
    [
        (lambda: _bound(_coroutine), "body", "asyncio.run"),
        (lambda: _bound(_generator), "body", "return a list"),
        (lambda: _bound(idempotent={"key": "order_id"}), "idempotent", "must be a Policy"),
        (lambda: _bound(idempotent=Policy("order")), "key", "shop.charge: there is no argument 'order'"),
        (lambda: _bound(idempotent=Policy(fingerprint="cent")), "fingerprint", "no argument 'cent'"),
        (lambda: _bound(idempotent=Policy(label="ordre")), "label", "no argument 'ordre'"),
        (lambda: _bound(name="x" * 2000).idempotency_key_for("o"), "scope", "set a shorter scope"),
        (lambda: _bound(idempotent=Policy(remember=(ValueError, Retry))), "remember", "Retry says that running again"),
        (lambda: _bound(idempotent=Policy(remember=(Reject,))), "remember", "Reject ends a delivery"),
        (lambda: _bound(idempotant=Policy()), "idempotant", "the option is called idempotent"),
        (lambda: _bound(idempotency_key="k"), "idempotency_key", "an option of apply_async"),
        (lambda: _bound(once={}), "once", "celery-once"),
        (lambda: _bound(raise_on_duplicate=True), "raise_on_duplicate", "leave it out"),
        (lambda: _bound(key="order_id"), "key", "idempotent=Policy(key=...)"),
        (lambda: _bound(base=Task, idempotent=Policy()), "idempotent", "write base=IdempotentTask"),
        (lambda: an_app().register_task(Registered()), "idempotent", "write base=IdempotentTask"),
        (lambda: _annotated(idempotent=5), "idempotent", "must be a Policy"),
        (lambda: _annotated(Strategy="shop:Strategy"), "base", "runs bodies by itself, by a Strategy"),
        (lambda: _bound(Strategy="shop:Strategy"), "base", "runs bodies by itself, by a Strategy"),
        *(
            (functools.partial(_class, *bases), "base", f"{base.__name__} runs bodies by itself")
            for base in (Batches, Traced)
            for bases in ((IdempotentMixin, base), (base, IdempotentMixin), (IdempotentTask, base))
        ),
        (lambda: _class(_class(Task), IdempotentMixin), "base", "write class Charge(IdempotentMixin, Charge)"),
    ],
)
def test_task_that_would_be_unprotected_is_refused_when_it_is_defined(declare: Any, option: str, remedy: str) -> None:
    """Celery takes any option, and its own classes would go before the guard."""
    assert remedy in _refused(declare, option).remedy


@pytest.mark.parametrize("options", [{"idempotent": Policy("order")}, {"base": None}], ids=["a wrong key", "no base"])
def test_refusal_holds_each_time(options: dict[str, Any]) -> None:
    """Celery registers a task before it binds it, so what was refused once is there when it is used again."""
    app, runs = an_app(), list[str]()
    with pytest.raises(PolicyError):
        _bound(lambda order_id: runs.append(order_id), app, **{"idempotent": Policy(), **options})
    assert [type(deliver(app._tasks["shop.charge"], "o-1").value) for _ in range(2)] == [PolicyError] * 2
    assert runs == []


def test_what_is_somebody_elses_is_left_alone() -> None:
    """An option that a base knows, attributes of an author's class, and policies of what is no task."""

    class Base(IdempotentMixin, Task):
        abstract = True
        once: Any = None

    class Own(IdempotentTask):
        name = "own"
        key = "mine"

        def run(self) -> None: ...

    class Defaults:
        payments = Policy("order_id")

    assert _bound(base=Base, once={"keys": []}).once == {"keys": []}
    assert an_app().register_task(Own()).key == "mine"
    assert Defaults.payments.key == "order_id"


@pytest.mark.parametrize(
    ("options", "option"),
    [
        *(({each: "k"}, each) for each in ("idempotencykey", "idempotency-key", "Idempotency_Key", "idempotent")),
        ({"headers": {"Idempotency-Key": "k"}}, "Idempotency-Key"),
        ({"headers": {"idempotency_key": 5}}, "idempotency_key"),
        ({"idempotency_key": 5}, "idempotency_key"),
    ],
)
def test_key_that_nobody_would_read_is_refused_when_publishing(options: dict[str, Any], option: str) -> None:
    """Celery would make a property of the message of it."""
    app = an_app()
    task = _bound(app=app)
    for publish in (task.apply_async, task.apply, task.s("o-1").apply_async):
        _refused(lambda: publish(**options), option)  # noqa: B023
    _refused(lambda: task.s("o-1").set(**options).delay(), option)
    assert published(app) == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"headers": {"idempotency_key": None}}, KeyMissing),
        ({"headers": {"idempotency_key": ""}}, KeyMissing),
        ({"headers": {"idempotency_key": 5}}, PolicyError),
        ({"headers": {"Idempotency-Key": "k"}}, PolicyError),
        ({"properties": {"idempotency_key": None}}, KeyMissing),
        ({"properties": {"idempotencykey": "k"}}, PolicyError),
    ],
)
def test_key_that_cannot_be_used_is_refused_by_the_worker(fields: dict[str, Any], error: type[Exception]) -> None:
    """A publisher in another language, and ``send_task``, have nobody else to tell them."""
    runs: list[str] = []
    assert isinstance(deliver(_bound(lambda order_id: runs.append(order_id)), "o-1", request=fields).value, error)
    assert runs == []


SETTINGS: dict[str, list[Any]] = {
    "idempotency_policy": ["refuse", {"key": 1}],
    "idempotency_namespace": ["", "a:b", 7, "x" * 65, " ", "b\n"],
    "idempotency_hold_messages": ["some", None],
    "idempotency_cipher_required": ["yes", None, True],
    "result_serializer": ["pickle"],
    **{
        f"idempotency_{each}": [-0.1, "often", None, float("inf")]
        for each in ("grace", "queued_for", "relay", "purge", "purge_released", "purge_abandoned", "keep_verdicts")
    },
}


@pytest.mark.parametrize(("setting", "value"), [(each, value) for each in SETTINGS for value in SETTINGS[each]])
def test_setting_that_cannot_be_used_stops_a_worker(setting: str, value: Any) -> None:
    """Before it takes a message; some are refused when a task is bound already."""
    app = an_app()
    _bound(app=app, idempotent=Policy())
    app.conf[setting] = value
    _refused(lambda: check(app, "celery.concurrency.solo"), setting, repr(value))


@pytest.mark.parametrize(
    ("store", "remedy"),
    [
        (None, "dynamodb://@eu-west-1"),
        ("nosuch://x", "dynamodb, "),
        ("table", "known schemes: "),
        ("postgres://h/d", "write postgresql://"),
        ("rediss:/localhost", "write rediss://..."),
        *((each, "is not a store; write a URL") for each in (3, {"URL": "memory://"}, b"memory://", Path("k.sqlite"))),
        (MemoryStore, "is not a store; write a URL"),
    ],
)
def test_what_is_no_store_is_refused_before_a_task_runs(store: Any, remedy: str) -> None:
    """A typo in a scheme, a driver's client, a path or a class: a worker would start with it, and every task fail."""
    app = an_app(idempotency_store=store)
    assert remedy in _refused(lambda: runtime_of(app).store, "idempotency_store").remedy
    if store is not None:
        _refused(lambda: idempotent(Policy("n"), store=store, name="n")(lambda n: n)(1), "idempotency_store")


@pytest.mark.parametrize("made", [MemoryStore, lambda: f"memory://s3cr3t{uuid4()}"])
def test_store_that_is_another_at_each_access_is_refused(made: Any) -> None:
    """Nothing would be found that another delivery has recorded; and no password is shown."""
    app = Celery("computed", set_as_current=False)
    app.config_from_object(type("Computed", (), {"idempotency_store": property(lambda self: made())})())
    assert "s3cr3t" not in str(_refused(lambda: runtime_of(app).store, "idempotency_store"))


@pytest.mark.parametrize(("extra", "setting"), [("dynamodb", "idempotency_store"), ("s3", "idempotency_large_results")])
def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch, extra: str, setting: str) -> None:
    """The remedy is the command that installs it; publishers, which only bind tasks, need none for large results."""
    for module in ("botocore", "boto3"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("dynamodb", "dynamodb.store", "objects.s3"):
        monkeypatch.delitem(sys.modules, f"celery_idempotent.stores.{module}", raising=False)
    assert Shop(idempotency_large_results="s3://bucket/prefix").charge.idempotency_key_for("o")
    opened = {"dynamodb": lambda: open_store("dynamodb://@eu-west-1/t"), "s3": lambda: open_large_results("s3://bkt")}
    assert f'pip install "celery-idempotent[{extra}]"' in _refused(opened[extra], setting).remedy


@pytest.mark.parametrize(
    ("namespace", "setting", "right"),
    [
        (None, "idempotency_polcy", ", idempotency_policy, "),
        (None, "idempotency_lease", "write it in Policy(lease=...)"),
        ("CELERY", "CELERY_IDEMPOTENCY_POLCY", ", CELERY_IDEMPOTENCY_POLICY, "),
        ("CELERY", "IDEMPOTENCY_POLICY", ", CELERY_IDEMPOTENCY_POLICY, "),
    ],
)
def test_unknown_setting_is_refused_when_a_task_is_bound(namespace: str | None, setting: str, right: str) -> None:
    """Nothing would read it, and the tasks would run under defaults."""
    module, app = ModuleType("settings"), Celery(set_as_current=False, broker="memory://")
    vars(module)[setting] = Policy()
    app.config_from_object(module, namespace=namespace)
    assert right in _refused(lambda: _bound(app=app), setting).remedy


def test_policy_of_an_app_that_protects_nothing_or_does_not_fit_stops_its_worker() -> None:
    """Somebody thinks that they are protected, or each delivery would fail."""
    app = an_app(idempotency_policy=Policy("order_id"))
    _bound(app=app, base=Task)
    error = _refused(lambda: check(app, "celery.concurrency.solo"), "idempotency_policy", "Policy(...)")
    assert "base=IdempotentTask" in error.remedy
    assert StoreCheck.include_if(StoreCheck(None), SimpleNamespace(app=app))
    assert not StoreCheck.include_if(StoreCheck(None), SimpleNamespace(app=an_app()))
    _bound(app=app, name="shop.fits")
    _bound(lambda order: None, app, name="shop.other")
    error = _refused(lambda: check(app, "celery.concurrency.solo"), "idempotency_policy", "Policy(key='order_id')")
    assert error.remedy.startswith("shop.other: there is no argument 'order_id'")
    control = an_app(idempotency_policy=Policy(remember=(Retry,)))
    _refused(lambda: _bound(app=control), "remember")


def test_app_that_drops_headers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two explicit keys would be one operation; what the package excludes keeps its headers."""
    app = an_app()
    monkeypatch.setattr(app, "__class__", type("OutboxCelery", (Celery,), {"__module__": "django_celery_outbox.app"}))
    settings = SimpleNamespace(CELERY_OUTBOX_EXCLUDE_TASKS={"excluded"})
    monkeypatch.setitem(sys.modules, "django.conf", SimpleNamespace(settings=settings))
    assert _bound(app=app, name="excluded").name == "excluded"
    _refused(lambda: _bound(app=app), "app", "OutboxCelery")


class Account:
    """A class with a method."""

    def charge(self, cents: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "option", "remedy"),
    [
        (_generator, "function", "return a list"),
        (_async_generator, "function", "return a list"),
        (functools.partial(_generator), "function", "return a list"),
        (contextlib.contextmanager(_generator), "function", "return a list"),
        (Account, "function", "must be a function"),
        ("charge", "function", "must be a function"),
        (staticmethod(len), "function", "write @staticmethod above"),
        (classmethod(lambda cls: cls), "function", "write @classmethod above"),
        (SimpleNamespace(apply_async=1), "function", "base=IdempotentTask"),
        (lambda order: 1, "name", "write name="),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_protected_is_refused_where_it_is_written(function: Any, option: str, remedy: str) -> None:
    """Before any call, with what to write instead."""
    assert remedy in _refused(lambda: idempotent(Policy("order"), store="memory://")(function), option).remedy


@pytest.mark.parametrize(
    ("declare", "option"),
    [
        (lambda: idempotent("order"), "policy"),  # type: ignore[arg-type]
        (lambda: idempotent(len), "policy"),  # type: ignore[arg-type]
        (lambda: idempotent(wait=-1), "wait"),
        (lambda: idempotent(store="memory://", app=Celery(set_as_current=False)), "store"),
        (lambda: idempotent(app="shop"), "app"),
        (lambda: idempotent(Policy("order_id", publish="once"), store="memory://")(_charge), "publish"),
        (lambda: idempotent(Policy("order_id", on_conflict="skip"), store="memory://")(_charge), "on_conflict"),
        (lambda: idempotent(Policy("no_such"), store="memory://")(_charge), "key"),
        (lambda: idempotent(Policy(remember=(Retry,)), store="memory://")(_charge), "remember"),
        # Two instances may mean two effects.
        *((functools.partial(idempotent(each, store="memory://"), Account.charge), "key") for each in (None, Policy())),
        (lambda: _bound(lambda order_id: current_attempt().commit(1, []))("o"), "commit"),
        (lambda: _bound(lambda order_id: current_attempt().transaction())("o"), "transaction"),
        (lambda: _bound(lambda order_id: current_attempt().step("", lambda step: 1))("o"), "name"),
    ],
)
def test_what_means_nothing_for_a_function_or_without_a_claim_is_refused(declare: Any, option: str) -> None:
    """``@idempotent`` without brackets, what is about messages, and effects that need a record."""
    _refused(declare, option)
