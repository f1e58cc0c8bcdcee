"""Every store behaves as the oracle says, step by step, whatever is lost, late or expired."""

from uuid import uuid4

import pytest

from celery_idempotent import open_store
from celery_idempotent.store import Store
from celery_idempotent.stores.memory import MemoryStore
from proof.machine import run_machine


def test_memory_store_follows_the_oracle() -> None:
    """The store in memory, over many runs."""
    run_machine(MemoryStore, examples=200)


@pytest.mark.timeout(300)
def test_dynamodb_store_follows_the_oracle(dynamodb_endpoint: str) -> None:
    """DynamoDB over HTTP, over fewer."""
    table = f"machine-{uuid4().hex}"
    url = f"dynamodb://test:test@{dynamodb_endpoint.removeprefix('http://')}/{table}?region=us-east-1"
    opened = open_store(url)
    opened.provision()

    def make() -> Store:
        return opened

    run_machine(make, examples=25, steps=30)
    opened.close()
