"""An operator's verdict on an operation whose outcome is UNKNOWN; the only way out of that state."""

from collections.abc import Callable
from typing import Any

from celery_idempotent import protocol
from celery_idempotent.attempt import new_nonce
from celery_idempotent.codec import Codec
from celery_idempotent.errors import PolicyError
from celery_idempotent.record import Record, Status
from celery_idempotent.store import Store

__all__ = ["completed", "rerun"]


def completed(store: Store, codec: Codec, key: str, result: Any, *, retain: int) -> Record:
    """State that the effect happened; every later delivery is answered with ``result``.

    Args:
        store: Where the record lives.
        codec: Encodes the result.
        key: The idempotency key.
        result: What to replay.
        retain: Milliseconds to replay it for.

    Raises:
        PolicyError: The outcome of ``key`` is not UNKNOWN, or changed meanwhile.
        StoreUnavailable: No certain answer; look again before repeating.
    """
    encoded = codec.encode(result)
    return _decide(
        store,
        key,
        lambda record: protocol.completed(
            record, store.now(), retain, new_nonce(), data=encoded.data, content_type=encoded.content_type
        ),
    )


def rerun(store: Store, key: str) -> Record:
    """State that the effect did not happen; the next delivery runs the body. Raises as :func:`completed` does."""
    return _decide(store, key, lambda record: protocol.released(record, store.now(), new_nonce()))


def _decide(store: Store, key: str, verdict: Callable[[Record], Record]) -> Record:
    seen = store.get(key)
    if seen is None or seen.status is not Status.UNKNOWN:
        found = "nothing is recorded under it" if seen is None else f"it is {seen.status}"
        raise PolicyError("key", repr(key), f"only an UNKNOWN outcome takes a verdict; {found}")
    new = verdict(seen)
    stored = store.swap(new, seen.revision)
    if stored is None or stored.revision != new.revision:
        raise PolicyError("key", repr(key), "somebody else changed the record meanwhile; look again")
    return stored
