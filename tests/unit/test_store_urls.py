"""How a store is named: URLs, drivers, engines, and schemes of third parties; and that nothing secret is shown."""

import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from celery_idempotent.errors import PolicyError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore, drivers
from celery_idempotent.stores.sql.schema import OUTBOX, TABLE, metadata, outbox, records

FILE = "sqlite:////tmp/never-opened.sqlite"
PG = "postgresql+psycopg://app:very-secret@db.example:6432/shop"


def opened(url: str) -> SQLStore:
    store = open_store(url)
    assert isinstance(store, SQLStore)
    return store


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("postgresql", "postgresql+psycopg"),
        ("mysql", "mysql+pymysql"),
        ("mariadb", "mariadb+pymysql"),
        ("sqlite", "sqlite+pysqlite"),
        *((each, each) for each in ("postgresql+psycopg2", "postgresql+pg8000")),
    ],
)
def test_url_opens_by_its_dialect_with_an_installed_driver(given: str, driver: str) -> None:
    """With or without a driver, with or without Celery's prefix; nothing is connected."""
    for prefix in ("", "db+"):
        assert opened(f"{prefix}{given}://h/tmp/d")._url.drivername == driver


@pytest.mark.parametrize(
    ("url", "installed", "answer"),
    [
        ("postgresql://h/d", ["psycopg2", "MySQLdb"], "postgresql+psycopg2"),
        ("mariadb://h/d", ["psycopg2", "MySQLdb"], "mariadb+mysqldb"),
        ("postgresql://h/d", [], 'pip install "celery-idempotent[sql]" "psycopg[binary]"'),
        ("postgresql+psycopg2://h/d", [], '"psycopg2-binary"'),
        ("mysql://h/d", [], '"pymysql"'),
    ],
)
def test_driver_that_is_there_is_taken_and_one_that_is_missing_is_named(
    url: str, installed: list[str], answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has only psycopg2 or mysqlclient need not say so; where the setting is read, it says what to install."""
    monkeypatch.setattr(drivers, "find_spec", lambda name: ModuleSpec(name, None) if name in installed else None)
    if installed:
        assert drivers.connectable(make_url(url)).drivername == answer
    else:
        with pytest.raises(PolicyError) as raised:
            open_store(url)
        assert answer in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("db+oracle://app:very-secret@h/d", "not in oracle"),
        ("mssql+pyodbc://app:very-secret@h/d", "no store has this scheme"),
        ("postgres://app:very-secret@h/d", "write postgresql://"),
        ("postgresql+asyncpg://app:very-secret@h/d", r"postgresql\+psycopg"),
        *((f"sqlite://{each}", "memory://") for each in ("", "/:memory:", "/file:x?mode=memory&uri=true")),
        ("sqlite:////tmp/x?tabel=effects", "unknown option for SQLite: tabel"),
        ("postgresql://app:very-secret@h:port/d", "is not the URL of a database"),
        (f"{PG}?timeout=soon", "timeout='soon': must be a number, 0.1 or more"),
        *((f"{PG}?timeout={each}", "timeout=.*0.1 or more") for each in ("nan", "inf")),
        (f"{PG}?pool_size=0", "pool_size=.*1 or more"),
        (f"{PG}?table={'t' * 51}", "1 to 50 characters"),
    ],
)
def test_unusable_url_is_refused_without_its_password(url: str, words: str) -> None:
    """Unknown databases and drivers, databases in memory, options that cannot be meant; also in a traceback."""
    with pytest.raises(PolicyError, match=words) as raised:
        open_store(url)
    shown = "".join(traceback.format_exception(raised.value))
    assert "very-secret" not in shown


def test_options_of_the_store_stand_beside_the_drivers_own_and_nothing_secret_is_shown() -> None:
    """Neither the password nor the user, nor what stands in the query."""
    store = opened(f"{PG}?table=effects&schema=jobs&timeout=2.5&pool_size=7&sslpassword=also-secret")
    assert store.table.fullname == "jobs.effects"
    assert (store._timeout, store._pool_size) == (2.5, 7)
    assert dict(store._url.query) == {"sslpassword": "also-secret"}
    assert repr(store) == "postgresql://db.example:6432/shop?table=jobs.effects"


def test_default_table_is_the_one_for_alembic() -> None:
    """The importable tables are the store's, and others do not get into their metadata."""
    assert (opened(PG).table, opened(PG).outbox) == (records, outbox)
    for query in ("table=other", "schema=other"):
        assert opened(f"{PG}?{query}").table.metadata is not metadata
    assert set(metadata.tables) == {TABLE, OUTBOX}


_ASYNC = type("Async", (), {"dialect": type("Dialect", (), {"is_async": True})})()


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        (create_engine(FILE), {"timeout": 1.0}, "an engine of your own"),  # it brings its own
        (PG, {"timeout": "2s"}, "timeout='2s'"),  # a mistake, not a crash later
        *((each, {}, "idempotency_store") for each in (_ASYNC, object(), None)),
        (create_engine("sqlite://"), {}, "memory://"),
        # Of these a connection is lent to two, and a write of the store would commit what the other has begun.
        *((create_engine(FILE, poolclass=pool), {}, pool.__name__) for pool in (StaticPool, SingletonThreadPool)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_usable_engine_or_option_is_refused(engine: Any, options: dict[str, Any], words: str) -> None:
    """Engines for asyncio and of databases in memory, other objects, options without an effect."""
    with pytest.raises(PolicyError, match=words):
        SQLStore(engine, **options)


_OPTIONS = r"-c statement_timeout=2500 -c default_transaction_isolation=read\ committed"
_LIBPQ = {"tcp_user_timeout": 2500, "keepalives_idle": 3, "keepalives_interval": 1, "options": _OPTIONS}
_NAME = {"application_name": "celery-idempotent"}


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("postgresql+psycopg://h/d", {"prepare_threshold": None, "connect_timeout": 3, **_LIBPQ, **_NAME}),
        (
            "postgresql+psycopg2://h/d?application_name=shop&connect_timeout=1&options=-csearch_path%3Djobs",
            {**_LIBPQ, "options": f"{_OPTIONS} -csearch_path=jobs"},
        ),
        ("postgresql+pg8000://h/d", {"timeout": 3.5, **_NAME, "startup_params": {"options": _OPTIONS}}),
        ("mysql+pymysql://h/d?read_timeout=9", {"charset": "utf8mb4", "connect_timeout": 3, "write_timeout": 4}),
        ("sqlite+pysqlite:///f", {"timeout": 2.5}),
    ],
)
def test_timeouts_reach_the_driver_and_the_query_counts_more(url: str, settings: dict[str, Any]) -> None:
    """What a driver is told besides its URL; a setting of the user's is not touched, options are added to."""
    parsed = make_url(url)
    dialect, driver = parsed.drivername.split("+")
    assert drivers._DRIVERS[dialect][driver].settings(parsed.query, 2.5) == settings


THEIRS = """
from celery_idempotent import PolicyError
from celery_idempotent.stores.memory import MemoryStore

SETTING = "no callable"

class TheirStore(MemoryStore):
    @classmethod
    def from_url(cls, url):
        store = cls()
        store.url = url
        return store

def forgets_to_return(url): ...

def cannot_read(url):
    raise ValueError(f"what is {url}?")

def refuses(url):
    raise PolicyError("idempotency_store", "'refusing://...'", "write a host")
"""
# By scheme: the entry point, and what is wrong with it.
SCHEMES = {
    "theirs": ("theirs_module:TheirStore.from_url", ""),
    "absent": ("theirs_absent:Store", "absent = theirs_absent:Store of theirs: .*No module named 'theirs_absent'"),
    "broken": ("theirs_broken:Store", "broken = theirs_broken:Store of theirs: .*a_driver_that_is_not_there"),
    "misspelt": ("theirs_module:ThierStore", "misspelt = theirs_module:ThierStore of theirs: .*ThierStore"),
    "setting": ("theirs_module:SETTING", "it is 'no callable'; it must be a callable"),
    "nothing": ("theirs_module:forgets_to_return", "it returned a NoneType, which is no Store; it lacks swap, g"),
    "unread": ("theirs_module:cannot_read", r"of theirs: it raised ValueError at .*theirs_module\.py, line \d+"),
    "refusing": ("theirs_module:refuses", "write a host"),
}


@pytest.fixture
def _theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``theirs`` that registers a right scheme and several wrong ones."""
    (tmp_path / "theirs_module.py").write_text(THEIRS)
    (tmp_path / "theirs_broken.py").write_text("import a_driver_that_is_not_there")
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    lines = [f"{scheme} = {entry_point}" for scheme, (entry_point, _) in SCHEMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[celery_idempotent.stores]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_theirs")
def test_registered_scheme_opens_with_the_whole_url() -> None:
    """The callable gets the URL as it was written, and what it returns is the store; a misspelt one lists it."""
    store = open_store("theirs://user:secret@host/x?y=1")
    assert isinstance(store, MemoryStore)
    assert vars(store)["url"] == "theirs://user:secret@host/x?y=1"
    with pytest.raises(PolicyError, match=r"known schemes: .*memory.*theirs"):
        open_store("thiers://host")


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("scheme", [each for each, (_, wrong) in SCHEMES.items() if wrong])
def test_unusable_entry_point_is_named(scheme: str) -> None:
    """Whose it is, what is wrong, and never the URL, which can hold a password."""
    url = f"{scheme}://user:{'secret'}@host"
    with pytest.raises(PolicyError, match=SCHEMES[scheme][1]) as raised:
        open_store(url)
    assert f"'{scheme}://...'" in str(raised.value)
    assert "secret" not in "".join(traceback.format_exception(raised.value))
