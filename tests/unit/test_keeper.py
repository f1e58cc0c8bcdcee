"""The keeper: which messages it holds, for how long, and what it does about a broker that does not answer."""

import gc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from celery import Celery
from celery.signals import task_received
from celery.worker import state
from celery.worker.request import Request
from click import ClickException

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.integration.broker.extenders import Missing, Refused, SqsExtender
from celery_idempotent.integration.broker.holding import HeldMessage, HeldMessages, Keeper, due
from tests.support.deliveries import an_app
from tests.support.links import unlinked
from tests.support.waiting import wait_until
from tests.unit.test_extenders import RedisChannel

GUARDED: dict[str, Any] = {"base": IdempotentTask}
OFF: dict[str, Any] = {**GUARDED, "idempotent": Policy(mode="off")}
OBSERVED: dict[str, Any] = {**GUARDED, "idempotent": Policy(mode="observe", deadline=90)}


def a_request(task: Any, tag: str, queue: str | None = "orders") -> Any:
    """As Celery's, as far as the keeper looks at it; it can be forgotten."""
    message = SimpleNamespace(delivery_tag=tag, queue=queue)
    names = {"name": "shop.charge", "id": f"id-{tag}", "acknowledged": False}
    return type("Request", (), {"task": task, "message": message, **names})()


class FakeExtender(SqsExtender):
    """A broker with a visibility timeout of a minute that does what a test says."""

    longest = 12 * 3600.0

    def __init__(self) -> None:
        self.extended: list[dict[str, int]] = []
        self.asked = self.restored = 0
        self.timeout: float | Exception = 60
        self.answer = Refused()

    def queue_of(self, message: Any) -> str:
        if message.queue is None:
            raise Missing("the queue of a message")
        return str(message.queue)

    def visibility(self, queue: str) -> float:
        self.asked += 1
        if isinstance(self.timeout, Exception):
            raise self.timeout
        return self.timeout

    def extend(self, queue: str, seconds: Mapping[str, int]) -> Refused:
        self.extended.append(dict(seconds))
        return self.answer

    def restore(self) -> None:
        self.restored += 1


def a_task(app: Celery, **options: Any) -> Any:
    def charge(order_id: str) -> None: ...

    return app._task_from_fun(charge, name="shop.charge", **options)


class Place:
    """A worker's held messages, over a broker and a clock of the test; all are of one task."""

    def __init__(self, *tags: str, everything: bool = False, queue: str | None = "orders", **options: Any) -> None:
        self.extender, self.now = FakeExtender(), 1000.0
        self.holding = HeldMessages(self.extender, everything=everything, clock=lambda: self.now)
        task = a_task(an_app(), **(options or GUARDED))
        self.requests = {tag: a_request(task, tag, queue) for tag in tags}
        for each in self.requests.values():
            self.holding.receive(each)

    def look(self, after: float = 20) -> float:
        self.now += after
        return self.holding.look()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [unlinked(each).removeprefix("event=idempotency.") for each in caplog.messages]


def a_message(age: float, number: int = 0) -> HeldMessage:
    """A message at time 1000 that was extended so many seconds ago."""
    return HeldMessage(f"tag-{number}", "queue", 1000 - age, 1000 - age, lambda: None)


def test_a_request_is_filled_with_what_is_soon_due_and_none_is_made_for_that() -> None:
    """Eleven are due, so there is room for nine more, the oldest, from half a third on."""
    now_due = [a_message(30, number) for number in range(11)]
    soon = [a_message(10 + number / 100, 20 + number) for number in range(15)]
    assert list(due([a_message(9.9), *soon, *now_due], 60, 1000, 10)) == [*now_due, *reversed(soon)][:20]
    assert due([a_message(9.9), *now_due[:1]], 60, 1000, 10) == now_due[:1]
    assert due(soon, 60, 1000, 10) == []
    assert len(due([a_message(10, 1), *now_due[:1]], 60, 1000, 10)) == 2


def test_a_message_is_extended_every_third_of_its_timeout_until_it_is_acknowledged() -> None:
    """For as long as its worker has it, and no longer."""
    place = Place("a", "forgotten")
    del place.requests["forgotten"]  # by Celery: only another delivery can bring that message to its end
    gc.collect()
    assert [place.look(1) for _ in range(99)] == [1] * 99
    assert place.extender.extended == [{"a": 60}] * 4
    place.extender.longest = float("inf")  # as of Redis, where nobody limits it
    place.look(7 * 86_400)
    place.requests["a"].acknowledged = True
    place.look(60)
    assert place.extender.extended == [{"a": 60}] * 5


@pytest.mark.parametrize(
    ("reserved", "active", "extended"),
    [
        pytest.param("111", "000", 2, id="prefetched"),
        pytest.param("110", "000", 1, id="ended by a time limit under acks_on_failure_or_timeout=False"),
        pytest.param("100", "111", 2, id="its body outlasts a warm shutdown of Celery before 5.7"),
    ],
)
def test_a_message_is_held_while_celery_has_something_to_do_with_it(reserved: str, active: str, extended: int) -> None:
    """Ended without an acknowledgement it is to come back. What Celery has reserved it can forget before it has run."""
    place = Place("a")
    requests = {"1": set(place.requests.values()), "0": set()}
    for after, is_reserved, is_active in zip((0, 20, 20), reserved, active, strict=True):
        with (
            patch.object(state, "reserved_requests", requests[is_reserved]),
            patch.object(state, "active_requests", requests[is_active]),
        ):
            place.look(after)
    assert len(place.extender.extended) == extended


@pytest.mark.parametrize(
    ("options", "everything", "is_held"),
    [
        (GUARDED, False, True),
        (OBSERVED, False, True),
        (OFF, False, False),
        ({"ignore_result": True}, False, False),
        (OFF, True, True),
    ],
)
def test_messages_of_plain_tasks_are_held_only_on_request(options: Any, everything: bool, is_held: bool) -> None:
    """Nobody's semantics change by an import."""
    place = Place("a", everything=everything, **options)
    place.look()
    assert bool(place.extender.extended) is is_held


@pytest.mark.parametrize(("mode", "times"), [("enforce", 4), ("observe", 15)])
def test_a_message_whose_body_is_past_its_deadline_is_let_go(
    mode: Any, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may take over, unless it is only observed. It waited for long before, which is no part of that."""
    place = Place("a", **GUARDED, idempotent=Policy(deadline=90, mode=mode))
    for _ in range(30):
        place.look()
    place.extender.extended.clear()
    with patch.object(state, "active_requests", set(place.requests.values())):
        for _ in range(300):
            place.look(1)
    assert place.extender.extended == [{"a": 60}] * times, "the last when it had been running for 80 seconds"
    ended = 'hold_ended task=shop.charge task_id=id-a reason="its body is past its deadline"'
    assert told(caplog) == [ended] * (mode == "enforce")


def test_a_message_that_is_gone_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else may have it. Where an acknowledgement was faster than the extension, that is no error."""
    place = Place("a", "b", "c")

    def acknowledged(queue: str, seconds: Mapping[str, int]) -> Refused:
        place.requests.pop("b").acknowledged = place.requests["c"].acknowledged = True
        gc.collect()
        return Refused(dict.fromkeys(seconds, "ReceiptHandleIsInvalid: expired"))

    with patch.object(place.extender, "extend", Mock(side_effect=acknowledged)) as extend:
        for _ in range(3):
            place.look()
    extend.assert_called_once()
    assert told(caplog) == ['hold_lost task=shop.charge task_id=id-a reason="ReceiptHandleIsInvalid: expired"']


def test_a_message_that_failed_is_asked_for_again_and_the_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    """An outage is told once, with what it is about, and its end once."""
    caplog.set_level("INFO")
    place = Place("a", "b")
    place.extender.answer = Refused(failed={"a": "InternalError: later"})
    place.look()
    place.look(1)
    place.extender.answer = Refused()
    place.look(2)
    place.look(1)
    assert place.extender.extended == [{"a": 60, "b": 60}, {"a": 60}, {"a": 60}]
    assert told(caplog) == [
        'hold_failed queue=orders messages=2 visibility_timeout=60 reason="NotExtended: InternalError: later"',
        "hold_recovered queue=orders",
    ]


def test_a_broker_that_fails_raises_nothing_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """However long it lasts; it is asked ever more seldom."""
    place = Place("a")
    place.extender.timeout = OSError("no\nroute")
    asked = [(place.look(0.5), place.extender.asked)[1] for _ in range(10)]
    assert asked == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    (line,) = told(caplog)
    assert line == r'hold_failed queue=orders messages=1 visibility_timeout=unknown reason="OSError: no\\nroute"'


def test_people_are_told_before_a_message_can_be_held_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Once, an hour before; the last extension ends with what SQS allows, and then it is let go."""
    place, over = Place("a"), Place("a")
    over.look(13 * 3600)
    assert (over.extender.extended, over.holding.messages) == ([], {})
    caplog.clear()
    place.look(11 * 3600 - 20)
    assert told(caplog) == []
    for _ in range(4000):
        place.look(1)
    assert told(caplog) == ['hold_ends task=shop.charge task_id=id-a reason="the broker allows 12.0 h in all"']
    assert 0 < place.extender.extended[-1]["a"] < 60
    assert not place.holding.messages


def test_what_nobody_holds_is_looked_for_though_nothing_is_held() -> None:
    """Every third of the timeout, where the broker has to be told."""
    place = Place()
    place.extender.queues = ("",)
    for _ in range(61):
        place.look(1)
    assert place.extender.restored == 3


def test_a_message_that_does_not_tell_its_queue_ends_it_all(caplog: pytest.LogCaptureFixture) -> None:
    """kombu has changed: said once, and nothing is held."""
    place = Place("a", "b", queue=None)
    place.look()
    assert place.extender.extended == []
    assert [each.split(" reason=")[0] for each in told(caplog)] == ['hold_impossible missing="the queue of a message"']


def a_consumer(app: Celery, driver: str = "redis", channel: Any = None) -> Any:
    """As much of Celery's as the step looks at."""
    consumer = Mock(app=app, steps=[])
    consumer.connection.transport.driver_type = driver
    consumer.task_consumer.channel = RedisChannel() if channel is None else channel
    return consumer


def a_guarded_app() -> Celery:
    app = an_app()
    a_task(app, **GUARDED)
    return app


def test_keeper_holds_what_celery_receives_until_it_is_shut_down(request: pytest.FixtureRequest) -> None:
    """By a thread, which ends with it. What came by a connection that is lost is held no more."""
    app = a_guarded_app()
    first, second = RedisChannel(), RedisChannel()
    first.visibility_timeout = second.visibility_timeout = 1
    consumer = a_consumer(app, channel=first)
    step: Any = Keeper(consumer)
    request.addfinalizer(lambda: step.shutdown(consumer))
    step.start(consumer)
    thread = step._thread
    of_first, of_second, late, of_another = (a_request(app.tasks["shop.charge"], tag) for tag in "abcd")
    task_received.send(sender=consumer, request=of_first)
    task_received.send(sender=a_consumer(app), request=of_another)
    wait_until(lambda: first.added, "the message is extended")
    consumer.task_consumer.channel = second
    step.start(consumer)
    task_received.send(sender=consumer, request=of_second)
    wait_until(lambda: second.added, "the message is extended over the new channel")
    wait_until(lambda: not thread.is_alive(), "the old thread ends")
    step.shutdown(consumer)
    task_received.send(sender=consumer, request=late)
    assert not step._thread.is_alive()
    assert [{tag for _, scores, _ in each.added for tag in scores} for each in (first, second)] == [{"a"}, {"b"}]
    assert list(step._held.messages) == ["b"]


@pytest.mark.parametrize(
    ("driver", "lacks", "missing"),
    [
        ("amqp", None, None),
        ("sqs", None, "sqs of kombu's SimpleNamespace"),
        ("redis", (Request, "acknowledged"), "acknowledged of Celery's Request"),
        ("redis", (state, "active_requests"), "active_requests of Celery's celery.worker.state"),
    ],
)
def test_keeper_holds_nothing_where_it_need_not_or_cannot(
    driver: str, lacks: Any, missing: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker starts all the same, and says what its Celery or kombu lacks."""
    caplog.set_level("INFO")
    if lacks:
        monkeypatch.delattr(*lacks)
    channel = RedisChannel() if driver == "redis" else SimpleNamespace()
    step = Keeper(consumer := a_consumer(a_guarded_app(), driver, channel))
    step.start(consumer)
    assert step._thread is None
    named = [each.partition(" reason=")[0] for each in told(caplog)]
    assert named == ([f'hold_impossible missing="{missing}"'] if missing else [])


@pytest.mark.parametrize(
    ("setting", "with_idempotent_task", "without"), [(True, True, False), ("all", True, True), (False, False, False)]
)
def test_keeper_is_there_where_messages_are_to_be_held(setting: Any, with_idempotent_task: bool, without: bool) -> None:
    """Without an idempotent task only ``"all"`` holds messages; another setting ends the worker without a traceback."""
    for each, is_included in ((a_guarded_app(), with_idempotent_task), (an_app(), without)):
        each.conf.idempotency_hold_messages = setting
        assert bool(Keeper(a_consumer(each)).include_if(a_consumer(each))) is is_included
    wrong = a_consumer(an_app(idempotency_hold_messages="none"))  # of an app of plain tasks nothing else is checked
    with pytest.raises(ClickException, match="idempotency_hold_messages="):
        Keeper(wrong).include_if(wrong)
