"""The contract of what people and tools ask of a store."""

import threading
from dataclasses import replace
from itertools import cycle
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.record import SCHEMA, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract.base import StoreTests
from celery_idempotent.testing.contract.parallel import ending, race
from celery_idempotent.testing.contract.records import a_record

_ROUNDS = 20


class OperatorsContract(StoreTests):
    """Scans, deletions, provisioning and closing."""

    def test_scans_by_status_and_task(self, store: Store) -> None:
        """A scan finds the records of the asked status and task, and no others; names are compared exactly."""
        task = uuid4().hex
        kept = replace(a_record(), task=task, status=Status.UNKNOWN)
        others = [
            replace(a_record(), task=task),
            replace(a_record(), status=Status.UNKNOWN),
            *(
                replace(a_record(), task=other, status=Status.UNKNOWN)
                for other in (f"{task} ", task.upper(), task[:-1])
            ),
        ]
        for record in (kept, *others):
            store.swap(record, None)

        assert list(store.scan(status=Status.UNKNOWN, task=task)) == [kept]
        assert {each.key for each in store.scan(task=task)} == {kept.key, others[0].key}
        assert {each.key for each in store.scan()} >= {kept.key, *(each.key for each in others)}
        assert list(store.scan(status=Status.FAILED, task=task)) == []
        for pattern in (f"{task[:-1]}_", f"{task[:-1]}%", f"{task[:-1]}*", f"{task[:-1]}?", "%", "*", ""):
            assert list(store.scan(task=pattern)) == []

    def test_scans_by_label(self, store: Store) -> None:
        """A scan finds the records that have the label, whatever else is asked; labels are compared exactly."""
        label = f"acme/{uuid4().hex}é"
        kept = [replace(a_record(), label=label, status=status) for status in (Status.UNKNOWN, Status.COMPLETED)]
        others = [
            replace(a_record(), label=other) for other in (f"{label} ", label.upper(), label[:-1], f"{label[:-1]}_", "")
        ]
        for record in (*kept, *others):
            store.swap(record, None)

        assert sorted(store.scan(label=label), key=str) == sorted(kept, key=str)
        assert list(store.scan(label=label, status=Status.UNKNOWN, task=kept[0].task)) == kept[:1]
        for pattern in (f"{label[:-1]}%", f"{label[:-1]}*", "%"):
            assert list(store.scan(label=pattern)) == []

    def test_scan_passes_over_what_it_cannot_read(self, store: Store) -> None:
        """One record that this version cannot read does not hide the others; ``celery_idempotent.stores.readable``."""
        newer, kept = replace(a_record(), schema=SCHEMA + 1), a_record()
        for record in (newer, kept):
            store.swap(record, None)

        found = {each.key for each in store.scan()}

        assert kept.key in found
        assert (newer.key in found) is not self.shared_by_processes

    def test_scan_beside_writes_finds_what_stays_and_invents_nothing(self, store: Store) -> None:
        """While others write, a scan yields every record that is not touched, and only records that were written."""
        task = uuid4().hex
        untouched = [replace(a_record(), task=task) for _ in range(10)]
        # Made in advance: the less a writer does between its writes, the more often a reader meets it in one.
        passing = [replace(a_record(), task=task) for _ in range(_ROUNDS)]
        changed = [replace(each, revision=new_nonce(), status=Status.UNKNOWN) for each in passing]
        written = {each.revision: each for each in (*untouched, *passing, *changed)}
        for record in untouched:
            store.swap(record, None)
        is_over = threading.Event()

        def write() -> None:
            for record, new in cycle(zip(passing, changed, strict=True)):
                store.swap(record, None)
                store.swap(new, record.revision)
                store.delete(new.key, new.revision)
                if is_over.is_set():
                    return

        def scan() -> None:
            for _ in range(_ROUNDS // 2):
                found = list(store.scan(task=task))
                assert {each.key for each in found} >= {each.key for each in untouched}
                assert all(each == written[each.revision] for each in found)

        race([ending(write, is_over), ending(scan, is_over)])

    def test_deletes_only_the_expected_revision(self, store: Store) -> None:
        """An operator deletes the record he looked at, not one that changed meanwhile."""
        record = a_record()
        store.swap(record, None)

        assert store.delete(record.key, "another revision") is False
        assert store.get(record.key) == record
        assert store.delete(record.key, record.revision) is True
        assert store.get(record.key) is None
        assert store.delete(record.key, record.revision) is False

    def test_provisioning_again_keeps_records(self, store: Store) -> None:
        """Provisioning again is harmless, even from several machines at once."""
        record = a_record()
        store.swap(record, None)

        store.provision()
        race([store.provision] * 4)

        assert store.get(record.key) == record

    def test_closing_twice_is_harmless(self, store: Store) -> None:
        """Closing releases connections; a closed store may be used again and opens new ones."""
        record = a_record()
        store.swap(record, None)

        store.close()
        store.close()

        assert store.get(record.key) in ((record,) if self.shared_by_processes else (record, None))
