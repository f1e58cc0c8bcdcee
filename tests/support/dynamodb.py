"""Counting what a store asks of DynamoDB."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.wire import HttpReply, Wire


@contextmanager
def count_requests(store: DynamoDBStore) -> Iterator[list[str]]:
    """The names of the HTTP requests that leave within the block on either path, resends included."""
    requests: list[str] = []
    exchange = Wire.exchange

    def note(request: Any, **kwargs: Any) -> None:
        requests.append(request.headers["X-Amz-Target"].decode().rpartition(".")[2])

    def noted(wire: Wire, headers: Mapping[str, str], body: bytes) -> HttpReply:
        requests.append(headers["X-Amz-Target"].rpartition(".")[2])
        return exchange(wire, headers, body)

    store.verify()  # or the direct path would find the hook, and all would be counted twice
    events = store._connected().meta.events
    events.register("before-send.dynamodb.*", note)
    try:
        with patch.object(Wire, "exchange", noted):
            yield requests
    finally:
        events.unregister("before-send.dynamodb.*", note)
