"""A batch of SQS in Lambda: which messages come again, what is told of them, and what an invocation leaves behind."""

import json
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from operator import itemgetter
from threading import Thread
from typing import Any

import pytest

from celery_idempotent import (
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PolicyError,
    SafeToRetry,
    Status,
    StoreUnavailable,
    current_attempt,
    forget,
    idempotent,
    signals,
)
from celery_idempotent.contrib.aws_lambda import BatchHandler, sqs_batch
from celery_idempotent.engine import claim
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.protocol.record import Record
from celery_idempotent.testing import FakeStore
from tests.support.aws_lambda import QUEUE, Context, a_record, an_event, returned
from tests.support.deliveries import an_app
from tests.support.waiting import wait_until

FIFO = f"{QUEUE}.fifo"


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture(autouse=True)
def _nothing_under_way() -> Iterator[None]:
    """Lambda freezes the process when the handler returns."""
    yield
    assert heartbeat.in_flight == 0


class Orders:
    """What a handler has charged, and what it does besides."""

    def __init__(self, store: FakeStore, policy: Policy | None = None, **options: Any) -> None:
        self.charged: list[str] = []
        self.then: Callable[[str], Any] = lambda order_id: None

        @sqs_batch(policy or Policy("order_id"), store=store, name="charge", **options)
        def charge(order_id: str, cents: int = 100) -> Any:
            """Charge an order."""
            self.charged.append(order_id)
            return self.then(order_id)

        self.handler: BatchHandler = charge

    def __call__(self, *records: object, seconds: float = 30) -> list[int]:
        """Handle a batch; the places of what comes again."""
        event = an_event(*records)
        return returned(event, self.handler(event, Context(seconds)))


def order(number: int, **members: Any) -> dict[str, Any]:
    return {"order_id": f"o-{number}", **members}


def raising(error: BaseException, *orders: str) -> Callable[[str], None]:
    def act(order_id: str) -> None:
        if not orders or order_id in orders:
            raise error

    return act


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(each)["idempotency_reason"] for each in caplog.records if hasattr(each, "idempotency_message_id")]


# -- done


def test_a_message_takes_effect_once_however_often_it_comes(store: FakeStore) -> None:
    """Twice in a batch, and in a later one; nothing comes again."""
    orders = Orders(store)

    assert orders(order(1), order(2), order(1)) == []
    assert orders(order(1)) == []

    assert orders.charged == ["o-1", "o-2"]
    assert {each.status for each in store.records} == {Status.COMPLETED}


def test_a_handler_knows_its_name_its_promise_and_its_keys(store: FakeStore) -> None:
    """And keeps the name and the words of its function; but not its signature, which is not what Lambda calls."""
    orders = Orders(store)
    orders(order(1))

    assert orders.handler.name == "charge"
    assert orders.handler.__doc__ == "Charge an order."
    assert orders.handler.guarantee().startswith("charge: calls with the same idempotency key are one operation")
    assert [orders.handler.idempotency_key_for(**order(1))] == [each.key for each in store.records]
    assert not hasattr(orders.handler, "__wrapped__")


def test_the_body_has_its_attempt(store: FakeStore) -> None:
    """With steps, and a deadline that ends before the invocation."""
    orders = Orders(store)
    remaining: list[float | None] = []
    orders.then = lambda order_id: remaining.append(current_attempt().remaining)

    orders(order(1), seconds=30)

    assert remaining[0] is not None
    assert 27 < remaining[0] <= 29


def test_without_store_the_current_app_is_asked() -> None:
    """Its store, its settings, its default policy."""
    app = an_app(idempotency_policy=Policy("order_id", scope="orders"))

    @sqs_batch(app=app, name="charge")
    def charge(order_id: str) -> None: ...

    assert charge(an_event(order(1)), None) == {"batchItemFailures": []}
    (record,) = app.conf.idempotency_store.scan()
    assert record.key.startswith("orders:1:")


def test_a_result_that_was_lost_is_a_result(store: FakeStore) -> None:
    """The effect has happened, and nobody asks for the value."""
    orders = Orders(store)
    orders.then = lambda order_id: object()

    assert orders(order(1)) == []
    assert orders(order(1)) == []
    assert orders.charged == ["o-1"]


# -- bodies


def envelope(text: str, kind: str = "Notification") -> dict[str, Any]:
    return {"Type": kind, "MessageId": "m", "TopicArn": "arn:aws:sns:eu-west-1:1:orders", "Message": text}


def test_an_envelope_of_sns_comes_off(store: FakeStore) -> None:
    """With it and by raw delivery, a message is one operation."""
    orders = Orders(store)

    assert orders(envelope(json.dumps(order(1))), order(1)) == []
    assert orders.charged == ["o-1"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("no JSON", "the body is no JSON: Expecting value"),
        ('{"order_id": NaN}', "the body is no JSON: NaN is not a number of JSON"),
        ("[" * 100_000, "the body is no JSON: "),
        ([], "the body is no JSON object, but a list"),
        ("null", "the body is no JSON object, but a NoneType"),
        ({"cents": 5}, "the body does not fit the function: missing a required argument: 'order_id'"),
        (envelope("no JSON"), "the body is no JSON: Expecting value"),
        (envelope("", "SubscriptionConfirmation"), "nobody published it: it is a SubscriptionConfirmation of SNS"),
        ({"order_id": None}, "charge: key='order_id' is missing or null"),
    ],
)
def test_a_body_that_cannot_be_used_comes_again_alone(
    store: FakeStore, caplog: pytest.LogCaptureFixture, body: object, told: str
) -> None:
    """It ends in the dead-letter queue, where a person sees it; the log says why, and quotes nothing."""
    orders = Orders(store)

    assert orders(order(1), body, order(2)) == [1]

    assert orders.charged == ["o-1", "o-2"]
    assert len(store.records) == 2
    (reason,) = reasons(caplog)
    assert reason.startswith(told)


def test_other_members_are_ignored(store: FakeStore) -> None:
    """A publisher may add some, and it stays the same operation."""
    orders = Orders(store)

    assert orders(order(1), order(1, colour="red")) == []
    assert orders.charged == ["o-1"]


def test_a_function_may_take_all_members(store: FakeStore) -> None:
    """And then they are arguments like any other."""
    seen: list[Any] = []

    @sqs_batch(Policy("order_id"), store=store, name="charge")
    def charge(order_id: str, **rest: Any) -> None:
        seen.append(rest)

    event = an_event(order(1, colour="red"), order(1, colour="blue"))

    assert returned(event, charge(event, None)) == [1]
    assert seen == [{"colour": "red"}]


# -- the record


def test_the_function_gets_the_record_by_a_parameter(store: FakeStore) -> None:
    """Which no member of a body can be, and which tells nothing apart: it differs from delivery to delivery."""
    seen: list[Any] = []

    @sqs_batch(Policy("order_id"), store=store, name="charge", record="message")
    def charge(order_id: str, message: Any, **rest: Any) -> None:
        seen.append((message["messageId"], rest))

    first, again = a_record(order(1, message="forged")), a_record(order(1), received=2)
    event = an_event(first, again)

    assert charge(event, None) == {"batchItemFailures": []}
    assert seen == [(first["messageId"], {})]


def test_a_key_can_come_from_the_record(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """What was sent twice is two operations, and what is delivered twice is one; without it nothing runs."""
    orders = Orders(store, key=itemgetter("messageId"))
    one, other = a_record(order(1)), a_record(order(1))

    assert orders(one, one, other) == []
    assert orders.charged == ["o-1", "o-1"]

    for none in (None, ""):
        orders = Orders(store, key=lambda record, none=none: record["attributes"].get("absent", none))
        assert orders(one) == [0]
        assert orders.charged == []
    assert "so this call has no idempotency key" in caplog.text
    assert caplog.text.count("event=idempotency.key_missing") == 2


# -- what comes again


def test_a_failure_comes_again_alone_and_runs_again(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback, by message; nobody else would write it."""
    orders = Orders(store)
    orders.then = raising(ValueError("declined"), "o-2")

    assert orders(order(1), order(2), order(3)) == [1]
    assert orders(a_record(order(2), received=2)) == [0]

    assert orders.charged == ["o-1", "o-2", "o-3", "o-2"]
    first, second = (each for each in caplog.records if hasattr(each, "idempotency_message_id"))
    assert first.exc_info
    assert first.levelno == logging.ERROR
    assert reasons(caplog)[0] == "ValueError: declined"
    assert vars(second)["idempotency_received"] == "2"


def test_a_secret_of_an_exception_is_not_logged(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Under ``private`` only its type is."""
    orders = Orders(store, Policy("order_id", private=True))
    orders.then = raising(ValueError("card 4242"))

    assert orders(order(1)) == [0]

    assert reasons(caplog) == ["ValueError"]
    assert "4242" not in caplog.text


def test_a_failure_that_is_remembered_comes_again_and_does_not_run(store: FakeStore) -> None:
    """The record has no arguments: only the dead-letter queue keeps what was asked for, until somebody releases it."""
    orders = Orders(store, Policy("order_id", remember=(ValueError,)))
    orders.then = raising(ValueError("declined"))

    assert orders(order(1)) == [0]
    assert orders(order(1)) == [0]

    assert orders.charged == ["o-1"]
    assert [each.status for each in store.records] == [Status.FAILED]

    forget(orders.handler.idempotency_key_for(**order(1)), app=an_app(idempotency_store=store))
    orders.then = lambda order_id: None
    assert orders(order(1)) == []
    assert orders.charged == ["o-1", "o-1"]


@pytest.mark.parametrize(
    "error",
    [
        SafeToRetry("nothing begun"),
        LeaseLost("k", 1),
        OutcomeUnknown("k", "who knows"),
        StoreUnavailable("store", "swap", "away"),
    ],
)
def test_every_exception_of_the_body_comes_again(store: FakeStore, error: Exception) -> None:
    """Whatever it says; the others of the batch are none of its business."""
    orders = Orders(store)
    orders.then = raising(error, "o-1")

    assert orders(order(1), order(2)) == [0]


def test_a_body_that_has_still_to_run_is_no_result(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would ever run what it returned."""
    orders = Orders(store)
    orders.then = lambda order_id: (each for each in order_id)

    assert orders(order(1)) == [0]
    assert [each.status for each in store.records] == [Status.RELEASED]
    assert "it returned an unfinished generator" in caplog.text


def test_an_operation_in_flight_comes_again(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Another invocation has it; when that has ended, its result counts."""
    orders = Orders(store)
    inner: list[list[int]] = []
    other = Orders(store)

    def meanwhile(order_id: str) -> None:
        invocation = Thread(target=lambda: inner.append(other(order(1))))
        invocation.start()
        invocation.join()

    orders.then = meanwhile
    with caplog.at_level(logging.INFO):
        assert orders(order(1)) == []

    assert inner == [[0]]
    assert other(order(1)) == []
    assert other.charged == []
    assert "is in flight on" in reasons(caplog)[0]
    assert {each.levelno for each in caplog.records if hasattr(each, "idempotency_message_id")} == {logging.INFO}


def test_a_key_of_other_arguments_comes_again(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing runs, and it is told."""
    orders = Orders(store)

    assert orders(order(1), order(1, cents=5)) == [1]
    assert orders.charged == ["o-1"]
    assert "belongs to a call with other arguments" in reasons(caplog)[0]


def test_an_outcome_that_nobody_knows_comes_again(store: FakeStore) -> None:
    """Until a person resolves it."""
    orders = Orders(store, Policy("order_id", on_takeover="refuse"))
    orders.then = raising(SystemExit())
    with pytest.raises(SystemExit):
        orders(order(1))

    assert orders(order(1)) == [0]
    assert orders.charged == ["o-1"]
    assert [each.status for each in store.records] == [Status.UNKNOWN]


def test_a_store_that_is_away_leaves_its_message(store: FakeStore) -> None:
    """Without an answer nothing runs, and nothing is reported as done."""
    orders = Orders(store)

    def away(record: Record) -> None:
        raise StoreUnavailable("store", "swap", "away")

    store.before_swap = away

    assert orders(order(1), order(2)) == [0, 1]
    assert orders.charged == []


def test_an_effect_that_could_not_be_recorded_does_not_hold_up_its_batch(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its write is tried until the reserve begins; what was done before it is answered."""
    monkeypatch.setattr(claim, "_CONFIRM_FOR", 5.0)  # ten minutes, for which it would be tried otherwise
    orders = Orders(store, reserve=1)
    event = an_event(order(1), order(2))

    def away(record: Record) -> None:
        if record.status is Status.COMPLETED and record.key == orders.handler.idempotency_key_for(**order(2)):
            raise StoreUnavailable("store", "swap", "away")

    store.before_swap = away

    assert returned(event, orders.handler(event, Context(1.6, lambda: 0.0))) == [1]
    assert orders.charged == ["o-1", "o-2"]
    (seconds,) = (vars(each)["idempotency_seconds"] for each in caplog.records if "result_waits" in each.message)
    assert 0 < seconds <= 0.6


def test_observing_changes_nothing(store: FakeStore) -> None:
    """Every message runs."""
    orders = Orders(store, Policy("order_id", mode="observe"))

    assert orders(order(1), order(1)) == []
    assert orders.charged == ["o-1", "o-1"]


def test_a_batch_without_messages_is_done(store: FakeStore) -> None:
    """Lambda sends none, and tests do."""
    assert Orders(store)() == []


# -- order


@pytest.mark.parametrize(
    ("queue", "again", "charged"),
    [(FIFO, [0, 2], ["o-1", "o-2", "o-4"]), (QUEUE, [0], ["o-1", "o-2", "o-3", "o-4"])],
)
def test_a_group_of_a_fifo_queue_stops_at_its_first_failure(
    store: FakeStore, queue: str, again: list[int], charged: list[str]
) -> None:
    """Other groups go on. Groups of a standard queue are for fairness, and have no order."""
    orders = Orders(store)
    orders.then = raising(ValueError(), "o-1")
    batch = [a_record(order(n), group=group, queue=queue) for n, group in ((1, "a"), (2, "b"), (3, "a"), (4, "b"))]

    assert orders(*batch) == again
    assert orders.charged == charged


# -- time


def test_a_claim_ends_with_its_invocation(store: FakeStore) -> None:
    """Long before the policy's lease; and a living invocation cannot be taken over from, in its reserve neither."""
    orders = Orders(store, Policy("order_id", lease=60), reserve=5)
    leases: list[int] = []

    def act(order_id: str) -> None:
        (record,) = store.records
        leases.append(record.lease_until - store.clock.now())
        raise SystemExit

    orders.then = act
    store.before_swap = lambda record: None
    with pytest.raises(SystemExit):
        orders(order(1), seconds=30)

    assert 24_000 < leases[0] <= 25_000


def test_a_killed_invocation_is_taken_over_from_once_it_would_have_ended(store: FakeStore) -> None:
    """And not before."""

    class Killed(BaseException):
        pass

    def die(record: Record) -> None:
        raise Killed

    def act(order_id: str) -> None:
        store.before_swap = die
        raise Killed

    orders = Orders(store, Policy("order_id"), reserve=5)
    orders.then = act
    with pytest.raises(Killed):
        orders(order(1), seconds=30)
    store.before_swap = lambda record: None
    orders.then = lambda order_id: None

    store.advance(29)
    assert orders(order(1)) == [0]
    store.advance(2)
    assert orders(order(1)) == []
    assert orders.charged == ["o-1", "o-1"]


def test_an_invocation_that_was_frozen_past_its_end_reports_what_counts(store: FakeStore) -> None:
    """Another one took over meanwhile: its result is the operation's, and the late one records nothing."""
    orders, other = Orders(store), Orders(store)
    other.then = lambda order_id: "theirs"

    def frozen(order_id: str) -> str:
        store.advance(60)
        invocation = Thread(target=lambda: other(order(1)))
        invocation.start()
        invocation.join()
        return "ours"

    orders.then = frozen

    assert orders(order(1)) == []
    assert other.charged == ["o-1"]
    assert [(each.result, each.attempts) for each in store.records] == [('"theirs"', 2)]


def test_no_step_begins_in_the_reserve(store: FakeStore) -> None:
    """The message comes again, and what it had done by steps is kept."""
    orders = Orders(store, reserve=1)
    called: list[str] = []

    def act(order_id: str) -> None:
        attempt = current_attempt()
        attempt.step("first", lambda step: called.append("first"))
        wait_until(lambda: attempt.remaining == 0, "the reserve begins")
        attempt.step("second", lambda step: called.append("second"))

    orders.then = act
    event = an_event(order(1))

    assert returned(event, orders.handler(event, Context(1.6, lambda: 0.0))) == [0]
    assert called == ["first"]
    assert [list(each.steps) for each in store.records] == [["first"]]


def test_a_policys_deadline_counts_where_it_is_earlier(store: FakeStore) -> None:
    """The invocation only shortens."""
    orders = Orders(store, Policy("order_id", lease=5, deadline=10))
    remaining: list[float | None] = []
    orders.then = lambda order_id: remaining.append(current_attempt().remaining)

    orders(order(1), seconds=30)

    assert remaining[0] is not None
    assert 8 < remaining[0] <= 10


def test_what_cannot_end_in_time_is_not_begun(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """It comes again, with all that follow; the log says how many, and what would help."""
    orders = Orders(store, needs=timedelta(seconds=10), reserve=1)
    now = [0.0]
    event = an_event(order(1), order(2), order(3))
    orders.then = lambda order_id: now.__setitem__(0, now[0] + 10)

    response = orders.handler(event, Context(25, lambda: now[0]))

    assert returned(event, response) == [2]
    assert orders.charged == ["o-1", "o-2"]
    assert "event=idempotency.messages_unstarted task=charge messages=1 reason=" in caplog.text
    assert "4.0 s are left; a smaller batch or a longer timeout" in caplog.text


@pytest.mark.parametrize("seconds", [0, 1, 1.4])
def test_an_invocation_that_is_nearly_over_begins_nothing(store: FakeStore, seconds: float) -> None:
    """A lease has a shortest length."""
    orders = Orders(store)

    assert orders(order(1), order(2), seconds=seconds) == [0, 1]
    assert orders.charged == []
    assert store.records == []


def test_without_a_context_the_policy_counts_as_it_is(store: FakeStore) -> None:
    """As in a test of the author's."""
    orders = Orders(store, Policy("order_id", lease=60))
    remaining: list[Any] = []
    orders.then = lambda order_id: remaining.append(current_attempt().remaining)

    assert orders.handler(an_event(order(1)), None) == {"batchItemFailures": []}
    assert remaining == [None]


def test_signals_tell_of_the_handler(store: FakeStore) -> None:
    """Who connects them names what he sees."""
    orders = Orders(store)
    seen: list[str] = []

    def receive(**told: Any) -> None:
        seen.append(told["key"])

    signals.completed.connect(receive, sender=orders.handler)
    orders(order(1))

    assert seen == [orders.handler.idempotency_key_for(**order(1))]


# -- what is refused


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({}, "event=dict: it has no Records; sqs_batch handles the batches of an SQS queue"),
        ("text", "event=str: it has no Records"),
        ({"Records": [{"EventSource": "aws:sns"}]}, "eventSource=None: sqs_batch handles"),
        ({"Records": [{"eventSource": "aws:kinesis"}]}, "eventSource='aws:kinesis': sqs_batch handles"),
    ],
)
def test_an_event_of_something_else_is_refused(store: FakeStore, event: Any, told: str) -> None:
    """The invocation fails as a whole: whoever wired it has to know."""
    with pytest.raises(PolicyError) as refused:
        Orders(store).handler(event, Context(30))
    assert str(refused.value).startswith(told)


async def _async(order_id: str) -> None: ...


def _positional(order_id: str, /) -> None: ...


def _several(*order_ids: str) -> None: ...


def _generator(order_id: str) -> Iterator[str]:
    yield order_id


class _Class:
    def method(self, order_id: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_async, "Lambda awaits nothing"),
        (_positional, "arguments are given by name"),
        (_several, "arguments are given by name"),
        (_generator, "a generator runs only after"),
        (_Class.method, "Lambda calls a function of a module"),
        (_Class, "must be a function"),
    ],
)
def test_a_function_that_cannot_be_a_handler_is_refused(store: FakeStore, function: Any, told: str) -> None:
    """Where it is decorated."""
    with pytest.raises(PolicyError, match=told):
        sqs_batch(Policy("order_id"), store=store)(function)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": "order_id"}, r"write @sqs_batch\(Policy"),
        ({"needs": -1}, "needs=-1: must be seconds"),
        ({"reserve": "1"}, "reserve='1': must be seconds"),
        ({"record": "message"}, "record='message': .*: the function has no such parameter"),
        ({"policy": Policy("absent")}, "there is no argument 'absent'"),
        ({"policy": Policy("order_id", on_conflict="skip")}, "on_conflict"),
        ({"app": an_app()}, "an app has a store"),
    ],
)
def test_options_that_cannot_work_are_refused(store: FakeStore, options: Any, told: str) -> None:
    """Where they are written."""
    with pytest.raises(PolicyError, match=told):
        Orders(store, **options)


# -- a handler of anything else


def test_a_plain_handler_is_an_idempotent_function(store: FakeStore) -> None:
    """Its context has no canonical form, so its policy says what the effect is."""

    @idempotent(Policy("event.order_id", fingerprint="event"), store=store)
    def handler(event: dict[str, Any], context: Any) -> str:
        return f"charged {event['order_id']}"

    assert [handler(order(1), Context(30)) for _ in range(2)] == ["charged o-1"] * 2
    assert [each.attempts for each in store.records] == [1]


def test_a_plain_handler_without_fingerprint_is_told_what_to_write(store: FakeStore) -> None:
    """At its first event."""

    @idempotent(Policy("event.order_id"), store=store)
    def handler(event: dict[str, Any], context: Any) -> None: ...

    with pytest.raises(
        PolicyError, match=r"context=<.*Context>: .*leave it out with Policy\(key=..., fingerprint=...\)"
    ):
        handler(order(1), Context(30))
