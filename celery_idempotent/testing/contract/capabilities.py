"""The contracts of an outage, and of what a store may offer beyond the seven methods; each of those has its protocol.

A store that offers a capability gets a second subclass, with the same fixture ``store``, and those that the
contract's docstring names.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar, Protocol

from celery_idempotent.engine.claim import new_nonce
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import (
    CommittingStore,
    Outbox,
    OutboxMessage,
    PurgeableStore,
    Store,
    TakenMessage,
    TransactionalStore,
    VerifiableStore,
    WaitingMessage,
    WriteFailed,
)
from celery_idempotent.testing.contract.parallel import race
from celery_idempotent.testing.contract.records import (
    a_claim,
    a_completion,
    a_record,
    a_rival,
    ask_again,
    claim_over,
    reply_of,
)

_ROUNDS = 10

_RACERS = 6

_MEANWHILE = 0.3
"""Seconds in which a store that does not hold a record lets it be taken over. One that does lets nobody in."""

_HOLD = 600_000
"""Milliseconds; longer than any test."""

_CLOCK_ERROR = 60_000
"""Milliseconds by which a store's clock may be corrected, and then some; far less than the hold."""


class _WithOutbox(TransactionalStore, Outbox, Protocol): ...


class UsersWrites(Protocol):
    """What a user has written by ``attempt.commit``."""

    def made(self) -> Mapping[str, Any]:
        """A write that the store can make; another one at every call."""

    def refused(self) -> Mapping[str, Any]:
        """A write whose own condition does not hold."""

    def count(self) -> int:
        """How many of those from :meth:`made` were made."""


class UsersRows(Protocol):
    """What a user does in ``attempt.transaction``."""

    def insert(self, connection: Any) -> None:
        """Insert a row by :attr:`celery_idempotent.stores.Transaction.connection`."""

    def count(self) -> int:
        """How many rows everybody sees."""


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

    def test_purge_deletes_forgotten_outcomes_only(self, store: PurgeableStore) -> None:
        """Outcomes past their expiry go; others stay, as does whatever has no expiry, its lease long over."""
        seconds = store.now() // 1000
        forgotten = [_outcome(store, status, seconds - 5) for status in (Status.COMPLETED, Status.FAILED)]
        kept = [_outcome(store, status, seconds + 600) for status in (Status.COMPLETED, Status.FAILED)]
        kept += [a_claim(store, status=status, lease_until=1, updated_at=1) for status in Status]

        _purge_all(store)

        assert [store.get(each.key) for each in forgotten] == [None, None]
        assert [store.get(each.key) for each in kept] == kept

    def test_purge_keeps_to_its_limit(self, store: PurgeableStore) -> None:
        """A batch is no larger than was asked, and what it reports is what it deleted."""
        forgotten = [_outcome(store, Status.COMPLETED, store.now() // 1000 - 5) for _ in range(7)]

        while remaining := sum(store.get(each.key) is not None for each in forgotten):
            deleted = store.purge(2)
            still_there = sum(store.get(each.key) is not None for each in forgotten)
            assert 0 <= remaining - still_there <= deleted <= 2
            assert deleted > 0, "nobody else writes, and yet nothing is deleted"

        assert isinstance(store.purge(1), int)

    def test_purge_lets_claims_win(self, store: PurgeableStore) -> None:
        """A forgotten outcome that is claimed again while it is being purged is a claim, and stays."""
        for _ in range(_ROUNDS):
            forgotten = [_outcome(store, Status.COMPLETED, store.now() // 1000 - 5) for _ in range(8)]
            claims = [a_rival(each) for each in forgotten]
            calls: list[Callable[[], Any]] = [partial(store.purge, 100)] * 2
            calls += [partial(claim_over, store, *each) for each in zip(forgotten, claims, strict=True)]

            race(calls)
            _purge_all(store)

            assert [store.get(each.key) for each in claims] == claims


class VerifiableContract:
    """Tests of :class:`~celery_idempotent.stores.VerifiableStore`; needs ``store`` and ``misconfigured_store``.

    The second is one that cannot work until somebody changes something: without its table, for instance, or
    without the permission to write.
    """

    def test_verify_accepts_a_working_store_and_writes_nothing(self, store: VerifiableStore) -> None:
        """A worker may start; the check leaves no trace, however often it is made."""
        record = a_claim(store)
        before = {each.key for each in store.scan()}

        for _ in range(3):
            store.verify()

        assert {each.key for each in store.scan()} <= before
        assert store.get(record.key) == record

    def test_verify_refuses_a_store_that_cannot_work(self, misconfigured_store: VerifiableStore) -> None:
        """A worker does not start, and is told what a claim would be told."""
        for ask in (misconfigured_store.verify, partial(misconfigured_store.swap, a_record(), None)):
            assert isinstance(reply_of(ask), StoreMisconfigured)


class CommittingContract:
    """Tests of :class:`~celery_idempotent.stores.CommittingStore`; needs fixtures ``store`` and ``writes``.

    The second is :class:`UsersWrites`, to the same database.
    """

    def test_record_and_writes_happen_together(self, store: CommittingStore, writes: UsersWrites) -> None:
        """All of them, and nothing before."""
        claimed, before = a_claim(store), writes.count()
        done = a_completion(claimed)

        assert store.swap_with(done, claimed.revision, [writes.made(), writes.made()]) == done

        assert (store.get(done.key), writes.count() - before) == (done, 2)

    def test_refused_write_undoes_all(self, store: CommittingStore, writes: UsersWrites) -> None:
        """It is named by its position; the record and the other writes are as they were."""
        claimed, before = a_claim(store), writes.count()

        refused = reply_of(
            lambda: store.swap_with(a_completion(claimed), claimed.revision, [writes.made(), writes.refused()])
        )

        assert isinstance(refused, WriteFailed), f"a write was to be refused, and this came: {refused}"
        assert refused.position == 1
        assert (store.get(claimed.key), writes.count() - before) == (claimed, 0)

    def test_no_write_is_made_where_the_claim_is_gone(self, store: CommittingStore, writes: UsersWrites) -> None:
        """The caller learns whose record it is, or that there is none."""
        claimed, before = a_claim(store), writes.count()
        theirs = a_rival(claimed)
        store.swap(theirs, claimed.revision)

        assert store.swap_with(a_completion(claimed), claimed.revision, [writes.made()]) == theirs
        assert store.swap_with(a_completion(a_record()), new_nonce(), [writes.made()]) is None

        assert (store.get(claimed.key), writes.count() - before) == (theirs, 0)

    def test_commit_that_is_sent_again_is_made_once(self, store: CommittingStore, writes: UsersWrites) -> None:
        """After a lost reply the record tells that it was made."""
        claimed, before = a_claim(store), writes.count()
        done = a_completion(claimed)

        for _ in range(3):
            assert store.swap_with(done, claimed.revision, [writes.made()]) == done

        assert (store.get(done.key), writes.count() - before) == (done, 1)

    def test_racing_commits_have_one_effect(self, store: CommittingStore, writes: UsersWrites) -> None:
        """Of many that expect one revision exactly one is made, and the others are told whose."""
        claimed, before = a_claim(store), writes.count()

        def commit() -> Record | None:
            done = a_completion(claimed)
            return ask_again(lambda: store.swap_with(done, claimed.revision, [writes.made()]))

        told = race([commit] * _RACERS)

        assert told == [store.get(claimed.key)] * _RACERS
        assert writes.count() - before == 1


class TransactionalContract:
    """Tests of :class:`~celery_idempotent.stores.TransactionalStore`; needs fixtures ``store`` and ``rows``.

    The second is :class:`UsersRows`, in the same database.
    """

    def test_record_and_rows_are_committed_together(self, store: TransactionalStore, rows: UsersRows) -> None:
        """And the next transaction starts clean."""
        for _ in range(3):
            claimed, before = a_claim(store), rows.count()
            done = a_completion(claimed)

            transaction = store.begin()
            rows.insert(transaction.connection)
            assert transaction.swap(done, claimed.revision) == done
            transaction.commit()

            assert (store.get(done.key), rows.count() - before) == (done, 1)

    def test_rollback_undoes_both(self, store: TransactionalStore, rows: UsersRows) -> None:
        """And leaves nothing open that the next one could meet."""
        claimed, before = a_claim(store), rows.count()
        for _ in range(3):
            transaction = store.begin()
            rows.insert(transaction.connection)
            transaction.swap(a_completion(claimed), claimed.revision)
            transaction.rollback()

        assert (store.get(claimed.key), rows.count() - before) == (claimed, 0)

    def test_nothing_is_written_where_the_claim_is_gone(self, store: TransactionalStore, rows: UsersRows) -> None:
        """The caller learns whose record it is, and rolls back."""
        claimed, before = a_claim(store), rows.count()
        theirs = a_rival(claimed)
        store.swap(theirs, claimed.revision)

        transaction = store.begin()
        rows.insert(transaction.connection)
        assert transaction.swap(a_completion(claimed), claimed.revision) == theirs
        transaction.rollback()

        assert (store.get(claimed.key), rows.count() - before) == (theirs, 0)

    def test_racing_transactions_have_one_effect(self, store: TransactionalStore, rows: UsersRows) -> None:
        """Of many that expect one revision exactly one is committed."""
        claimed, before = a_claim(store), rows.count()

        won = race([partial(_commit_over, store, rows, claimed)] * _RACERS)

        stored = store.get(claimed.key)
        assert stored is not None
        assert (won.count(True), stored.status, rows.count() - before) == (1, Status.COMPLETED, 1)

    def test_record_is_held_from_the_swap_to_the_end(self, store: TransactionalStore, rows: UsersRows) -> None:
        """A takeover that comes between has to wait, and then meets the outcome."""
        claimed, before = a_claim(store), rows.count()
        done, takeover = a_completion(claimed), a_rival(claimed)

        with ThreadPoolExecutor(1) as thread:
            transaction = store.begin()
            rows.insert(transaction.connection)
            assert transaction.swap(done, claimed.revision) == done
            taken_over = thread.submit(ask_again, lambda: store.swap(takeover, claimed.revision))
            wait([taken_over], timeout=_MEANWHILE)
            transaction.commit()

        assert taken_over.result() == done
        assert (store.get(done.key), rows.count() - before) == (done, 1)


class OutboxContract:
    """Tests of :class:`~celery_idempotent.stores.Outbox`, of a store that is also transactional; needs a fixture
    ``store``. It may hold messages of others, which are deleted.
    """

    def test_messages_are_there_as_they_were_sent_if_the_transaction_is(self, store: _WithOutbox) -> None:
        """Committed with it, undone with it; text and bytes as they were encoded."""
        _drain(store)
        sent = [_message("1")._replace(data='"text \u00e9 \U0001f600"'), _message("2")._replace(data=b"\x00\xff")]
        undone = store.begin()
        undone.enqueue(_message("undone"))
        undone.rollback()
        _enqueue(store, *sent)

        assert [each.message for each in store.take(10, _HOLD)] == sent

    def test_relays_share_messages_and_keep_their_order(self, store: _WithOutbox) -> None:
        """Nobody gets what another has, until that one's time is over; then it comes back, unless it is forgotten."""
        _drain(store)
        ids = [new_nonce() for _ in range(6)]
        _enqueue(store, *map(_message, ids))

        first = store.take(3, _HOLD)
        second = store.take(3, 0)  # by a relay that dies
        third = store.take(3, 0)
        store.forget([each.number for each in third[:1]])
        fourth = store.take(3, _HOLD)

        assert (_ids(first), _ids(second), _ids(third), _ids(fourth)) == (ids[:3], ids[3:], ids[3:], ids[4:])
        assert store.take(3, _HOLD) == []
        store.forget([each.number for each in (*first, *fourth)])
        assert _find(store, *ids) == []

    def test_postponed_message_waits_and_keeps_nobody_back(self, store: _WithOutbox) -> None:
        """For as long as it was told; its failures are counted, whoever tries it, and people are told the last one."""
        _drain(store)
        ids = new_nonce(), new_nonce()
        _enqueue(store, *map(_message, ids))

        for failures, pause in enumerate((0, 0, _HOLD)):
            (refused,) = (each for each in store.take(2, 0) if each.message.id == ids[0])
            assert refused.failures == failures
            before = store.now()
            store.postpone(refused, pause, f"reason {failures}")
        after = store.now()

        assert _ids(store.take(2, 0)) == [ids[1]]
        told, other = _find(store, *ids)
        assert (told.id, told.failures, told.reason) == (ids[0], 3, "reason 2")
        assert before + _HOLD - _CLOCK_ERROR <= told.next_try <= after + _HOLD + _CLOCK_ERROR
        assert abs(told.created_at - before) <= _CLOCK_ERROR
        assert (other.id, other.failures, other.reason) == (ids[1], 0, None)
        assert other.next_try <= after + _CLOCK_ERROR
        assert len(store.waiting(1)) == 1

    def test_message_that_is_given_back_comes_at_once(self, store: _WithOutbox) -> None:
        """It was not tried: nothing is counted, and it keeps its place."""
        _drain(store)
        _enqueue(store, *(_message(str(number)) for number in range(3)))

        store.give_back(store.take(3, _HOLD)[:2])

        assert [(each.message.id, each.failures) for each in store.take(3, _HOLD)] == [("0", 0), ("1", 0)]

    def test_late_word_about_a_message_that_another_has_changes_nothing(self, store: _WithOutbox) -> None:
        """A relay that stalled past its hold neither gives away nor postpones what its successor publishes."""
        _drain(store)
        message = _message(new_nonce())
        _enqueue(store, message)
        (taken,) = store.take(1, 0)
        (again,) = store.take(1, _HOLD)

        store.give_back([taken])
        store.postpone(taken, 0, "late")

        assert store.take(1, _HOLD) == []
        assert [(each.failures, each.reason) for each in _find(store, message.id)] == [(0, None)]
        store.postpone(again, 0, "in time")
        assert [(each.message, each.failures) for each in store.take(1, _HOLD)] == [(message, 1)]

    def test_failing_messages_leave_room_for_others(self, store: _WithOutbox) -> None:
        """However many there are, and however old: others come first, and get half of a look at least."""
        _drain(store)
        _enqueue(store, *(_message(f"refused {number}") for number in range(8)))
        for each in store.take(8, _HOLD):
            store.postpone(each, 0, "refused")
        for _ in range(3):
            store.postpone(store.take(1, _HOLD)[0], 0, "refused again")
        _enqueue(store, *(_message(f"good {number}") for number in range(3)))

        first, second, third = store.take(5, _HOLD), store.take(5, _HOLD), store.take(5, _HOLD)

        assert _ids(first)[:3] == ["good 0", "good 1", "good 2"]
        assert [len(first), len(second), len(third)] == [5, 5, 1]
        assert [each.failures for each in first] == sorted(each.failures for each in first)
        assert len({each.number for each in (*first, *second, *third)}) == 11

    def test_racing_relays_take_each_message_once(self, store: _WithOutbox) -> None:
        """However many look at the same ones; and none is overlooked."""
        _drain(store)
        _enqueue(store, *(_message(str(number)) for number in range(20)))

        def drain() -> list[str]:
            taken: list[str] = []
            while messages := store.take(3, _HOLD):
                taken += _ids(messages)
            return taken

        taken = [each for drained in race([drain] * 4) for each in drained]
        taken += _ids(store.take(100, _HOLD))

        assert sorted(taken, key=int) == [str(number) for number in range(20)]


def _outcome(store: Store, status: Status, expires_at: int) -> Record:
    return a_claim(store, status=status, result="1", expires_at=expires_at)


def _purge_all(store: PurgeableStore) -> None:
    for _ in range(1000):
        deleted = store.purge(1000)
        assert 0 <= deleted <= 1000
        if not deleted:
            return
    raise AssertionError("a thousand purges, and every one of them deleted something")


def _commit_over(store: TransactionalStore, rows: UsersRows, claimed: Record) -> bool:
    """Whether a transaction over the claim was committed; asked again where the store gave up in favour of another."""

    def commit() -> bool:
        done = a_completion(claimed)
        transaction = store.begin()
        try:
            rows.insert(transaction.connection)
            is_ours = transaction.swap(done, claimed.revision) == done
        except BaseException:
            transaction.rollback()
            raise
        (transaction.commit if is_ours else transaction.rollback)()
        return is_ours

    return ask_again(commit)


def _message(task_id: str) -> OutboxMessage:
    return OutboxMessage(task_id, '{"task": "receipt"}', "application/json")


def _enqueue(store: _WithOutbox, *messages: OutboxMessage) -> None:
    transaction = store.begin()
    for each in messages:
        transaction.enqueue(each)
    transaction.commit()


def _drain(store: Outbox) -> None:
    """Messages that others have taken stay theirs, and do not come back in time to disturb."""
    while messages := store.take(100, _HOLD):
        store.forget([each.number for each in messages])


def _find(store: Outbox, *ids: str) -> list[WaitingMessage]:
    return [each for each in store.waiting(1_000_000) if each.id in ids]


def _ids(messages: Sequence[TakenMessage]) -> list[str]:
    return [each.message.id for each in messages]
