"""The contract on two stores as one, and what moves from the old one to the new one."""
# mypy: allow-untyped-decorators

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_idempotent.errors import IdempotencyWarning, PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.protocol.moves import emptied, empty_mark_of, held_by, is_mark, mark_of
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import (
    CommittingStore,
    Outbox,
    PurgeableStore,
    RecordTooLarge,
    Store,
    TransactionalStore,
)
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dual import DualStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sql import SQLStore
from celery_idempotent.testing import OutageContract, PurgeableContract, StoreContract, VerifiableContract
from celery_idempotent.testing.contract import a_completion, a_record
from lab.embedded import EmbeddedRedis


class TestDualStore(StoreContract, PurgeableContract):
    """The whole contract in one process."""

    shared_by_processes = False

    @pytest.fixture
    def store(self) -> DualStore:
        return DualStore(MemoryStore(), MemoryStore())


class TestDualStoreByUrl(StoreContract, VerifiableContract):
    """The whole contract on two servers, the old one of another kind."""

    @pytest.fixture
    def store(self, tmp_path: Path, redis_server: EmbeddedRedis) -> Iterator[Store]:
        old = f"sqlite:///{tmp_path}/old.sqlite"
        open_store(old).provision()
        self.url = f"dual://?old={quote(old, safe='')}&new={quote(redis_server.url, safe='')}"
        store = open_store(self.url)
        store.provision()
        yield store
        store.close()

    @pytest.fixture
    def misconfigured_store(self, tmp_path: Path) -> Iterator[Store]:
        store = DualStore(SQLStore(f"sqlite:///{tmp_path}/none.sqlite"), MemoryStore())
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return open_store(self.url)


class TestDualStoreWithoutTheOldOne(OutageContract):
    """Half an outage is a whole one: without the old store nobody knows where an operation is."""

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        store = DualStore(open_store("redis://127.0.0.1:1/0"), MemoryStore())
        yield store
        store.close()


class TestDualStoreWithoutTheNewOne(OutageContract):
    """The other half."""

    @pytest.fixture
    def unreachable_store(self) -> Iterator[Store]:
        store = DualStore(MemoryStore(), open_store("redis://127.0.0.1:1/0"))
        yield store
        store.close()


@pytest.fixture
def old() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def new() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def dual(old: MemoryStore, new: MemoryStore) -> DualStore:
    return DualStore(old, new)


def _kept(store: Store, **values: Any) -> Record:
    record = a_record().but(**values)
    assert store.swap(record, None) == record
    return record


RECORDS = [
    a_record(),
    a_record().but(takeovers=2, steps={"charge": {"result": "1"}}, process="p"),
    a_record().but(status=Status.UNKNOWN, error="why", verdict={"by": "ann"}),
    a_completion(a_record()).but(result=b"\xff", content_type="x/y", expires_at=4_000_000_000),
    a_record().but(status=Status.RELEASED, fingerprint=None),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: str(each.status))
@pytest.mark.parametrize("url", ["memory://", "sqlite:///{}/r.sqlite"])
def test_mark_gives_back_what_it_holds(record: Record, url: str, tmp_path: Path) -> None:
    """Every field, through a store that knows nothing of marks; to which it is an attempt that goes on for ever."""
    store = open_store(url.format(tmp_path))
    store.provision()
    mark = mark_of(record)
    store.swap(mark, None)
    stored = store.get(record.key)
    assert stored is not None

    assert is_mark(stored)
    assert held_by(stored) == record
    assert (stored.status, stored.expires_at, stored.fingerprint) == (Status.IN_PROGRESS, None, record.fingerprint)
    assert stored.lease_until > record.lease_until + 10**11
    assert held_by(emptied(stored)) is held_by(empty_mark_of(record)) is None
    assert len({record.revision, mark.revision, emptied(mark).revision}) == 3
    store.close()


def test_empty_mark_keeps_nothing_of_the_call() -> None:
    """Result, error, label and verdict are in the new store alone."""
    record = a_completion(a_record()).but(error="e", verdict={"by": "ann"}, expires_at=4_000_000_000)
    for mark in (empty_mark_of(record), emptied(mark_of(record))):
        fields = mark.to_fields()
        assert not {"result", "content_type", "error", "label", "verdict", "trace", "steps"} & fields.keys()


def test_new_operation_is_in_the_new_store_and_marked_in_the_old_one(
    dual: DualStore, old: MemoryStore, new: MemoryStore
) -> None:
    """Whoever knows the old one alone waits."""
    record = _kept(dual)

    marked = old.get(record.key)
    assert marked is not None
    assert is_mark(marked)
    assert held_by(marked) is None
    assert new.get(record.key) == dual.get(record.key) == record


def test_what_a_person_has_judged_moves_also_where_its_outcome_counts_no_more(
    dual: DualStore, old: MemoryStore, new: MemoryStore
) -> None:
    """It stays as the proof; an outcome that nobody has judged is left out."""
    now = old.now()
    outcome = {"status": Status.COMPLETED, "expires_at": now // 1000 + 900}
    until = {"kept_until": now + 900_000, "counts_until": now - 1}
    judged = a_record().but(key="judged", verdict={"by": "ann", **until}, **outcome)
    old.swap(judged, None)
    old.swap(a_record().but(key="over", **outcome | {"expires_at": now // 1000 - 1}), None)

    for record, can_move in dual.left():
        assert can_move
        assert dual.move(record)

    assert (new.get("judged"), new.get("over")) == (judged, None)


def test_attempt_by_the_old_store_is_left_to_its_owner(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """It is seen, not moved: its owner could not write its end."""
    record = _kept(old)

    assert dual.swap(a_record().but(key=record.key), None) == record
    assert dual.swap(record.but(revision="2"), "other") == record
    assert (old.get(record.key), new.get(record.key)) == (record, None)


def test_operation_moves_with_its_next_write(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """By compare-and-swap in the old store, so that one of two wins."""
    record = _kept(old, status=Status.RELEASED)
    claimed = record.but(status=Status.IN_PROGRESS, revision="2")

    assert dual.swap(claimed, record.revision) == claimed
    assert new.get(record.key) == claimed
    assert dual.swap(record.but(revision="3"), record.revision) == claimed


def test_move_that_was_not_finished_is_finished_by_whoever_comes(
    dual: DualStore, old: MemoryStore, new: MemoryStore
) -> None:
    """What the mark holds counts; afterwards it never comes back from there."""
    record = a_record().but(status=Status.RELEASED)
    old.swap(mark_of(record), None)

    assert dual.get(record.key) == record
    assert new.get(record.key) is None
    assert dual.swap(a_record().but(key=record.key), None) == record
    assert new.get(record.key) == record
    assert dual.delete(record.key, record.revision)
    assert dual.get(record.key) is None
    assert dual.swap(record.but(revision="2"), record.revision) is None


def test_answer_that_was_lost_is_found_by_asking_again(old: MemoryStore) -> None:
    """Whichever of its requests gets no answer: the same write again wins, or the record that is there is told."""

    class Fickle(MemoryStore):
        asked = 0
        silent_at = 0

        def swap(self, new: Record, expected: str | None) -> Record | None:
            stored = super().swap(new, expected)
            type(self).asked += 1
            if self.asked == self.silent_at:
                raise StoreUnavailable("fickle", "swap", "no answer")
            return stored

    for silent_at in range(1, 5):
        Fickle.asked, Fickle.silent_at = 0, 0
        stores = Fickle(), Fickle()
        record = _kept(stores[0], status=Status.RELEASED)
        Fickle.asked, Fickle.silent_at = 0, silent_at
        claimed = record.but(status=Status.IN_PROGRESS, revision="2")
        dual = DualStore(*stores)
        with pytest.raises(StoreUnavailable):
            dual.swap(claimed, record.revision)
        stored = dual.swap(claimed, record.revision)
        assert stored == claimed
        assert dual.get(record.key) == claimed


def test_scan_lists_each_operation_once_wherever_it_is(dual: DualStore, old: MemoryStore) -> None:
    """In the old store, in the new one, or in a mark."""
    there, here = _kept(old, status=Status.UNKNOWN), _kept(dual, status=Status.UNKNOWN)
    between = a_record().but(status=Status.UNKNOWN)
    old.swap(mark_of(between), None)
    _kept(dual)

    assert {each.key for each in dual.scan(status=Status.UNKNOWN)} == {there.key, here.key, between.key}
    assert len(list(dual.scan())) == 4


def test_scan_lists_what_moves_meanwhile_once(dual: DualStore, old: MemoryStore) -> None:
    """Listed as it was in the old store."""
    record = _kept(old, status=Status.RELEASED)
    scan = dual.scan()

    assert next(scan) == record
    dual.swap(record.but(revision="2"), record.revision)
    assert list(scan) == []


def test_record_of_either_store_is_deleted(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """Where it is; a mark stays, as whoever knows the old store alone must not begin beside somebody who has both."""
    there, here = _kept(old), _kept(dual)

    assert not dual.delete(there.key, "other")
    assert dual.delete(there.key, there.revision)
    assert dual.delete(here.key, here.revision)
    assert list(dual.scan()) == []
    assert [each.key for each in old.scan()] == [here.key]
    assert not dual.delete("none", "r")


def test_purge_deletes_from_both_and_no_more_than_it_may(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """A bound is one of both together; a store that forgets by itself is left to itself."""
    for store in (old, old, new):
        _kept(store, status=Status.COMPLETED, expires_at=1)

    assert [dual.purge(2), dual.purge(2), dual.purge(2)] == [2, 1, 0]
    assert DualStore(open_store("redis://127.0.0.1:1/0"), new).purge(2) == 0


def test_what_the_new_store_can_do_the_two_can(tmp_path: Path) -> None:
    """By the time that a body commits or sends, its operation is there."""
    sql = SQLStore(f"sqlite:///{tmp_path}/new.sqlite")
    one, other = DualStore(MemoryStore(), sql), DualStore(sql, MemoryStore())

    assert isinstance(one, TransactionalStore) and isinstance(one, Outbox)  # noqa: PT018
    assert not isinstance(one, CommittingStore)
    assert isinstance(other, CommittingStore)
    assert not isinstance(other, TransactionalStore)
    assert isinstance(one, PurgeableStore)


def test_clocks_that_differ_are_told() -> None:
    """Leases of the old store are judged by the new one's clock."""
    exact = MemoryStore(lambda: 1000)
    with pytest.warns(IdempotencyWarning, match="501 ms apart"):
        DualStore(exact, MemoryStore(lambda: 1501)).verify()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DualStore(exact, MemoryStore(lambda: 1500)).verify()


@pytest.mark.parametrize(
    "url", ["dual://?new=memory://", "dual://", "dual://?old=memory://&new=memory://", "dual://?old=a&new=b&c=d"]
)
def test_url_names_two_stores(url: str) -> None:
    """Neither less nor more, and not one twice."""
    with pytest.raises(PolicyError, match="dual://.old=URL&new=URL"):
        open_store(url)


def test_url_shows_no_password() -> None:
    """As each of the two."""
    store = open_store(
        f"dual://?old={quote('redis://u:secret@h/0', safe='')}&new={quote('redis://u:secret@h/1', safe='')}"
    )

    assert "secret" not in repr(store)
    assert repr(store).startswith("dual://?old=redis://")


# -- the copy


def test_copy_leaves_what_runs_and_what_no_longer_counts(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """Everything else is moved, once."""
    now = old.now()
    running = _kept(old, lease_until=now)
    dead = _kept(old, lease_until=now - 60_001)
    outcome = _kept(old, status=Status.COMPLETED, expires_at=now // 1000 + 1000)
    _kept(old, status=Status.COMPLETED, expires_at=now // 1000 - 1)
    half = a_record().but(status=Status.UNKNOWN)
    old.swap(mark_of(half), None)
    _kept(dual)

    left = list(dual.left())
    assert {each.key for each, can_move in left if can_move} == {dead.key, outcome.key, half.key}
    assert [each for each, can_move in left if not can_move] == [running]
    for each, can_move in left:
        assert not can_move or dual.move(each)
    assert [new.get(each.key) for each in (dead, outcome, half)] == [dead, outcome, half]
    assert list(dual.left()) == [(running, False)]


def test_copy_leaves_what_has_changed_since(dual: DualStore, old: MemoryStore) -> None:
    """Who wrote it may go on; what has gone is gone."""
    changed, gone = _kept(old, status=Status.RELEASED), _kept(old, status=Status.RELEASED)
    claimed = changed.but(status=Status.IN_PROGRESS, revision="2")
    old.swap(claimed, changed.revision)
    old.delete(gone.key, gone.revision)

    assert not dual.move(changed)
    assert not dual.move(gone)
    assert [dual.get(each.key) for each in (changed, gone)] == [claimed, None]


class _Small(MemoryStore):
    """Has no room for results, nor for marks if it is told so."""

    has_room_for_marks = True

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if new.result is not None or (is_mark(new) and not self.has_room_for_marks):
            raise RecordTooLarge("no room")
        return super().swap(new, expected)


def test_outcome_moves_without_a_result_that_is_too_large(old: MemoryStore) -> None:
    """The effect has happened: that is kept, and why the result is not."""
    small = _Small()
    outcome = _kept(old, status=Status.COMPLETED, result="x", content_type="t", expires_at=4_000_000_000)

    assert DualStore(old, small).move(outcome)
    assert small.get(outcome.key) == outcome.but(result=None, content_type=None, error="no room")


def test_record_that_is_too_large_without_a_result_is_refused(old: MemoryStore) -> None:
    """Nothing of it can be left out; the mark holds it."""

    class Full(MemoryStore):
        def swap(self, new: Record, expected: str | None) -> Record | None:
            raise RecordTooLarge("no room")

    record = _kept(old, status=Status.RELEASED)
    dual = DualStore(old, Full())
    with pytest.raises(RecordTooLarge):
        dual.move(record)
    assert dual.get(record.key) == record


def test_record_without_room_for_its_mark_stays(new: MemoryStore) -> None:
    """It is left, and said to be."""
    small = _Small()
    record = _kept(small, status=Status.RELEASED)
    small.has_room_for_marks = False

    assert not DualStore(small, new).move(record)
    assert (small.get(record.key), new.get(record.key)) == (record, None)


# -- the command


def _copy(*words: str) -> Any:
    app = Celery(set_as_current=False)
    return CliRunner().invoke(idempotency, ["copy", *words], obj=SimpleNamespace(app=app))


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Two stores on disk."""
    found = [f"sqlite:///{tmp_path}/{name}.sqlite" for name in ("source", "target")]
    for each in found:
        open_store(each).provision()
    return found


def test_command_moves_everything_and_says_what(urls: list[str]) -> None:
    """Then it is done, and says so by its exit status."""
    source, target = map(open_store, urls)
    records = [_kept(source, status=Status.RELEASED, task=task) for task in ("mail", "charge", "mail")]

    shown = _copy(*urls, "--dry-run")
    assert (shown.exit_code, "2 of mail to move" in shown.output) == (1, True)
    assert "nothing would be left" in shown.output
    assert list(target.scan()) == []
    done = _copy(*urls)

    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[:2] == ["1 of charge moved", "2 of mail moved"]
    assert {each.key for each in target.scan()} == {each.key for each in records}
    assert json.loads(_copy(*urls, "--json").stdout) == {"moved": {}, "left": 0, "unreadable": []}


def test_command_fails_while_something_is_left(urls: list[str]) -> None:
    """An attempt that runs, or a record that it cannot read: both would run again by the target alone."""
    source = open_store(urls[0])
    running = _kept(source, lease_until=source.now())
    assert "1 left" in _copy(*urls).output
    source.delete(running.key, running.revision)
    _kept(source, schema=2)

    done = _copy(*urls)
    assert (done.exit_code, "1 left that cannot be read" in done.output) == (1, True)


def test_command_says_what_is_wrong_with_a_store(urls: list[str]) -> None:
    """As every command does."""
    done = _copy(urls[0], "nosuch://")
    assert (done.exit_code, "no store has this scheme" in done.output) == (1, True)


def test_command_refuses_to_move_back_and_destroys_nothing(urls: list[str]) -> None:
    """SOURCE and TARGET in another order, after a move: the marks of that move stand where the records should go."""
    source, target = map(open_store, urls)
    record = _kept(source, status=Status.RELEASED)
    assert _copy(*urls).exit_code == 0

    for arguments in ((*reversed(urls), "--dry-run"), tuple(reversed(urls))):
        done = _copy(*arguments)
        assert done.exit_code == 1
        assert "operations have been moved from there" in done.output
    assert target.get(record.key) == record


def test_command_refuses_one_store_under_two_names(urls: list[str], tmp_path: Path) -> None:
    """Each operation would be left as a mark alone."""
    source = open_store(urls[0])
    record = _kept(source, status=Status.RELEASED)
    (tmp_path / "alias").symlink_to(tmp_path)

    for alias in (urls[0], f"sqlite:///{tmp_path}/alias/source.sqlite"):
        done = _copy(urls[0], alias)
        assert (done.exit_code, "the two are one store" in done.output) == (1, True)
    assert source.get(record.key) == record


def test_worker_with_both_in_another_order_moves_nothing(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """Its claims are refused, and what they are about stays as it is."""
    record = _kept(new, status=Status.RELEASED)
    old.swap(empty_mark_of(record), None)
    reversed_one = DualStore(new, old)

    with pytest.raises(StoreMisconfigured, match="operations have been moved from there"):
        reversed_one.swap(record.but(revision="2"), record.revision)
    assert new.get(record.key) == dual.get(record.key) == record


def test_claim_in_one_store_under_two_names_is_refused_and_leaves_no_mark(old: MemoryStore) -> None:
    """A mark would keep the operation from ever beginning, also once the setting is put right."""
    record = a_record()

    with pytest.raises(StoreMisconfigured, match="the two are one store"):
        DualStore(old, old).swap(record, None)
    assert old.swap(record, None) == record


def test_claim_where_operations_were_moved_from_is_refused_and_leaves_no_mark(
    old: MemoryStore, new: MemoryStore
) -> None:
    """Whoever has the two in the right order begins it."""
    record = a_record()
    old.swap(empty_mark_of(record.but(revision="gone")), None)

    with pytest.raises(StoreMisconfigured, match="operations have been moved from there"):
        DualStore(new, old).swap(record, None)
    assert DualStore(old, new).swap(record, None) == record


def test_mark_is_not_emptied_where_another_mark_stands(dual: DualStore, old: MemoryStore, new: MemoryStore) -> None:
    """Whatever has put it there, the old store's mark is then all that there is of the record."""
    record = a_record().but(status=Status.RELEASED)
    old.swap(mark_of(record), None)
    new.swap(empty_mark_of(record), None)

    with pytest.raises(StoreMisconfigured, match="operations have been moved from there"):
        dual.swap(record.but(revision="2"), record.revision)
    left = old.get(record.key)
    assert left is not None
    assert held_by(left) == record
