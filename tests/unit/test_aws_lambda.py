"""A batch of SQS in Lambda: which messages come again, what is told of them, and what an invocation leaves behind."""

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from operator import itemgetter
from typing import Any

import pytest

from celery_idempotent import Policy, PolicyError, Status, current_attempt
from celery_idempotent.contrib.aws_lambda import sqs_batch
from celery_idempotent.engine import claim
from celery_idempotent.engine.heartbeat import heartbeat
from celery_idempotent.errors import LeaseLost, OutcomeUnknown, SafeToRetry, StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.testing import FakeStore
from tests.support.aws_lambda import QUEUE, Context, a_record, an_event, returned
from tests.support.deliveries import an_app
from tests.support.scene import raising

BY_ORDER = Policy("order_id")


@pytest.fixture
def store() -> Iterator[FakeStore]:
    yield FakeStore()
    assert heartbeat.in_flight == 0, "Lambda freezes the process when the handler returns"


class Orders:
    """What a handler has charged, and what it does besides."""

    def __init__(self, store: FakeStore, policy: Policy | None = None, **options: Any) -> None:
        self.store = store
        self.charged: list[str] = []
        self.then: Callable[[str], Any] = lambda order_id: None

        @sqs_batch(policy or BY_ORDER, store=store, name="charge", **options)
        def charge(order_id: str, cents: int = 100) -> Any:
            """Charge an order."""
            self.charged.append(order_id)
            return self.then(order_id)

        self.handler = charge

    def __call__(self, *records: object, context: Any = None, seconds: float = 30) -> list[int]:
        """Handle a batch; the places of what comes again."""
        event = an_event(*records)
        return returned(event, self.handler(event, context or Context(seconds)))


@pytest.fixture
def orders(store: FakeStore) -> Orders:
    return Orders(store)


def order(number: int, **members: Any) -> dict[str, Any]:
    return {"order_id": f"o-{number}", **members}


def meanwhile(other: Orders) -> list[int]:
    """Another invocation for the first order, at the same time."""
    with ThreadPoolExecutor() as threads:
        return threads.submit(other, order(1)).result()


def envelope(text: str, kind: str = "Notification") -> dict[str, Any]:
    return {"Type": kind, "MessageId": "m", "TopicArn": "arn:aws:sns:eu-west-1:1:orders", "Message": text}


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(each)["idempotency_reason"] for each in caplog.records if hasattr(each, "idempotency_message_id")]


def declining(error: Exception = ValueError("declined")) -> Callable[[str], None]:  # noqa: B008
    """What fails for orders 1 and 3."""
    return lambda order_id: raising(error)() if order_id in ("o-1", "o-3") else None


NO = declining()
GROUPED = [
    ([a_record(order(n), group=group, queue=queue) for n, group in ((1, "a"), (2, "b"), (3, "a"), (4, "b"))], charged)
    for queue, charged in ((f"{QUEUE}.fifo", "124"), (QUEUE, "1234"))
]
DONE, RELEASED = {Status.COMPLETED}, {Status.RELEASED}
RAISED: list[Exception] = [
    *(SafeToRetry("x"), LeaseLost("k", 1), OutcomeUnknown("k", "who knows"), StoreUnavailable("store", "swap", "away"))
]


@pytest.mark.parametrize(
    ("policy", "then", "batches", "again", "charged", "statuses"),
    [
        (BY_ORDER, str, [[]], [[]], "", set()),
        (BY_ORDER, str, [[order(1), order(2), order(1)], [order(1)]], [[], []], "12", DONE),
        (BY_ORDER, str, [[envelope(json.dumps(order(1))), order(1)]], [[]], "1", DONE),
        (BY_ORDER, str, [[order(1), order(1, colour="red")]], [[]], "1", DONE),
        (BY_ORDER, str, [[order(1), order(1, cents=5)]], [[1]], "1", DONE),
        (BY_ORDER, NO, [[order(2), order(1), order(4)], [order(1)]], [[1], [0]], "2141", DONE | RELEASED),
        *((BY_ORDER, declining(error), [[order(1), order(2)]], [[0]], "12", None) for error in RAISED),
        (BY_ORDER, lambda order_id: (each for each in "ab"), [[order(1)]], [[0]], "1", RELEASED),
        (BY_ORDER, lambda order_id: object(), [[order(1)], [order(1)]], [[], []], "1", DONE),
        *((BY_ORDER, NO, [grouped], [[0, 2]], charged, DONE | RELEASED) for grouped, charged in GROUPED),
        (Policy("order_id", remember=(ValueError,)), NO, [[order(1)], [order(1)]], [[0], [0]], "1", {Status.FAILED}),
        (Policy("order_id", mode="observe"), str, [[order(1), order(1)]], [[]], "11", DONE),
    ],
)
def test_message_comes_again_unless_it_has_a_result(
    store: FakeStore, policy: Policy, then: Any, batches: Any, again: list[list[int]], charged: str, statuses: Any
) -> None:
    """It takes effect once however often it comes; a failure holds up its group of a FIFO queue, and nothing else."""
    orders = Orders(store, policy)
    orders.then = then
    assert [orders(*batch) for batch in batches] == again
    assert orders.charged == [f"o-{number}" for number in charged]
    assert statuses is None or {each.status for each in store.records} == statuses


def test_handler_knows_its_name_its_promise_and_its_keys(orders: Orders) -> None:
    """And keeps the words of its function; but not its signature, which is not what Lambda calls."""
    orders(order(1))
    assert (orders.handler.name, orders.handler.__doc__) == ("charge", "Charge an order.")
    assert orders.handler.guarantee().startswith("charge: ")
    assert [orders.handler.idempotency_key_for(**order(1))] == [each.key for each in orders.store.records]
    assert not hasattr(orders.handler, "__wrapped__")


def test_without_store_the_current_app_is_asked() -> None:
    """Its store, its settings, its default policy."""
    app = an_app(idempotency_policy=Policy("order_id", scope="orders"))
    charge = sqs_batch(app=app, name="charge")(lambda order_id: None)
    assert charge(an_event(order(1)), None) == {"batchItemFailures": []}
    (record,) = app.conf.idempotency_store.scan()
    assert record.key.startswith("orders:1:")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("no JSON", "the body is no JSON: Expecting value"),
        ('{"order_id": NaN}', "the body is no JSON: NaN"),
        ([], "the body is no JSON object, but a list"),
        ({"cents": 5}, "the body does not fit the function: missing a required argument: 'order_id'"),
        (envelope("no JSON"), "the body is no JSON: Expecting value"),
        (envelope("", "SubscriptionConfirmation"), "nobody published it: it is a SubscriptionConfirmation"),
        ({"order_id": None}, "charge: key='order_id' is missing or null"),
    ],
)
def test_body_that_cannot_be_used_comes_again_alone(
    orders: Orders, caplog: pytest.LogCaptureFixture, body: object, told: str
) -> None:
    """It ends in the dead-letter queue, where a person sees it; the log says why, and quotes nothing."""
    assert orders(order(1), body, order(2)) == [1]
    assert (orders.charged, len(orders.store.records)) == (["o-1", "o-2"], 2)
    (reason,) = reasons(caplog)
    assert reason.startswith(told)


def test_function_may_take_all_members_and_the_record(store: FakeStore) -> None:
    """Members tell operations apart; the record does not, as it differs, and no member can be it."""
    seen: list[Any] = []

    @sqs_batch(BY_ORDER, store=store, name="charge", record="message")
    def charge(order_id: str, message: Any, **rest: Any) -> None:
        seen.append((message["messageId"], rest))

    records = [a_record(order(1, message="forged", colour="red")), a_record(order(1, colour="red"), received=2)]
    event = an_event(*records, order(1, colour="blue"))

    assert returned(event, charge(event, None)) == [2]
    assert seen == [(records[0]["messageId"], {"colour": "red"})]


def test_key_can_come_from_the_record(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Sent twice is two operations, delivered twice is one; without the key nothing runs."""
    orders = Orders(store, key=itemgetter("messageId"))
    one, other = a_record(order(1)), a_record(order(1))
    assert (orders(one, one, other), orders.charged) == ([], ["o-1", "o-1"])
    orders = Orders(store, key=lambda record: record["attributes"].get("absent"))
    assert (orders(one), orders.charged) == ([0], [])
    assert "event=idempotency.key_missing" in caplog.text


@pytest.mark.parametrize(("private", "reason"), [(False, "ValueError: declined"), (True, "ValueError")])
def test_log_has_the_traceback_of_a_failure(
    store: FakeStore, caplog: pytest.LogCaptureFixture, private: bool, reason: str
) -> None:
    """Nobody else would write it. Under ``private`` it has its type alone."""
    orders = Orders(store, Policy("order_id", private=private))
    orders.then = NO
    orders(a_record(order(1), received=2))

    (line,) = (each for each in caplog.records if hasattr(each, "idempotency_message_id"))
    assert (bool(line.exc_info), line.levelno, reasons(caplog)) == (not private, logging.ERROR, [reason])
    assert vars(line)["idempotency_received"] == "2"
    assert ("declined" in caplog.text) is not private


def test_operation_in_flight_comes_again(orders: Orders, store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """Another invocation has it; when that has ended, its result counts."""
    other, met = Orders(store), list[list[int]]()
    orders.then = lambda order_id: met.append(meanwhile(other))
    with caplog.at_level(logging.INFO):
        assert (orders(order(1)), met) == ([], [[0]])

    assert (other(order(1)), other.charged) == ([], [])
    assert "is in flight on" in reasons(caplog)[0]
    assert {each.levelno for each in caplog.records if hasattr(each, "idempotency_message_id")} == {logging.INFO}


def test_effect_that_could_not_be_recorded_does_not_hold_up_its_batch(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its write is tried until the reserve begins; the messages before it are answered."""
    monkeypatch.setattr(claim, "_CONFIRM_FOR", 5.0)  # ten minutes, for which it would be tried otherwise
    orders = Orders(store, reserve=1)

    def away(record: Record) -> None:
        if record.status is Status.COMPLETED and record.key == orders.handler.idempotency_key_for(**order(2)):
            raise StoreUnavailable("store", "swap", "away")

    store.before_swap = away

    assert orders(order(1), order(2), context=Context(1.6, lambda: 0.0)) == [1]
    assert orders.charged == ["o-1", "o-2"]
    (seconds,) = (vars(each)["idempotency_seconds"] for each in caplog.records if "result_waits" in each.message)
    assert 0 < seconds <= 0.6


@pytest.mark.parametrize(
    ("policy", "seconds", "low", "high"),
    [(BY_ORDER, 30, 27, 29), (Policy("order_id", lease=5, deadline=10), 30, 8, 10), (BY_ORDER, None, -1, 0)],
)
def test_body_has_until_its_invocation_or_its_deadline_ends(
    store: FakeStore, policy: Policy, seconds: float | None, low: float, high: float
) -> None:
    """Whichever is earlier; and without a context, as in a test of the author's, for ever."""
    orders, remaining = Orders(store, policy), list[float]()
    orders.then = lambda order_id: remaining.append(current_attempt().remaining or 0)
    orders.handler(an_event(order(1)), Context(seconds, lambda: 0.0) if seconds else None)
    assert low < remaining[0] <= high


@pytest.mark.parametrize("lease", [None, 60])
def test_killed_invocation_is_taken_over_from_once_it_would_have_ended(store: FakeStore, lease: Any) -> None:
    """And not before, in its reserve neither; long before the policy's lease."""

    def act(order_id: str) -> None:
        store.before_swap = raising(KeyboardInterrupt())
        raise KeyboardInterrupt

    orders = Orders(store, Policy("order_id", lease=lease) if lease else BY_ORDER, reserve=5)
    orders.then = act
    with pytest.raises(KeyboardInterrupt):
        orders(order(1), seconds=30)
    store.before_swap = lambda record: None
    orders.then = lambda order_id: None

    store.advance(29)
    assert orders(order(1)) == [0]
    store.advance(2)
    assert (orders(order(1)), orders.charged) == ([], ["o-1", "o-1"])


def test_message_that_cannot_end_in_time_is_not_begun(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    """It comes again, with all that follow; the log says how many, and what would help."""
    orders, now = Orders(store, needs=timedelta(seconds=10), reserve=1), [0.0]
    orders.then = lambda order_id: now.__setitem__(0, now[0] + 10)

    assert orders(order(1), order(2), order(3), context=Context(25, lambda: now[0])) == [2]
    assert orders.charged == ["o-1", "o-2"]
    assert "event=idempotency.messages_unstarted task=charge messages=1 reason=" in caplog.text
    assert "4.0 s are left" in caplog.text
    assert [Orders(store)(order(3), seconds=seconds) for seconds in (0, 1.4)] == [[0]] * 2, "a lease has a least length"


@pytest.mark.parametrize("event", [{}, "text", {"Records": [{"EventSource": "aws:sns"}]}])
def test_event_of_something_else_is_refused(orders: Orders, event: Any) -> None:
    """The invocation fails as a whole: whoever wired it has to know."""
    with pytest.raises(PolicyError, match="sqs_batch"):
        orders.handler(event, Context(30))


async def _async(order_id: str) -> None: ...
def _positional(order_id: str, /) -> None: ...


def _generator(order_id: str) -> Iterator[str]:
    yield order_id


@pytest.mark.parametrize("function", [_async, _positional, _generator, Orders.__call__, Orders])
def test_function_that_cannot_be_a_handler_is_refused(store: FakeStore, function: Any) -> None:
    """Where it is decorated."""
    with pytest.raises(PolicyError, match="function"):
        sqs_batch(BY_ORDER, store=store)(function)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"needs": -1}, "needs"),
        ({"record": "message"}, "record"),
        ({"policy": Policy("absent")}, "key"),
        ({"policy": Policy("order_id", on_conflict="skip")}, "on_conflict"),
        ({"app": an_app()}, "store"),
    ],
)
def test_options_that_cannot_work_are_refused(store: FakeStore, options: Any, told: str) -> None:
    """Where they are written."""
    with pytest.raises(PolicyError) as refused:
        Orders(store, **options)
    assert refused.value.option == told
