"""The contract that every store passes, for one caller and for callers at once."""

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import SCHEMA, Record, Status
from celery_idempotent.protocol.store import IndexedStore, RecordTooLarge, Store
from celery_idempotent.testing.contract.parallel import Exchange, assert_linearizable, in_children, race, wait_until
from celery_idempotent.testing.contract.records import (
    LONG_AFTER,
    a_claim,
    a_completion,
    a_record,
    a_rival,
    ask_again,
    claim_over,
    reply_of,
)

_RACES = 6
_ROUNDS = 10
_RUNS, _STEPS = 10, 30

_DEEP: Any = "bottom"
for _ in range(20):
    _DEEP = {"": [_DEEP]}

_TEXTS = (
    "",
    " ",
    " padded ",
    "CaSe",
    "\r\n\t",
    "'; --\"\\%_{}$1:x?",
    "été e\u0301t\u00e9",
    "💥🏦\U0010ffff",
    "العربية",
)
_NUMBERS = (0, 1, 2**31, 2**53 + 1, 2**62 + 1)
_RESULTS = (None, "", b"", "\\x00", b"\\x00", b"plain", b"\xc3\xa9", bytes(range(256)), "b'x'", "bytes:eA==", *_TEXTS)
_STEPS_OF_AN_ATTEMPT: tuple[dict[str, Any], ...] = (
    {},
    {"über 💥": {"result": None, "done": True, "off": False, "n": 2**53 + 1, "f": 0.1}, "nul": "a\x00b"},
    {"empty": {"list": [], "mapping": {}, "text": "", "zero": 0}, "quotes": "\"'\\", "deep": _DEEP},
)
"""JSON of any depth; what its texts contain is the author's business, NUL included."""

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

    def test_calls_at_once_have_one_history(self, store: Store) -> None:
        """Claims, takeovers, endings, deletions and resends at once look as if one came after the other.

        They come from threads on two instances. Every reply is one whole write, of the key that was asked for, and a
        scan beside them finds all that nobody touches.
        """
        other = self.reopen(store)
        with nullcontext() if other is store else closing(other):
            for seed in range(_RACES):
                task = uuid4().hex
                untouched = {each.key: each for each in (_version(f"{task}:{n}", new_nonce()) for n in range(10))}
                for each in untouched.values():
                    store.swap(each, None)
                keys = [f"{task}:first", f"{task}:second"] * 4
                actors = [
                    partial(_act, (store, other)[n // 4], key, random.Random(f"{seed} {n}"))  # noqa: S311
                    for n, key in enumerate(keys)
                ]
                *told, _ = race([*actors, partial(_look, store, task, untouched)])
                for key in keys[:2]:
                    calls = [call for asked, each in zip(keys, told, strict=True) if asked == key for call in each]
                    calls += _act(other, key, random.Random(seed), turns=1)  # noqa: S311
                    assert_linearizable(calls)

    def test_calls_of_processes_have_one_history(self, store: Store) -> None:
        """As those of threads, by the instance that each child inherits; a memory's children are alone, each."""
        for seed in range(3):
            chances = [random.Random(f"{seed} {actor}") for actor in range(4)]  # noqa: S311
            key = f"{uuid4().hex}:{seed}"

            told = in_children([partial(_act, store, key, chance) for chance in chances])

            for calls in [[call for each in told for call in each]] if self.shared_by_processes else told:
                assert_linearizable(calls)

    def test_store_survives_a_fork(self, store: Store) -> None:
        """A worker's child uses the instance it inherited, and the parent goes on using its own."""
        before = a_claim(store)

        def child() -> tuple[Record | None, Record | None, Record | None]:
            mine = a_record()
            answers = store.get(before.key), store.swap(mine, None), store.get(mine.key)
            store.close()  # its own connections, not its parent's
            return answers

        works: list[Callable[[], Any]] = [child, child, store.close]
        (seen, swapped, got), (seen_by_other, _, _), _ = in_children(works)

        assert seen == seen_by_other == before
        assert swapped == got
        assert swapped is not None
        after = replace(before, revision=new_nonce())
        assert store.swap(after, before.revision) == after
        assert store.get(before.key) == after
        assert store.get(swapped.key) == (swapped if self.shared_by_processes else None)
        store.close()
        assert store.get(swapped.key) == (swapped if self.shared_by_processes else None)

    def test_answers_as_a_register_does(self, store: Store) -> None:
        """Whatever is asked in whatever order, resends and late requests included, beside a dict that does the same.

        A write is made if what is stored has the expected revision, or nothing is and nothing was expected; what is
        stored then is the reply, whole, with every field equal and of its type.
        """
        for seed in range(_RUNS):
            chance = random.Random(seed)  # noqa: S311
            keys = [uuid4().hex for _ in range(3)]
            register: dict[str, Record] = {}
            sent: list[tuple[Record, str | None]] = []
            for step in range(_STEPS):
                key = chance.choice(keys)
                stored = register.get(key)
                revision = stored.revision if stored else None
                match chance.choice(
                    ("move",) * 5 + ("late", "late", "resend", "resend", "try again", "delete", "wrong")
                ):
                    case "delete" | "wrong" as kind:
                        expected = revision if kind == "delete" and revision else _unlike(chance, stored, sent)
                        is_there = stored is not None and stored.revision == expected
                        assert store.delete(key, expected) is is_there, f"run {seed}, step {step}"
                        if is_there:
                            del register[key]
                    case kind:
                        new, wanted = _anything(chance, key, stored), revision
                        if kind == "late":
                            wanted = chance.choice((None, _unlike(chance, stored, sent)))
                        elif kind != "move" and sent:
                            new, wanted = chance.choice(sent)
                            if kind == "try again":  # of one write two tries can differ, and the later one may have won
                                new = replace(new, lease_until=new.lease_until + 1, error="the other try")
                        sent.append((new, wanted))
                        found = register.get(new.key)
                        if (found.revision if found else None) == wanted:
                            register[new.key] = new
                        _assert_same(store.swap(new, wanted), register.get(new.key), f"run {seed}, step {step}")
                _assert_same(store.get(key), register.get(key), f"run {seed}, step {step}")
            for key in keys:
                _assert_same(store.get(key), register.get(key), f"run {seed}")

    def test_keeps_keys_apart(self, store: Store) -> None:
        """Keys that differ only in case, spaces, accents, normal form or their 2048th byte are different keys."""
        prefix = uuid4().hex
        plain = ("k", "K", "k ", " k", "k\n", "k:1", "k_", "k%", "k*", "k?", "{k}", "k'", 'k"', "k\\", "k;--")
        long = [letter * ((2048 - len(prefix) - 1) // len(letter.encode())) for letter in ("k", "é")]
        suffixes = (*plain, f"/../{prefix}k", "e", "\u00e9", "e\u0301", "💥", "💣", *(f"{each}a" for each in long))
        records = [replace(a_record(), key=f"{prefix}{each}") for each in (*suffixes, *(f"{each}b" for each in long))]

        assert [store.swap(each, None) for each in records] == records
        assert [store.get(each.key) for each in records] == records

    def test_large_record_is_kept_whole_or_refused_unwritten(self, store: Store) -> None:
        """What a store cannot hold is ``RecordTooLarge``, changes nothing, and the small version can be written."""
        large: tuple[dict[str, Any], ...] = (
            {"result": "é" * 70_000, "content_type": "text/plain"},
            {"result": b"\xff" * 70_000, "content_type": "x/y"},
            {"result": "x" * 2_000_000, "content_type": "text/plain"},
            {"result": b"\x00" * 2_000_000, "content_type": "x/y"},
            {"error": "é" * 70_000},
            {"steps": {"step": "x" * 300_000}},
        )
        for each in large:
            claimed = a_claim(store)
            finished = replace(claimed, revision=new_nonce(), status=Status.COMPLETED)
            whole = replace(finished, **each)
            try:
                assert store.swap(whole, claimed.revision) == whole
                assert store.get(claimed.key) == whole
            except RecordTooLarge:
                assert store.get(claimed.key) == claimed
                assert store.swap(finished, claimed.revision) == finished

    def test_newer_layout_is_refused_and_left_alone(self, store: Store) -> None:
        """Whoever needs a record with a newer schema is told to upgrade; a scan passes over it, and finds the others.

        ``celery_idempotent.stores.readable`` does that for a scan.
        """
        newer, readable = replace(a_record(), schema=SCHEMA + 1), a_record()
        store.swap(newer, None)
        store.swap(readable, None)

        found = {each.key for each in store.scan()}
        assert readable.key in found
        if self.shared_by_processes:
            assert isinstance(reply_of(lambda: store.get(newer.key)), StoreMisconfigured)
            assert isinstance(reply_of(lambda: store.swap(a_rival(newer), None)), StoreMisconfigured)
            assert newer.key not in found
        else:  # nobody else writes there, so it is this version's own
            assert store.get(newer.key) == newer
            assert newer.key in found
        # Deleting takes a look at nothing but the revision, or it is refused as well.
        deleted = reply_of(lambda: store.delete(newer.key, newer.revision))
        assert deleted is True or isinstance(deleted, StoreMisconfigured)

    def test_expired_outcome_is_whole_or_absent_and_gives_way(self, store: Store) -> None:
        """An outcome past its expiry may be deleted at any time; a new claim then wins, knowing it or not."""
        claimed = a_claim(store)
        outcome = replace(a_completion(claimed), expires_at=store.now() // 1000 - 60)
        assert store.swap(outcome, claimed.revision) == outcome

        assert store.get(outcome.key) in (outcome, None)
        anew = a_rival(outcome)
        claim_over(store, outcome, anew)
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

    def test_scan_finds_what_is_asked_for(self, store: Store) -> None:
        """By status, task and label, each compared exactly; by none of them everything."""
        mark = uuid4().hex
        names = [f"{mark}{each}" for each in ("e", "E", "e ", "é", "", "e_", "ee")]
        written = [
            replace(a_record(), task=task, label=label, status=status)
            for task in names[:-1]
            for label, status in ((task, Status.UNKNOWN), ("", Status.IN_PROGRESS))
        ]
        for each in written:
            store.swap(each, None)

        assert {each.key for each in store.scan()} >= {each.key for each in written}
        for name in (*names, *(f"{mark}{pattern}" for pattern in "_%*?"), "", "%", "*"):
            of_task = [each for each in written if each.task == name]
            assert {each.key for each in store.scan(task=name)} == {each.key for each in of_task}
            assert list(store.scan(task=name, status=Status.UNKNOWN)) == of_task[:1]
            assert list(store.scan(task=name, status=Status.FAILED)) == []
            if name:
                assert list(store.scan(label=name)) == of_task[:1]
                assert list(store.scan(label=name, task=name, status=Status.UNKNOWN)) == of_task[:1]
            if name and isinstance(store, IndexedStore):
                assert {each.key for each in store.scan(name=name)} >= {each.key for each in of_task[:1]}
                prefixed = {each.key for each in written if each.label.startswith(name)}
                assert {each.key for each in store.scan(label_prefix=name)} >= prefixed

    def test_provisioning_and_closing_again_are_harmless(self, store: Store) -> None:
        """Also at once, as from several machines; a closed store may be used again and opens new connections."""
        record = a_claim(store)

        store.provision()
        race([store.provision] * 4)
        assert store.get(record.key) == record

        store.close()
        store.close()
        assert store.get(record.key) in ((record,) if self.shared_by_processes else (record, None))

    def test_clock_counts_milliseconds_and_does_not_jump(self, store: Store) -> None:
        """Since the epoch, in this century, at the speed of real time and in any time zone.

        What replies teach about a server's time is a correction, not another time.
        """
        assert type(store.now()) is int
        assert 1_700_000_000_000 < store.now() < 4_100_000_000_000
        asked = time.monotonic()
        before = store.now()
        answered = time.monotonic()
        wait_until(lambda: time.monotonic() > answered + 0.05)
        asked_again = time.monotonic()
        passed = store.now() - before
        assert (asked_again - answered) * 1000 - 25 <= passed <= (time.monotonic() - asked) * 1000 + 25

        readings = []
        for there in ("UTC", "EAST-12", "WEST+12"):
            with patch.dict(os.environ, TZ=there):
                time.tzset()
                readings.append(store.now())
        time.tzset()
        assert max(readings) - min(readings) < 3_600_000

        record = a_record()
        start, started = store.now(), time.monotonic()
        for _ in range(10):
            store.swap(record, None)
            assert abs(store.now() - start - (time.monotonic() - started) * 1000) <= _CLOCK_ERROR


def _version(key: str, revision: str) -> Record:
    """A record of several packets, whose every field tells which write it comes from."""
    number, text = int(revision[:12], 16), revision * 200
    status = list(Status)[number % len(Status)]
    return replace(
        a_record(),
        key=key,
        task=key.partition(":")[0],
        revision=revision,
        status=status,
        owner=revision,
        task_id=revision,
        worker=revision,
        fencing_token=number,
        steps={revision: text},
        result=text,
        content_type=revision,
        error=text,
        expires_at=LONG_AFTER if status in (Status.COMPLETED, Status.FAILED) else None,
    )


def _act(store: Store, key: str, chance: random.Random, turns: int = 8) -> list[Exchange]:
    """What one participant of a race does, and is told: moves from what it saw last, some of them late or twice."""
    calls: list[Exchange] = []
    seen: str | None = None
    sent: tuple[str, str | None] | None = None
    for _ in range(turns):
        started = time.monotonic_ns()
        match chance.choice(("get", "get", "swap", "swap", "swap", "resend", "delete")):
            case "get":
                kind, new, expected = "get", None, None
                stored = ask_again(partial(store.get, key))
            case "delete" if seen is not None:
                kind, new, expected = "delete", None, seen
                is_deleted = ask_again(partial(store.delete, key, seen))
                calls.append(Exchange(kind, new, expected, is_deleted, started, time.monotonic_ns()))
                continue
            case choice:
                kind = "swap"
                new, expected = sent if choice == "resend" and sent else (new_nonce(), seen)
                sent = new, expected
                stored = ask_again(partial(store.swap, _version(key, new), expected))
        ended = time.monotonic_ns()
        assert stored is None or stored == _version(key, stored.revision), f"nobody wrote this record: {stored}"
        seen = stored.revision if stored else None
        calls.append(Exchange(kind, new, expected, seen, started, ended))
    return calls


def _look(store: Store, task: str, untouched: dict[str, Record]) -> list[Exchange]:
    for _ in range(_ROUNDS):
        scanned = {each.key: each for each in ask_again(lambda: list(store.scan(task=task)))}
        assert scanned.items() >= untouched.items()
        for each in scanned.values():
            assert each == _version(each.key, each.revision), f"nobody wrote this record: {each}"
    return []


def _anything(chance: random.Random, key: str, stored: Record | None) -> Record:
    """A record in whose fields anything is that one can hold; sometimes of the attempt that has the stored one."""
    status, number = chance.choice(list(Status)), chance.choice(_NUMBERS)
    texts = ("worker", "app", "process", "label", "trace")
    return replace(
        a_record(),
        key=key,
        status=status,
        owner=chance.choice((stored.owner if stored else "", new_nonce(), "")),
        fingerprint=chance.choice(("f" * 64, None)),
        task=f"t{chance.choice(_TEXTS)}",
        task_id=f"{chance.choice(_TEXTS)}id",
        fencing_token=number,
        lease_until=number,
        created_at=number,
        updated_at=number,
        attempts=min(number, 2**31 - 1),
        takeovers=min(chance.choice(_NUMBERS), 2**31 - 1),
        error=chance.choice((None, *_TEXTS)),
        result=chance.choice(_RESULTS),
        content_type=chance.choice((None, *(f"text/{each}" for each in _TEXTS))),
        steps=chance.choice(_STEPS_OF_AN_ATTEMPT),
        verdict=chance.choice(({}, {"by": "ann", "at": 2**53 + 1, "reason": chance.choice(_TEXTS)})),
        expires_at=chance.choice((None, LONG_AFTER)) if status in {Status.COMPLETED, Status.FAILED} else None,
        **{name: chance.choice(_TEXTS) for name in texts},  # type: ignore[arg-type]
    )


def _unlike(chance: random.Random, stored: Record | None, sent: list[tuple[Record, str | None]]) -> str:
    """What is not the stored revision: one of before, or of elsewhere, or what a collation would take for it."""
    others = [new.revision for new, _ in sent if stored is None or new.revision != stored.revision]
    if stored is not None:
        near = stored.revision
        others += [near.upper() if near != near.upper() else f"{near}x", f"{near} ", near[:5], f"{near}x", stored.owner]
    return chance.choice([*others, "no such revision"])


def _assert_same(stored: Record | None, told: Record | None, where: str) -> None:
    assert stored == told, f"{where}: {stored} in place of {told}"
    if stored is None or told is None or stored is told:
        return
    for each in fields(Record):  # what == does not tell: a status is no text, a number no flag and no float
        found, right = getattr(stored, each.name), getattr(told, each.name)
        if isinstance(right, dict):
            assert json.dumps(found, sort_keys=True) == json.dumps(right, sort_keys=True), f"{where}: {each.name}"
        else:
            assert type(found) is type(right), f"{where}: {each.name} is of type {type(found).__name__}"
