"""Commands about the outbox of an SQL store."""

import time

import click
from kombu.exceptions import OperationalError

from celery_idempotent.integration import outbox
from celery_idempotent.integration.cli.base import app_of, idempotency, readable_errors, store_of
from celery_idempotent.integration.cli.screen import table
from celery_idempotent.integration.cli.views import duration_text


@idempotency.command()
@click.option("--once", is_flag=True, help="Publish what waits now, and end.")
@click.option("--every", default=1.0, show_default=True, metavar="SECONDS", help="Pause between two looks.")
@click.pass_context
def relay(context: click.Context, once: bool, every: float) -> None:
    """Publish messages that wait in the outbox of an SQL store.

    Workers do so, too, by idempotency_relay.
    """
    app = app_of(context)
    with readable_errors():
        while True:
            try:
                published = outbox.relay(app)
            except OperationalError as error:
                raise click.ClickException(f"the broker did not answer: {error}") from error
            if published:
                click.echo(f"published {published}")
            elif once:
                return
            else:
                time.sleep(every)


@idempotency.command(name="outbox")
@click.option(
    "--limit", default=100, show_default=True, type=click.IntRange(1), metavar="N", help="At most that many messages."
)
@click.pass_context
def list_outbox(context: click.Context, limit: int) -> None:
    """List messages that wait in the outbox, the oldest first.

    How often and why they failed, and when they are tried next.
    """
    store = store_of(context)
    with readable_errors():
        waiting = outbox.outbox_of(app_of(context)).waiting(limit)
    now = store.now()
    rows = [("TASK ID", "AGE", "FAILURES", "NEXT TRY", "REASON")]
    for each in waiting:
        next_try = f"in {duration_text(each.next_try - now)}" if each.next_try > now else "now"
        rows.append((each.id, duration_text(now - each.created_at), str(each.failures), next_try, each.reason or ""))
    click.echo(table(rows, last=rows[0].index("REASON")))
