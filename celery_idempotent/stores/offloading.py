"""A store around a store that keeps large results as objects, and in the record a pointer to each.

::

    body returns ──▶ encoded ──▶ put(object) ──▶ swap(record with a pointer)        in this order, so that no record
                                                                                    points to what was never there
    replay ◀── decoded ◀── SHA-256 compared ◀── get(object) ◀── pointer

Every object has a name of its own, which no other attempt can know. So a late attempt writes beside what a completed
record points to, and never over it.
"""

import logging
import os
from functools import partial
from hashlib import sha256

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import ANY_TEXT, Encoded, as_bytes
from celery_idempotent.protocol.contents import OBJECT, ContentLost, Packed, Pointer, Slot, contents_of, pointer_in
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store, VerifiableStore
from celery_idempotent.stores.around import StoreAround
from celery_idempotent.stores.objects import LargeResults, ObjectMissing

logger = logging.getLogger(__name__)

_CHECK = b"Written by celery-idempotent when a worker starts, to see whether it may."

_MOST_BYTES = 4
"""Of a character in UTF-8."""


class Offloading(StoreAround):
    """``store`` with the results that are too large for a record kept in ``large``."""

    def __init__(self, store: Store, large: LargeResults) -> None:
        super().__init__(store)
        self._large = large

    @property
    def notes(self) -> list[str]:
        """What people should know of the store, who check it."""
        return [f"{self._large.objects!r} takes results of more than {self._large.over} bytes"]

    def pack(self, encoded: Encoded, slot: Slot, *, small: bool = False) -> Packed | None:
        """See :meth:`celery_idempotent.protocol.contents.PackingStore.pack`; only results become objects."""
        is_large = len(encoded.data) * _MOST_BYTES > self._large.over and len(as_bytes(encoded.data)) > self._large.over
        if slot.field != "result" or is_large == small:
            return None if small else Packed(encoded)
        data = as_bytes(encoded.data)
        pointer = Pointer(
            # Fresh each time: one object is never written with two contents.
            name=f"{self._large.prefix}{folder_of(slot.key)}/{os.urandom(16).hex()}",
            size=len(data),
            sha256=sha256(data).hexdigest(),
            content_type=encoded.content_type,
            is_text=isinstance(encoded.data, str),
        )
        return Packed(pointer.to_encoded(), partial(self._large.objects.put, pointer.name, data))

    def unpack(self, encoded: Encoded, slot: Slot) -> Encoded:
        if encoded.content_type != OBJECT:
            return encoded
        pointer = pointer_in(encoded)
        if pointer is None:
            raise ContentLost("its object cannot be used: its pointer is damaged")
        if not _is_of(pointer, slot.key):
            raise ContentLost("its object cannot be used: it is not one of this operation's")
        try:
            data = self._large.objects.get(pointer.name)
        except ObjectMissing as error:
            raise ContentLost(f"its object is gone: {error}") from error
        if len(data) != pointer.size:
            raise ContentLost(
                f"its object cannot be used: it has {len(data)} bytes, and was written with {pointer.size}"
            )
        if sha256(data).hexdigest() != pointer.sha256:
            raise ContentLost("its object cannot be used: it has another SHA-256 than what was written")
        return Encoded(data.decode(*ANY_TEXT) if pointer.is_text else data, pointer.content_type)

    def discard(self, record: Record) -> None:
        """See :meth:`celery_idempotent.protocol.contents.PackingStore.discard`; what is left is told in the log."""
        for pointer in pointers_of(record):
            try:
                self._large.objects.delete(pointer.name)
            except StoreUnavailable as error:
                told = {"key": record.key, "object": pointer.name, "reason": error}
                say(logger.warning, "object_left", **told)

    def verify(self) -> None:
        """Check the store, that objects can be written and read, and that a lost one can be told from a forbidden one.

        One small object stays, always the same.

        Raises:
            StoreMisconfigured: They cannot; the message names the remedy.
            StoreUnavailable: No answer.
        """
        if isinstance(self.within, VerifiableStore):
            self.within.verify()
        objects, prefix = self._large.objects, self._large.prefix
        name, missing = f"{prefix}celery-idempotent-check", f"{prefix}celery-idempotent-missing"
        objects.put(name, _CHECK)
        try:
            if objects.get(name) != _CHECK:
                raise self._unusable(f"{name!r} is not what was written just before")
        except ObjectMissing as error:
            raise self._unusable(f"{name!r} is not there after it was written") from error
        try:
            objects.get(missing)
        except ObjectMissing:
            return
        raise self._unusable("it has an object that nobody has written")

    def _unusable(self, reason: str) -> StoreMisconfigured:
        return StoreMisconfigured(repr(self._large.objects), "get", reason)


def pointers_of(record: Record) -> list[Pointer]:
    """The objects that the record's result and its steps are kept in.

    What cannot be read points to none, and what names another operation's counts as none.
    """
    pointers = (pointer_in(encoded) for _, encoded in contents_of(record))
    return [each for each in pointers if each and _is_of(each, record.key)]


def folder_of(key: str) -> str:
    """What all objects of an operation have in their names, after the prefix: a key may be longer than a name."""
    return sha256(key.encode(*ANY_TEXT)).hexdigest()


def _is_of(pointer: Pointer, key: str) -> bool:
    """Whether it points to an object of that operation: whoever can write the store may name any other."""
    return pointer.name.rpartition("/")[0].endswith(folder_of(key))
