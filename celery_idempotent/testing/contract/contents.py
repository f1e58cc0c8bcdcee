"""The contract of what a store keeps of a record, and what it forgets."""

import json
from dataclasses import fields, replace
from typing import Any
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import SCHEMA, Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.testing.contract.base import StoreTests
from celery_idempotent.testing.contract.parallel import wait_until
from celery_idempotent.testing.contract.records import LONG_AFTER, a_record, a_rival, reply_of


class ContentsContract(StoreTests):
    """A record is read as it was written, or refused."""

    def test_keeps_every_field(self, store: Store) -> None:
        """What is read equals what was written, for every field and every kind of outcome."""
        for record in (
            a_record(),
            replace(a_record(), fingerprint=None, attempts=3, takeovers=2),
            replace(a_record(), status=Status.COMPLETED, result='"text \\u00e9"', content_type="application/json"),
            replace(a_record(), status=Status.COMPLETED, result=b"\x00\xff", content_type="application/x-binary"),
            replace(a_record(), status=Status.COMPLETED, error="result lost", expires_at=LONG_AFTER),
            replace(a_record(), status=Status.FAILED, error="Überlast\n" * 10, expires_at=LONG_AFTER),
            replace(a_record(), label="", trace="", verdict={"by": "ann", "at": 2**53 + 1, "judged": [{"by": "é"}]}),
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
                process=text,
                label=text,
                trace=text,
                verdict={"reason": text},
                error=text,
                result=text,
                content_type=f"text/{text}",
                expires_at=LONG_AFTER,
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

    def test_keeps_what_a_publisher_announces(self, store: Store) -> None:
        """A record without an owner, an attempt or a token; the first claim follows it, or its publisher deletes it."""
        record = replace(a_record(), status=Status.RELEASED, owner="", fencing_token=0, attempts=0, worker="")

        assert store.swap(record, None) == record
        assert store.swap(replace(record, revision=new_nonce()), None) == record
        assert store.get(record.key) == record
        claimed = replace(a_record(), key=record.key)
        assert store.swap(claimed, record.revision) == claimed
        assert not store.delete(record.key, record.revision)

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
            assert isinstance(reply_of(lambda: store.get(newer.key)), StoreMisconfigured)
            assert isinstance(reply_of(lambda: store.swap(a_rival(newer), None)), StoreMisconfigured)
        else:  # nobody else writes there, so it is this version's own
            assert store.get(newer.key) == newer
        # Deleting takes a look at nothing but the revision, or it is refused as well.
        deleted = reply_of(lambda: store.delete(newer.key, newer.revision))
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


def _types(record: Record | None) -> dict[str, type]:
    """What ``==`` does not tell: a status is no text, a number no flag, and a whole number no float."""
    return {each.name: type(getattr(record, each.name)) for each in fields(Record) if each.name not in _JSON}


_JSON = {"steps", "verdict"}
"""Fields that are mappings of one kind or another."""
