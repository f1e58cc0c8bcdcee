"""The contract of a store, as tests: subclass it, give it one fixture, and every rule of ``swap`` is checked.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)
            store.provision()
            yield store
            store.close()
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

from celery_idempotent.attempt import new_nonce
from celery_idempotent.record import Record, Status
from celery_idempotent.store import Store

__all__ = ["StoreContract"]

_RACERS = 8
_ROUNDS = 20


class StoreContract:
    """Tests that any store must pass; needs a fixture ``store`` that gives a provisioned one."""

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
        first = replace(a_record(), takeover=True, error="gone afterwards", steps={"charge": {"result": "ch_1"}})
        store.swap(first, None)
        second = replace(first, revision=new_nonce(), takeover=False, error=None, steps={}, lease_until=7)

        stored = store.swap(second, first.revision)

        assert stored == second
        assert store.get(first.key) == second

    def test_refuses_another_revision(self, store: Store) -> None:
        """A swap that expects a revision which is not the stored one changes nothing and returns the stored one."""
        first = a_record()
        store.swap(first, None)

        stored = store.swap(replace(first, revision=new_nonce()), "no such revision")

        assert stored == first
        assert store.get(first.key) == first

    def test_never_creates_where_a_revision_was_expected(self, store: Store) -> None:
        """A swap that expects a revision writes nothing if the record has vanished."""
        record = a_record()

        assert store.swap(record, "a revision that was deleted") is None
        assert store.get(record.key) is None

    def test_recognises_its_own_write_sent_twice(self, store: Store) -> None:
        """A swap repeated after a lost reply returns the caller's own revision, so the caller knows it won."""
        first = a_record()
        second = replace(first, revision=new_nonce())

        assert store.swap(first, None) == first
        assert store.swap(first, None) == first
        assert store.swap(second, first.revision) == second
        assert store.swap(second, first.revision) == second

    def test_keeps_every_field(self, store: Store) -> None:
        """What is read equals what was written, for every field and every kind of outcome."""
        for record in (
            a_record(),
            replace(a_record(), fingerprint=None, attempts=3, takeover=True),
            replace(a_record(), status=Status.COMPLETED, result='"text \\u00e9"', content_type="application/json"),
            replace(a_record(), status=Status.COMPLETED, result=b"\x00\xff", content_type="application/x-binary"),
            replace(a_record(), status=Status.COMPLETED, error="result lost", expires_at=1_900_000_000),
            replace(a_record(), status=Status.FAILED, error="Überlast\n" * 10, expires_at=1_900_000_000),
            replace(a_record(), status=Status.UNKNOWN, error="?", steps={"a": {"n": 1}, "b": {"x": [None, "y"]}}),
        ):
            assert store.swap(record, None) == record
            assert store.get(record.key) == record

    def test_keeps_keys_apart(self, store: Store) -> None:
        """Keys that differ only in case, spaces or normal form are different keys."""
        prefix = uuid4().hex
        records = [
            replace(a_record(), key=f"{prefix}{suffix}") for suffix in ("k", "K", "k ", "k:1", "\u00e9", "e\u0301")
        ]

        for record in records:
            assert store.swap(record, None) == record

        assert [store.get(record.key) for record in records] == records

    def test_does_not_expire_by_itself_what_is_not_final(self, store: Store) -> None:
        """A record whose lease is long over is still there: only outcomes have an expiry."""
        record = replace(a_record(), lease_until=1)
        store.swap(record, None)

        assert store.get(record.key) == record

    def test_one_racer_wins_an_empty_key(self, store: Store) -> None:
        """Of many concurrent claims of one key exactly one wins, and all others are told who did."""
        for _ in range(_ROUNDS):
            key = uuid4().hex
            contenders = [replace(a_record(), key=key) for _ in range(_RACERS)]

            answers = _race([_swapping(store, each, None) for each in contenders])

            winners = [each for each, answer in zip(contenders, answers, strict=True) if answer == each]
            assert len(winners) == 1
            assert answers == winners * _RACERS

    def test_one_racer_wins_a_takeover(self, store: Store) -> None:
        """Of many concurrent replacements of one revision exactly one wins."""
        for _ in range(_ROUNDS):
            seen = a_record()
            store.swap(seen, None)
            contenders = [replace(seen, revision=new_nonce(), owner=new_nonce()) for _ in range(_RACERS)]

            answers = _race([_swapping(store, each, seen.revision) for each in contenders])

            winners = [each for each, answer in zip(contenders, answers, strict=True) if answer == each]
            assert len(winners) == 1
            assert answers == winners * _RACERS

    def test_scans_by_status_and_task(self, store: Store) -> None:
        """A scan finds the records of the asked status and task, and no others."""
        task = uuid4().hex
        kept = replace(a_record(), task=task, status=Status.UNKNOWN)
        others = [replace(a_record(), task=task), replace(a_record(), status=Status.UNKNOWN)]
        for record in (kept, *others):
            store.swap(record, None)

        assert list(store.scan(status=Status.UNKNOWN, task=task)) == [kept]
        assert {each.key for each in store.scan(task=task)} == {kept.key, others[0].key}
        assert {each.key for each in store.scan()} >= {kept.key, *(each.key for each in others)}

    def test_deletes_only_the_expected_revision(self, store: Store) -> None:
        """An operator deletes the record he looked at, not one that changed meanwhile."""
        record = a_record()
        store.swap(record, None)

        assert store.delete(record.key, "another revision") is False
        assert store.get(record.key) == record
        assert store.delete(record.key, record.revision) is True
        assert store.get(record.key) is None
        assert store.delete(record.key, record.revision) is False

    def test_clock_is_in_milliseconds_and_does_not_stand(self, store: Store) -> None:
        """The store's clock counts milliseconds since the epoch in this century."""
        assert 1_700_000_000_000 < store.now() < 4_100_000_000_000

    def test_provisioning_twice_keeps_records(self, store: Store) -> None:
        """Provisioning again is harmless."""
        record = a_record()
        store.swap(record, None)

        store.provision()

        assert store.get(record.key) == record

    def test_closing_twice_is_harmless(self, store: Store) -> None:
        """Closing releases connections; a closed store may be used again and opens new ones."""
        record = a_record()
        store.swap(record, None)

        store.close()
        store.close()

        assert store.get(record.key) in (record, None)


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
    )


def _swapping(store: Store, record: Record, expected: str | None) -> Callable[[], Record | None]:
    return lambda: store.swap(record, expected)


def _race(calls: list[Callable[[], Record | None]]) -> list[Record | None]:
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Record | None]) -> Record | None:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
