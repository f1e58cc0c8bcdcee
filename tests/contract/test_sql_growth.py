"""What a table of PostgreSQL costs as it grows: where ends are written, what lists read, and what a purge leaves."""
# mypy: allow-untyped-decorators

from dataclasses import replace
from itertools import islice
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event, text

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing.contract import a_record
from lab.embedded import EmbeddedPostgres
from tests.support.sql_databases import Database
from tests.support.waiting import wait_until


@pytest.fixture
def postgresql(postgres: EmbeddedPostgres) -> Database:
    return Database(postgres.url, postgres)


def _asked(database: Database, question: str) -> list[Any]:
    with database.administrator() as connection:
        return list(connection.execute(text(question)).all())


def _ended(store: SQLStore, claimed: Record) -> Record:
    outcome = {"status": Status.COMPLETED, "result": '{"id": "ch_1"}', "content_type": "application/json"}
    end = claimed.but(**outcome, revision=new_nonce(), expires_at=claimed.created_at // 1000)
    assert store.swap(end, claimed.revision) == end
    return end


def _operations(store: SQLStore, count: int, *, at_once: int = 8) -> None:
    """Claims and their ends, so many of them open at a time."""
    running: list[Record] = []
    for _ in range(count):
        now = store.now()
        claimed = replace(a_record(), created_at=now, updated_at=now, expires_at=None)
        assert store.swap(claimed, None) == claimed
        running.append(claimed)
        if len(running) == at_once:
            _ended(store, running.pop(0))
    for each in running:
        _ended(store, each)


@pytest.mark.parametrize("kind", ["brin", "btree"])
def test_end_is_written_beside_its_claim(postgresql: Database, kind: str) -> None:
    """More than 95 % of the ends touch no index; with an index that has an entry for each row, none is like that."""
    ends = 400
    with postgresql.store() as store:
        table = store.table.name
        if kind == "btree":
            postgresql.do(f"DROP INDEX {table}_status", f"CREATE INDEX {table}_status ON {table} (status, expires_at)")
        _operations(store, ends)
        store.close()  # its processes of the server report when they end

        counts = f"SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = '{table}'"
        wait_until(lambda: _asked(postgresql, counts)[0][0] >= ends, "the server has not counted all ends")
        ((written, in_place),) = _asked(postgresql, counts)

    assert (in_place / written > 0.95) is (kind == "brin")


def test_list_of_a_status_reads_where_it_was_seen(postgresql: Database) -> None:
    """Twenty records in doubt among a hundred thousand cost a fraction of the table."""
    statements: list[Any] = []
    with postgresql.store() as store, postgresql.engine() as engine:
        table = store.table.name
        _operations(store, 1)
        others = ", ".join(each.name for each in store.table.c if each.name not in {"idempotency_key", "status"})
        copied = others.replace("expires_at", "NULL")
        # In the order in which they came: all that is in doubt is of one bad minute.
        postgresql.do(
            f"INSERT INTO {table} (idempotency_key, status, {others}) SELECT 'k:' || md5(i::text), "
            f"CASE WHEN i BETWEEN 50001 AND 50020 THEN 'UNKNOWN' ELSE status END, {copied} "
            f"FROM {table}, generate_series(1, 100000) AS i",
            f"VACUUM ANALYZE {table}",
        )
        event.listen(engine, "before_cursor_execute", lambda _c, _cu, sql, told, *_: statements.append((sql, told)))
        assert len(list(SQLStore(engine, table=table).scan(status=Status.UNKNOWN))) == 20
        with engine.connect() as connection:
            sql, told = statements[0]
            explained = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", told)
            plan = explained.scalar_one()[0]["Plan"]
        ((pages,),) = _asked(postgresql, f"SELECT pg_relation_size('{table}') / 8192")

    assert pages > 4_000
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < pages / 10


@pytest.mark.parametrize("name", ["t_{0}", "T {0}"])
def test_purge_goes_on_where_the_batch_before_had_enough(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every outcome that is forgotten goes, wherever in the table it is, and each time somebody purges."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGES_AT_ONCE", 2)
    with postgresql.reopened(name.format(uuid4().hex)) as store:
        store.provision()
        for _ in range(2):
            kept = [replace(a_record(), status=Status.UNKNOWN) for _ in range(30)]
            for each in kept:
                _operations(store, 3)
                store.swap(each, None)

            batches = list(iter(lambda: store.purge(7), 0))

            assert sum(batches) == 90
            assert set(batches[:-1]) == {7}
            assert {each.key for each in store.scan()} == {each.key for each in kept}
            _operations(store, 1)
            assert store.purge(1) == 1
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

    deletions = [each for each in statements if "DELETE" in each]
    assert pages > 10
    assert len(deletions) <= pages + 10


def test_purge_comes_around(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten since, in a page that it has left behind, is found as well."""
    monkeypatch.setattr("celery_idempotent.stores.sql.statements._PAGES_AT_ONCE", 1)
    with postgresql.store() as store:
        _operations(store, 20)
        postgresql.do(f"UPDATE {store.table.name} SET expires_at = {2**40}")
        _operations(store, 60)
        assert store.purge(50) == 50

        postgresql.do(f"UPDATE {store.table.name} SET expires_at = 1")

        assert sum(iter(lambda: store.purge(50), 0)) == 30


def test_table_in_partitions_is_purged(postgresql: Database) -> None:
    """It has no pages of its own, and is asked as a whole."""
    name = f"t_{uuid4().hex}"
    with postgresql.store() as provisioned:
        postgresql.do(
            f"CREATE TABLE {name} (LIKE {provisioned.table.name} INCLUDING ALL) PARTITION BY HASH (idempotency_key)",
            *(
                f"CREATE TABLE {name}_{n} PARTITION OF {name} FOR VALUES WITH (MODULUS 2, REMAINDER {n})"
                for n in (0, 1)
            ),
        )
    with postgresql.reopened(name) as store:
        _operations(store, 20)
        assert [store.purge(15) for _ in range(3)] == [15, 5, 0]


def test_table_does_not_grow_where_as_much_is_purged_as_comes(postgresql: Database) -> None:
    """PostgreSQL's own vacuum gives the room to what comes next; nobody needs to rewrite the table."""
    with postgresql.store() as store:
        table = store.table.name
        sizes = []
        for _ in range(4):
            _operations(store, 300)
            ((size,),) = _asked(postgresql, f"SELECT pg_relation_size('{table}')")
            sizes.append(size)
            assert sum(islice(iter(lambda: store.purge(100), 0), 3)) == 300
            postgresql.do(f"VACUUM {table}")

    assert max(sizes[1:]) <= sizes[0] * 1.1
