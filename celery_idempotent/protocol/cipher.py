"""Encryption at rest: what is encrypted, what each ciphertext is bound to, and how it looks in a record.

The cipher itself is somebody else's: two functions. A ciphertext is bound to its :class:`Slot`, so that nobody who can
write to the store can have it taken for something else. It says that it is one: a result by its content type, which a
version that does not know it refuses to decode, and a text by how it begins.
"""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from celery_idempotent.protocol.record import Record, RecordUnreadable

SEALED = "application/vnd.celery-idempotent.encrypted"
"""Content type of an outcome that is encrypted; the one that it had before is encrypted with it."""

ANY_TEXT = ("utf-8", "surrogatepass")
"""Encoding and errors by which every text of Python's becomes bytes, and itself again."""

HIDDEN = "(encrypted)"
"""What people see of a text for which there is no key here."""

_MARK = "encrypted:"
"""How a text begins that is encrypted."""

_MOST_OF_A_LABEL = 150
"""Bytes of a label that is encrypted: with what the cipher adds, and in Base64, it is as long as a column is wide."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a ciphertext belongs: it is accepted nowhere else.

    Args:
        key: The idempotency key, or of a message in the outbox its task id.
        field: What it is.
        step: Of which step; empty for what is the operation's own.
    """

    key: str
    field: str
    step: str = ""

    def __bytes__(self) -> bytes:
        """The same for no two slots."""
        return json.dumps([self.key, self.field, self.step]).encode()

    def __str__(self) -> str:
        return f"the {self.field}{f' of step {self.step!r}' if self.step else ''} of {self.key}"

    @property
    def of_error(self) -> "Slot":
        """Where it is told why there is nothing at this one."""
        return Slot(self.key, "error", self.step)


class NotOpened(Exception):
    """A ciphertext cannot be decrypted here; the text says why, and what helps."""


class Cipher(Protocol):
    """Encrypts, with a fresh nonce each time, and authenticates together with the slot.

    With ``is_required``, nothing that is not encrypted is accepted as a value.
    """

    @property
    def is_required(self) -> bool:
        """Whether clear text is refused: whoever can write the store could put it in the place of a ciphertext."""

    def seal(self, clear: bytes, slot: Slot) -> bytes:
        """``clear`` encrypted for ``slot``."""

    def open(self, sealed: bytes, slot: Slot) -> bytes:
        """What was sealed; raises :class:`NotOpened`, also if it was sealed for another slot."""


def opened(cipher: Cipher | None, sealed: bytes, slot: Slot) -> bytes:
    """What was sealed for ``slot``.

    Raises:
        RecordUnreadable: There is no key for it here, or it is not what was sealed for this slot.
    """
    try:
        if cipher is None:
            raise NotOpened("it is encrypted, and no key is set here; set idempotency_cipher as its writers have it")
        return cipher.open(sealed, slot)
    except NotOpened as error:
        raise RecordUnreadable("idempotency_cipher", f"decrypting {slot}", str(error)) from error


def refuse_clear(cipher: Cipher | None, slot: Slot) -> None:
    """Raise ``RecordUnreadable`` where only what is encrypted counts."""
    if cipher is not None and cipher.is_required:
        raise RecordUnreadable(
            "idempotency_cipher_required",
            f"reading {slot}",
            "it is in clear text: it was written before the keys, or by somebody who has none; look at the record",
        )


def hidden(cipher: Cipher | None, text: str, slot: Slot) -> str:
    """``text`` as a record keeps it: encrypted, where there is a cipher; what is empty stays empty."""
    if cipher is None or not text:
        return text
    return _MARK + urlsafe_b64encode(cipher.seal(text.encode(*ANY_TEXT), slot)).decode().rstrip("=")


def shown(cipher: Cipher | None, text: str, slot: Slot) -> str:
    """The text that :func:`hidden` was given, or that it is encrypted; clear text as it is."""
    try:
        return _opened_text(cipher, text, slot)
    except RecordUnreadable:
        return HIDDEN


def is_hidden(text: str) -> bool:
    """Whether ``text`` is encrypted."""
    return text.startswith(_MARK)


def _opened_text(cipher: Cipher | None, text: str, slot: Slot) -> str:
    if not is_hidden(text):
        return text
    try:
        sealed = urlsafe_b64decode(f"{text.removeprefix(_MARK)}==".encode(*ANY_TEXT))
    except ValueError:
        sealed = b""
    return opened(cipher, sealed, slot).decode(*ANY_TEXT)


def label_slot(key: str) -> Slot:
    """Where the label of an operation belongs."""
    return Slot(key, "label")


def error_slot(key: str) -> Slot:
    """Where it is told why an operation has no result."""
    return Slot(key, "error")


def hidden_label(cipher: Cipher | None, label: str, key: str) -> str:
    """``label`` as a record keeps it: encrypted, and then cut where it would be too long for that."""
    if cipher is None:
        # Clear text that looks encrypted would keep its operation from running.
        return f"({label}"[:_WIDTH] if label.startswith(_MARK) else label
    clear = label.encode(*ANY_TEXT)
    if len(clear) > _MOST_OF_A_LABEL:
        label = f"{clear[: _MOST_OF_A_LABEL - 3].decode(errors='ignore')}…"
    return hidden(cipher, label, label_slot(key))


_WIDTH = 255


def require_label(cipher: Cipher | None, record: Record) -> None:
    """Raise ``RecordUnreadable`` if the label of ``record`` is encrypted and cannot be decrypted here."""
    _opened_text(cipher, record.label, label_slot(record.key))


def legible(cipher: Cipher | None, record: Record) -> Record:
    """The record with its texts in clear as far as that can be; to be read, and never written back."""
    # Every delivery comes here: no call more than it takes.
    if not (record.label.startswith(_MARK) or (record.error and record.error.startswith(_MARK)) or record.verdict):
        return record
    return record.but(
        label=shown(cipher, record.label, label_slot(record.key)),
        error=record.error and shown(cipher, record.error, error_slot(record.key)),
        verdict=_legible_verdict(cipher, record),
    )


def _legible_verdict(cipher: Cipher | None, record: Record) -> Mapping[str, Any]:
    """The verdict, which has a copy of the error that was judged."""
    error = record.verdict.get("error")
    if not isinstance(error, str):
        return record.verdict
    return {**record.verdict, "error": shown(cipher, error, error_slot(record.key))}
