"""All that an operator does by the command line, to be done with an operator's permissions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from click.testing import CliRunner, Result

from celery_idempotent import IdempotentTask, Policy, Status
from celery_idempotent.engine.transaction import message_of
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.store import Store, TransactionalStore
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.deliveries import an_app

ELSEWHERE = {"copy", "provision", "watch", "web"}
"""Commands with permissions of their own, or those of another, without an end."""


def operate(theirs: Store, ours: Store) -> dict[tuple[str, ...], Result]:
    """Run every command; give how each ended, by its words.

    Args:
        theirs: The store as the operator may use it.
        ours: The same, for the records that are needed.
    """
    app = an_app(worker_pool="solo")
    app.conf.idempotency_store = theirs

    @app.task(base=IdempotentTask, shared=False, name="orders.charge", idempotent=Policy())
    def charge() -> None: ...

    commands = [*_commands(ours)]
    if isinstance(ours, TransactionalStore):
        transaction = ours.begin()
        transaction.enqueue(message_of(charge.s(), str(uuid4()), runtime_of(app).codec, ours))
        transaction.commit()
        commands += [("outbox",), ("relay", "--once")]
    done = {words: CliRunner().invoke(idempotency, words, obj=SimpleNamespace(app=app)) for words in commands}
    assert {words[0] for words in done} | ELSEWHERE >= set(idempotency.commands) - {"relay", "outbox"}
    return done


def refused(done: dict[tuple[str, ...], Result]) -> set[str]:
    """The commands that did not end well."""
    assert all(each.exception is None or isinstance(each.exception, SystemExit) for each in done.values())
    return {words[0] for words, result in done.items() if result.exit_code}


def _commands(store: Store) -> Iterator[tuple[str, ...]]:
    unknown, doubtful = _keep(store, status=Status.UNKNOWN), _keep(store, status=Status.UNKNOWN)
    abandoned = _keep(store, lease_until=1, fencing_token=1)
    _keep(store, status=Status.RELEASED, updated_at=1)
    outcome = replace(a_completion(a_record()), expires_at=store.now() // 1000 - 60)
    store.swap(outcome, None)
    yield ("check",)
    yield ("key", "orders.charge")
    yield ("show", unknown)
    yield ("list",)
    yield ("list", "--status", "UNKNOWN", "--task", "orders.charge", "--label", "acme/1001", "--older-than", "1s")
    yield ("effect-key", unknown, "charge")
    yield ("stats",)
    yield ("resolve", unknown, "--completed", "1", "--yes")
    yield ("resolve", doubtful, "--rerun", "--yes")
    yield ("release", abandoned, "--yes")
    yield ("forget", abandoned, "--yes")
    yield ("ddl", "--dialect", "postgresql")
    yield ("purge", "--released-before", "1", "--abandoned-before", "1")


def _keep(store: Store, **values: Any) -> str:
    record = replace(a_record(), **values)
    store.swap(record, None)
    return record.key
