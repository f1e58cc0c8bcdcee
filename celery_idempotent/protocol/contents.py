"""What a record keeps of results: as it was encoded, or in the form that a store around the store gives it.

Such a form is a content type of this library's own, which no codec decodes: encrypted, or a pointer to an object. A
store that knows one has :class:`PackingStore`'s methods; with any other store the functions here do nothing, and refuse
what somebody else has packed.
"""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import ENCRYPTED_TEXT, Record, RecordUnreadable, Status, damaged
from celery_idempotent.protocol.steps import Finished, from_plain
from celery_idempotent.protocol.store import Store

ENCRYPTED = "application/vnd.celery-idempotent.encrypted"
"""Content type of what is encrypted; the one that it had before is encrypted with it."""

OBJECT = "application/vnd.celery-idempotent.object+json"
"""Content type of a pointer to an object."""


class Slot(NamedTuple):
    """Where a content belongs: what is packed for one slot is accepted at no other.

    ``key`` is the operation's, or of a message in the outbox its task id; ``step`` is empty for what is no step's.
    """

    key: str
    field: str
    step: str = ""

    def __bytes__(self) -> bytes:
        """The same for no two slots."""
        return json.dumps([self.key, self.field, self.step]).encode()

    def __str__(self) -> str:
        return f"the {self.field}{f' of step {self.step!r}' if self.step else ''} of {self.key}"


def outcome_slot(record: Record) -> Slot:
    """Where the outcome of an operation belongs: a failure is no result, also where somebody changes the status."""
    return Slot(record.key, "failure" if record.status is Status.FAILED else "result")


class ContentLost(Exception):
    """What was recorded is gone for good, or is not what was written; the text says which."""


class Packed(NamedTuple):
    """A content in the form in which a record keeps it; valid once ``write``, if there is one, has returned.

    To write it again is safe.
    """

    encoded: Encoded
    write: Callable[[], None] | None = None


class PackingStore(Protocol):
    """A store that keeps contents of records in a form of its own."""

    def pack(self, encoded: Encoded, slot: Slot, *, small: bool = False) -> Packed | None:
        """``encoded`` as a record is to keep it at ``slot``; asks nobody.

        Its ``write`` raises ``StoreMisconfigured`` for what will never be written until somebody changes something, and
        ``StoreUnavailable`` for no answer. ``small``: in less room than without it; None if it cannot be.
        """

    def unpack(self, encoded: Encoded, slot: Slot) -> Encoded:
        """What was given to :meth:`pack` for that slot; what nobody has packed, as it is.

        Raises:
            ContentLost: It is gone, or not what was written.
            RecordUnreadable: It cannot be read here.
            StoreUnavailable: No answer.
        """

    def reveal(self, record: Record) -> Record:
        """The record with all in clear that can be, without asking anybody; for people, never to be written back."""

    def require(self, encoded: Encoded, slot: Slot) -> None:
        """Raise ``RecordUnreadable`` if :meth:`unpack` certainly would; asks nobody."""

    def discard(self, record: Record) -> None:
        """Delete what is kept elsewhere of a record that is forgotten; raises nothing."""


def pack(store: Store, encoded: Encoded, slot: Slot) -> Packed:
    packing = getattr(store, "pack", None)
    packed: Packed = packing(encoded, slot) if packing is not None else Packed(encoded)
    return packed


def pack_small(store: Store, encoded: Encoded, slot: Slot) -> Packed | None:
    packing = getattr(store, "pack", None)
    packed: Packed | None = packing(encoded, slot, small=True) if packing is not None else None
    return packed


def is_packed(store: Store, encoded: Encoded) -> bool:
    """Whether ``encoded`` may have another form than the one that a codec gave it."""
    return hasattr(store, "unpack") or encoded.content_type in (OBJECT, ENCRYPTED)


def unpack(store: Store, encoded: Encoded, slot: Slot) -> Encoded:
    unpacking = getattr(store, "unpack", None)
    if unpacking is not None:
        encoded = unpacking(encoded, slot)
    if encoded.content_type == OBJECT:
        why = f"{slot} is an object, and the setting is not there; set it as where it was written"
        raise StoreMisconfigured("idempotency_large_results", "get", why)
    if encoded.content_type == ENCRYPTED:
        raise _without_key(slot)
    return encoded


def reveal(store: Store, record: Record) -> Record:
    """See :meth:`PackingStore.reveal`."""
    revealing = getattr(store, "reveal", None)
    return revealing(record) if revealing is not None else record


def discard(store: Store, record: Record) -> None:
    discarding = getattr(store, "discard", None)
    if discarding is not None:
        discarding(record)


def require_readable(store: Store, record: Record) -> None:
    """Refuse a record with which a body must not run here, as it cannot read all that it would go on from.

    Its label or the result of a step is encrypted, and there is no key for it here; or a step is damaged, or in clear
    where it must not be. What is kept elsewhere is not fetched for it.
    """
    if record.label.startswith(ENCRYPTED_TEXT):
        raise _without_key(Slot(record.key, "label"))
    require = getattr(store, "require", _require_clear)
    for name, plain in record.steps.items():
        try:
            state = from_plain(plain)
        except ValueError as error:
            raise damaged(record.key, error, store=repr(store)) from error
        if isinstance(state, Finished) and state.result is not None:
            require(state.result, Slot(record.key, "result", name))


def _require_clear(encoded: Encoded, slot: Slot) -> None:
    pointer = pointer_in(encoded)
    if ENCRYPTED in (encoded.content_type, pointer and pointer.content_type):
        raise _without_key(slot)


def _without_key(slot: Slot) -> RecordUnreadable:
    why = "it is encrypted, and no key here opens it; set idempotency_cipher as its writers have it"
    return RecordUnreadable("idempotency_cipher", f"decrypting {slot}", why)


class Pointer(NamedTuple):
    """What a record says of an object, by its whole name: a change of the prefix does not lose what is recorded."""

    name: str
    size: int
    sha256: str
    content_type: str
    is_text: bool

    def to_encoded(self) -> Encoded:
        """The pointer as a record keeps it, in place of the result."""
        plain = {
            "name": self.name,
            "size": self.size,
            "sha256": self.sha256,
            "content_type": self.content_type,
            "text": self.is_text,
        }
        return Encoded(json.dumps(plain), OBJECT)


def pointer_in(encoded: Encoded) -> Pointer | None:
    """The pointer that stands in a record in place of a result; None where there is none that can be read."""
    if encoded.content_type != OBJECT:
        return None
    try:
        plain = json.loads(encoded.data)
    except (ValueError, RecursionError):
        return None
    match plain:
        case {
            "name": str(name),
            "size": int(size),
            "sha256": str(digest),
            "content_type": str(content_type),
            "text": bool(is_text),
        }:
            return Pointer(name, size, digest, content_type, is_text)
        case _:
            return None


def contents_of(record: Record) -> Iterator[tuple[str, Encoded]]:
    """The contents of the record: of each step that has a result, by its name, and its own, by the empty name."""
    if record.result is not None and record.content_type is not None:
        yield "", Encoded(record.result, record.content_type)
    for name, plain in record.steps.items():
        try:
            state = from_plain(plain)
        except ValueError:
            continue
        if isinstance(state, Finished) and state.result is not None:
            yield name, state.result
