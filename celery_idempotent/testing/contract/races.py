"""The contract of a store for callers at once: threads, instances, processes."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from typing import Any
from uuid import uuid4

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.contract.base import StoreTests
from celery_idempotent.testing.contract.history import RecordedKey, is_linearizable, shown
from celery_idempotent.testing.contract.parallel import ending, in_children, race
from celery_idempotent.testing.contract.records import LONG_AFTER, a_record, a_rival

_RACERS = 8
_ROUNDS = 20


class RacesContract(StoreTests):
    """Of many callers one wins, and nobody sees anything but one history."""

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

    def test_instances_race_as_threads_do(self, store: Store) -> None:
        """Exactly one wins, too, if the racers use two instances."""
        with self.another(store) as other:
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
