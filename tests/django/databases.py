"""Databases of every kind as entries of DATABASES, beside those that Django was configured with; and their servers."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
from django.core.management import call_command
from django.db import connections

from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres
from lab.embedded.server import HOST
from tests.support.waiting import wait_until

Settings = Mapping[str, Any]


def sqlite(file: Path) -> Settings:
    """A file."""
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file), "OPTIONS": {"timeout": 30}}


def postgresql(server: EmbeddedPostgres) -> Settings:
    """An empty database of its own on ``server``."""
    name = f"shop_{uuid4().hex}"
    with psycopg.connect(host=HOST, port=server.port, user="postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return on_postgresql(server.port, name)


def on_postgresql(port: int, name: str) -> Settings:
    """The database ``name`` on a PostgreSQL server of this machine."""
    return _on_a_server("postgresql", port, "postgres", name, connect_timeout=2)


def mariadb(server: EmbeddedMariaDB) -> Settings:
    """An empty database of its own on ``server``."""
    name = f"shop_{uuid4().hex}"
    with pymysql.connect(host=HOST, port=server.port, user="root") as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    return on_mariadb(server.port, name)


def on_mariadb(port: int, name: str, timeout: int = 10) -> Settings:
    """The database ``name`` on a MariaDB server of this machine; ``timeout`` in seconds."""
    _teach_django_pymysql()
    return _on_a_server("mysql", port, "root", name, connect_timeout=2, read_timeout=timeout, write_timeout=timeout)


def _on_a_server(kind: str, port: int, user: str, name: str, **options: int) -> Settings:
    place = {"HOST": HOST, "PORT": port, "USER": user}
    return {"ENGINE": f"django.db.backends.{kind}", "NAME": name, **place, "OPTIONS": options}


@contextmanager
def configured(alias: str, settings: Settings) -> Iterator[str]:
    """A further entry of DATABASES, as if it had always been there."""
    complete = connections.configure_settings({"default": {}, alias: dict(settings)})
    connections.settings[alias] = complete[alias]
    try:
        yield alias
    finally:
        if alias in {each.alias for each in connections.all(initialized_only=True)}:
            connections[alias].close()
            del connections[alias]
        del connections.settings[alias]


@contextmanager
def migrated(alias: str, settings: Settings) -> Iterator[str]:
    """The same, with all tables."""
    with configured(alias, settings):
        call_command("migrate", database=alias, verbosity=0)
        yield alias


def _teach_django_pymysql() -> None:
    """Have Django take PyMySQL for mysqlclient, and nobody else in this process."""
    pymysql.install_as_MySQLdb()
    import_module("django.db.backends.mysql.base")
    for name in [each for each in sys.modules if each.split(".")[0] in {"MySQLdb", "_mysql"}]:
        del sys.modules[name]


class Server:
    """The database server behind an alias, asked over a connection of its own."""

    def __init__(self, alias: str) -> None:
        settings = connections.settings[alias]
        self._is_mysql = "mysql" in settings["ENGINE"]
        self._name = settings["NAME"]
        self._connection = connections.create_connection(alias)
        self.close = self._connection.close

    def sessions(self) -> set[int]:
        """Who is connected to the database, apart from this."""
        question = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
        if self._is_mysql:
            question = "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> connection_id()"
        return {each[0] for each in self.ask(question, self._name)}

    def hang_up(self, session: int) -> None:
        """End a session from this side; its socket is closed by then."""
        # PostgreSQL's list forgets a session before its process closes the socket; given a time, it waits for that.
        self.ask(f"KILL {session}" if self._is_mysql else f"SELECT pg_terminate_backend({session}, 60000)")
        wait_until(lambda: session not in self.sessions(), "the session ends")

    def ask(self, text: str, *values: str | int) -> Any:
        """The rows of the answer; none where a command has none."""
        with self._connection.cursor() as cursor:
            cursor.execute(text, values)
            return cursor.fetchall() if cursor.description else []
