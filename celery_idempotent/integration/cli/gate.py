"""The command that checks what a worker checks at its start."""

import click
from celery.concurrency import ALIASES

from celery_idempotent.integration import startup
from celery_idempotent.integration.cli.base import app_of, idempotency, readable_errors
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line


@idempotency.command()
@click.pass_context
def check(context: click.Context) -> None:
    """Check tasks, settings and store as a worker does at its start.

    Nothing that it writes stays. The pool is that of the setting worker_pool. A store that does not answer is an error
    here; a worker would start, and postpone its tasks until the store is back.
    """
    app = app_of(context)
    pool = app.conf.worker_pool
    with readable_errors():
        for hint in startup.check(app, str(ALIASES.get(pool, pool)).partition(":")[0]):
            click.echo(f"Advice: {one_line(hint)}", err=True)
        store = runtime_of(app).store
        way = getattr(store, "way", "")  # of those that have more than one
        click.echo(f"{store!r} answers and can be used{f' {way}' if way else ''}")
