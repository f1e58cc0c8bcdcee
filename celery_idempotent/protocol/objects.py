"""Large results: kept as objects beside the store, and what a record has of such a result in its place.

::

    body returns ──▶ encoded ──▶ put(object) ──▶ swap(record with a pointer)        in this order, so that no record
                                                                                    points to what was never there
    replay ◀── decoded ◀── SHA-256 compared ◀── get(object) ◀── pointer

Every object has a name of its own, which no other attempt can know. So a late attempt writes beside what a completed
record points to, and never over it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from celery_idempotent.protocol.cipher import ANY_TEXT
from celery_idempotent.protocol.codec import Encoded, as_bytes

CONTENT_TYPE = "application/vnd.celery-idempotent.object+json"
"""Of a pointer. No codec accepts it, so a worker that does not know of objects takes it for nothing else."""


class ObjectMissing(Exception):
    """There is certainly no object of that name."""


class ObjectStore(Protocol):
    """Keeps bytes under names. All of it must be safe to call from several threads and after a fork.

    Any failure of the driver surfaces as :class:`~celery_idempotent.errors.StoreUnavailable`, and as its subclass
    ``StoreMisconfigured`` where it stays so until somebody changes something.
    """

    def put(self, name: str, data: bytes) -> None:
        """Write the object, whole and durable, once this returns; safe to repeat.

        Raises:
            StoreUnavailable: No certain answer; it may have been written.
        """

    def get(self, name: str) -> bytes:
        """The object's bytes, as soon as :meth:`put` has returned, to everybody.

        Raises:
            ObjectMissing: There is certainly none.
            StoreUnavailable: No certain answer.
        """

    def delete(self, name: str) -> None:
        """Delete the object, if it is there.

        Raises:
            StoreUnavailable: No certain answer.
        """


@dataclass(frozen=True, slots=True)
class LargeResults:
    """Where encoded results go that are larger than a record should be.

    Args:
        objects: Keeps them.
        over: Bytes; a result with more of them is kept as an object.
        prefix: How the name of each object begins.
    """

    objects: ObjectStore
    over: int
    prefix: str = ""

    def takes(self, encoded: Encoded) -> bool:
        """Whether the result is to be kept as an object."""
        return len(encoded.data) * _MOST_BYTES > self.over and len(as_bytes(encoded.data)) > self.over


_MOST_BYTES = 4
"""Of a character in UTF-8."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a record says of an object.

    Args:
        name: Of the object, with its prefix; a change of the prefix does not lose what is recorded.
        size: Bytes.
        sha256: Of them, in hexadecimal digits.
        content_type: How the result is encoded.
        is_text: Whether what was encoded is text.
    """

    name: str
    size: int
    sha256: str
    content_type: str
    is_text: bool

    def is_of(self, key: str) -> bool:
        """Whether it points to an object of that operation: whoever can write the store may name any other."""
        return self.name.rpartition("/")[0].endswith(folder_of(key))

    def to_encoded(self) -> Encoded:
        """The pointer as a record keeps it, in place of the result."""
        plain = {
            "name": self.name,
            "size": self.size,
            "sha256": self.sha256,
            "content_type": self.content_type,
            "text": self.is_text,
        }
        return Encoded(json.dumps(plain), CONTENT_TYPE)

    def result_in(self, data: bytes) -> Encoded:
        """The encoded result that was written.

        Raises:
            ValueError: The object is not what was written.
        """
        if len(data) != self.size:
            raise ValueError(f"it has {len(data)} bytes, and was written with {self.size}")
        if sha256(data).hexdigest() != self.sha256:
            raise ValueError("it has another SHA-256 than what was written")
        return Encoded(data.decode(*ANY_TEXT) if self.is_text else data, self.content_type)


def pointed(large: LargeResults, key: str, nonce: str, encoded: Encoded) -> tuple[Pointer, bytes]:
    """The pointer to a result of the operation with that key, and the object's bytes.

    ``nonce`` is fresh for every result that is encoded: one object is never written with two contents, even where the
    same attempt encodes the same result again.
    """
    data = as_bytes(encoded.data)
    name = f"{large.prefix}{folder_of(key)}/{nonce}"
    pointer = Pointer(
        name, len(data), sha256(data).hexdigest(), encoded.content_type, is_text=isinstance(encoded.data, str)
    )
    return pointer, data


def folder_of(key: str) -> str:
    """What all objects of an operation have in their names, after the prefix: a key may be longer than a name."""
    return sha256(key.encode(*ANY_TEXT)).hexdigest()


def pointer_in(encoded: Encoded) -> Pointer | None:
    """The pointer that stands in a record in place of a result; None where the result itself does.

    Raises:
        ValueError: It is damaged.
    """
    if encoded.content_type != CONTENT_TYPE:
        return None
    match _plain(encoded.data):
        case {
            "name": str(name),
            "size": int(size),
            "sha256": str(digest),
            "content_type": str(content_type),
            "text": bool(is_text),
        }:
            return Pointer(name, size, digest, content_type, is_text)
        case _:
            raise ValueError("its pointer is damaged")


def _plain(data: str | bytes) -> Mapping[str, Any] | None:
    try:
        return json.loads(data)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        return None
