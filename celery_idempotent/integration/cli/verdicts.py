"""Commands by which a person judges an operation."""

import click

from celery_idempotent.engine import operator
from celery_idempotent.integration.cli.base import app_of, idempotency, json_value, readable_errors
from celery_idempotent.integration.cli.views import fields_text
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Record

_SHOWN_BEFORE_A_VERDICT = ("status", "task", "task_id", "worker", "updated_at", "error")


@idempotency.command("resolve")
@click.argument("key")
@click.option("--completed", "result", metavar="JSON", help="It happened; the result to replay, such as '\"ch_1\"'.")
@click.option("--rerun", is_flag=True, help="It did not happen; the next delivery runs the task.")
@click.option("--yes", is_flag=True, help="Confirm the action without prompting.")
@click.pass_context
def resolve_unknown(context: click.Context, key: str, result: str | None, rerun: bool, yes: bool) -> None:
    """Give your verdict on KEY, whose outcome is UNKNOWN."""
    if (result is None) == (not rerun):
        raise click.UsageError("give either --completed RESULT or --rerun")
    value = None if result is None else json_value("--completed", result)
    runtime = runtime_of(app_of(context))
    with readable_errors():
        store = runtime.store
        seen = operator.recorded(store, key)
        operator.require_unknown(seen)
        _confirm(seen, "Did you check with the receiver that this is what happened?", yes)
        if rerun:
            record = operator.rerun(store, key, seen_revision=seen.revision)
        else:
            retain = runtime.policy_of(seen).retain_ms
            record = operator.completed(store, runtime.codec, key, value, retain=retain, seen_revision=seen.revision)
    click.echo(f"{key} is {record.status}")


@idempotency.command()
@click.argument("key")
@click.option("--yes", is_flag=True, help="Confirm the action without prompting.")
@click.pass_context
def release(context: click.Context, key: str, yes: bool) -> None:
    """Give back KEY, whose attempt never ended.

    The next delivery runs the task. This works once the lease and its grace are over. Under on_takeover="refuse" you
    state by it that the effect did not happen; under "rerun" the next delivery would run anyway.
    """
    runtime = runtime_of(app_of(context))
    with readable_errors():
        store = runtime.store
        seen = operator.recorded(store, key)
        grace = runtime.policy_of(seen).grace_ms
        operator.require_abandoned(seen, grace=grace, now=store.now())
        _confirm(seen, "Did you check the receiver, and did the effect not happen?", yes)
        record = operator.release(store, key, grace=grace, seen_revision=seen.revision)
    click.echo(f"{key} is {record.status}")


def _confirm(seen: Record, question: str, yes: bool) -> None:
    """Show what a verdict is about before asking for it."""
    if not yes:
        fields = seen.to_fields()
        click.echo(fields_text({name: fields[name] for name in _SHOWN_BEFORE_A_VERDICT if fields.get(name)}))
        click.confirm(question, abort=True)
