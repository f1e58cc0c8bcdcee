"""Servers that several kinds of test share, each started at its first use."""

import os
from collections.abc import Iterator

import pytest

from lab.embedded import (
    EmbeddedAws,
    EmbeddedMariaDB,
    EmbeddedPostgres,
    EmbeddedRedis,
    EmbeddedRedisCluster,
    Server,
)


@pytest.fixture(scope="session")
def dynamodb_endpoint() -> Iterator[str]:
    """A DynamoDB over HTTP: the embedded one, or another by TEST_DYNAMODB_ENDPOINT."""
    given = os.environ.get("TEST_DYNAMODB_ENDPOINT")
    if given:
        yield given
        return
    with EmbeddedAws() as aws:
        yield aws.endpoint


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One Redis whose acknowledged writes are on disk."""
    _require(EmbeddedRedis)
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[EmbeddedRedisCluster]:
    """A Redis Cluster of three masters."""
    _require(EmbeddedRedis)
    with EmbeddedRedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL server."""
    _require(EmbeddedPostgres)
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[EmbeddedMariaDB]:
    """A MariaDB server."""
    _require(EmbeddedMariaDB)
    with EmbeddedMariaDB() as server:
        yield server


def _require(server: type[Server]) -> None:
    if missing := server.missing():
        verdict = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        verdict(f"{server.__name__}: {missing}")
