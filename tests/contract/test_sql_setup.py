"""Tables, permissions, limits and settings: what is created, what is refused, and what people are told to do."""
# mypy: allow-untyped-decorators

import re
import sqlite3
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, event, inspect, make_url, text

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.schema import OUTBOX, TABLE, ddl, metadata, outbox_table, records_table
from celery_idempotent.testing.contract import a_record, a_rival
from celery_idempotent.testing.contract.parallel import in_children, race
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from tests.support.documents import DOCS
from tests.support.documents import table as documented
from tests.support.operator import operate, refused
from tests.support.sql_databases import Database


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
    """A database with users."""
    found: Database = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["psycopg", "psycopg2", "pg8000", "pymysql", "pysqlite"])
def driven(request: pytest.FixtureRequest) -> Database:
    """Any, through any driver."""
    place = {"pymysql": "mysql", "pysqlite": "sqlite"}.get(request.param, "postgresql")
    found: Database = request.getfixturevalue(place)
    return replace(found, url=found.url.replace("psycopg", request.param))


def _questions(store: SQLStore) -> list[Callable[[], object]]:
    """Everything that a worker or an operator asks."""
    return [
        store.verify,
        lambda: store.swap(a_record(), None),
        lambda: store.swap(a_record(), "revision"),
        lambda: store.get("key"),
        lambda: list(store.scan()),
        lambda: store.delete("key", "revision"),
        lambda: store.purge(1),
    ]


# -- tables


def test_missing_table_names_the_command(driven: Database) -> None:
    """Whatever is asked first, through whichever driver."""
    with driven.reopened("t_missing") as store:
        for ask in _questions(store):
            with pytest.raises(StoreMisconfigured, match="idempotency provision") as raised:
                ask()
            assert isinstance(raised.value.__cause__, Exception)


def test_table_with_other_columns_is_refused(driven: Database) -> None:
    """By the check before a worker starts, by a claim, and by provisioning, which does not touch it."""
    name = f"t_{uuid4().hex}"
    driven.do(f"CREATE TABLE {name} (idempotency_key VARCHAR(99) PRIMARY KEY, status VARCHAR(16), expires_at BIGINT)")
    with driven.reopened(name) as store:
        for ask in (store.verify, partial(store.swap, a_record(), None), store.provision):
            with pytest.raises(StoreMisconfigured, match="idempotency ddl"):
                ask()


def _refused(database: Database, table: str) -> None:
    with database.reopened(table) as store, pytest.raises(StoreMisconfigured, match="idempotency ddl"):
        store.verify()


def test_table_without_a_primary_key_is_refused(database: Database) -> None:
    """Two claims of one key would both win."""
    with database.store() as provisioned:
        old, new = provisioned.table.name, f"t_{uuid4().hex}"
        database.do(f"CREATE TABLE {new} AS SELECT * FROM {old}")
        _refused(database, new)


def test_table_that_folds_case_is_refused(mysql: Database, sqlite: Database) -> None:
    """Two operations would be taken for one."""
    with mysql.store() as provisioned:
        mysql.do(f"ALTER TABLE {provisioned.table.name} MODIFY idempotency_key VARCHAR(700) NOT NULL")
        mysql.do(f"ALTER TABLE {provisioned.table.name} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
        _refused(mysql, provisioned.table.name)
    by_hand = ddl("sqlite").split(";")[0].replace("idempotency_key TEXT", "idempotency_key TEXT COLLATE NOCASE")
    sqlite.do(by_hand)
    _refused(sqlite, TABLE)


def test_table_that_wants_more_than_a_record_has_is_refused(served: Database) -> None:
    """A column of somebody's own needs a default, or no claim can be written."""
    with served.store() as provisioned:
        served.do(f"ALTER TABLE {provisioned.table.name} ADD COLUMN mine INTEGER NOT NULL")
        _refused(served, provisioned.table.name)
        served.do(f"ALTER TABLE {provisioned.table.name} ALTER mine SET DEFAULT 0")
        provisioned.verify()


def test_several_processes_provision_at_once(database: Database) -> None:
    """Every one of them succeeds, and what they made is whole."""
    for _ in range(5):
        name = f"t_{uuid4().hex}"
        with ExitStack() as opened:
            stores = [opened.enter_context(database.reopened(name)) for _ in range(4)]
            race([each.provision for each in stores])
        with database.reopened(name) as store:
            assert in_children([partial(_provisioned, store)] * 2) == [True] * 2
            assert _indexes(store) == _indexes_of(name)


def test_provisioning_of_sqlite_waits_for_a_writer(sqlite: Database) -> None:
    """SQLite itself refuses at once to change the mode of a file that is being written."""
    with closing(sqlite3.connect(str(make_url(sqlite.url).database), isolation_level=None)) as writer:
        writer.execute("CREATE TABLE users (name TEXT)")
        writer.execute("BEGIN IMMEDIATE")
        with sqlite.reopened(TABLE, timeout=0.2) as impatient, pytest.raises(StoreUnavailable, match="locked"):
            impatient.provision()

        with ThreadPoolExecutor(1) as thread, sqlite.reopened(TABLE, timeout=60) as store:
            provisioning = thread.submit(store.provision)
            wait([provisioning], timeout=0.3)
            writer.execute("COMMIT")
            provisioning.result()


def test_provisioning_of_a_file_that_cannot_be_written_does_not_wait(sqlite: Database) -> None:
    """Time would not mend that."""
    path = Path(str(make_url(sqlite.url).database))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE users (name TEXT)")
    readonly = sqlite.reopened(TABLE, timeout=600, url=f"sqlite:///file:{path}?mode=ro&uri=true")
    with readonly as store, pytest.raises(StoreMisconfigured, match="readonly"):
        store.provision()


def _provisioned(store: SQLStore) -> bool:
    store.provision()
    return store.swap(record := a_record(), None) == record


def _indexes(store: SQLStore) -> dict[str, list[str]]:
    with store._connected_by_sqlalchemy("test") as connection:
        found = inspect(connection).get_indexes(store.table.name)
    return {str(each["name"]): [str(name) for name in each["column_names"]] for each in found}


def _indexes_of(table: str) -> dict[str, list[str]]:
    return {f"{table}_label": ["label"], f"{table}_status": ["status", "expires_at"]}


def test_provisioning_that_was_interrupted_is_completed(database: Database) -> None:
    """The table is there and its index is not: provisioning again makes it."""
    with database.store() as store:
        name = store.table.name
        for index in _indexes_of(name):
            database.do(f"DROP INDEX {index}" + (f" ON {name}" if database.dialect == "mysql" else ""))
        assert _indexes(store) == {}

        store.provision()

        assert _indexes(store) == _indexes_of(name)


def test_provisioning_that_fails_leaves_no_transaction_open(tmp_path: Path) -> None:
    """Also on a connection that your engine does not close: on SQLite it would keep everybody else from writing."""

    class Kept(sqlite3.Connection):
        def close(self) -> None:
            """Not before the process ends."""

    kept = sqlite3.connect(tmp_path / "shop.sqlite", factory=Kept, check_same_thread=False)
    kept.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_CREATE_TABLE else 0)
    engine = create_engine(f"sqlite:///{tmp_path}/shop.sqlite", creator=lambda: kept)

    with pytest.raises(StoreUnavailable):
        SQLStore(engine).provision()

    assert not kept.in_transaction
    engine.dispose()
    super(Kept, kept).close()


def test_printed_ddl_creates_the_same_tables(database: Database) -> None:
    """What a DBA executes by hand is what ``provision`` would have made; provisioning finds nothing to do."""
    name = f"t_{uuid4().hex}"
    printed = ddl(
        database.dialect,
        records_table(name, metadata=sqlalchemy.MetaData()),
        outbox_table(f"{name}_outbox", metadata=sqlalchemy.MetaData()),
    )
    database.do(*printed.strip().rstrip(";").split(";\n"))
    with database.reopened(name) as by_hand, database.store() as provisioned:
        by_hand.verify()
        assert _reflected(by_hand) == _reflected(provisioned)
        by_hand.provision()


def _reflected(store: SQLStore) -> Any:
    with store._connected_by_sqlalchemy("test") as connection:
        columns = [inspect(connection).get_columns(each.name) for each in (store.table, store.outbox)]
    return [[(each["name"], repr(each["type"]), each["nullable"]) for each in table] for table in columns]


def test_schema_is_where_the_table_is(postgresql: Database) -> None:
    """A schema of its own must be there; then nothing of ours is anywhere else."""
    with postgresql.reopened("effects", schema="jobs") as store:
        with pytest.raises(StoreMisconfigured, match="schema"):
            store.provision()
        postgresql.do("CREATE SCHEMA jobs")
        store.provision()
        record = a_record()
        assert store.swap(record, None) == record
        with postgresql.administrator() as look:
            assert look.execute(text("SELECT idempotency_key FROM jobs.effects")).scalar_one() == record.key
    postgresql.do("DROP SCHEMA jobs CASCADE")


def test_alembic_finds_nothing_to_change(database: Database) -> None:
    """Autogenerate against the importable metadata is empty once the table was provisioned, and not before."""
    database.do(f"DROP TABLE IF EXISTS {TABLE}", f"DROP TABLE IF EXISTS {OUTBOX}")
    assert sorted(_differences(database)) == ["add_index", "add_index", "add_table", "add_table"]
    with database.reopened(TABLE) as store:
        store.provision()
    assert _differences(database) == []
    database.do(f"DROP TABLE {TABLE}", f"DROP TABLE {OUTBOX}")


def _differences(database: Database) -> list[str]:
    with database.engine() as engine, engine.connect() as connection:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": lambda name, kind, parents: kind != "table" or name in {TABLE, OUTBOX},
        }
        context = MigrationContext.configure(connection, opts=options)
        return [each[0] for each in compare_metadata(context, metadata)]


# -- permissions, credentials, servers that only read


@contextmanager
def _user(database: Database, table: str, *rights: str) -> Iterator[str]:
    """The URL of a user with nothing but some rights on a table."""
    granted = ", ".join(rights)
    if database.dialect == "postgresql":
        database.do("CREATE ROLE clerk LOGIN", f"GRANT {granted} ON {table} TO clerk")
        url, end = make_url(database.url).set(username="clerk"), ["DROP OWNED BY clerk", "DROP ROLE clerk"]
    else:
        database.do(
            "CREATE USER clerk@'127.0.0.1' IDENTIFIED BY 'pass'", f"GRANT {granted} ON {table} TO clerk@'127.0.0.1'"
        )
        url = make_url(database.url).set(username="clerk", password="pass")
        end = ["DROP USER clerk@'127.0.0.1'"]
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        database.do(*end)


def test_worker_needs_the_documented_rights_and_no_more(served: Database) -> None:
    """SELECT, INSERT and UPDATE for the check, claims and ends; DELETE for whoever purges and deletes."""
    with served.store() as provisioned:
        name = provisioned.table.name
        with _user(served, name, "SELECT", "INSERT", "UPDATE") as url, served.reopened(name, url=url) as store:
            store.verify()
            record = replace(a_record(), status=Status.COMPLETED, expires_at=1)
            assert store.swap(record, None) == record
            assert store.swap(a_rival(record), None) == record
            second = replace(record, revision=new_nonce())
            assert store.swap(second, record.revision) == second
            assert list(store.scan()) == [second]
            for ask in (partial(store.delete, record.key, second.revision), partial(store.purge, 1)):
                with pytest.raises(StoreMisconfigured, match="also DELETE"):
                    ask()
        rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
        with _user(served, name, *rights) as url, served.reopened(name, url=url) as store:
            assert store.purge(1) == 1


RIGHTS = {row["who"]: row for row in documented(DOCS / "how-to/sql.md", "who")}


def _rights(who: str, place: str) -> list[str]:
    return re.findall("`([A-Z]+)`", RIGHTS[who][place])


def test_operator_needs_the_documented_rights_and_no_more(served: Database) -> None:
    """For every command: what the page says of it is enough, and less is not."""
    looks, purges = "`check`, `show`, `effect-key`, `list`, `resolve`, `release`, `forget`", "`purge`"
    records, outbox = "on the table of records", "on the outbox"
    cases = [
        (_rights(looks, records), [], {"purge", "stats", "outbox", "relay"}),
        ([*_rights(looks, records), *_rights(purges, records)], _rights("`outbox`", outbox), {"relay"}),
        ([*_rights(looks, records), *_rights(purges, records)], _rights("`relay`", outbox), set()),
    ]
    for on_records, on_outbox, not_allowed in cases:
        with served.store() as ours, _user(served, ours.table.name, *on_records) as url:
            if on_outbox:
                user = "clerk" if served.dialect == "postgresql" else "clerk@'127.0.0.1'"
                served.do(f"GRANT {', '.join(on_outbox)} ON {ours.outbox.name} TO {user}")
            with served.reopened(ours.table.name, url=url) as theirs:
                assert refused(operate(theirs, ours)) == not_allowed


def test_outbox_needs_the_documented_rights_and_no_more(served: Database) -> None:
    """A sender inserts, on PostgreSQL with its sequence; a relay needs all four, one more than for the records."""
    message = OutboxMessage("id-1", "{}", "application/json")
    with served.store() as provisioned:
        table, name = provisioned.table.name, provisioned.outbox.name
        with _user(served, name, "INSERT") as url, served.reopened(table, url=url) as store:
            if served.dialect == "postgresql":
                served.do(f"GRANT USAGE ON SEQUENCE {name}_number_seq TO clerk")
            engine = create_engine(store._url)
            with engine.begin() as connection:
                store.enqueue(message, connection)
            engine.dispose()
        with (
            _user(served, name, "SELECT", "INSERT", "UPDATE", "DELETE") as url,
            served.reopened(table, url=url) as store,
        ):
            store.postpone(store.take(10, 1)[0], 0, "")
            store.give_back(store.take(10, 1))
            (taken,) = store.take(10, 1)
            store.forget([taken.number])
            assert (taken.message, store.waiting(1), store.take(10, 0)) == (message, [], [])
        with (
            _user(served, name, "SELECT", "INSERT", "UPDATE") as url,
            served.reopened(table, url=url) as store,
            pytest.raises(StoreMisconfigured, match="outbox takes all four"),
        ):
            store.forget([1])


@pytest.mark.parametrize("missing", ["SELECT", "INSERT", "UPDATE"])
def test_check_notices_every_missing_right(served: Database, missing: str) -> None:
    """Before a worker starts, not at its first task."""
    rights = {"SELECT", "INSERT", "UPDATE"} - {missing}
    with (
        served.store() as provisioned,
        _user(served, provisioned.table.name, *rights) as url,
        served.reopened(provisioned.table.name, url=url) as store,
        pytest.raises(StoreMisconfigured, match="SELECT, INSERT and UPDATE"),
    ):
        store.verify()


def test_check_writes_nothing_lasting(database: Database) -> None:
    """What it wrote it took back."""
    with database.store() as store:
        store.verify()
        assert list(store.scan()) == []


def test_wrong_password_is_nobodys_outage(mysql: Database) -> None:
    """It will not get better by waiting; the password itself is not shown."""
    with mysql.store() as provisioned, _user(mysql, provisioned.table.name, "SELECT") as url:
        wrong = make_url(url).set(password="very-secret").render_as_string(hide_password=False)
        with (
            mysql.reopened("t", url=wrong) as store,
            pytest.raises(StoreMisconfigured, match="refuses this user") as raised,
        ):
            store.verify()
    assert "very-secret" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_unknown_user_of_postgresql_is_nobodys_outage(postgresql: Database, driver: str) -> None:
    """libpq gives no code for what happens before it is connected, so its words are read."""
    url = make_url(postgresql.url).set(username="nobody", drivername=f"postgresql+{driver}")
    with postgresql.reopened("t", url=str(url)) as store, pytest.raises(StoreMisconfigured, match="refuses this user"):
        store.verify()


def test_missing_database_is_named(driven: Database) -> None:
    """A typing error in the URL is not waited for; a file that cannot be made is no database either."""
    url = make_url(driven.url).set(database="/no/such/folder/x" if driven.dialect == "sqlite" else "nothing")
    words = "database or schema does not exist|cannot be used as a database"
    with driven.reopened("t", url=str(url)) as store, pytest.raises(StoreMisconfigured, match=words):
        store.verify()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000", "pymysql"])
def test_unknown_option_in_the_url_is_named(driver: str, request: pytest.FixtureRequest) -> None:
    """A mistyped ``table`` goes to the driver, which does not know it."""
    place = "mysql" if driver == "pymysql" else "postgresql"
    database: Database = request.getfixturevalue(place)
    url = f"{database.url.replace('psycopg', driver)}?tabel=effects"
    with (
        database.reopened("t", url=url) as store,
        pytest.raises(StoreMisconfigured, match=r"option in the query.*tabel"),
    ):
        store.verify()


@contextmanager
def _read_only(database: Database, store: SQLStore) -> Iterator[str]:
    if database.dialect == "postgresql":
        yield f"{database.url}?options=-c%20default_transaction_read_only%3Don"
        return
    with _user(database, store.table.name, "SELECT", "INSERT", "UPDATE") as url:
        database.do("SET GLOBAL read_only = 1")
        try:
            yield url
        finally:
            database.do("SET GLOBAL read_only = 0")


def test_server_that_only_reads_is_an_outage_for_tasks_and_an_error_at_start(served: Database) -> None:
    """After a fail-over the next connection finds the new primary, so a claim is postponed; a worker does not start."""
    with (
        served.store() as provisioned,
        _read_only(served, provisioned) as url,
        served.reopened(provisioned.table.name, url=url) as store,
    ):
        assert store.get("nothing") is None
        used = _pooled(store)
        with pytest.raises(StoreUnavailable, match="only reads") as raised:
            store.swap(a_record(), None)
        assert not isinstance(raised.value, StoreMisconfigured)
        assert _pooled(store) is not used
        with pytest.raises(StoreMisconfigured, match="name the primary"):
            store.verify()


def _pooled(store: SQLStore) -> object:
    """The connection that the next question goes through."""
    with store._connected("test") as connection:
        return store._of_driver(connection)


def test_file_that_cannot_be_written_is_a_missing_permission(sqlite: Database) -> None:
    """SQLite's database is a file, and its folder."""
    with sqlite.store() as provisioned:
        provisioned.close()
        path = make_url(sqlite.url).database
        url = f"sqlite:///file:{path}?mode=ro&uri=true"
        with sqlite.reopened(provisioned.table.name, url=url) as store:
            assert list(store.scan()) == []
            with pytest.raises(StoreMisconfigured, match="permission"):
                store.verify()


def test_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    """Nothing is written over it."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but somebody's notes " * 100)
    words = "cannot be used as a database"
    with Database(f"sqlite:///{path}").reopened("t") as store, pytest.raises(StoreMisconfigured, match=words):
        store.provision()
    assert path.read_text().startswith("not a database")


# -- settings


@pytest.mark.parametrize("setting", ["synchronous_commit=off", None])
def test_check_warns_where_postgresql_may_forget(postgresql: Database, setting: str | None) -> None:
    """``synchronous_commit=off`` loses acknowledged commits when the server crashes."""
    with postgresql.store() as provisioned:
        url = f"{postgresql.url}?options=-c%20{setting}" if setting else postgresql.url
        with postgresql.reopened(provisioned.table.name, url=url) as store:
            _verify_and_expect(store, "synchronous_commit is off" if setting else None)


@pytest.mark.parametrize("value", [0, 1, 2])
def test_check_warns_where_mysql_may_forget(mysql: Database, value: int) -> None:
    """Only 1 writes and flushes the log at every commit."""
    with mysql.store() as store:
        mysql.do(f"SET GLOBAL innodb_flush_log_at_trx_commit = {value}")
        try:
            _verify_and_expect(store, None if value == 1 else f"innodb_flush_log_at_trx_commit is {value}")
        finally:
            mysql.do("SET GLOBAL innodb_flush_log_at_trx_commit = 1")


def _verify_and_expect(store: SQLStore, warning: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.verify()
    assert [each.category for each in caught] == ([IdempotencyWarning] if warning else [])
    if warning:
        assert warning in str(caught[0].message)


def test_session_is_set_up_as_documented(database: Database) -> None:
    """Isolation, timeouts, strictness and durability do not depend on the server's defaults."""
    settings: dict[str, dict[str, str | int]] = {
        "postgresql": {"SHOW transaction_isolation": "read committed", "SHOW statement_timeout": "2s"},
        "mysql": {
            "SELECT @@tx_isolation": "READ-COMMITTED",
            "SELECT @@innodb_lock_wait_timeout": 2,
            "SELECT @@lock_wait_timeout": 2,
            "SELECT @@autocommit": 1,
            "SELECT FIND_IN_SET('STRICT_ALL_TABLES', @@sql_mode) > 0": 1,
        },
        "sqlite": {"PRAGMA synchronous": 3, "PRAGMA journal_mode": "wal", "PRAGMA busy_timeout": 2000},
    }
    questions = settings[database.dialect]
    with database.store(timeout=2.0) as store, store._connected_by_sqlalchemy("test") as connection:
        assert {each: connection.execute(text(each)).scalar_one() for each in questions} == questions


def test_isolation_of_the_server_does_not_matter(postgresql: Database) -> None:
    """With a default of SERIALIZABLE concurrent claims would end in errors, or be sent again and again."""
    with postgresql.store() as provisioned:
        postgresql.do("ALTER DATABASE postgres SET default_transaction_isolation = 'serializable'")
        try:
            with postgresql.reopened(provisioned.table.name) as store:
                with store._connected_by_sqlalchemy("test") as connection:
                    assert connection.execute(text("SHOW transaction_isolation")).scalar_one() == "read committed"
                for _ in range(10):
                    seen = a_record()
                    claims = [a_rival(seen) for _ in range(8)]
                    answers = race([partial(store.swap, each, None) for each in claims])
                    assert len({each.revision for each in answers if each}) == 1
        finally:
            postgresql.do("ALTER DATABASE postgres RESET default_transaction_isolation")


def test_mysql_that_begins_a_transaction_where_one_ends_is_told_not_to(mysql: Database) -> None:
    """The check ends one; a claim on the same connection would count as won, and be gone with the connection."""
    record = a_record()
    with mysql.store() as other:
        mysql.do("SET GLOBAL completion_type = 'CHAIN'")
        try:
            with mysql.reopened(other.table.name) as store:
                store.verify()
                assert store.swap(record, None) == record
                assert other.get(record.key) == record
        finally:
            mysql.do("SET GLOBAL completion_type = DEFAULT")


def test_mysql_that_would_cut_text_to_fit_is_told_not_to(mysql: Database) -> None:
    """Without strict mode a key of 2049 bytes would become another operation's."""
    mysql.do("SET GLOBAL sql_mode = ''")
    try:
        with mysql.store() as store, pytest.raises(RecordTooLarge):
            store.swap(replace(a_record(), key="k" * 2049), None)
    finally:
        mysql.do("SET GLOBAL sql_mode = DEFAULT")


# -- limits


@pytest.mark.parametrize("large", ['"' * 400_000, "é" * 400_000, b"\0" * 400_000, "x" * 2_000_000, b"x" * 2_000_000])
def test_record_over_the_largest_packet_is_refused_and_one_under_it_is_kept(
    mysql: Database, large: str | bytes
) -> None:
    """MySQL hangs up on a larger statement, which would look like an outage that never ends."""
    limit = mysql_limit = 1024 * 1024
    mysql.do(f"SET GLOBAL max_allowed_packet = {mysql_limit}")
    try:
        with mysql.store() as store:
            claimed = a_record()
            store.swap(claimed, None)
            done = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, result=large, content_type="x/y")
            size = len(large.encode() if isinstance(large, str) else large)
            if size * 2 < limit - 10_000:
                assert store.swap(done, claimed.revision) == done
                assert store.get(done.key) == done
            else:
                with pytest.raises(RecordTooLarge, match="max_allowed_packet"):
                    store.swap(done, claimed.revision)
                assert store.get(claimed.key) == claimed
    finally:
        mysql.do("SET GLOBAL max_allowed_packet = DEFAULT")


def test_packet_limit_holds_inside_a_transaction_of_the_caller(mysql: Database) -> None:
    """There, too, the server's limit is asked for before it is met."""
    mysql.do(f"SET GLOBAL max_allowed_packet = {1024 * 1024}")
    try:
        with mysql.store() as store, mysql.engine() as engine, engine.connect() as connection:
            with pytest.raises(RecordTooLarge):
                store.swap_on(connection, replace(a_record(), result="x" * 1_000_000), None)
            record = a_record()
            assert store.swap_on(connection, record, None) == record
    finally:
        mysql.do("SET GLOBAL max_allowed_packet = DEFAULT")


def test_key_over_the_index_limit_is_too_large(served: Database) -> None:
    """Certainly not written, and the store can be used as before."""
    with served.store() as store:
        long = replace(a_record(), key="".join(uuid4().hex for _ in range(300)))
        with pytest.raises(RecordTooLarge):
            store.swap(long, None)
        record = a_record()
        assert store.swap(record, None) == record
        assert list(store.scan()) == [record]


def test_value_over_the_limit_of_sqlite_is_too_large(sqlite: Database) -> None:
    """Certainly not written."""
    import sqlite3

    with sqlite.store() as provisioned:
        engine = create_engine(sqlite.url)
        event.listen(engine, "connect", lambda link, _: link.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000))
        store = SQLStore(engine, table=provisioned.table.name)
        record = a_record()
        with pytest.raises(RecordTooLarge):
            store.swap(replace(record, result="x" * 200_000), None)
        assert store.swap(record, None) == record
        engine.dispose()


# -- what is shown


def test_traceback_of_a_failure_shows_nothing_that_was_stored(database: Database) -> None:
    """People send tracebacks to error trackers; results and arguments have no business there."""
    record = replace(a_record(), result="customer Ada, card 4242", error="card 4242", content_type="text/plain")
    with database.store() as store:
        database.do(f"ALTER TABLE {store.table.name} RENAME TO {store.table.name}_away")
        with pytest.raises(StoreMisconfigured) as raised:
            store.swap(record, None)
    shown = "".join(traceback.format_exception(raised.value))
    assert "4242" not in shown
