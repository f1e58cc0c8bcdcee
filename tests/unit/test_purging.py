"""Purges by workers, and what a purge does with operations that never came to an end."""
# mypy: allow-untyped-decorators

import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.engine.verdicts import IN_DOUBT, Fate, fate_of, sweep_abandoned, sweep_released
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.operating import worker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreWrapper
from celery_idempotent.testing.contract import a_record
from tests.support.deliveries import an_app
from tests.support.waiting import wait_until

DAY = 86_400_000
RERUN, REFUSE = Policy(), Policy(on_takeover="refuse")
BEGUN = {"charge": {"begun_at": 1, "attempt": 1}}
FINISHED = {"charge": {"text": "1", "content_type": "t"}}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def app(store: MemoryStore) -> Celery:
    """With a task of each kind."""
    app = an_app()
    app.main = "shop"
    app.conf.idempotency_store = store

    @app.task(base=IdempotentTask, shared=False, name="rerun", idempotent=RERUN)
    def rerun() -> None: ...

    @app.task(base=IdempotentTask, shared=False, name="refuse", idempotent=REFUSE)
    def refuse() -> None: ...

    return app


def _kept(store: Store, **values: Any) -> Record:
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record


def _abandoned(store: Store, **values: Any) -> Record:
    return _kept(store, lease_until=store.now() - 2 * DAY, **values)


# -- what becomes of an operation that never ended


@pytest.mark.parametrize(
    ("values", "policy", "fate"),
    [
        ({}, RERUN, Fate.DELETED),
        ({"steps": FINISHED}, RERUN, Fate.DELETED),
        ({"steps": BEGUN}, RERUN, Fate.IN_DOUBT),
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
    record = a_record().but(**{"lease_until": 0, **values})

    assert fate_of(record, policy, now=DAY, age=DAY) is fate


def test_operation_in_doubt_can_be_judged(store: MemoryStore) -> None:
    """It is UNKNOWN, and says why."""
    record = _abandoned(store)

    assert list(sweep_abandoned(store, lambda record: REFUSE, age=DAY)) == [(record, Fate.IN_DOUBT)]
    stored = store.get(record.key)
    assert stored is not None
    assert (stored.status, stored.error, stored.steps) == (Status.UNKNOWN, IN_DOUBT, record.steps)


@pytest.mark.parametrize("policy", [RERUN, REFUSE])
def test_operation_that_goes_on_meanwhile_is_left(store: MemoryStore, policy: Policy) -> None:
    """A delivery that comes between the look and the write keeps its claim."""

    class Raced(StoreWrapper):
        def scan(self, **wanted: Any) -> Iterator[Record]:
            for record in self.store.scan(**wanted):
                claimed = record.but(revision="new", lease_until=self.now() + 1000)
                assert self.store.swap(claimed, record.revision) == claimed
                yield record

    record = _abandoned(store)

    assert list(sweep_abandoned(Raced(store), lambda record: policy, age=DAY)) == []
    assert store.get(record.key) == record.but(revision="new", lease_until=vars(store.get(record.key))["lease_until"])


def test_record_that_is_gone_meanwhile_is_not_counted(store: MemoryStore) -> None:
    """Of two purges at once, each counts what it has deleted."""

    class Raced(StoreWrapper):
        def scan(self, **wanted: Any) -> Iterator[Record]:
            for record in list(self.store.scan(**wanted)):
                self.store.delete(record.key, record.revision)
                yield record

    _kept(store, status=Status.RELEASED, updated_at=1)
    _abandoned(store)

    assert list(sweep_released(Raced(store), age=1)) == []
    assert list(sweep_abandoned(Raced(store), lambda record: REFUSE, age=DAY)) == []


# -- the command


def _run(app: Celery, *arguments: str) -> str:
    result = CliRunner().invoke(idempotency, ["purge", *arguments], obj=SimpleNamespace(app=app))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_ends_what_was_abandoned(app: Celery, store: MemoryStore) -> None:
    """By the policy of each task; what it does not know, or another app has made, stays."""
    gone = _abandoned(store, task="rerun")
    doubtful = _abandoned(store, task="refuse")
    strange = [_abandoned(store, task="elsewhere"), _kept(store, task="rerun")]
    other = a_record().but(task="rerun", app="other", lease_until=0)
    store.swap(other, None)

    assert "1 abandoned records deleted, 1 in doubt now (UNKNOWN)" in _run(app, "--abandoned-before", "1")
    assert store.get(gone.key) is None
    assert {each.key for each in store.scan(status=Status.UNKNOWN)} == {doubtful.key}
    assert [store.get(each.key) for each in (*strange, other)] == [*strange, other]


def test_command_tells_programs_what_became_of_them(app: Celery, store: MemoryStore) -> None:
    """By --json, as all that it does."""
    _abandoned(store, task="rerun")
    _abandoned(store, task="refuse")

    told = json.loads(_run(app, "--abandoned-before", "1", "--json"))
    assert told["abandoned"] == {"deleted": 1, "in_doubt": 1}


def test_command_ends_no_more_than_it_may(app: Celery, store: MemoryStore) -> None:
    """As for all else that it deletes."""
    for _ in range(3):
        _abandoned(store, task="rerun")

    assert "2 abandoned records deleted" in _run(app, "--abandoned-before", "1", "--max", "2")


# -- the workers


def _step(app: Celery) -> Any:
    return worker.Purge(SimpleNamespace(app=app, steps=[]))


def test_worker_purges_until_it_is_stopped(app: Celery, store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """What the settings ask for, and says what it did."""
    app.conf.update(
        idempotency_purge=timedelta(milliseconds=10),
        idempotency_purge_released=DAY // 1000,
        idempotency_purge_abandoned=3600,
    )
    records = [
        _kept(store, status=Status.COMPLETED, expires_at=1),
        _kept(store, status=Status.RELEASED, updated_at=1),
        _abandoned(store, task="rerun"),
    ]
    doubtful, living = _abandoned(store, task="refuse"), _kept(store, task="rerun")
    step, parent = _step(app), SimpleNamespace(app=app)
    assert step.include_if(parent)
    with caplog.at_level(logging.INFO):
        step.start(parent)
        wait_until(lambda: "idempotency.purged" in caplog.text, "the purge")
        step.stop(parent)

    assert not step._thread.is_alive()
    assert [store.get(each.key) for each in records] == [None] * 3
    assert store.get(living.key) == living
    assert f"idempotency.purge_in_doubt key={doubtful.key}" in caplog.text
    assert "outcomes=1 released=1 abandoned=1 in_doubt=1" in caplog.text


def test_look_that_had_enough_is_followed_by_another(
    app: Celery, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, between which the worker can fork."""
    monkeypatch.setattr(worker, "_BATCH", 2)
    for _ in range(3):
        _kept(store, status=Status.COMPLETED, expires_at=1)
    step = _step(app)

    assert [step.look(app), step.look(app), step.look(app)] == [True, False, False]
    assert list(store.scan()) == []


def test_workers_that_start_together_do_not_purge_together(app: Celery) -> None:
    """Each waits for a part of the interval first."""
    pauses = {_step(app).first_pause(60.0) for _ in range(20)}

    assert len(pauses) > 10
    assert all(0 <= each <= 60 for each in pauses)


@pytest.mark.parametrize("error", [StoreUnavailable("s", "purge", "away"), OperationalError("away"), LookupError()])
def test_worker_survives_whatever_happens(
    app: Celery, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left is there for the next look."""
    calls: list[int] = []

    def failing(step: Any, app: Celery) -> bool:
        calls.append(1)
        raise error

    monkeypatch.setattr(worker.Purge, "look", failing)
    app.conf.idempotency_purge = 0.001
    step, parent = _step(app), SimpleNamespace(app=app)
    with caplog.at_level(logging.WARNING):
        step.start(parent)
        wait_until(lambda: len(calls) > 2, "a third look")
        step.terminate(parent)

    assert "idempotency.purge_failed" in caplog.text


def test_worker_purges_only_where_it_is_asked_to(app: Celery, store: MemoryStore) -> None:
    """Nothing by default; outcomes where the store keeps them; the rest everywhere."""
    parent = SimpleNamespace(app=app)
    assert not _step(app).include_if(parent)
    by_itself = StoreWrapper(store)
    for given, settings, is_included in (
        (store, {"idempotency_purge": 1}, True),
        (by_itself, {"idempotency_purge": 1}, False),
        (by_itself, {"idempotency_purge": 1, "idempotency_purge_released": 1}, True),
        (by_itself, {"idempotency_purge": 1, "idempotency_purge_abandoned": 1}, True),
        (by_itself, {"idempotency_purge_abandoned": 1}, False),
    ):
        other = an_app()
        other.conf.update(idempotency_store=given, **settings)
        assert _step(other).include_if(SimpleNamespace(app=other)) is is_included


def test_store_that_forgets_by_itself_is_left_to_itself(app: Celery, store: MemoryStore) -> None:
    """Only what never expires is deleted there."""
    app.conf.update(idempotency_store=StoreWrapper(store), idempotency_purge_released=1)
    outcome = _kept(store, status=Status.COMPLETED, expires_at=1)
    _kept(store, status=Status.RELEASED, updated_at=1)

    assert _step(app).look(app) is False
    assert list(store.scan()) == [outcome]


@pytest.mark.parametrize("setting", ["purge_every", "purge_released", "purge_abandoned"])
@pytest.mark.parametrize("value", ["1 d", -1, None])
def test_setting_that_is_no_duration_is_refused(app: Celery, setting: str, value: Any) -> None:
    """When the worker starts, and naming the setting."""
    name = f"idempotency_{setting.removesuffix('_every')}"
    app.conf[name] = value

    with pytest.raises(PolicyError, match=f"{name}="):
        getattr(runtime_of(app), setting)


def test_every_worker_of_an_idempotent_app_has_the_step(app: Celery) -> None:
    """Binding a task is enough."""
    app.finalize()

    assert worker.Purge in app.steps["worker"]
