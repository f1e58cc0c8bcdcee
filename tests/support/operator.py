"""All that an operator does by the command line, to be done with an operator's permissions."""

from types import SimpleNamespace
from uuid import uuid4

from click.testing import CliRunner, Result

from celery_idempotent import IdempotentTask, Policy, Status
from celery_idempotent.engine.transaction import message_of
from celery_idempotent.integration.cli import idempotency
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.store import Store, TransactionalStore
from celery_idempotent.testing.contract import a_completion, a_record
from tests.support.deliveries import an_app

ELSEWHERE = {"copy", "provision", "watch", "web", "relay", "outbox"}
"""Commands with permissions of their own, those of another, without an end, or for some stores alone."""


def operate(theirs: Store, ours: Store) -> dict[tuple[str, ...], Result]:
    """Run every command; give how each ended, by its words.

    Args:
        theirs: The store as the operator may use it.
        ours: The same, for the records that are needed.
    """
    app = an_app(worker_pool="solo", idempotency_store=theirs)

    @app.task(base=IdempotentTask, shared=False, name="orders.charge", idempotent=Policy())
    def charge() -> None: ...

    unknown, doubtful = (a_record().but(status=Status.UNKNOWN) for _ in range(2))
    abandoned = a_record().but(lease_until=1, fencing_token=1)
    outcome = a_completion(a_record()).but(expires_at=ours.now() // 1000 - 60)
    for record in (unknown, doubtful, abandoned, outcome, a_record().but(status=Status.RELEASED, updated_at=1)):
        ours.swap(record, None)
    commands = [
        ("check",),
        ("key", "orders.charge"),
        ("show", unknown.key),
        ("list",),
        ("list", "--status", "UNKNOWN", "--task", "orders.charge", "--label", "acme/1001", "--older-than", "1s"),
        ("effect-key", unknown.key, "charge"),
        ("stats",),
        ("effects",),
        ("resolve", unknown.key, "--completed", "1", "--yes"),
        ("resolve", doubtful.key, "--rerun", "--yes"),
        ("release", abandoned.key, "--yes"),
        ("forget", abandoned.key, "--yes"),
        ("ddl", "--dialect", "postgresql"),
        ("purge", "--released-before", "1", "--abandoned-before", "1"),
    ]
    if isinstance(ours, TransactionalStore):
        transaction = ours.begin()
        transaction.enqueue(message_of(charge.s(), str(uuid4()), runtime_of(app).codec, ours))
        transaction.commit()
        commands += [("outbox",), ("relay", "--once")]
    done = {words: CliRunner().invoke(idempotency, words, obj=SimpleNamespace(app=app)) for words in commands}
    assert {words[0] for words in done} | ELSEWHERE >= set(idempotency.commands)
    return done


def refused(done: dict[tuple[str, ...], Result]) -> set[str]:
    """The commands that did not end well."""
    assert all(each.exception is None or isinstance(each.exception, SystemExit) for each in done.values())
    return {words[0] for words, result in done.items() if result.exit_code}
