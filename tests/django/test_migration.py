"""The migration makes the table of the SQL store, wherever Django keeps its tables; the model is for reading."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, router
from django.db.migrations.recorder import MigrationRecorder
from sqlalchemy import URL, create_engine, inspect

from celery_idempotent import StoreMisconfigured
from celery_idempotent.contrib.django.models import IdempotencyRecord
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.schema import TABLE, ddl
from celery_idempotent.testing.contract import a_record

APP = "celery_idempotent"


def _migrate(alias: str, *target: str) -> None:
    call_command("migrate", APP, *target, database=alias, verbosity=0)


def _url(alias: str) -> URL:
    """The same database for SQLAlchemy."""
    settings = connections.settings[alias]
    if connections[alias].vendor == "sqlite":
        return URL.create("sqlite", database=settings["NAME"])
    driver = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql"}[connections[alias].vendor]
    place = {name.lower(): settings[name] for name in ("HOST", "PORT")}
    return URL.create(driver, username=settings["USER"], database=settings["NAME"], **place)


@pytest.fixture
def sql_store(empty: str) -> Iterator[SQLStore]:
    """A store of SQLAlchemy's on the same database."""
    store = SQLStore(_url(empty))
    yield store
    store.close()


def _layout(alias: str) -> Any:
    """Columns, keys and indexes of the table, as the database describes them."""
    engine = create_engine(_url(alias))
    try:
        found = inspect(engine)
        columns = [{**each, "type": repr(each["type"])} for each in found.get_columns(TABLE)]
        indexes = [
            {**each, "dialect_options": [*map(str, each.get("dialect_options", {}).values())]}
            for each in found.get_indexes(TABLE)
        ]
        return columns, found.get_pk_constraint(TABLE), sorted(map(str, indexes)), found.get_table_options(TABLE)
    finally:
        engine.dispose()


def test_table_is_that_of_the_sql_store(empty: str, sql_store: SQLStore) -> None:
    """Migrated or provisioned: the same columns, types, collations, key and index; it goes back and forth."""
    _migrate(empty)
    DjangoStore(empty).verify()
    migrated = _layout(empty)
    _migrate(empty, "zero")
    assert TABLE not in connections[empty].introspection.table_names()
    sql_store.provision()
    assert migrated == _layout(empty)


def test_both_stores_share_the_table(empty: str, sql_store: SQLStore) -> None:
    """A process without Django works on the same records, and whoever moves to Django keeps his table."""
    ours, theirs = (a_record().but(result=result, content_type="t") for result in ("Überlast", b"\x00\xff"))
    sql_store.provision()
    assert sql_store.swap(theirs, None) == theirs
    _migrate(empty)
    store = DjangoStore(empty)
    assert store.swap(ours, None) == sql_store.get(ours.key) == ours
    assert store.swap(theirs.but(revision="2"), theirs.revision) == sql_store.get(theirs.key)


def test_index_that_is_missing_is_made(empty: str) -> None:
    """A migration that was cut off between table and index, where the database cannot undo it, is completed."""
    _migrate(empty, "0001")
    complete = _layout(empty)
    with connections[empty].cursor() as cursor:
        of_table = f" ON {TABLE}" if connections[empty].vendor == "mysql" else ""
        cursor.execute(f"DROP INDEX {TABLE}_status{of_table}")
    MigrationRecorder(connections[empty]).record_unapplied(APP, "0001_initial")
    assert _layout(empty) != complete

    _migrate(empty)

    assert _layout(empty) == complete


def test_router_decides_where_the_table_is(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that is not for records gets no table, and is not asked to drop one."""
    elsewhere = SimpleNamespace(allow_migrate=lambda db, label, **_: False if (db, label) == ("empty", APP) else None)
    monkeypatch.setattr(router, "routers", [elsewhere])
    _migrate(empty)
    assert TABLE not in connections[empty].introspection.table_names()
    _migrate(empty, "zero")


def test_missing_table_names_the_command(empty: str) -> None:
    """Whatever is asked first: the answer is the command that makes the table."""
    store = DjangoStore(empty)
    for ask in (store.verify, store.provision, partial(store.swap, a_record(), None)):
        with pytest.raises(StoreMisconfigured, match=r"python manage\.py migrate --database empty"):
            ask()


def test_models_have_no_migration_missing() -> None:
    """``makemigrations`` has nothing to add."""
    call_command("makemigrations", APP, check_changes=True, dry_run=True, verbosity=0)


def test_printed_migration_is_the_ddl(empty: str) -> None:
    """``sqlmigrate`` shows what a database administrator wants to read, and the way back, migrated or not."""
    _migrate(empty)

    def printed(**options: Any) -> str:
        call_command("sqlmigrate", APP, "0001", database=empty, stdout=(text := StringIO()), **options)
        return text.getvalue()

    assert ddl(connections[empty].vendor) in printed()
    assert "CANNOT BE WRITTEN AS SQL" not in printed()
    assert f"DROP TABLE {TABLE};" in printed(backwards=True)


def test_tests_without_migrations_have_a_table_that_works(empty: str) -> None:
    """Whoever lets Django create tables from models, as with ``--nomigrations``, can run eager tasks all the same."""
    with connections[empty].schema_editor() as editor:
        editor.create_model(IdempotencyRecord)
    store = DjangoStore(empty)
    records = [replace(a_record(), key=key, status=Status.UNKNOWN) for key in ("k", "K", "k ", "é")]
    assert [store.swap(each, None) for each in records] == records
    assert [store.get(each.key) for each in records] == records


def test_model_reads_what_the_store_wrote_and_writes_nothing(empty: str) -> None:
    """Every column by its name, on MySQL keys of bytes; no way around compare-and-swap leads through the model."""
    _migrate(empty)
    store, rows = DjangoStore(empty), IdempotencyRecord.objects.using(empty)
    records = [
        replace(a_record(), steps={"a": 1}, error="a\x00b", fingerprint=None),
        replace(a_record(), key="é:1", status=Status.COMPLETED, result=b"\x00", content_type="t", expires_at=9),
        replace(a_record(), status=Status.COMPLETED, result="x", content_type="t", takeovers=2),
    ]
    for record in records:
        store.swap(record, None)
    row = rows.get(key="é:1")

    assert [rows.get(key=each.key).record for each in records] == records
    assert {each.key for each in rows.filter(pk__in=[each.key for each in records])} == {each.key for each in records}
    assert rows.get(status="COMPLETED", expires_at=9).key == str(row) == "é:1"
    of_rows = rows.delete, partial(rows.update, status="RELEASED"), partial(rows.create, key="k")
    for write in (row.save, row.delete, *of_rows, partial(rows.bulk_create, [row])):
        with pytest.raises(TypeError, match=r"celery_idempotent\.resolve\(\)"):
            write()
    assert [store.get(each.key) for each in records] == records
