"""Commands that make and keep a store: its tables, and what it deletes."""

import sys
from collections.abc import Iterator

import click

from celery_idempotent.integration.cli.base import app_of, idempotency, readable_errors, store_of
from celery_idempotent.integration.cli.screen import counted
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import PurgeableStore, Store

_DIALECTS = ["postgresql", "mysql", "mariadb", "sqlite"]


@idempotency.command()
@click.pass_context
def provision(context: click.Context) -> None:
    """Create the table or schema if it is missing; safe to repeat."""
    store = store_of(context)
    with readable_errors():
        store.provision()
    click.echo(f"{store!r} is ready")


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
    "days",
    type=click.FloatRange(0, min_open=True),
    metavar="DAYS",
    help="Delete RELEASED records, too, that were not touched for DAYS. They never expire by themselves, as they hold "
    "the finished steps and the fingerprint of an operation that may be delivered again; both are forgotten then.",
)
@click.pass_context
def purge(context: click.Context, batch: int, most: int, days: float | None) -> None:
    """Delete outcomes that are no longer kept.

    Run it once a day; workers do not mind. Some stores delete them by themselves. With --released-before the whole
    store is read.
    """
    store = store_of(context)
    with readable_errors():
        purged = (
            counted("deleting outcomes", _purging(store, batch, most)) if isinstance(store, PurgeableStore) else None
        )
        released = None if days is None else counted("deleting released", _deleting_released(store, days, most))
    click.echo(f"{store!r} deletes outcomes by itself" if purged is None else f"{purged} outcomes deleted")
    if released is not None:
        click.echo(f"{released} released records deleted")


@idempotency.command()
@click.option("--dialect", type=click.Choice(_DIALECTS), help="For which database; default: that of the store.")
@click.pass_context
def ddl(context: click.Context, dialect: str | None) -> None:
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
    click.echo(printed(dialect, *tables), nl=False)


def _purging(store: PurgeableStore, batch: int, most: int) -> Iterator[int]:
    """How many are deleted so far, batch by batch."""
    total = 0
    while total < most and (deleted := store.purge(min(batch, most - total))):
        total += deleted
        yield total


def _deleting_released(store: Store, days: float, most: int) -> Iterator[int]:
    """How many are deleted so far, one by one."""
    total, before = 0, store.now() - round(days * 86_400_000)
    for record in store.scan(status=Status.RELEASED):
        if record.updated_at < before and store.delete(record.key, record.revision):
            total += 1
            yield total
            if total == most:
                return
