"""What an app's settings mean, and what a worker does about them when it starts."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import click
import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.operating.worker import StoreCheck
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.stores import StoreWrapper
from tests.support import commands
from tests.support.deliveries import Shop, an_app, deliver


def test_store_is_that_of_the_settings_wherever_and_whenever_they_get_it() -> None:
    """Also between two deliveries, and where another namespace names it differently."""
    app, stores = Celery(set_as_current=False), [MemoryStore() for _ in range(6)]
    named = [SimpleNamespace(idempotency_store=stores[2]), SimpleNamespace(SHOP_IDEMPOTENCY_STORE=stores[3])]
    gives: list[Callable[[MemoryStore], object]] = [
        lambda store: app.conf.update(idempotency_store=store),
        lambda store: setattr(app.conf, "idempotency_store", store),
        lambda _: app.config_from_object(named[0], force=True),
        lambda _: app.config_from_object(named[1], force=True, namespace="SHOP"),
        lambda store: setattr(named[1], "SHOP_IDEMPOTENCY_STORE", store),
        lambda store: app.conf.update(SHOP_IDEMPOTENCY_STORE=store),
    ]
    for give, store in zip(gives, stores, strict=True):
        give(store)
        assert runtime_of(app).store is app.conf.get("idempotency_store")
    assert app.conf.get("idempotency_store") is stores[5]


def test_store_is_opened_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two stores in memory neither would know what the other has run."""
    arrived, lock = threading.Barrier(4), threading.Lock()

    @contextmanager
    def crowded() -> Iterator[None]:  # a lock that nobody gets before everybody wants it
        arrived.wait(10)
        with lock:
            yield

    app = an_app(idempotency_store="memory://")  # which its runtime does not keep
    runtime = runtime_of(app)
    monkeypatch.setattr(type(runtime), "_opening", property(lambda self: crowded()), raising=False)
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: runtime.store, range(4)))
    assert opened == [opened[0]] * 4


def test_changed_setting_is_seen_and_its_store_closed_by_whoever_opened_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store or its URL; a URL is opened once, and yours is yours."""
    closed: list[MemoryStore] = []
    monkeypatch.setattr(MemoryStore, "close", lambda self: closed.append(self))
    app, given = an_app(idempotency_store="memory://"), MemoryStore()
    runtime = runtime_of(app)
    opened = runtime.store
    assert isinstance(opened, MemoryStore)
    assert runtime.store is opened
    app.conf.idempotency_store = given
    assert (runtime.store, closed) == (given, [opened])
    app.conf.idempotency_store = "memory://other"
    assert runtime.store not in (given, opened)
    assert closed == [opened]


EQUAL = {"__eq__": lambda self, other: type(self) is type(other), "__hash__": None}  # a store that is its table


@pytest.mark.parametrize("made", [lambda: "".join(("mem", "ory://")), type("Equal", (MemoryStore,), EQUAL)])
def test_store_that_a_computed_setting_names_again_is_the_same(made: Any) -> None:
    """Each delivery would open one of its own; in memory, each duplicate would run."""
    settings = {"broker_url": "memory://", "task_acks_late": True, "task_reject_on_worker_lost": True}
    computed = type("Computed", (), {**settings, "idempotency_store": property(lambda self: made())})()
    app, runs = Celery("computed", set_as_current=False), []
    app.config_from_object(computed)

    @app.task(base=IdempotentTask, shared=False)
    def charge(order: str) -> int:
        runs.append(order)
        return len(runs)

    assert computed.idempotency_store is not computed.idempotency_store
    assert [deliver(charge, "o-1").value for _ in range(3)] == [1, 1, 1]
    assert runtime_of(app).store is runtime_of(app).store


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({"result_serializer": "yaml", "accept_content": ["json", "yaml", "pickle"]}, {"application/x-yaml"}),
        ({"result_serializer": "pickle", "result_accept_content": ["pickle"]}, {"application/x-python-serialize"}),
        ({}, set()),
    ],
)
def test_only_the_serializer_of_results_and_json_are_decoded(settings: Any, accepted: set[str]) -> None:
    """Outcomes from before another serialiser stay readable; what a message may be is another matter."""
    app = an_app(**settings)
    codec = runtime_of(app).codec
    assert codec.accept == {"application/json"} | accepted
    assert codec.serializer == settings.get("result_serializer", "json")


def a_store(error: StoreUnavailable | None = None) -> StoreWrapper:
    """A store that other processes could see, and that says what is wrong with it."""
    store = StoreWrapper(MemoryStore())
    vars(store)["verify"] = Mock(side_effect=error)
    return store


def _start(app: Celery, pool: str = "prefork") -> None:
    pool_cls = type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})
    StoreCheck(None).create(SimpleNamespace(app=app, pool_cls=pool_cls))


@pytest.mark.parametrize("store", [a_store(StoreMisconfigured("s", "PutItem", "run: provision")), None, "nosuch://x"])
def test_worker_with_a_store_that_cannot_work_does_not_start(store: Any) -> None:
    """A missing table, permission or setting stops the worker with a readable message."""
    with pytest.raises(click.ClickException, match="celery-idempotent: "):
        _start(an_app(idempotency_store=store))


@pytest.mark.parametrize("error", [None, StoreUnavailable("s", "PutItem", "timed out")])
def test_worker_says_what_it_protects_also_in_an_outage(error: StoreUnavailable | None, caplog: Any) -> None:
    """One line: its store, its tasks that are protected, and those that are not; without Celery's own."""
    shop = Shop(idempotency_store=a_store(error))
    shop.task(Policy(mode="observe"), name="watch")

    @shop.app.task(name="report", shared=False, lazy=False)
    def report() -> None: ...

    caplog.set_level(logging.INFO, "celery_idempotent")
    _start(shop.app)
    (line,) = [each for each in caplog.records if each.getMessage().startswith("event=idempotency.started ")]
    assert line.levelno == logging.INFO
    told, unprotected = line.getMessage().split(" unprotected=")
    assert told == f'event=idempotency.started store="{one_line(shop.app.conf.idempotency_store)}" protected=charge'
    # Plugins of pytest have shared tasks, which every app gets.
    assert {"report", "watch"} == {each for each in unprotected.split(",") if "pytest" not in each}
    assert ("idempotency.store_unavailable" in caplog.text) is (error is not None)


def test_memory_store_under_several_processes_is_warned_about() -> None:
    """Pool processes do not share memory; threads and solo do."""
    app = an_app()
    with pytest.warns(IdempotencyWarning) as warned:
        _start(app)
    assert [each.message.option for each in warned] == ["idempotency_store"]  # type: ignore[union-attr]
    _start(app, "thread")
    _start(app, "solo")


def test_key_of_a_call_is_printed() -> None:
    """A person finds the record of a call by its arguments."""
    shop = Shop(Policy("order_id"))
    for arguments in (("--args", "[7]"), ("--kwargs", '{"order_id": 7}')):
        told = commands.run(shop.app, "key", "charge", *arguments).stdout
        assert told == f"{shop.charge.idempotency_key_for(7)}\n"
    assert "no idempotency key" in commands.run(shop.app, "key", "charge", "--args", "[null]").stderr
