"""A body's transaction: effect and record together, whatever becomes of the commit's answer."""

from collections import deque
from dataclasses import replace
from typing import Any, Literal

import pytest
from celery import Celery

from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.delivery import Outcome
from celery_idempotent.engine.transaction import BodyTransaction, derived_id
from celery_idempotent.errors import LeaseLost, PolicyError, ResultLost, StoreUnavailable
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import OutboxMessage, RecordTooLarge
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FaultyStore
from tests.support.scene import JSON, Scene

Fate = Literal["committed", "committed, reply lost", "undone, reply lost", "refused", "struck"]


class _Bank(MemoryStore):
    """A store beside a ledger, which changes when a transaction is committed."""

    def __init__(self, now: Any) -> None:
        super().__init__(now)
        self.ledger: list[str] = []
        self.outbox: list[OutboxMessage] = []
        #: What becomes of the coming commits.
        self.fates: deque[Fate] = deque()
        self.open = 0
        self.used: list[Any] = []
        self.most = 10_000

    def begin(self, using: Any = None) -> "_Transaction":
        self.used.append(using)
        self.open += 1
        return _Transaction(self)


class _Transaction:
    def __init__(self, bank: _Bank) -> None:
        self.bank = bank
        self.entries: list[str] = []
        self.messages: list[OutboxMessage] = []
        self.write: tuple[Record, str | None] | None = None

    @property
    def connection(self) -> "_Transaction":
        return self

    def execute(self, statement: str) -> None:
        self.entries.append(statement)

    def enqueue(self, message: OutboxMessage) -> None:
        self.messages.append(message)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if len(new.result or "") > self.bank.most:
            raise RecordTooLarge("full")
        stored = self.bank.get(new.key)
        if stored is None or stored.revision != expected:
            return stored
        self.write = new, expected
        return new

    def commit(self) -> None:
        fate = self.bank.fates.popleft() if self.bank.fates else "committed"
        if fate == "struck":
            raise TimeoutError
        self.bank.open -= 1
        if fate == "refused":
            raise ValueError("a deferred constraint")
        if fate != "undone, reply lost":
            assert self.write is not None
            self.bank.swap(*self.write)
            self.bank.ledger += self.entries
            self.bank.outbox += self.messages
        if fate != "committed":
            raise StoreUnavailable("bank", "commit", fate)

    def rollback(self) -> None:
        self.bank.open -= 1


class _Passing(FaultyStore):
    """Planned faults for swaps; transactions go through."""

    def begin(self, using: Any = None) -> _Transaction:
        assert isinstance(self.store, _Bank)
        return self.store.begin(using)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.store = _Passing(_Bank(scene.clock.now))
    return scene


@pytest.fixture
def bank(scene: Scene) -> _Bank:
    assert isinstance(scene.store.store, _Bank)
    return scene.store.store


def _book(handle: ProtectedAttempt) -> Any:
    with handle.transaction() as tx:
        tx.execute("booked")
        return tx.done({"booked": (1, 2)})


def test_effect_and_result_are_committed_together(scene: Scene, bank: _Bank) -> None:
    """The claim is one swap, and nothing else is written outside the transaction."""
    assert scene.perform(_book) == Outcome({"booked": [1, 2]})
    assert scene.perform(_book) == Outcome({"booked": [1, 2]})

    assert bank.ledger == ["booked"]
    assert scene.record.status is Status.COMPLETED
    assert [each.status for each in scene.store.swaps] == [Status.IN_PROGRESS] * 2
    assert bank.open == 0


def test_exception_undoes_all_and_releases(scene: Scene, bank: _Bank) -> None:
    """As of any body, and the next delivery begins anew."""

    def fails(handle: ProtectedAttempt) -> None:
        with handle.transaction() as tx:
            tx.execute("booked")
            tx.done(1)
            raise LookupError

    with pytest.raises(LookupError):
        scene.perform(fails)

    assert (bank.ledger, bank.open, scene.names[-1]) == ([], 0, "released")
    assert scene.perform(_book) == Outcome({"booked": [1, 2]})


def test_zombie_commits_nothing(scene: Scene, bank: _Bank) -> None:
    """The claim is checked again inside the transaction."""

    def stalls(handle: ProtectedAttempt) -> None:
        with handle.transaction() as tx:
            tx.execute("booked")
            scene.steal()
            tx.done(1)

    def body(handle: ProtectedAttempt) -> None:
        with pytest.raises(LeaseLost):
            stalls(handle)
        raise LookupError

    assert scene.perform(body) == Outcome("theirs")
    assert (bank.ledger, bank.open) == ([], 0)


@pytest.mark.parametrize("lost", [0, 1, 5])
def test_commit_whose_reply_was_lost_is_found_committed(scene: Scene, bank: _Bank, lost: int) -> None:
    """The body's result counts, also where the store is out of reach for a while."""
    bank.fates.append("committed, reply lost")
    scene.store.faults.extend(["none", *["request lost"] * lost])  # type: ignore[list-item]

    assert scene.perform(_book) == Outcome({"booked": [1, 2]})
    assert bank.ledger == ["booked"]
    assert scene.names == ["claimed", *["store_unavailable"] * (lost > 1), "completed"]


def test_commit_that_was_undone_is_the_bodys_failure(scene: Scene, bank: _Bank) -> None:
    """It is certain that it was undone, so the claim is released and the next delivery books."""
    bank.fates.append("undone, reply lost")

    with pytest.raises(StoreUnavailable):
        scene.perform(_book)

    assert (bank.ledger, scene.names[-1]) == ([], "released")
    assert scene.perform(_book) == Outcome({"booked": [1, 2]})
    assert bank.ledger == ["booked"]


def test_undone_commit_of_a_zombie_is_a_loss(scene: Scene, bank: _Bank) -> None:
    """Somebody took over while the commit was in doubt: their result counts."""
    bank.fates.append("undone, reply lost")

    def body(handle: ProtectedAttempt) -> None:
        def interfere(record: Record) -> None:
            scene.store.before_swap = lambda record: None
            scene.steal()

        scene.store.before_swap = interfere
        _book(handle)

    assert scene.perform(body) == Outcome("theirs")
    assert bank.ledger == []


def test_refused_commit_is_the_databases_own_error(scene: Scene, bank: _Bank) -> None:
    """A deferred constraint speaks at the commit; the claim is still ours, and released."""
    bank.fates.append("refused")

    with pytest.raises(ValueError, match="deferred constraint"):
        scene.perform(_book)

    assert (bank.ledger, scene.names[-1]) == ([], "released")


def test_commit_that_a_signal_keeps_from_being_sent_is_undone(scene: Scene, bank: _Bank) -> None:
    """Else the connection would go back with a transaction in it."""
    bank.fates.append("struck")

    with pytest.raises(TimeoutError):
        scene.perform(_book)

    assert (bank.ledger, bank.open, scene.names[-1]) == ([], 0, "released")


def test_block_that_a_signal_keeps_from_being_ended_is_undone_with_its_claim(
    scene: Scene, bank: _Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the record's row, and the release would wait for it."""

    def struck(*error: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(BodyTransaction, "__exit__", struck)
    with pytest.raises(TimeoutError):
        scene.perform(_book)

    assert (bank.ledger, bank.open, scene.names[-1]) == ([], 0, "released")


def test_block_must_state_its_result(scene: Scene, bank: _Bank) -> None:
    """A forgotten tx.done() undoes the block instead of committing effects without a record."""

    def forgets(handle: ProtectedAttempt) -> None:
        with handle.transaction() as tx:
            tx.execute("booked")

    with pytest.raises(PolicyError, match=r"return tx\.done"):
        scene.perform(forgets)

    assert (bank.ledger, bank.open) == ([], 0)


def test_result_without_room_undoes_the_block(scene: Scene, bank: _Bank) -> None:
    """Nothing has happened yet, so the author can return less."""
    bank.most = 5

    with pytest.raises(PolicyError, match="return less"):
        scene.perform(_book)

    assert (bank.ledger, bank.open) == ([], 0)


def test_result_that_cannot_be_encoded_is_lost_not_undone(scene: Scene, bank: _Bank) -> None:
    """As for any task: the effect counts."""
    odd = object()

    def body(handle: ProtectedAttempt) -> Any:
        with handle.transaction() as tx:
            tx.execute("booked")
            return tx.done(odd)

    assert scene.perform(body) == Outcome(odd)
    assert bank.ledger == ["booked"]
    with pytest.raises(ResultLost):
        scene.perform(body)


def test_operation_commits_once(scene: Scene) -> None:
    """A second transaction would be an effect without a record."""

    refusals = []

    def twice(handle: ProtectedAttempt) -> None:
        _book(handle)
        try:
            handle.transaction()
        except PolicyError as error:  # what a body raises after its commit changes nothing, so it is noted
            refusals.append(error.remedy)

    assert scene.perform(twice) == Outcome({"booked": [1, 2]})
    assert refusals == ["an operation commits once; do it all in one"]


def test_handle_is_of_no_use_outside_its_block(scene: Scene) -> None:
    """What is done after the block would not be in the transaction."""
    refusals = []

    def late(handle: ProtectedAttempt) -> None:
        with handle.transaction() as tx:
            tx.done(1)
        for use in (lambda: tx.execute("late"), lambda: tx.done(2), lambda: tx.connection):
            try:
                use()
            except PolicyError as error:  # what a body raises after its commit changes nothing, so it is noted
                refusals.append(error.value)

    assert scene.perform(late) == Outcome(1)
    assert refusals == ["outside its block"] * 3


def test_users_connection_is_handed_to_the_store(scene: Scene, bank: _Bank) -> None:
    """An ORM session of the user's takes the place of the store's own connection."""

    def body(handle: ProtectedAttempt) -> Any:
        with handle.transaction("a session") as tx:
            return tx.done(1)

    scene.perform(body)

    assert bank.used == ["a session"]


def test_store_without_transactions_says_so() -> None:
    """Before anything happens, and naming what is needed."""
    with pytest.raises(PolicyError, match="needs an SQL store"):
        Scene().perform(lambda handle: handle.transaction())


class TestOutbox:
    """Messages that are published if and only if the transaction commits."""

    @pytest.fixture
    def app(self) -> Celery:
        app = Celery("outbox", broker="memory://", set_as_current=False)

        def receipt(order: str, copies: int = 1) -> None:
            pass

        app.task(name="receipt", shared=False)(receipt)
        return app

    def test_message_is_committed_with_the_effect(self, scene: Scene, bank: _Bank, app: Celery) -> None:
        """Tasks and signatures alike, each with a task id that follows from the key."""
        receipt = app.tasks["receipt"]
        ids: list[str] = []

        def body(handle: ProtectedAttempt) -> Any:
            with handle.transaction() as tx:
                ids.append(tx.send(receipt, "o-1", copies=2))
                ids.append(tx.send(receipt.s("o-2").set(queue="mail")))
                return tx.done(1)

        bank.fates.append("undone, reply lost")
        with pytest.raises(StoreUnavailable):
            scene.perform(body)
        assert bank.outbox == []
        scene.perform(body)

        first, second = bank.outbox
        assert [first.id, second.id] == ids[2:] == ids[:2]
        assert len(set(ids)) == 2
        signature = JSON.decode(_encoded(first))
        assert (signature["task"], signature["args"], signature["kwargs"]) == ("receipt", ["o-1"], {"copies": 2})
        assert JSON.decode(_encoded(second))["options"] == {"queue": "mail"}

    def test_derived_id_is_a_uuid(self) -> None:
        """Celery and every tool around it expect one."""
        assert derived_id("ab" * 32) == "abababab-abab-4bab-abab-abababababab"


def _encoded(message: OutboxMessage) -> Encoded:
    return Encoded(message.data, message.content_type)


def test_attempt_that_has_committed_is_over_and_has_lost_nothing(scene: Scene) -> None:
    """The heartbeat that comes after it renews nothing, and a body that asks is not told of a loss."""
    reached: list[Record] = []

    def body(handle: ProtectedAttempt) -> Any:
        booked = _book(handle)
        scene.clock.advance(61_000)
        before = scene.record
        handle._claim.renew()
        handle.ensure_owned()
        reached.append(before)
        return booked

    scene.perform(body)

    assert reached == [scene.record]


def test_result_that_its_policy_does_not_keep_is_committed_as_none(scene: Scene, bank: _Bank) -> None:
    """The effect is there, and whoever comes again gets what is recorded."""
    scene.codec = replace(JSON, private=True)

    assert scene.perform(_book) == Outcome({"booked": (1, 2)})
    assert scene.perform(_book) == Outcome(None)

    assert bank.ledger == ["booked"]
