"""What a table costs as it grows: where ends are written, what lists read, and what a purge of PostgreSQL leaves."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from tests.support.sql_databases import Database
from tests.support.waiting import wait_until


def _asked(database: Database, question: str) -> list[Any]:
    with database.administrator() as connection:
        return list(connection.execute(text(question)).all())


def _ended(store: SQLStore, claimed: Record) -> None:
    outcome = {"status": Status.COMPLETED, "result": '{"id": "ch_1"}', "content_type": "application/json"}
    end = claimed.but(**outcome, revision=new_nonce(), expires_at=claimed.created_at // 1000)
    assert store.swap(end, claimed.revision) == end


def _operations(store: SQLStore, count: int) -> None:
    """Claims and their ends, eight of them open at a time."""
    running: list[Record] = []
    for _ in range(count):
        now = store.now()
        running.append(a_record().but(created_at=now, updated_at=now))
        assert store.swap(running[-1], None) == running[-1]
        if len(running) == 8:
            _ended(store, running.pop(0))
    for each in running:
        _ended(store, each)


@pytest.mark.parametrize("kind", ["brin", pytest.param("btree", marks=pytest.mark.nightly)])
def test_end_is_written_beside_its_claim(postgresql: Database, kind: str) -> None:
    """More than 95 % of the ends touch no index; with an index that has an entry for each row, none is like that."""
    with postgresql.store() as store:
        table = store.table.name
        if kind == "btree":
            postgresql.do(f"DROP INDEX {table}_status", f"CREATE INDEX {table}_status ON {table} (status, expires_at)")
        _operations(store, 400)
        store.close()  # its processes of the server report when they end

        counts = f"SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = '{table}'"
        wait_until(lambda: _asked(postgresql, counts)[0][0] >= 400, "the server has not counted all ends")
        ((written, in_place),) = _asked(postgresql, counts)

    assert (in_place / written > 0.95) is (kind == "brin")


_NUMBERS = {
    "postgresql": "generate_series(1, 100000) AS numbers(n)",
    "mysql": "(SELECT seq AS n FROM seq_1_to_100000) AS numbers",
    "sqlite": "(WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 100000) "
    "SELECT n FROM numbers) AS numbers",
}
_KEYS = {"mysql": "CONCAT('k:', MD5(n))", "postgresql": "'k:' || md5(n::text)", "sqlite": "'k:' || n"}
_SETTLE = {"postgresql": "VACUUM ANALYZE {}", "mysql": "ANALYZE TABLE {}", "sqlite": "SELECT 1"}
_EXPLAIN = {
    "postgresql": "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)",
    "mysql": "EXPLAIN FORMAT=JSON",
    "sqlite": "EXPLAIN QUERY PLAN",
}


@pytest.fixture(scope="module", params=["postgres", pytest.param("mariadb", marks=pytest.mark.nightly), "sqlite"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, str]]:
    """A database and its table of outcomes, and among them twenty in doubt with a label, in the order of coming."""
    if request.param == "sqlite":
        database = Database(f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/records.sqlite")
    else:
        server: EmbeddedPostgres | EmbeddedMariaDB = request.getfixturevalue(request.param)
        database = Database(server.url, server)
    with database.store() as store:
        name, dialect = store.table.name, {"mariadb": "mysql"}.get(database.dialect, database.dialect)
        store.swap(a_record().but(status=Status.COMPLETED, label="", result='{"id": "ch_1"}', expires_at=2**40), None)
        others = [each.name for each in store.table.c if each.name not in {"idempotency_key", "status", "label"}]
        database.do(
            f"INSERT INTO {name} (idempotency_key, status, label, {', '.join(others)}) "
            f"SELECT {_KEYS[dialect]}, t.status, NULL, {', '.join(f't.{each}' for each in others)} "
            f"FROM {name} AS t CROSS JOIN {_NUMBERS[dialect]}",
        )
        for _ in range(20):
            store.swap(a_record().but(status=Status.UNKNOWN, label="acme/7"), None)
        database.do(_SETTLE[dialect].format(name))
        yield database, name


@pytest.mark.parametrize(
    ("wanted", "found", "index"),
    [
        ({"status": Status.UNKNOWN}, 20, "status"),
        ({"label": "acme/7"}, 20, "label"),
        ({"label_prefix": "acme/"}, 20, "label"),
        ({"task": "none"}, 0, None),
        ({"name": "none"}, 0, None),
        ({"oldest": 20}, 20, None),
    ],
)
def test_list_reads_its_index(
    large: tuple[Database, str], wanted: dict[str, Any], found: int, index: str | None
) -> None:
    """Few are sent, at once, and where an index tells, few are looked at; the store says which, as the plan shows."""
    database, table = large
    if database.dialect == "sqlite" and "label_prefix" in wanted:
        index = None  # whose LIKE knows no case
    statements: list[Any] = []
    with database.engine() as engine:
        event.listen(engine, "before_cursor_execute", lambda _c, _cu, sql, told, *_: statements.append((sql, told)))
        store = SQLStore(engine, table=table)
        assert len(list(store.scan(**wanted))) == found
        assert store.reads_all(**wanted) is (index is None)
        ((sql, told),) = (each for each in statements if each[0].startswith("SELECT") and "LIMIT" in each[0])
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(f"{_EXPLAIN[database.dialect]} {sql}", told).all()
    plan = re.sub(r"possible_keys[^]]*", "", json.dumps([list(each) for each in rows]))

    assert [each for each in ("status", "label") if f"{table}_{each}" in plan] == ([index] if index else [])
    if database.dialect == "postgresql" and index == "status":  # whose index sums up ranges of pages
        ((pages,),) = _asked(database, f"SELECT pg_relation_size('{table}') / 8192")
        read = rows[0][0][0]["Plan"]
        assert pages > 4_000
        assert read["Shared Hit Blocks"] + read["Shared Read Blocks"] < pages / 10


def test_look_at_all_rows_may_take_longer_than_a_statement(postgresql: Database) -> None:
    """What an index tells may not, and neither may a claim."""
    with postgresql.store(timeout=0.1) as store, ThreadPoolExecutor() as pool:
        store.swap(a_record().but(task="shop.charge"), None)
        with postgresql.engine() as engine, engine.begin() as other:
            other.execute(text(f"LOCK TABLE {store.table.name} IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(StoreUnavailable, match="timeout"):
                list(store.scan(label="acme/7"))
            found = pool.submit(lambda: list(store.scan(task="shop.charge")))
            waits = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND now() - query_start > interval '0.3 s'"
            wait_until(lambda: _asked(postgresql, f"SELECT 1 {waits}") != [], "nobody waits for that long")
        assert [each.task for each in found.result()] == ["shop.charge"]


def test_purge_goes_on_where_a_batch_had_enough(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every outcome that is forgotten goes, wherever in the table it is, and each time somebody purges."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGES_AT_ONCE", 2)
    with postgresql.reopened(f"T {uuid4().hex}") as store:  # a name that needs quotes
        store.provision()
        for _ in range(2):
            kept = [a_record().but(status=Status.UNKNOWN) for _ in range(30)]
            for each in kept:
                _operations(store, 3)
                store.swap(each, None)
            assert [*iter(lambda: store.purge(7), 0)] == [7] * 12 + [6]
            assert {each.key for each in store.scan()} == {each.key for each in kept}
            for each in kept:
                store.delete(each.key, each.revision)


def test_purge_reads_the_table_once_for_all_batches(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch does not begin at the first page again, where it would find what the others have left."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGES_AT_ONCE", 1)
    statements: list[str] = []
    with postgresql.store() as provisioned, postgresql.engine() as engine:
        _operations(provisioned, 200)
        ((pages,),) = _asked(postgresql, f"SELECT pg_relation_size('{provisioned.table.name}') / 8192")
        event.listen(engine, "before_cursor_execute", lambda _c, _cu, sql, *_: statements.append(sql))
        store = SQLStore(engine, table=provisioned.table.name)

        assert [store.purge(20) for _ in range(10)] == [20] * 10

    assert pages > 10
    assert len([each for each in statements if "DELETE" in each]) <= pages + 10


def test_table_in_partitions_is_purged(postgresql: Database) -> None:
    """It has no pages of its own, and is asked as a whole."""
    with postgresql.store() as provisioned:
        whole, name = provisioned.table.name, f"t_{uuid4().hex}"
        parts = (f"{name}_{n} PARTITION OF {name} FOR VALUES WITH (MODULUS 2, REMAINDER {n})" for n in (0, 1))
        partitioned = f"{name} (LIKE {whole} INCLUDING ALL) PARTITION BY HASH (idempotency_key)"
        postgresql.do(*(f"CREATE TABLE {each}" for each in (partitioned, *parts)))
    with postgresql.reopened(name) as store:
        _operations(store, 20)
        assert [store.purge(15) for _ in range(3)] == [15, 5, 0]
