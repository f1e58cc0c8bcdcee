"""Records to swap, and what a call answers."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store, WriteFailed

_T = TypeVar("_T")

_TRIES = 200
"""Of a call that meets contention; a real store needs a few."""

LONG_AFTER = 4_000_000_000
"""An expiry in seconds, in the year 2096."""


def a_record() -> Record:
    """A record of a key of its own, as the first claim writes it."""
    return Record(
        key=f"orders.charge:1:{uuid4().hex}",
        status=Status.IN_PROGRESS,
        revision=new_nonce(),
        owner=new_nonce(),
        fencing_token=1_800_000_000_000,
        lease_until=1_800_000_060_000,
        fingerprint="f" * 64,
        attempts=1,
        created_at=1_800_000_000_000,
        updated_at=1_800_000_000_000,
        task="orders.charge",
        task_id=str(uuid4()),
        worker="celery@example",
        app="shop",
        process="0123456789abcdef:42:1800000",
        label="acme/1001",
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


def a_claim(store: Store, **fields: Any) -> Record:
    """A record that is stored, with other fields than :func:`a_record` has."""
    record = replace(a_record(), **fields)
    assert store.swap(record, None) == record
    return record


def a_completion(record: Record, result: str = "1") -> Record:
    """The record as its own attempt completes it."""
    return replace(
        record,
        status=Status.COMPLETED,
        revision=new_nonce(),
        result=result,
        content_type="application/json",
        expires_at=LONG_AFTER,
    )


def a_rival(record: Record) -> Record:
    """Another attempt's record of the same key."""
    return replace(a_record(), key=record.key)


def claim_over(store: Store, forgotten: Record, claim: Record) -> None:
    """Claim a key whose outcome is forgotten, as a delivery does: expecting what it saw, or nothing."""
    for expected in (None, forgotten.revision, None):
        stored = store.swap(claim, expected)
        assert stored in (claim, None if expected else forgotten), f"neither the claim nor what was there: {stored}"
        if stored == claim:
            return
    raise AssertionError("neither the outcome nor its absence could be replaced")


def reply_of(call: Callable[[], object]) -> object:
    """The ``StoreUnavailable`` or ``WriteFailed`` that ``call`` raises, or else what it returns."""
    try:
        return call()
    except (StoreUnavailable, WriteFailed) as error:
        return error


def ask_again(ask: Callable[[], _T]) -> _T:
    """What ``ask`` returns, asked again where the store gave up in favour of another."""
    for _ in range(_TRIES):
        with suppress(StoreUnavailable):  # in contention a store may give up; an attempt asks again, too
            return ask()
    return ask()
