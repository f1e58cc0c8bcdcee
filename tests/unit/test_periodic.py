"""What workers do now and then: relays and purges; and what becomes of operations that never came to an end."""

import json
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.utils.imports import symbol_by_name
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.engine.transaction import sent
from celery_idempotent.engine.verdicts import IN_DOUBT, Fate, fate_of, sweep_abandoned, sweep_released
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.broker.holding import Keeper
from celery_idempotent.integration.broker.recovery import ColdShutdown, Recovery
from celery_idempotent.integration.messages.outbox import Relay
from celery_idempotent.integration.operating import worker
from celery_idempotent.integration.operating.worker import Purge, StoreCheck
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import StoreWrapper
from celery_idempotent.testing.contract import a_record
from tests.support.commands import run
from tests.support.deliveries import an_app
from tests.support.stores import kept
from tests.support.waiting import wait_until

DAY = 86_400_000
RERUN, REFUSE = Policy(), Policy(on_takeover="refuse")


@pytest.fixture
def app(store: MemoryStore) -> Celery:
    """With a task of each kind."""
    app = an_app(idempotency_store=store)
    app.main = "shop"

    def body() -> None: ...

    for name, policy in (("rerun", RERUN), ("refuse", REFUSE)):
        app.task(base=IdempotentTask, shared=False, name=name, idempotent=policy)(body)
    return app


def _abandoned(store: Store, **values: Any) -> Record:
    return kept(store, lease_until=store.now() - 2 * DAY, **values)


def _step(app: Celery, kind: Any = Purge) -> Any:
    return kind(SimpleNamespace(app=app, steps=[]))


def test_every_worker_of_an_idempotent_app_has_the_steps(app: Celery) -> None:
    """Binding a task is enough."""
    app.finalize()
    worker, consumer = ({symbol_by_name(each) for each in app.steps[name]} for name in ("worker", "consumer"))
    assert {StoreCheck, Purge, Relay, ColdShutdown} <= worker
    assert {Keeper, Recovery} <= consumer


SQLITE = "sqlite:///nowhere/never-opened.sqlite"
BY_ITSELF = StoreWrapper(MemoryStore())
ON = {"idempotency_purge": 1}


@pytest.mark.parametrize(
    ("kind", "store", "given", "is_included"),
    [
        (Purge, MemoryStore(), {}, False),
        (Purge, MemoryStore(), ON, True),
        (Purge, BY_ITSELF, ON, False),
        (Purge, BY_ITSELF, {**ON, "idempotency_purge_released": 1}, True),
        (Purge, BY_ITSELF, {**ON, "idempotency_purge_abandoned": 1}, True),
        (Purge, BY_ITSELF, {"idempotency_purge_abandoned": 1}, False),
        (Relay, SQLITE, {}, True),
        (Relay, SQLITE, {"idempotency_relay": 0}, False),
        (Relay, MemoryStore(), {}, False),
    ],
)
def test_worker_works_only_where_there_is_something_to_do(kind: Any, store: Any, given: Any, is_included: bool) -> None:
    """Nothing is purged by default; outcomes where the store keeps them, the rest everywhere."""
    app = an_app(idempotency_store=SQLStore(store) if isinstance(store, str) else store, **given)
    assert _step(app, kind).include_if(SimpleNamespace(app=app)) is is_included


@pytest.mark.parametrize("kind", [Purge, Relay])
def test_worker_looks_until_it_is_stopped_whatever_happens(
    app: Celery, kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a thread. The next look may fare better; the messages and the records wait."""
    errors: list[Exception] = [LookupError(), OperationalError("away"), StoreUnavailable("s", "take", "away")]
    looks: list[Exception] = []

    def failing(*_: Any) -> bool:
        looks.append(errors[len(looks) % 3])
        raise looks[-1]

    monkeypatch.setattr(kind, "look", failing)
    app.conf.update(idempotency_purge=timedelta(milliseconds=1), idempotency_relay=0.001)
    step, parent = _step(app, kind), SimpleNamespace(app=app)
    _step(app, kind).stop(parent)  # a worker that fails to start stops all its steps
    step.start(parent)
    wait_until(lambda: len(looks) > 3, "a fourth look")
    step.terminate(parent)
    assert not step._thread.is_alive()
    told = [bool(each.exc_info) for each in caplog.records if f"idempotency.{kind.work}_failed" in each.message]
    assert {True, False} == set(told), "an error that nobody expects is told whole"


def test_worker_tells_an_outage_once_and_its_end(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at every look of every worker."""
    caplog.set_level("INFO")
    look = Mock(side_effect=[*[StoreUnavailable("s", "take", "away")] * 3, False, False])
    monkeypatch.setattr(Relay, "look", look)
    step = _step(app, Relay)
    step._stopping = SimpleNamespace(wait=lambda seconds: look.call_count == 5)
    step._run(app, 1.0)
    told = [each.partition(" ")[0].removeprefix("event=idempotency.") for each in caplog.messages]
    assert told == ["relay_failed", "relay_resumed"]


def test_relay_asks_rarely_while_nothing_is_sent_and_at_once_when_something_was(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause doubles up to 15 seconds, in case somebody else sends; a body of this worker ends it."""
    asked_at, now = [], 0.0
    monkeypatch.setattr(Relay, "look", lambda *_: asked_at.append(now))
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    step = _step(app, Relay)

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        if now == 200 and asked_at[-1] != 200:
            sent[0] = 1
        return now > 210

    sent[0] = 0
    step._stopping = SimpleNamespace(wait=wait)
    step._run(app, 1.0)
    assert asked_at == [0, 1, 3, 7, *range(15, 201, 15), 201, 202, 204, 208]


def test_look_purges_what_the_settings_ask_for_in_batches(
    app: Celery, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And says what it did; after a look that had enough there is another, and between them the worker can fork."""
    caplog.set_level("INFO")
    monkeypatch.setattr(worker, "_BATCH", 2)
    app.conf.update(idempotency_purge_released=DAY // 1000, idempotency_purge_abandoned=3600)
    for _ in range(3):
        kept(store, status=Status.COMPLETED, expires_at=1)
    kept(store, status=Status.RELEASED, updated_at=1)
    _abandoned(store, task="rerun")
    doubtful, living = _abandoned(store, task="refuse"), kept(store, task="rerun")
    step = _step(app)
    assert [step.look(app), step.look(app), step.look(app)] == [True, False, False]
    assert {each.key: each.status for each in store.scan()} == {doubtful.key: Status.UNKNOWN, living.key: living.status}
    assert f"idempotency.purge_in_doubt key={doubtful.key}" in caplog.text
    assert "outcomes=2 released=1 abandoned=1 in_doubt=1" in caplog.text


@pytest.mark.parametrize(
    ("values", "policy", "fate"),
    [
        ({}, RERUN, Fate.DELETED),
        ({"steps": {"charge": {"text": "1", "content_type": "t"}}}, RERUN, Fate.DELETED),
        ({"steps": {"charge": {"begun_at": 1, "attempt": 1}}}, RERUN, Fate.IN_DOUBT),
        ({"steps": {"charge": 1}}, RERUN, Fate.KEPT),
        ({}, REFUSE, Fate.IN_DOUBT),
        ({}, None, Fate.KEPT),
        ({"status": Status.UNKNOWN}, RERUN, Fate.KEPT),
        ({"status": Status.RELEASED}, RERUN, Fate.KEPT),
        ({"lease_until": 1}, RERUN, Fate.KEPT),
    ],
)
def test_fate_of_an_operation_that_never_ended(values: Any, policy: Policy | None, fate: Fate) -> None:
    """It is forgotten where that repeats nothing that was promised not to be repeated; in doubt a person decides."""
    assert fate_of(a_record().but(**{"lease_until": 0, **values}), policy, now=DAY, age=DAY) is fate


def test_operation_in_doubt_can_be_judged(store: MemoryStore) -> None:
    """It is UNKNOWN, and says why."""
    record = _abandoned(store)
    assert list(sweep_abandoned(store, lambda record: REFUSE, age=DAY)) == [(record, Fate.IN_DOUBT)]
    told = [(each.status, each.error, each.steps) for each in store.scan()]
    assert told == [(Status.UNKNOWN, IN_DOUBT, record.steps)]


@pytest.mark.parametrize("is_deleted", [False, True])
@pytest.mark.parametrize("policy", [RERUN, REFUSE])
def test_record_that_changes_between_the_look_and_the_write_is_left(
    store: MemoryStore, policy: Policy, is_deleted: bool
) -> None:
    """A delivery that comes meanwhile keeps its claim; of two purges at once, each counts what it has deleted."""

    class Raced(StoreWrapper):
        def scan(self, **wanted: Any) -> Iterator[Record]:
            for record in list(self.store.scan(**wanted)):
                if is_deleted:
                    self.store.delete(record.key, record.revision)
                else:
                    self.store.swap(record.but(revision="new"), record.revision)
                yield record

    released, held = kept(store, status=Status.RELEASED, updated_at=1), _abandoned(store)
    assert list(sweep_released(Raced(store), age=1)) == []
    assert list(sweep_abandoned(Raced(store), lambda record: policy, age=DAY)) == []
    left = {each.key: each for each in store.scan()}
    assert left == ({} if is_deleted else {each.key: each.but(revision="new") for each in (released, held)})


def test_command_ends_what_was_abandoned(app: Celery, store: MemoryStore) -> None:
    """By the policy of each task, and no more than it may; what it does not know, or another app has made, stays."""

    purge: Any = partial(run, app, "purge", "--abandoned-before", "1")
    for _ in range(4):
        _abandoned(store, task="rerun")
    assert "2 abandoned records deleted" in purge("--max", "2").stdout
    doubtful = _abandoned(store, task="refuse")
    left = [_abandoned(store, task="elsewhere"), kept(store, task="rerun"), _abandoned(store, task="rerun", app="x")]
    assert "2 abandoned records deleted, 1 in doubt now (UNKNOWN)" in purge().stdout
    assert {each.key for each in store.scan()} == {each.key for each in (doubtful, *left)}
    assert [each.key for each in store.scan(status=Status.UNKNOWN)] == [doubtful.key]
    _abandoned(store, task="rerun")
    assert json.loads(purge("--json").stdout)["abandoned"] == {"deleted": 1, "in_doubt": 0}
