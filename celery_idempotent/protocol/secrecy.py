"""Encrypted records as a whole: what must be readable before anything runs, and what people are shown."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from celery_idempotent.protocol.cipher import SEALED, Cipher, Slot, legible, opened, refuse_clear, require_label, shown
from celery_idempotent.protocol.codec import Encoded, failure_slot, result_slot, unsealed
from celery_idempotent.protocol.objects import CONTENT_TYPE, Pointer, pointer_in
from celery_idempotent.protocol.record import Record, RecordUnreadable, Status, damaged
from celery_idempotent.protocol.steps import Finished, from_plain, to_plain


def step_slot(key: str, name: str) -> Slot:
    """Where the result of a step belongs."""
    return Slot(key, "result", name)


def require_readable(cipher: Cipher | None, record: Record) -> None:
    """Refuse a record with which a body must not run here: not all that it is going on from can be decrypted.

    Raises:
        RecordUnreadable: Its label or the result of a step is encrypted, and there is no key for it here; or that
            result is clear, and must not be.
    """
    require_label(cipher, record)
    every = cipher is not None and cipher.is_required
    for name, plain in record.steps.items():
        if isinstance(plain, Mapping) and (every or plain.get("content_type") in (SEALED, CONTENT_TYPE)):
            _require_step(cipher, record.key, name, plain)


def revealed(cipher: Cipher | None, record: Record) -> Record:
    """The record with all in clear for which there is a key here; to be read by people, and never written back."""
    clear = legible(cipher, record)
    steps = {name: _revealed_step(cipher, record.key, name, plain) for name, plain in record.steps.items()}
    if steps != record.steps:
        clear = clear.but(steps=steps)
    if record.result is None or record.content_type != SEALED:
        return clear
    slot = (failure_slot if record.status is Status.FAILED else result_slot)(record.key)
    try:
        outcome = unsealed(cipher, Encoded(record.result, record.content_type), slot)
    except RecordUnreadable:
        return clear
    return clear.but(result=outcome.data, content_type=outcome.content_type)


def _revealed_step(cipher: Cipher | None, key: str, name: str, plain: Any) -> Any:
    try:
        state = from_plain(plain)
        if not isinstance(state, Finished):
            return plain
        slot = step_slot(key, name)
        if state.result is None:
            return to_plain(replace(state, lost=shown(cipher, state.lost or "", slot.of_error)))
        return to_plain(Finished(unsealed(cipher, state.result, slot)))
    except (ValueError, RecordUnreadable):
        return plain


def _require_step(cipher: Cipher | None, key: str, name: str, plain: Mapping[str, Any]) -> None:
    try:
        state = from_plain(plain)
    except ValueError as error:
        raise damaged(key, error, store="idempotency_cipher") from error
    if not isinstance(state, Finished) or state.result is None:
        return
    slot, pointer = step_slot(key, name), _pointer_in(state.result)
    if pointer is None:
        unsealed(cipher, state.result, slot)
    elif pointer.content_type != SEALED:
        refuse_clear(cipher, slot)
    elif cipher is None:
        opened(None, b"", slot)  # with another key it is refused when its object is read


def _pointer_in(result: Encoded) -> Pointer | None:
    with suppress(ValueError):  # whoever reads it says so
        return pointer_in(result)
    return None
