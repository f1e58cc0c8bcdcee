"""The contract on the store in memory, alone and within the stores that may be around it."""

import pytest

from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.wrappers import Sealed
from celery_idempotent.testing import PurgeableContract, StoreContract
from tests.support.objects import sealed


class TestMemoryStore(StoreContract, PurgeableContract):
    """The whole contract, within one process."""

    shared_by_processes = False

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


class TestSealedStore(StoreContract, PurgeableContract):
    """Encryption and objects change nothing of what a store does."""

    shared_by_processes = False

    @pytest.fixture
    def store(self) -> Sealed:
        return sealed(MemoryStore())
