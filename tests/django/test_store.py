"""The contracts of stores on Django's connections, on every kind of database."""

import socket
from collections.abc import Iterator

import pytest

from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from tests.django.databases import configured, on_mariadb, on_postgresql


class TestStore(StoreContract, PurgeableContract, VerifiableContract):
    """What every store must do, what a worker checks at its start, and what operators run daily."""

    @pytest.fixture
    def store(self, database: str) -> DjangoStore:
        return DjangoStore(database)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, DjangoStore)
        return DjangoStore(store.alias)

    @pytest.fixture
    def misconfigured_store(self, empty: str) -> DjangoStore:
        return DjangoStore(empty)


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@pytest.mark.parametrize("answer", ["refused", "silent"])
class TestOutages(OutageContract):
    """When nobody listens, and when a server never answers, given the timeouts that the documents ask for."""

    @pytest.fixture
    def unreachable_store(self, kind: str, answer: str) -> Iterator[DjangoStore]:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            port = 1 if answer == "refused" else silent.getsockname()[1]
            on = {"postgresql": on_postgresql(port, "shop"), "mariadb": on_mariadb(port, "shop", timeout=1)}
            with configured("gone", on[kind]) as alias:
                yield DjangoStore(alias)

    def test_clock_without_a_server_is_unknown(self, unreachable_store: DjangoStore) -> None:
        """Nobody's clock is taken for the server's."""
        self._unavailable(unreachable_store.now)
