"""What comes out of an envelope of SNS, and which call of a task it becomes, if any."""

import inspect
import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from celery_idempotent.contrib.sns import By, Notification, NotRouted, Route, TaskCall, call_of, unwrap
from celery_idempotent.errors import KeyMissing, PolicyError

TOPIC = "arn:aws:sns:eu-west-1:123456789012:orders"


def charge(order_id: str, cents: int = 0) -> None: ...


def anything(**arguments: Any) -> None: ...


def _of(message: Any, **fields: Any) -> Notification:
    text = message if isinstance(message, str) else json.dumps(message)
    return replace(Notification(message_id="m-1", topic=TOPIC, text=text), **fields)


PLACED = _of({"order_id": "o-1", "cents": 500, "other": 1}, attributes={"event": "placed"}, subject="new")
RAW = replace(PLACED, message_id="", topic="")


def _routed(notification: Notification, *routes: Route, task: Any = charge) -> TaskCall:
    return call_of(notification, [(each, inspect.signature(task)) for each in routes], delivered_as="sqs-1")


def _route(**options: Any) -> Route:
    return Route(**{"queue": "orders", "task": "charge", **options})


def _call(notification: Notification, task: Any = charge, **options: Any) -> TaskCall:
    return _routed(notification, _route(**options), task=task)


# -- the envelope

ENVELOPE = {
    "Type": "Notification",
    "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
    "TopicArn": TOPIC,
    "Subject": "placed",
    "Message": '{"order_id": "o-1"}',
    "Timestamp": "2026-05-02T00:54:06.655Z",
    "SignatureVersion": "1",
    "Signature": "EXAMPLEw6JRN...",
    "SigningCertURL": "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-f3ecfb.pem",
    "UnsubscribeURL": "https://sns.eu-west-1.amazonaws.com/?Action=Unsubscribe",
    "MessageAttributes": {
        "event": {"Type": "String", "Value": "placed"},
        "cents": {"Type": "Number", "Value": "500"},
        "seal": {"Type": "Binary", "Value": "AAE="},
    },
}
"""As the Developer Guide of SNS shows it."""


def test_notification_comes_out_of_its_envelope() -> None:
    """With its subject and its attributes, as text."""
    assert unwrap(json.dumps(ENVELOPE)) == Notification(
        message_id="22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
        topic=TOPIC,
        text='{"order_id": "o-1"}',
        subject="placed",
        attributes={"event": "placed", "cents": "500", "seal": "AAE="},
    )


@pytest.mark.parametrize(
    "change",
    [
        {"Subject": None, "MessageAttributes": None},
        {"Subject": 1, "MessageAttributes": []},
        {"MessageAttributes": {"a": "b", "c": {"Type": "String"}}},
    ],
)
def test_what_is_optional_may_be_damaged(change: dict[str, Any]) -> None:
    """A notification without subject or attributes is one all the same."""
    found = unwrap(json.dumps({**ENVELOPE, **change}))
    assert found is not None
    assert found.text == ENVELOPE["Message"]
    assert found.attributes == {}


@pytest.mark.parametrize("kind", ["SubscriptionConfirmation", "UnsubscribeConfirmation"])
def test_word_about_a_subscription_is_told_apart(kind: str) -> None:
    """Nobody published it."""
    found = unwrap(json.dumps({**ENVELOPE, "Type": kind}))
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no JSON",
        "[" * 100_000,
        "1",
        "[]",
        "{}",
        '{"order_id": "o-1"}',
        '{"Type": "Notification"}',
        '{"Type": []}',
        json.dumps({**ENVELOPE, "Type": "Event"}),
        json.dumps({**ENVELOPE, "MessageId": 1}),
        json.dumps({**ENVELOPE, "TopicArn": None}),
        json.dumps({**ENVELOPE, "Message": {"order_id": "o-1"}}),
    ],
)
def test_anything_else_is_no_envelope(body: str) -> None:
    """Raw message delivery has any body, and so have strangers."""
    assert unwrap(body) is None


# -- arguments


def test_members_of_the_message_are_the_arguments_of_their_names() -> None:
    """Others are not meant for this task."""
    assert _call(PLACED).arguments == {"order_id": "o-1", "cents": 500}


def test_task_that_takes_anything_gets_everything() -> None:
    """By its own word."""
    assert _call(PLACED, task=anything).arguments == {"order_id": "o-1", "cents": 500, "other": 1}


def test_arguments_can_be_chosen() -> None:
    """By a function, and then nothing of what it returns is left out."""
    assert _call(PLACED, arguments=lambda each: {"cents": each.message["other"]}).arguments == {"cents": 1}
    assert _call(PLACED, arguments=lambda each: each.message).arguments == PLACED.message


@pytest.mark.parametrize("message", ["no JSON", "1", "[]", '"text"', "[" * 100_000])
def test_message_that_is_no_object_stays(message: str) -> None:
    """Nobody can tell what its arguments are."""
    with pytest.raises(NotRouted, match="arguments of charge are no object"):
        _call(_of(message))


# -- which route


def test_first_route_that_fits_has_it() -> None:
    """By whatever its function looks at."""
    routes = [
        _route(task="first", when=lambda each: each.attributes["event"] == "paid"),
        _route(task="second", when=lambda each: each.subject),
        _route(task="third"),
    ]
    assert _routed(PLACED, *routes).route is routes[1]


def test_notification_that_fits_no_route_stays() -> None:
    """It was sent for something."""
    with pytest.raises(NotRouted, match="no route fits it"):
        _call(PLACED, when=lambda each: each.message.get("missing"))


@pytest.mark.parametrize("kind", ["SubscriptionConfirmation", "UnsubscribeConfirmation"])
def test_word_about_a_subscription_stays(kind: str) -> None:
    """It asks no task for anything, and a person may have to confirm it."""
    with pytest.raises(NotRouted, match=f"{kind} of {TOPIC}"):
        _call(replace(PLACED, kind=kind))


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
    calls = [
        _call(PLACED),
        _call(PLACED),
        _call(replace(PLACED, message_id="m-2")),
        _routed(PLACED, _route(task="other")),
    ]
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
        ({"key": "order_id"}, "there is no argument 'order_id'; the signature is (.*, message, attributes, subject"),
        ({"key": ("topic", "order_id")}, "there is no argument 'order_id'"),
        ({"key": None}, "key=None: must be"),
        ({"key": lambda: "k"}, "key=.*must take the task's arguments (notification"),
        ({"when": "subject"}, "when='subject': must be a function of the notification"),
        ({"arguments": {"order": 1}}, "arguments={'order': 1}: must be a function"),
        ({"options": {"task_id": "t"}}, "options='task_id': it follows from the notification"),
        ({"options": {"idempotency_key": "k"}}, "options='idempotency_key'"),
    ],
)
def test_route_that_cannot_work_is_refused(options: dict[str, Any], told: str) -> None:
    """In words that say what is there."""
    with pytest.raises(PolicyError, match=told.replace("(", ".")):
        _route(**options)
