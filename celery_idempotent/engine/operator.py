"""An operator's word on an operation that cannot go on by itself, written by compare-and-swap as everything is."""

from dataclasses import replace
from typing import Any

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.codec import Codec
from celery_idempotent.protocol.record import Record, Status, damaged
from celery_idempotent.protocol.steps import only_finished
from celery_idempotent.protocol.store import Store


def completed(
    store: Store, codec: Codec, key: str, result: Any, *, retain: int, seen_revision: str | None = None
) -> Record:
    """State that the effect of an UNKNOWN operation happened; every later delivery is answered with ``result``.

    ``retain`` is milliseconds. ``seen_revision`` is what the person looked at, where time has passed since; None: judge
    whatever is recorded now. After ``StoreUnavailable`` look again before repeating.
    """
    encoded = codec.encode(result)
    seen = _unknown(store, key, seen_revision)
    new = protocol.ended(seen, Status.COMPLETED, store.now(), retain, new_nonce(), encoded)
    return _write(store, seen, new)


def rerun(store: Store, key: str, *, seen_revision: str | None = None) -> Record:
    """State that the effect did not happen; the next delivery runs the body. Raises as :func:`completed` does.

    Steps that finished stay finished. Those that began and did not end are the ones in doubt: they may run again.
    """
    seen = _unknown(store, key, seen_revision)
    try:
        undoubted = replace(seen, steps=only_finished(seen.steps))
    except ValueError as error:
        raise damaged(key, error, store=repr(store)) from error
    return _write(store, seen, protocol.released(undoubted, store.now(), new_nonce()))


def release(store: Store, key: str, *, grace: int, seen_revision: str | None = None) -> Record:
    """Give back the claim of an attempt that never ended; the next delivery runs the body.

    Under ``on_takeover="refuse"`` this states that the effect did not happen: the next delivery would otherwise mark it
    UNKNOWN. Under ``"rerun"`` the next delivery runs without it, too. Refused until the lease and ``grace``, in
    milliseconds, are over: a body may be alive.
    """
    seen = recorded(store, key, seen_revision)
    now = store.now()
    require_abandoned(seen, grace=grace, now=now)
    return _write(store, seen, protocol.released(seen, now, new_nonce()))


def require_abandoned(seen: Record, *, grace: int, now: int) -> None:
    """Refuse to release what is not in progress, or whose body may be alive. Raises as :func:`release` does."""
    if seen.status is Status.UNKNOWN:
        raise PolicyError("key", repr(seen.key), "its outcome is UNKNOWN; check the receiver, then resolve it")
    if seen.status is not Status.IN_PROGRESS:
        raise PolicyError("key", repr(seen.key), f"only what is IN_PROGRESS can be released; it is {seen.status}")
    remaining = seen.lease_until + grace - now
    if remaining > 0:
        raise PolicyError(
            "key",
            repr(seen.key),
            f"the body may be alive on {seen.worker}: its lease and grace run for another {remaining} ms; "
            "release it when they are over",
        )


def require_unknown(seen: Record) -> None:
    """Refuse a verdict on what is not UNKNOWN. Raises as :func:`completed` does."""
    if seen.status is not Status.UNKNOWN:
        raise PolicyError("key", repr(seen.key), f"only an UNKNOWN outcome takes a verdict; it is {seen.status}")


def _unknown(store: Store, key: str, seen_revision: str | None) -> Record:
    seen = recorded(store, key, seen_revision)
    require_unknown(seen)
    return seen


def recorded(store: Store, key: str, seen_revision: str | None = None) -> Record:
    """What is recorded under ``key``. Raises as :func:`completed` does."""
    seen = store.get(key)
    if seen is None:
        raise PolicyError("key", repr(key), "nothing is recorded under it")
    if seen_revision not in (None, seen.revision):
        raise _changed(key)
    return seen


def _write(store: Store, seen: Record, new: Record) -> Record:
    stored = store.swap(new, seen.revision)
    if stored is None or stored.revision != new.revision:
        raise _changed(new.key)
    return stored


def _changed(key: str) -> PolicyError:
    return PolicyError("key", repr(key), "somebody else changed the record meanwhile; look again")
