"""Events of what needs somebody: keys that are missing or reused, results that are lost, records nobody can read."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, states

from celery_idempotent import (
    IdempotentTask,
    KeyMissing,
    OutcomeUnknown,
    Policy,
    ResultLost,
    StoreUnavailable,
    current_attempt,
    idempotent,
)
from celery_idempotent.integration import events
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages import postpone
from celery_idempotent.protocol.record import Record, damaged
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores import readable
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.deliveries import an_app, deliver, published, redeliver

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def app() -> Celery:
    app = an_app()
    app.conf.idempotency_store = FaultyStore(app.conf.idempotency_store)
    return app


@pytest.fixture
def told() -> Iterator[Told]:
    """Every signal that is sent, with what it tells."""
    told: Told = []
    receivers: dict[str, Callable[..., None]] = {}
    for name, signal in SIGNALS.items():

        def receive(*, event: str = name, signal: Any, **about: Any) -> None:
            told.append((event, about))

        receivers[name] = receive
        signal.connect(receive)
    yield told
    for name, signal in SIGNALS.items():
        signal.disconnect(receivers[name])


def names(told: Told) -> list[str]:
    return [str(name) for name, _ in told]


def charging(app: Celery, result: Any = None, **policy: Any) -> Task:
    @app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy("order_id", **policy))
    def charge(order_id: str | None) -> Any:
        return result() if callable(result) else result

    return charge


def spoilt(key: str) -> Record:
    """Read a record that cannot be."""
    raise damaged(key, ValueError("'DONE'"), store="memory")


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_call_without_a_key_is_told_with_what_it_lacks(app: Celery, told: Told, mode: Any) -> None:
    """To receivers, too: a publisher that forgets an argument is somebody's to mend."""
    ended = deliver(charging(app, mode=mode), None, task_id="a")

    assert isinstance(ended.value, KeyMissing) is (mode == "enforce")
    ((name, about),) = told
    assert (name, about["sender"].name, about["key"], about["task_id"]) == ("key_missing", "charge", "", "a")
    assert "order_id" in about["reason"]
    assert about["observed"] is (mode == "observe")


def test_result_that_cannot_be_kept_is_told_when_it_is_dropped_and_when_it_is_missed(app: Celery, told: Told) -> None:
    """First to those who can return something smaller, then to those whose caller has nothing."""
    charge = charging(app, object)
    deliver(charge, "o", task_id="first")
    ended = deliver(charge, "o", task_id="second")

    assert isinstance(ended.value, ResultLost)
    assert names(told) == ["claimed", "completed", "result_dropped", "replayed", "result_lost"]
    assert told[2][1]["reason"].startswith("not encodable")
    assert told[4][1]["reason"] == told[2][1]["reason"]
    assert (told[4][1]["done_by"], told[4][1]["attempt"]) == ("first", 1)


def test_result_that_the_store_has_no_room_for_is_told(app: Celery, told: Told) -> None:
    """The codec keeps it, and the store refuses it."""

    def refuse_large(record: Record) -> None:
        if record.result is not None:
            raise RecordTooLarge("over the limit")

    app.conf.idempotency_store.before_swap = refuse_large
    deliver(charging(app, "x"), "o")

    assert names(told) == ["claimed", "completed", "result_dropped"]
    assert told[2][1]["reason"] == "over the limit"


def test_failure_that_cannot_be_decoded_here_is_told(app: Celery, told: Told) -> None:
    """A worker that accepts less than the one that recorded it."""

    def decline() -> None:
        raise LookupError("declined")

    charge = charging(app, decline, remember=(LookupError,))
    deliver(charge, "o")
    store = app.conf.idempotency_store.store
    (record,) = store.scan()
    in_pickle = replace(record, content_type="application/x-python-serialize", result=b"", revision="spoilt")
    assert store.swap(in_pickle, record.revision) == in_pickle
    ended = deliver(charge, "o")

    assert isinstance(ended.value, ResultLost)
    assert names(told)[-2:] == ["replayed", "result_lost"]


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_claim_that_meets_an_unreadable_record_is_no_outage(app: Celery, told: Told, mode: Any) -> None:
    """The store answers; waiting mends nothing."""

    app.conf.idempotency_store.before_swap = lambda record: spoilt(record.key)
    charge = charging(app, mode=mode)
    ended = deliver(charge, "o", task_id="a")

    assert ended.state == (states.RETRY if mode == "enforce" else states.SUCCESS)
    ((name, about),) = told
    assert (name, about["key"]) == ("record_unreadable", charge.idempotency_key_for("o"))
    assert "'DONE'" in about["reason"]


def test_outage_is_no_unreadable_record(app: Celery, told: Told) -> None:
    """Nor the other way round."""
    app.conf.idempotency_store.faults.extend(["request lost"] * 2)
    deliver(charging(app, mode="observe"), "o")

    assert names(told) == ["store_unavailable"]


def test_record_that_a_scan_passes_over_is_told(told: Told) -> None:
    """Nobody knows whose it is: there is no sender, and the key as far as it can be read."""

    assert list(readable(["k"], spoilt, str)) == []

    ((name, about),) = told
    assert (name, about["sender"], about["key"], about["task_id"]) == ("record_unreadable", None, "k", None)
    assert "'DONE'" in about["reason"]


class Clock:
    """The clock of every worker here, in seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        ours = SimpleNamespace(time=lambda: self.now, sleep=lambda seconds: None)
        patch.setattr(postpone, "time", ours)
        patch.setattr(events, "time", ours)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def away(app: Celery) -> None:
    """The next delivery gets no answer."""
    app.conf.idempotency_store.faults.extend(["request lost"] * 2)


def test_delivery_tells_how_long_it_waited_over_all_its_postponements(app: Celery, told: Told, clock: Clock) -> None:
    """From the first of them, until it may run or is answered; while it goes on nothing is told."""
    charge = charging(app)
    away(app)
    deliver(charge, "o")
    for _ in range(2):
        (message,) = published(app)
        clock.now += 10
        away(app)
        redeliver(app, message)
    (message,) = published(app)
    clock.now += 10
    for _ in range(2):
        redeliver(app, message)

    waits = [(name, about["waited"]) for name, about in told]
    postponed = [("store_unavailable", None)] * 3
    assert waits == [*postponed, ("claimed", 30.0), ("completed", None), ("replayed", 30.0)]


def test_delivery_that_comes_at_once_has_not_waited(app: Celery, told: Told, clock: Clock) -> None:
    """It is none of those that were postponed, instead of one that waited for no time."""
    charge = charging(app)
    for _ in range(2):
        deliver(charge, "o")

    assert {about["waited"] for _, about in told} == {None}


def test_retry_of_a_body_has_not_waited(app: Celery, told: Told, clock: Clock) -> None:
    """What its message waits for is what the body asked for."""

    @app.task(base=IdempotentTask, shared=False, bind=True, name="charge", max_retries=None, idempotent=Policy())
    def charge(self: Any) -> None:
        if self.request.retries == 0:
            raise self.retry(countdown=5)

    away(app)
    deliver(charge)
    for _ in range(2):
        (message,) = published(app)
        clock.now += 10
        redeliver(app, message)

    assert [about["waited"] for name, about in told if name == "claimed"] == [10.0, None]


def test_attempt_that_ends_in_doubt_has_waited_once(app: Celery, told: Told, clock: Clock) -> None:
    """Its claim has told so; a replay of an outcome is no end of a body."""

    def doubts() -> None:
        raise OutcomeUnknown(current_attempt().key, "no answer")

    charge = charging(app, doubts)
    away(app)
    deliver(charge, "o")
    (message,) = published(app)
    clock.now += 10
    redeliver(app, message)

    waits = [(name, about["waited"]) for name, about in told][1:]
    assert waits == [("claimed", 10.0), ("outcome_unknown", None)]


@pytest.mark.parametrize("forged", ["soon", 1.5, True, 0, -1, None, 10**400])
def test_forged_time_of_a_wait_is_no_wait(app: Celery, told: Told, clock: Clock, forged: Any) -> None:
    """Publishers write headers, too."""
    deliver(charging(app), "o", request={"headers": {"idempotency_waiting_since": forged}})

    assert [about["waited"] for name, about in told if name == "claimed"] == [None]


def test_clock_that_is_behind_makes_no_negative_wait(app: Celery, told: Told, clock: Clock) -> None:
    """Two workers, two clocks."""
    charge = charging(app)
    away(app)
    deliver(charge, "o")
    (message,) = published(app)
    clock.now -= 10
    redeliver(app, message)

    assert [about["waited"] for name, about in told if name == "claimed"] == [0.0]


def test_publisher_that_meets_an_unreadable_record_sends_and_tells(app: Celery, told: Told) -> None:
    """Its delivery will meet the same record; a store that is full is an outage."""
    charge = charging(app, publish="once")
    for error, event in (
        (damaged("k", ValueError("'DONE'"), store="memory"), "record_unreadable"),
        (StoreUnavailable("memory", "swap", "no answer"), "store_unavailable"),
        (RecordTooLarge("over the limit"), "store_unavailable"),
    ):

        def fail(record: Record, error: Exception = error) -> None:
            raise error

        app.conf.idempotency_store.before_swap = fail
        charge.delay("o")
        assert names(told)[-1] == event

    assert len(published(app)) == 3


@pytest.mark.parametrize("publish", ["always", "once"])
def test_two_services_that_share_a_task_name_are_told_loudly_once(
    publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Else all that is seen of an effect that never happens is a line at INFO, as of any duplicate."""
    caplog.set_level(logging.INFO, "celery_idempotent")
    store, name, tasks = MemoryStore(), f"send_invoice_{publish}", []
    for each in ("shop", "billing", None):
        app = an_app(idempotency_store=store)
        app.main = each

        @app.task(base=IdempotentTask, shared=False, name=name, idempotent=Policy("order", publish=publish))
        def send_invoice(order: str) -> None: ...

        tasks.append(send_invoice)
    of_shop, of_billing, of_an_app_without_a_name = tasks
    for order in ("o-1", "o-2"):
        deliver(of_shop, order)
        deliver(of_shop, order)
        deliver(of_an_app_without_a_name, order)
    assert "another_app" not in caplog.text

    for order in ("o-1", "o-2"):
        of_billing.delay(order) if publish == "once" else deliver(of_billing, order)

    (line,) = [each for each in caplog.records if "idempotency.another_app" in each.getMessage()]
    assert line.levelno == logging.WARNING
    assert f"another_app task={name} app=billing done_in=shop key=" in line.getMessage()


@pytest.mark.parametrize(("is_task", "level"), [(True, logging.WARNING), (False, logging.ERROR)])
def test_doubt_that_a_delivery_raises_is_one_alarm(
    is_task: bool, level: int, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery logs what a task raises as an error, and trackers take it; of a function nobody else may hear."""

    def charge(order_id: str) -> None:
        raise OutcomeUnknown(current_attempt().key, "no answer")

    for _ in range(2):
        if is_task:
            deliver(app.task(base=IdempotentTask, shared=False, name="charge", idempotent=Policy())(charge), "o-1")
        else:
            with pytest.raises(OutcomeUnknown):
                idempotent(Policy(), app=app)(charge)("o-1")

    lines = [each for each in caplog.records if "outcome_unknown" in each.getMessage()]
    assert [each.levelno for each in lines] == [level, level]
