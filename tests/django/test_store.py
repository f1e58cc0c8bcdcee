"""The contract on Django's connections, and what only they can get wrong."""

import pytest

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.store import Store
from celery_idempotent.testing import StoreContract


class TestDjangoStore(StoreContract):
    """The whole contract, on every kind of database."""

    @pytest.fixture
    def store(self, database: str) -> DjangoStore:
        return DjangoStore(database)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, DjangoStore)
        return DjangoStore(store.alias)
