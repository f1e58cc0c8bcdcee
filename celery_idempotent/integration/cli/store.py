"""Commands that make and keep a store: its tables, and what it deletes."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import click
from celery import Celery

from celery_idempotent.engine.sweeping import Fate, sweep_abandoned, sweep_released
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency, readable_errors, store_of
from celery_idempotent.integration.cli.options import Amount, WholeNumber
from celery_idempotent.integration.purging import policies_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import PurgeableStore, Store, VerifiableStore

_DIALECTS = ["postgresql", "mysql", "mariadb", "sqlite"]


@idempotency.command()
@as_json
@click.pass_context
def provision(context: click.Context, as_json: bool) -> None:
    """Create the table or schema if it is missing; safe to repeat."""
    store = store_of(context)
    with readable_errors():
        lacking = _lacking(store)
        store.provision()
    if as_json:
        echo_json({"store": repr(store), "lacked": lacking})
    else:
        click.echo(f"{store!r} is ready; {'what was missing is there now' if lacking else 'nothing was missing'}")


def _lacking(store: Store) -> str | None:
    """What keeps the store from being used as it is; None if nothing does."""
    try:
        if isinstance(store, VerifiableStore):
            store.verify()
    except StoreMisconfigured as error:
        return error.reason
    return None


@idempotency.command()
@click.option(
    "--batch", default=1000, show_default=True, type=WholeNumber(most=10_000), metavar="N", help="Delete N at a time."
)
@click.option("--max", "most", default=sys.maxsize, type=WholeNumber(), metavar="N", help="Stop after N.")
@click.option(
    "--released-before",
    "days",
    type=Amount("days"),
    metavar="DAYS",
    help="Delete RELEASED records, too, that were not touched for DAYS. They never expire by themselves, as they hold "
    "the finished steps and the fingerprint of an operation that may be delivered again; both are forgotten then.",
)
@click.option(
    "--abandoned-before",
    "abandoned_days",
    type=Amount("days"),
    metavar="DAYS",
    help="End what is IN_PROGRESS, too, if its lease has been over for DAYS: its message was lost. It is deleted, with "
    'steps and fingerprint. Under on_takeover="refuse", and where a step began and did not end, it becomes UNKNOWN. '
    "What another app has begun, or a task that this one lacks, stays.",
)
@as_json
@click.pass_context
def purge(
    context: click.Context,
    batch: int,
    most: int,
    days: float | None,
    abandoned_days: float | None,
    as_json: bool,
) -> None:
    """Delete outcomes that are no longer kept.

    Run it once a day; workers do not mind, and can do it themselves, by idempotency_purge. Some stores delete them by
    themselves. With --released-before and --abandoned-before the whole store may be read.
    """
    store = store_of(context)
    found = _Released()
    with readable_errors():
        purged = None
        if isinstance(store, PurgeableStore):
            purged = screen.grown("deleting outcomes", _purging(store, batch, most))
        if days is not None:
            screen.grown("deleting released", _deleting_released(store, days, most, found))
        ended = None if abandoned_days is None else _end_abandoned(app_of(context), store, abandoned_days, most)
    if as_json:
        deleted = None if days is None else found.deleted
        abandoned = None if ended is None else {"deleted": ended[Fate.DELETED], "in_doubt": ended[Fate.IN_DOUBT]}
        echo_json({"store": repr(store), "outcomes": purged, "released": deleted, "abandoned": abandoned})
        return
    click.echo(f"{store!r} deletes outcomes by itself" if purged is None else f"{purged} outcomes deleted")
    if days is not None:
        kept = "" if found.deleted == most else f"; {found.kept} others are younger, or were claimed meanwhile"
        click.echo(f"{found.deleted} released records deleted{kept}")
    if ended is not None:
        click.echo(f"{ended[Fate.DELETED]} abandoned records deleted, {ended[Fate.IN_DOUBT]} in doubt now (UNKNOWN)")


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
        raise click.ClickException(
            f'{error.name} is not installed; run: pip install "celery-idempotent[sql]"'
        ) from error
    store = store_of(context) if app_of(context).conf.get("idempotency_store") else None
    tables = [store.table, store.outbox] if isinstance(store, SQLStore) else []
    dialect = dialect or (store.dialect if isinstance(store, SQLStore) else None)
    if dialect is None:
        raise click.UsageError(f"idempotency_store is not an SQL store; give --dialect: {', '.join(_DIALECTS)}")
    statements, whose = (
        printed(dialect, *tables),
        repr(store) if tables else "idempotency_store, where it names no others",
    )
    if as_json:
        echo_json({"dialect": dialect, "store": repr(store) if tables else None, "sql": statements})
    else:
        click.echo(f"-- for {dialect}: the tables of {one_line(whose)}\n{statements}", nl=False)


def _purging(store: PurgeableStore, batch: int, most: int) -> Iterator[int]:
    """How many are deleted so far, batch by batch."""
    total = 0
    while total < most and (deleted := store.purge(min(batch, most - total))):
        total += deleted
        yield total


@dataclass(slots=True)
class _Released:
    """How many released records were deleted, and how many were not: too young, or claimed meanwhile."""

    deleted: int = 0
    kept: int = 0


def _deleting_released(store: Store, days: float, most: int, found: _Released) -> Iterator[int]:
    """How many are deleted so far, one by one."""

    def kept(record: Record) -> None:
        found.kept += 1

    swept = sweep_released(store, age=_milliseconds(days), kept=kept)
    for _ in islice(swept, most):
        found.deleted += 1
        yield found.deleted


def _end_abandoned(app: Celery, store: Store, days: float, most: int) -> Counter[Fate]:
    """How many became what."""
    swept = sweep_abandoned(store, policies_of(app), age=_milliseconds(days))
    return Counter(fate for _, fate in islice(swept, most))


def _milliseconds(days: float) -> int:
    return round(days * 86_400_000)
