"""The command that takes what one store has along to another."""

from collections import Counter
from contextlib import closing
from typing import Any

import click

from celery_idempotent.engine.events import EventName
from celery_idempotent.integration.cli.base import as_json, echo_json, idempotency, readable_errors
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.protocol.operation import is_forgotten
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import RecordTooLarge, Store
from celery_idempotent.protocol.verdicts import kept_until
from celery_idempotent.stores import open_store


@idempotency.command()
@click.argument("source")
@click.argument("target")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and write nothing.")
@as_json
def copy(source: str, target: str, dry_run: bool, as_json: bool) -> None:
    """Copy all operations from one store to another, while no worker runs.

    SOURCE and TARGET are the URLs of the two. Exit status 1: something is left; run it again, before any worker has
    TARGET.
    """
    copied: Counter[str] = Counter()
    left = 0
    unreadable: list[str] = []

    def note(key: str, **_: Any) -> None:
        unreadable.append(key)

    SIGNALS[EventName.RECORD_UNREADABLE].connect(note)
    with readable_errors(), closing(open_store(source)) as old, closing(open_store(target)) as new:
        now = old.now()
        for record in old.scan():
            if is_forgotten(record, now) and kept_until(record) <= now:
                continue
            is_running = record.status is Status.IN_PROGRESS and record.lease_until > now
            if not is_running and (_fits if dry_run else _put)(new, record):
                copied[record.task] += 1
            else:
                left += 1
    done = "to copy" if dry_run else "copied"
    if as_json:
        echo_json({done.replace(" ", "_"): copied, "left": left, "unreadable": unreadable})
    else:
        for task, count in sorted(copied.items()):
            click.echo(f"{count} of {task} {done}")
        nothing = f"nothing {'would be' if dry_run else 'is'} left"
        click.echo(f"{left} left: an attempt is running, or TARGET has another record or no room" if left else nothing)
        if unreadable:
            click.echo(f"{len(unreadable)} left that cannot be read, named above; they would run again", err=True)
    if left or unreadable or (dry_run and copied):
        raise SystemExit(1)


def _fits(store: Store, record: Record) -> bool:
    stored = store.get(record.key)
    return stored is None or stored.revision == record.revision


def _put(store: Store, record: Record) -> bool:
    """Whether ``record`` is in ``store`` now, written by this call or by one before."""
    try:
        stored = store.swap(record, None)
    except RecordTooLarge as error:
        if record.result is None:
            return False
        # It has happened all the same; of a result that a store has no room for, duplicates are told so.
        return _put(store, record.but(result=None, content_type=None, error=str(error)))
    return stored is not None and stored.revision == record.revision
