"""Counting what a store asks of DynamoDB."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from botocore.httpsession import URLLib3Session

from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import HttpReply, Wire


@contextmanager
def count_requests(store: DynamoDBStore) -> Iterator[list[str]]:
    """The names of the HTTP requests that leave within the block on either path, resends included."""
    requests: list[str] = []
    exchange, send = Wire.exchange, URLLib3Session.send

    def sent(session: URLLib3Session, request: Any) -> Any:
        requests.append(request.headers["X-Amz-Target"].decode().rpartition(".")[2])
        return send(session, request)

    def noted(wire: Wire, headers: Mapping[str, str], body: bytes) -> HttpReply:
        requests.append(headers["X-Amz-Target"].rpartition(".")[2])
        return exchange(wire, headers, body)

    with patch.object(Wire, "exchange", noted), patch.object(URLLib3Session, "send", sent):
        yield requests
