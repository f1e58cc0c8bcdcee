"""The contracts of effects that happen with a record, held against stores that are wrong on purpose."""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import OutboxMessage, TakenMessage, WaitingMessage, WriteFailed
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import CommittingContract, OutboxContract, TransactionalContract

_BESIDE = 0.2
"""Seconds between the check and the act of stores that do not lock, so that somebody surely comes between."""


def _revision(record: Record | None) -> str | None:
    return record.revision if record else None


@dataclass
class Kept:
    """A message, who has it until when, and of each failure why."""

    message: OutboxMessage
    written_at: int
    taken_until: int = 0
    taker: str = ""
    reasons: list[str] = field(default_factory=list)


class Database(MemoryStore):
    """Records, rows and messages in memory, with one writer at a time; right, or with one flaw."""

    def __init__(self, flaw: str = "") -> None:
        super().__init__()
        self.flaw = flaw
        self.rows: list[str] = []
        self.messages: dict[int, Kept] = {}
        self.writer = threading.Lock()
        self._numbers = itertools.count(1)

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if self.flaw in {"locks nothing", "does not hold the record"}:
            return super().swap(new, expected)
        with self.writer:
            return super().swap(new, expected)

    def swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        made = ["made" for each in writes if "made" in each]
        if self.flaw == "writes first":
            self.rows += made
        stored = self._records.get(new.key)
        if _revision(stored) != expected and self.flaw != "writes over others":
            self.rows += made * (self.flaw == "writes again" and stored == new)
            return stored
        if self.flaw == "checks, then acts":
            time.sleep(_BESIDE)
        with self._lock:
            stored = self._records.get(new.key)
            if _revision(stored) != expected and self.flaw not in {"checks, then acts", "writes over others"}:
                return stored
            refused = [number for number, each in enumerate(writes) if "refused" in each]
            if refused and self.flaw != "skips what is refused":
                raise WriteFailed(0 if self.flaw == "blames another" else refused[0], "refused")
            self.rows += made * (self.flaw not in {"writes first", "forgets writes"})
            self._records[new.key] = new
        return new

    def made(self) -> Mapping[str, Any]:
        return {"made": 1}

    def refused(self) -> Mapping[str, Any]:
        return {"refused": 1}

    def begin(self, using: Any = None) -> "Change":
        return Change(self)

    def insert(self, connection: Any) -> None:
        connection.append("row")

    def count(self) -> int:
        return len(self.rows)

    def add(self, message: OutboxMessage) -> None:
        if self.flaw == "text only" and isinstance(message.data, bytes):
            message = OutboxMessage(message.id, message.data.decode("latin-1"), message.content_type)
        self.messages[next(self._numbers)] = Kept(message, self.now())

    def take(self, limit: int, hold: int) -> list[TakenMessage]:
        if self.flaw == "relays look at once":
            free = self._free(limit)
            time.sleep(_BESIDE / 10)
            return self._held(free, hold)
        with self._lock:
            return self._held(self._free(limit), hold)

    def _free(self, limit: int) -> list[int]:
        is_for_all, now = self.flaw == "gives to everybody", self.now()
        free = [each for each in sorted(self.messages) if is_for_all or self.messages[each].taken_until <= now]
        if self.flaw == "the oldest first, whatever became of them":
            return free[:limit]
        fresh = [each for each in free if not self.messages[each].reasons][: -(limit // -2)]
        others = [each for each in free if each not in fresh]
        return (fresh + others)[:limit] if self.flaw != "failing ones never" else fresh

    def _held(self, numbers: Sequence[int], hold: int) -> list[TakenMessage]:
        until = self.now() + (hold or 60_000 * (self.flaw == "holds for ever"))
        taker, found = str(next(self._numbers)), []
        for number in numbers:
            kept = self.messages[number]
            kept.taken_until, kept.taker = until, taker
            found.append(TakenMessage(number, kept.message, len(kept.reasons), taker))
        if self.flaw == "deletes what is taken":
            self.forget(numbers)
        found.sort(key=lambda each: (each.failures, each.number), reverse=self.flaw == "newest first")
        return found

    def give_back(self, messages: Sequence[TakenMessage]) -> None:
        for kept in map(self._still, messages):
            if kept and self.flaw != "gives nothing back":
                kept.taken_until = 0
                kept.reasons += [""] * (self.flaw == "blames what was not tried")

    def postpone(self, message: TakenMessage, pause: int, reason: str) -> None:
        if kept := self._still(message):
            kept.taken_until = self.now() + pause * (self.flaw != "postpones nothing")
            kept.reasons = [*(kept.reasons if self.flaw != "counts to one" else ()), reason]

    def _still(self, message: TakenMessage) -> Kept | None:
        kept = self.messages.get(message.number)
        is_its = kept and kept.taker == message.taken_by
        return kept if is_its or self.flaw == "believes whoever comes late" else None

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers if self.flaw != "forgets nothing" else ():
            self.messages.pop(number, None)

    def waiting(self, limit: int) -> list[WaitingMessage]:
        found = []
        for _, kept in sorted(self.messages.items())[:limit]:
            why = kept.reasons[-1] if kept.reasons else None
            found.append(WaitingMessage(kept.message.id, kept.written_at, len(kept.reasons), kept.taken_until, why))
        return found


class Change:
    """A transaction of it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._flaw = database.flaw
        self.connection: list[str] = database.rows if self._flaw == "inserts at once" else []
        self._new: Record | None = None
        self._messages: list[OutboxMessage] = []
        if self._flaw != "locks nothing":
            database.writer.acquire()

    def swap(self, new: Record, expected: str | None) -> Record | None:
        records = self._database._records
        stored = records.get(new.key)
        if _revision(stored) != expected and self._flaw != "any revision":
            return stored
        self._new = new
        if self._flaw == "records at once":
            records[new.key] = new
        return new

    def enqueue(self, message: OutboxMessage) -> None:
        (self._database.add if self._flaw == "sends at once" else self._messages.append)(message)

    def commit(self) -> None:
        database = self._database
        if self._flaw == "locks nothing":
            time.sleep(_BESIDE)
        if self._new and self._flaw != "forgets the record":
            database._records[self._new.key] = self._new
        if self._flaw not in {"inserts at once", "forgets the rows"}:
            database.rows += self.connection
        for each in self._messages:
            database.add(each)
        self.rollback()

    def rollback(self) -> None:
        if self._flaw != "locks nothing":
            self._database.writer.release()


FLAWS: dict[type, dict[str, tuple[str, ...]]] = {
    CommittingContract: {
        "record_and_writes_happen_together": ("forgets writes",),
        "refused_write_undoes_all": ("writes first", "blames another", "skips what is refused"),
        "no_write_is_made_where_the_claim_is_gone": ("writes over others",),
        "commit_that_is_sent_again_is_made_once": ("writes again",),
        "racing_commits_have_one_effect": ("checks, then acts",),
    },
    TransactionalContract: {
        "record_and_rows_are_committed_together": ("forgets the record", "forgets the rows"),
        "rollback_undoes_both": ("inserts at once", "records at once"),
        "nothing_is_written_where_the_claim_is_gone": ("any revision",),
        "racing_transactions_have_one_effect": ("locks nothing",),
        "record_is_held_from_the_swap_to_the_end": ("does not hold the record",),
    },
    OutboxContract: {
        "messages_are_there_as_they_were_sent_if_the_transaction_is": ("sends at once", "text only"),
        "relays_share_messages_and_keep_their_order": (
            *("newest first", "gives to everybody", "holds for ever", "forgets nothing", "deletes what is taken"),
        ),
        "postponed_message_waits_and_keeps_nobody_back": ("postpones nothing", "counts to one"),
        "message_that_is_given_back_comes_at_once": ("gives nothing back", "blames what was not tried"),
        "late_word_about_a_message_that_another_has_changes_nothing": ("believes whoever comes late",),
        "failing_messages_leave_room_for_others": ("the oldest first, whatever became of them", "failing ones never"),
        "racing_relays_take_each_message_once": ("relays look at once",),
    },
}
"""By the test that must notice it, without its prefix, every flaw."""


@pytest.mark.parametrize(
    ("contract", "test", "flaw"),
    [(contract, test, flaw) for contract, tests in FLAWS.items() for test, flaws in tests.items() for flaw in flaws],
)
def test_wrong_store_is_noticed(contract: type, test: str, flaw: str) -> None:
    """Effects without their record, a record without its effects, both twice, messages changed or out of order."""
    arguments = [Database(flaw)] * (1 if contract is OutboxContract else 2)

    with pytest.raises((AssertionError, ValueError)):
        getattr(contract(), f"test_{test}")(*arguments)


class TestRightDatabase(CommittingContract, TransactionalContract, OutboxContract):
    """The negative control."""

    @pytest.fixture
    def store(self) -> Database:
        return Database()

    @pytest.fixture
    def writes(self, store: Database) -> Database:
        return store

    @pytest.fixture
    def rows(self, store: Database) -> Database:
        return store


@pytest.mark.parametrize("contract", FLAWS)
def test_every_test_can_fail(contract: type) -> None:
    """Each is the one that notices some flaw above; a test that nothing fails proves nothing."""
    assert {f"test_{name}" for name in FLAWS[contract]} == {each for each in dir(contract) if each.startswith("test_")}
