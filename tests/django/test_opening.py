"""Opening the store: by URL, from Django's settings, and what is said where that cannot work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from django.apps import apps
from django.conf import settings
from django.utils.functional import empty

from celery_idempotent import PolicyError, open_store
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.integration.settings import runtime_of
from tests.django.databases import configured, sqlite

ROOT = Path(__file__).parent.parent.parent


def test_url_names_a_database() -> None:
    """``django://`` and a key of DATABASES, in whatever case it is written."""
    assert isinstance(open_store("django://default"), DjangoStore)
    with configured("Orders_2", sqlite(Path("unused"))):
        store = open_store("django://Orders_2")
    assert isinstance(store, DjangoStore)
    assert (store.alias, repr(store)) == ("Orders_2", "django://Orders_2")


@pytest.mark.parametrize(
    "url", ["django://", "django:///default", "django://default/table", "django://default?table=t"]
)
def test_url_says_nothing_else(url: str) -> None:
    """A table, an option, or no database: the answer is what to write."""
    with pytest.raises(PolicyError, match="write django://default"):
        open_store(url)


@pytest.mark.parametrize("url", ["django://user:s3cr3t@host", "django://user:s3cr3t@host/db?x=1", "django://:s3cr3t"])
def test_url_of_a_server_is_refused_without_its_login(url: str) -> None:
    """Who writes the database's own URL by mistake does not find its password in a log."""
    with pytest.raises(PolicyError, match=r"'django://\.\.\.': write django://default") as raised:
        open_store(url)

    assert "s3cr3t" not in str(raised.value)


def test_shop_keeps_its_records_in_its_default_database(shop: Celery) -> None:
    """``CELERY_IDEMPOTENCY_STORE`` of Django's settings is Celery's ``idempotency_store``."""
    store = runtime_of(shop).store

    assert isinstance(store, DjangoStore)
    assert store.alias == "default"


def test_unknown_database_lists_the_known_ones() -> None:
    """A typo in the alias is answered with what there is."""
    with pytest.raises(PolicyError, match=r"django://defualt.*not a key of DATABASES, which has: default"):
        open_store("django://defualt")


def test_app_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its migration there would be no table."""
    monkeypatch.delitem(apps.app_configs, "celery_idempotent")

    with pytest.raises(PolicyError, match=r"add 'celery_idempotent\.contrib\.django' to INSTALLED_APPS"):
        open_store("django://default")


def test_django_that_is_not_ready_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its settings, and before its apps are there; see the processes of their own below."""
    monkeypatch.setattr(apps, "apps_ready", False)
    with pytest.raises(PolicyError, match=r"call django\.setup\(\)"):
        open_store("django://default")

    monkeypatch.setattr(settings, "_wrapped", empty)
    with pytest.raises(PolicyError, match="set DJANGO_SETTINGS_MODULE"):
        open_store("django://default")


def test_database_without_autocommit_is_refused(tmp_path: Path) -> None:
    """Django's setting that leaves the end of transactions to everybody makes claims that may vanish."""
    manual = {**sqlite(tmp_path / "shop"), "AUTOCOMMIT": False}

    with configured("manual", manual), pytest.raises(PolicyError, match="AUTOCOMMIT"):
        open_store("django://manual")


def test_database_of_another_kind_is_refused() -> None:
    """Only databases on which the statements were tried."""
    wanted = "kept in postgresql, mysql, sqlite, and not in other"

    with configured("other", {"ENGINE": "tests.django.other_backend"}), pytest.raises(PolicyError, match=wanted):
        open_store("django://other")


def test_missing_driver_of_a_database_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's own words about what is to be installed."""
    monkeypatch.delitem(sys.modules, "django.db.backends.mysql.base", raising=False)
    monkeypatch.setitem(sys.modules, "MySQLdb", None)

    wanted = pytest.raises(PolicyError, match="Did you install mysqlclient")
    with configured("mysql", {"ENGINE": "django.db.backends.mysql"}), wanted:
        open_store("django://mysql")


def _refusal(preparation: str, **environment: str) -> str:
    """What opening the store says in a process of its own, after ``preparation``."""
    code = f"{preparation}\nfrom celery_idempotent import open_store\nopen_store('django://default')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**{name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stderr.strip().rpartition("\n")[2]


def test_missing_django_names_the_extra() -> None:
    """Without Django the answer is the command that installs it."""
    said = _refusal("import sys; sys.modules['django'] = None")

    assert 'pip install "celery-idempotent[django]"' in said


def test_django_without_settings_names_the_variable() -> None:
    """A script that never mentions Django's settings is told how."""
    assert "set DJANGO_SETTINGS_MODULE" in _refusal("")


def test_django_that_is_not_set_up_names_the_call() -> None:
    """Settings alone do not load apps."""
    said = _refusal("", DJANGO_SETTINGS_MODULE="tests.django.project.settings")

    assert "django.setup()" in said
    assert _refusal("import django; django.setup()", DJANGO_SETTINGS_MODULE="tests.django.project.settings") == ""


def test_fork_asks_nothing_of_a_django_that_is_not_configured() -> None:
    """Whoever imports the store need not use it: a tool, or an editor that looks at every module."""
    program = "import os, celery_idempotent.contrib.django.store; os._exit(0) if os.fork() == 0 else os.wait()"
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
