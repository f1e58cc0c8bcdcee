"""Real stores by name, for tests that are about any of them; and a record in a store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Unpack

import pytest

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store, Wanted
from celery_idempotent.stores.memory import MemoryStore
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


class Indexed(MemoryStore):
    """Has an index of statuses, and gives no more than are enough."""

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        written = sorted(super().scan(**wanted), key=lambda each: each.updated_at)
        found = (each for each in written if each.updated_at < (wanted.get("before") or 2**63))
        return islice((each for each in found if wanted.get("worker") in (None, each.worker)), wanted.get("oldest"))

    def reads_all(self, **wanted: Unpack[Wanted]) -> bool:
        return wanted.get("status") is None


def kept(store: Store, **values: Any) -> Record:
    """A record that somebody has left in a store."""
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record
