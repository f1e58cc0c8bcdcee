"""Outcomes to bytes and back, by kombu's serialisers and under the app's own ``accept_content``."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kombu import serialization

from celery_idempotent.errors import ReplayedFailure

__all__ = ["Codec", "Encoded", "Kept", "describe"]

_MAX_MESSAGE = 2_000
"""Characters of an exception's message that are kept; people read them, nothing depends on them."""

_MAX_FAILURE = 50_000
"""Length of an encoded failure above which its arguments are dropped; every store has room for the rest."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An outcome as a store keeps it."""

    data: str | bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What becomes of a result.

    Args:
        encoded: What is recorded; None if it cannot be kept.
        value: What the first caller gets: the same as every replay, if there will be one.
        lost: Why nothing is recorded.
    """

    encoded: Encoded | None
    value: Any
    lost: str | None


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes outcomes.

    Args:
        serializer: Name of kombu's serialiser for new outcomes.
        accept: Content types that may be decoded. What is not in here is never decoded, so nothing is
            unpickled from a store unless the app accepts pickle.
    """

    serializer: str
    accept: frozenset[str]

    def encode(self, value: Any) -> Encoded:
        """``value`` encoded.

        Raises:
            kombu.exceptions.EncodeError: It cannot be.
        """
        content_type, _, data = serialization.dumps(value, self.serializer)
        return Encoded(data, content_type)

    def decode(self, encoded: Encoded) -> Any:
        """The value that was encoded.

        Raises:
            kombu.exceptions.ContentDisallowed: The app does not accept its content type.
            kombu.exceptions.DecodeError: The data is not what its content type says.
        """
        encoding = "utf-8" if isinstance(encoded.data, str) else "binary"
        return serialization.loads(encoded.data, encoded.content_type, encoding, accept=self.accept)

    def keep(self, value: Any) -> "Kept":
        """``value`` as it is recorded and as it reads back; never raises, as the effect has happened."""
        try:
            encoded = self.encode(value)
            return Kept(encoded, self.decode(encoded), None)
        except Exception as error:  # noqa: BLE001 - nothing about a result may undo its effect
            return Kept(None, value, f"not encodable: {describe(error)}")

    def encode_failure(self, error: BaseException) -> Encoded:
        """``error`` encoded so that a replay can raise an equal one; arguments only if they are encodable."""
        description = {
            "module": type(error).__module__,
            "type": type(error).__qualname__,
            "message": describe(error),
        }
        try:
            encoded = self.encode({**description, "args": list(error.args)})
            self.decode(encoded)
        except Exception:  # noqa: BLE001 - whatever an argument's own encoding raises, the failure stays recorded
            return self.encode(description)
        return encoded if len(encoded.data) <= _MAX_FAILURE else self.encode(description)

    def decode_failure(self, encoded: Encoded | None, key: str) -> BaseException:
        """The failure to raise on a replay: of the recorded type if that is loaded, else ``ReplayedFailure``."""
        description = {} if encoded is None else self.decode(encoded)
        return _rebuilt(description) or ReplayedFailure(
            key,
            f"{description.get('module', '?')}.{description.get('type', '?')}",
            description.get("message", ""),
        )


def describe(error: BaseException) -> str:
    """A readable, bounded text about ``error`` that every store can keep: valid UTF-8, no NUL."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not replace the failure it describes
        text = "(no message)"
    return text[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _rebuilt(description: Mapping[str, Any]) -> BaseException | None:
    """The described exception, if its type is loaded here and takes the arguments; nothing is imported."""
    if "args" not in description:
        return None
    found: Any = sys.modules.get(description["module"])
    for name in description["type"].split("."):
        found = getattr(found, name, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        return None
    try:
        return found(*description["args"])
    except Exception:  # noqa: BLE001 - a constructor may raise anything; the caller has a fallback
        return None
