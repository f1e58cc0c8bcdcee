"""Commands about the outbox of an SQL store."""

import time

import click
from kombu.exceptions import OperationalError

from celery_idempotent.integration import outbox
from celery_idempotent.integration.cli import options, screen
from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency, readable_errors, store_of
from celery_idempotent.integration.cli.options import WholeNumber
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.display import duration, iso
from celery_idempotent.protocol.store import WaitingMessage

MOST_COUNTED = 100_000
"""Messages that wait; where there are more, nobody needs to know how many."""


@idempotency.command()
@click.option("--once", is_flag=True, help="Publish what waits now, and end.")
@options.every(1.0)
@as_json
@click.pass_context
def relay(context: click.Context, once: bool, every: float, as_json: bool) -> None:
    """Publish messages that wait in the outbox of an SQL store.

    Workers do so, too, by idempotency_relay.
    """
    app = app_of(context)
    with readable_errors():
        waiting = outbox.outbox_of(app)
        total = 0
        while True:
            try:
                published = outbox.relay(app)
            except OperationalError as error:
                raise click.ClickException(f"the broker did not answer: {error}") from error
            total += published
            if published and not (once and as_json):
                _tell_published(published, as_json)
            elif once:
                _tell_end(total, waiting.waiting(MOST_COUNTED), as_json)
                return
            else:
                time.sleep(every)


def _tell_published(count: int, as_json: bool) -> None:
    if as_json:
        echo_json({"published": count}, indent=None)
    else:
        click.echo(f"published {count}")


def _tell_end(published: int, waiting: list[WaitingMessage], as_json: bool) -> None:
    """What was found by a relay that ends, and what is left: messages that could not be published, or are taken."""
    if as_json:
        echo_json({"published": published, "waiting": len(waiting)})
    elif waiting:
        click.echo(f"{len(waiting)} still wait; 'outbox' says why")
    elif not published:
        click.echo("the outbox is empty")


@idempotency.command(name="outbox")
@click.option(
    "--limit", default=100, show_default=True, type=WholeNumber(), metavar="N", help="At most that many messages."
)
@as_json
@click.pass_context
def list_outbox(context: click.Context, limit: int, as_json: bool) -> None:
    """List messages that wait in the outbox, the oldest first.

    How often and why they failed, and when they are tried next.
    """
    store = store_of(context)
    with readable_errors():
        waiting = outbox.outbox_of(app_of(context)).waiting(limit)
    now = store.now()
    if as_json:
        echo_json([_plain(each) for each in waiting])
        return
    columns = [Column("TASK ID"), Column("AGE"), Column("FAILURES"), Column("NEXT TRY"), Column("REASON", is_cut=True)]
    screen.table(
        columns,
        [
            (each.id, duration(now - each.created_at), each.failures, _next_try(each, now), each.reason or "")
            for each in waiting
        ],
    )


def _next_try(message: WaitingMessage, now: int) -> str:
    return f"in {duration(message.next_try - now)}" if message.next_try > now else "now"


def _plain(message: WaitingMessage) -> dict[str, object]:
    return {
        "task_id": message.id,
        "created_at": iso(message.created_at),
        "failures": message.failures,
        "next_try": iso(message.next_try) if message.next_try else None,
        "reason": message.reason,
    }
