"""Commands that look records up."""

import sys
from itertools import islice

import click

from celery_idempotent.integration.cli.base import app_of, idempotency, json_value, readable_errors, store_of
from celery_idempotent.integration.cli.screen import table
from celery_idempotent.integration.cli.views import HEADS, fields_text, rows_of, status_of
from celery_idempotent.integration.task import IdempotentMixin
from celery_idempotent.protocol.record import Status


@idempotency.command()
@click.argument("task")
@click.option("--args", "arguments", default="[]", help="Positional arguments, as a JSON list.")
@click.option("--kwargs", "keywords", default="{}", help="Keyword arguments, as a JSON object.")
@click.pass_context
def key(context: click.Context, task: str, arguments: str, keywords: str) -> None:
    """Print the idempotency key that a call of TASK would have."""
    app = app_of(context)
    if task not in app.tasks:
        raise click.BadParameter(f"this app has no task {task}; it has: {', '.join(sorted(app.tasks))}")
    if not isinstance(app.tasks[task], IdempotentMixin):
        raise click.BadParameter(f"{task} is not idempotent: its base is not IdempotentTask")
    args, kwargs = json_value("--args", arguments, list), json_value("--kwargs", keywords, dict)
    with readable_errors():
        try:
            click.echo(app.tasks[task].idempotency_key_for(*args, **kwargs))
        except TypeError as error:
            raise click.UsageError(f"{task} does not take these arguments: {error}") from error


@idempotency.command()
@click.argument("key")
@click.pass_context
def show(context: click.Context, key: str) -> None:
    """Print all that is recorded under KEY."""
    with readable_errors():
        store = store_of(context)
        record = store.get(key)
        if record is None:
            raise click.ClickException(f"nothing is recorded under {key}")
        click.echo(fields_text({**record.to_fields(), "status": status_of(record, store.now())}))


@idempotency.command(name="list")
@click.option(
    "--status",
    type=click.Choice([str(each) for each in Status], case_sensitive=False),
    metavar="STATUS",
    help=f"Only records in this status: {', '.join(Status)}; upper or lower case.",
)
@click.option("--task", metavar="TASK", help="Only records of this task.")
@click.option("--limit", default=100, show_default=True, metavar="N", help="At most that many records.")
@click.pass_context
def list_records(context: click.Context, status: str | None, task: str | None, limit: int) -> None:
    """List records, oldest write first. Reads the whole store: mind the cost of a large table."""
    store = store_of(context)
    records = store.scan(status=Status(status) if status else None, task=task)
    with (
        readable_errors(),
        click.progressbar(islice(records, limit), length=limit, label="reading", file=sys.stderr) as bar,
    ):
        found = list(bar)
        is_all = next(records, None) is None
        rows = rows_of(sorted(found, key=lambda record: record.updated_at), store.now())
    click.echo(table(rows, last=HEADS.index("KEY")))
    if not is_all:
        click.echo(f"there are more than these {limit}; give --limit", err=True)
