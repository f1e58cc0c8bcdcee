"""Django in the tests' own process, configured without DJANGO_SETTINGS_MODULE: Celery apps of other tests heed that."""

import atexit
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import django
import pytest
from celery import Celery, _state
from django.conf import settings
from django.core.management import call_command
from django.db import connections

from lab.folders import OwnedFolder
from tests.django.databases import Settings, configured, mariadb, migrated, postgresql, sqlite

FOLDER = OwnedFolder()
atexit.register(FOLDER.remove)


def _configure() -> None:
    before = _state._tls.current_app
    shop = import_module("tests.django.project.settings")
    values = {name: getattr(shop, name) for name in dir(shop) if name.isupper()}
    settings.configure(**values | {"DATABASES": {"default": sqlite(FOLDER.path / "default.sqlite3")}})
    django.setup()
    _state._tls.current_app = before  # the shop's app must not become that of tests elsewhere


_configure()


@pytest.fixture(scope="session", autouse=True)
def _tables() -> Iterator[None]:
    """The default database, with all tables."""
    call_command("migrate", verbosity=0)
    yield
    connections.close_all()


@pytest.fixture
def shop() -> Iterator[Celery]:
    """The shop's Celery app, as a process that has imported the project sees it."""
    from tests.django.project import app

    before = _state._tls.current_app
    app.set_current()
    yield app
    _state._tls.current_app = before


KINDS = ["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.nightly)]


def _empty(kind: str, request: pytest.FixtureRequest, folder: Path) -> Settings:
    match kind:
        case "sqlite":
            return sqlite(folder / "shop.sqlite3")
        case "postgresql":
            return postgresql(request.getfixturevalue("postgres"))
        case _:
            return mariadb(request.getfixturevalue("mariadb"))


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The alias of an empty database of each kind."""
    with configured("empty", _empty(request.param, request, tmp_path)) as alias:
        yield alias


@pytest.fixture(scope="session", params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The alias of a database of each kind, with all tables; tests use keys of their own."""
    with migrated(f"shop_{request.param}", _empty(request.param, request, tmp_path_factory.mktemp("shop"))) as alias:
        yield alias
