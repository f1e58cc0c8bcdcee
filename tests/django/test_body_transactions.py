"""``attempt.transaction()`` on Django's connection: models, messages and the record, all or nothing."""

import inspect
import json
import sqlite3
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth.models import Group, Permission
from django.db import IntegrityError, connections, transaction
from django.test import TestCase, TransactionTestCase

from celery_idempotent import outbox
from celery_idempotent.contrib.django.models import IdempotencyOutbox
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.outbox import relay
from celery_idempotent.protocol.canonical import canonical
from celery_idempotent.protocol.keys import Selector
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Outbox, OutboxMessage
from celery_idempotent.testing import OutboxContract, TransactionalContract, assert_effect_once
from celery_idempotent.testing.contract import a_claim, a_completion, a_record
from lab.embedded import EmbeddedPostgres
from tests.django.databases import migrated, postgresql
from tests.django.project.shop.models import Charge
from tests.django.project.shop.tasks import book, receipt
from tests.django.server import Server
from tests.support.deliveries import deliver, published


@pytest.fixture
def store(database: str) -> DjangoStore:
    return DjangoStore(database)


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


def test_blocks_of_the_users_may_fail_within(store: DjangoStore, name: str) -> None:
    """An inner ``atomic()`` that fails undoes itself and nothing else."""
    record = a_claim(store)

    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    with pytest.raises(IntegrityError), transaction.atomic(using=store.alias):
        Group.objects.using(store.alias).create(name=name)
    transaction_.swap(a_completion(record), record.revision)
    transaction_.commit()

    assert _groups(store, name) == 1


def test_error_outside_of_an_inner_block_is_told(store: DjangoStore, name: str) -> None:
    """Django would silently undo all of it, effects and record."""
    record = a_claim(store)
    transaction_ = store.begin()
    with pytest.raises(LookupError), transaction.atomic(using=store.alias, savepoint=False):
        raise LookupError

    with pytest.raises(PolicyError, match="atomic\\(\\) of its own"):
        transaction_.swap(a_completion(record), record.revision)
    transaction_.rollback()


def test_record_is_not_written_inside_an_inner_block(store: DjangoStore) -> None:
    """What an inner block undoes must not be the record alone."""
    record = a_claim(store)
    transaction_ = store.begin()
    with transaction.atomic(using=store.alias), pytest.raises(PolicyError, match="end all of your own atomic"):
        transaction_.swap(a_completion(record), record.revision)
    transaction_.rollback()


def test_transaction_within_a_transaction_is_refused(store: DjangoStore) -> None:
    """Its commit would not be one."""
    with transaction.atomic(using=store.alias), pytest.raises(StoreMisconfigured, match=r"inside atomic\(\)"):
        store.begin()


@pytest.mark.parametrize("call", ["begin", "enqueue"])
def test_other_connections_are_refused(store: DjangoStore, call: str) -> None:
    """Django has one connection per thread and database, and that is it."""
    arguments: list[Any] = [object()] if call == "begin" else [OutboxMessage("id", "{}", "application/json"), object()]

    with pytest.raises(PolicyError, match="Django's own connection"):
        getattr(store, call)(*arguments)


def test_message_belongs_to_the_block_around_it(store: DjangoStore) -> None:
    """Of a task's transaction, of a view's ``atomic()``, or none."""
    assert isinstance(store, Outbox)
    message = OutboxMessage("id", "{}", "application/json")
    with transaction.atomic(using=store.alias):
        store.enqueue(message)
        transaction.set_rollback(True, using=store.alias)
    transaction_ = store.begin()
    transaction_.enqueue(replace(message, id="in a task"))
    transaction_.rollback()
    with transaction.atomic(using=store.alias):
        store.enqueue(replace(message, id="in a view"))

    (found,) = store.take(10, 60_000)
    assert found.message.id == "in a view"
    store.forget([found.number])
    assert store.take(10, 0) == []


# -- how a transaction ends


def test_callbacks_on_commit_cannot_undo_an_outcome(
    store: DjangoStore, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They run when all is committed; one that raises is logged, and the others run."""
    record = a_claim(store)
    seen: list[Any] = []
    done = a_completion(record)

    transaction_ = store.begin()
    transaction.on_commit(lambda: seen.append(store.get(record.key)), using=store.alias)
    transaction.on_commit(lambda: seen.append(1 / 0), using=store.alias)
    transaction.on_commit(lambda: seen.append("after it"), using=store.alias)
    transaction_.swap(done, record.revision)
    assert seen == []
    transaction_.commit()

    assert seen == [done, "after it"]
    assert "division by zero" in caplog.text


def test_callbacks_of_what_is_undone_do_not_run(store: DjangoStore) -> None:
    """As ever with Django."""
    seen: list[int] = []

    transaction_ = store.begin()
    transaction.on_commit(lambda: seen.append(1), using=store.alias)
    transaction_.rollback()

    assert seen == []


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


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_connection_lost_before_the_commit_undoes_all(store: DjangoStore, name: str) -> None:
    """The caller learns that nothing is certain, and the next call has a new connection."""
    record = a_claim(store)
    server = Server(store.alias)
    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    transaction_.swap(a_completion(record), record.revision)
    (session,) = server.sessions()
    server.hang_up(session)

    with pytest.raises(StoreUnavailable):
        transaction_.commit()

    server.close()
    assert (_groups(store, name), store.get(record.key)) == (0, record)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_connection_lost_in_the_block_can_be_rolled_back(store: DjangoStore) -> None:
    """``rollback`` never raises."""
    server = Server(store.alias)
    transaction_ = store.begin()
    Group.objects.using(store.alias).count()
    (session,) = server.sessions()
    server.hang_up(session)

    with pytest.raises(StoreUnavailable):
        transaction_.swap(a_record(), "any")
    transaction_.rollback()

    server.close()
    assert not connections[store.alias].in_atomic_block
    assert store.get("any") is None


def test_server_that_is_gone_ends_a_transaction_quietly(name: str) -> None:
    """None begins, and one that had begun can be rolled back."""
    with EmbeddedPostgres() as own, migrated("gone", postgresql(own)) as alias:
        store = DjangoStore(alias)
        transaction_ = store.begin()
        Group.objects.using(alias).create(name=name)
        own.kill()

        transaction_.rollback()
        with pytest.raises(StoreUnavailable):
            store.begin()

        assert connections[alias].connection is None
        assert not connections[alias].in_atomic_block


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SoftTimeLimitExceeded])
def test_interrupted_commit_leaves_no_open_transaction_behind(
    store: DjangoStore, name: str, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    """A time limit that strikes in the midst of it: the connection is cut, and the record is there if its rows are."""
    connection = connections[store.alias]
    connection.ensure_connection()
    record = a_claim(store)
    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    transaction_.swap(a_completion(record), record.revision)

    def interrupt() -> None:
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(connection, "commit", interrupt)
        with pytest.raises(interruption):
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


# -- in a task


class TestBooking(TestCase):
    """A task with a transaction, run eagerly in Django's own test case."""

    def test_booking_and_receipt_are_one(self) -> None:
        """Run once, with one message in the outbox, however often it is delivered."""
        for _ in range(2):
            assert book.apply(("o-book",)).get() == "booked o-book by attempt 1"

        assert Charge.objects.filter(order_id="o-book").count() == 1
        assert IdempotencyOutbox.objects.count() == 1
        assert relay(book.app) == 1
        (message,) = [each for each in published(book.app) if each.headers["task"] == "shop.receipt"]
        assert deliver(receipt, *message.payload[0]).state == "SUCCESS"
        assert Charge.objects.filter(order_id="receipt o-book").count() == 1

    def test_booking_is_once_however_it_is_delivered(self) -> None:
        """``assert_effect_once`` works on Django's own database, in the test's transaction."""
        assert_effect_once(book, "o-once", effects=Charge.objects.filter(order_id="o-once").count)

        assert IdempotencyOutbox.objects.count() == Charge.objects.filter(order_id="o-once").count()

    def test_nothing_is_left_for_the_next_test(self) -> None:
        """Neither booking nor message nor record."""
        self.test_booking_and_receipt_are_one()

    def test_message_of_a_view_waits_for_its_commit(self) -> None:
        """``outbox.send`` belongs to the block around it."""
        with transaction.atomic():
            outbox.send(None, receipt, "o-undone")
            transaction.set_rollback(True)
        with transaction.atomic():
            outbox.send(None, receipt, "o-sent")

        assert [json.loads(str(each.data_text))["args"] for each in IdempotencyOutbox.objects.all()] == [["o-sent"]]


class TestOutboxIsFlushed(TransactionTestCase):
    """Messages that a test has left are not published by the next one."""

    def test_message_is_alone(self) -> None:
        """In this test and in the next."""
        outbox.send(None, receipt, "o-1")
        assert IdempotencyOutbox.objects.count() == 1

    def test_message_is_alone_again(self) -> None:
        """In this test and in the one before."""
        self.test_message_is_alone()


def test_message_is_shown_by_its_task_id() -> None:
    """What logs and Celery's own tools call it."""
    assert str(IdempotencyOutbox(task_id="id-1")) == "id-1"


def test_path_into_a_model_is_a_key() -> None:
    """Of a model as an argument, its primary key and fields are attributes."""
    bound = inspect.signature(lambda charge: None).bind(Charge(pk=7, order_id="o-1"))

    assert Selector("key", ("charge.pk", "charge.order_id")).canonical(bound, "t") == canonical([7, "o-1"])
