"""A body's transaction: effect and record together, whatever becomes of the commit's answer."""

from collections import deque
from typing import Any

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
from tests.support.scene import JSON, PlannedStore, Scene, raising


class _Bank(MemoryStore):
    """A store beside a ledger, which changes when a transaction is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: list[str] = []
        self.outbox: list[OutboxMessage] = []
        #: What becomes of the coming commits.
        self.fates: deque[str] = deque()
        self.open: set[_Transaction] = set()
        self.used: list[Any] = []
        self.most = 10_000

    def begin(self, using: Any = None) -> "_Transaction":
        self.used.append(using)
        begun = _Transaction(self)
        self.open.add(begun)
        return begun


class _Transaction:
    def __init__(self, bank: _Bank) -> None:
        self.bank = bank
        self.entries: list[str] = []
        self.messages: list[OutboxMessage] = []
        self.is_undone = False
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
        self.bank.open.discard(self)
        if fate == "refused":
            raise ValueError("a deferred constraint")
        if fate != "undone":
            assert self.write is not None
            self.bank.swap(*self.write)
            self.bank.ledger += self.entries
            self.bank.outbox += self.messages
        if fate != "committed":
            raise StoreUnavailable("bank", "commit", fate)

    def rollback(self) -> None:
        assert not self.is_undone
        self.is_undone = True
        self.bank.open.discard(self)


class _Passing(PlannedStore):
    """What is planned for swaps; transactions go through."""

    def begin(self, using: Any = None) -> _Transaction:
        assert isinstance(self.store, _Bank)
        return self.store.begin(using)


@pytest.fixture
def bank() -> _Bank:
    return _Bank()


@pytest.fixture
def scene(bank: _Bank) -> Scene:
    scene = Scene()
    scene.store, bank.now = _Passing(scene.clock), scene.clock.now
    scene.store.store = bank
    return scene


BOOKED = {"booked": [1, 2]}


def _booking(result: Any = None, error: BaseException | None = None) -> Any:
    """A body that books: with a result, or without, or with an error in its block."""

    def body(handle: ProtectedAttempt) -> Any:
        with handle.transaction() as tx:
            tx.execute("booked")
            done = None if result is None else tx.done(result)
            if error:
                raise error
        return done

    return body


_book, _fails, _forgets = _booking({"booked": (1, 2)}), _booking(1, LookupError()), _booking()


WAITED = "claimed store_unavailable completed"


@pytest.mark.parametrize(
    ("body", "fate", "lost", "answer", "told", "again"),
    [
        (_book, "committed", 0, BOOKED, "claimed completed", BOOKED),
        # A commit whose reply was lost is found committed, also where the store is out of reach for a while.
        (_book, "reply lost", 0, BOOKED, "claimed completed", BOOKED),
        (_book, "reply lost", 1, BOOKED, "claimed completed", BOOKED),
        (_book, "reply lost", 5, BOOKED, WAITED, BOOKED),
        (_book, "undone", 0, StoreUnavailable, "claimed released", BOOKED),
        (_book, "undone", 5, StoreUnavailable, "claimed store_unavailable released", BOOKED),
        (_book, "refused", 0, ValueError, "claimed released", BOOKED),
        (_book, "struck", 0, TimeoutError, "claimed released", BOOKED),
        (_fails, "committed", 0, LookupError, "claimed released", BOOKED),
        (_forgets, "committed", 0, PolicyError, "claimed released", BOOKED),
    ],
)
def test_effect_and_result_are_committed_together_or_not_at_all(
    scene: Scene, bank: _Bank, body: Any, fate: str, lost: int, answer: Any, told: str, again: Any
) -> None:
    """Nothing is written outside the transaction but the claim; what was undone for certain is done by the next."""
    bank.fates.append(fate)
    scene.plan("renewal", *["request lost"] * lost)
    assert scene.answer(lambda: scene.perform(body)) == answer
    assert (scene.told, bank.open, bank.ledger) == (told, set(), ["booked"] if answer == BOOKED else [])
    assert (scene.status is Status.COMPLETED) is (answer == BOOKED)
    assert scene.answer(lambda: scene.perform(_book)) == again
    assert bank.ledger == ["booked"]


@pytest.mark.parametrize("moment", ["in the block", "in the commit"])
def test_zombie_commits_nothing(scene: Scene, bank: _Bank, moment: str) -> None:
    """The claim is checked again inside; so is one that somebody took over while an undone commit was in doubt."""

    def body(handle: ProtectedAttempt) -> None:
        def stall() -> None:
            with handle.transaction() as tx:
                tx.execute("booked")
                if moment == "in the block":
                    scene.steal()
                tx.done(1)

        with pytest.raises(LeaseLost):
            stall()
        raise LookupError

    if moment == "in the commit":
        bank.fates.append("undone")
        scene.plan("renewal", lambda swap: (scene.steal(), swap())[1])  # type: ignore[func-returns-value]
    assert scene.perform(body) == Outcome("theirs")
    assert (bank.ledger, bank.open) == ([], set())


def test_block_that_a_signal_keeps_from_being_ended_is_undone_with_its_claim(
    scene: Scene, bank: _Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the record's row, and the release would wait for it."""
    monkeypatch.setattr(BodyTransaction, "__exit__", raising(TimeoutError()))
    with pytest.raises(TimeoutError):
        scene.perform(_book)
    assert (bank.ledger, bank.open, scene.names[-1]) == ([], set(), "released")


def test_result_without_room_undoes_the_block(scene: Scene, bank: _Bank) -> None:
    """Nothing has happened yet, so the author can return less; one that cannot be encoded is lost, not undone."""
    bank.most, odd = 5, object()
    with pytest.raises(PolicyError, match="return less"):
        scene.perform(_book)
    assert (bank.ledger, bank.open) == ([], set())
    assert [scene.answer(lambda: scene.perform(_booking(odd))) for _ in range(2)] == [odd, ResultLost]
    assert bank.ledger == ["booked"]
    scene.clock.advance(8 * 86_400_000)
    scene.codec = JSON._replace(private=True)  # what its policy does not keep is committed as None
    assert [scene.perform(_book) for _ in range(2)] == [Outcome({"booked": (1, 2)}), Outcome(None)]
    assert bank.ledger == ["booked", "booked"]


def test_operation_commits_once_in_its_block_and_in_a_store_that_can(scene: Scene) -> None:
    """What is done after it would be an effect without a record."""
    refused: list[Any] = []

    def late(handle: ProtectedAttempt) -> None:
        with handle.transaction() as tx:
            tx.done(1)
        uses = (lambda: tx.execute("late"), lambda: tx.done(2), lambda: tx.connection, handle.transaction)
        refused.extend(scene.answer(use) for use in uses)

    assert scene.perform(late) == Outcome(1)
    assert refused == [PolicyError] * 4
    scene.clock.advance(8 * 86_400_000)
    with pytest.raises(PolicyError, match="without done"):
        scene.perform(_forgets)
    with pytest.raises(PolicyError, match="SQL"):
        Scene().perform(lambda handle: handle.transaction())


def test_message_is_committed_with_the_effect(scene: Scene, bank: _Bank) -> None:
    """Tasks and signatures alike, each with a task id that follows from the key, and is a UUID."""
    app = Celery("outbox", broker="memory://", set_as_current=False)
    ids: list[str] = []

    @app.task(name="receipt", shared=False)
    def receipt(order: str, copies: int = 1) -> None: ...

    def body(handle: ProtectedAttempt) -> Any:
        with handle.transaction("a session") as tx:
            ids.append(tx.send(receipt, "o-1", copies=2))
            ids.append(tx.send(receipt.s("o-2").set(queue="mail")))
            return tx.done(1)

    bank.fates.append("undone")
    with pytest.raises(StoreUnavailable):
        scene.perform(body)
    assert bank.outbox == []
    scene.perform(body)

    assert [each.id for each in bank.outbox] == ids[2:] == ids[:2]
    assert (len(set(ids)), bank.used) == (2, ["a session"] * 2), "the user's connection is handed to the store"
    first, second = (JSON.decode(Encoded(each.data, each.content_type)) for each in bank.outbox)
    assert (first["task"], first["args"], first["kwargs"]) == ("receipt", ["o-1"], {"copies": 2})
    assert second["options"] == {"queue": "mail"}
    assert derived_id("ab" * 32) == "abababab-abab-4bab-abab-abababababab"


def test_attempt_that_has_committed_is_over_and_has_lost_nothing(scene: Scene, bank: _Bank) -> None:
    """Also after a block that failed, and was undone at once: nothing is renewed, and who asks is told of no loss."""
    reached: list[Record] = []

    def body(handle: ProtectedAttempt) -> None:
        with pytest.raises(LookupError):
            _fails(handle)
        assert not bank.open
        _book(handle)
        scene.clock.advance(61_000)
        before = scene.record
        handle._claim.renew()
        handle.ensure_owned()
        reached.append(before)

    scene.perform(body)
    assert reached == [scene.record]
