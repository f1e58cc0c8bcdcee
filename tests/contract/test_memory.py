"""The contract on the store in memory."""

import pytest

from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import PurgeableContract, StoreContract


class TestMemoryStore(StoreContract, PurgeableContract):
    """The whole contract, within one process."""

    shared_by_processes = False

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
