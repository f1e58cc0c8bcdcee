"""The outbox: written with the user's rows, published at least once, always under the same task id."""

import json
import logging
import pickle
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from amqp import ChannelError  # type: ignore[import-untyped]
from celery import Celery
from click.testing import CliRunner, Result
from kombu.exceptions import OperationalError
from sqlalchemy import Engine, case, create_engine, update
from sqlalchemy.orm import Session

from celery_idempotent import IdempotentTask, Policy, PolicyError, StoreUnavailable, current_attempt
from celery_idempotent.engine.transaction import sent
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.sql import SQLStore
from tests.support.deliveries import an_app, deliver, published
from tests.support.links import unlinked
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

    def pay() -> None:
        pass

    app.task(name="ship", shared=False)(ship)
    app.task(base=IdempotentTask, name="pay", shared=False)(pay)
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
        with current_attempt().transaction() as tx:
            done: str = tx.done(tx.send(app.tasks["ship"], order))
            return done

    sent[0] = 0
    for _ in range(3):
        deliver(book, "o-1")

    assert sent[0], "the relay of its worker looks at once"
    assert outbox.relay(app) == 1
    (message,) = published(app)
    assert message.headers["id"] == book.apply(("o-1",)).get()


def _enqueued(engine: Engine, store: SQLStore, *messages: OutboxMessage) -> None:
    with Session(engine) as session:
        for message in messages:
            store.enqueue(message, session)
        session.commit()


def test_reason_of_a_task_that_redacts_errors_is_a_type(
    app: Celery, engine: Engine, store: SQLStore, caplog: pytest.LogCaptureFixture
) -> None:
    """In the database and in the log: an error of publishing can quote an argument."""

    @app.task(base=IdempotentTask, name="cards", shared=False, idempotent=Policy(private=True))
    def cards(card: str) -> None: ...

    signature = '{"task": "cards", "args": ["o"], "kwargs": {}, "options": {"serializer": "4111-1111"}}'
    _enqueued(engine, store, OutboxMessage("a", signature, "application/json"))

    outbox.relay(app)

    (told,) = store.waiting(10)
    assert told.reason == "SerializerNotInstalled"
    assert "failures=1 pause=1 reason=SerializerNotInstalled\n" in unlinked(caplog.text)
    assert "4111" not in caplog.text


DAMAGED = [
    OutboxMessage("damaged", "{", "application/json"),
    OutboxMessage("damaged", "[]", "application/json"),
    OutboxMessage("damaged", '{"args": []}', "application/json"),
    OutboxMessage("damaged", '{"task": "ship", "args": 5, "kwargs": {}, "options": {}}', "application/json"),
    OutboxMessage("damaged", '{"task": "pay", "options": {"serializer": "none such"}}', "application/json"),
    OutboxMessage("damaged", '{"task": "pay", "options": {"idempotency_key": ""}}', "application/json"),
    OutboxMessage("damaged", pickle.dumps({}), "application/x-python-serialize"),
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_message_does_not_hold_up_the_others(
    app: Celery, engine: Engine, store: SQLStore, damaged: OutboxMessage, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and stays, with the reason for people; what can be published is."""
    _enqueued(engine, store, damaged)
    _waiting(app, engine, "o-1")

    assert outbox.relay(app) == 1

    (told,) = store.waiting(10)
    assert (told.id, told.failures) == ("damaged", 1)
    assert f'idempotency.relay_failed task_id=damaged failures=1 pause=1 reason="{told.reason}"' in caplog.text
    assert len(published(app)) == 1
    assert outbox.relay(app) == 0
    assert [each.failures for each in store.waiting(10)] == [1]


def _make_due(engine: Engine, store: SQLStore) -> None:
    """As when the pauses are over."""
    with engine.begin() as connection:
        connection.execute(update(store.outbox).values(taken_until=0))


def test_pause_grows_with_every_failure(app: Celery, engine: Engine, store: SQLStore) -> None:
    """A second, two, four and so on up to ten minutes, kept in the table: a restart or another relay knows it."""
    _enqueued(engine, store, DAMAGED[0])
    pauses = []
    for _ in range(12):
        _make_due(engine, store)
        before = store.now()
        assert outbox.relay(app) == 0
        pauses.append(round((store.waiting(1)[0].next_try - before) / 1000))

    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


@pytest.mark.parametrize("failures", [100, 2**62])
def test_pause_of_a_message_that_failed_for_ever_is_the_longest(
    app: Celery, engine: Engine, store: SQLStore, failures: int
) -> None:
    """Whatever the table says."""
    _enqueued(engine, store, DAMAGED[0])
    with engine.begin() as connection:
        connection.execute(update(store.outbox).values(failures=failures))

    assert outbox.relay(app) == 0
    assert 599_000 < store.waiting(1)[0].next_try - store.now() <= 600_000


def test_messages_that_fail_do_not_starve_the_others(app: Celery, engine: Engine, store: SQLStore) -> None:
    """However many and however old; each look publishes some of those that can be published."""
    _enqueued(engine, store, *[DAMAGED[0]] * 25)
    _waiting(app, engine, *(f"o-{number}" for number in range(10)))
    looks: list[int] = []
    while sum(looks) < 10:
        looks.append(outbox.relay(app, limit=10))
        _make_due(engine, store)

    assert looks == [0, 0, 0, 0, 5, 5]


def test_reason_is_one_bounded_line(
    app: Celery, engine: Engine, store: SQLStore, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception's text can neither forge a line of the log nor fill the table."""
    _enqueued(engine, store, OutboxMessage("a\nb", json.dumps({"task": "\n\x1b[31m" * 999}), "application/json"))
    signature = {"task": "ship", "args": ["o-1"], "kwargs": {}, "options": {"serializer": "\n\x1b\x00" * 999}}
    _enqueued(engine, store, OutboxMessage("c", json.dumps(signature), "application/json"))

    outbox.relay(app)

    reasons = [str(each.reason) for each in store.waiting(2)]
    assert all(each.isprintable() and len(each) <= 300 for each in reasons)
    assert reasons[1].startswith("SerializerNotInstalled: No encoder installed for \\n\\x1b")
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_messages_wait_while_the_broker_is_away(
    app: Celery, engine: Engine, store: SQLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was published before is forgotten; the rest is published by the next look, what was not tried first."""
    _waiting(app, engine, "o-1", "o-2", "o-3")
    publish, calls = outbox._publish, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OperationalError("away")
        publish(*arguments)

    monkeypatch.setattr(outbox, "_publish", failing)
    with pytest.raises(OperationalError):
        outbox.relay(app)

    assert [message.payload[0] for message in published(app)] == [["o-1"]]
    assert [each.reason for each in store.waiting(9)] == ["OperationalError: away", None]
    assert outbox.relay(app) == 2
    assert [message.payload[0] for message in published(app)] == [["o-3"], ["o-2"]]


class ParamValidationError(Exception):
    """Called as botocore calls what it does not send."""


@pytest.mark.parametrize(
    ("cause", "is_of_the_message"),
    [(ConnectionError(), False), (None, False), (ChannelError("queue"), True), (ParamValidationError(), True)],
)
def test_error_of_a_channel_is_one_of_the_message(
    app: Celery,
    engine: Engine,
    store: SQLStore,
    monkeypatch: pytest.MonkeyPatch,
    cause: Exception | None,
    is_of_the_message: bool,
) -> None:
    """kombu tells of both by the same exception; only without a connection it is of no use to go on."""
    _waiting(app, engine, "o-1", "o-2")
    publish = outbox._publish

    def failing(app: Celery, message: OutboxMessage) -> None:
        if message.id == store.waiting(1)[0].id:
            raise OperationalError("away") from cause
        publish(app, message)

    monkeypatch.setattr(outbox, "_publish", failing)
    if is_of_the_message:
        assert outbox.relay(app) == 1
    else:
        with pytest.raises(OperationalError):
            outbox.relay(app)

    left = store.waiting(9)
    assert [each.failures for each in left] == ([1] if is_of_the_message else [1, 0])
    assert (left[0].next_try > store.now()) is is_of_the_message


def test_look_ends_before_others_can_take_what_it_has(
    app: Celery, engine: Engine, store: SQLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that is slow makes no duplicates; what was not tried is given back."""
    _waiting(app, engine, "o-1", "o-2")
    publish = outbox._publish
    monkeypatch.setattr(outbox, "_HOLD", 60_000)
    clock = [0.0]
    monkeypatch.setattr("celery_idempotent.integration.messages.outbox.clock.monotonic", lambda: clock[0])

    def slow(*arguments: Any) -> None:
        clock[0] += 31
        publish(*arguments)

    monkeypatch.setattr(outbox, "_publish", slow)
    assert outbox.relay(app) == 1
    assert outbox.relay(app) == 1
    assert [message.payload[0] for message in published(app)] == [["o-1"], ["o-2"]]


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


def test_command_lists_what_waits(app: Celery, engine: Engine, store: SQLStore) -> None:
    """Age, failures, next try and reason; nothing of what a message says, and nothing that a terminal obeys."""
    listed = partial(CliRunner().invoke, idempotency, obj=SimpleNamespace(app=app))
    assert listed(["outbox"]).output == "TASK ID  AGE  FAILURES  NEXT TRY  REASON\n"

    _enqueued(engine, store, DAMAGED[0])
    outbox.relay(app)
    _enqueued(engine, store, OutboxMessage("late\nr", '{"card": 4242}', "application/json"))
    with engine.begin() as connection:
        connection.execute(
            update(store.outbox).values(
                created_at=store.outbox.c.created_at - 93_784_000,
                taken_until=case((store.outbox.c.failures == 1, store.now() + 500_000), else_=0),
            )
        )

    result = listed(["outbox"])
    assert result.exit_code == 0
    _, damaged, later = result.output.splitlines()
    assert re.fullmatch(r"damaged +1 d 2 h +1 +in 8 min \d+ s +DecodeError: .*", damaged)
    assert re.fullmatch(r"late\\nr +1 d 2 h +0 +now", later)
    assert len(listed(["outbox", "--limit", "1"]).output.splitlines()) == 2
    app.conf.idempotency_store = an_app().conf.idempotency_store
    assert "needs an SQL store" in listed(["outbox"]).output


def test_command_publishes_what_waits(app: Celery, engine: Engine) -> None:
    """``relay --once`` for cron."""
    _waiting(app, engine, "o-1")

    result = _command(app, "--once")

    assert (result.exit_code, result.output) == (0, "published 1\n")
    assert _command(app, "--once").output == "the outbox is empty\n"


def test_command_says_what_it_leaves(app: Celery, engine: Engine, store: SQLStore) -> None:
    """What cannot be published waits on; and the same for programs, who are told of all in one object."""
    _waiting(app, engine, "o-1")
    _enqueued(engine, store, DAMAGED[0])

    told = _command(app, "--once")
    assert told.output.startswith("published 1\n")
    assert told.stdout.endswith("1 still wait; 'outbox' says why\n")

    _waiting(app, engine, "o-2", "o-3")
    assert json.loads(_command(app, "--once", "--json").stdout) == {"published": 2, "waiting": 1}
    listed = CliRunner().invoke(idempotency, ["outbox", "--json"], obj=SimpleNamespace(app=app)).stdout
    ((message),) = json.loads(listed)
    assert (message["task_id"], message["failures"]) == ("damaged", 1)
    assert message["reason"].startswith("DecodeError: ")
    assert message["created_at"] < message["next_try"]


def test_command_looks_again_for_programs(app: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each look that published something."""
    _waiting(app, engine, "o-1")

    def pause(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("celery_idempotent.integration.cli.store.time.sleep", pause)
    assert json.loads(_command(app, "--json").stdout) == {"published": 1}


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

    monkeypatch.setattr("celery_idempotent.integration.cli.store.time.sleep", pause)
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

    def test_asks_rarely_while_nothing_is_sent_and_at_once_when_something_was(
        self, app: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pause doubles up to 15 seconds, in case somebody else sends; a body of this worker ends it."""
        asked_at, now, is_sending = [], 0.0, False
        monkeypatch.setattr(outbox, "relay", lambda app: asked_at.append(now))
        monkeypatch.setattr("random.uniform", lambda low, high: high)
        step = outbox.Relay(SimpleNamespace(app=app, steps=[]))

        def wait(seconds: float) -> bool:
            nonlocal now, is_sending
            now += seconds
            if now == 200 and not is_sending:
                is_sending = True
                with Session(engine) as session:
                    outbox.send(session, app.tasks["ship"], "o-1")
            return now > 210

        sent[0] = 0
        step._stopping = SimpleNamespace(wait=wait)  # type: ignore[assignment]
        step._run(app, 1.0)
        assert asked_at == [0, 1, 3, 7, *range(15, 201, 15), 201, 202, 204, 208]

    def test_tells_an_outage_once_and_its_end(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not at every look of every worker."""
        errors: list[Exception | None] = [*[StoreUnavailable("s", "take", "away")] * 3, None, None]

        def away(app: Celery) -> int:
            error = errors.pop(0)
            if error is not None:
                raise error
            return 0

        monkeypatch.setattr(outbox, "relay", away)
        step = outbox.Relay(SimpleNamespace(app=app, steps=[]))
        step._stopping = SimpleNamespace(wait=lambda seconds: not errors)  # type: ignore[assignment]
        with caplog.at_level(logging.INFO):
            step._run(app, 1.0)
        told = [each.partition(" ")[0].removeprefix("event=idempotency.") for each in caplog.messages]
        assert told == ["relay_failed", "relay_resumed"]

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
