"""The outbox: written with the user's rows, published at least once, always under the same task id."""

import logging
import os
import pickle
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from kombu.exceptions import OperationalError
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from celery_idempotent import IdempotentTask, PolicyError, StoreUnavailable, outbox
from celery_idempotent.cli import idempotency
from celery_idempotent.runtime import runtime_of
from celery_idempotent.store import OutboxMessage
from celery_idempotent.stores.sql import SQLStore
from tests.support.deliveries import an_app, deliver, published
from tests.support.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLStore]:
    store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    yield store
    store.close()


@pytest.fixture
def engine(store: SQLStore) -> Iterator[Engine]:
    engine = create_engine(store._url)
    yield engine
    engine.dispose()


@pytest.fixture
def app(store: SQLStore) -> Celery:
    app = an_app()
    app.conf.idempotency_store = store

    def ship(order: str, fast: bool = False) -> None:
        pass

    app.task(name="ship", shared=False)(ship)
    return app


def test_message_is_published_after_the_commit_and_only_then(app: Celery, engine: Engine) -> None:
    """A web request that fails leaves no message behind."""
    ship = app.tasks["ship"]
    with Session(engine) as session:
        outbox.send(session, ship, "o-1")
        session.rollback()
        task_id = outbox.send(session, ship.s("o-2").set(priority=3), fast=True)
        assert outbox.relay(app) == 0
        session.commit()

    assert outbox.relay(app) == 1
    (message,) = published(app)
    assert message.headers["id"] == task_id
    assert message.payload[:2] == [["o-2"], {"fast": True}]
    assert message.properties["priority"] == 3
    assert outbox.relay(app) == 0


def test_task_publishes_its_follow_up_once(app: Celery) -> None:
    """A message sent in a task's transaction is there after its commit, however often the task is delivered."""

    @app.task(bind=True, base=IdempotentTask, name="book", shared=False)
    def book(self: Any, order: str) -> str:
        with self.attempt.transaction() as tx:
            done: str = tx.done(tx.send(app.tasks["ship"], order))
            return done

    for _ in range(3):
        deliver(book, "o-1")

    assert outbox.relay(app) == 1
    (message,) = published(app)
    assert message.headers["id"] == book.apply(("o-1",)).get()


def _enqueued(engine: Engine, store: SQLStore, *messages: OutboxMessage) -> None:
    with Session(engine) as session:
        for message in messages:
            store.enqueue(message, session)
        session.commit()


@pytest.mark.parametrize(
    "damaged",
    [
        OutboxMessage("damaged", "{", "application/json"),
        OutboxMessage("damaged", "[]", "application/json"),
        OutboxMessage("damaged", pickle.dumps({}), "application/x-python-serialize"),
    ],
)
def test_damaged_message_does_not_hold_up_the_others(
    app: Celery, engine: Engine, store: SQLStore, damaged: OutboxMessage, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and stays; what can be published is."""
    _enqueued(engine, store, damaged)
    with Session(engine) as session:
        outbox.send(session, app.tasks["ship"], "o-1")
        session.commit()

    assert outbox.relay(app) == 1
    assert "idempotency.relay_failed task_id=damaged" in caplog.text
    assert len(published(app)) == 1


def test_messages_wait_while_the_broker_is_away(app: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published before is forgotten, the rest comes back."""
    with Session(engine) as session:
        for order in ("o-1", "o-2", "o-3"):
            outbox.send(session, app.tasks["ship"], order)
        session.commit()
    publish, calls = outbox._publish, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OperationalError("away")
        publish(*arguments)

    monkeypatch.setattr(outbox, "_publish", failing)
    monkeypatch.setattr(outbox, "_HOLD", 0)  # what was taken comes back at once
    with pytest.raises(OperationalError):
        outbox.relay(app)

    assert [message.payload[0] for message in published(app)] == [["o-1"]]
    assert outbox.relay(app) == 2
    assert [message.payload[0] for message in published(app)] == [["o-2"], ["o-3"]]


def test_store_without_an_outbox_says_so(app: Celery) -> None:
    """Sending and relaying both need an SQL store."""
    app.conf.idempotency_store = an_app().conf.idempotency_store

    for use in (lambda: outbox.relay(app), lambda: outbox.send(None, app.tasks["ship"], "o-1")):
        with pytest.raises(PolicyError, match="needs an SQL store"):
            use()


def _command(app: Celery, *arguments: str) -> Result:
    return CliRunner().invoke(idempotency, ["relay", *arguments], obj=SimpleNamespace(app=app))


def _waiting(app: Celery, engine: Engine, *orders: str) -> None:
    with Session(engine) as session:
        for order in orders:
            outbox.send(session, app.tasks["ship"], order)
        session.commit()


def test_command_publishes_what_waits(app: Celery, engine: Engine) -> None:
    """``relay --once`` for cron."""
    _waiting(app, engine, "o-1")

    result = _command(app, "--once")

    assert (result.exit_code, result.output) == (0, "published 1\n")


def test_command_looks_again_until_it_is_interrupted(
    app: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, pausing as long as it is told where nothing waits."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        _waiting(app, engine, f"o-{len(pauses)}")

    monkeypatch.setattr("celery_idempotent.cli.time.sleep", pause)
    result = _command(app, "--every", "7")

    assert result.output.startswith("published 1\npublished 1\n")
    assert pauses == [7, 7, 7]
    assert [message.payload[0] for message in published(app)] == [["o-1"], ["o-2"]]


def test_command_says_that_the_broker_is_away(app: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence, and the message waits."""
    _waiting(app, engine, "o-1")

    def away(*arguments: Any) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(outbox, "_publish", away)
    result = _command(app, "--once")

    assert (result.exit_code, result.output) == (1, "Error: the broker did not answer: connection refused\n")


class TestRelay:
    """The worker's step."""

    def test_relays_until_it_is_stopped(self, app: Celery, engine: Engine) -> None:
        """In a thread, at every idempotency_relay seconds."""
        app.conf.idempotency_relay = 0.01
        step = outbox.Relay(SimpleNamespace(app=app, steps=[]))
        parent = SimpleNamespace(app=app)
        assert step.include_if(parent)
        step.start(parent)
        with Session(engine) as session:
            outbox.send(session, app.tasks["ship"], "o-1")
            session.commit()
        wait_until(lambda: bool(published(app)), "the message to be published")
        step.stop(parent)

        assert step._thread is not None
        assert not step._thread.is_alive()

    @pytest.mark.parametrize("error", [StoreUnavailable("s", "take", "away"), OperationalError("away"), LookupError()])
    def test_survives_whatever_happens(
        self, app: Celery, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The messages wait on disk, and the next look may fare better."""
        calls: list[int] = []

        def failing(app: Celery) -> int:
            calls.append(1)
            raise error

        monkeypatch.setattr(outbox, "relay", failing)
        app.conf.idempotency_relay = 0.001
        step = outbox.Relay(SimpleNamespace(app=app, steps=[]))
        with caplog.at_level(logging.WARNING):
            step.start(SimpleNamespace(app=app))
            wait_until(lambda: len(calls) > 2, "a third look")
            step.stop(SimpleNamespace(app=app))

        assert "idempotency.relay_failed" in caplog.text

    def test_no_process_is_forked_in_the_middle_of_a_look(
        self, app: Celery, store: SQLStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A fork waits for the look, and only then the store closes what a child must not inherit.

        A child would otherwise wait for ever for locks that the relay's thread had held, and SQLite would lose writes.
        """
        looking, go_on, order = threading.Event(), threading.Event(), []

        def look(app: Celery) -> int:
            looking.set()
            go_on.wait(30)
            order.append("looked")
            return 0

        def fork() -> None:
            child = os.fork()
            if child == 0:
                os._exit(0)
            order.append("forked")
            os.waitpid(child, 0)

        monkeypatch.setattr(outbox, "relay", look)
        monkeypatch.setattr(store, "_leave_file", lambda: order.append("closed"))
        app.conf.idempotency_relay = 60
        step = outbox.Relay(SimpleNamespace(app=app, steps=[]))
        step.start(SimpleNamespace(app=app))
        assert looking.wait(30)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12+ on fork with threads: this is the point
            forking = threading.Thread(target=fork)
            forking.start()
            forking.join(0.2)  # far longer than a fork that does not wait
            go_on.set()
            forking.join(30)
        step.stop(SimpleNamespace(app=app))

        assert order == ["looked", "closed", "forked"]

    def test_stops_though_it_never_started(self, app: Celery) -> None:
        """A worker can end before its steps have begun."""
        step = outbox.Relay(SimpleNamespace(app=app, steps=[]))

        step.stop(SimpleNamespace(app=app))

        assert step._thread is None

    def test_may_be_stopped_before_it_has_begun(self, app: Celery) -> None:
        """A worker that fails to start stops all its steps."""
        outbox.Relay(SimpleNamespace(app=app, steps=[])).stop(SimpleNamespace(app=app))

    @pytest.mark.parametrize("every", [0, 0.0])
    def test_is_switched_off_by_zero(self, app: Celery, every: float) -> None:
        """Where the command relays, workers need not."""
        app.conf.idempotency_relay = every

        assert not outbox.Relay(SimpleNamespace(app=app, steps=[])).include_if(SimpleNamespace(app=app))

    def test_is_left_out_without_an_outbox(self) -> None:
        """Other stores have none."""
        app = an_app()

        assert not outbox.Relay(SimpleNamespace(app=app, steps=[])).include_if(SimpleNamespace(app=app))

    @pytest.mark.parametrize("every", ["1 s", -1, None])
    def test_setting_that_is_no_duration_is_refused(self, app: Celery, every: Any) -> None:
        """When the worker starts, and naming the setting."""
        app.conf.idempotency_relay = every

        with pytest.raises(PolicyError, match="idempotency_relay"):
            _ = runtime_of(app).relay_every

    def test_every_worker_of_an_idempotent_app_has_it(self, app: Celery) -> None:
        """Binding a task is enough."""

        def charge(order: str) -> None:
            pass

        app.task(base=IdempotentTask, name=f"charge-{uuid4().hex}", shared=False)(charge)
        app.finalize()

        assert outbox.Relay in app.steps["worker"]
