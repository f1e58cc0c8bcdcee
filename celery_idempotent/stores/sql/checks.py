"""What an SQL store checks before a worker uses it, through whichever connection executes its statements."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from uuid import uuid4

from sqlalchemy import text

from celery_idempotent.errors import IdempotencyWarning, StoreMisconfigured
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.stores.exposure import warn_if_exposed
from celery_idempotent.stores.sql.drivers import exposure
from celery_idempotent.stores.sql.errors import OTHER_TABLE
from celery_idempotent.stores.sql.statements import Execute, Statements

_MYSQL = (
    # A binary log that is not on disk makes InnoDB roll back at a restart what it had committed.
    "SELECT @@innodb_flush_log_at_trx_commit AS innodb_flush_log_at_trx_commit, "
    "IF(@@log_bin, @@sync_binlog, 1) AS sync_binlog",
    {"innodb_flush_log_at_trx_commit": {"1", "3"}, "sync_binlog": {"1"}},
)
_DURABILITY: Mapping[str, tuple[str, Mapping[str, set[str]]]] = {
    "postgresql": (
        "SELECT current_setting('synchronous_commit') AS synchronous_commit, current_setting('fsync') AS fsync",
        {"synchronous_commit": {"on", "local", "remote_write", "remote_apply"}, "fsync": {"on"}},
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}
"""By dialect, a question, and by setting the values under which no acknowledged write is lost."""


def try_out(statements: Statements, execute: Execute, store: str) -> None:
    """Claim, claim what must be another key, claim again, go on: a table made by hand may not tell them apart.

    ``execute`` runs in a transaction that the caller rolls back.
    """
    first = _probe()
    for new, expected, shall_win in (
        (first, None, True),
        (replace(first, key=first.key.upper(), revision="2"), None, True),
        (replace(first, revision="3"), None, False),
        (replace(first, revision="4"), first.revision, True),
    ):
        stored = statements.swap(execute, new, expected)
        if (stored is not None and stored.revision == new.revision) is not shall_win:
            raise StoreMisconfigured(store, "verify", f"{OTHER_TABLE} (its key is not compared byte by byte)")


def warn_of_losses(dialect: str, execute: Execute, store: str) -> None:
    """Warn of settings under which the server forgets what it has acknowledged."""
    if dialect == "sqlite":
        return
    question, safe = _DURABILITY[dialect]
    (answer,) = execute(text(question), {}).rows
    losses = [f"{name} is {answer[name]}" for name, values in safe.items() if str(answer[name]) not in values]
    if losses:
        warnings.warn(
            IdempotencyWarning(
                f"idempotency_store={store}: the server can forget what it has acknowledged, and an effect whose "
                f"record is forgotten can happen again: {', '.join(losses)}",
                "idempotency_store",
            ),
            stacklevel=3,
        )


def warn_of_exposure(dialect: str, dbapi_connection: object, store: str) -> None:
    """Warn of a connection to another machine that is not encrypted, or not verified."""
    warn_if_exposed(store, exposure(dbapi_connection), _VERIFIED.get(dialect, ""))


_VERIFIED = {"postgresql": "set sslmode=verify-full and sslrootcert", "mysql": "set ssl_ca", "mariadb": "set ssl_ca"}
"""By dialect, what to do about it."""


def _probe() -> Record:
    """A record that no task has."""
    nonce = uuid4().hex
    return Record(
        key=f"celery-idempotent:verify:{nonce}",
        status=Status.UNKNOWN,
        revision="1",
        owner=nonce,
        fencing_token=0,
        lease_until=0,
        fingerprint=None,
        attempts=0,
        created_at=0,
        updated_at=0,
        task="",
        task_id="",
        worker="",
    )
