"""Stores around a store: one keeps large results as objects, one encrypts what bodies and callers have said.

::

    body returns ──▶ encoded ──▶ put(object) ──▶ swap(record with a pointer)        in this order, so that no record
                                                                                    points to what was never there
    replay ◀── decoded ◀── SHA-256 compared ◀── get(object) ◀── pointer

Every object has a name of its own, which no other attempt can know. So a late attempt writes beside what a completed
record points to, and never over it.

Encrypted are results, also of steps, failures and messages of the outbox, when they are packed; and in every record its
texts, which are its label and why there is no result. Each is bound to its slot, so that nobody who can write to the
store can have it taken for something else. A text that cannot be decrypted here stays as it is, and is written back so.
"""

import logging
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, Protocol, Unpack

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import ANY_TEXT, Encoded, as_bytes
from celery_idempotent.protocol.contents import (
    ENCRYPTED,
    OBJECT,
    ContentLost,
    Packed,
    Pointer,
    Slot,
    contents_of,
    outcome_slot,
    pack,
    pack_small,
    pointer_in,
)
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, Record, RecordUnreadable
from celery_idempotent.protocol.steps import Finished, to_plain
from celery_idempotent.protocol.store import (
    CommittingStore,
    IndexedStore,
    Outbox,
    PurgeableStore,
    Store,
    Transaction,
    TransactionalStore,
    VerifiableStore,
    Wanted,
)
from celery_idempotent.stores.objects import LargeResults, ObjectMissing

_VERBS = [
    name
    for kind in (Store, VerifiableStore, PurgeableStore, IndexedStore, CommittingStore, TransactionalStore, Outbox)
    for name in vars(kind)
    if not name.startswith("_")
]


class StoreAround:
    """Does what the store within does, and can do what that can."""

    def __init__(self, within: Store) -> None:
        self.within = within
        for name in _VERBS:
            # As attributes: a question for what a store can do sees no __getattr__, and most calls come here.
            if not hasattr(type(self), name) and hasattr(within, name):
                setattr(self, name, getattr(within, name))

    def __getattr__(self, name: str) -> Any:
        if name == "within":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.within, name)

    def __repr__(self) -> str:
        return repr(self.within)


def innermost(store: Any) -> Any:
    """The store within all those that are around it."""
    while isinstance(store, StoreAround):
        store = store.within
    return store


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


_MOST_OF_A_LABEL = 150
"""Bytes of a label that is encrypted: with what the cipher adds, and in Base64, it is as long as a column is wide."""

_TEXT, _BYTES = b"text", b"bytes"


class NotDecrypted(Exception):
    """A ciphertext cannot be decrypted here; the text says why, and what helps."""


class Cipher(Protocol):
    """Encrypts, with a fresh nonce each time, and authenticates together with the slot."""

    def encrypt(self, clear: bytes, slot: Slot) -> bytes:
        """``clear`` encrypted for ``slot``."""

    def decrypt(self, encrypted: bytes, slot: Slot) -> bytes:
        """What was encrypted; raises :class:`NotDecrypted`, also if it was encrypted for another slot."""

    def is_from(self, data: bytes) -> bool:
        """Whether ``data`` looks like a ciphertext, of whichever key."""


class Sealed(StoreAround):
    """``store`` with everything secret in its records encrypted by ``cipher``.

    With ``is_required``, what was not encrypted is no result: whoever can write the store could have put it there.
    """

    def __init__(self, store: Store, cipher: Cipher, *, is_required: bool = False) -> None:
        super().__init__(store)
        self._cipher = cipher
        self._is_required = is_required
        if isinstance(store, CommittingStore):
            self.swap_with = self._swap_with
        if isinstance(store, TransactionalStore):
            self.begin = self._begin
        if isinstance(store, IndexedStore):
            self.reads_all = lambda **wanted: store.reads_all(**{**wanted, "label": None, "label_prefix": None})

    # -- records

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self.swap_by(self.within.swap, new, expected)

    def swap_by(
        self, swap: Callable[[Record, str | None], Record | None], new: Record, expected: str | None
    ) -> Record | None:
        """Write ``new`` encrypted by ``swap``; what is stored afterwards, decrypted as far as that can be."""
        encrypted = _with_texts(new, self._encrypt_text)
        stored = swap(encrypted, expected)
        if stored is None:
            return None
        if stored.label == encrypted.label:  # just written: nothing has to be decrypted
            stored = stored.but(label=new.label)
        return _with_texts(stored, self._decrypt_text)

    def _swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        return self.swap_by(partial(self.within.swap_with, writes=writes), new, expected)  # type: ignore[attr-defined]

    def _begin(self, using: Any = None) -> Transaction:
        return _SealedTransaction(self.within.begin(using), self)  # type: ignore[attr-defined]

    def get(self, key: str) -> Record | None:
        stored = self.within.get(key)
        return stored and _with_texts(stored, self._decrypt_text)

    def scan(self, **wanted: Unpack[Wanted]) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; of a label that cannot be read nobody knows what it is."""
        label = wanted.pop("label", None)  # no index knows what is encrypted
        for stored in self.within.scan(**wanted):  # type: ignore[misc]  # asked for more only if that one takes it
            record = _with_texts(stored, self._decrypt_text)
            if label in (None, record.label) or record.label.startswith(ENCRYPTED_TEXT):
                yield record

    def reveal(self, record: Record) -> Record:
        clear = _with_texts(record, self._decrypt_text)
        for name, encoded in contents_of(record):
            with suppress(RecordUnreadable):
                slot = Slot(record.key, "result", name) if name else outcome_slot(record)
                content = self._decrypt(encoded, slot)
                if name:
                    clear = clear.but(steps={**clear.steps, name: to_plain(Finished(content))})
                else:
                    clear = clear.but(result=content.data, content_type=content.content_type)
        return clear

    # -- contents

    def pack(self, encoded: Encoded, slot: Slot, *, small: bool = False) -> Packed | None:
        kind = _TEXT if isinstance(encoded.data, str) else _BYTES
        clear = b"\0".join((kind, encoded.content_type.encode(), as_bytes(encoded.data)))
        encrypted = Encoded(self._cipher.encrypt(clear, slot), ENCRYPTED)
        return (pack_small if small else pack)(self.within, encrypted, slot)

    def unpack(self, encoded: Encoded, slot: Slot) -> Encoded:
        unpack = getattr(self.within, "unpack", None)
        encoded = unpack(encoded, slot) if unpack else encoded
        if self._is_required and encoded.content_type != ENCRYPTED:
            raise _in_clear(slot)
        return self._decrypt(encoded, slot)

    def require(self, encoded: Encoded, slot: Slot) -> None:
        pointer = pointer_in(encoded)
        if self._is_required and (pointer or encoded).content_type != ENCRYPTED:
            raise _in_clear(slot)
        self._decrypt(encoded, slot)

    def _decrypt(self, encoded: Encoded, slot: Slot) -> Encoded:
        if encoded.content_type != ENCRYPTED:
            return encoded
        try:
            clear = self._cipher.decrypt(as_bytes(encoded.data), slot)
        except NotDecrypted as error:
            raise RecordUnreadable("idempotency_cipher", f"decrypting {slot}", str(error)) from error
        kind, content_type, data = clear.split(b"\0", 2)
        return Encoded(data.decode(*ANY_TEXT) if kind == _TEXT else data, content_type.decode())

    # -- texts

    def _encrypt_text(self, text: str, slot: Slot) -> str:
        if self._cipher.is_from(_ciphertext_in(text)):
            return text  # as it was read
        clear = text.encode(*ANY_TEXT)
        if slot.field == "label" and len(clear) > _MOST_OF_A_LABEL:
            clear = f"{clear[: _MOST_OF_A_LABEL - 3].decode(errors='ignore')}…".encode()
        return ENCRYPTED_TEXT + urlsafe_b64encode(self._cipher.encrypt(clear, slot)).decode().rstrip("=")

    def _decrypt_text(self, text: str, slot: Slot) -> str:
        if not text.startswith(ENCRYPTED_TEXT):
            return text
        try:
            return self._cipher.decrypt(_ciphertext_in(text), slot).decode(*ANY_TEXT)
        except NotDecrypted:
            return text


class _SealedTransaction:
    """A transaction whose record is encrypted."""

    def __init__(self, transaction: Transaction, around: Sealed) -> None:
        self._transaction = transaction
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        return self._around.swap_by(self._transaction.swap, new, expected)


def _with_texts(record: Record, change: Callable[[str, Slot], str]) -> Record:
    """The record with every text that says something of a call changed."""
    key, changes = record.key, dict[str, Any]()
    if record.label:
        changes["label"] = change(record.label, Slot(key, "label"))
    if record.error:
        changes["error"] = change(record.error, Slot(key, "error"))
    if isinstance(judged := record.verdict.get("error"), str) and judged:
        changes["verdict"] = {**record.verdict, "error": change(judged, Slot(key, "error"))}
    for name, plain in record.steps.items():
        if isinstance(plain, Mapping) and isinstance(lost := plain.get("lost"), str):
            changes.setdefault("steps", {**record.steps})[name] = {
                **plain,
                "lost": change(lost, Slot(key, "error", name)),
            }
    return record.but(**changes) if changes else record


def _ciphertext_in(text: str) -> bytes:
    """What is encrypted in a text of a record; empty where nothing is."""
    if not text.startswith(ENCRYPTED_TEXT):
        return b""
    try:
        return urlsafe_b64decode(f"{text.removeprefix(ENCRYPTED_TEXT)}==".encode(*ANY_TEXT))
    except ValueError:
        return b""


def _in_clear(slot: Slot) -> RecordUnreadable:
    why = "it is in clear text: it was written before the keys, or by somebody who has none; look at the record"
    return RecordUnreadable("idempotency_cipher_required", f"reading {slot}", why)
