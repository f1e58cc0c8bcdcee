"""Outcomes as they are given again, to a delivery or to a publisher; and what a body returns that is none yet."""

from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from contextlib import suppress
from typing import Any

from kombu.exceptions import KombuError

from celery_idempotent.errors import LeaseLost, ResultLost, SafeToRetry, StoreUnavailable
from celery_idempotent.protocol.codec import Codec, Encoded
from celery_idempotent.protocol.contents import ContentLost, outcome_slot, unpack
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store

OUR_OWN = (LeaseLost, StoreUnavailable)
"""What a body raises when it asks its attempt. Recorded as an outcome and replayed, it would look like an
outage of the replay's own, and be tried again for ever."""


def load(store: Store, record: Record) -> Record:
    """The record with its outcome as it was encoded; or without one, and why. Raises ``RecordUnreadable``."""
    encoded = _encoded(record)
    if encoded is None:
        return record
    try:
        outcome = unpack(store, encoded, outcome_slot(record))
    except ContentLost as error:
        return record.but(result=None, content_type=None, error=str(error))
    return record if outcome is encoded else record.but(result=outcome.data, content_type=outcome.content_type)


def result_of(codec: Codec, record: Record) -> Any:
    """The result of a completed operation whose record was loaded; ``ResultLost`` if there is none to decode here."""
    kept = _encoded(record)
    if kept is None:
        raise ResultLost(record.key, record.error or "no reason recorded")
    try:
        return codec.decode(kept)
    except KombuError as error:
        raise ResultLost(record.key, f"it cannot be decoded here: {codec.told(error)}") from error


def failure_of(codec: Codec, policy: Policy, record: Record, *, never: tuple[type[BaseException], ...]) -> Exception:
    """The failure to raise of an operation whose record was loaded; ``ResultLost`` if it cannot be decoded here.

    ``never`` are types that steer a caller, beside the library's own.
    """
    never = (SafeToRetry, *OUR_OWN, *never)
    try:
        return codec.decode_failure(_encoded(record), record.key, remembered=policy.outcomes, never=never)
    except KombuError as error:
        raise ResultLost(record.key, f"its failure cannot be decoded here: {codec.told(error)}") from error


def _encoded(record: Record) -> Encoded | None:
    if record.result is None or record.content_type is None:
        return None
    return Encoded(record.result, record.content_type)


def is_unfinished(value: Any) -> bool:
    """Whether it is a call that has still to run; it is closed, so that Python does not warn of it, too."""
    if type(value) in _FINISHED:
        return False  # asking an abstract class takes longer than all else here
    if isinstance(value, Coroutine | Generator):
        with suppress(Exception):
            value.close()
    return isinstance(value, Awaitable | Generator | AsyncGenerator)


_FINISHED = {type(None), bool, int, float, str, bytes, list, tuple, dict}
