"""Deleting what nobody comes back for: operations that were given back, or begun, and never delivered again.

They never expire by themselves, as they hold what a later delivery needs: finished steps and the fingerprint. Whoever
deletes one says that its message will not come any more; if it does, the body runs from the beginning. Where that
would break a promise, a person decides.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeAlias

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.operation import given_up
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import only_finished
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import kept_until

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
    if record.lease_until + policy.grace_ms + age > now:
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
            doubtful = given_up(record, now, new_nonce(), IN_DOUBT)
            stored = store.swap(doubtful, record.revision)
            if stored is not None and stored.revision == doubtful.revision:
                yield record, fate
