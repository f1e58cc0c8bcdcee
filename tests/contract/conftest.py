"""SQL databases, each as one sees it that has all rights; and an AWS."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.embedded import EmbeddedAws, EmbeddedMariaDB, EmbeddedPostgres
from tests.support.sql_databases import Database


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as server:
        yield server


@pytest.fixture
def postgresql(postgres: EmbeddedPostgres) -> Database:
    return Database(postgres.url, postgres)


@pytest.fixture
def mysql(mariadb: EmbeddedMariaDB) -> Database:
    return Database(mariadb.url, mariadb)


@pytest.fixture
def sqlite(tmp_path: Path) -> Database:
    return Database(f"sqlite:///{tmp_path}/records.sqlite")


@pytest.fixture(params=["postgresql", "mysql", "sqlite"])
def database(request: pytest.FixtureRequest) -> Database:
    """Any."""
    found: Database = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["postgresql", "mysql"])
def served(request: pytest.FixtureRequest) -> Database:
    """A database behind a network, and with users."""
    found: Database = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["psycopg", "psycopg2", "pg8000", "pymysql", "pysqlite"])
def driven(request: pytest.FixtureRequest) -> Database:
    """Any, through any driver."""
    place = {"pymysql": "mysql", "pysqlite": "sqlite"}.get(request.param, "postgresql")
    found: Database = request.getfixturevalue(place)
    return replace(found, url=found.url.replace("psycopg", request.param))
