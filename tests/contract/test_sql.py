"""The contract on PostgreSQL, MariaDB and SQLite, and what only SQL databases can get wrong."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from celery_idempotent.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import StoreContract
from example_project.embedded import EmbeddedMariaDB, EmbeddedPostgres


def opened(url: str) -> SQLStore:
    store = open_store(url)
    assert isinstance(store, SQLStore)
    return store


class _Contract(StoreContract):
    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Iterator[SQLStore]:
        store = opened(f"{url}?table=t_{uuid4().hex}")
        store.provision()
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, SQLStore)
        return SQLStore(store._url, table=store.table.name)


class TestPostgreSQL(_Contract):
    @pytest.fixture
    def url(self, postgres: EmbeddedPostgres) -> str:
        return postgres.url


class TestMariaDB(_Contract):
    @pytest.fixture
    def url(self, mariadb: EmbeddedMariaDB) -> str:
        return mariadb.url


class TestSQLite(_Contract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/records.sqlite"
