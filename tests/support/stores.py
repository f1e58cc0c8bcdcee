"""Real stores by name, for tests that are about any of them; and a record in a store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract import a_record
from lab.proof.targets import start, why_not


@contextmanager
def a_store(name: str) -> Iterator[str]:
    """The address of a new store of that kind; without its server the test is skipped, or fails in CI."""
    if reason := why_not(name):
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"{name}: {reason}")
    with start(name) as url:
        yield url


def kept(store: Store, **values: Any) -> Record:
    """A record that somebody has left in a store."""
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record
