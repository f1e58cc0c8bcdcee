"""The store on Django's connections: its contracts on every kind of database, and how it is opened."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from django.apps import apps
from django.conf import settings
from django.utils.functional import empty

from celery_idempotent import PolicyError, open_store
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from tests.django.databases import Settings, configured, on_mariadb, on_postgresql, sqlite


class TestStore(StoreContract, PurgeableContract, VerifiableContract):
    """What every store must do, what a worker checks at its start, and what operators run daily."""

    @pytest.fixture
    def store(self, database: str) -> DjangoStore:
        return DjangoStore(database)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, DjangoStore)
        return DjangoStore(store.alias)

    @pytest.fixture
    def misconfigured_store(self, empty: str) -> DjangoStore:
        return DjangoStore(empty)


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("mariadb", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("answer", ["refused", "silent"])
class TestOutages(OutageContract):
    """When nobody listens, and when a server never answers, given the timeouts that the documents ask for."""

    @pytest.fixture
    def unreachable_store(self, kind: str, answer: str) -> Iterator[DjangoStore]:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            port = 1 if answer == "refused" else silent.getsockname()[1]
            on = {"postgresql": on_postgresql(port, "shop"), "mariadb": on_mariadb(port, "shop", timeout=1)}
            with configured("gone", on[kind]) as alias:
                yield DjangoStore(alias)

    def test_clock_without_a_server_is_unknown(self, unreachable_store: DjangoStore) -> None:
        """Nobody's clock is taken for the server's."""
        self._unavailable(unreachable_store.now)


def test_url_and_settings_name_a_database(shop: Celery) -> None:
    """``django://`` and a key of DATABASES, in whatever case; ``CELERY_IDEMPOTENCY_STORE`` is Celery's setting."""
    with configured("Orders_2", sqlite(Path("unused"))):
        stores = [open_store("django://default"), open_store("django://Orders_2"), runtime_of(shop).store]
    assert {type(each) for each in stores} == {DjangoStore}
    assert [repr(each) for each in stores] == ["django://default", "django://Orders_2", "django://default"]


@pytest.mark.parametrize("rest", ["", "/default", "default/table", "default?table=t", "u:s3cr3t@host/db?x=1"])
def test_url_says_nothing_else(rest: str) -> None:
    """A table, an option, or no database: the answer is what to write, and repeats no password."""
    with pytest.raises(PolicyError, match="write django://default") as raised:
        open_store(f"django://{rest}")
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("alias", "database", "told"),
    [
        ("defualt", None, "not a key of DATABASES, which has: default"),
        ("manual", {**sqlite(Path("unused")), "AUTOCOMMIT": False}, "AUTOCOMMIT"),
        ("other", {"ENGINE": "django.db.backends.dummy"}, "kept in postgresql, mysql, sqlite, and not in unknown"),
        ("mysql", {"ENGINE": "django.db.backends.mysql"}, "Did you install mysqlclient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_database_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, alias: str, database: Settings | None, told: str
) -> None:
    """A typo, claims that may vanish, statements that were never tried, a missing driver."""
    monkeypatch.delitem(sys.modules, "django.db.backends.mysql.base", raising=False)
    monkeypatch.setitem(sys.modules, "MySQLdb", None)
    with configured(alias if database else "unused", database or {}), pytest.raises(PolicyError, match=told):
        open_store(f"django://{alias}")


def test_django_that_is_not_ready_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the app there would be no table; before the apps and the settings there is nothing."""

    def refused(told: str) -> None:
        with pytest.raises(PolicyError, match=told):
            open_store("django://default")

    monkeypatch.delitem(apps.app_configs, "celery_idempotent")
    refused(r"add 'celery_idempotent\.contrib\.django' to INSTALLED_APPS")
    monkeypatch.setattr(apps, "apps_ready", False)
    refused(r"call django\.setup\(\)")
    monkeypatch.setattr(settings, "_wrapped", empty)
    refused("set DJANGO_SETTINGS_MODULE")


OPEN = "from celery_idempotent import open_store; open_store('django://default')"
FORK = "import os, celery_idempotent.contrib.django.store; os.fork() or os._exit(0); os.wait()"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"import sys; sys.modules['django'] = None; {OPEN}", 'pip install "celery-idempotent[django]"'),
        (f"{FORK}; import django; django.setup(); {OPEN}", ""),
    ],
    ids=["no Django", "set up, after a fork of what only imports the store"],
)
def test_process_of_its_own_is_told_what_is_missing(code: str, said: str) -> None:
    """The extra; where nothing is missing nothing is said."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.django.project.settings"}
    root = Path(__file__).parent.parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert (bool(ended.returncode), bool(ended.stderr)) == (bool(said), bool(said))
    assert said in ended.stderr.strip().rpartition("\n")[2]
