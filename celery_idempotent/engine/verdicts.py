"""What becomes of an operation that cannot go on by itself: a person's word or, when nobody comes back for it, its age.

What was given back, or begun, and never delivered again never expires by itself, as it holds what a later delivery
needs: finished steps and the fingerprint. Whoever deletes it says that its message will not come any more; if it does,
the body runs from the beginning. Where that would break a promise, a person decides.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeAlias, assert_never

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import PolicyError
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import Slot, discard, pack
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status, damaged
from celery_idempotent.protocol.steps import only_finished
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import Action, given, kept_until


def recorded(store: Store, key: str, seen_revision: str | None = None) -> Record:
    """What is recorded under ``key``; with ``seen_revision``, where time has passed since, what a person looked at."""
    seen = store.get(key)
    if seen is None:
        raise _refused(key, "nothing is recorded under it")
    if seen_revision not in (None, seen.revision):
        raise _changed(key)
    return seen


def judge(
    store: Store,
    seen: Record,
    action: Action,
    *,
    grace: int = 0,
    retain: int = 0,
    keep: int = 0,
    by: str = "",
    reason: str = "",
    result: Encoded | None = None,
) -> Record:
    """Give a verdict on ``seen``, as it is stored; gives the record as it is now. All times are milliseconds.

    After ``rerun`` steps that finished stay finished. Those that began and did not end are the ones in doubt: they may
    run again. ``forget`` leaves, until the store deletes it, who has forgotten it and why, and the fencing token, so
    that the next one is larger. ``keep`` is for how long the verdict stays at least. After ``StoreUnavailable`` look at
    the record before repeating.
    """
    now, revision = store.now(), new_nonce()
    require(action, seen, grace=grace, now=now)
    kept = 0 if action is Action.FORGET else keep
    judged = seen.but(verdict=given(action, seen, now, by=by, reason=reason, keep=kept))
    match action:
        case Action.COMPLETED:
            assert result is not None
            packed = pack(store, result, Slot(seen.key, "result"))
            if packed.write is not None:
                packed.write()
            new = protocol.ended(judged, Status.COMPLETED, now, retain, revision, packed.encoded)
        case Action.RERUN:
            try:
                new = protocol.released(judged.but(steps=only_finished(seen.steps)), now, revision)
            except ValueError as error:
                raise damaged(seen.key, error, store=repr(store)) from error
        case Action.RELEASE:
            new = protocol.released(judged, now, revision)
        case Action.FORGET:
            new = protocol.forgotten(judged, now, revision)
        case unreachable:
            assert_never(unreachable)
    stored = store.swap(new, seen.revision)
    if stored is None or stored.revision != revision:
        raise _changed(seen.key)
    if action is Action.FORGET:
        discard(store, seen)
    return stored


def _changed(key: str) -> PolicyError:
    return _refused(key, "somebody else changed the record meanwhile; look again")


def fitting(record: Record, *, grace: int, now: int) -> list[Action]:
    """The verdicts that ``record`` can take at ``now``, ``grace`` milliseconds after a lease included."""
    return [action for action in Action if not _unfit(action, record, grace, now)]


def require(action: Action, seen: Record, *, grace: int, now: int) -> None:
    """Refuse a verdict that ``seen`` cannot take: another one fits it, or its body may be alive."""
    if why := _unfit(action, seen, grace, now):
        raise _refused(seen.key, why)


def _unfit(action: Action, seen: Record, grace: int, now: int) -> str:
    """Why ``seen`` cannot take that verdict; empty where it can."""
    is_unknown, is_running = seen.status is Status.UNKNOWN, seen.status is Status.IN_PROGRESS
    remaining, ahead = seen.lease_until + grace - now, seen.fencing_token - now
    if action in (Action.COMPLETED, Action.RERUN):
        return "" if is_unknown else f"only an UNKNOWN outcome takes a verdict; it is {seen.status}"
    if is_unknown:
        return "its outcome is UNKNOWN; check the receiver, then resolve it"
    if action is Action.RELEASE and not is_running:
        return f"only what is IN_PROGRESS can be released; it is {seen.status}"
    if action is Action.RELEASE and remaining > 0:
        alive = f"the body may be alive on {seen.worker}: its lease and grace run for another {remaining} ms"
        return f"{alive}; release it when they are over"
    if action is Action.FORGET and is_running:
        return "an attempt owns it; wait for its end, or release it once its lease is over"
    if action is Action.FORGET and ahead > 0:
        # A store may delete the record at once, and the next token would be the time of its claim.
        return f"its fencing token is {ahead} ms ahead of the store's clock; forget it after that time"
    return ""


def _refused(key: str, why: str) -> PolicyError:
    return PolicyError("key", repr(key), why)


PolicyOf: TypeAlias = Callable[[Record], Policy | None]
"""Gives the policy of a record's task; None where this app does not know it, or another app has made the record."""

IN_DOUBT = "its attempt never ended, and its message never came back"


class Fate(StrEnum):
    """What becomes of an operation whose attempt never ended."""

    KEPT = "kept"
    DELETED = "deleted"
    IN_DOUBT = "in doubt"


def fate_of(record: Record, policy: Policy | None, *, now: int, age: int) -> Fate:
    """What becomes of ``record`` once its lease is over for ``age`` milliseconds.

    Under ``on_takeover="refuse"``, and where a step began and did not end, to forget it could repeat an effect. What
    proves a verdict stays.
    """
    if policy is None or record.status is not Status.IN_PROGRESS or kept_until(record) > now:
        return Fate.KEPT
    if record.lease_until + age > now:
        return Fate.KEPT
    try:
        all_ended = only_finished(record.steps) == record.steps
    except ValueError:
        return Fate.KEPT
    return Fate.DELETED if policy.on_takeover == "rerun" and all_ended else Fate.IN_DOUBT


def sweep_released(store: Store, *, age: int) -> Iterator[Record]:
    """Delete what was given back, or announced, and not touched for ``age`` milliseconds; each as it is gone."""
    now = store.now()
    for record in store.scan(status=Status.RELEASED):
        if record.updated_at < now - age and kept_until(record) <= now and store.delete(record.key, record.revision):
            yield record


def sweep_abandoned(store: Store, policy_of: PolicyOf, *, age: int) -> Iterator[tuple[Record, Fate]]:
    """End what was begun and never ended, by :func:`fate_of`; each as it is done."""
    for record in store.scan(status=Status.IN_PROGRESS):
        now = store.now()
        fate = fate_of(record, policy_of(record), now=now, age=age)
        if fate is Fate.DELETED and store.delete(record.key, record.revision):
            yield record, fate
        if fate is Fate.IN_DOUBT:
            doubtful = protocol.given_up(record, now, new_nonce(), IN_DOUBT)
            stored = store.swap(doubtful, record.revision)
            if stored is not None and stored.revision == doubtful.revision:
                yield record, fate
