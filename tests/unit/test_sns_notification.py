"""SNS's envelope comes off, and nothing else is taken for one."""

import json
from typing import Any

import pytest

from celery_idempotent.contrib.sns import Notification, unwrap

TOPIC = "arn:aws:sns:eu-west-1:123456789012:orders"

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
