"""The keeper: which messages it holds, for how long, and what it does about a broker that does not answer."""

import gc
import logging
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import celery.worker.request
import celery.worker.state
import pytest
from celery import Celery
from celery.signals import task_received
from click import ClickException

from celery_idempotent import IdempotentTask, Policy, PolicyError
from celery_idempotent.integration.broker.extenders import Missing, Refused, SqsExtender
from celery_idempotent.integration.broker.holding import HeldMessages, Keeper, held, pause
from celery_idempotent.integration.settings import runtime_of
from tests.support.deliveries import an_app
from tests.support.links import unlinked
from tests.support.waiting import wait_until
from tests.unit.test_extenders import RedisChannel, SqsChannel

QUEUE = "orders"


class FakeExtender(SqsExtender):
    """A broker with a visibility timeout of a minute that does what a test says."""

    size = 10
    longest = 12 * 3600.0
    queues: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.extended: list[dict[str, int]] = []
        self.restored = 0
        self.answer = Refused()
        self.error: Exception | None = None

    def queue_of(self, message: Any) -> str:
        """As the message says."""
        if message.queue is None:
            raise Missing("the queue of a message")
        return str(message.queue)

    def visibility(self, queue: str) -> float:
        """A minute, or an error."""
        if self.error is not None:
            raise self.error
        return 60

    def extend(self, queue: str, seconds: Mapping[str, int]) -> Refused:
        """Keep what was asked for."""
        self.extended.append(dict(seconds))
        return self.answer

    def restore(self) -> None:
        """Count."""
        self.restored += 1


class FakeRequest:
    """As Celery's."""

    acknowledged = False

    def __init__(self, task: Any, tag: str, queue: str | None = QUEUE) -> None:
        self.task, self.name, self.id = task, "shop.charge", f"id of {tag}"
        self.message = SimpleNamespace(delivery_tag=tag, queue=queue)


def a_task(app: Celery, **options: Any) -> Any:
    """A task of the app."""

    def charge(order_id: str) -> None:
        """Do nothing."""

    return app._task_from_fun(charge, name="shop.charge", **options)


@pytest.fixture
def task() -> Any:
    """An idempotent one."""
    return a_task(an_app(), base=IdempotentTask)


@pytest.fixture
def extender() -> FakeExtender:
    return FakeExtender()


@pytest.fixture
def now() -> list[float]:
    """Seconds."""
    return [1000.0]


@pytest.fixture
def holding(extender: FakeExtender, now: list[float]) -> HeldMessages:
    return HeldMessages(extender, everything=False, clock=lambda: now[0])


class TestHolding:
    """Look by look."""

    def test_a_message_is_extended_every_third_of_its_timeout(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], task: Any
    ) -> None:
        """For as long as its worker has it, and no longer."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        for second in range(100):
            now[0] = 1000.0 + second
            assert holding.look() == 1
        assert extender.extended == [{"a": 60}] * 4
        request.acknowledged = True
        now[0] += 60
        holding.look()
        assert len(extender.extended) == 4

    def test_more_messages_than_a_request_takes_are_extended_in_several(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], task: Any
    ) -> None:
        """Ten in each."""
        requests = [FakeRequest(task, str(number)) for number in range(23)]
        for request in requests:
            holding.receive(request)
        now[0] += 20
        holding.look()
        assert [len(each) for each in extender.extended] == [10, 10, 3]

    def test_a_request_that_celery_forgot_is_not_held(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], task: Any
    ) -> None:
        """Nobody will ever acknowledge its message: only another delivery can bring it to its end."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        del request
        gc.collect()
        now[0] += 20
        holding.look()
        assert extender.extended == []

    def test_a_task_that_ended_without_an_acknowledgement_is_not_held(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], task: Any
    ) -> None:
        """As after a time limit under ``acks_on_failure_or_timeout=False``: its message is to come back."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        with patch.object(celery.worker.state, "reserved_requests", {request}):
            holding.look()
            now[0] += 20
            holding.look()
        assert len(extender.extended) == 1
        now[0] += 20
        holding.look()
        assert len(extender.extended) == 1

    def test_a_body_that_outlasts_a_warm_shutdown_is_held(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], task: Any
    ) -> None:
        """Celery before 5.7 has forgotten by then that it had reserved it, and still knows that it runs."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        with patch.object(celery.worker.state, "active_requests", {request}):
            with patch.object(celery.worker.state, "reserved_requests", {request}):
                holding.look()
            for _ in range(2):
                now[0] += 20
                holding.look()
        assert len(extender.extended) == 2

    @pytest.mark.parametrize(
        ("options", "everything", "is_held"),
        [
            ({"base": IdempotentTask}, False, True),
            ({"base": IdempotentTask, "idempotent": Policy(mode="observe")}, False, True),
            ({"base": IdempotentTask, "idempotent": Policy(mode="off")}, False, False),
            ({}, False, False),
            ({}, True, True),
            ({"base": IdempotentTask, "idempotent": Policy(mode="off")}, True, True),
        ],
    )
    def test_messages_of_plain_tasks_are_held_only_if_that_is_asked_for(
        self, extender: FakeExtender, now: list[float], options: Any, everything: bool, is_held: bool
    ) -> None:
        """Nobody's semantics change by an import."""
        holding = HeldMessages(extender, everything=everything, clock=lambda: now[0])
        request = FakeRequest(a_task(an_app(), **options), "a")
        holding.receive(request)
        now[0] += 20
        holding.look()
        assert bool(extender.extended) is is_held

    def test_a_message_whose_body_is_past_its_deadline_is_let_go(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Others may take over, so one of them is to get it. It waited for long before, which is no part of that."""
        request = FakeRequest(a_task(an_app(), base=IdempotentTask, idempotent=Policy(deadline=90)), "a")
        holding.receive(request)
        for second in range(0, 600, 20):
            now[0] = 1000.0 + second
            holding.look()
        extender.extended.clear()
        with patch.object(celery.worker.state, "active_requests", {request}):
            for second in range(600, 900):
                now[0] = 1000.0 + second
                holding.look()
        assert extender.extended == [{"a": 60}] * 5, "the last when it had been running for 80 seconds"
        assert [unlinked(each) for each in caplog.messages] == [
            'event=idempotency.hold_ended task=shop.charge task_id="id of a" reason="its body is past its deadline"'
        ]

    @pytest.mark.parametrize(
        "policy", [Policy(), Policy(deadline=90, mode="observe"), None], ids=["no deadline", "observed", "plain task"]
    )
    def test_a_body_without_a_deadline_is_held_for_as_long_as_it_runs(
        self, extender: FakeExtender, now: list[float], policy: Policy | None
    ) -> None:
        """Nobody may take over from it, or nothing is promised."""
        options = {"base": IdempotentTask, "idempotent": policy} if policy else {}
        request = FakeRequest(a_task(an_app(), **options), "a")
        holding = HeldMessages(extender, everything=True, clock=lambda: now[0])
        holding.receive(request)
        with patch.object(celery.worker.state, "active_requests", {request}):
            for second in range(0, 6000, 20):
                now[0] = 1000.0 + second
                holding.look()
        assert len(extender.extended) == 6000 / 20 - 1

    def test_a_message_that_is_gone_is_told_of_once(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Somebody else may have it; nothing can be done about it here."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        extender.answer = Refused({"a": "ReceiptHandleIsInvalid: expired"})
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                now[0] += 20
                holding.look()
        assert [unlinked(each) for each in caplog.messages] == [
            'event=idempotency.hold_lost task=shop.charge task_id="id of a" reason="ReceiptHandleIsInvalid: expired"'
        ]
        assert len(extender.extended) == 1

    def test_one_that_was_acknowledged_meanwhile_is_no_error(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The acknowledgement was faster than the extension; or Celery has forgotten the request by now."""
        request, forgotten = FakeRequest(task, "a"), FakeRequest(task, "b")
        held = [forgotten]
        holding.receive(request)
        holding.receive(forgotten)
        del forgotten

        def acknowledged(queue: str, seconds: Mapping[str, int]) -> Refused:
            request.acknowledged = True
            held.clear()
            gc.collect()
            return Refused(dict.fromkeys(seconds, "MessageNotInflight"))

        now[0] += 20
        with patch.object(extender, "extend", acknowledged), caplog.at_level(logging.WARNING):
            holding.look()
        assert caplog.messages == []

    def test_a_message_that_failed_is_asked_for_again_and_the_others_are_not(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """An outage is told once, with what it is about, and its end once."""
        requests = [FakeRequest(task, tag) for tag in "ab"]
        for request in requests:
            holding.receive(request)
        extender.answer = Refused(failed={"a": "InternalError: later"})
        with caplog.at_level(logging.INFO):
            now[0] += 20
            holding.look()
            now[0] += 1
            holding.look()
            extender.answer = Refused()
            now[0] += 2
            holding.look()
            now[0] += 1
            holding.look()
        assert extender.extended == [{"a": 60, "b": 60}, {"a": 60}, {"a": 60}]
        assert [unlinked(each) for each in caplog.messages] == [
            "event=idempotency.hold_failed queue=orders messages=2 visibility_timeout=60 "
            'reason="NotExtended: InternalError: later"',
            "event=idempotency.hold_recovered queue=orders",
        ]

    def test_whatever_the_broker_does_nothing_is_raised_and_it_is_asked_ever_more_seldom(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """One line in the log, however long it lasts."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        extender.error = OSError("no\nroute")
        asked: list[float] = []
        visibility = extender.visibility

        def asking(queue: str) -> float:
            asked.append(now[0] - 1000)
            return visibility(queue)

        with patch.object(extender, "visibility", asking), caplog.at_level(logging.INFO):
            for _ in range(10):
                holding.look()
                now[0] += 0.5
        assert asked == [0, 1, 2, 3, 4]
        assert [unlinked(each) for each in caplog.messages] == [
            "event=idempotency.hold_failed queue=orders messages=1 visibility_timeout=unknown "
            r'reason="OSError: no\\nroute"'
        ]

    def test_a_timeout_of_nothing_does_not_make_a_busy_loop(
        self, holding: HeldMessages, extender: FakeExtender, task: Any
    ) -> None:
        """A queue can be set to 0 seconds."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        with patch.object(extender, "visibility", return_value=0):
            assert holding.look() == pause([1])

    def test_a_broker_without_such_a_limit_holds_for_a_week(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """As Redis does."""
        extender.longest = float("inf")
        request = FakeRequest(task, "a")
        holding.receive(request)
        now[0] += 168 * 3600
        holding.look()
        assert extender.extended == [{"a": 60}]
        assert caplog.messages == []

    @pytest.mark.parametrize(("left", "allowed"), [(60, 60), (50, 50), (1, 1), (0.5, None), (0, None), (-3600, None)])
    def test_a_message_is_extended_up_to_what_the_broker_allows_in_all(
        self, holding: HeldMessages, extender: FakeExtender, now: list[float], task: Any, left: float, allowed: Any
    ) -> None:
        """SQS refuses more than 12 hours since it handed the message out, and would extend it by nothing then."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        now[0] += extender.longest - left
        holding.look()
        assert extender.extended == ([] if allowed is None else [{"a": allowed}])
        assert bool(holding.messages) is (allowed is not None)

    def test_people_are_told_before_a_message_can_be_held_no_longer(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Once, an hour before; the last extension ends with what SQS allows, and then it is let go."""
        request = FakeRequest(task, "a")
        holding.receive(request)
        with caplog.at_level(logging.WARNING):
            while now[0] < 1000 + 13 * 3600:
                now[0] += 1
                holding.look()
        assert [unlinked(each) for each in caplog.messages] == [
            'event=idempotency.hold_ends task=shop.charge task_id="id of a" reason="the broker allows 12.0 h in all"'
        ]
        last = extender.extended[-1]["a"]
        assert 0 < last <= 60
        assert extender.extended[0] == {"a": 60}

    def test_what_nobody_holds_is_looked_for_though_nothing_is_held(
        self, extender: FakeExtender, now: list[float]
    ) -> None:
        """Every third of the timeout, where the broker has to be told."""
        extender.queues = ("",)
        holding = HeldMessages(extender, everything=False, clock=lambda: now[0])
        for _ in range(61):
            holding.look()
            now[0] += 1
        assert extender.restored == 3

    def test_a_message_that_does_not_tell_its_queue_ends_it_all(
        self,
        holding: HeldMessages,
        extender: FakeExtender,
        now: list[float],
        task: Any,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """kombu has changed: said once, and nothing is held."""
        requests = [FakeRequest(task, tag, None) for tag in "ab"]
        with caplog.at_level(logging.WARNING):
            for request in requests:
                holding.receive(request)
        now[0] += 20
        holding.look()
        assert extender.extended == []
        assert [message.split(" reason=")[0] for message in caplog.messages] == [
            'event=idempotency.hold_impossible missing="the queue of a message"'
        ]


class Consumer(SimpleNamespace):
    """As much of Celery's as the step looks at."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def a_consumer(app: Celery, driver: str, channel: Any) -> Consumer:
    """One that consumes by that channel."""
    return Consumer(
        app=app,
        steps=[],
        task_consumer=SimpleNamespace(channel=channel),
        connection=SimpleNamespace(transport=SimpleNamespace(driver_type=driver)),
    )


class TestKeeper:
    """The worker's step."""

    @pytest.fixture
    def app(self) -> Celery:
        app = an_app()
        a_task(app, base=IdempotentTask)
        return app

    @pytest.fixture
    def stopping(self) -> Iterator[list[Any]]:
        """Steps and consumers to shut down at the end."""
        started: list[Any] = []
        yield started
        for step, consumer in started:
            step.shutdown(consumer)

    def start(self, stopping: list[Any], consumer: Any) -> Keeper:
        """A step of that consumer's."""
        step = Keeper(consumer)
        stopping.append((step, consumer))
        step.start(consumer)
        return step

    def test_holds_what_celery_receives_until_it_is_shut_down(self, app: Celery, stopping: list[Any]) -> None:
        """By a thread, which ends with it. What came by a connection that is lost is held no more."""
        first, second = RedisChannel(), RedisChannel()
        first.visibility_timeout = second.visibility_timeout = 1
        consumer = a_consumer(app, "redis", first)
        step = self.start(stopping, consumer)
        thread = step._thread
        request = FakeRequest(app.tasks["shop.charge"], "a")
        task_received.send(sender=consumer, request=request)
        task_received.send(sender=a_consumer(app, "redis", first), request=FakeRequest(request.task, "of another"))
        wait_until(lambda: first.added, "the message is extended")
        consumer.task_consumer.channel = second
        step.start(consumer)
        next_request = FakeRequest(request.task, "b")
        task_received.send(sender=consumer, request=next_request)
        wait_until(lambda: second.added, "the message is extended over the new channel")
        wait_until(lambda: thread is not None and not thread.is_alive(), "the old thread ends")
        step.shutdown(consumer)
        assert step._thread is not None
        assert not step._thread.is_alive()
        assert {tag for _, scores, _ in first.added for tag in scores} == {"a"}
        assert {tag for _, scores, _ in second.added for tag in scores} == {"b"}
        task_received.send(sender=consumer, request=FakeRequest(request.task, "late"))
        assert step._held is not None
        assert list(step._held.messages) == ["b"]

    def test_counts_what_the_workers_of_the_process_hold(self, app: Celery, stopping: list[Any]) -> None:
        """For gauges; None is no count, as where nothing is held, or the worker is gone."""
        assert held() is None
        consumers = [a_consumer(app, "redis", RedisChannel()) for _ in range(2)]
        steps = [self.start(stopping, consumer) for consumer in consumers]
        requests = [FakeRequest(app.tasks["shop.charge"], tag) for tag in "ab"]
        for consumer, request in zip(consumers, requests, strict=True):
            task_received.send(sender=consumer, request=request)
        assert held() == 2
        steps[0].shutdown(consumers[0])
        assert held() == 1
        steps[1].shutdown(consumers[1])
        assert held() is None

    def test_lets_a_worker_on_sqs_outlive_expired_receipts(self, app: Celery, stopping: list[Any]) -> None:
        """On each channel of its consumer's."""
        channel = SqsChannel()
        self.start(stopping, a_consumer(app, "sqs", channel))
        assert "basic_ack" in vars(channel)

    def test_has_nothing_to_do_with_other_brokers(
        self, app: Celery, stopping: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """And says nothing."""
        with caplog.at_level(logging.INFO):
            step = self.start(stopping, a_consumer(app, "amqp", SimpleNamespace()))
        assert step._thread is None
        assert caplog.messages == []

    def test_says_what_is_missing_and_holds_nothing(
        self, app: Celery, stopping: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """A worker starts all the same."""
        with caplog.at_level(logging.WARNING):
            step = self.start(stopping, a_consumer(app, "sqs", SimpleNamespace()))
        assert step._thread is None
        (message,) = caplog.messages
        assert message.startswith('event=idempotency.hold_impossible missing="sqs of kombu\'s SimpleNamespace" ')

    @pytest.mark.parametrize(
        ("whole", "name"),
        [
            (celery.worker.request.Request, "acknowledged"),
            (celery.worker.request.Request, "message"),
            (celery.worker.request.Request, "task"),
            (celery.worker.state, "active_requests"),
            (celery.worker.state, "reserved_requests"),
        ],
    )
    def test_what_celery_does_not_have_any_more_is_named(
        self,
        app: Celery,
        stopping: list[Any],
        whole: Any,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """When the worker starts."""
        monkeypatch.delattr(whole, name)
        step = self.start(stopping, a_consumer(app, "redis", RedisChannel()))
        assert step._thread is None
        assert f'missing="{name} of Celery\'s {whole.__name__}" ' in caplog.text

    @pytest.mark.parametrize(("setting", "is_included"), [(True, True), ("all", True), (False, False)])
    def test_is_left_out_where_it_is_switched_off(self, app: Celery, setting: Any, is_included: bool) -> None:
        """By a setting."""
        app.conf.idempotency_hold_messages = setting
        consumer = a_consumer(app, "redis", RedisChannel())
        assert bool(Keeper(consumer).include_if(consumer)) is is_included

    @pytest.mark.parametrize(("setting", "is_included"), [(True, False), ("all", True)])
    def test_without_an_idempotent_task_only_all_messages_are_held(self, setting: Any, is_included: bool) -> None:
        """There is nothing else to hold."""
        app = an_app(idempotency_hold_messages=setting)
        consumer = a_consumer(app, "redis", RedisChannel())
        assert bool(Keeper(consumer).include_if(consumer)) is is_included

    @pytest.mark.parametrize("setting", ["none", 1, 0, None, "ALL"])
    def test_another_setting_is_refused(self, app: Celery, setting: Any) -> None:
        """With what it can be."""
        app.conf.idempotency_hold_messages = setting
        with pytest.raises(PolicyError, match='idempotency_hold_messages=.*: must be True, False or "all"'):
            _ = runtime_of(app).hold_messages

    def test_worker_of_plain_tasks_ends_with_the_same_words(self) -> None:
        """Nothing else of such an app is checked, and a traceback would say less."""
        app = an_app(idempotency_hold_messages="ALL")
        consumer = a_consumer(app, "redis", RedisChannel())
        with pytest.raises(ClickException, match='must be True, False or "all"'):
            Keeper(consumer).include_if(consumer)

    def test_every_consumer_of_an_idempotent_app_has_it(self, app: Celery) -> None:
        """Binding a task is enough."""
        app.finalize()
        assert Keeper in app.steps["consumer"]
