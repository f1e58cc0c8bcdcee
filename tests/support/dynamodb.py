"""Stores of tables of their own, and counting what a store asks of DynamoDB."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from urllib.parse import urlencode
from uuid import uuid4

from botocore.httpsession import URLLib3Session

from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import HttpReply, Wire

LOGIN: Any = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


def new_url(endpoint: str, **options: str) -> str:
    """Of a table that does not exist yet."""
    query = urlencode({"region": "us-east-1", **options})
    return f"dynamodb://test:test@{endpoint.removeprefix('http://')}/t-{uuid4().hex}?{query}"


@contextmanager
def provisioned(url: str) -> Iterator[DynamoDBStore]:
    """The store that a URL names, with its table, until it is closed."""
    store = DynamoDBStore.from_url(url)
    try:
        store.provision()
        yield store
    finally:
        store.close()


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
