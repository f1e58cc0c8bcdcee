"""Claims and transactions: what is claimed outlasts whatever is rolled back, or is not claimed at all."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from threading import current_thread, main_thread
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from django.db import connections, transaction
from django.test import Client, TestCase, TransactionTestCase

from celery_idempotent import IdempotentTask, Policy, StoreMisconfigured, current_attempt
from celery_idempotent.contrib import django as contrib_django
from celery_idempotent.contrib.django.models import IdempotencyRecord
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.protocol.record import Record
from celery_idempotent.testing.contract import a_record
from tests.django.project.shop.models import Charge
from tests.django.project.shop.tasks import charge
from tests.support.deliveries import an_app, deliver, published
from tests.support.waiting import wait_until


@pytest.fixture
def store(database: str) -> DjangoStore:
    return DjangoStore(database)


def test_nothing_is_claimed_inside_atomic(store: DjangoStore) -> None:
    """A claim in an open block would be undone with it; the refusal says where, and nothing is written."""
    record = a_record()

    with transaction.atomic(using=store.alias), pytest.raises(StoreMisconfigured) as raised:
        store.swap(record, None)

    assert store.get(record.key) is None
    for word in ("atomic()", f"'{store.alias}'", "on_commit", "non_atomic_requests"):
        assert word in str(raised.value)


def test_nothing_is_asked_in_async_code(store: DjangoStore) -> None:
    """Where Django raises what is no error of a database; the refusal says what to write."""

    async def view() -> None:
        store.swap(a_record(), None)

    with pytest.raises(StoreMisconfigured, match=r"sync_to_async\(task\.delay\)"):
        asyncio.run(view())


def test_nothing_is_replaced_or_deleted_inside_atomic(store: DjangoStore) -> None:
    """A completion that could be undone is no completion, and what is not deleted for certain is not said to be."""
    record = a_record()
    store.swap(record, None)

    with transaction.atomic(using=store.alias):
        with pytest.raises(StoreMisconfigured):
            store.swap(replace(record, revision="2"), record.revision)
        with pytest.raises(StoreMisconfigured):
            store.delete(record.key, record.revision)

    assert store.get(record.key) == record


def test_block_of_another_database_is_no_matter(store: DjangoStore) -> None:
    """Only the database of the records counts."""
    record = a_record()

    with transaction.atomic():
        assert store.swap(record, None) == record
        transaction.set_rollback(True)

    assert store.get(record.key) == record


def test_nothing_is_claimed_without_autocommit(store: DjangoStore) -> None:
    """Neither in a transaction that somebody manages by hand."""
    record = a_record()
    transaction.set_autocommit(False, using=store.alias)
    try:
        with pytest.raises(StoreMisconfigured, match=r"set_autocommit\(False\)"):
            store.swap(record, None)
        transaction.rollback(using=store.alias)
    finally:
        transaction.set_autocommit(True, using=store.alias)

    assert store.get(record.key) is None
    assert store.swap(record, None) == record


def test_records_can_be_read_inside_atomic(store: DjangoStore) -> None:
    """Looking needs no transaction of its own."""
    record = a_record()
    store.swap(record, None)

    with transaction.atomic(using=store.alias):
        assert store.get(record.key) == record
        assert record in store.scan(task=record.task)


def test_check_of_the_store_leaves_nothing_behind(store: DjangoStore) -> None:
    """What it writes to try its permissions is rolled back, inside somebody's transaction, too."""
    before = {each.key for each in store.scan()}

    store.verify()
    with transaction.atomic(using=store.alias):
        store.verify()
        assert not connections[store.alias].needs_rollback

    assert {each.key for each in store.scan()} == before


def test_body_may_use_transactions_of_its_own(shop: Celery) -> None:
    """A claim before and an outcome after the body's blocks are in none of them, whatever becomes of those."""

    class Undone(Exception):
        pass

    def body() -> str:
        with transaction.atomic():
            Charge.objects.create(order_id="kept", process=0)
        try:
            with transaction.atomic():
                Charge.objects.create(order_id="undone", process=0)
                raise Undone
        except Undone:
            return "done"

    task = _task(shop, body)
    assert deliver(task).value == deliver(task).value == "done"
    assert Charge.objects.filter(order_id="kept").count() == 1
    assert not Charge.objects.filter(order_id="undone").exists()


def test_body_that_leaves_a_transaction_open_is_not_reported_as_done(shop: Celery) -> None:
    """Its outcome could be undone with its effect, so it is not recorded."""

    def body() -> None:
        transaction.set_autocommit(False)

    task = _task(shop, body)
    try:
        end = deliver(task)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)

    assert end.state != "SUCCESS"
    (record,) = DjangoStore().scan(task=task.name)
    assert record.status == "IN_PROGRESS"


def test_eager_task_in_a_request_with_a_transaction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ATOMIC_REQUESTS the whole view is such a block; the task says so, and nothing runs."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)

    with pytest.raises(StoreMisconfigured, match="ATOMIC_REQUESTS"):
        Client().get("/checkout/o-atomic/")

    assert not Charge.objects.filter(order_id="o-atomic").exists()


def test_eager_task_runs_after_the_transaction_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """``transaction.on_commit`` is the way, with a block and without one."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    Client().get("/checkout/o-after/?on_commit")
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", False)
    assert Client().get("/checkout/o-after/?on_commit").content == b"charged o-after"
    assert Client().get("/checkout/o-after/").content == b"charged o-after"

    assert Charge.objects.filter(order_id="o-after").count() == 1


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
def test_heartbeat_does_not_see_the_claim_of_a_test_case(shop: Celery, database: str) -> None:
    """Its own connection finds nothing to renew, and waits for nothing; the body, which is long, ends as it should."""
    store, looks = DjangoStore(database), []
    swap = store.swap

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

    app = an_app()
    app.conf.idempotency_store = store
    task = app.task(base=IdempotentTask, shared=False, name=uuid4().hex, idempotent=Policy(lease=0.6))(body)
    around_the_test = transaction.atomic(using=database)
    around_the_test._from_testcase = True  # type: ignore[attr-defined]  # as TestCase says it
    with around_the_test:
        assert deliver(task).value == "done"
        transaction.set_rollback(True, using=database)

    assert set(looks) == {None}


class TestInDjangosTestCase(TestCase):
    """The transaction around a test is taken for none, so that eager tasks can be tested."""

    def test_eager_task_runs_once(self) -> None:
        """A duplicate is answered, as in production."""
        self._charge_twice()

    def test_records_go_with_the_transaction(self) -> None:
        """The same call runs again in the next test."""
        self._charge_twice()

    def test_block_of_the_code_under_test_is_refused(self) -> None:
        """What would fail in production fails here, too."""
        with transaction.atomic(), self.assertRaisesMessage(StoreMisconfigured, "inside atomic()"):
            charge.apply(("in-a-test",)).get()

        assert _charges() == 0

    def test_callbacks_on_commit_can_be_executed(self) -> None:
        """Django's own means to run what waits for a commit that never comes."""
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            transaction.on_commit(lambda: charge.apply(("in-a-test",)).get())

        assert _charges() == 1

    def _charge_twice(self) -> None:
        answers = [charge.apply(("in-a-test",)).get() for _ in range(2)]

        assert answers == ["charged in-a-test"] * 2
        assert _charges() == 1
        record = IdempotencyRecord.objects.get(key=charge.idempotency_key_for("in-a-test"))
        assert record.status == "COMPLETED"


class TestInDjangosTransactionTestCase(TransactionTestCase):
    """Records are flushed after a test with all other rows."""

    def test_eager_task_runs_once(self) -> None:
        """The same call runs in this test and in the next."""
        self._charge()

    def test_records_are_flushed(self) -> None:
        """The same call runs in this test and in the one before."""
        self._charge()

    def _charge(self) -> None:
        charge.apply(("in-a-test",)).get()

        assert _charges() == 1


def _task(shop: Celery, body: Callable[[], Any]) -> Any:
    return shop.task(base=IdempotentTask, shared=False, name=f"test.{uuid4().hex}")(body)


def _charges() -> int:
    return Charge.objects.filter(order_id="in-a-test").count()
