"""Claims outlast whatever is rolled back, or are not made at all; ``attempt.transaction()`` is all or nothing."""

import asyncio
import sqlite3
from functools import partial
from threading import current_thread, main_thread
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth.models import Group, Permission
from django.db import IntegrityError, connections, transaction
from django.test import Client, TestCase, TransactionTestCase

from celery_idempotent import IdempotentTask, Policy, current_attempt, outbox
from celery_idempotent.contrib import django as contrib_django
from celery_idempotent.contrib.django.models import IdempotencyOutbox
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.outbox import relay
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import OutboxMessage
from celery_idempotent.testing import OutboxContract, TransactionalContract, assert_effect_once
from celery_idempotent.testing.contract import a_claim, a_completion, a_record
from tests.django.databases import Server
from tests.django.project.shop.models import Charge
from tests.django.project.shop.tasks import book, charge, receipt
from tests.support.deliveries import an_app, deliver, published
from tests.support.waiting import wait_until

MESSAGE = OutboxMessage("id", "{}", "application/json")


@pytest.fixture
def store(database: str) -> DjangoStore:
    return DjangoStore(database)


def test_nothing_is_written_where_it_could_be_undone(store: DjangoStore) -> None:
    """A claim in an open block would be undone with it; the refusal says where, and what helps."""
    held, new = a_record(), a_record()
    store.swap(held, None)
    writes = (
        partial(store.swap, new, None),
        partial(store.swap, held.but(revision="2"), held.revision),
        partial(store.delete, held.key, held.revision),
        store.begin,
    )

    def refused(told: str) -> None:
        for write in writes:
            with pytest.raises(StoreMisconfigured, match=told):
                write()

    with transaction.atomic(using=store.alias):
        refused(rf"atomic\(\).*'{store.alias}'.*on_commit.*non_atomic_requests")
    transaction.set_autocommit(False, using=store.alias)
    try:
        refused(r"set_autocommit\(False\)")
        transaction.rollback(using=store.alias)
    finally:
        transaction.set_autocommit(True, using=store.alias)
    assert (store.get(held.key), store.get(new.key)) == (held, None)
    assert store.swap(new, None) == new


def test_only_writes_on_the_database_of_the_records_are_refused(store: DjangoStore) -> None:
    """Looking needs no transaction of its own, and what a check writes is rolled back in somebody's transaction."""
    record = a_record()
    with transaction.atomic():
        assert store.swap(record, None) == record
        transaction.set_rollback(True)
    before = {each.key for each in store.scan()}
    store.verify()
    with transaction.atomic(using=store.alias):
        store.verify()
        assert not connections[store.alias].needs_rollback
        assert store.get(record.key) == record
    assert {each.key for each in store.scan()} == before


def test_nothing_is_asked_in_async_code(store: DjangoStore) -> None:
    """Where Django raises what is no error of a database; the refusal says what to write."""

    async def view() -> None:
        store.swap(a_record(), None)

    with pytest.raises(StoreMisconfigured, match=r"sync_to_async\(task\.delay\)"):
        asyncio.run(view())


def test_body_that_leaves_a_transaction_open_is_not_reported_as_done(shop: Celery) -> None:
    """Its outcome could be undone with its effect, so it is not recorded."""

    def body() -> None:
        transaction.set_autocommit(False)

    task: Any = shop.task(base=IdempotentTask, shared=False, name=f"test.{uuid4().hex}")(body)
    try:
        end = deliver(task)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
        shop.tasks.unregister(task.name)

    assert end.state != "SUCCESS"
    assert [each.status for each in DjangoStore().scan(task=task.name)] == [Status.IN_PROGRESS]


def test_eager_task_runs_after_the_transaction_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ATOMIC_REQUESTS the whole view is a block, and the task says so; ``transaction.on_commit`` is the way."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    with pytest.raises(StoreMisconfigured, match="ATOMIC_REQUESTS"):
        Client().get("/checkout/o-after/")
    assert _charges("o-after") == 0
    Client().get("/checkout/o-after/?on_commit")
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", False)

    assert Client().get("/checkout/o-after/?on_commit").content == b"charged o-after"
    assert Client().get("/checkout/o-after/").content == b"charged o-after"
    assert _charges("o-after") == 1


def test_task_of_djangos_is_published_after_the_commit(shop: Celery) -> None:
    """``delay_on_commit`` of the class that this app has ready: nothing is published by what is rolled back."""
    assert isinstance(charge, contrib_django.IdempotentTask)
    published(shop)  # what others have left
    with transaction.atomic():
        charge.delay_on_commit("o-undone")
        transaction.set_rollback(True)
    with transaction.atomic():
        charge.delay_on_commit("o-published")
        assert published(shop) == []

    (message,) = published(shop)
    assert deliver(charge, *message.payload[0]).value == "charged o-published"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_heartbeat_does_not_see_the_claim_of_a_test_case(store: DjangoStore) -> None:
    """Its own connection finds nothing to renew, and waits for nothing; the body, which is long, ends as it should."""
    looks, swap = list[Record | None](), store.swap

    def watched(new: Record, expected: str | None) -> Record | None:
        found = swap(new, expected)
        if current_thread() is not main_thread():
            looks.append(found)
        return found

    store.swap = watched  # type: ignore[method-assign]

    def body() -> str:
        wait_until(lambda: len(looks) > 2, "the heartbeat looks several times", timeout=30)
        current_attempt().ensure_owned()
        return "done"

    app = an_app(idempotency_store=store)
    task = app.task(base=IdempotentTask, shared=False, name=uuid4().hex, idempotent=Policy(lease=0.6))(body)
    around_the_test = transaction.atomic(using=store.alias)
    around_the_test._from_testcase = True  # type: ignore[attr-defined]  # as TestCase says it
    with around_the_test:
        assert deliver(task).value == "done"
        transaction.set_rollback(True, using=store.alias)
    assert set(looks) == {None}


@pytest.fixture
def name() -> str:
    return uuid4().hex


def _groups(store: DjangoStore, name: str) -> int:
    return Group.objects.using(store.alias).filter(name=name).count()


class _NamedGroups:
    """Rows of one of Django's own models."""

    def __init__(self, alias: str) -> None:
        self._rows, self._name = Group.objects.using(alias), f"{uuid4().hex} "

    def insert(self, connection: Any) -> None:
        self._rows.create(name=self._name + uuid4().hex)

    def count(self) -> int:
        return self._rows.filter(name__startswith=self._name).count()


class TestTransactions(TransactionalContract, OutboxContract):
    """What every store with transactions must do."""

    @pytest.fixture
    def rows(self, store: DjangoStore) -> _NamedGroups:
        return _NamedGroups(store.alias)


def test_blocks_of_the_users_within_may_fail_and_must_have_ended(store: DjangoStore, name: str) -> None:
    """What an inner ``atomic()`` undoes is itself, and never the record alone."""
    record, transaction_ = a_claim(store), store.begin()
    Group.objects.using(store.alias).create(name=name)
    with pytest.raises(IntegrityError), transaction.atomic(using=store.alias):
        Group.objects.using(store.alias).create(name=name)
    with transaction.atomic(using=store.alias), pytest.raises(PolicyError, match="end all of your own atomic"):
        transaction_.swap(a_completion(record), record.revision)
    transaction_.swap(a_completion(record), record.revision)
    transaction_.commit()

    assert _groups(store, name) == 1


def test_error_outside_of_an_inner_block_is_told(store: DjangoStore, name: str) -> None:
    """Django would silently undo all of it, effects and record."""
    record, transaction_ = a_claim(store), store.begin()
    with pytest.raises(LookupError), transaction.atomic(using=store.alias, savepoint=False):
        raise LookupError

    with pytest.raises(PolicyError, match=r"atomic\(\) of its own"):
        transaction_.swap(a_completion(record), record.revision)
    transaction_.rollback()


def test_message_belongs_to_the_block_around_it(store: DjangoStore) -> None:
    """Of a task's transaction, of a view's ``atomic()``, or none; on Django's one connection and on no other."""
    with transaction.atomic(using=store.alias):
        store.enqueue(MESSAGE)
        transaction.set_rollback(True, using=store.alias)
    transaction_ = store.begin()
    transaction_.enqueue(MESSAGE._replace(id="in a task"))
    transaction_.rollback()
    with transaction.atomic(using=store.alias):
        store.enqueue(MESSAGE._replace(id="in a view"))
    for use in (partial(store.begin, object()), partial(store.enqueue, MESSAGE, object())):
        with pytest.raises(PolicyError, match="Django's own connection"):
            use()

    (found,) = store.take(10, 60_000)
    assert found.message.id == "in a view"
    store.forget([found.number])
    assert store.take(10, 0) == []


def test_callbacks_on_commit_undo_no_outcome(store: DjangoStore, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """They run when all is committed; one that raises is logged, and the others run."""
    record, seen = a_claim(store), list[Any]()
    done, transaction_ = a_completion(record), store.begin()
    transaction.on_commit(lambda: seen.append(store.get(record.key)), using=store.alias)
    transaction.on_commit(lambda: seen.append(1 / 0), using=store.alias)
    transaction.on_commit(lambda: seen.append("after it"), using=store.alias)
    transaction_.swap(done, record.revision)
    assert seen == []
    transaction_.commit()

    assert seen == [done, "after it"]
    assert "division by zero" in caplog.text


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_connection_is_given_back(store: DjangoStore, end: str) -> None:
    """Outside of a task, one that was opened for the transaction is closed; one that was there stays."""
    connections[store.alias].close()
    getattr(store.begin(), end)()
    assert connections[store.alias].connection is None

    connections[store.alias].ensure_connection()
    getattr(store.begin(), end)()
    assert connections[store.alias].connection is not None
    assert connections[store.alias].get_autocommit()


@pytest.mark.parametrize("database", ["postgresql", pytest.param("mariadb", marks=pytest.mark.nightly)], indirect=True)
@pytest.mark.parametrize("in_the_block", [False, True])
def test_connection_that_is_lost_undoes_all(store: DjangoStore, name: str, in_the_block: bool) -> None:
    """The caller learns that nothing is certain, ``rollback`` never raises, and the next call has a new connection."""
    record, server, transaction_ = a_claim(store), Server(store.alias), store.begin()
    Group.objects.using(store.alias).create(name=name)
    if not in_the_block:
        transaction_.swap(a_completion(record), record.revision)
    (session,) = server.sessions()
    server.hang_up(session)
    server.close()

    with pytest.raises(StoreUnavailable):
        transaction_.swap(a_record(), "any") if in_the_block else transaction_.commit()
    transaction_.rollback()

    assert not connections[store.alias].in_atomic_block
    assert (_groups(store, name), store.get(record.key)) == (0, record)


def test_interrupted_commit_leaves_no_open_transaction_behind(
    store: DjangoStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit that strikes in the midst of it: the connection is cut, and the record is there if its rows are."""
    connection = connections[store.alias]
    connection.ensure_connection()
    record = a_claim(store)
    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    transaction_.swap(a_completion(record), record.revision)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "commit", Mock(side_effect=SoftTimeLimitExceeded))
        with pytest.raises(SoftTimeLimitExceeded):
            transaction_.commit()
    assert connection.connection is None
    stored = store.get(record.key)
    assert stored is not None
    assert (_groups(store, name), stored.status) in [(0, Status.IN_PROGRESS), (1, Status.COMPLETED)]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_deferred_constraint_is_the_users_own_error(store: DjangoStore) -> None:
    """It speaks at the commit, and all is undone."""
    record = a_claim(store)
    transaction_ = store.begin()
    transaction_.swap(a_completion(record), record.revision)
    Permission.objects.using(store.alias).create(name="n", codename=uuid4().hex, content_type_id=987_654_321)

    with pytest.raises(IntegrityError):
        transaction_.commit()

    assert store.get(record.key) == record
    assert connections[store.alias].get_autocommit()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_transaction_on_sqlite_may_begin_by_reading(store: DjangoStore, name: str) -> None:
    """It has the one write lock from its beginning; otherwise another writer in between would make it fail."""
    other = sqlite3.connect(connections.settings[store.alias]["NAME"], timeout=0, isolation_level=None)
    record = a_claim(store)

    transaction_ = store.begin()
    assert _groups(store, name) == 0
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    transaction_.swap(done := a_completion(record), record.revision)
    transaction_.commit()

    other.close()
    assert store.get(record.key) == done
    with transaction.atomic(using=store.alias):  # whose mode is the user's again
        assert connections[store.alias].transaction_mode is None  # type: ignore[attr-defined]  # of SQLite's


def _charges(order_id: str) -> int:
    return Charge.objects.filter(order_id=order_id).count()


class TestInDjangosTestCase(TestCase):
    """The transaction around a test is taken for none, so that eager tasks can be tested."""

    def test_booking_and_receipt_are_one(self) -> None:
        """Run once, with one message in the outbox, however often it is delivered."""
        for _ in range(2):
            assert book.apply(("o-book",)).get() == "booked o-book by attempt 1"

        assert (_charges("o-book"), IdempotencyOutbox.objects.count(), relay(book.app)) == (1, 1, 1)
        (message,) = [each for each in published(book.app) if each.headers["task"] == "shop.receipt"]
        assert deliver(receipt, *message.payload[0]).state == "SUCCESS"
        assert _charges("receipt o-book") == 1

    def test_effects_can_be_asserted(self) -> None:
        """``assert_effect_once`` works on Django's own database, in the test's transaction."""
        assert_effect_once(book, "o-once", effects=Charge.objects.filter(order_id="o-once").count)

        assert IdempotencyOutbox.objects.count() == _charges("o-once")

    def test_block_of_the_code_under_test_is_refused(self) -> None:
        """What would fail in production fails here, and what waits for a commit can be executed by Django's means."""
        with transaction.atomic(), self.assertRaisesMessage(StoreMisconfigured, "inside atomic()"):
            charge.apply(("in-a-test",)).get()
        assert _charges("in-a-test") == 0
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(lambda: charge.apply(("in-a-test",)).get())
        assert _charges("in-a-test") == 1


class TestInDjangosTransactionTestCase(TransactionTestCase):
    """Records and messages are flushed after a test with all other rows."""

    def test_call_runs_and_its_message_is_alone(self) -> None:
        """In this test and in the next."""
        charge.apply(("in-a-test",)).get()
        outbox.send(None, receipt, "o-1")
        assert (_charges("in-a-test"), [str(each) != "" for each in IdempotencyOutbox.objects.all()]) == (1, [True])

    def test_call_runs_again_and_its_message_is_alone(self) -> None:
        """In this test and in the one before."""
        self.test_call_runs_and_its_message_is_alone()
