"""What a list of few among a hundred thousand costs an SQL database: the index that it is read by, and no page more."""
# mypy: allow-untyped-decorators

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from tests.support.sql_databases import Database

_NUMBERS = {
    "postgresql": "generate_series(1, 100000) AS numbers(n)",
    "mysql": "(SELECT seq AS n FROM seq_1_to_100000) AS numbers",
    "sqlite": "(WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 100000) "
    "SELECT n FROM numbers) AS numbers",
}
_SETTLE = {"postgresql": "VACUUM ANALYZE {}", "mysql": "ANALYZE TABLE {}", "sqlite": "SELECT 1"}


@pytest.fixture(scope="module", params=["postgres", "mariadb", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Database:
    """Each kind of database."""
    if request.param == "sqlite":
        folder: Path = tmp_path_factory.mktemp("sqlite")
        return Database(f"sqlite:///{folder}/records.sqlite")
    server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(request.param)
    return Database(server.url, server)


@pytest.fixture(scope="module")
def table(database: Database) -> Iterator[str]:
    """A hundred thousand outcomes, and among them twenty in doubt with a label, in the order in which they came."""
    with database.store() as store:
        name = store.table.name
        dialect = "mysql" if database.dialect == "mariadb" else database.dialect
        outcome = a_record().but(status=Status.COMPLETED, label="", result='{"id": "ch_1"}', content_type="text/plain")
        store.swap(outcome.but(expires_at=2**40), None)
        own = {"idempotency_key", "status", "label"}
        others = ", ".join(each.name for each in store.table.c if each.name not in own)
        copied = ", ".join(f"t.{each}" for each in others.split(", "))
        key = "CONCAT('k:', MD5(n))" if dialect == "mysql" else "'k:' || n"
        database.do(
            f"INSERT INTO {name} (idempotency_key, status, label, {others}) SELECT {key}, t.status, NULL, {copied} "
            f"FROM {name} AS t CROSS JOIN {_NUMBERS[dialect]}",
        )
        for _ in range(20):
            store.swap(a_record().but(status=Status.UNKNOWN, label="acme/7"), None)
        database.do(_SETTLE[dialect].format(name))
        yield name


def _plan(database: Database, table: str, **wanted: Any) -> tuple[int, str]:
    """How many records a scan finds, and how its first statement is executed."""
    statements: list[Any] = []
    with database.engine() as engine:
        event.listen(engine, "before_cursor_execute", lambda _c, _cu, sql, told, *_: statements.append((sql, told)))
        found = len(list(SQLStore(engine, table=table).scan(**wanted)))
        sql, told = next(each for each in statements if each[0].startswith("SELECT") and "LIMIT" in each[0])
        explain = "EXPLAIN QUERY PLAN" if database.dialect == "sqlite" else "EXPLAIN"
        with engine.connect() as connection:
            return found, "\n".join(str(tuple(each)) for each in connection.exec_driver_sql(f"{explain} {sql}", told))


@pytest.mark.parametrize(
    ("wanted", "index"), [({"status": Status.UNKNOWN}, "status"), ({"label": "acme/7"}, "label")], ids=str
)
def test_list_is_read_by_its_index(database: Database, table: str, wanted: dict[str, Any], index: str) -> None:
    """Of a hundred thousand records, the twenty that are meant are found without a look at the others."""
    found, plan = _plan(database, table, **wanted)

    assert found == 20
    assert f"{table}_{index}" in plan, plan


def test_list_without_its_index_would_be_noticed(database: Database, table: str) -> None:
    """A question that has no index is answered by no index: the plan tells the two apart."""
    found, plan = _plan(database, table, task="none")

    assert found == 0
    assert f"{table}_status" not in plan
    assert f"{table}_label" not in plan
