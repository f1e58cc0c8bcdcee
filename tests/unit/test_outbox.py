"""The outbox: written with the user's rows, published at least once, always under the same task id."""

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import ChannelError  # type: ignore[import-untyped]
from click.testing import CliRunner, Result
from kombu.exceptions import OperationalError
from sqlalchemy import case, create_engine, update
from sqlalchemy.orm import Session

from celery_idempotent import Policy, current_attempt
from celery_idempotent.engine.transaction import sent
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.messages import outbox
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.stores.sql import SQLStore
from tests.support.deliveries import Shop
from tests.support.links import unlinked
from tests.support.scene import raising


class Place(Shop):
    """A shop whose store has an outbox; ``charge`` is what is sent."""

    def __init__(self, store: SQLStore) -> None:
        super().__init__(idempotency_store=store)
        self.sql = store
        self.engine = create_engine(store._url)

    def send(self, *orders: str) -> None:
        with Session(self.engine) as session:
            for order in orders:
                outbox.send(session, self.charge, order)
            session.commit()

    def enqueue(self, *messages: OutboxMessage) -> None:
        with Session(self.engine) as session:
            for message in messages:
                self.sql.enqueue(message, session)
            session.commit()

    def update(self, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(self.sql.outbox).values(**values))

    def relay(self, **limits: int) -> int:
        return outbox.relay(self.app, **limits)

    def orders(self) -> list[str]:
        """The orders of the messages at the broker, taken out."""
        return [message.payload[0][0] for message in self.published()]

    def command(self, *arguments: str) -> Result:
        return CliRunner().invoke(idempotency, arguments, obj=SimpleNamespace(app=self.app))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    place = Place(store)
    yield place
    place.engine.dispose()
    store.close()


def test_message_is_published_after_the_commit_and_only_then(place: Place) -> None:
    """A web request that fails leaves no message behind."""
    sent[0] = 0
    with Session(place.engine) as session:
        outbox.send(session, place.charge, "o-1")
        session.rollback()
        task_id = outbox.send(session, place.charge.s("o-2").set(priority=3), cents=5)
        assert (place.relay(), sent[0]) == (0, 1), "the relay of its worker looks at once"
        session.commit()
    assert place.relay() == 1
    (message,) = place.published()
    assert message.payload[:2] == [["o-2"], {"cents": 5}]
    assert (message.headers["id"], message.properties["priority"], place.relay()) == (task_id, 3, 0)


def test_task_publishes_its_follow_up_once(place: Place) -> None:
    """A message sent in a task's transaction is there after its commit, however often the task is delivered."""

    def book(order: str, cents: int) -> str:
        with current_attempt().transaction() as tx:
            done: str = tx.done(tx.send(place.charge, order))
            return done

    sent[0], place.does = 0, book
    ids = {place.deliver("o-1").value for _ in range(3)}
    assert sent[0]
    assert place.relay() == 1
    assert {message.headers["id"] for message in place.published()} == ids


JSON = "application/json"
DAMAGED = [
    OutboxMessage("damaged", "{", JSON),
    OutboxMessage("damaged", '{"task": "charge", "args": 5, "kwargs": {}, "options": {}}', JSON),
    OutboxMessage("damaged", '{"task": "charge", "options": {"idempotency_key": ""}}', JSON),
    OutboxMessage("damaged", pickle.dumps({}), "application/x-python-serialize"),
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_message_does_not_hold_up_the_others(place: Place, damaged: OutboxMessage, caplog: Any) -> None:
    """It is logged and stays, with the reason for people; what can be published is."""
    place.enqueue(damaged)
    place.send("o-1")
    assert (place.relay(), place.relay(), place.orders()) == (1, 0, ["o-1"])
    (told,) = place.sql.waiting(10)
    assert (told.id, told.failures) == ("damaged", 1)
    assert f'idempotency.relay_failed task_id=damaged failures=1 pause=1 reason="{told.reason}"' in caplog.text


def test_reason_is_one_bounded_line(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A text can neither forge a line of the log nor fill the table; that of a private task may quote an argument."""
    place.task(Policy(private=True), name="cards")
    signature = {"task": "charge", "args": ["o-1"], "kwargs": {}, "options": {"serializer": "\n\x1b\x00" * 999}}
    for message in ({"task": "\n\x1b[31m" * 999}, signature, {**signature, "task": "cards"}):
        place.enqueue(OutboxMessage("a\nb", json.dumps(message), JSON))
    place.relay()
    reasons = [str(each.reason) for each in place.sql.waiting(3)]
    assert reasons[2] == "SerializerNotInstalled"
    assert "reason=SerializerNotInstalled\n" in unlinked(caplog.text)
    assert all(each.isprintable() and len(each) <= 300 for each in reasons)
    assert reasons[1].startswith(r"SerializerNotInstalled: No encoder installed for \n\x1b")
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_pause_grows_with_every_failure(place: Place) -> None:
    """A second, two, four and so on up to ten minutes, kept in the table: a restart or another relay knows it."""
    place.enqueue(DAMAGED[0])
    pauses = []
    for failures in (*range(12), 100, 2**62):
        place.update(taken_until=0, failures=failures)
        before = place.sql.now()
        assert place.relay() == 0
        pauses.append(round((place.sql.waiting(1)[0].next_try - before) / 1000))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600, 600, 600]


def test_messages_that_fail_do_not_starve_the_others(place: Place) -> None:
    """However many and however old; each look publishes some of those that can be published."""
    place.enqueue(*[DAMAGED[0]] * 25)
    place.send(*(f"o-{number}" for number in range(10)))
    assert [(place.relay(limit=10), place.update(taken_until=0))[0] for _ in range(6)] == [0, 0, 0, 0, 5, 5]  # type: ignore[func-returns-value]


ParamValidationError = type("ParamValidationError", (Exception,), {})  # as botocore calls what it does not send


@pytest.mark.parametrize("cause", [ChannelError("queue"), ParamValidationError(), ConnectionError(), None], ids=repr)
def test_messages_wait_while_the_broker_is_away(place: Place, monkeypatch: Any, cause: Exception | None) -> None:
    """Due at once, after those not tried. An error of a channel, which kombu tells alike, is its message's."""
    place.send("o-1", "o-2", "o-3")
    error, publish = OperationalError("away"), outbox._publish
    error.__cause__ = cause
    answers = iter([publish, raising(error)])
    monkeypatch.setattr(outbox, "_publish", lambda *given: next(answers, publish)(*given))
    if isinstance(cause, ConnectionError | None):
        with pytest.raises(OperationalError):
            place.relay()
        assert place.orders() == ["o-1"]
        left = [(each.failures, each.reason) for each in place.sql.waiting(9)]
        assert left == [(1, "OperationalError: away"), (0, None)]
        assert (place.relay(), place.orders()) == (2, ["o-3", "o-2"])
    else:
        assert (place.relay(), place.orders()) == (2, ["o-1", "o-3"])
        assert [(each.failures, each.next_try > place.sql.now()) for each in place.sql.waiting(9)] == [(1, True)]


def test_look_ends_before_others_can_take_what_it_has(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is slow makes no duplicates; what was not tried is given back."""
    place.send("o-1", "o-2")
    publish, clock = outbox._publish, [0.0]
    monkeypatch.setattr("celery_idempotent.clock.monotonic", lambda: clock[0])

    def slow(*arguments: Any) -> None:
        clock[0] += 31
        publish(*arguments)

    monkeypatch.setattr(outbox, "_publish", slow)
    assert [(place.relay(), place.orders()) for _ in range(2)] == [(1, ["o-1"]), (1, ["o-2"])]


def test_command_lists_what_waits(place: Place) -> None:
    """Age, failures, next try and reason; nothing of what a message says, and nothing that a terminal obeys."""
    assert place.command("outbox").output == "TASK ID  AGE  FAILURES  NEXT TRY  REASON\n"
    place.enqueue(DAMAGED[0])
    place.relay()
    place.enqueue(OutboxMessage("late\nr", '{"card": 4242}', JSON))
    column = place.sql.outbox.c
    later = case((column.failures == 1, place.sql.now() + 500_000), else_=0)
    place.update(created_at=column.created_at - 93_784_000, taken_until=later)
    _, damaged, late = place.command("outbox").output.splitlines()
    assert re.fullmatch(r"damaged +1 d 2 h +1 +in 8 min \d+ s +DecodeError: .*", damaged)
    assert re.fullmatch(r"late\\nr +1 d 2 h +0 +now", late)
    assert len(place.command("outbox", "--limit", "1").output.splitlines()) == 2
    message, _ = json.loads(place.command("outbox", "--json").stdout)
    assert (message["task_id"], message["failures"], message["reason"][:13]) == ("damaged", 1, "DecodeError: ")
    assert message["created_at"] < message["next_try"]


def test_command_publishes_what_waits_and_says_what_it_leaves(place: Place) -> None:
    """``relay --once`` for cron; programs are told of all in one object."""
    assert place.command("relay", "--once").output == "the outbox is empty\n"
    place.send("o-1")
    told = place.command("relay", "--once")
    assert (told.exit_code, told.output) == (0, "published 1\n")
    place.send("o-2")
    place.enqueue(DAMAGED[0])
    assert place.command("relay", "--once").stdout == "published 1\n1 still wait; 'outbox' says why\n"
    place.send("o-3", "o-4")
    assert json.loads(place.command("relay", "--once", "--json").stdout) == {"published": 2, "waiting": 1}


@pytest.mark.parametrize(("how", "line"), [((), "published 1\n"), (("--json",), '{"published": 1}\n')])
def test_command_looks_again_until_it_is_interrupted(place: Place, monkeypatch: Any, how: Any, line: str) -> None:
    """In a process of its own, pausing as long as it is told where nothing waits; a line for each that found some."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        place.send(f"o-{len(pauses)}")

    monkeypatch.setattr("celery_idempotent.integration.cli.store.time.sleep", pause)
    assert place.command("relay", "--every", "7", *how).stdout.startswith(line * 2)
    assert (pauses, place.orders()) == ([7, 7, 7], ["o-1", "o-2"])
