"""The contract that every store passes, for one caller and for callers at once."""

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
from unittest.mock import patch
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.protocol.record import SCHEMA, Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.testing.contract.parallel import (
    RecordedKey,
    in_children,
    is_linearizable,
    race,
    shown,
    wait_until,
)
from celery_idempotent.testing.contract.records import LONG_AFTER, a_claim, a_record, a_rival, ask_again, reply_of

_RACERS = 8
_ROUNDS = 20
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

    @contextmanager
    def another(self, store: Store) -> Iterator[Store]:
        """The same, closed at the end of the block."""
        other = self.reopen(store)
        try:
            yield other
        finally:
            if other is not store:
                other.close()

    def test_one_racer_wins(self, store: Store) -> None:
        """Of many claims, takeovers and deletions at once, by two instances, one wins and all are told which."""
        with self.another(store) as other:
            for _ in range(_ROUNDS):
                key, expected = uuid4().hex, None
                for _ in range(2):  # a claim, then a takeover
                    contenders = [replace(a_record(), key=key) for _ in range(_RACERS)]
                    calls = [partial((store, other)[n % 2].swap, each, expected) for n, each in enumerate(contenders)]
                    winner = _one_winner(contenders, race(calls))
                    expected = winner.revision
                new, late = a_rival(winner), a_rival(winner)
                endings: list[Callable[[], Any]] = [partial(store.swap, new, expected)]
                endings += [partial(each.delete, key, winner.revision) for each in (store, other) * 2]
                stored, *deleted = race(endings)
                assert (stored, deleted.count(True)) in ((new, 0), (None, 1))
                assert store.get(key) == stored
                if stored is None:
                    claimed, refused = race([partial(store.swap, new, None), partial(other.swap, late, expected)])
                    assert claimed == store.get(key) == new
                    assert refused in (None, new)

    def test_mixed_races_have_one_history(self, store: Store) -> None:
        """Claims, renewals, takeovers, endings, deletions and resends at once look as if one came after the other."""
        for seed in range(6):
            recorded = RecordedKey(store, uuid4().hex)

            race([partial(_acts, recorded, random.Random(f"{seed} {actor}")) for actor in range(6)])  # noqa: S311

            recorded.get()
            assert is_linearizable(recorded.calls), f"no register behaves like this:\n{shown(recorded.calls)}"

    def test_readers_beside_a_writer_see_whole_records(self, store: Store) -> None:
        """Gets, losing claims and scans meet one whole record or the other, and a scan all that nobody touches."""
        task, key = uuid4().hex, uuid4().hex
        versions = [_filled(task, key) for _ in range(10)]
        untouched = [replace(a_record(), task=task) for _ in range(10)]
        # Made in advance: the less a writer does between its writes, the more often a reader meets it in one.
        passing = [(replace(a_record(), task=task), new_nonce()) for _ in range(_ROUNDS)]
        changed = [(first, replace(first, revision=nonce, status=Status.UNKNOWN)) for first, nonce in passing]
        written = {
            each.revision: each for each in (*versions, *untouched, *(each for pair in changed for each in pair))
        }
        for record in (versions[0], *untouched):
            store.swap(record, None)
        is_over = threading.Event()

        def write(turns: Iterator[Any], turn: Callable[[Any, Any], object]) -> None:
            try:
                for old, new in turns:
                    ask_again(partial(turn, old, new))
                    if is_over.is_set():
                        return
            finally:
                is_over.set()  # also if it fails, so that nobody waits for it

        def replaced(old: Record, new: Record) -> None:
            assert store.swap(new, old.revision) == new

        def comes_and_goes(first: Record, second: Record) -> None:
            store.swap(first, None)
            store.swap(second, first.revision)
            store.delete(second.key, second.revision)

        def look() -> None:
            try:
                for _ in range(_ROUNDS):
                    scanned, rival = list(store.scan(task=task)), a_rival(versions[0])
                    for seen in (store.get(key), ask_again(partial(store.swap, rival, None)), *scanned):
                        assert seen is not None
                        assert seen == written[seen.revision]
                    assert {each.key for each in scanned} >= {each.key for each in untouched}
            finally:
                is_over.set()

        writers: list[Callable[[], None]] = [
            partial(write, pairwise(cycle(versions)), replaced),
            partial(write, cycle(changed), comes_and_goes),
        ]
        race([*writers, look])

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
        with self.another(store) as other, ThreadPoolExecutor(1) as elsewhere:
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
        anew = a_rival(outcome)
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
                expiry = LONG_AFTER if status in (Status.COMPLETED, Status.FAILED) else None
                new = replace(a_record(), key=recorded.key, status=status, expires_at=expiry)
                sent = (new, seen.revision if seen else None)
                seen = recorded.swap(*sent)


def _one_winner(contenders: list[Record], answers: Sequence[Record | None]) -> Record:
    winners = [each for each, answer in zip(contenders, answers, strict=True) if answer == each]
    assert len(winners) == 1, f"{len(winners)} of {len(contenders)} racers were told that they won"
    assert list(answers) == winners * len(contenders), "a loser was not told who won"
    return winners[0]


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
