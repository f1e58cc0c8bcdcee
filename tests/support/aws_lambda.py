"""AWS Lambda behind a queue of SQS, without Lambda: events, contexts, and the loop of an event source mapping."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

Event = dict[str, Any]
Handler = Callable[[Event, Any], Mapping[str, Any]]

QUEUE = "arn:aws:sqs:eu-west-1:123456789012:orders"


class Context:
    """What is used of Lambda's: ``seconds`` are left, and less as time passes by ``clock``."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + seconds

    def get_remaining_time_in_millis(self) -> int:
        """As Lambda's."""
        return max(round((self._ends - self._clock()) * 1000), 0)


def a_record(body: object, *, group: str | None = None, queue: str = QUEUE, received: int = 1) -> Event:
    """A message as Lambda gives it; ``body`` is text, or what JSON is made of."""
    attributes = {"ApproximateReceiveCount": str(received), **({"MessageGroupId": group} if group else {})}
    text = body if isinstance(body, str) else json.dumps(body)
    sent = {"eventSource": "aws:sqs", "eventSourceARN": queue}
    return {"messageId": str(uuid4()), "body": text, "attributes": attributes, **sent}


def an_event(*records: object) -> Event:
    """A batch of records, or of bodies."""
    return {"Records": [each if isinstance(each, dict) and "messageId" in each else a_record(each) for each in records]}


def returned(event: Event, response: Mapping[str, Any]) -> list[int]:
    """The places in the batch of the messages that are to come again."""
    ids = [each["messageId"] for each in event["Records"]]
    return [ids.index(each["itemIdentifier"]) for each in response["batchItemFailures"]]


@dataclass(frozen=True)
class EventSource:
    """What an event source mapping with ``ReportBatchItemFailures`` does: polls, invokes, and deletes what is done."""

    sqs: "SQSClient"
    url: str
    arn: str

    @property
    def waiting(self) -> int:
        """How many messages there are, visible or not."""
        names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    def poll(self, invoke: Handler, *, seconds: float = 30) -> int:
        """One batch, if there is one; how many messages it had. What an invocation raises leaves all of them."""
        asked: Any = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": 1, "MessageSystemAttributeNames": ["All"]}
        found = self.sqs.receive_message(QueueUrl=self.url, **asked).get("Messages", [])
        if not found:
            return 0
        sent = {"eventSource": "aws:sqs", "eventSourceARN": self.arn}
        records = [
            {"messageId": each["MessageId"], "body": each["Body"], "attributes": each["Attributes"], **sent}
            for each in found
        ]
        response = invoke({"Records": records}, Context(seconds))
        failed = {each["itemIdentifier"] for each in response["batchItemFailures"]}
        for each in found:
            if each["MessageId"] not in failed:
                self.sqs.delete_message(QueueUrl=self.url, ReceiptHandle=each["ReceiptHandle"])
        return len(found)
