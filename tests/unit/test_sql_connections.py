"""Connections of the SQL store: which of them live, and whose they are."""
# mypy: allow-untyped-decorators

import socket
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from celery_idempotent.stores import forks
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.drivers import is_dead
from celery_idempotent.testing.contract import a_record


class AsPyMySQL:
    def __init__(self, link: socket.socket | None) -> None:
        self._sock = link
        self.open = link is not None


class AsPg8000:
    def __init__(self, link: socket.socket) -> None:
        self._usock = link
        self._sock = object()


class AsPsycopg:
    def __init__(self, link: socket.socket) -> None:
        self._link = link

    @property
    def closed(self) -> bool:
        return self._link.fileno() < 0

    def fileno(self) -> int:
        return self._link.fileno()


@pytest.mark.parametrize("driver", [AsPyMySQL, AsPg8000, AsPsycopg])
def test_connection_is_dead_once_the_other_side_has_closed_it(driver: Any) -> None:
    """Whatever it said before; as long as it has not, unread bytes mean nothing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = driver(ours)
        assert not is_dead(connection)
        theirs.send(b"terminating connection due to administrator command")
        assert not is_dead(connection)
        theirs.close()
        assert is_dead(connection)


def test_connection_that_this_side_has_closed_is_dead() -> None:
    """Drivers close their own side after some errors, and say so in different words."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = AsPsycopg(ours)
        assert not is_dead(connection)
        ours.close()
        assert is_dead(connection)
        assert is_dead(AsPyMySQL(None))


def test_engine_from_before_a_fork_leaves_its_connections_to_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool begins anew, and what it held is kept: nobody closes it, not even the garbage collector."""
    engine = create_engine(f"sqlite:///{tmp_path}/records.sqlite")
    store = SQLStore(engine)
    store.provision()
    inherited = engine.pool
    monkeypatch.setattr("os.getpid", lambda: -1)

    record = a_record()
    assert store.swap(record, None) == record

    assert engine.pool is not inherited
    assert forks.inherited.pop() is inherited
    engine.dispose()
    inherited.dispose()


def test_inherited_engine_of_our_own_is_kept_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child opens its own, at its first use."""
    store = SQLStore(f"sqlite:///{tmp_path}/records.sqlite")
    store.provision()
    inherited = store._pool()
    monkeypatch.setattr("os.getpid", lambda: -1)

    assert store._pool() is not inherited
    store.close()
    assert list(store._pool._values.values()) == [inherited]
    inherited.dispose()
