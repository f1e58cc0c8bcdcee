"""A record as a Redis hash, and back: its fields by their names, numbers as decimal text, steps and verdict as JSON.

Few are found among many by pages of names: only those that may be meant are read whole.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields
from heapq import nsmallest
from importlib.resources import files
from itertools import chain
from typing import Any, cast

import redis
from redis.exceptions import ResponseError

from celery_idempotent.protocol.codec import ANY_TEXT
from celery_idempotent.protocol.record import END_OF_NUMBERS, Record
from celery_idempotent.protocol.store import RecordTooLarge, Wanted
from celery_idempotent.stores.redis.client import OTHER_TYPE, Client, trouble_of

_NUMBERS = frozenset(
    {"fencing_token", "lease_until", "attempts", "takeovers", "created_at", "updated_at", "expires_at", "schema"}
)
"""Fields of a record that are kept as decimal text."""

_FIELDS = {each.name.encode(): each.name for each in fields(Record)}
"""By field of the hash, the record's."""

_IS_BINARY = b"result_is_binary"
"""A hash field of its own: there if ``result`` is bytes and not text, which Redis cannot tell apart."""

_STRING_LIMIT = 512 * 1024 * 1024
"""Bytes a value may have (``proto-max-bulk-len``, by default). The server answers a larger one by hanging up."""

_PAGE = 500
"""Names that a server looks at in one round trip, which takes it 1 to 2 ms; fewer where many fields may be read."""

_SEARCH = files(__package__).joinpath("search.lua").read_text()


def fields_of(record: Record) -> list[bytes]:
    """The hash that holds ``record``: field, value, field, value."""
    fields: list[bytes] = []
    for name, value in record.to_fields().items():
        if name == "key":
            continue
        if type(value) is int:
            plain = b"%d" % value
        elif isinstance(value, str):
            plain = value.encode(*ANY_TEXT)
        else:
            plain = value if isinstance(value, bytes) else json.dumps(dict(value)).encode()
        if len(plain) > _STRING_LIMIT:
            raise RecordTooLarge(f"{len(plain)} bytes of {name}; Redis's limit is 512 MB a value")
        fields += (name.encode(), plain)
    if isinstance(record.result, bytes):
        fields += (_IS_BINARY, b"1")
    return fields


def record_of(key: str, stored: Mapping[bytes, bytes], *, store: str) -> Record:
    """The record in a hash."""
    as_it_is = {"key", "result"} if _IS_BINARY in stored else {"key"}

    def decode(field: str, value: Any) -> Any:
        if field in _NUMBERS:
            if not value.isdigit():  # of what else ``int`` takes, nothing was written here
                raise ValueError(f"{field} is not a number")
            return int(value)
        return value if field in as_it_is else value.decode(*ANY_TEXT)

    values: dict[str, Any] = {field: stored[name] for name, field in _FIELDS.items() if name in stored}
    return Record.from_fields({**values, "key": key}, store=store, decode=decode)


def pages(
    client: Client, prefix: bytes, wanted: Wanted, given: Set[bytes] = frozenset()
) -> Iterator[Sequence[tuple[bytes, Any]]]:
    """The names that begin so with their hashes, or the error that says why one is none.

    What is certainly not wanted is left out, by the servers themselves, which look at some names at a time. Behind the
    oldest come the next, for a reader who could not use all of them; never what is ``given``.
    """
    oldest = wanted.get("oldest")
    for found in _search(client, prefix, wanted):
        names = [name for _, name in found if name not in given]
        yield _read(client, names)
        if oldest and len(found) == oldest:
            yield from pages(client, prefix, {**wanted, "oldest": 2 * oldest}, given | {*names})


def _search(client: Client, prefix: bytes, wanted: Wanted) -> Iterator[Sequence[tuple[int, bytes]]]:
    """When what may be wanted was written, and its name: page by page, or those that are enough at once."""
    oldest = wanted.get("oldest")
    before = wanted.get("before") or (END_OF_NUMBERS if oldest else None)
    first: list[tuple[int, bytes]] = []
    for server in primaries(client):
        cursor = b""
        while cursor != b"0":
            question = _question(prefix, wanted, before)
            cursor, said = cast(Any, server.eval(_SEARCH, 0, cursor or b"0", *question))
            found = list(zip((int(each or 0) for each in said[1::2]), said[::2], strict=True))
            if oldest is None:
                yield found
            else:
                first = nsmallest(oldest, {*first, *found})  # SCAN may name one twice
                before = first[-1][0] if len(first) == oldest else before
    yield first


def primaries(client: Client) -> Sequence[redis.Redis]:
    if isinstance(client, redis.Redis):
        return [client]
    return [client.get_redis_connection(node) for node in client.get_primaries()]


def _question(prefix: bytes, wanted: Wanted, before: int | None) -> Sequence[Any]:
    """What ``search.lua`` takes behind the cursor."""
    by_rarity = ("label", "status", "worker", "task")
    exact = [(name, str(value)) for name in by_rarity if (value := wanted.get(name)) is not None]
    texts = (wanted.get("name") or "", wanted.get("label_prefix") or "", *chain(*exact))
    pattern = re.sub(rb"([*?\[\\])", rb"\\\1", prefix) + b"*"
    latest = "" if before is None else before
    return (pattern, _PAGE // (len(exact) or 1), len(prefix), latest, *(each.encode(*ANY_TEXT) for each in texts))


def _read(client: Client, names: Sequence[bytes]) -> Sequence[tuple[bytes, Any]]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(name)
        replies = cast(list[Any], pipeline.execute(raise_on_error=False))
    raised([each for each in replies if not (isinstance(each, ResponseError) and trouble_of(each) is OTHER_TYPE)])
    return list(zip(names, replies, strict=True))


def raised(replies: list[Any]) -> list[Any]:
    """The replies of a pipeline; raises the first of them that is an error."""
    for each in replies:
        if isinstance(each, Exception):
            raise each
    return replies


def text_of(name: bytes) -> str:
    """The name of a key, for people, where it is not one of ours."""
    try:
        return name.decode(*ANY_TEXT)
    except UnicodeDecodeError:
        return name.decode("utf-8", "backslashreplace")
