"""A record as a Redis hash, and back: its fields by their names, numbers as decimal text, steps and verdict as JSON.

Few are found among many by pages of names: only those that may be meant are read whole.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, cast

import redis
from redis.exceptions import AskError, ResponseError

from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge
from celery_idempotent.stores.redis.client import OTHER_TYPE, Client, DirectClient, trouble_of

_PAGE = 500
"""Records that a scan asks about in one round trip."""

_KNOWN = frozenset(str(each).encode() for each in Status)


@dataclass(frozen=True, slots=True)
class Source:
    """A server whose records have these names; ``server`` is asked for their fields, ``client`` for all of one."""

    client: Client
    server: redis.Redis
    names: Iterator[bytes]

    def page(self, wanted: Mapping[str, str]) -> Sequence[tuple[bytes, Any]] | None:
        """The next names with their hashes, or the error that says why one is none; None: that was all.

        What certainly has another value than ``wanted``, by field, is left out.
        """
        names = list(islice(self.names, _PAGE))
        if not names:
            return None
        meant = self._candidates(names, wanted) if wanted else names
        return list(zip(meant, _read(self.client, meant), strict=True))

    def _candidates(self, names: Sequence[bytes], wanted: Mapping[str, str]) -> Sequence[bytes]:
        """Those that may be meant, among them whatever is of no known status, and what has moved to another server."""
        fields = b"status", *map(str.encode, wanted)
        replies = _about_records(_asked(self.server, names, fields), AskError)
        values = [encoded(each) for each in wanted.values()]
        return [name for name, reply in zip(names, replies, strict=True) if _may_be(reply, values)]


def sources(client: Client, pattern: bytes) -> Sequence[Source]:
    """The servers of ``client``, each with the names there that match ``pattern``.

    A cluster's are asked one by one: the pipeline of its client takes three times as long.
    """
    if isinstance(client, redis.Redis):
        return [Source(client, client, client.scan_iter(match=pattern, count=_PAGE))]
    return [
        Source(
            client,
            client.get_redis_connection(node),
            client.scan_iter(match=pattern, count=_PAGE, target_nodes=node),
        )
        for node in client.get_primaries()
    ]


def _read(client: Client, names: Sequence[bytes]) -> Sequence[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hgetall(name)
        return _about_records(pipeline.execute(raise_on_error=False))


def _asked(server: redis.Redis, names: Sequence[bytes], fields: Sequence[bytes]) -> Sequence[Any]:
    if isinstance(server, DirectClient):
        return server.ask_all([(b"HMGET", name, *fields) for name in names])
    with server.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.hmget(name, fields)
        return cast(Sequence[Any], pipeline.execute(raise_on_error=False))


def _about_records(replies: Sequence[Any], *expected: type[Exception]) -> Sequence[Any]:
    """The replies, among them what is said of a name that is no hash, and ``expected`` errors; others are raised."""
    raised([each for each in replies if not isinstance(each, expected) and not _is_of_other_type(each)])
    return replies


def _is_of_other_type(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and trouble_of(reply) is OTHER_TYPE


def _may_be(reply: Any, values: Sequence[bytes]) -> bool:
    if isinstance(reply, ResponseError):
        return True
    status, *found = reply
    return status not in _KNOWN or [each or b"" for each in found] == values


_NUMBERS = frozenset(
    {"fencing_token", "lease_until", "attempts", "takeovers", "created_at", "updated_at", "expires_at", "schema"}
)
"""Fields of a record that are kept as decimal text."""

_FIELDS = {each.name.encode(): each.name for each in fields(Record)}
"""By field of the hash, the record's."""

_IS_BINARY = "result_is_binary"
"""A hash field of its own: there if ``result`` is bytes and not text, which Redis cannot tell apart."""

_STRING_LIMIT = 512 * 1024 * 1024
"""Bytes a value may have (``proto-max-bulk-len``, by default). The server answers a larger one by hanging up."""


def raised(replies: list[Any]) -> list[Any]:
    """The replies of a pipeline; raises the first of them that is an error."""
    for each in replies:
        if isinstance(each, Exception):
            raise each
    return replies


def fields_of(record: Record) -> list[bytes]:
    """The hash that holds ``record``: field, value, field, value."""
    fields: list[bytes] = []
    for name, value in record.to_fields().items():
        if name != "key":
            fields += (name.encode(), b"%d" % value if type(value) is int else _plain(name, value))
    if isinstance(record.result, bytes):
        fields += (_IS_BINARY.encode(), b"1")
    return fields


def record_of(key: str, stored: Mapping[bytes, bytes], *, store: str) -> Record:
    """The record in a hash."""
    values: dict[str, Any] = {field: stored[name] for name, field in _FIELDS.items() if name in stored}
    values["key"] = key
    decode = _binary_value if _IS_BINARY.encode() in stored else _value
    return Record.from_fields(values, store=store, decode=decode)


def _plain(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        plain = encoded(value)
    else:
        plain = value if isinstance(value, bytes) else json.dumps(dict(value)).encode()
    if len(plain) > _STRING_LIMIT:
        raise RecordTooLarge(f"{len(plain)} bytes of {name}; Redis's limit is 512 MB a value")
    return plain


def _value(field: str, value: Any) -> Any:
    if field in _NUMBERS:
        return _number(field, value)
    return value if field == "key" else decoded(value)


def _binary_value(field: str, value: Any) -> Any:
    return value if field == "result" else _value(field, value)


def _number(field: str, plain: bytes) -> int:
    if not plain.isdigit():  # of what else ``int`` takes, nothing was written here
        raise ValueError(f"{field} is not a number")
    return int(plain)


def encoded(text: str) -> bytes:
    """Text as bytes; Python's may hold halves of surrogate pairs, and a record is read as it was written."""
    return text.encode("utf-8", "surrogatepass")


def decoded(plain: bytes) -> str:
    """The text again."""
    return plain.decode("utf-8", "surrogatepass")


def legible(name: bytes) -> str:
    """The name of a key, for people, where it is not one of ours."""
    try:
        return decoded(name)
    except UnicodeDecodeError:
        return name.decode("utf-8", "backslashreplace")
