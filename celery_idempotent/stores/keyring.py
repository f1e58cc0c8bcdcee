"""Encryption at rest by the package ``cryptography``: AES-256-GCM, under a key of its own for each record.

The keys are as ``Fernet.generate_key()`` makes them, and rotated as by ``MultiFernet``. Fernet itself does not bind a
ciphertext to its place: docs/decisions.md, 18.
"""

import os
import re
from base64 import urlsafe_b64decode
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol.contents import Slot
from celery_idempotent.stores.wrappers import NotDecrypted

_VERSION = b"\x01"
_ID = 4
_NONCE = 12
_HEAD = len(_VERSION) + _ID
"""Bytes. A ciphertext is: version, id of the key, nonce, what was encrypted, and the tag."""

_SHORTEST = _HEAD + _NONCE + 16
"""Bytes of a ciphertext in which nothing is encrypted: a tag has 16."""

_KEY = re.compile(rb"[A-Za-z0-9_-]{43}=")
"""32 bytes in URL-safe Base64."""


class KeyRing:
    """A cipher by one key or a list of keys, text or bytes: the first encrypts, all decrypt.

    Raises:
        PolicyError: They are none; what was given is not told.
    """

    def __init__(self, keys: Any) -> None:
        given = keys if isinstance(keys, list | tuple) else [keys]
        if not given:
            raise PolicyError("idempotency_cipher", "[]", f"there must be a key at least; {_REMEDY}")
        ring = [_Key(_secret(each, number)) for number, each in enumerate(given, 1)]
        self._first = ring[0]
        self._by_id = {each.id: each for each in reversed(ring)}

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(each.hex() for each in self._by_id)})"

    def encrypt(self, clear: bytes, slot: Slot) -> bytes:
        """``clear`` encrypted for ``slot``, with a fresh nonce."""
        head, nonce = _VERSION + self._first.id, os.urandom(_NONCE)
        return head + nonce + self._first.of(slot).encrypt(nonce, clear, head + bytes(slot))

    def decrypt(self, encrypted: bytes, slot: Slot) -> bytes:
        """What was encrypted; raises :class:`NotDecrypted`, also if it was encrypted for another slot."""
        head, rest = encrypted[:_HEAD], encrypted[_HEAD:]
        if head[:1] != _VERSION or len(head) < _HEAD:
            raise NotDecrypted("it is damaged, or a newer version encrypted it")
        key = self._by_id.get(head[1:])
        if key is None:
            here = ", ".join(each.hex() for each in self._by_id)
            raise NotDecrypted(
                f"it is encrypted with the key {head[1:].hex()}, and here are {here}; add that key to the end of "
                "idempotency_cipher"
            )
        try:
            return key.of(slot).decrypt(rest[:_NONCE], rest[_NONCE:], head + bytes(slot))
        except (InvalidTag, ValueError) as error:
            raise NotDecrypted(
                f"it is not what the key {key.id.hex()} encrypted for this place: somebody has changed or cut it, or "
                "moved it here from another; look at the record"
            ) from error

    def is_from(self, data: bytes) -> bool:
        """Whether ``data`` looks like a ciphertext, of whichever key."""
        return data[:1] == _VERSION and len(data) >= _SHORTEST


class _Key:
    """One key: what it is called where it is told, and the cipher for each record."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = self._derived(b"id", _ID)

    def of(self, slot: Slot) -> AESGCM:
        """With a key for each record, which has few ciphertexts: random nonces of 96 bits are for 2^32 of them."""
        return AESGCM(self._derived(b"record\0" + slot.key.encode("utf-8", "surrogatepass"), 32))

    def _derived(self, purpose: bytes, length: int) -> bytes:
        return HKDFExpand(SHA256(), length, b"celery-idempotent cipher\0" + purpose).derive(self._secret)


_REMEDY = "cryptography.fernet.Fernet.generate_key() makes one"


def _secret(key: Any, number: int) -> bytes:
    try:
        text = key.encode() if isinstance(key, str) else bytes(key) if isinstance(key, bytes) else b""
    except UnicodeError:
        text = b""
    if not _KEY.fullmatch(text.strip()):
        raise PolicyError("idempotency_cipher", "...", f"key {number} is not 32 bytes in URL-safe Base64; {_REMEDY}")
    return urlsafe_b64decode(text.strip())
