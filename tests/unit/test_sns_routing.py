"""What comes out of an envelope of SNS, and which call of a task it becomes, if any."""

import inspect
import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.contrib.sns import By, Notification, NotRouted, Route, TaskCall, call_of, unwrap
from celery_idempotent.errors import KeyMissing, PolicyError

TOPIC = "arn:aws:sns:eu-west-1:123456789012:orders"
URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"


def charge(order_id: str, cents: int = 0) -> None: ...


def anything(**arguments: Any) -> None: ...


def _of(text: str, **fields: Any) -> Notification:
    return replace(Notification(message_id="m-1", topic=TOPIC, text=text), **fields)


PLACED = _of('{"order_id": "o-1", "cents": 500, "other": 1}', attributes={"event": "placed"}, subject="new")
RAW = replace(PLACED, message_id="", topic="")
HASH = sha256(PLACED.text.encode()).hexdigest()


def _routed(notification: Notification, *routes: Route, task: Any = charge) -> TaskCall:
    return call_of(notification, [(each, inspect.signature(task)) for each in routes], delivered_as="sqs-1")


def _route(**options: Any) -> Route:
    return Route(**{"queue": "orders", "task": "charge", **options})


def _call(notification: Notification, task: Any = charge, **options: Any) -> TaskCall:
    return _routed(notification, _route(**options), task=task)


ENVELOPE = {
    "Type": "Notification",
    "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
    "TopicArn": TOPIC,
    "Subject": "placed",
    "Message": '{"order_id": "o-1"}',
    "MessageAttributes": {
        "event": {"Type": "String", "Value": "placed"},
        "cents": {"Type": "Number", "Value": "500"},
        "seal": {"Type": "Binary", "Value": "AAE="},
    },
}
"""As the Developer Guide of SNS shows it."""
UNWRAPPED = Notification(
    message_id="22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
    topic=TOPIC,
    text='{"order_id": "o-1"}',
    subject="placed",
    attributes={"event": "placed", "cents": "500", "seal": "AAE="},
)
NONE: dict[str, str] = {}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"Subject": None, "MessageAttributes": None}, {"subject": "", "attributes": NONE}),
        ({"MessageAttributes": {"a": "b", "c": {"Type": "String"}}}, {"attributes": NONE}),
        ({"Type": "UnsubscribeConfirmation"}, {"kind": "UnsubscribeConfirmation"}),
    ],
)
def test_notification_comes_out_of_its_envelope(change: dict[str, Any], found: dict[str, Any]) -> None:
    """With subject and attributes as text, if it has any; a word about a subscription is told apart."""
    assert unwrap(json.dumps({**ENVELOPE, **change})) == replace(UNWRAPPED, **found)


@pytest.mark.parametrize(
    "body",
    [
        *("", "no JSON", "[" * 100_000, "1", "[]", "{}", '{"Type": "Notification"}', '{"Type": []}'),
        *({"Type": "Event"}, {"MessageId": 1}, {"TopicArn": None}, {"Message": {"order_id": "o-1"}}),
    ],
)
def test_anything_else_is_no_envelope(body: Any) -> None:
    """Raw message delivery has any body, and so have strangers."""
    assert unwrap(body if isinstance(body, str) else json.dumps({**ENVELOPE, **body})) is None


@given(st.dictionaries(st.sampled_from(["order_id", "cents", "other"]), st.integers()))
def test_members_of_the_message_are_the_arguments_of_their_names(message: dict[str, Any]) -> None:
    """Others are not meant for this task, unless it takes anything or a function has chosen them."""
    notification = _of(json.dumps(message))
    assert _call(notification).arguments == {name: each for name, each in message.items() if name != "other"}
    assert _call(notification, task=anything).arguments == message
    assert _call(notification, arguments=lambda each: each.message).arguments == message
    assert _call(notification, arguments=lambda each: {"cents": 1}).arguments == {"cents": 1}


@pytest.mark.parametrize(
    ("notification", "route", "told"),
    [
        *((_of(text), {}, "charge are no object") for text in ("no JSON", "[]", "[" * 100_000)),
        (PLACED, {"when": lambda each: each.message.get("missing")}, "no route"),
        (replace(PLACED, kind="SubscriptionConfirmation"), {}, "SubscriptionConfirmation"),
    ],
)
def test_notification_that_asks_for_no_call_stays(notification: Notification, route: Any, told: str) -> None:
    """It was sent for something, or a person has to confirm it; and its text is not quoted."""
    with pytest.raises(NotRouted, match=told):
        _call(notification, **route)


def test_first_route_that_fits_has_it() -> None:
    """Whatever its function looks at."""
    routes = [_route(when=lambda each: each.attributes["event"] == "paid"), _route(when=lambda each: each.subject)]
    assert _routed(PLACED, *routes, _route()).route is routes[1]


@pytest.mark.parametrize(
    ("notification", "key", "found"),
    [
        (PLACED, By.MESSAGE, "m-1"),
        (replace(PLACED, deduplication_id="d-1"), By.MESSAGE, "orders:d-1"),
        (replace(RAW, deduplication_id="d-1"), By.MESSAGE, "orders:d-1"),
        (replace(PLACED, deduplication_id=HASH), By.MESSAGE, "m-1"),  # an equal text later is another message
        (RAW, By.MESSAGE, PolicyError),  # SQS's id would be another one where SNS delivers twice
        (replace(RAW, deduplication_id=HASH), By.MESSAGE, PolicyError),
        (PLACED, By.POLICY, None),
        (PLACED, "message.order_id", "o-1"),
        (PLACED, "message.cents", "i500"),
        (PLACED, ("message.order_id", "attributes.event"), "l2[s3:o-1,s6:placed]"),
        (PLACED, lambda each: each.attributes["event"], "placed"),
        (PLACED, "subject", "new"),
        *((RAW, key, KeyMissing) for key in ("message.missing", "message_id", ("topic", "subject"), lambda each: None)),
    ],
)
def test_key_is_what_is_named(notification: Notification, key: Any, found: Any) -> None:
    """A text as it stands, anything else in its canonical form; otherwise the publisher's or SNS's id."""
    for queue in ("orders", URL):
        if isinstance(found, type):
            with pytest.raises(found):
                _call(notification, key=key, queue=queue)
        else:
            assert _call(notification, key=key, queue=queue).key == found


def test_each_delivery_of_a_notification_has_one_task_id() -> None:
    """Another for another task or notification; of a raw one by SQS's id of it. The ids are frozen."""
    calls = [
        *(_call(PLACED), _call(PLACED), _call(replace(PLACED, message_id="m-2"))),
        _routed(PLACED, _route(task="other")),
    ]
    assert len({each.task_id for each in calls}) == 3
    assert calls[0].task_id == "53bc39f2-0b7e-5ea5-b219-b34d0c611f15"
    assert _call(RAW, key="message.order_id").task_id == _call(replace(PLACED, message_id="sqs-1")).task_id


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        *(("queue", value, "queue") for value in ("", URL.removesuffix("orders"), None)),
        ("key", "order_id", "'order_id'; the signature is .*message, attributes, subject"),
        ("key", ("topic", "order_id"), "'order_id'"),
        ("key", None, "key=None"),
        ("when", "subject", "when='subject'"),
        ("options", {"task_id": "t"}, "options='task_id'"),
    ],
)
def test_route_that_cannot_work_is_refused(option: str, value: Any, told: str) -> None:
    """In words that say what is there."""
    with pytest.raises(PolicyError, match=told):
        _route(**{option: value})
