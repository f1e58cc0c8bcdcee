"""The contracts of stores on Django's connections, on every kind of database."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from tests.django.databases import configured, on_mariadb, on_postgresql


class TestStore(StoreContract):
    """What every store must do."""

    @pytest.fixture
    def store(self, database: str) -> DjangoStore:
        return DjangoStore(database)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, DjangoStore)
        return DjangoStore(store.alias)


class TestCapabilities(PurgeableContract, VerifiableContract):
    """What a worker checks at its start, and what operators run daily."""

    @pytest.fixture
    def store(self, database: str) -> DjangoStore:
        return DjangoStore(database)

    @pytest.fixture
    def misconfigured_store(self, empty: str) -> DjangoStore:
        return DjangoStore(empty)


@contextmanager
def _behind(port: int, kind: str) -> Iterator[DjangoStore]:
    settings = on_postgresql(port, "shop") if kind == "postgresql" else on_mariadb(port, "shop", timeout=1)
    with configured("gone", settings) as alias:
        yield DjangoStore(alias)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
class TestRefusedConnections(OutageContract):
    """What every store must do when nobody listens."""

    @pytest.fixture
    def unreachable_store(self, kind: str) -> Iterator[DjangoStore]:
        with _behind(1, kind) as store:
            yield store

    def test_clock_without_a_server_is_unknown(self, unreachable_store: DjangoStore) -> None:
        """Nobody's clock is taken for the server's."""
        self._unavailable(unreachable_store.now)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
class TestSilentServer(OutageContract):
    """What every store must do when a server never answers, given the timeouts that the documents ask for."""

    @pytest.fixture
    def unreachable_store(self, kind: str) -> Iterator[DjangoStore]:
        silent = socket.create_server(("127.0.0.1", 0), backlog=64)
        with silent, _behind(silent.getsockname()[1], kind) as store:
            yield store
