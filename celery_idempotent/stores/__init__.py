"""Stores, opened from a URL in the shape Celery users know; and what you need to write one."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from traceback import extract_tb
from typing import Any, TypeVar, cast

from celery_idempotent.errors import IdempotencyError, PolicyError, StoreMisconfigured
from celery_idempotent.printable import not_installed, say, scheme_of
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import (
    CommittingStore,
    IndexedStore,
    Outbox,
    OutboxMessage,
    PurgeableStore,
    RecordTooLarge,
    Store,
    TakenMessage,
    Transaction,
    TransactionalStore,
    VerifiableStore,
    WaitingMessage,
    Wanted,
    WriteFailed,
)

__all__ = [
    "CommittingStore",
    "IndexedStore",
    "Outbox",
    "OutboxMessage",
    "PurgeableStore",
    "RecordTooLarge",
    "Store",
    "TakenMessage",
    "Transaction",
    "TransactionalStore",
    "VerifiableStore",
    "WaitingMessage",
    "Wanted",
    "WriteFailed",
    "open_store",
    "readable",
]

_SQL = dict.fromkeys(
    ("postgresql", "mysql", "mariadb", "sqlite", "db"), ("celery_idempotent.stores.sql:SQLStore.from_url", "sql")
)
"""A ``+`` and a driver may follow; after ``db+``, which Celery writes before its result backend, a whole URL does."""

_BUILT_IN = {
    "memory": ("celery_idempotent.stores.memory:MemoryStore.from_url", None),
    "dynamodb": ("celery_idempotent.stores.dynamodb:DynamoDBStore.from_url", "dynamodb"),
    "django": ("celery_idempotent.contrib.django.store:DjangoStore.from_url", "django"),
    **dict.fromkeys(
        ("redis", "rediss", "redis+socket", "unix", "sentinel", "redis+cluster", "rediss+cluster"),
        ("celery_idempotent.stores.redis:RedisStore.from_url", "redis"),
    ),
    **_SQL,
}
"""By URL scheme: what opens it, and the extra that brings its driver."""


def open_store(url: str | Store) -> Store:
    """The store that ``url`` names; a store is returned as it is.

    Args:
        url: ``dynamodb://@eu-west-1/table``, ``dynamodb://@localhost:8000/table``, ``memory://``,
            ``redis://host/0`` or another form of ``docs/how-to/redis.md``, ``postgresql+psycopg://host/database`` or
            another of ``docs/how-to/sql.md``, or the scheme of an entry point in the group
            ``celery_idempotent.stores``, which must be a callable that takes the URL.

    Raises:
        PolicyError: Unknown scheme, missing driver, unusable URL, or neither a URL nor a store, given or returned by an
            entry point; the message names the remedy.
    """
    if not isinstance(url, str):
        if isinstance(url, type) or _lacking(url, Store):
            remedy = "is not a store; write a URL, such as redis://host/0, or a store, such as SQLStore(engine)"
            raise PolicyError("idempotency_store", type(url).__name__, remedy)
        return url
    scheme = url.partition(":")[0].lower()
    built_in = _BUILT_IN.get(scheme) or _SQL.get(scheme.partition("+")[0])
    if scheme in _BUILT_IN and scheme not in _SQL and not url.partition(":")[2].startswith("//"):  # SQL says so itself
        raise _unusable(url, f"behind the scheme a URL has ://, so write {scheme}://...")
    if built_in:
        return cast(Store, opener_of(*built_in, partial(_unusable, url))(url))
    registered = {each.name: each for each in entry_points(group="celery_idempotent.stores")}
    if scheme in registered:
        return cast(Store, open_registered(registered[scheme], url, Store, partial(_unusable, url)))
    if scheme.partition("+")[0] == "postgres":
        raise _unusable(url, "the scheme is called postgresql: write postgresql://...")
    known = ", ".join(sorted({*_BUILT_IN, *registered}))
    raise _unusable(url, f"no store has this scheme; known schemes: {known}")


def _unusable(url: str, remedy: str) -> PolicyError:
    return PolicyError("idempotency_store", scheme_of(url), remedy)


def opener_of(path: str, extra: str | None, unusable: Callable[[str], PolicyError]) -> Callable[[Any], object]:
    """What ``path`` names, as an entry point would; its driver may be missing."""
    try:
        opener: Callable[[Any], object] = resolve_name(path)
    except ModuleNotFoundError as error:
        raise unusable(not_installed(error, extra)) from error
    return opener


def open_registered(entry_point: EntryPoint, url: str, kind: type, unusable: Callable[[str], PolicyError]) -> object:
    """What somebody else's opener makes of ``url``: a thing that can do all that ``kind`` says."""
    package = entry_point.dist.name if entry_point.dist else "its package"
    registration = f"entry point {entry_point.name} = {entry_point.value} of {package}"
    try:
        opener = entry_point.load()
    except Exception as error:  # the import runs code of somebody else
        raise unusable(f"{registration}: it cannot be loaded: {error!r}; repair or uninstall the package") from error
    if not callable(opener):
        raise unusable(f"{registration}: it is {opener!r}; it must be a callable that takes the URL")
    try:
        opened: object = opener(url)
    except IdempotencyError:
        raise
    except Exception as error:  # noqa: BLE001 - it runs code of somebody else
        # Not its text, which is likely to quote what could not be understood, a password included.
        place = extract_tb(error.__traceback__)[-1]
        why = f"it raised {type(error).__name__} at {place.filename}, line {place.lineno}"
        raise unusable(f"{registration}: {why}") from None
    if lacking := _lacking(opened, kind):
        why = f"it returned a {type(opened).__name__}, which is no {kind.__name__}; it lacks {', '.join(lacking)}"
        raise unusable(f"{registration}: {why}")
    return opened


def _lacking(value: object, kind: type) -> list[str]:
    """The methods of ``kind`` that ``value`` has not."""
    return [name for name in vars(kind) if not name.startswith("_") and not callable(getattr(value, name, None))]


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


listeners: list[Callable[[str, Exception], None]] = []
"""Each is called with the key of a record that is passed over, as far as it can be read, and what is wrong with it."""


def readable(
    stored: Iterable[_T], read: Callable[[_T], Record | None], key_of: Callable[[_T], object]
) -> Iterator[Record]:
    """What can be read of ``stored``; the rest is named in the log and passed over.

    Args:
        stored: Records as the store keeps them.
        read: Gives the record, None if it has been deleted since, or raises ``StoreMisconfigured``.
        key_of: Gives the key, as far as it can be read.
    """
    for each in stored:
        try:
            record = read(each)
        except StoreMisconfigured as error:
            key = str(key_of(each))
            say(logger.warning, "record_unreadable", key=key, reason=error)
            for listener in listeners:
                listener(key, error)
        else:
            if record is not None:
                yield record
