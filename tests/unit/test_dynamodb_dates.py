"""What the DynamoDB store makes of the dates of its answers."""

from typing import Any, cast

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.testing.contract import a_record

DATED = {"Date": "Fri, 15 Jan 2027 08:00:00 GMT"}
THAT_DATE = 1_800_000_000_000


class _Body:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def stream(self, **_: Any) -> list[bytes]:
        return [self._content]


@pytest.mark.parametrize("headers", [{}, {"Date": "later"}])
def test_answer_without_a_date_is_an_outage_and_no_crash(headers: dict[str, str]) -> None:
    """A load balancer's 503 has no date of DynamoDB's; the store reports it as an outage and keeps its clock."""
    client = boto3.client(
        "dynamodb",
        region_name="eu-west-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(retries={"total_max_attempts": 1}),
    )
    answers = iter([(200, DATED, b"{}"), (503, headers, b"<html>try later</html>")])

    def answer(request: Any, **_: Any) -> Any:
        status, given, body = next(answers)
        return AWSResponse(request.url, status, cast(Any, given), _Body(body))

    client.meta.events.register("before-send.dynamodb.PutItem", answer)
    store = DynamoDBStore("t", client=client, local_clock=lambda: THAT_DATE - 60_000)
    record = a_record()
    assert store.swap(record, None) == record

    with pytest.raises(StoreUnavailable, match="503"):
        store.swap(a_record(), None)

    assert store.now() == THAT_DATE
