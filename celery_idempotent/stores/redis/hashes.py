"""A record as a Redis hash, and back: its fields by their names, numbers as decimal text, steps and verdict as JSON."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge

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
