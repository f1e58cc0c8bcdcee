"""``attempt.transaction()`` on Django's connection: models, messages and the record, all or nothing."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group
from django.db import IntegrityError, connections, transaction

from celery_idempotent.attempt import new_nonce
from celery_idempotent.contrib.django.store import DjangoStore
from celery_idempotent.errors import PolicyError, StoreMisconfigured
from celery_idempotent.record import Record, Status
from celery_idempotent.store import Outbox, OutboxMessage, Transactional
from celery_idempotent.testing.contract import a_record


@pytest.fixture
def store(database: str) -> DjangoStore:
    return DjangoStore(database)


@pytest.fixture
def name() -> str:
    return uuid4().hex


def _claimed(store: DjangoStore) -> Record:
    record = a_record()
    assert store.swap(record, None) == record
    return record


def _completed(record: Record) -> Record:
    return replace(
        record, status=Status.COMPLETED, revision=new_nonce(), result="1", content_type="application/json", expires_at=9
    )


def _groups(store: DjangoStore, name: str) -> int:
    return Group.objects.using(store.alias).filter(name=name).count()


def test_record_and_models_are_committed_together(store: DjangoStore, name: str) -> None:
    """In one atomic block."""
    record = _claimed(store)
    done = _completed(record)

    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    assert transaction_.swap(done, record.revision) == done
    transaction_.commit()

    assert (_groups(store, name), store.get(record.key)) == (1, done)
    assert isinstance(store, Transactional)


def test_rollback_undoes_both(store: DjangoStore, name: str) -> None:
    """And leaves no block open."""
    record = _claimed(store)

    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    transaction_.swap(_completed(record), record.revision)
    transaction_.rollback()

    assert (_groups(store, name), store.get(record.key)) == (0, record)
    assert not connections[store.alias].in_atomic_block


def test_nothing_is_written_where_the_claim_is_gone(store: DjangoStore) -> None:
    """The swap tells whose record it is; the caller then rolls back."""
    record = _claimed(store)
    theirs = replace(record, revision=new_nonce(), owner=new_nonce())
    store.swap(theirs, record.revision)

    transaction_ = store.begin()
    assert transaction_.swap(_completed(record), record.revision) == theirs
    transaction_.rollback()

    assert store.get(record.key) == theirs


def test_blocks_of_the_users_may_fail_within(store: DjangoStore, name: str) -> None:
    """An inner ``atomic()`` that fails undoes itself and nothing else."""
    record = _claimed(store)

    transaction_ = store.begin()
    Group.objects.using(store.alias).create(name=name)
    with pytest.raises(IntegrityError), transaction.atomic(using=store.alias):
        Group.objects.using(store.alias).create(name=name)
    transaction_.swap(_completed(record), record.revision)
    transaction_.commit()

    assert _groups(store, name) == 1


def test_error_outside_of_an_inner_block_is_told(store: DjangoStore, name: str) -> None:
    """Django would undo all of it without a word, effects and record."""
    record = _claimed(store)
    transaction_ = store.begin()
    with pytest.raises(LookupError), transaction.atomic(using=store.alias, savepoint=False):
        raise LookupError

    with pytest.raises(PolicyError, match="atomic\\(\\) of its own"):
        transaction_.swap(_completed(record), record.revision)
    transaction_.rollback()


def test_record_is_not_written_inside_an_inner_block(store: DjangoStore) -> None:
    """What an inner block undoes must not be the record alone."""
    record = _claimed(store)
    transaction_ = store.begin()
    with transaction.atomic(using=store.alias), pytest.raises(PolicyError, match="end every atomic"):
        transaction_.swap(_completed(record), record.revision)
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

    ((number, found),) = store.take(10, 60_000)
    assert found.id == "in a view"
    store.forget([number])
    assert store.take(10, 0) == []
