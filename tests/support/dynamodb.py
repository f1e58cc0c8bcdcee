"""Counting what a store asks of DynamoDB."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery_idempotent.stores.dynamodb import DynamoDBStore


@contextmanager
def count_requests(store: DynamoDBStore) -> Iterator[list[str]]:
    """The names of the HTTP requests that leave within the block, resends included."""
    requests: list[str] = []

    def note(request: Any, **kwargs: Any) -> None:
        requests.append(request.headers["X-Amz-Target"].decode().rpartition(".")[2])

    events = store._connected().meta.events
    events.register("before-send.dynamodb.*", note)
    try:
        yield requests
    finally:
        events.unregister("before-send.dynamodb.*", note)
