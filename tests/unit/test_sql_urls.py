"""How an SQL store is named: URLs, drivers, engines; what is refused, and that nothing secret is shown."""
# mypy: allow-untyped-decorators

import traceback
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, make_url
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from celery_idempotent import open_store
from celery_idempotent.errors import PolicyError
from celery_idempotent.stores.sql import SQLStore, drivers
from celery_idempotent.stores.sql.schema import OUTBOX, TABLE, metadata, outbox, records

PG = "postgresql+psycopg://app:very-secret@db.example:6432/shop"


def opened(url: str) -> SQLStore:
    store = open_store(url)
    assert isinstance(store, SQLStore)
    return store


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg2"),
        ("postgresql+pg8000://h/d", "postgresql+pg8000"),
        ("mysql://h/d", "mysql+pymysql"),
        ("mysql+pymysql://h/d", "mysql+pymysql"),
        ("mariadb://h/d", "mariadb+pymysql"),
        ("sqlite:////tmp/records.sqlite", "sqlite+pysqlite"),
        ("db+postgresql://h/d", "postgresql+psycopg"),
        ("db+mysql+pymysql://h/d", "mysql+pymysql"),
        ("db+sqlite:///records.sqlite", "sqlite+pysqlite"),
    ],
)
def test_url_opens_by_its_dialect_with_an_installed_driver(url: str, driver: str) -> None:
    """With or without a driver, with or without Celery's prefix; nothing is connected."""
    assert opened(url)._url.drivername == driver


def _installed(*modules: str) -> Any:
    return lambda name: ModuleSpec(name, None) if name in modules else None


def test_url_without_a_driver_takes_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has only psycopg2 or mysqlclient need not say so."""
    monkeypatch.setattr(drivers, "find_spec", _installed("psycopg2", "MySQLdb"))

    assert drivers.connectable(make_url("postgresql://h/d")).drivername == "postgresql+psycopg2"
    assert drivers.connectable(make_url("mariadb://h/d")).drivername == "mariadb+mysqldb"


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("postgresql://h/d", 'pip install "celery-idempotent[sql]" "psycopg[binary]"'),
        ("postgresql+psycopg2://h/d", '"psycopg2-binary"'),
        ("mysql://h/d", '"pymysql"'),
        ("mariadb+mysqldb://h/d", '"mysqlclient"'),
    ],
)
def test_missing_driver_says_what_to_install(url: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the setting is read, not where the first task runs."""
    monkeypatch.setattr(drivers, "find_spec", _installed())

    with pytest.raises(PolicyError) as raised:
        open_store(url)
    assert command in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("db+oracle://app:very-secret@h/d", "not in oracle"),
        ("mssql+pyodbc://app:very-secret@h/d", "no store has this scheme"),
        ("postgres://app:very-secret@h/d", "write postgresql://"),
        ("postgres+psycopg://app:very-secret@h/d", "write postgresql://"),
        ("postgresql+asyncpg://app:very-secret@h/d", r"postgresql\+psycopg"),
        ("mysql+aiomysql://app:very-secret@h/d", r"mysql\+pymysql"),
        ("sqlite+aiosqlite:////tmp/x", r"sqlite\+pysqlite"),
        ("sqlite://", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite:///file:x?mode=memory&uri=true", "memory://"),
        ("sqlite:////tmp/x?tabel=effects", "unknown option for SQLite: tabel"),
        ("postgresql:very-secret", "is not the URL of a database"),
        ("postgresql://app:very-secret@h:port/d", "is not the URL of a database"),
        (f"{PG}?timeout=soon", "timeout='soon': must be a number"),
        (f"{PG}?timeout=0", "timeout=.*0.1 or more"),
        (f"{PG}?timeout=nan", "timeout=.*0.1 or more"),
        (f"{PG}?pool_size=0", "pool_size=.*1 or more"),
        (f"{PG}?table={'t' * 51}", "1 to 50 characters"),
    ],
)
def test_unusable_url_is_refused_without_its_password(url: str, words: str) -> None:
    """Unknown databases and drivers, databases in memory, options that cannot be meant."""
    with pytest.raises(PolicyError, match=words) as raised:
        open_store(url)
    assert "very-secret" not in str(raised.value)
    assert "very-secret" not in str(raised.value.__cause__)


def test_options_of_the_store_are_not_passed_to_the_driver() -> None:
    """They stand in the query of the URL beside the driver's own."""
    store = opened(f"{PG}?table=effects&schema=jobs&timeout=2.5&pool_size=7&sslmode=require")

    assert store.table.fullname == "jobs.effects"
    assert (store._timeout, store._pool_size) == (2.5, 7)
    assert dict(store._url.query) == {"sslmode": "require"}


def test_nothing_secret_is_shown() -> None:
    """Neither the password nor the user, nor what stands in the query."""
    store = opened(f"{PG}?sslpassword=also-secret&table=effects")

    assert repr(store) == "postgresql://db.example:6432/shop?table=effects"


def test_default_table_is_the_one_for_alembic() -> None:
    """The importable tables are the store's, and others do not get into their metadata."""
    assert opened(PG).table is records
    assert opened(PG).outbox is outbox
    assert opened(f"{PG}?table=other").table.metadata is not metadata
    assert opened(f"{PG}?schema=other").table.metadata is not metadata
    assert set(metadata.tables) == {TABLE, OUTBOX}


def test_url_object_is_a_url() -> None:
    """SQLAlchemy's own, as made from parts."""
    url = URL.create("postgresql", "app", "p@ss", "h", 5432, "d")

    assert SQLStore(url)._url == url.set(drivername="postgresql+psycopg")


def test_own_engine_brings_its_own_pool_and_timeouts() -> None:
    """Options that could not have an effect are refused."""
    engine = create_engine("sqlite:////tmp/never-opened.sqlite")

    assert SQLStore(engine, table="effects").table.name == "effects"
    for options in ({"timeout": 1.0}, {"pool_size": 1}):
        with pytest.raises(PolicyError, match="an engine of your own"):
            SQLStore(engine, **options)


def test_option_of_the_wrong_type_is_refused() -> None:
    """A duration as text is a mistake, not a crash later."""
    with pytest.raises(PolicyError, match="timeout='2'"):
        SQLStore(PG, timeout="2")  # type: ignore[arg-type]


def test_what_is_no_usable_engine_is_refused() -> None:
    """Engines for asyncio, of other drivers and of databases in memory, and other objects."""

    class Async:
        dialect = type("Dialect", (), {"is_async": True})

    for engine in (Async(), object(), None):
        with pytest.raises(PolicyError, match="idempotency_store"):
            SQLStore(engine)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="memory://"):
        SQLStore(create_engine("sqlite://"))


@pytest.mark.parametrize("pool", [StaticPool, SingletonThreadPool])
def test_engine_that_lends_a_connection_to_two_is_refused(pool: type[Pool]) -> None:
    """A write of the store would commit what the other has begun."""
    with pytest.raises(PolicyError, match=pool.__name__):
        SQLStore(create_engine("sqlite:///records.sqlite", poolclass=pool))


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        (
            "postgresql+psycopg://h/d",
            {
                "prepare_threshold": None,
                "connect_timeout": 3,
                "tcp_user_timeout": 2500,
                "keepalives_idle": 3,
                "keepalives_interval": 1,
                "application_name": "celery-idempotent",
                "options": r"-c statement_timeout=2500 -c default_transaction_isolation=read\ committed",
            },
        ),
        (
            "postgresql+psycopg2://h/d?application_name=shop&connect_timeout=1&options=-csearch_path%3Djobs",
            {
                "tcp_user_timeout": 2500,
                "keepalives_idle": 3,
                "keepalives_interval": 1,
                "options": r"-c statement_timeout=2500 -c default_transaction_isolation=read\ committed "
                "-csearch_path=jobs",
            },
        ),
        (
            "postgresql+pg8000://h/d",
            {
                "timeout": 3.5,
                "application_name": "celery-idempotent",
                "startup_params": {
                    "options": r"-c statement_timeout=2500 -c default_transaction_isolation=read\ committed"
                },
            },
        ),
        (
            "mysql+pymysql://h/d?read_timeout=9",
            {"charset": "utf8mb4", "connect_timeout": 3, "write_timeout": 4},
        ),
        ("sqlite+pysqlite:///f", {"timeout": 2.5}),
    ],
)
def test_timeouts_reach_the_driver_and_the_query_counts_more(url: str, settings: dict[str, Any]) -> None:
    """What a driver is told besides its URL; a setting of the user's is not touched, options are added to."""
    parsed = make_url(url)
    dialect, driver = parsed.drivername.split("+")

    assert drivers._DRIVERS[dialect][driver].settings(parsed.query, 2.5) == settings


def test_traceback_of_a_refused_url_has_no_password() -> None:
    """SQLAlchemy's own error is its cause, and people paste tracebacks."""
    try:
        open_store("postgresql://app:very-secret@h:port/d")
    except PolicyError as error:
        shown = "".join(traceback.format_exception(error))
    assert "very-secret" not in shown.replace('open_store("postgresql://app:very-secret@h:port/d")', "")
