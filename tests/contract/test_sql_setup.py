"""Tables, permissions, limits and settings: what is created, what is refused, and what people are told to do."""

import re
import sqlite3
import traceback
import warnings
from collections.abc import Iterator
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
from sqlalchemy.exc import IntegrityError

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.schema import OUTBOX, TABLE, ddl, metadata, outbox_table, records_table
from celery_idempotent.testing.contract import a_claim, a_record, a_rival
from celery_idempotent.testing.contract.parallel import in_children, race
from tests.support.documents import DOCS
from tests.support.documents import table as documented
from tests.support.operator import operate, refused
from tests.support.sql_databases import Database
from tests.support.waiting import wait_until


def test_missing_table_names_the_command(driven: Database) -> None:
    """Whatever is asked first, through whichever driver."""
    with driven.reopened("t_missing") as store:
        for ask in (
            store.verify,
            lambda: store.swap(a_record(), None),
            lambda: store.get("key"),
            lambda: [*store.scan()],
        ):
            with pytest.raises(StoreMisconfigured, match="idempotency provision"):
                ask()


def test_table_with_other_columns_is_refused(driven: Database) -> None:
    """By the check before a worker starts, by a claim, and by provisioning, which does not touch it."""
    name = f"t_{uuid4().hex}"
    driven.do(f"CREATE TABLE {name} (idempotency_key VARCHAR(99) PRIMARY KEY, status VARCHAR(16), expires_at BIGINT)")
    with driven.reopened(name) as store:
        for ask in (store.verify, partial(store.swap, a_record(), None), store.provision):
            with pytest.raises(StoreMisconfigured, match="idempotency ddl"):
                ask()


_FOLDED = (
    "MODIFY idempotency_key VARCHAR(700) NOT NULL",
    "CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
)
_NOCASE = ddl("sqlite").split(";")[0].replace(TABLE, "{0}").replace("key TEXT", "key TEXT COLLATE NOCASE")
_NO_KEY = ("ALTER TABLE {0} RENAME TO {0}_old", "CREATE TABLE {0} AS SELECT * FROM {0}_old")


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        *((place, _NO_KEY) for place in ("postgresql", "mysql", "sqlite")),  # two claims of one key would both win
        ("mysql", [f"ALTER TABLE {{0}} {each}" for each in _FOLDED]),  # two operations would be taken for one
        ("sqlite", ["DROP TABLE {0}", _NOCASE]),
        # A column of somebody's own needs a default, or no claim can be written.
        *((place, ["ALTER TABLE {0} ADD COLUMN mine INTEGER NOT NULL"]) for place in ("postgresql", "mysql")),
    ],
)
def test_table_that_cannot_keep_records_apart_is_refused(
    place: str, changes: list[str], request: pytest.FixtureRequest
) -> None:
    """By the check before a worker starts."""
    database: Database = request.getfixturevalue(place)
    with database.store() as store:
        store.verify()
        database.do(*(each.format(store.table.name) for each in changes))
        with pytest.raises(StoreMisconfigured, match="idempotency ddl"):
            store.verify()
        if "mine" in changes[0]:
            database.do(f"ALTER TABLE {store.table.name} ALTER mine SET DEFAULT 0")
            store.verify()


def test_provisioning_of_sqlite_waits_for_a_writer_and_not_for_a_permission(sqlite: Database) -> None:
    """SQLite itself refuses at once to change the mode of a file that is being written."""
    path = make_url(sqlite.url).database
    with closing(sqlite3.connect(str(path), isolation_level=None)) as writer:
        writer.execute("CREATE TABLE users (name TEXT)")
        readonly = sqlite.reopened(TABLE, timeout=600, url=f"sqlite:///file:{path}?mode=ro&uri=true")
        with readonly as store, pytest.raises(StoreMisconfigured, match="readonly"):
            store.provision()
        writer.execute("BEGIN IMMEDIATE")
        with sqlite.reopened(TABLE, timeout=0.2) as impatient, pytest.raises(StoreUnavailable, match="locked"):
            impatient.provision()
        with ThreadPoolExecutor(1) as thread, sqlite.reopened(TABLE, timeout=60) as store:
            provisioning = thread.submit(store.provision)
            wait([provisioning], timeout=0.3)
            writer.execute("COMMIT")
            provisioning.result()


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
    makers = {records_table: name, outbox_table: f"{name}_outbox"}
    tables = [make(each, metadata=sqlalchemy.MetaData()) for make, each in makers.items()]
    database.do(*ddl(database.dialect, *tables).strip().rstrip(";").split(";\n"))
    with database.reopened(name) as by_hand, database.store() as provisioned:
        by_hand.verify()
        assert _reflected(by_hand) == _reflected(provisioned)
        by_hand.provision()


def test_several_processes_provision_at_once(database: Database) -> None:
    """Every one of them succeeds, and what they made is whole; so does one that finds an index missing."""
    name = f"t_{uuid4().hex}"
    with database.reopened(name) as store, database.store() as whole, ExitStack() as opened:
        race([opened.enter_context(database.reopened(name)).provision for _ in range(4)])
        in_children([store.provision] * 2)
        assert _reflected(store) == _reflected(whole)
        for index in (f"{name}_label", f"{name}_status"):
            database.do(f"DROP INDEX {index}" + (f" ON {name}" if database.dialect == "mysql" else ""))
        assert f"no index {name}_label, {name}_status," in str(_warnings_of(store))
        race([opened.enter_context(database.reopened(name)).provision for _ in range(3)])
        assert _reflected(store) == _reflected(whole)
        assert not _warnings_of(store)


def test_index_of_a_table_in_use_keeps_no_writer_waiting(postgresql: Database) -> None:
    """Not behind one whose transaction is open, either; and what was cut off is made again."""
    with (
        postgresql.reopened("100%") as store,
        ThreadPoolExecutor() as threads,
        postgresql.administrator() as connection,
    ):
        store.provision()
        table, index = '"100%"', '"100%_label"'

        def asked(question: str) -> list[Any]:
            return [tuple(each) for each in connection.execute(text(question))]

        for _ in range(2):
            store.swap(a_record(), None)
        postgresql.do(f"DROP INDEX {index}")
        with pytest.raises(IntegrityError):
            postgresql.do(f"CREATE UNIQUE INDEX CONCURRENTLY {index} ON {table} (status)")
        assert "no index 100%_label," in str(_warnings_of(store))
        with postgresql.administrator() as other:
            other.execute(text("BEGIN"))
            other.execute(text(f"UPDATE {table} SET worker = 'another'"))
            provisioned = threads.submit(store.provision)
            making = f"FROM pg_stat_activity WHERE query LIKE '%INDEX CONCURRENTLY%{index}%'"
            wait_until(lambda: asked(f"SELECT pid {making} AND wait_event_type = 'Lock'"), "no index is being made")
            assert store.swap(record := a_record(), None) == record
            other.execute(text("COMMIT"))
        provisioned.result()
        made = f"SELECT indisvalid, indisunique FROM pg_index WHERE indexrelid = '{index}'::regclass"
        assert asked(made) == [(True, False)]


@pytest.mark.parametrize("is_there", [True, False])
def test_index_that_is_finished_or_dropped_meanwhile_is_let_be(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """By another that provisions in the same moment: of a question that it seems cut off to, once or for good."""
    with postgresql.store() as store:
        postgresql.do("CREATE SEQUENCE asked")
        once = "AND nextval('asked') % 2 = 1" if is_there else ""
        monkeypatch.setattr("celery_idempotent.stores.sql.store._CUT_OFF", text(f"SELECT 1 WHERE :name <> '' {once}"))
        made = f"SELECT oid FROM pg_class WHERE relname = '{store.table.name}_label'"
        with postgresql.administrator() as connection:
            before = connection.execute(text(made)).scalar_one()
            if not is_there:
                postgresql.do(f"DROP INDEX {store.table.name}_label")
            store.provision()
            assert (connection.execute(text(made)).scalar_one() == before) is is_there
        postgresql.do("DROP SEQUENCE asked")


def _reflected(store: SQLStore) -> Any:
    with store._lent("test", store._pool().connect) as connection:
        found = inspect(connection)
        columns = [found.get_columns(each.name) for each in (store.table, store.outbox)]
        indexes = sorted(str(each["column_names"]) for each in found.get_indexes(store.table.name))
    return indexes, [[(each["name"], repr(each["type"]), each["nullable"]) for each in table] for table in columns]


def test_schema_is_where_the_table_is(served: Database) -> None:
    """A schema of its own must be there; then nothing of ours is anywhere else, nor is what stands there ours."""
    is_postgresql = served.dialect == "postgresql"
    with served.store() as other, served.reopened(name := other.table.name, schema="jobs") as store:
        with pytest.raises(StoreMisconfigured, match="schema"):
            store.provision()
        served.do("CREATE SCHEMA jobs")
        store.provision()
        record = a_claim(store)
        assert (list(other.scan()), list(store.scan())) == ([], [record])
        served.do(f"DROP INDEX jobs.{name}_label" if is_postgresql else f"DROP INDEX {name}_label ON jobs.{name}")
        assert f"no index {name}_label," in str(_warnings_of(store))
    served.do("DROP SCHEMA jobs" + " CASCADE" * is_postgresql)


def test_alembic_finds_nothing_to_change(database: Database) -> None:
    """Autogenerate against the importable metadata is empty once the table was provisioned, and not before."""
    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_name": lambda name, kind, parents: kind != "table" or name in {TABLE, OUTBOX},
    }

    def differences() -> list[str]:
        with database.engine() as engine, engine.connect() as connection:
            context = MigrationContext.configure(connection, opts=options)
            return sorted(each[0] for each in compare_metadata(context, metadata))

    database.do(f"DROP TABLE IF EXISTS {TABLE}", f"DROP TABLE IF EXISTS {OUTBOX}")
    assert differences() == ["add_index", "add_index", "add_table", "add_table"]
    with database.reopened(TABLE) as store:
        store.provision()
    assert differences() == []
    database.do(f"DROP TABLE {TABLE}", f"DROP TABLE {OUTBOX}")


_ALL = ["SELECT", "INSERT", "UPDATE", "DELETE"]


@contextmanager
def _allowed(database: Database, on_records: list[str], *on_outbox: str) -> Iterator[tuple[SQLStore, SQLStore]]:
    """A store as a user with nothing but these rights has it, and as we have it."""
    url, is_postgresql = make_url(database.url).set(username="clerk"), database.dialect == "postgresql"
    user = "clerk" if is_postgresql else "clerk@'127.0.0.1'"
    database.do("CREATE ROLE clerk LOGIN" if is_postgresql else f"CREATE USER {user}")
    try:
        with database.store() as ours:
            for table, granted in ((ours.table, on_records), (ours.outbox, on_outbox)):
                database.do(*(f"GRANT {each} ON {table.name} TO {user}" for each in granted))
            with database.reopened(ours.table.name, url=str(url)) as theirs:
                yield theirs, ours
    finally:
        database.do(*(["DROP OWNED BY clerk", "DROP ROLE clerk"] if is_postgresql else [f"DROP USER {user}"]))


def test_worker_needs_the_documented_rights_and_no_more(served: Database) -> None:
    """SELECT, INSERT and UPDATE for the check, claims and ends; DELETE for whoever purges and deletes."""
    record = replace(a_record(), status=Status.COMPLETED, expires_at=1)
    with _allowed(served, _ALL[:3]) as (store, _):
        store.verify()
        second = replace(record, revision=new_nonce())
        swaps = [(record, None), (a_rival(record), None), (second, record.revision)]
        assert [store.swap(*each) for each in swaps] == [record, record, second]
        for ask in (partial(store.delete, record.key, second.revision), partial(store.purge, 1)):
            with pytest.raises(StoreMisconfigured, match="also DELETE"):
                ask()
    for missing in _ALL[:3]:  # before a worker starts, not at its first task
        less = [each for each in _ALL[:3] if each != missing]
        with _allowed(served, less) as (store, _), pytest.raises(StoreMisconfigured, match="SELECT, INSERT and UPDATE"):
            store.verify()


def test_operator_needs_the_documented_rights_and_no_more(served: Database) -> None:
    """For every command: what the page says of it is enough, and less is not."""
    page = {row["who"]: row for row in documented(DOCS / "how-to/sql.md", "who")}

    def rights(who: str, place: str) -> list[str]:
        return re.findall("`([A-Z]+)`", page[who][place])

    records, outbox = "on the table of records", "on the outbox"
    looks = rights("`check`, `show`, `effect-key`, `list`, `resolve`, `release`, `forget`", records)
    purges = [*looks, *rights("`purge`", records)]
    for on_records, on_outbox, not_allowed in (
        (looks, [], {"purge", "stats", "outbox", "relay"}),
        (purges, rights("`outbox`", outbox), {"relay"}),
        (purges, rights("`relay`", outbox), set()),
    ):
        with _allowed(served, on_records, *on_outbox) as (theirs, ours):
            assert refused(operate(theirs, ours)) == not_allowed


def test_outbox_needs_the_documented_rights_and_no_more(served: Database) -> None:
    """A sender inserts, on PostgreSQL with its sequence; a relay needs all four, one more than for the records."""
    message = OutboxMessage("id-1", "{}", "application/json")
    with _allowed(served, [], "INSERT") as (sending, ours):
        if served.dialect == "postgresql":
            served.do(f"GRANT USAGE ON SEQUENCE {ours.outbox.name}_number_seq TO clerk")
        engine = create_engine(sending._url)
        with engine.begin() as connection:
            sending.enqueue(message, connection)
        engine.dispose()
        assert [each.message for each in ours.take(1, 1)] == [message]
    missing = pytest.raises(StoreMisconfigured, match="outbox takes all four")
    with _allowed(served, [], *_ALL[:3]) as (store, _), missing:
        store.forget([1])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"username": "clerk", "password": "very-secret"}, "refuses this user"),
        ({"database": "nothing"}, "database or schema does not exist"),
        ({"query": {"tabel": "effects"}}, "option in the query.*tabel"),
    ],
)
def test_wrong_url_is_nobodys_outage(driven: Database, wrong: dict[str, Any], told: str) -> None:
    """It will not get better by waiting; the password itself is not shown."""
    if driven.dialect == "sqlite":
        wrong, told = {"database": "/no/such/folder/x"}, "cannot be used as a database"
    url = make_url(driven.url).set(**wrong).render_as_string(hide_password=False)
    with driven.reopened("t", url=url) as store, pytest.raises(StoreMisconfigured, match=told) as raised:
        store.verify()
    assert "very-secret" not in "".join(traceback.format_exception(raised.value))


@contextmanager
def _set(mysql: Database, variable: str, value: object) -> Iterator[None]:
    mysql.do(f"SET GLOBAL {variable} = {value}")
    try:
        yield
    finally:
        mysql.do(f"SET GLOBAL {variable} = DEFAULT")


def test_server_that_only_reads_is_an_outage_for_tasks_and_an_error_at_start(served: Database) -> None:
    """After a fail-over the next connection finds the new primary, so a claim is postponed; a worker does not start."""
    with ExitStack() as stack:
        store, ours = stack.enter_context(_allowed(served, _ALL[:3]))
        if served.dialect == "mysql":
            stack.enter_context(_set(served, "read_only", 1))
        else:
            url = f"{served.url}?options=-c%20default_transaction_read_only%3Don"
            store = stack.enter_context(served.reopened(ours.table.name, url=url))
        assert store.get("nothing") is None
        with store._connected("test") as connection:
            used = store._of_driver(connection)
        with pytest.raises(StoreUnavailable, match="only reads") as raised:
            store.swap(a_record(), None)
        assert type(raised.value) is StoreUnavailable
        with store._connected("test") as connection:
            assert store._of_driver(connection) is not used
        with pytest.raises(StoreMisconfigured, match="name the primary"):
            store.verify()


def test_file_that_cannot_be_written_or_is_no_database_is_told(sqlite: Database, tmp_path: Path) -> None:
    """SQLite's database is a file; nothing is written over somebody's notes."""
    with sqlite.store() as provisioned:
        provisioned.close()
        url = f"sqlite:///file:{make_url(sqlite.url).database}?mode=ro&uri=true"
        with sqlite.reopened(provisioned.table.name, url=url) as store:
            assert list(store.scan()) == []
            with pytest.raises(StoreMisconfigured, match="permission"):
                store.verify()
    notes, text = tmp_path / "notes.txt", "not a database, but somebody's notes " * 100
    notes.write_text(text)
    with sqlite.reopened("t", url=f"sqlite:///{notes}") as store, pytest.raises(StoreMisconfigured, match="database"):
        store.provision()
    assert notes.read_text() == text


def _warnings_of(store: SQLStore) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IdempotencyWarning)
        store.verify()
    return [str(each.message) for each in caught]


def test_check_warns_where_a_server_may_forget_what_it_acknowledged(postgresql: Database, mysql: Database) -> None:
    """A crash would lose such commits; MySQL writes and flushes its log at every commit with 1 alone."""
    url = f"{postgresql.url}?options=-c%20synchronous_commit=off"
    with postgresql.store() as store, postgresql.reopened(store.table.name, url=url) as careless:
        assert _warnings_of(store) == []
        assert "synchronous_commit is off" in _warnings_of(careless)[0]
    for value in (0, 1, 2):
        with mysql.store() as store, _set(mysql, "innodb_flush_log_at_trx_commit", value):
            assert ("innodb_flush_log_at_trx_commit" in str(_warnings_of(store))) is (value != 1)


def test_session_is_set_up_as_documented(database: Database) -> None:
    """Isolation, timeouts, strictness and durability do not depend on the server's defaults."""
    strict = "FIND_IN_SET('STRICT_ALL_TABLES', @@sql_mode) > 0"
    mysql = f"SELECT @@tx_isolation, @@innodb_lock_wait_timeout, @@lock_wait_timeout, @@autocommit, {strict}"
    settings: dict[str, dict[str, tuple[Any, ...]]] = {
        "postgresql": {"SHOW transaction_isolation": ("read committed",), "SHOW statement_timeout": ("2s",)},
        "mysql": {mysql: ("READ-COMMITTED", 2, 2, 1, 1)},
        "sqlite": {"PRAGMA synchronous": (3,), "PRAGMA journal_mode": ("wal",), "PRAGMA busy_timeout": (2000,)},
    }
    with database.store(timeout=2.0) as store, store._lent("test", store._pool().connect) as connection:
        for question, answer in settings[database.dialect].items():
            assert connection.execute(text(question)).one() == answer


def test_mysql_that_begins_a_transaction_where_one_ends_is_told_not_to(mysql: Database) -> None:
    """The check ends one; a claim on the same connection would count as won, and be gone with the connection."""
    with mysql.store() as other, _set(mysql, "completion_type", "'CHAIN'"), mysql.reopened(other.table.name) as store:
        store.verify()
        record = a_claim(store)
        assert other.get(record.key) == record


@pytest.mark.parametrize("large", ['"' * 600_000, b"\0" * 600_000])
def test_record_over_the_largest_packet_alone_is_refused(mysql: Database, large: str | bytes) -> None:
    """MySQL hangs up on a larger statement, which would look like an outage that never ends; so does MariaDB."""
    of_users = replace(mysql, url=mysql.url.replace("mysql+", "mariadb+"))
    with _set(mysql, "max_allowed_packet", 1024 * 1024), mysql.store() as store, of_users.engine() as engine:
        claimed = a_claim(store)
        fits = replace(claimed, revision=new_nonce(), result=large[:200_000], content_type="x/y")
        assert store.swap(fits, claimed.revision) == fits == store.get(fits.key)
        done = replace(fits, revision=new_nonce(), result=large)
        with pytest.raises(RecordTooLarge, match="max_allowed_packet"):
            store.swap(done, fits.revision)
        with engine.connect() as connection, pytest.raises(RecordTooLarge):  # asked for there as well
            SQLStore(engine, table=store.table.name).swap_on(connection, done, fits.revision)
        assert store.get(claimed.key) == fits


def test_value_over_a_limit_of_the_database_is_too_large(database: Database) -> None:
    """A key for an index, or anything for SQLite: certainly not written, and the store can be used as before."""
    with database.store() as provisioned, database.engine() as engine:
        store, large = provisioned, replace(a_record(), key="".join(uuid4().hex for _ in range(300)))
        if database.dialect == "sqlite":
            event.listen(engine, "connect", lambda link, _: link.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000))
            store, large = SQLStore(engine, table=provisioned.table.name), replace(a_record(), result="x" * 200_000)
        with pytest.raises(RecordTooLarge):
            store.swap(large, None)
        assert [a_claim(store)] == list(store.scan())


def test_traceback_of_a_failure_shows_nothing_that_was_stored(database: Database) -> None:
    """People send tracebacks to error trackers; results and arguments have no business there."""
    record = replace(a_record(), result="customer Ada, card 4242", error="card 4242", content_type="text/plain")
    with database.store() as store:
        database.do(f"ALTER TABLE {store.table.name} RENAME TO {store.table.name}_away")
        with pytest.raises(StoreMisconfigured) as raised:
            store.swap(record, None)
    assert "4242" not in "".join(traceback.format_exception(raised.value))
