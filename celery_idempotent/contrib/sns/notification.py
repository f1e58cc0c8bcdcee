"""What Amazon SNS wraps around a message on its way into a queue, and how to take it off: pure.

Nothing is verified. For a queue SNS's signature proves nothing that the queue's own policy does not enforce: only a
topic that the policy names (``aws:SourceArn``) can send to it. A signature matters where anybody can post, as to an
HTTP address.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

Kind = Literal["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A message of an SNS topic, without its envelope.

    Args:
        message_id: SNS's id of the message: one for all queues that it reaches, and for every delivery. Empty with raw
            message delivery, which does not tell it.
        topic: The topic's ARN; empty with raw delivery.
        text: The message as it was published.
        subject: Its subject; empty without one.
        attributes: Its attributes as text, by name: numbers as they were written, binary ones in base64, arrays as
            JSON. So they are the same with an envelope and with raw delivery.
        kind: What SNS says that it is. Only a ``"Notification"`` was published by somebody; the others are about a
            subscription.
        deduplication_id: Of a FIFO topic, what the publisher calls the message, or a hash of its text. SQS tells it
            beside the body, and so it does ``group_id``.
        group_id: Of a FIFO topic, within what messages keep their order.
    """

    message_id: str
    topic: str
    text: str
    subject: str = ""
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    kind: Kind = "Notification"
    deduplication_id: str = ""
    group_id: str = ""


def unwrap(body: str) -> Notification | None:
    """The notification whose envelope is ``body``; None if that is no envelope, as with raw message delivery."""
    try:
        envelope = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(envelope, dict) or envelope.get("Type") not in get_args(Kind):
        return None
    texts = {name: value for name, value in envelope.items() if isinstance(value, str)}
    if not texts.keys() >= _NEEDED:
        return None
    return Notification(
        message_id=texts["MessageId"],
        topic=texts["TopicArn"],
        text=texts["Message"],
        subject=texts.get("Subject", ""),
        attributes=_attributes(envelope.get("MessageAttributes")),
        kind=envelope["Type"],
    )


_NEEDED = {"MessageId", "TopicArn", "Message"}


def _attributes(found: Any) -> Mapping[str, str]:
    attributes = found if isinstance(found, dict) else {}
    values = {name: each.get("Value") for name, each in attributes.items() if isinstance(each, dict)}
    return MappingProxyType({name: value for name, value in values.items() if isinstance(value, str)})
