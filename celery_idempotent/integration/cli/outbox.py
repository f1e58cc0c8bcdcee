"""Commands about the outbox of an SQL store."""

import time

import click
from kombu.exceptions import OperationalError

from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import (
    app_of,
    as_json,
    echo_json,
    idempotency,
    limit,
    seconds,
    store_of,
)
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.operating.display import duration, iso

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
