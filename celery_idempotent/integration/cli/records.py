"""Commands that look records up."""

import re
from collections.abc import Callable, Sequence
from heapq import nsmallest

import click

from celery_idempotent.engine.claim import effect_key
from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import (
    advise,
    app_of,
    as_json,
    echo_json,
    idempotency,
    json_value,
    readable_errors,
)
from celery_idempotent.integration.cli.options import WholeNumber, advise_on, filters, of_task
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.cli.views import (
    brief,
    everything,
    whole,
)
from celery_idempotent.integration.display import beginning, duration, iso, names_of_effects, status
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.integration.task import IdempotentMixin
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record


@idempotency.command()
@click.argument("task")
@click.option("--args", "arguments", default="[]", help="Positional arguments, as a JSON list.")
@click.option("--kwargs", "keywords", default="{}", help="Keyword arguments, as a JSON object.")
@as_json
@click.pass_context
def key(context: click.Context, task: str, arguments: str, keywords: str, as_json: bool) -> None:
    """Print the idempotency key that a call of TASK would have."""
    args, kwargs = json_value("--args", arguments, list), json_value("--kwargs", keywords, dict)
    app = app_of(context)
    if task not in app.tasks:
        raise click.BadParameter(f"this app has no task {task}; it has: {', '.join(sorted(app.tasks))}")
    if not isinstance(app.tasks[task], IdempotentMixin):
        raise click.BadParameter(f"{task} is not idempotent: its base is not IdempotentTask")
    with readable_errors():
        try:
            derived = app.tasks[task].idempotency_key_for(*args, **kwargs)
        except TypeError as error:
            raise click.UsageError(f"{task} does not take these arguments: {error}") from error
    if as_json:
        echo_json({"task": task, "key": derived})
    else:
        click.echo(derived)


@idempotency.command()
@click.argument("key")
@of_task
@as_json
@click.pass_context
def show(context: click.Context, key: str, task: str | None, as_json: bool) -> None:
    """Print all that is recorded under KEY.

    KEY may also be the beginning of a key or of its hash, a task id, or a label. For these the whole store is read.
    Where it fits several, --task says which is meant.
    """
    runtime = runtime_of(app_of(context))
    with readable_errors():
        store = runtime.store
        record = looked_up(store, key, runtime.cipher, task=task)
        now, policy = store.now(), runtime.policy_of(record)
        if as_json:
            echo_json(whole(record, now, policy))
        else:
            screen.lines(everything(record, now, policy))


@idempotency.command("effect-key")
@click.argument("key")
@click.argument("name")
@of_task
@as_json
@click.pass_context
def print_effect_key(context: click.Context, key: str, name: str, task: str | None, as_json: bool) -> None:
    """Print the key by which the operation KEY calls a receiver.

    NAME is that of the step, or what the body gave to attempt.effect_key(). KEY is as for show; a whole key need not be
    recorded any more.
    """
    runtime = runtime_of(app_of(context))
    with readable_errors():
        full = _full_key(runtime, key, name, task)
    if as_json:
        echo_json({"key": full, "name": name, "effect_key": effect_key(full, name)})
    else:
        click.echo(effect_key(full, name))


def _full_key(runtime: Runtime, key: str, name: str, task: str | None) -> str:
    try:
        record = looked_up(runtime.store, key, runtime.cipher, task=task)
    except PolicyError:
        if _WHOLE.fullmatch(key) is None:
            raise
        return key
    known = names_of_effects(record, runtime.policy_of(record))
    if known and name not in known:
        advise(f"nothing is known of an effect called {name}; known are: {', '.join(known)}")
    return record.key


_WHOLE = re.compile(".+:[0-9a-f]{64}", re.DOTALL)
"""What every derived key looks like."""


@idempotency.command(name="list")
@filters
@click.option(
    "--limit", default=100, show_default=True, type=WholeNumber(), metavar="N", help="At most that many records."
)
@as_json
@click.pass_context
def list_records(context: click.Context, wanted: Filter, limit: int, as_json: bool) -> None:
    """List the records that were written longest ago, oldest first.

    Reads the whole store unless that has an index for what is asked: mind the cost of a large table. A terminal shows a
    page at a time, and of each key what show, resolve, release and forget take for it.
    """
    runtime = runtime_of(app_of(context))
    with readable_errors():
        store = runtime.store
        records = found(store, wanted, runtime.cipher)
        oldest = nsmallest(limit + 1, screen.counted("reading", records), key=lambda record: record.updated_at)
        listed, more = oldest[:limit], oldest[limit:]
        now = store.now()
    if as_json:
        echo_json([brief(each, now) for each in listed])
    else:
        print_records(listed, now)
    if more:
        click.echo(f"Warning: there are more than these {limit}; ask for fewer, or give --limit", err=True)
    if not listed:
        advise_on(wanted, app_of(context))


def print_records(records: Sequence[Record], now: int) -> None:
    """Print a table of records; a column for labels only where there is one."""
    is_narrow = (width := screen.width()) is not None and width < screen.NARROW
    columns = [Column("STATUS"), Column("AGE" if is_narrow else "UPDATED")]
    columns += [] if is_narrow else [Column("ATTEMPTS", is_number=width is not None)]
    columns += [Column("TASK", is_cut=True)]
    columns += [Column("LABEL", is_cut=True)] if any(each.label for each in records) else []
    columns += [Column("KEY")]
    columns += [] if is_narrow else [Column("WORKER", is_cut=True)]
    rows = [[_cell(record, each.head, now) for each in columns] for record in records]
    if width is not None and not _fit(columns, rows, width):
        is_told = all(f"{each.task}:" in each.key for each in records)  # by the beginning of the key
        columns = [each for each in columns if each.head != "TASK" or not is_told]
        rows = [[_cell(record, each.head, now, beginning) for each in columns] for record in records]
    screen.table(columns, rows)


def _fit(columns: Sequence[Column], rows: Sequence[Sequence[object]], width: int) -> bool:
    """Whether whole keys leave every cell its room."""
    heads = [each.head for each in columns]
    longest = [max(len(one_line(each)) for each in column) for column in zip(heads, *rows, strict=True)]
    return sum(longest) + 2 * len(longest) <= width


def _cell(record: Record, head: str, now: int, shortened: Callable[[str], str] = str) -> object:
    match head:
        case "KEY":
            return shortened(record.key)
        case "STATUS":
            return status(record, now)
        case "AGE":
            return duration(now - record.updated_at)
        case "UPDATED":
            return iso(record.updated_at, "seconds")
        case _:
            return getattr(record, head.lower())
