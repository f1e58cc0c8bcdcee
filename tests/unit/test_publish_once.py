"""``Policy(publish="once")``: what reaches the broker, and what callers get in place of a message."""
# mypy: allow-untyped-decorators

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.exceptions import Ignore
from celery.exceptions import TimeoutError as NoResult
from celery.result import AsyncResult, EagerResult
from kombu.exceptions import OperationalError
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.orm import Session

from celery_idempotent import (
    IdempotentTask,
    KeyReused,
    OutcomeUnknown,
    Policy,
    ReplayedFailure,
    current_attempt,
    signals,
)
from celery_idempotent.engine.claim import claim
from celery_idempotent.engine.verdicts import judge
from celery_idempotent.errors import LeaseLost, PolicyError, SafeToRetry, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.effects import OnTakeover
from celery_idempotent.protocol.operation import Operation, Run
from celery_idempotent.protocol.record import Record, Status, marked
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.protocol.verdicts import Action
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore, schema
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.stores import StoreWrapper
from tests.support.deliveries import Ended, an_app, deliver, published, redeliver

ONCE = Policy("order_id", publish="once", remember=(LookupError,))
DAY = 86_400


class Counted(StoreWrapper):
    """Counts what a publisher asks of its store, and can be away."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.asked: list[str] = []
        self.away: dict[str, Exception] = {}

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """Note it; unless the store is away, swap."""
        self._note("swap")
        return super().swap(new, expected)

    def delete(self, key: str, expected: str) -> bool:
        """Note it; unless the store is away, delete."""
        self._note("delete")
        return super().delete(key, expected)

    def _note(self, request: str) -> None:
        self.asked.append(request)
        if request in self.away:
            raise self.away[request]


class Shop:
    """An app with one task, its broker and its store."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.memory = MemoryStore(self.clock.now)
        self.store = Counted(self.memory)
        self.app = an_app()
        self.app.conf.update({"idempotency_store": self.store, **settings})
        self.charge = self.task(ONCE)
        self.raises: Exception | None = None

    def task(self, policy: Policy, name: str = "charge", **options: Any) -> Task:
        """A task with ``policy``."""

        @self.app.task(base=IdempotentTask, name=name, shared=False, idempotent=policy, bind=True, **options)
        def body(task: Any, order_id: Any, amount: int = 1) -> Any:
            if self.raises is not None:
                raise self.raises
            return {"order": order_id}

        return body

    def sent(self) -> list[Any]:
        """The messages at the broker, taken out."""
        return published(self.app)

    def ids(self) -> list[str]:
        """Their task ids."""
        return [message.headers["id"] for message in self.sent()]

    def deliver(self) -> list[Ended]:
        """Deliver all messages."""
        return [redeliver(self.app, message) for message in self.sent()]

    def record(self, *args: Any) -> Record | None:
        """What is recorded of a call."""
        return self.memory.get(self.charge.idempotency_key_for(*args))

    def change(self, *args: Any, **changes: Any) -> None:
        """Change what is recorded of a call, as time or another process does."""
        record = self.record(*args)
        assert record is not None
        changed = replace(record, **{"revision": "changed", **changes})
        assert self.memory.swap(changed, record.revision) == changed

    def stale(self) -> None:
        """Let the time go by for which a message that was sent counts as queued."""
        self.clock.advance(DAY * 1000)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have every process that a record names be gone."""
    return lambda: monkeypatch.setattr("celery_idempotent.engine.claim.is_gone", bool)


@pytest.fixture
def skipped() -> Iterator[list[dict[str, Any]]]:
    """What receivers hear of messages that were not sent."""
    heard: list[dict[str, Any]] = []

    def receive(**told: Any) -> None:
        heard.append({name: told[name] for name in ("task_id", "reason", "observed", "fencing_token")})

    signals.publish_skipped.connect(receive)
    yield heard
    signals.publish_skipped.disconnect(receive)


@pytest.mark.parametrize("publish", [lambda t: t.delay("o"), lambda t: t.s("o").apply_async()])
def test_queued_operation_is_published_once(shop: Shop, publish: Callable[[Task], Any]) -> None:
    """However it is called, in whatever form of its arguments."""
    first = publish(shop.charge)
    again = shop.charge.apply_async(kwargs={"order_id": "o"})

    assert shop.ids() == [first.id] == [again.id]


def test_receivers_hear_of_a_message_that_waits(shop: Shop, skipped: list[dict[str, Any]]) -> None:
    """No worker is named, as none has it yet."""
    first = shop.charge.delay("o")
    shop.charge.delay("o")

    assert skipped == [{"task_id": first.id, "reason": "queued", "observed": False, "fencing_token": None}]


def test_fifty_racing_publishers_send_one_message(shop: Shop) -> None:
    """Whoever wins: all have its id."""
    shop.charge.delay("another, for the connection")
    shop.sent()
    begin = threading.Barrier(50)

    def publish(_: int) -> str:
        begin.wait()
        return str(shop.charge.delay("o").id)

    with ThreadPoolExecutor(50) as threads:
        ids = set(threads.map(publish, range(50)))

    assert [*ids] == shop.ids()


def test_running_operation_is_not_published(shop: Shop, skipped: list[dict[str, Any]]) -> None:
    """Its caller gets the id of the message that is executed."""
    first = shop.charge.delay("o")
    (message,) = shop.sent()
    shop.change(
        "o", status=Status.IN_PROGRESS, owner="a", worker="w", attempts=1, lease_until=shop.memory.now() + 60_000
    )

    assert shop.charge.delay("o").id == first.id == message.headers["id"]
    assert shop.sent() == []
    assert skipped == [{"task_id": first.id, "reason": "running on w", "observed": False, "fencing_token": None}]


@pytest.mark.parametrize("backend", ["cache+memory://", "disabled://"])
def test_completed_operation_answers_at_once(backend: str, skipped: list[dict[str, Any]]) -> None:
    """With the recorded value, whatever the result backend knows."""
    shop = Shop(result_backend=backend)
    first = shop.charge.delay("o")
    assert shop.deliver() == [Ended("SUCCESS", {"order": "o"})]

    again = shop.charge.delay("o")

    assert (again.id, again.get(timeout=0), again.state, again.ready()) == (first.id, {"order": "o"}, "SUCCESS", True)
    assert again.as_tuple()[0][0] == first.id
    assert again.successful()
    assert shop.sent() == []
    assert [each["reason"] for each in skipped] == ["completed earlier"]


@pytest.mark.parametrize("backend", ["cache+memory://", "disabled://"])
@pytest.mark.parametrize("redact", [False, True])
def test_failed_operation_raises_its_failure(backend: str, redact: bool) -> None:
    """The recorded one, and ``propagate=False`` gives it as a value, as Celery does."""
    shop = Shop(result_backend=backend)
    task = shop.task(replace(ONCE, private=redact), name="other")
    task.delay("o")
    shop.raises = KeyError("no such order")
    assert [each.state for each in shop.deliver()] == ["FAILURE"]

    again = task.delay("o")

    with pytest.raises(ReplayedFailure if redact else KeyError):
        again.get(timeout=0)
    assert isinstance(again.get(propagate=False), ReplayedFailure if redact else KeyError)
    assert again.failed()
    assert shop.sent() == []


@pytest.mark.parametrize("steers", [Ignore, SafeToRetry, LeaseLost])
def test_recorded_failure_never_steers_who_asks_for_it(shop: Shop, steers: type[Exception]) -> None:
    """Whoever can write the store chooses the type; in another task's body it would end that one's delivery."""
    shop.charge = shop.task(Policy("order_id", publish="once", on_takeover="refuse"), name="other")
    shop.charge.delay("o")
    shop.raises = ValueError("m")
    shop.deliver()
    described = {"module": steers.__module__, "type": steers.__qualname__, "message": "m", "args": ["k", 1]}
    written = runtime_of(shop.app).codec.encode(described)
    shop.change("o", result=written.data, content_type=written.content_type)

    with pytest.raises(ReplayedFailure):
        shop.charge.delay("o").get(timeout=0)


def test_a_callback_on_an_answer_is_called(shop: Shop) -> None:
    """``then`` works as on any result that is ready."""
    shop.charge.delay("o")
    shop.deliver()
    heard: list[Any] = []

    shop.charge.delay("o").then(lambda result: heard.append(result.result))

    assert heard == [{"order": "o"}]


def test_a_result_that_was_lost_is_told_by_a_delivery(shop: Shop) -> None:
    """What cannot be given here may be told elsewhere, and is an error that somebody should see."""
    shop.charge.delay("o")
    shop.deliver()
    shop.change("o", result=None, error="too large")

    assert [shop.charge.delay("o").id] == shop.ids()


def test_message_that_nobody_executed_in_time_is_sent_again(shop: Shop) -> None:
    """Under a new id, as workers remember ids that were revoked; and a backlog costs one message per day."""
    first = shop.charge.delay("o")
    shop.stale()
    second = shop.charge.delay("o")

    assert shop.charge.delay("o").id == second.id != first.id
    messages = shop.sent()
    assert [message.headers["id"] for message in messages] == [first.id, second.id]
    ends = [redeliver(shop.app, message) for message in messages]
    assert ends == [Ended("SUCCESS", {"order": "o"})] * 2
    record = shop.record("o")
    assert record is not None
    assert record.attempts == 1


@pytest.mark.parametrize(
    ("options", "counts_for"),
    [
        ({}, 7_200),
        ({"countdown": 90}, 7_290),
        ({"countdown": 9_000}, 16_200),
        ({"eta": timedelta(seconds=90)}, 7_290),
        ({"expires": 20}, 20),
        ({"expires": 9_000}, 7_200),
        ({"expires": timedelta(seconds=20)}, 20),
        ({"countdown": 9_000, "expires": 9_001}, 9_001),
        ({"expires": -1e30}, 0),
        ({"countdown": 1e30}, 10 * 365 * DAY + 7_200),
    ],
)
@pytest.mark.parametrize(
    "form", [lambda moment: moment, lambda moment: moment.isoformat(), lambda m: m.replace(tzinfo=None)]
)
def test_message_counts_as_queued_by_the_setting_from_when_it_is_due(
    options: dict[str, Any], counts_for: int, form: Callable[[datetime], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no longer than until it expires: then nobody will execute it. Until it is sent, a lease at most."""
    shop = Shop(idempotency_queued_for=7_200)
    announced: list[int] = []

    def counts() -> int:
        record = shop.record("o")
        assert record is not None
        return record.lease_until - shop.memory.now()

    monkeypatch.setattr(Celery, "send_task", lambda *args, **options: announced.append(counts()))
    now = shop.app.now()
    monkeypatch.setattr(shop.app, "now", lambda: now)
    given = {name: form(now + each) if isinstance(each, timedelta) else each for name, each in options.items()}

    shop.charge.apply_async(("o",), **given)

    assert (announced, counts()) == ([min(60, counts_for) * 1000], counts_for * 1000)


def test_expiry_of_the_task_itself_counts(shop: Shop) -> None:
    """``expires`` is an option of tasks, too."""
    task = shop.task(ONCE, name="brief", expires=10)
    first = task.delay("o")
    shop.clock.advance(10_000)

    assert task.delay("o").id != first.id


@pytest.mark.parametrize("option", [{"expires": object()}, {"countdown": object()}])
def test_a_time_that_celery_refuses_leaves_nothing_behind(shop: Shop, option: dict[str, Any]) -> None:
    """Its error surfaces, and the next publisher sends."""
    with pytest.raises((TypeError, ValueError, AttributeError)):
        shop.charge.apply_async(("o",), **option)

    assert shop.record("o") is None


def test_publisher_that_has_ended_leaves_its_message_behind(shop: Shop, gone: Callable[[], None]) -> None:
    """As a script does, or a web server that was restarted: what the broker has is queued all the same."""
    first = shop.charge.delay("o")
    gone()
    shop.clock.advance((DAY - 1) * 1000)

    assert shop.charge.delay("o").id == first.id
    assert shop.ids() == [first.id]


@pytest.mark.parametrize("dies", ["before the message", "after it"])
@pytest.mark.parametrize("is_seen", [True, False])
def test_publisher_that_dies_unconfirmed_holds_the_others_up_for_a_lease_at_most(
    shop: Shop, gone: Callable[[], None], monkeypatch: pytest.MonkeyPatch, dies: str, is_seen: bool
) -> None:
    """Nobody knows whether it has sent its message. On its machine its end is seen; elsewhere a lease has to pass."""
    with monkeypatch.context() as patch:
        if dies == "before the message":
            patch.setattr(Celery, "send_task", lambda *args, **options: None)
        patch.setattr("celery_idempotent.integration.messages.publishing.confirm", lambda *given: None)
        first = shop.charge.delay("o")
    sent = shop.sent()
    assert len(sent) == (dies == "after it")
    if is_seen:
        gone()
    else:
        shop.clock.advance(59_999)
        assert shop.charge.delay("o").id == (sent[0].headers["id"] if sent else shop.record("o").task_id)  # type: ignore[union-attr]
        shop.clock.advance(1)

    again = shop.charge.delay("o")

    assert again.id != getattr(first, "id", None)
    assert shop.charge.delay("o").id == again.id
    assert shop.ids() == [again.id]


def test_confirmation_whose_reply_is_lost_counts(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and is no failure of the publication."""
    swap = shop.store.swap

    def lose(new: Record, expected: str | None) -> Record | None:
        stored = swap(new, expected)
        if len(shop.store.asked) == 2:
            raise StoreUnavailable("memory", "swap", "no answer")
        return stored

    shop.store.swap = lose  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        first = shop.charge.delay("o")
    assert "sent, and not confirmed" in caplog.text
    shop.clock.advance(3_600_000)

    assert shop.charge.delay("o").id == first.id
    assert shop.ids() == [first.id]


@pytest.mark.parametrize("error", [StoreUnavailable("memory", "swap", "no answer"), RecordTooLarge("full")])
def test_message_that_is_not_confirmed_counts_for_a_lease(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """And then the next publisher sends one more; the operation happens once."""
    send = Celery.send_task

    def end(*args: Any, **options: Any) -> Any:
        shop.store.away = {"swap": error}
        return send(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Celery, "send_task", end)
        first = shop.charge.delay("o")
    shop.store.away = {}
    assert shop.charge.delay("o").id == first.id
    shop.clock.advance(60_000)
    second = shop.charge.delay("o")

    messages = shop.sent()
    assert [each.headers["id"] for each in messages] == [first.id, second.id]
    assert {redeliver(shop.app, each).state for each in messages} == {"SUCCESS"}
    assert [each.attempts for each in shop.memory.scan()] == [1]


def test_message_that_is_executed_before_it_is_confirmed_is_not_confirmed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are fast; what they write is not written over."""
    send = Celery.send_task

    def execute(*args: Any, **options: Any) -> Any:
        sent = send(*args, **options)
        assert shop.deliver() == [Ended("SUCCESS", {"order": "o"})]
        return sent

    monkeypatch.setattr(Celery, "send_task", execute)
    shop.charge.delay("o")

    assert shop.record("o").status is Status.COMPLETED  # type: ignore[union-attr]


def test_what_strikes_while_a_message_is_confirmed_surfaces(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the soft time limit of a body that publishes; the message was sent, and counts for a lease."""

    class Struck(Exception):
        pass

    def strike(*given: Any) -> None:
        raise Struck

    with monkeypatch.context() as patch:
        patch.setattr("celery_idempotent.integration.messages.publishing.confirm", strike)
        with pytest.raises(Struck):
            shop.charge.delay("o")

    (first,) = shop.ids()
    assert shop.charge.delay("o").id == first


def test_message_that_is_gone_is_sent_again_once_an_operator_forgets_the_record(shop: Shop) -> None:
    """A purged queue, a revoked message: the store cannot know, and what is recorded counts until its time is over."""
    first = shop.charge.delay("o")
    shop.sent()
    assert shop.charge.delay("o").id == first.id

    seen = shop.record("o")
    assert seen is not None
    judge(shop.memory, seen, Action.FORGET)

    again = shop.charge.delay("o")
    assert shop.ids() == [again.id] != [first.id]


def test_message_that_has_expired_is_followed_by_another(shop: Shop) -> None:
    """No worker executes it."""
    first = shop.charge.apply_async(("o",), expires=3_600)
    shop.clock.advance(3_599_999)
    assert shop.charge.delay("o").id == first.id
    shop.clock.advance(1)
    shop.sent()

    assert [shop.charge.delay("o").id] == shop.ids() != [first.id]


def test_until_it_is_done_and_then_again(shop: Shop) -> None:
    """With ``retain=0`` calls are spared while a message is queued or executed, and the next one runs the body."""
    asked: list[str] = []

    @shop.app.task(base=IdempotentTask, name="rebuild", shared=False, idempotent=Policy(publish="once", retain=0))
    def rebuild() -> int:
        asked.append(rebuild.delay().id)
        return len(asked)

    for number in (1, 2):
        first = rebuild.delay()
        assert rebuild.delay().id == first.id
        assert shop.deliver() == [Ended("SUCCESS", number)]
        assert asked[-1] == first.id
        assert first.get(timeout=1) == number
    assert shop.sent() == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_claim_whose_attempt_is_over_is_sent_under_a_new_id(
    shop: Shop, gone: Callable[[], None], is_gone: bool
) -> None:
    """Its message may be gone for good: revoked, and its process killed. Then workers drop whatever has its id."""
    first = shop.charge.delay("o")
    shop.sent()
    over = shop.memory.now() + (60_000 if is_gone else -1_000)
    process = marked("here:1:2", "a")
    shop.change("o", status=Status.IN_PROGRESS, owner="a", attempts=1, lease_until=over, process=process)
    if is_gone:
        gone()

    again = shop.charge.delay("o")

    assert shop.ids() == [again.id]
    assert again.id != first.id


def test_running_operation_without_late_acknowledgement_is_published(shop: Shop) -> None:
    """Its own message would not come back if its worker died."""
    task = shop.task(ONCE, name="early", acks_late=False)
    with pytest.warns(match="acks_late is off"):
        first = task.delay("o")
    shop.sent()
    record = shop.memory.get(task.idempotency_key_for("o"))
    assert record is not None
    running = replace(record, status=Status.IN_PROGRESS, owner="a", attempts=1, revision="r")
    assert shop.memory.swap(running, record.revision) == running

    assert [task.delay("o").id] == shop.ids() != [first.id]


def test_operation_whose_body_raised_is_published_under_a_new_id(shop: Shop) -> None:
    """The old one's result is that failure, and asking for it would raise at once."""
    first = shop.charge.delay("o")
    shop.raises = ValueError("card reader is out of paper")
    assert [each.state for each in shop.deliver()] == ["FAILURE"]
    shop.raises = None

    again = shop.charge.delay("o")

    with pytest.raises(ValueError, match="out of paper"):
        AsyncResult(first.id, app=shop.app).get(timeout=1)
    assert shop.charge.delay("o").id == again.id != first.id
    assert shop.deliver() == [Ended("SUCCESS", {"order": "o"})]
    assert again.get(timeout=1) == {"order": "o"}
    record = shop.record("o")
    assert record is not None
    assert record.attempts == 2


@pytest.mark.parametrize("on_takeover", ["rerun", "refuse"])
def test_unknown_outcome_is_told_by_the_delivery(shop: Shop, on_takeover: OnTakeover) -> None:
    """Somebody should see it; ``apply_async`` does not raise for it."""
    task = shop.task(replace(ONCE, on_takeover=on_takeover), name="pay")
    task.delay("o")
    shop.sent()
    key = task.idempotency_key_for("o")
    record = shop.memory.get(key)
    assert record is not None
    unknown = replace(record, status=Status.UNKNOWN, owner="a", attempts=1, revision="r")
    assert shop.memory.swap(unknown, record.revision) == unknown

    again = task.delay("o")

    ((state, error),) = ((each.state, each.value) for each in shop.deliver())
    assert (state, type(error)) == ("FAILURE", OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        again.get(timeout=1)


def test_other_arguments_are_refused_by_the_delivery(shop: Shop) -> None:
    """Where every other publisher hears of it, too."""
    shop.charge.delay("o", 1)
    assert [each.state for each in shop.deliver()] == ["SUCCESS"]

    shop.charge.delay("o", 2)

    (ended,) = shop.deliver()
    assert isinstance(ended.value, KeyReused)


def test_announcement_of_other_arguments_keeps_nobody_from_the_key(shop: Shop) -> None:
    """Its message may be gone; the first that is executed has the key."""
    shop.charge.delay("o", 1)
    shop.sent()
    shop.charge.delay("o", 2)

    assert [each.state for each in shop.deliver()] == ["SUCCESS"]


def test_process_that_is_told_to_end_while_it_sends_leaves_nothing_behind(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown or a greenlet's end is no exception of Python's ordinary kind."""
    with monkeypatch.context() as patched:
        patched.setattr(Celery, "send_task", lambda *args, **options: sys.exit())
        with pytest.raises(SystemExit):
            shop.charge.delay("o")

    assert shop.record("o") is None


def test_refused_message_leaves_nothing_behind(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's error surfaces, and the next publisher sends."""
    _refuse(monkeypatch)
    with pytest.raises(OperationalError, match="no broker"):
        shop.charge.delay("o")
    monkeypatch.undo()

    assert shop.record("o") is None
    assert [shop.charge.delay("o").id] == shop.ids()


def test_refused_message_that_was_not_announced_leaves_the_announcement_of_another(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other arguments, here: nothing was written, so there is nothing to undo."""
    shop.charge.delay("o", 1)
    before = shop.record("o")
    _refuse(monkeypatch)

    with pytest.raises(OperationalError, match="no broker"):
        shop.charge.delay("o", 2)

    assert before is not None
    assert shop.record("o") == before


def test_refused_message_of_an_operation_with_attempts_leaves_them(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their steps, their token, and their word on who ran."""
    shop.charge.delay("o")
    shop.raises = ValueError()
    shop.deliver()
    before = shop.record("o")
    _refuse(monkeypatch)

    with pytest.raises(OperationalError, match="no broker"):
        shop.charge.delay("o")

    after = shop.record("o")
    assert before is not None
    assert after is not None
    assert after == replace(before, revision=after.revision)
    assert after.revision != before.revision  # who saw the record before has not seen this one


def test_store_that_is_away_does_not_hide_the_brokers_error(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What stays behind is in doubt when its time is over, and told."""
    _refuse(monkeypatch)
    shop.store.away = {"delete": StoreUnavailable("memory", "delete", "no answer")}

    with caplog.at_level(logging.WARNING), pytest.raises(OperationalError, match="no broker"):
        shop.charge.delay("o")
    monkeypatch.undo()

    assert "the announcement of a message that was not sent stays" in caplog.text
    shop.stale()
    assert [shop.charge.delay("o").id] == shop.ids()


def test_announcement_that_somebody_claimed_is_not_withdrawn(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker had taken the message after all."""

    def claimed(*args: Any, **options: Any) -> None:
        shop.change("o", status=Status.IN_PROGRESS, owner="a", attempts=1)
        raise OperationalError("no answer")

    monkeypatch.setattr(Celery, "send_task", claimed)
    with pytest.raises(OperationalError):
        shop.charge.delay("o")

    record = shop.record("o")
    assert record is not None
    assert record.owner == "a"


def _refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OperationalError("no broker")

    monkeypatch.setattr(Celery, "send_task", refuse)


@pytest.mark.parametrize("error", [StoreUnavailable, StoreMisconfigured])
@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_message_is_sent_when_the_store_is_away(
    shop: Shop, caplog: pytest.LogCaptureFixture, error: type[StoreUnavailable], mode: Any
) -> None:
    """Or holds what this version cannot read; with a line in the log."""
    task = shop.task(replace(ONCE, mode=mode), name="other")
    shop.store.away = {"swap": error("memory", "swap", "no answer")}

    with caplog.at_level(logging.WARNING):
        result = task.delay("o")

    assert [result.id] == shop.ids()
    assert "idempotency.store_unavailable" in caplog.text
    assert "published all the same" in caplog.text


def test_what_strikes_while_an_operation_is_announced_leaves_nothing_behind(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the soft time limit of a body that publishes: its next try has to send."""

    class Struck(Exception):
        pass

    def strike(new: Record, expected: str | None) -> Record | None:
        shop.memory.swap(new, expected)
        raise Struck

    with monkeypatch.context() as patch:
        patch.setattr(shop.store, "swap", strike)
        with pytest.raises(Struck):
            shop.charge.delay("o")

    assert shop.record("o") is None
    assert [shop.charge.delay("o").id] == shop.ids()


def test_store_that_breaks_its_word_does_not_keep_a_message_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that neither wins nor tells who did is asked a bounded number of times."""
    monkeypatch.setattr(shop.store, "swap", lambda new, expected: None)

    assert [shop.charge.delay("o").id] == shop.ids()


def test_app_without_a_store_is_refused(shop: Shop) -> None:
    """At the first message: it would be published as often as it is called, without anybody noticing."""
    shop.app.conf.idempotency_store = None

    with pytest.raises(PolicyError, match="idempotency_store"):
        shop.charge.delay("o")
    assert shop.sent() == []


def test_call_without_a_key_is_told_by_its_delivery(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """As without the option: who publishes may be Celery itself."""
    with caplog.at_level(logging.WARNING):
        result = shop.charge.delay(None)

    assert "idempotency.not_announced task=charge" in caplog.text
    (ended,) = shop.deliver()
    assert type(ended.value).__name__ == "KeyMissing"
    assert result.id


def test_what_a_key_function_says_is_redacted(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Where the policy says that the text of an exception may hold what must not be logged."""

    def key(order_id: str, amount: int) -> str:
        raise ValueError(f"bad card {order_id}")

    task = shop.task(Policy(key, publish="once", private=True), name="cards")
    with caplog.at_level(logging.WARNING):
        task.delay("4111")

    assert "idempotency.not_announced task=cards reason=PolicyError" in caplog.text
    assert "4111" not in caplog.text


def test_costs(shop: Shop) -> None:
    """Two requests for a call that is sent, one for any other, and one for a delivery; none without the policy."""
    always, off = shop.task(Policy("order_id"), name="always"), shop.task(replace(ONCE, mode="off"), name="off")
    for task in (always, off):
        task.delay("o")
        assert shop.store.asked == []
    shop.sent()
    for _ in range(3):
        shop.charge.delay("o")
    assert shop.store.asked == ["swap"] * (2 + 1 + 1)
    shop.store.asked.clear()
    shop.deliver()
    assert shop.store.asked == ["swap"] * (2 + 1)
    shop.store.asked.clear()
    shop.charge.delay("o")
    assert shop.store.asked == ["swap"]


def test_retry_is_published(shop: Shop) -> None:
    """It continues the operation, which is running."""

    @shop.app.task(base=IdempotentTask, name="flaky", shared=False, idempotent=Policy(publish="once"), bind=True)
    def flaky(task: Any, order_id: str) -> int:
        if task.request.retries < 2:
            raise task.retry(countdown=0, args=(f"{order_id}!",))
        return int(task.request.retries)

    first = flaky.delay("o")
    states = []
    shop.store.asked.clear()
    while messages := shop.sent():
        assert [message.headers["id"] for message in messages] == [first.id]
        states += [redeliver(shop.app, message) for message in messages]

    assert [each.state for each in states] == ["RETRY", "RETRY", "SUCCESS"]
    assert len(shop.store.asked) == 3 * 3  # each claim meets the record that was written before it
    assert flaky.apply_async(("o",), retries=1).id != first.id
    assert len(shop.sent()) == 1


def test_postponed_conflict_and_outage_are_published(shop: Shop) -> None:
    """They are the first message itself."""
    first = shop.charge.delay("o")
    (message,) = shop.sent()
    shop.change("o", status=Status.IN_PROGRESS, owner="a", attempts=1, lease_until=shop.memory.now() + 60_000)
    shop.store.asked.clear()
    assert redeliver(shop.app, message).state == "RETRY"
    assert shop.store.asked == ["swap"]  # the claim, which is told who runs
    (postponed,) = shop.sent()
    shop.store.away = {"swap": StoreUnavailable("memory", "swap", "no answer")}
    assert redeliver(shop.app, postponed).state == "RETRY"

    assert shop.ids() == [first.id]


def test_replacement_is_published(shop: Shop) -> None:
    """It has the id of the task that it replaces, whose result would never come."""

    @shop.app.task(base=IdempotentTask, name="front", shared=False, bind=True)
    def front(task: Any, order_id: str) -> None:
        task.replace(shop.charge.si(order_id))

    shop.charge.delay("o")
    shop.deliver()
    result = front.delay("o")
    shop.deliver()

    assert shop.ids() == [result.id]


def test_headers_that_a_body_forwards_make_no_continuation(shop: Shop) -> None:
    """The identity of a delivery counts for its own task and id alone."""
    heard: list[Any] = []

    @shop.app.task(base=IdempotentTask, name="forward", shared=False, bind=True, idempotent=Policy("of"))
    def forward(task: Any, of: int) -> None:
        if task.request.retries == 0:
            raise task.retry(countdown=0)
        heard.append(task.request.headers)
        shop.charge.apply_async(("o",), headers=task.request.headers)

    forward.delay(1)
    shop.deliver()
    shop.deliver()
    assert heard
    first = shop.ids()

    assert shop.charge.delay("o").id == first[0]
    assert shop.sent() == []


def test_a_suppressed_message_is_a_child_of_the_task_that_asked_for_it(shop: Shop) -> None:
    """As the message would have been."""

    @shop.app.task(name="parent", shared=False, bind=True)
    def parent(task: Any) -> list[str]:
        for again in (True, False):
            shop.charge.apply_async(("o",), add_to_parent=again)
        return [child.id for child in task.request.children]

    first = shop.charge.delay("o")
    shop.sent()

    assert deliver(parent).value == [first.id]


def test_a_task_that_asks_for_itself_is_not_its_own_child(shop: Shop) -> None:
    """Who collects the results of a task's children would go round in circles."""

    @shop.app.task(base=IdempotentTask, name="again", shared=False, bind=True, idempotent=Policy(publish="once"))
    def again(task: Any) -> list[str]:
        return [task.delay().id, *(child.id for child in task.request.children)]

    assert deliver(again, task_id="one").value == ["one"]
    assert shop.sent() == []


def test_item_of_a_list_lends_nobody_its_message(shop: Shop) -> None:
    """The list's result would be taken for the item's, and the other way round."""
    items = shop.charge.map(["o"]).apply_async()
    shop.raises = ValueError()
    assert [each.state for each in shop.deliver()] == ["FAILURE"]
    record = shop.record("o")
    assert record is not None
    assert record.task_id == f"{items.id}[]"
    shop.change("o", status=Status.IN_PROGRESS, lease_until=0)

    assert [shop.charge.delay("o").id] == shop.ids() != [items.id]


def test_redelivery_of_a_list_meets_its_own_item_and_waits(shop: Shop) -> None:
    """However often: it is what recovers the list when its first worker dies, so ``on_conflict`` does not end it."""
    task = shop.task(Policy("order_id", on_conflict="raise"), name="items")
    task.map(["o"]).apply_async()
    (message,) = shop.sent()
    identity = task.idempotency_identity(["o"], {}, headers={}, task_id="")
    held = Operation(
        identity=identity,
        policy=task.idempotency_policy,
        task="items",
        task_id=f"{message.headers['id']}[]",
        worker="w",
    )
    assert isinstance(claim(shop.memory, held), Run)

    for _ in range(3):
        assert redeliver(shop.app, message).state == "RETRY"
        (message,) = shop.sent()


def test_eager_calls_run(shop: Shop) -> None:
    """Nothing is published, so nothing is announced: the guard of the call itself decides."""
    shop.app.conf.task_always_eager = True

    for _ in range(2):
        result = shop.charge.delay("o")
        assert isinstance(result, EagerResult)
        assert result.get() == {"order": "o"}
    assert shop.store.asked == ["swap"] * 3
    assert shop.charge.apply(("o",)).get() == {"order": "o"}
    assert shop.charge("o") == {"order": "o"}


def test_celerys_own_tasks_are_published(shop: Shop) -> None:
    """With ``task_cls`` and an app-wide policy they have this class, too, and are nobody's operation."""
    app = Celery("own", set_as_current=False, broker="memory://", task_cls="celery_idempotent:IdempotentTask")
    app.conf.update(
        {**shop.app.conf.changes, "idempotency_policy": Policy(publish="once"), "task_default_queue": "own-tasks"}
    )
    cleanup = app.tasks["celery.backend_cleanup"]
    assert isinstance(cleanup, IdempotentTask)
    for _ in range(2):
        cleanup.delay()

    assert len(published(app)) == 2


@pytest.mark.parametrize("ended", [False, True])
def test_a_callback_is_called_whoever_publishes(shop: Shop, ended: bool) -> None:
    """A message with ``link`` is sent under its own id, by whatever argument it is given."""
    thank = shop.task(Policy("order_id"), name="thank")
    first = shop.charge.delay("o")
    if ended:
        shop.deliver()
    by_name = shop.charge.apply_async(("o",), link=thank.si("a"))
    by_place = shop.charge.apply_async(("o",), {}, None, None, thank.si("b"))

    assert shop.ids() == ([] if ended else [first.id]) + [by_name.id, by_place.id]
    assert len({first.id, by_name.id, by_place.id}) == 3


def test_group_chain_and_chord_go_on(shop: Shop) -> None:
    """Of operations that have an outcome: every member is sent, and every result that was handed out comes."""
    for order in "abc":
        shop.charge.delay(order)
    shop.deliver()
    collect = shop.task(replace(ONCE, key=lambda order_id, amount: "all"), name="collect")
    collect.delay("x")
    shop.deliver()

    grouped = group(shop.charge.si(order) for order in "ab").apply_async()
    chained = chain(shop.charge.si("a"), shop.charge.si("b"), shop.charge.si("c")).apply_async()
    joined = chord([shop.charge.si("a"), shop.charge.si("b")], shop.charge.si("c")).apply_async()
    for _ in range(100):
        if not shop.deliver():
            break

    assert grouped.get(timeout=1) == [{"order": "a"}, {"order": "b"}]
    assert chained.get(timeout=1) == {"order": "c"}
    assert joined.get(timeout=1) == {"order": "c"}


def test_a_frozen_signature_is_sent_under_its_id(shop: Shop) -> None:
    """Somebody has its result in hand."""
    shop.charge.delay("o")
    shop.deliver()
    signature = shop.charge.si("o")
    handed_out = signature.freeze()

    signature.apply_async()

    assert shop.ids() == [handed_out.id]


def test_the_callers_own_task_id_is_that_of_the_first_message(shop: Shop) -> None:
    """Of a second one it is not used: nothing is sent under it."""
    assert shop.charge.apply_async(("o",), task_id="one").id == "one"
    assert shop.charge.apply_async(("o",), task_id="two").id == "one"
    assert shop.ids() == ["one"]


def test_explicit_key_is_what_counts(shop: Shop) -> None:
    """As for a delivery."""
    first = shop.charge.apply_async(("o",), idempotency_key="k")

    assert shop.charge.apply_async(("o",), idempotency_key="k").id == first.id
    assert shop.charge.delay("o").id != first.id


@pytest.mark.parametrize("ignored", [True, False])
def test_result_that_is_ignored_is_not_waited_for(shop: Shop, ignored: bool) -> None:
    """As Celery does: ``get`` returns None at once."""
    for _ in range(2):
        result = shop.charge.apply_async(("o",), ignore_result=ignored)

    if ignored:
        assert result.get(timeout=0.01) is None
    else:
        with pytest.raises(NoResult):
            result.get(timeout=0.01)


def test_every_tick_of_beat_is_published_where_ticks_are_operations(shop: Shop) -> None:
    """With the default key each is one of its own; with a key of its own the schedule is the same operation again."""
    rebuild = shop.task(Policy(publish="once"), name="rebuild")
    for task, messages in ((rebuild, 2), (shop.charge, 1)):
        for _ in range(2):
            task.apply_async(("o",), headers={"celery_beat_task": True})
        assert len(shop.sent()) == messages


def test_observing_publishes_all_and_tells_what_would_have_been_suppressed(
    shop: Shop, skipped: list[dict[str, Any]]
) -> None:
    """Under their own ids."""
    task = shop.task(replace(ONCE, mode="observe"), name="observed")
    ids = [task.delay("o").id for _ in range(3)]
    assert [(each["task_id"], each["observed"]) for each in skipped] == [(ids[0], True)] * 2
    record = shop.memory.get(task.idempotency_key_for("o"))
    assert record is not None
    over = replace(record, status=Status.IN_PROGRESS, owner="a", attempts=1, revision="r")
    assert shop.memory.swap(over, record.revision) == over
    ids.append(task.delay("o").id)

    assert shop.ids() == ids
    assert len(set(ids)) == 4


def test_nothing_of_the_arguments_is_told(
    shop: Shop, caplog: pytest.LogCaptureFixture, skipped: list[dict[str, Any]]
) -> None:
    """Logs and signals carry the key, which is hashed."""
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            shop.charge.delay("secret-order")

    assert "idempotency.publish_skipped task=charge" in caplog.text
    assert "secret-order" not in caplog.text + repr(skipped)


@pytest.fixture
def engine(tmp_path: Path, shop: Shop) -> Iterator[Engine]:
    """The database of the app's own store, which has an outbox."""
    store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    shop.app.conf.idempotency_store = store
    engine = create_engine(store._url)
    yield engine
    engine.dispose()
    store.close()


def test_relay_of_an_outbox_publishes_once(shop: Shop, engine: Engine) -> None:
    """What it sends is looked at as every other message is, when it is sent; the outbox is emptied all the same."""
    with Session(engine) as session:
        ids = [outbox.send(session, shop.charge, "o") for _ in range(3)]
        session.commit()

    assert outbox.relay(shop.app) == 3
    assert shop.ids() == ids[:1]


def test_relay_that_was_killed_is_stood_in_for_by_one_that_cannot_see_its_end(
    shop: Shop, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one finds the operation announced, under the very id, and cannot tell whether it was sent."""
    with Session(engine) as session:
        outbox.send(session, shop.charge, "o")
        session.commit()
    with monkeypatch.context() as patch:
        patch.setattr(SQLStore, "forget", lambda store, published: None)
        outbox.relay(shop.app)
    first = shop.ids()
    with engine.begin() as connection:
        connection.execute(update(schema.outbox).values(taken_until=0))

    assert outbox.relay(shop.app) == 1
    assert shop.ids() == first


def test_message_of_a_bodys_transaction_is_published_once(shop: Shop, engine: Engine) -> None:
    """However often a body sends it, and by whichever of its tools."""

    @shop.app.task(base=IdempotentTask, name="order", shared=False, bind=True)
    def order(task: Any, order_id: str) -> None:
        current_attempt().send("charge", shop.charge, order_id)
        with current_attempt().transaction() as tx:
            tx.send(shop.charge, order_id)
            tx.send(shop.charge, order_id)
            tx.done(None)

    assert deliver(order, "o").state == "SUCCESS"
    outbox.relay(shop.app)

    assert len(shop.ids()) == 1
