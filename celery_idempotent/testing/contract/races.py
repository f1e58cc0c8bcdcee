"""The contract of a store for callers at once: threads, instances, processes."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from typing import Any, ClassVar
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract.history import RecordedKey, is_linearizable, shown
from celery_idempotent.testing.contract.parallel import in_children, race
from celery_idempotent.testing.contract.records import LONG_AFTER, a_record, a_rival

_RACERS = 8
_ROUNDS = 20


class RacesContract:
    """Of many callers one wins, and nobody sees anything but one history."""

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
                    turn(old, new)
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
                    scanned = list(store.scan(task=task))
                    for seen in (store.get(key), store.swap(a_rival(versions[0]), None), *scanned):
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
