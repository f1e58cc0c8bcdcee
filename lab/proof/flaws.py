"""Stores that are broken on purpose, to show that a campaign can see.

The first kind stands between a delivery and any store, with one rule of the library undone. The second is a real store
with its own script or statements changed: what somebody could get wrong who writes them anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import bindparam, literal_column, or_, update
from sqlalchemy.dialects import mysql, postgresql, sqlite

from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis import store as redis_module
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.stores.sql.schema import KEY
from celery_idempotent.testing import StoreWrapper


class _CompletesUnconditionally(StoreWrapper):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.swap(new, expected)
        while new.status is Status.COMPLETED and stored is not None and stored.revision != new.revision:
            stored = self.store.swap(new, stored.revision)
        return stored


class _ForgetsItsOwnWrites(StoreWrapper):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.swap(new, expected)
        if stored is not None and stored is not new and stored.revision == new.revision:
            return replace(stored, revision="another", owner="another")
        return stored


class _DropsCompletions(StoreWrapper):
    def swap(self, new: Record, expected: str | None) -> Record | None:
        return new if new.status is Status.COMPLETED else self.store.swap(new, expected)


class _TakesOverAtOnce(StoreWrapper):
    _ahead = 0

    def now(self) -> int:
        self._ahead += 3_600_000
        return self.store.now() + self._ahead


class _ChecksThenWrites(StoreWrapper):
    """Compares in one request and writes in another."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored = self.store.get(new.key)
        if (stored.revision if stored else None) != expected:
            return stored
        while stored is None or stored.revision != new.revision:
            stored = self.store.swap(new, stored.revision if stored else None)
        return stored


class _GrantsEverything(MemoryStore):
    """What a task has that uses no such library."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return new


def _script(right: str, wrong: str) -> Callable[[RedisStore], Store]:
    """Redis, with a part of its script replaced."""
    script = redis_module._SCRIPT.decode()
    assert right in script
    broken = script.replace(right, wrong).encode()

    def undo(store: RedisStore) -> Store:
        send: Any = store._send
        store._call = lambda client, *arguments: send(client, "EVAL", broken, b"1", *arguments)  # type: ignore[method-assign]
        return store

    return undo


def _replaces_anything(store: SQLStore) -> Store:
    statements = store._statements
    revision = statements._table.c.revision == bindparam("expected")
    anything = or_(revision, literal_column("0") == literal_column("0"))
    write = update(statements._table).where(statements._key == bindparam("key"), anything)
    return _with(store, "_replace", write.values(statements._new_values()))


def _inserts_over_anything(store: SQLStore) -> Store:
    statements = store._statements
    values = {KEY: bindparam("key"), **statements._new_values()}
    if statements._is_mysql:
        over = mysql.insert(statements._table).values(values)
        return _with(store, "_claim", over.on_duplicate_key_update(statements._new_values()))
    insert = postgresql.insert if store.dialect == "postgresql" else sqlite.insert
    write: Any = insert(statements._table).values(values)
    write = write.on_conflict_do_update(index_elements=[statements._key], set_=statements._new_values())
    return _with(store, "_claim", write)


def _forgets_to_clear(store: SQLStore) -> Store:
    statements = store._statements
    at_expected = (statements._key == bindparam("key"), statements._table.c.revision == bindparam("expected"))
    values = {name: each for name, each in statements._new_values().items() if name != "takeovers"}
    return _with(store, "_replace", update(statements._table).where(*at_expected).values(values))


def _with(store: SQLStore, name: str, write: Any) -> Store:
    statements = store._statements
    setattr(statements, name, statements._with_answer(write) if statements._answers_at_once else write)
    return store


@dataclass(frozen=True, slots=True)
class StoreFlaw:
    """A mistake in what a store tells its server: which stores can have it, and what puts it into an opened one."""

    stores: tuple[str, ...]
    undo: Callable[[Any], Store]


_REDIS = ("redis", "redis-cluster")
_SQL = ("postgres", "mariadb", "sqlite")
_MATCHES = "matches = stored_revision == expected"

STORE_FLAWS: Mapping[str, StoreFlaw] = {
    "checks, then writes": StoreFlaw((*_REDIS, *_SQL), _ChecksThenWrites),
    "script replaces without comparing": StoreFlaw(_REDIS, _script(_MATCHES, "matches = is_stored")),
    "script claims what is taken": StoreFlaw(_REDIS, _script("matches = not is_stored", "matches = true")),
    "script creates what has vanished": StoreFlaw(_REDIS, _script(_MATCHES, f"{_MATCHES} or not is_stored")),
    "script keeps fields that are gone": StoreFlaw(_REDIS, _script("if not is_new[stored[i]]", "if false")),
    "UPDATE without the revision": StoreFlaw(_SQL, _replaces_anything),
    "INSERT over what is there": StoreFlaw(_SQL, _inserts_over_anything),
    "UPDATE leaves a column as it was": StoreFlaw(_SQL, _forgets_to_clear),
}
"""By name, mistakes of one kind of store."""

CONTROLS: Mapping[str, Callable[[Store], Store]] = {
    "no store at all": lambda store: _GrantsEverything(),
    "completes unconditionally": _CompletesUnconditionally,
    "forgets its own writes": _ForgetsItsOwnWrites,
    "drops completions": _DropsCompletions,
    "takes over at once": _TakesOverAtOnce,
}
"""By name, what is put in the place of any store, or in front of it, to see whether a campaign notices."""

FLAWS: Mapping[str, Callable[[Any], Store]] = {
    "none": lambda store: store,
    **CONTROLS,
    **{name: each.undo for name, each in STORE_FLAWS.items()},
}
"""All of them."""
