"""The short way of a swap past SQLAlchemy: it says the same, on the same connections, and takes none from others."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pg8000.core import CoreConnection
from sqlalchemy import PoolProxiedConnection, event

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import Status
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql import drivers as sql_drivers
from celery_idempotent.stores.sql.drivers import cursor_of, has_server_of_its_own, of_driver
from celery_idempotent.testing.contract import a_claim, a_record, a_rival
from tests.support.sql_databases import Database


def _taken(store: SQLStore) -> PoolProxiedConnection:
    pool = store._pool()
    return pool.kept() or pool.lend(pool.engine.raw_connection)


class _Recording:
    """A driver's cursor that notes what it is told."""

    def __init__(self, cursor: Any, sent: list[Any]) -> None:
        self._cursor = cursor
        self._sent = sent

    def execute(self, text: str, parameters: Any) -> None:
        self._sent.append((text, _plain(parameters)))
        self._cursor.execute(text, parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def _plain(parameters: Any) -> Any:
    """By name or by position, and bytes without what psycopg and psycopg2 put around them."""
    if isinstance(parameters, dict):
        return {name: _plain([value])[0] for name, value in parameters.items()}
    found = [getattr(value, "obj", getattr(value, "adapted", value)) for value in parameters]
    return [bytes(value) if isinstance(value, memoryview) else value for value in found]


def test_both_ways_say_the_same(driven: Database) -> None:
    """An engine of the user's keeps SQLAlchemy's way and its events; statements and parameters do not differ."""
    claimed = replace(a_record(), steps={"a": 1})
    done = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, result=b"\0\xff", expires_at=2**40)
    swaps = [(claimed, None), (done, claimed.revision), (a_rival(claimed), None), (a_rival(claimed), "gone")]
    directly: list[Any] = []
    by_events: list[Any] = []
    with driven.store() as store, driven.engine() as engine:
        a_claim(store)
        link = _taken(store)
        link.info[sql_drivers._CURSOR] = _Recording(cursor_of(link), directly)
        store._pool().keep(link)
        answers = [store.swap(*each) for each in swaps]
        driven.do(f"DELETE FROM {store.table.name}")

        own = SQLStore(engine, table=store.table.name)
        a_claim(own)
        note = lambda _c, _cu, text, told, *_: by_events.append((text, _plain(told)))  # noqa: E731
        event.listen(engine, "before_cursor_execute", note)
        assert [own.swap(*each) for each in swaps] == answers == [claimed, done, done, done]

    assert len(directly) >= len(swaps)
    assert directly == by_events


@pytest.mark.parametrize("is_its_own", [True, False], ids=["server", "pooler"])
def test_nothing_is_prepared_on_a_pooler(
    postgresql: Database, monkeypatch: pytest.MonkeyPatch, is_its_own: bool
) -> None:
    """psycopg does so by itself, with the very statement, which the server then plans once.

    A pooler changes servers at will, and on the next one the name may stand for another client's statement.
    """
    if not is_its_own:
        monkeypatch.setattr(sql_drivers, "has_server_of_its_own", lambda connection: False)
    with postgresql.store() as store:
        known = a_claim(store)
        for _ in range(8):
            store.swap(known, None)
        link = _taken(store)
        prepared = of_driver(link).execute("SELECT statement FROM pg_prepared_statements").fetchall()
        store._pool().keep(link)

    assert [text.startswith("WITH written AS \n(INSERT") for (text,) in prepared] == [True] * is_its_own


@pytest.mark.parametrize(("told", "is_its_own"), [(7, True), (8, False), (None, False)])
def test_pooler_is_known_by_the_process_id_that_it_makes_up(told: int | None, is_its_own: bool) -> None:
    """The server, asked by a statement, tells its own."""
    answer = SimpleNamespace(fetchone=lambda: told and (told,))
    connection: Any = SimpleNamespace(execute=lambda _: answer, info=SimpleNamespace(backend_pid=7))

    assert has_server_of_its_own(connection) is is_its_own


def test_pg8000_is_refused_behind_a_pooler(postgresql: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends the values after the statement, and in between the server may have been another client's."""
    told = CoreConnection.handle_BACKEND_KEY_DATA
    with replace(postgresql, url=postgresql.url.replace("psycopg", "pg8000")).store() as store:
        store.close()
        monkeypatch.setattr(
            *(CoreConnection, "handle_BACKEND_KEY_DATA"),
            lambda self, data, context: told(self, b"made" + data[4:], context),
        )
        for ask in (lambda: store.swap(a_record(), None), lambda: store.get("a"), store.begin, store.verify):
            with pytest.raises(StoreMisconfigured, match=r"use postgresql\+psycopg"):
                ask()


def test_kept_connection_is_there_for_everything_else_until_the_store_is_closed(sqlite: Database) -> None:
    """The pool has no other, and nobody waits for it; a store that was closed can be used again."""
    with sqlite.store(pool_size=1, timeout=0.2) as store:
        for _ in range(2):
            record = a_claim(store)
            transaction = store.begin()
            assert transaction.swap(a_rival(record), record.revision) is not None
            transaction.commit()
            pool: Any = store._pool().engine.pool
            store.get(record.key)
            store.close()
            assert pool.checkedout() == pool.checkedin() == 0


def test_kept_connection_is_replaced_for_its_age(sqlite: Database) -> None:
    """The pool replaces what is too old; it cannot look at what never comes back."""
    with sqlite.store() as store:
        a_claim(store)
        link = _taken(store)
        link.info[sql_drivers._FIRST_USED] -= sql_drivers._RECYCLE
        aged = of_driver(link)
        store._pool().keep(link)
        successor = _taken(store)
        assert of_driver(successor) is not aged
        store._pool().keep(successor)
