"""The contracts of an outage, and of what a store may offer beyond the seven methods; each of those has its protocol.

A store that offers a capability gets a second subclass, with the same fixture ``store``.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import PurgeableStore, Store, VerifiableStore
from celery_idempotent.testing.contract.parallel import race
from celery_idempotent.testing.contract.records import a_record, a_rival, reply_of

_ROUNDS = 10


class _Purgeable(Store, PurgeableStore, Protocol):
    pass


class _Verifiable(Store, VerifiableStore, Protocol):
    pass


class OutageContract:
    """What a store must do when its server is gone; needs a fixture ``unreachable_store``.

    Give it a store whose connections are refused, and in a second subclass one whose server accepts them and
    never answers: that is what a lost network looks like.
    """

    answers_within: ClassVar[float] = 30.0
    """Seconds that one call may take, all tries of the driver included. A claim that waits longer than a
    lease, 60 s by default, is of no use to anybody."""

    def test_no_answer_is_no_answer(self, unreachable_store: Store) -> None:
        """No absence, no refusal, no empty list: the caller learns that nothing is certain, and the driver's error."""
        store, record = unreachable_store, a_record()
        self._unavailable(
            partial(store.swap, record, None),
            partial(store.swap, record, "a revision"),
            partial(store.get, record.key),
            partial(store.delete, record.key, "a revision"),
            lambda: list(store.scan()),
        )

    def test_closing_without_a_server_is_harmless(self, unreachable_store: Store) -> None:
        """A process must be able to end."""
        unreachable_store.close()
        unreachable_store.close()

    def _unavailable(self, *calls: Callable[[], object]) -> None:
        for call in calls:
            asked = time.monotonic()
            raised = reply_of(call)
            assert time.monotonic() - asked <= self.answers_within
            assert isinstance(raised, StoreUnavailable), f"answered {raised!r} although there is no server"
            assert not isinstance(raised, StoreMisconfigured), f"nobody needs to change a setting: {raised}"
            assert raised.__cause__ is not None, f"the driver's error is not the cause of: {raised}"


class PurgeableContract:
    """Tests of :class:`~celery_idempotent.stores.PurgeableStore`; needs a fixture ``store`` with a provisioned one."""

    def test_purge_deletes_forgotten_outcomes_only(self, store: _Purgeable) -> None:
        """Outcomes past their expiry go; others stay, as does whatever has no expiry, its lease long over."""
        seconds = store.now() // 1000
        forgotten = [_outcome(store, status, seconds - 5) for status in (Status.COMPLETED, Status.FAILED)]
        kept = [_outcome(store, status, seconds + 600) for status in (Status.COMPLETED, Status.FAILED)]
        kept += [_written(store, replace(a_record(), status=status, lease_until=1, updated_at=1)) for status in Status]

        _purge_all(store)

        assert [store.get(each.key) for each in forgotten] == [None, None]
        assert [store.get(each.key) for each in kept] == kept

    def test_purge_keeps_to_its_limit(self, store: _Purgeable) -> None:
        """A batch is no larger than was asked, and what it reports is what it deleted."""
        forgotten = [_outcome(store, Status.COMPLETED, store.now() // 1000 - 5) for _ in range(7)]

        while remaining := sum(store.get(each.key) is not None for each in forgotten):
            deleted = store.purge(2)
            still_there = sum(store.get(each.key) is not None for each in forgotten)
            assert 0 <= remaining - still_there <= deleted <= 2
            assert deleted > 0, "nobody else writes, and yet nothing is deleted"

        assert isinstance(store.purge(1), int)

    def test_purge_lets_claims_win(self, store: _Purgeable) -> None:
        """A forgotten outcome that is claimed again while it is being purged is a claim, and stays."""
        for _ in range(_ROUNDS):
            forgotten = [_outcome(store, Status.COMPLETED, store.now() // 1000 - 5) for _ in range(8)]
            claims = [a_rival(each) for each in forgotten]
            calls: list[Callable[[], Any]] = [partial(store.purge, 100)] * 2
            calls += [partial(_claim, store, *each) for each in zip(forgotten, claims, strict=True)]

            race(calls)
            _purge_all(store)

            assert [store.get(each.key) for each in claims] == claims


class VerifiableContract:
    """Tests of :class:`~celery_idempotent.stores.VerifiableStore`; needs ``store`` and ``misconfigured_store``.

    The second is one that cannot work until somebody changes something: without its table, for instance, or
    without the permission to write.
    """

    def test_verify_accepts_a_working_store_and_writes_nothing(self, store: _Verifiable) -> None:
        """A worker may start; the check leaves no trace, however often it is made."""
        record = _written(store, a_record())
        before = {each.key for each in store.scan()}

        for _ in range(3):
            store.verify()

        assert {each.key for each in store.scan()} <= before
        assert store.get(record.key) == record

    def test_verify_refuses_a_store_that_cannot_work(self, misconfigured_store: _Verifiable) -> None:
        """A worker does not start, and is told what a claim would be told."""
        for ask in (misconfigured_store.verify, partial(misconfigured_store.swap, a_record(), None)):
            assert isinstance(reply_of(ask), StoreMisconfigured)


def _outcome(store: Store, status: Status, expires_at: int) -> Record:
    return _written(store, replace(a_record(), status=status, result="1", expires_at=expires_at))


def _written(store: Store, record: Record) -> Record:
    assert store.swap(record, None) == record
    return record


def _claim(store: Store, forgotten: Record, claim: Record) -> None:
    """As a delivery claims a key whose outcome is forgotten: expecting what it saw, or nothing."""
    for expected in (None, forgotten.revision, None):
        stored = store.swap(claim, expected)
        if stored == claim:
            return
    raise AssertionError(f"neither the outcome nor its absence could be replaced; there is {stored}")


def _purge_all(store: _Purgeable) -> None:
    for _ in range(1000):
        deleted = store.purge(1000)
        assert 0 <= deleted <= 1000
        if not deleted:
            return
    raise AssertionError("a thousand purges, and every one of them deleted something")
