"""What becomes of a notification: a call of a task, nothing, or a dead letter."""

import inspect
import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from celery_idempotent.contrib.sns import By, Notification, Route
from celery_idempotent.contrib.sns.routing import Decision, PassedOver, Stays, TaskCall, decide
from celery_idempotent.errors import KeyMissing, PolicyError

TOPIC = "arn:aws:sns:eu-west-1:123456789012:orders"


def charge(order_id: str, cents: int = 0) -> None: ...


def anything(**arguments: Any) -> None: ...


def _of(message: Any, **fields: Any) -> Notification:
    text = message if isinstance(message, str) else json.dumps(message)
    return replace(Notification(message_id="m-1", topic=TOPIC, text=text), **fields)


PLACED = _of({"order_id": "o-1", "cents": 500, "other": 1}, attributes={"event": "placed"}, subject="new")
RAW = replace(PLACED, message_id="", topic="")


def _decided(notification: Notification, *routes: Route, task: Any = charge) -> Decision:
    return decide(notification, [(each, inspect.signature(task)) for each in routes], delivered_as="sqs-1")


def _route(**options: Any) -> Route:
    return Route(**{"queue": "orders", "task": "charge", **options})


def _call(notification: Notification, task: Any = charge, **options: Any) -> TaskCall:
    decision = _decided(notification, _route(**options), task=task)
    assert isinstance(decision, TaskCall), decision
    return decision


# -- arguments


def test_members_of_the_message_are_the_arguments_of_their_names() -> None:
    """Others are not meant for this task."""
    assert _call(PLACED).arguments == {"order_id": "o-1", "cents": 500}


def test_task_that_takes_anything_gets_everything() -> None:
    """By its own word."""
    assert _call(PLACED, task=anything).arguments == {"order_id": "o-1", "cents": 500, "other": 1}


@pytest.mark.parametrize(
    "arguments",
    ["{order_id: message.order_id, cents: message.other}", lambda each: {"order_id": "o-1", "cents": 1}],
    ids=["path", "function"],
)
def test_arguments_can_be_chosen(arguments: Any) -> None:
    """By a path of an object, or a function."""
    assert _call(PLACED, arguments=arguments).arguments == {"order_id": "o-1", "cents": 1}


@pytest.mark.parametrize("message", ["no JSON", "1", "[]", '"text"', "[" * 100_000])
def test_message_that_is_no_object_stays(message: str) -> None:
    """Nobody can tell what its arguments are."""
    decision = _decided(_of(message), _route())
    assert isinstance(decision, Stays)
    assert "charge" in decision.reason


# -- which route


def test_first_route_that_fits_has_it() -> None:
    """By attributes, subject or the message, by a path or a function."""
    routes = [
        _route(task="first", when="attributes.event == 'paid'"),
        _route(task="second", when=lambda each: each.subject == "new"),
        _route(task="third"),
    ]
    decision = _decided(PLACED, *routes)
    assert isinstance(decision, TaskCall)
    assert decision.route is routes[1]


@pytest.mark.parametrize("when", ["message.missing", "message.none", "`false`", "''", "`[]`", "`{}`"])
def test_notification_that_fits_no_route_stays(when: str) -> None:
    """It was sent for something."""
    assert _decided(_of({"none": None}), _route(when=when)) == Stays("no route fits it")


def test_zero_is_there() -> None:
    """As in JMESPath, where a number is true."""
    assert _call(_of({"order_id": "o", "left": 0}), when="message.left")


@pytest.mark.parametrize("kind", ["SubscriptionConfirmation", "UnsubscribeConfirmation"])
def test_word_about_a_subscription_is_passed_over(kind: Any) -> None:
    """It asks no task for anything."""
    decision = _decided(replace(PLACED, kind=kind), _route())
    assert isinstance(decision, PassedOver)
    assert kind in decision.reason
    assert TOPIC in decision.reason


# -- keys


@pytest.mark.parametrize(
    ("notification", "key"),
    [
        (PLACED, "m-1"),
        (replace(PLACED, deduplication_id="d-1"), "orders:d-1"),
        (replace(RAW, deduplication_id="d-1"), "orders:d-1"),
        (replace(PLACED, deduplication_id=sha256(PLACED.text.encode()).hexdigest()), "m-1"),
    ],
)
def test_a_message_is_named_by_its_publisher_or_by_sns(notification: Notification, key: str) -> None:
    """A hash of the text is no name: an equal message, some days later, is another one."""
    assert _call(notification).key == key
    assert _call(notification, queue="https://sqs.eu-west-1.amazonaws.com/123456789012/orders").key == key


@pytest.mark.parametrize("given", ["", sha256(RAW.text.encode()).hexdigest()])
def test_raw_notification_without_a_name_is_refused(given: str) -> None:
    """An id of SQS's would be another one where SNS delivers twice."""
    with pytest.raises(PolicyError, match=r"message\.id"):
        _call(replace(RAW, deduplication_id=given))


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (By.POLICY, None),
        ("message.order_id", "o-1"),
        ("message.cents", "i500"),
        (("message.order_id", "attributes.event"), "l2[s3:o-1,s6:placed]"),
        (lambda each: each.attributes["event"], "placed"),
        ("subject", "new"),
    ],
)
def test_key_is_what_is_named(key: Any, found: str | None) -> None:
    """A text as it stands; anything else in its canonical form."""
    assert _call(PLACED, key=key).key == found


@pytest.mark.parametrize("key", ["message.missing", "message_id", ("topic", "subject"), lambda each: None])
def test_what_is_not_there_is_no_key(key: Any) -> None:
    """Nor is the id that raw delivery does not tell."""
    with pytest.raises(KeyMissing):
        _call(RAW, key=key)


def test_each_delivery_of_a_notification_has_one_task_id() -> None:
    """Another for another task or notification; of a raw one by SQS's id of it."""
    other = _decided(PLACED, _route(task="other"))
    assert isinstance(other, TaskCall)
    calls = [_call(PLACED), _call(PLACED), _call(replace(PLACED, message_id="m-2")), other]
    assert len({each.task_id for each in calls}) == 3
    assert calls[0].task_id == "53bc39f2-0b7e-5ea5-b219-b34d0c611f15"
    assert _call(RAW, key="message.order_id").task_id == _call(replace(PLACED, message_id="sqs-1")).task_id


# -- refused where it is written


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"queue": ""}, "queue"),
        ({"queue": "https://sqs.eu-west-1.amazonaws.com/1/"}, "queue"),
        ({"queue": None}, "queue"),
        ({"key": "message["}, "is not a JMESPath"),
        ({"key": "order_id"}, "there is no 'order_id'; there are message, attributes"),
        ({"key": ("topic", "order_id")}, "there is no 'order_id'"),
        ({"key": None}, "must be a JMESPath"),
        ({"key": lambda: "k"}, "must take the notification alone"),
        ({"when": "event == 'a' ||"}, "is not a JMESPath"),
        ({"when": 1}, "must be a JMESPath, or a function"),
        ({"arguments": "{order: order}"}, "there is no 'order'"),
        ({"options": {"task_id": "t"}}, "options='task_id': it follows from the notification"),
        ({"options": {"idempotency_key": "k"}}, "options='idempotency_key'"),
        ({"arguments": lambda a, b: {}}, "must take the notification alone"),
    ],
)
def test_route_that_cannot_work_is_refused(options: dict[str, Any], told: str) -> None:
    """In words that say what is there."""
    with pytest.raises(PolicyError, match=f"(?s){told.replace('(', '.')}"):
        _route(**options)


def test_function_without_a_signature_is_taken() -> None:
    """The first notification will tell."""
    assert _route(key=type).key is type
