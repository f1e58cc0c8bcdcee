"""A store around a store that encrypts what bodies and callers have said.

That is: results, also of steps, failures and messages of the outbox, when they are packed; and in every record its
texts, which are its label and why there is no result. Each is bound to its slot, so that nobody who can write to the
store can have it taken for something else. A text that cannot be decrypted here stays as it is, and is written back so.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from celery_idempotent.protocol.codec import ANY_TEXT, Encoded, as_bytes
from celery_idempotent.protocol.contents import (
    ENCRYPTED,
    Packed,
    Slot,
    contents_of,
    outcome_slot,
    pack,
    pack_small,
    pointer_in,
)
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, Record, RecordUnreadable, Status
from celery_idempotent.protocol.steps import Finished, to_plain
from celery_idempotent.protocol.store import CommittingStore, Store, Transaction, TransactionalStore
from celery_idempotent.stores.around import StoreAround

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

    def scan(
        self, *, status: Status | None = None, task: str | None = None, label: str | None = None
    ) -> Iterator[Record]:
        """See :meth:`celery_idempotent.stores.Store.scan`; of a label that cannot be read nobody knows what it is."""
        for stored in self.within.scan(status=status, task=task):  # no index knows what is encrypted
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
    return RecordUnreadable(
        "idempotency_cipher_required",
        f"reading {slot}",
        "it is in clear text: it was written before the keys, or by somebody who has none; look at the record",
    )
