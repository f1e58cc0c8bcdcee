"""The contract of a store, as tests: subclass it, give it one fixture, and every rule of ``swap`` is checked.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)
            store.provision()
            yield store
            store.close()

        def reopen(self, store):            # another instance over the same records
            return MyStore(...)


    class TestMyStoreInAnOutage(OutageContract):
        @pytest.fixture
        def unreachable_store(self):
            return MyStore(...)             # of a server that is gone

The store may hold records of others: every test uses keys of its own. All tests are plain methods that take
a store and assert, so they can be called without pytest, too.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import cycle, pairwise
from typing import Any, ClassVar
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import SCHEMA, Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.testing.history import RecordedKey, is_linearizable, shown
from celery_idempotent.testing.parallel import ending, in_children, race, wait_until

__all__ = ["OutageContract", "StoreContract", "a_record"]

_RACERS = 8
_ROUNDS = 20

_CLOCK_ERROR = 2_000
"""Milliseconds by which a store's clock may be corrected in one go: the ``Date`` header that DynamoDB's store
has to make do with counts whole seconds."""


class StoreContract:
    """Tests that any store must pass; needs a fixture ``store`` that gives a provisioned one."""

    shared_by_processes: ClassVar[bool] = True
    """Whether processes see each other's records. False only for records in one process's memory."""

    def reopen(self, store: Store) -> Store:
        """Another instance over the same records, as another process would open it; the contract closes it.

        By default the same instance, which is weaker: a cache in the instance goes unnoticed.
        """
        return store

    # -- one caller

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

    # -- lost replies and late requests

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
        completed = replace(claimed, revision=new_nonce(), status=Status.COMPLETED, expires_at=_LONG_AFTER)
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

    # -- what is kept

    def test_keeps_every_field(self, store: Store) -> None:
        """What is read equals what was written, for every field and every kind of outcome."""
        for record in (
            a_record(),
            replace(a_record(), fingerprint=None, attempts=3, takeovers=2),
            replace(a_record(), status=Status.COMPLETED, result='"text \\u00e9"', content_type="application/json"),
            replace(a_record(), status=Status.COMPLETED, result=b"\x00\xff", content_type="application/x-binary"),
            replace(a_record(), status=Status.COMPLETED, error="result lost", expires_at=_LONG_AFTER),
            replace(a_record(), status=Status.FAILED, error="Überlast\n" * 10, expires_at=_LONG_AFTER),
            replace(a_record(), status=Status.UNKNOWN, error="?", steps={"a": {"n": 1}, "b": {"x": [None, "y"]}}),
        ):
            for stored in (store.swap(record, None), store.get(record.key), store.swap(a_rival(record), None)):
                assert stored == record
                assert _types(stored) == _types(record)

    def test_keeps_text_of_every_script(self, store: Store) -> None:
        """Names, descriptions and results may be in any script; no store may fold, trim or replace them."""
        for text in (
            "",
            " ",
            " padded ",
            "CaSe",
            "\r\n\t",
            "'; --\"\\%_{}$1:x?",
            "été e\u0301t\u00e9",
            "💥🏦\U0010ffff",
            "العربية",
        ):
            record = replace(
                a_record(),
                status=Status.FAILED,
                task=f"t{text}",
                task_id=f"{text}id",
                worker=text,
                app=text,
                error=text,
                result=text,
                content_type=f"text/{text}",
                expires_at=_LONG_AFTER,
            )
            assert store.swap(record, None) == record
            assert store.get(record.key) == record

    def test_tells_text_from_bytes(self, store: Store) -> None:
        """A result written as bytes is read as bytes, and text as text, empty ones and look-alikes included."""
        for result in ("", b"", "\\x00", b"\\x00", b"plain", b"\xc3\xa9", bytes(range(256)), "b'x'", "bytes:eA=="):
            record = replace(a_record(), status=Status.COMPLETED, result=result, content_type="x/y")
            store.swap(record, None)
            stored = store.get(record.key)
            assert stored == record
            assert _types(stored) == _types(record)

    def test_keeps_integers_exactly(self, store: Store) -> None:
        """Tokens and times are whole numbers beyond what a float or 32 bits can tell apart."""
        for number in (0, 1, 2**31, 2**53 + 1, 2**62 + 1):
            record = replace(
                a_record(),
                fencing_token=number,
                lease_until=number,
                created_at=number,
                updated_at=number,
                attempts=min(number, 2**31 - 1),
                takeovers=min(number, 2**31 - 1),
            )
            store.swap(record, None)
            stored = store.get(record.key)
            assert stored == record
            assert _types(stored) == _types(record)

    def test_keeps_nested_steps(self, store: Store) -> None:
        """Steps are JSON of any depth; what their texts contain is the author's business, NUL included."""
        deep: Any = "bottom"
        for _ in range(20):
            deep = {"": [deep]}
        steps = {
            "über 💥": {"result": None, "done": True, "off": False, "n": 2**53 + 1, "f": 0.1},
            "empty": {"list": [], "mapping": {}, "text": "", "zero": 0},
            "nul": "a\x00b",
            "quotes": "\"'\\",
            "deep": deep,
        }
        record = replace(a_record(), steps=steps)

        store.swap(record, None)
        stored = store.get(record.key)
        assert stored == record
        assert json.dumps(stored.steps, sort_keys=True) == json.dumps(steps, sort_keys=True)  # 1 is not True, nor 1.0

    def test_refuses_a_newer_layout(self, store: Store) -> None:
        """A record with a newer schema is left as it is, and whoever needs it is told to upgrade."""
        newer = replace(a_record(), schema=SCHEMA + 1)
        store.swap(newer, None)

        if self.shared_by_processes:
            assert isinstance(_failure(lambda: store.get(newer.key)), StoreMisconfigured)
            assert isinstance(_failure(lambda: store.swap(a_rival(newer), None)), StoreMisconfigured)
        else:  # nobody else writes there, so it is this version's own
            assert store.get(newer.key) == newer
        # Deleting takes a look at nothing but the revision, or it is refused as well.
        deleted = _failure(lambda: store.delete(newer.key, newer.revision))
        assert deleted is True or isinstance(deleted, StoreMisconfigured)

    def test_keeps_keys_apart(self, store: Store) -> None:
        """Keys that differ only in case, spaces, accents or normal form are different keys."""
        prefix = uuid4().hex
        plain = ("k", "K", "k ", " k", "k\n", "k:1", "k_", "k%", "k*", "k?", "{k}", "k'", 'k"', "k\\", "k;--")
        suffixes = (*plain, f"/../{prefix}k", "e", "\u00e9", "e\u0301", "💥", "💣")
        records = [replace(a_record(), key=f"{prefix}{suffix}") for suffix in suffixes]

        for record in records:
            assert store.swap(record, None) == record

        assert [store.get(record.key) for record in records] == records

    def test_keeps_the_longest_keys(self, store: Store) -> None:
        """A key may have 2048 bytes, and its last byte counts."""
        for letter in ("k", "é"):
            prefix = uuid4().hex
            stem = prefix + letter * ((2048 - len(prefix) - 1) // len(letter.encode()))
            for record in (replace(a_record(), key=stem + "a"), replace(a_record(), key=stem + "b")):
                assert store.swap(record, None) == record
                assert store.get(record.key) == record

    def test_large_record_is_kept_whole_or_refused_unwritten(self, store: Store) -> None:
        """What a store cannot hold is ``RecordTooLarge``, changes nothing, and the small version can be written."""
        for large in (
            {"result": "é" * 70_000, "content_type": "text/plain"},
            {"result": b"\xff" * 70_000, "content_type": "x/y"},
            {"result": "x" * 2_000_000, "content_type": "text/plain"},
            {"result": b"\x00" * 2_000_000, "content_type": "x/y"},
            {"error": "é" * 70_000},
            {"steps": {"step": "x" * 300_000}},
        ):
            claimed = a_record()
            store.swap(claimed, None)
            finished = replace(claimed, revision=new_nonce(), status=Status.COMPLETED)
            whole = replace(finished, **large)
            try:
                assert store.swap(whole, claimed.revision) == whole
                assert store.get(claimed.key) == whole
            except RecordTooLarge:
                assert store.get(claimed.key) == claimed
                assert store.swap(finished, claimed.revision) == finished

    # -- what is forgotten

    def test_expired_outcome_is_whole_or_absent_and_gives_way(self, store: Store) -> None:
        """An outcome past its expiry may be deleted at any time; a new claim then wins, knowing it or not."""
        claimed = a_record()
        store.swap(claimed, None)
        outcome = replace(
            claimed,
            revision=new_nonce(),
            status=Status.COMPLETED,
            result='"x"',
            content_type="application/json",
            expires_at=store.now() // 1000 - 60,
        )
        assert store.swap(outcome, claimed.revision) == outcome

        assert store.get(outcome.key) in (outcome, None)
        anew = replace(a_record(), key=outcome.key)
        stored = store.swap(anew, None)
        assert stored in (outcome, anew)
        if stored == outcome:
            stored = store.swap(anew, outcome.revision)
        if stored is None:  # deleted between the two
            stored = store.swap(anew, None)
        assert stored == anew
        assert store.get(outcome.key) == anew

    def test_only_an_outcome_with_an_expiry_is_forgotten(self, store: Store) -> None:
        """Whatever its status, a record without ``expires_at`` stays, its lease long over, or once an outcome."""
        kept = [replace(a_record(), status=status, lease_until=1, created_at=1, updated_at=1) for status in Status]
        for record in kept:
            store.swap(record, None)
        # An expiry that an outcome had must not stick to its key.
        for _ in range(10):
            expiry = (store.now() + 300) // 1000 + 1
            outcome = replace(a_record(), status=Status.COMPLETED, expires_at=expiry)
            store.swap(outcome, None)
            claimed_anew = a_rival(outcome)
            stored = store.swap(claimed_anew, outcome.revision)
            if stored is not None:  # else this machine is so slow that the outcome was deleted already
                break
        assert stored == claimed_anew
        kept.append(claimed_anew)

        wait_until(lambda: store.now() > expiry * 1000 + 50)

        assert [store.get(record.key) for record in kept] == kept

    # -- several callers

    def test_one_racer_wins_an_empty_key(self, store: Store) -> None:
        """Of many concurrent claims of one key exactly one wins, and all others are told who did."""
        for _ in range(_ROUNDS):
            key = uuid4().hex
            contenders = [replace(a_record(), key=key) for _ in range(_RACERS)]

            answers = race([partial(store.swap, each, None) for each in contenders])

            _one_winner(contenders, answers)

    def test_one_racer_wins_a_takeover(self, store: Store) -> None:
        """Of many concurrent replacements of one revision exactly one wins."""
        for _ in range(_ROUNDS):
            seen = a_record()
            store.swap(seen, None)
            contenders = [a_rival(seen) for _ in range(_RACERS)]

            answers = race([partial(store.swap, each, seen.revision) for each in contenders])

            _one_winner(contenders, answers)

    def test_one_racer_deletes(self, store: Store) -> None:
        """Of many concurrent deletions of one revision exactly one deletes."""
        for _ in range(_ROUNDS // 2):
            record = a_record()
            store.swap(record, None)

            answers = race([partial(store.delete, record.key, record.revision)] * _RACERS)

            assert sorted(answers) == [False] * (_RACERS - 1) + [True]
            assert store.get(record.key) is None

    def test_deletion_and_replacement_exclude_each_other(self, store: Store) -> None:
        """An operator deletes what a worker replaces: one of them wins, and both know which."""
        for _ in range(_ROUNDS // 2):
            seen = a_record()
            store.swap(seen, None)
            new = a_rival(seen)

            calls: list[Callable[[], Any]] = [
                partial(store.delete, seen.key, seen.revision),
                partial(store.swap, new, seen.revision),
            ]
            deleted, stored = race(calls)

            assert (deleted, stored) in ((True, None), (False, new))
            assert store.get(seen.key) == stored

    def test_claim_after_a_deletion_stands_against_late_replacements(self, store: Store) -> None:
        """Once deleted, a revision is gone: a claim wins, and whoever still expects the revision gets nothing done."""
        for _ in range(_ROUNDS // 2):
            gone = a_record()
            store.swap(gone, None)
            store.delete(gone.key, gone.revision)
            claim = a_rival(gone)
            late = [a_rival(gone) for _ in range(3)]

            stored, *answers = race(
                [partial(store.swap, claim, None), *(partial(store.swap, each, gone.revision) for each in late)]
            )

            assert stored == claim
            assert all(each in (None, claim) for each in answers)
            assert store.get(gone.key) == claim

    def test_mixed_races_have_one_history(self, store: Store) -> None:
        """Claims, renewals, takeovers, endings, deletions and resends at once look as if one came after the other."""
        for seed in range(6):
            recorded = RecordedKey(store, uuid4().hex)

            race([partial(_acts, recorded, random.Random(f"{seed} {actor}")) for actor in range(6)])  # noqa: S311

            recorded.get()
            assert is_linearizable(recorded.calls), f"no register behaves like this:\n{shown(recorded.calls)}"

    def test_nobody_sees_half_a_record(self, store: Store) -> None:
        """Readers, losers and scans beside a writer get one whole record or the other, never a mixture."""
        task, key = uuid4().hex, uuid4().hex
        versions = [_filled(task, key) for _ in range(10)]
        written = {each.revision: each for each in versions}
        store.swap(versions[0], None)
        is_over = threading.Event()

        def write() -> None:
            for old, new in pairwise(cycle(versions)):
                assert store.swap(new, old.revision) == new
                if is_over.is_set():
                    return

        def look(read: Callable[[], Sequence[Record | None]]) -> None:
            for _ in range(_ROUNDS):
                for seen in read():
                    assert seen is not None
                    assert seen == written[seen.revision]

        def all_look() -> None:
            race(
                [
                    partial(look, lambda: [store.get(key)]),
                    partial(look, lambda: [store.swap(a_rival(versions[0]), None)]),
                    partial(look, lambda: list(store.scan(task=task))),
                ]
            )

        race([ending(write, is_over), ending(all_look, is_over)])

    def test_threads_do_not_mix_up_their_replies(self, store: Store) -> None:
        """Many threads on one instance, each with a key of its own, each get their own records."""

        def work() -> None:
            record = a_record()
            assert store.swap(record, None) == record
            for _ in range(4):
                new = a_rival(record)
                assert store.swap(new, record.revision) == new
                assert store.get(record.key) == new
                record = new

        race([work] * 16)

    def test_acknowledged_write_is_seen_by_everybody(self, store: Store) -> None:
        """Once a swap or delete has returned, every thread and every instance sees it."""
        with self._another(store) as other, ThreadPoolExecutor(1) as elsewhere:
            record = a_record()
            for writer, reader in ((store, other), (other, store)) * 5:
                record = replace(record, revision=new_nonce())
                seen_before = reader.get(record.key)
                assert writer.swap(record, seen_before.revision if seen_before else None) == record
                assert reader.get(record.key) == record
                assert elsewhere.submit(reader.get, record.key).result() == record
                assert elsewhere.submit(writer.get, record.key).result() == record
                assert reader.swap(a_rival(record), None) == record
            assert other.delete(record.key, record.revision) is True
            assert store.get(record.key) is None

    def test_instances_race_as_threads_do(self, store: Store) -> None:
        """Exactly one wins, too, if the racers use two instances."""
        with self._another(store) as other:
            for _ in range(_ROUNDS // 2):
                seen = a_record()
                claims = [a_rival(seen) for _ in range(_RACERS)]
                takeovers = [a_rival(seen) for _ in range(_RACERS)]

                answers = race([partial((store, other)[n % 2].swap, each, None) for n, each in enumerate(claims)])
                winner = _one_winner(claims, answers)
                answers = race(
                    [partial((store, other)[n % 2].swap, each, winner.revision) for n, each in enumerate(takeovers)]
                )
                _one_winner(takeovers, answers)

    # -- several processes

    def test_store_survives_a_fork(self, store: Store) -> None:
        """A worker's child uses the instance it inherited, and the parent goes on using its own."""
        before = a_record()
        store.swap(before, None)

        def child() -> tuple[Record | None, Record | None, Record | None]:
            mine = a_record()
            answers = store.get(before.key), store.swap(mine, None), store.get(mine.key)
            store.close()  # its own connections, not its parent's
            return answers

        def idle_child() -> tuple[Record | None, Record | None, Record | None]:
            store.close()
            return before, None, None

        (seen, swapped, got), (seen_by_other, _, _), _ = in_children([child, child, idle_child])

        assert seen == seen_by_other == before
        assert swapped == got
        assert swapped is not None
        after = replace(before, revision=new_nonce())
        assert store.swap(after, before.revision) == after
        assert store.get(before.key) == after
        assert store.get(swapped.key) == (swapped if self.shared_by_processes else None)
        store.close()
        assert store.get(swapped.key) == (swapped if self.shared_by_processes else None)

    def test_one_process_wins(self, store: Store) -> None:
        """Of concurrent claims by several processes exactly one wins, and so it is with takeovers."""
        seen = [a_record() for _ in range(5)]
        contenders = [[a_rival(each) for each in seen] for _ in range(4)]
        for record in seen[::2]:
            store.swap(record, None)

        def racing(mine: list[Record]) -> list[Record | None]:
            return [store.swap(new, None if index % 2 else seen[index].revision) for index, new in enumerate(mine)]

        answers = in_children([partial(racing, mine) for mine in contenders])

        if self.shared_by_processes:
            for new, replies in zip(zip(*contenders, strict=True), zip(*answers, strict=True), strict=True):
                winner = _one_winner(list(new), list(replies))
                assert store.get(winner.key) == winner
        else:
            assert answers == contenders

    # -- operators

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

    # -- the clock

    def test_clock_is_in_milliseconds(self, store: Store) -> None:
        """The store's clock counts milliseconds since the epoch in this century."""
        assert type(store.now()) is int
        assert 1_700_000_000_000 < store.now() < 4_100_000_000_000

    def test_clock_runs(self, store: Store) -> None:
        """The clock goes on between requests, at the speed of real time."""
        asked = time.monotonic()
        before = store.now()
        answered = time.monotonic()
        wait_until(lambda: time.monotonic() > answered + 0.05)
        asked_again = time.monotonic()
        after = store.now()
        at_most = (time.monotonic() - asked) * 1000

        assert (asked_again - answered) * 1000 - 25 <= after - before <= at_most + 25

    def test_clock_knows_no_time_zone(self, store: Store) -> None:
        """The clock counts the same milliseconds wherever its machine believes to be."""
        zone = os.environ.get("TZ")
        try:
            readings = []
            for there in ("UTC", "EAST-12", "WEST+12"):
                os.environ["TZ"] = there
                time.tzset()
                readings.append(store.now())
        finally:
            os.environ.pop("TZ")
            os.environ |= {"TZ": zone} if zone is not None else {}
            time.tzset()

        assert max(readings) - min(readings) < 3_600_000

    def test_clock_does_not_jump_with_replies(self, store: Store) -> None:
        """What replies teach about the server's time is a correction, not another time."""
        record = a_record()
        start, started = store.now(), time.monotonic()
        for _ in range(10):
            store.swap(record, None)
            drift = store.now() - start - (time.monotonic() - started) * 1000
            assert abs(drift) <= _CLOCK_ERROR

    @contextmanager
    def _another(self, store: Store) -> Iterator[Store]:
        other = self.reopen(store)
        try:
            yield other
        finally:
            if other is not store:
                other.close()


class OutageContract:
    """What a store must do when its server is gone; needs a fixture ``unreachable_store``.

    Give it a store whose connections are refused, and in a second subclass one whose server accepts them and
    never answers: that is what a lost network looks like.
    """

    answers_within: ClassVar[float] = 30.0
    """Seconds that one call may take, all tries of the driver included. A claim that waits longer than a
    lease, 60 s by default, is of no use to anybody."""

    def test_swap_without_a_server_has_no_certain_answer(self, unreachable_store: Store) -> None:
        """The caller learns that the outcome is unknown, and from which error of the driver."""
        record = a_record()
        self._unavailable(lambda: unreachable_store.swap(record, None))
        self._unavailable(lambda: unreachable_store.swap(record, "a revision"))

    def test_get_without_a_server_is_no_absence(self, unreachable_store: Store) -> None:
        """No answer is not the answer that there is no record."""
        self._unavailable(lambda: unreachable_store.get("key"))

    def test_scan_without_a_server_is_not_empty(self, unreachable_store: Store) -> None:
        """No answer is not the answer that there are no records."""
        self._unavailable(lambda: list(unreachable_store.scan()))

    def test_delete_without_a_server_is_no_refusal(self, unreachable_store: Store) -> None:
        """No answer is not the answer that the record has changed."""
        self._unavailable(lambda: unreachable_store.delete("key", "revision"))

    def test_closing_without_a_server_is_harmless(self, unreachable_store: Store) -> None:
        """A process must be able to end."""
        unreachable_store.close()
        unreachable_store.close()

    def _unavailable(self, call: Callable[[], object]) -> None:
        asked = time.monotonic()
        raised = _failure(call)
        assert time.monotonic() - asked <= self.answers_within
        assert isinstance(raised, StoreUnavailable), f"answered {raised!r} although there is no server"
        assert not isinstance(raised, StoreMisconfigured), f"nobody needs to change a setting: {raised}"
        assert raised.__cause__ is not None, f"the driver's error is not the cause of: {raised}"


_LONG_AFTER = 4_000_000_000
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
    )


def a_claim(store: Store) -> Record:
    """A record of a key of its own, stored."""
    record = a_record()
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
        expires_at=_LONG_AFTER,
    )


def a_rival(record: Record) -> Record:
    """Another attempt's record of the same key."""
    return replace(a_record(), key=record.key)


def _filled(task: str, key: str) -> Record:
    """A record of several packets, whose every field says which write it comes from."""
    tag = new_nonce()
    text = tag * 200
    return replace(
        a_record(),
        key=key,
        task=task,
        revision=tag,
        owner=tag,
        task_id=tag,
        worker=tag,
        fencing_token=int(tag[:12], 16),
        steps={tag: text},
        result=text,
        content_type=tag,
        error=text,
    )


def _acts(recorded: RecordedKey, chance: random.Random) -> None:
    """What one participant of a mixed race does: moves from what it saw last, some of them late or twice."""
    seen: Record | None = None
    sent: tuple[Record, str | None] | None = None
    for _ in range(6):
        match chance.choice(("look", "move", "move", "move", "resend", "delete")):
            case "look":
                seen = recorded.get()
            case "resend" if sent is not None:
                seen = recorded.swap(*sent)
            case "delete" if seen is not None:
                recorded.delete(seen.revision)
            case _:
                status = chance.choice(list(Status))
                expiry = _LONG_AFTER if status in (Status.COMPLETED, Status.FAILED) else None
                new = replace(a_record(), key=recorded.key, status=status, expires_at=expiry)
                sent = (new, seen.revision if seen else None)
                seen = recorded.swap(*sent)


def _one_winner(contenders: list[Record], answers: Sequence[Record | None]) -> Record:
    winners = [each for each, answer in zip(contenders, answers, strict=True) if answer == each]
    assert len(winners) == 1, f"{len(winners)} of {len(contenders)} racers were told that they won"
    assert list(answers) == winners * len(contenders), "a loser was not told who won"
    return winners[0]


def _failure(call: Callable[[], object]) -> object:
    """The ``StoreUnavailable`` that ``call`` raises, or else what it returns."""
    try:
        return call()
    except StoreUnavailable as error:
        return error


def _types(record: Record | None) -> dict[str, type]:
    """What ``==`` does not tell: a status is no text, a number no flag, and a whole number no float."""
    return {each.name: type(getattr(record, each.name)) for each in fields(Record) if each.name != "steps"}
