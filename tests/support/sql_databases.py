"""SQL databases as their administrator sees them: a store of a table of its own, and what it did."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Engine, create_engine, make_url, text

from celery_idempotent.stores.sql import SQLStore
from lab.embedded import Server
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Database:
    """A database, and the server behind it if there is one."""

    url: str
    server: Server | None = None

    @property
    def dialect(self) -> str:
        """SQLAlchemy's name of it."""
        return make_url(self.url).get_backend_name()

    @contextlib.contextmanager
    def store(self, **options: Any) -> Iterator[SQLStore]:
        """A store with a provisioned table of its own."""
        with self.reopened(f"t_{uuid4().hex}", **options) as store:
            store.provision()
            yield store

    @contextlib.contextmanager
    def reopened(self, table: str, *, url: str | None = None, **options: Any) -> Iterator[SQLStore]:
        """A store of a table that may be there or not."""
        store = SQLStore(url or self.url, table=table, **options)
        try:
            yield store
        finally:
            store.close()

    @contextlib.contextmanager
    def administrator(self) -> Iterator[Connection]:
        """A connection of somebody else's, in autocommit mode."""
        with self.engine(isolation_level="AUTOCOMMIT") as engine, engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def engine(self, **options: Any) -> Iterator[Engine]:
        """An engine as users have one."""
        engine = create_engine(self.url, **options)
        try:
            yield engine
        finally:
            engine.dispose()

    def through(self, port: int) -> str:
        """Its URL with another port."""
        return make_url(self.url).set(port=port).render_as_string(hide_password=False)

    def do(self, *statements: str) -> None:
        """Execute statements as the administrator."""
        with self.administrator() as connection:
            for each in statements:
                connection.execute(text(each))


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: another processor may be in one."""
    os.kill(pid, signal.SIGSTOP)
    states = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    wait_until(lambda: all(each.read_text().rpartition(")")[2].split()[0] in "Tt" for each in states), f"{pid} stops")


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes that hang: their kernel takes what is sent to them, and they never answer."""
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def process_behind(store: SQLStore) -> int:
    """The process of the server that answers ``store``; its pooled connection is used again by the next call."""
    with store._lent("test", store._pool().connect) as connection:
        if store.dialect == "postgresql":
            return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        return int(Path(str(connection.execute(text("SELECT @@pid_file")).scalar_one())).read_text())
