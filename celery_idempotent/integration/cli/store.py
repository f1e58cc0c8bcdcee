"""Commands that make and keep a store: its tables, what it deletes, what a copy takes, what its outbox has."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import click
from kombu.exceptions import OperationalError

from celery_idempotent.engine.events import EventName
from celery_idempotent.engine.sweeping import Fate, sweep_abandoned, sweep_released
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import (
    Amount,
    app_of,
    as_json,
    echo_json,
    idempotency,
    limit,
    seconds,
    store_of,
)
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.operating.display import duration, iso
from celery_idempotent.integration.operating.periodic import policies_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.operation import is_forgotten
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import PurgeableStore, RecordTooLarge, Store, VerifiableStore
from celery_idempotent.protocol.verdicts import kept_until
from celery_idempotent.stores import open_store
from celery_idempotent.stores.wrappers import innermost

MOST_COUNTED = 100_000
"""Messages that wait; where there are more, nobody needs to know how many."""


@idempotency.command()
@click.option("--once", is_flag=True, help="Publish what waits now, and end.")
@seconds("--every", 1.0, "Pause between two looks.")
@as_json
@click.pass_context
def relay(context: click.Context, once: bool, every: float, as_json: bool) -> None:
    """Publish messages that wait in the outbox of an SQL store.

    Workers do so, too, by idempotency_relay.
    """
    app = app_of(context)
    total = 0
    waiting = outbox.outbox_of(app)
    while True:
        try:
            published = outbox.relay(app)
        except OperationalError as error:
            raise click.ClickException(f"the broker did not answer: {error}") from error
        total += published
        if not published:
            if once:
                break
            time.sleep(every)
        elif not as_json:
            click.echo(f"published {published}")
        elif not once:
            echo_json({"published": published}, indent=None)
    left = len(waiting.waiting(MOST_COUNTED))  # messages that could not be published, or are taken
    if as_json:
        echo_json({"published": total, "waiting": left})
    elif left:
        click.echo(f"{left} still wait; 'outbox' says why")
    elif not total:
        click.echo("the outbox is empty")


@idempotency.command(name="outbox")
@limit("messages")
@as_json
@click.pass_context
def list_outbox(context: click.Context, limit: int, as_json: bool) -> None:
    """List messages that wait in the outbox, the oldest first.

    How often and why they failed, and when they are tried next.
    """
    store = store_of(context)
    waiting = outbox.outbox_of(app_of(context)).waiting(limit)
    now = store.now()
    if as_json:
        echo_json(
            [
                {
                    "task_id": each.id,
                    "created_at": iso(each.created_at),
                    "failures": each.failures,
                    "next_try": iso(each.next_try) if each.next_try else None,
                    "reason": each.reason,
                }
                for each in waiting
            ]
        )
        return
    rows = []
    for each in waiting:
        next_try = f"in {duration(each.next_try - now)}" if each.next_try > now else "now"
        rows.append((each.id, duration(now - each.created_at), each.failures, next_try, each.reason or ""))
    heads = ("TASK ID", "AGE", "FAILURES", "NEXT TRY")
    screen.table([*map(Column, heads), Column("REASON", is_cut=True)], rows)


_DIALECTS = ["postgresql", "mysql", "mariadb", "sqlite"]
_DAY = 86_400_000


@idempotency.command()
@as_json
@click.pass_context
def provision(context: click.Context, as_json: bool) -> None:
    """Create the table or schema if it is missing; safe to repeat."""
    store = store_of(context)
    lacking = None
    try:
        if isinstance(store, VerifiableStore):
            store.verify()
    except StoreMisconfigured as error:
        lacking = error.reason
    store.provision()
    if as_json:
        echo_json({"store": repr(store), "lacked": lacking})
    else:
        click.echo(f"{store!r} is ready; {'what was missing is there now' if lacking else 'nothing was missing'}")


@idempotency.command()
@click.option("--dialect", type=click.Choice(_DIALECTS), help="For which database; default: that of the store.")
@as_json
@click.pass_context
def ddl(context: click.Context, dialect: str | None, as_json: bool) -> None:
    """Print the statements that create the tables of an SQL store.

    Needs no database.
    """
    try:
        from celery_idempotent.stores.sql import SQLStore
        from celery_idempotent.stores.sql.schema import ddl as printed
    except ModuleNotFoundError as error:
        missing = f'{error.name} is not installed; run: pip install "celery-idempotent[sql]"'
        raise click.ClickException(missing) from error
    store = innermost(store_of(context)) if app_of(context).conf.get("idempotency_store") else None
    tables = [store.table, store.outbox] if isinstance(store, SQLStore) else []
    dialect = dialect or (store.dialect if isinstance(store, SQLStore) else None)
    if dialect is None:
        raise click.UsageError(f"idempotency_store is not an SQL store; give --dialect: {', '.join(_DIALECTS)}")
    statements = printed(dialect, *tables)
    if as_json:
        echo_json({"dialect": dialect, "store": repr(store) if tables else None, "sql": statements})
    else:
        whose = repr(store) if tables else "idempotency_store, where it names no others"
        click.echo(f"-- for {dialect}: the tables of {one_line(whose)}\n{statements}", nl=False)


@idempotency.command()
@click.option(
    "--batch",
    default=1000,
    show_default=True,
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Delete N at a time.",
)
@click.option("--max", "most", default=sys.maxsize, type=click.IntRange(1), metavar="N", help="Stop after N.")
@click.option(
    "--released-before",
    "released",
    type=Amount(),
    metavar="DAYS",
    help="Delete RELEASED records, too, that were not touched for DAYS. They never expire by themselves, as they hold "
    "the finished steps and the fingerprint of an operation that may be delivered again; both are forgotten then.",
)
@click.option(
    "--abandoned-before",
    "abandoned",
    type=Amount(),
    metavar="DAYS",
    help="End what is IN_PROGRESS, too, if its lease has been over for DAYS: its message was lost. It is deleted, with "
    'steps and fingerprint. Under on_takeover="refuse", and where a step began and did not end, it becomes UNKNOWN. '
    "What another app has begun, or a task that this one lacks, stays.",
)
@as_json
@click.pass_context
def purge(
    context: click.Context, batch: int, most: int, released: float | None, abandoned: float | None, as_json: bool
) -> None:
    """Delete outcomes that are no longer kept.

    Run it once a day; workers do not mind, and can do it themselves, by idempotency_purge. Some stores delete them by
    themselves. With --released-before and --abandoned-before the whole store may be read.
    """
    store = store_of(context)
    outcomes = given_back = ended = None
    if isinstance(store, PurgeableStore):
        outcomes = sum(1 for _ in screen.counted("deleting outcomes", _purge(store, batch, most)))
    if released is not None:
        swept = islice(sweep_released(store, age=round(released * _DAY)), most)
        given_back = sum(1 for _ in screen.counted("deleting released", swept))
    if abandoned is not None:
        left_behind = sweep_abandoned(store, policies_of(app_of(context)), age=round(abandoned * _DAY))
        fates = Counter(fate for _, fate in islice(left_behind, most))
        ended = {"deleted": fates[Fate.DELETED], "in_doubt": fates[Fate.IN_DOUBT]}
    if as_json:
        echo_json({"store": repr(store), "outcomes": outcomes, "released": given_back, "abandoned": ended})
        return
    click.echo(f"{store!r} deletes outcomes by itself" if outcomes is None else f"{outcomes} outcomes deleted")
    if given_back is not None:
        click.echo(f"{given_back} released records deleted")
    if ended is not None:
        click.echo(f"{ended['deleted']} abandoned records deleted, {ended['in_doubt']} in doubt now (UNKNOWN)")


def _purge(store: PurgeableStore, batch: int, most: int) -> Iterator[None]:
    """Delete batch by batch; yields for each record."""
    while most and (deleted := store.purge(min(batch, most))):
        most -= deleted
        yield from [None] * deleted


@idempotency.command()
@click.argument("source")
@click.argument("target")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and write nothing.")
@as_json
def copy(source: str, target: str, dry_run: bool, as_json: bool) -> None:
    """Copy all operations to another store, while no worker runs.

    SOURCE and TARGET are the URLs of the two. Exit status 1: something is left; run it again, before any worker has
    TARGET.
    """
    copied: Counter[str] = Counter()
    left = 0
    unreadable: list[str] = []

    def note(key: str, **_: Any) -> None:
        unreadable.append(key)

    SIGNALS[EventName.RECORD_UNREADABLE].connect(note)
    with closing(open_store(source)) as old, closing(open_store(target)) as new:
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
