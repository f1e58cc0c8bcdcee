"""The contract of ``swap`` for one caller, lost replies and late requests included."""

from dataclasses import replace

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract.base import StoreTests
from celery_idempotent.testing.contract.records import LONG_AFTER, a_record


class SwapContract(StoreTests):
    """Who wins, and what everybody is told."""

    def test_writes_where_there_is_nothing(self, store: Store) -> None:
        """A swap that expects no record writes and returns the new one."""
        record = a_record()

        stored = store.swap(record, None)

        assert stored == record
        assert store.get(record.key) == record

    def test_returns_what_is_there_instead_of_overwriting(self, store: Store) -> None:
        """A swap that expects no record and finds one changes nothing and returns it whole."""
        first = a_record()
        store.swap(first, None)

        stored = store.swap(replace(first, revision=new_nonce(), owner="intruder"), None)

        assert stored == first
        assert store.get(first.key) == first

    def test_replaces_the_expected_revision(self, store: Store) -> None:
        """A swap that expects the stored revision replaces the whole record, dropping fields that are gone."""
        first = replace(
            a_record(),
            takeovers=2,
            error="gone afterwards",
            steps={"charge": {"result": "ch_1"}},
            result="gone",
            content_type="text/plain",
        )
        store.swap(first, None)
        second = replace(
            first,
            revision=new_nonce(),
            takeovers=0,
            app="",
            process="",
            error=None,
            steps={},
            lease_until=7,
            fingerprint=None,
            result=None,
            content_type=None,
        )

        stored = store.swap(second, first.revision)

        assert stored == second
        assert store.get(first.key) == second

    def test_refuses_another_revision(self, store: Store) -> None:
        """A swap that expects a revision which is not the stored one changes nothing and returns the stored one."""
        first = replace(a_record(), revision="abcdef")
        store.swap(first, None)

        for other in ("no such revision", "ABCDEF", "abcdef ", "abcde", "abcdefg", first.owner):
            assert store.swap(replace(first, revision=new_nonce()), other) == first
        assert store.get(first.key) == first

    def test_never_creates_where_a_revision_was_expected(self, store: Store) -> None:
        """A swap that expects a revision writes nothing if the record has vanished."""
        record = a_record()

        assert store.swap(record, "a revision that was deleted") is None
        assert store.get(record.key) is None

    def test_absent_key_is_nothing(self, store: Store) -> None:
        """What was never written is not found, not deleted and not listed."""
        absent = a_record()

        assert store.get(absent.key) is None
        assert store.delete(absent.key, absent.revision) is False
        assert list(store.scan(task=absent.task_id)) == []

    def test_recognises_its_own_write_sent_twice(self, store: Store) -> None:
        """A swap repeated after a lost reply returns the caller's own revision, so the caller knows it won."""
        first = a_record()
        second = replace(first, revision=new_nonce())

        assert store.swap(first, None) == first
        assert store.swap(first, None) == first
        assert store.swap(second, first.revision) == second
        assert store.swap(second, first.revision) == second

    def test_write_sent_again_after_a_successor_reports_the_successor(self, store: Store) -> None:
        """A lost reply, then somebody else moves on: the repeated request overwrites nothing and returns theirs."""
        claimed = a_record()
        renewed = replace(claimed, revision=new_nonce(), lease_until=claimed.lease_until + 60_000)
        theirs = replace(renewed, revision=new_nonce(), owner=new_nonce(), attempts=2, takeovers=1)
        finished = replace(theirs, revision=new_nonce(), status=Status.COMPLETED, result="1", content_type="text/plain")
        store.swap(claimed, None)
        store.swap(renewed, claimed.revision)

        for successor, before in ((theirs, renewed), (finished, theirs)):
            assert store.swap(successor, before.revision) == successor
            assert store.swap(claimed, None) == successor
            assert store.swap(renewed, claimed.revision) == successor
            assert store.get(claimed.key) == successor

    def test_first_try_that_lands_after_a_later_one_takes_nothing_back(self, store: Store) -> None:
        """A write is tried again with a later lease and wins; its first try, landing at last, shortens no lease."""
        claimed = a_record()
        first_try = replace(claimed, revision=new_nonce(), lease_until=claimed.lease_until + 1_000)
        second_try = replace(
            first_try, lease_until=claimed.lease_until + 60_000, updated_at=claimed.updated_at + 59_000
        )
        store.swap(claimed, None)
        assert store.swap(second_try, claimed.revision) == second_try

        assert store.swap(first_try, claimed.revision) == second_try

        assert store.get(claimed.key) == second_try

    def test_late_request_writes_nothing(self, store: Store) -> None:
        """A request that arrives after others went on, never having been applied before, changes nothing."""
        claimed = a_record()
        store.swap(claimed, None)
        late_claim = replace(a_record(), key=claimed.key)
        late_completion = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, result="late")
        released = replace(claimed, revision=new_nonce(), status=Status.RELEASED)
        theirs = replace(claimed, revision=new_nonce(), owner=new_nonce(), attempts=2)
        store.swap(released, claimed.revision)
        store.swap(theirs, released.revision)

        assert store.swap(late_completion, claimed.revision) == theirs
        assert store.swap(late_claim, None) == theirs
        assert store.delete(claimed.key, claimed.revision) is False
        assert store.get(claimed.key) == theirs

    def test_late_renewal_does_not_undo_its_own_completion(self, store: Store) -> None:
        """Not even the same attempt's earlier request counts once the attempt went on."""
        claimed = a_record()
        late_renewal = replace(claimed, revision=new_nonce(), lease_until=claimed.lease_until + 60_000)
        completed = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, expires_at=LONG_AFTER)
        store.swap(claimed, None)
        store.swap(completed, claimed.revision)

        assert store.swap(late_renewal, claimed.revision) == completed
        assert store.swap(claimed, None) == completed
        assert store.get(claimed.key) == completed

    def test_late_request_does_not_revive_a_deleted_record(self, store: Store) -> None:
        """A replacement that arrives after the record was deleted, or claimed anew, changes nothing."""
        first = a_record()
        store.swap(first, None)
        late = replace(first, revision=new_nonce(), status=Status.COMPLETED)
        assert store.delete(first.key, first.revision) is True

        assert store.swap(late, first.revision) is None
        assert store.get(first.key) is None

        anew = replace(a_record(), key=first.key)
        assert store.swap(anew, None) == anew
        assert store.swap(late, first.revision) == anew
        assert store.delete(first.key, first.revision) is False
        assert store.get(first.key) == anew
