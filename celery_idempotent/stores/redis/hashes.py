"""A record as a Redis hash, and back: its fields by their names, numbers as decimal text, steps and verdict as JSON.

Few are found among many by pages of names: only those that may be meant are read whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, cast

import redis
from redis.exceptions import AskError, ResponseError

from celery_idempotent.protocol.codec import ANY_TEXT
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.redis.client import OTHER_TYPE, Client, DirectClient, trouble_of

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
"""Records that a scan asks about in one round trip."""

_KNOWN = frozenset(str(each).encode() for each in Status)


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


def pages(client: Client, pattern: bytes, wanted: Mapping[str, str]) -> Iterator[Sequence[tuple[bytes, Any]]]:
    """The names that match ``pattern`` with their hashes, or the error that says why one is none.

    What certainly has another value than ``wanted``, by field, is left out. A cluster's servers are asked one by one:
    the pipeline of its client takes three times as long.
    """
    servers: list[tuple[redis.Redis, Mapping[str, Any]]]
    if isinstance(client, redis.Redis):
        servers = [(client, {})]
    else:
        servers = [(client.get_redis_connection(each), {"target_nodes": each}) for each in client.get_primaries()]
    for server, where in servers:
        found = client.scan_iter(match=pattern, count=_PAGE, **where)
        while names := list(islice(found, _PAGE)):
            meant = _candidates(server, names, wanted) if wanted else names
            yield list(zip(meant, _read(client, meant), strict=True))


def _candidates(server: redis.Redis, names: Sequence[bytes], wanted: Mapping[str, str]) -> Sequence[bytes]:
    """Those that may be meant, among them whatever is of no known status, and what has moved to another server."""
    values = [each.encode(*ANY_TEXT) for each in wanted.values()]

    def may_be(reply: Any) -> bool:
        if isinstance(reply, ResponseError):
            return True
        status, *found = reply
        return status not in _KNOWN or [each or b"" for each in found] == values

    replies = _about_records(_ask_fields(server, names, (b"status", *map(str.encode, wanted))), AskError)
    return [name for name, reply in zip(names, replies, strict=True) if may_be(reply)]


def _ask_fields(server: redis.Redis, names: Sequence[bytes], fields: Sequence[bytes]) -> Sequence[Any]:
    if isinstance(server, DirectClient):
        return server.ask_all([(b"HMGET", name, *fields) for name in names])
    with server.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hmget(name, fields)
        return cast(Sequence[Any], pipeline.execute(raise_on_error=False))


def _read(client: Client, names: Sequence[bytes]) -> Sequence[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(name)
        return _about_records(pipeline.execute(raise_on_error=False))


def _about_records(replies: Sequence[Any], *expected: type[Exception]) -> Sequence[Any]:
    """The replies, among them what is said of a name that is no hash, and ``expected`` errors; others are raised."""
    raised([each for each in replies if not isinstance(each, expected) and not _is_of_other_type(each)])
    return replies


def _is_of_other_type(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and trouble_of(reply) is OTHER_TYPE


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
