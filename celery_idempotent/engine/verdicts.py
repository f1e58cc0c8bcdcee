"""An operator's word on an operation that cannot go on by itself, written by compare-and-swap as everything is."""

import logging
from contextlib import suppress
from functools import partial
from typing import Any

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.engine.objects import pointers_of
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.codec import Codec, result_slot
from celery_idempotent.protocol.objects import LargeResults
from celery_idempotent.protocol.record import Record, Status, damaged
from celery_idempotent.protocol.steps import only_finished
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import Action, given

logger = logging.getLogger(__name__)


def completed(
    store: Store,
    codec: Codec,
    key: str,
    result: Any,
    *,
    retain: int,
    keep: int = 0,
    by: str = "",
    reason: str = "",
    seen_revision: str | None = None,
) -> Record:
    """State that the effect of an UNKNOWN operation happened; every later delivery is answered with ``result``.

    ``retain``, for which the outcome counts, and ``keep``, for which the verdict stays, are milliseconds. ``by`` and
    ``reason`` are kept with the record. ``seen_revision`` is what the person looked at, where time has passed since;
    None: judge whatever is recorded now. After ``StoreUnavailable`` look again before repeating.
    """
    encoded = codec.encode(result, result_slot(key))
    seen = _unknown(store, key, seen_revision)
    now = store.now()
    judged = seen.but(verdict=given(Action.COMPLETED, seen, now, by=by, reason=reason, keep=keep))
    return _write(store, seen, protocol.ended(judged, Status.COMPLETED, now, retain, new_nonce(), encoded))


def rerun(
    store: Store, key: str, *, keep: int = 0, by: str = "", reason: str = "", seen_revision: str | None = None
) -> Record:
    """State that the effect did not happen; the next delivery runs the body. Raises as :func:`completed` does.

    Steps that finished stay finished. Those that began and did not end are the ones in doubt: they may run again.
    """
    seen = _unknown(store, key, seen_revision)
    now = store.now()
    try:
        undoubted = seen.but(
            steps=only_finished(seen.steps), verdict=given(Action.RERUN, seen, now, by=by, reason=reason, keep=keep)
        )
    except ValueError as error:
        raise damaged(key, error, store=repr(store)) from error
    return _write(store, seen, protocol.released(undoubted, now, new_nonce()))


def release(
    store: Store,
    key: str,
    *,
    grace: int,
    keep: int = 0,
    by: str = "",
    reason: str = "",
    seen_revision: str | None = None,
) -> Record:
    """Give back the claim of an attempt that never ended; the next delivery runs the body.

    Under ``on_takeover="refuse"`` this states that the effect did not happen: the next delivery would otherwise mark it
    UNKNOWN. Under ``"rerun"`` the next delivery runs without it, too. Refused until the lease and ``grace``, in
    milliseconds, are over: a body may be alive.
    """
    seen = recorded(store, key, seen_revision)
    now = store.now()
    require_abandoned(seen, grace=grace, now=now)
    judged = seen.but(verdict=given(Action.RELEASE, seen, now, by=by, reason=reason, keep=keep))
    return _write(store, seen, protocol.released(judged, now, new_nonce()))


def forget(
    store: Store,
    key: str,
    *,
    by: str = "",
    reason: str = "",
    seen_revision: str | None = None,
    large: LargeResults | None = None,
) -> Record:
    """Forget an outcome or a released record on purpose; the next delivery is a new operation.

    Nothing of the call stays: no result, error, label, task id, fingerprint or step. What stays, until the store
    deletes it, is who has forgotten it and why, and the fencing token, so that the next one is larger. Raises as
    :func:`completed` does. Results that are objects are deleted from ``large``; one that cannot be is told in the log.
    """
    seen = recorded(store, key, seen_revision)
    now = store.now()
    require_forgettable(seen, now=now)
    verdict = given(Action.FORGET, seen, now, by=by, reason=reason)
    forgotten = _write(store, seen, protocol.forgotten(seen, now, new_nonce()).but(verdict=verdict))
    if large is not None:
        for pointer in pointers_of(seen):
            _delete(large, pointer.name, key)
    return forgotten


def _delete(large: LargeResults, name: str, key: str) -> None:
    try:
        large.objects.delete(name)
    except StoreUnavailable as error:
        say(logger.warning, "object_left", page="log-lines-workers", key=key, object=name, reason=error)


def fitting(record: Record, *, grace: int, now: int) -> list[Action]:
    """The verdicts that ``record`` can take at ``now``; ``grace`` is its policy's, both in milliseconds."""
    refusals = (
        ((Action.COMPLETED, Action.RERUN), require_unknown),
        ((Action.RELEASE,), partial(require_abandoned, grace=grace, now=now)),
        ((Action.FORGET,), partial(require_forgettable, now=now)),
    )
    fits: list[Action] = []
    for actions, require in refusals:
        with suppress(PolicyError):
            require(record)
            fits += actions
    return fits


def require_forgettable(seen: Record, *, now: int) -> None:
    """Refuse to forget what may still run, or what a person has to judge first. Raises as :func:`forget` does."""
    if seen.status is Status.UNKNOWN:
        raise PolicyError(
            "key", repr(seen.key), "its outcome is UNKNOWN; resolve it first", see="operators#the-outcome-is-unknown"
        )
    if seen.status is Status.IN_PROGRESS:
        raise PolicyError(
            "key",
            repr(seen.key),
            "an attempt owns it; wait for its end, or release it once its lease is over",
            see="operators#the-body-may-be-running",
        )
    if seen.fencing_token > now:
        # A store may delete the record at once, and the next token would be the time of its claim.
        raise PolicyError(
            "key",
            repr(seen.key),
            f"its fencing token is {seen.fencing_token - now} ms ahead of the store's clock; forget it after that time",
            see="operators#it-is-too-early-to-forget",
        )


def require_abandoned(seen: Record, *, grace: int, now: int) -> None:
    """Refuse to release what is not in progress, or whose body may be alive. Raises as :func:`release` does."""
    if seen.status is Status.UNKNOWN:
        raise PolicyError(
            "key",
            repr(seen.key),
            "its outcome is UNKNOWN; check the receiver, then resolve it",
            see="operators#the-outcome-is-unknown",
        )
    if seen.status is not Status.IN_PROGRESS:
        raise PolicyError(
            "key",
            repr(seen.key),
            f"only what is IN_PROGRESS can be released; it is {seen.status}",
            see="operators#the-record-takes-another-verdict",
        )
    remaining = seen.lease_until + grace - now
    if remaining > 0:
        raise PolicyError(
            "key",
            repr(seen.key),
            f"the body may be alive on {seen.worker}: its lease and grace run for another {remaining} ms; "
            "release it when they are over",
            see="operators#the-body-may-be-running",
        )


def require_unknown(seen: Record) -> None:
    """Refuse a verdict on what is not UNKNOWN. Raises as :func:`completed` does."""
    if seen.status is not Status.UNKNOWN:
        raise PolicyError(
            "key",
            repr(seen.key),
            f"only an UNKNOWN outcome takes a verdict; it is {seen.status}",
            see="operators#the-record-takes-another-verdict",
        )


def _unknown(store: Store, key: str, seen_revision: str | None) -> Record:
    seen = recorded(store, key, seen_revision)
    require_unknown(seen)
    return seen


def recorded(store: Store, key: str, seen_revision: str | None = None) -> Record:
    """What is recorded under ``key``. Raises as :func:`completed` does."""
    seen = store.get(key)
    if seen is None:
        raise PolicyError("key", repr(key), "nothing is recorded under it", see="operators#nothing-is-recorded")
    if seen_revision not in (None, seen.revision):
        raise _changed(key)
    return seen


def _write(store: Store, seen: Record, new: Record) -> Record:
    stored = store.swap(new, seen.revision)
    if stored is None or stored.revision != new.revision:
        raise _changed(new.key)
    return stored


def _changed(key: str) -> PolicyError:
    return PolicyError(
        "key",
        repr(key),
        "somebody else changed the record meanwhile; look again",
        see="operators#somebody-else-changed-the-record",
    )
