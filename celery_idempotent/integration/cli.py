"""``celery -A your_app idempotency ...``: set up the store, look into it, and give a verdict.

The commands read the store itself, so they work with every broker; Celery's remote control does not reach
workers on SQS.
"""

import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import click
from celery import Celery
from celery.concurrency import ALIASES
from kombu.exceptions import OperationalError

from celery_idempotent.engine import operator
from celery_idempotent.errors import IdempotencyError, IdempotencyWarning
from celery_idempotent.integration import outbox, startup
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.tables import Row, table
from celery_idempotent.integration.task import IdempotentMixin
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.publishing import shown_status
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import PurgeableStore, Store

_DIALECTS = ["postgresql", "mysql", "mariadb", "sqlite"]

_HEADS = ("STATUS", "UPDATED", "ATTEMPTS", "TASK", "KEY", "WORKER")

_SHOWN_BEFORE_A_VERDICT = ("status", "task", "task_id", "worker", "updated_at", "error")


@click.group(name="idempotency")
@click.pass_context
def idempotency(context: click.Context) -> None:
    """Set up, check and inspect the idempotency store."""
    context.with_resource(_warnings_as_sentences())


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print this library's warnings without the line of code that gave them: they are about settings of the app."""
    with warnings.catch_warnings():
        shown, told = warnings.showwarning, set[str]()

        def show(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
            if not issubclass(category, IdempotencyWarning):
                shown(message, category, *place, **keywords)
            elif (sentence := one_line(message)) not in told:  # Celery binds a task twice
                told.add(sentence)
                click.echo(f"Warning: {sentence}", err=True)

        warnings.showwarning = show
        yield


@idempotency.command()
@click.pass_context
def provision(context: click.Context) -> None:
    """Create the table or schema if it is missing; safe to repeat."""
    store = _store(context)
    with _readable_errors():
        store.provision()
    click.echo(f"{store!r} is ready")


@idempotency.command()
@click.pass_context
def check(context: click.Context) -> None:
    """Check tasks, settings and store as a worker does at its start.

    Nothing that it writes stays. The pool is that of the setting worker_pool. A store that does not answer is an error
    here; a worker would start, and postpone its tasks until the store is back.
    """
    app = _app(context)
    pool = app.conf.worker_pool
    with _readable_errors():
        for hint in startup.check(app, str(ALIASES.get(pool, pool)).partition(":")[0]):
            click.echo(f"Advice: {one_line(hint)}", err=True)
        store = runtime_of(app).store
        way = getattr(store, "way", "")  # of those that have more than one
        click.echo(f"{store!r} answers and can be used{f' {way}' if way else ''}")


@idempotency.command()
@click.argument("task")
@click.option("--args", "arguments", default="[]", help="Positional arguments, as a JSON list.")
@click.option("--kwargs", "keywords", default="{}", help="Keyword arguments, as a JSON object.")
@click.pass_context
def key(context: click.Context, task: str, arguments: str, keywords: str) -> None:
    """Print the idempotency key that a call of TASK would have."""
    app = _app(context)
    if task not in app.tasks:
        raise click.BadParameter(f"this app has no task {task}; it has: {', '.join(sorted(app.tasks))}")
    if not isinstance(app.tasks[task], IdempotentMixin):
        raise click.BadParameter(f"{task} is not idempotent: its base is not IdempotentTask")
    args, kwargs = _json("--args", arguments, list), _json("--kwargs", keywords, dict)
    with _readable_errors():
        try:
            click.echo(app.tasks[task].idempotency_key_for(*args, **kwargs))
        except TypeError as error:
            raise click.UsageError(f"{task} does not take these arguments: {error}") from error


@idempotency.command()
@click.argument("key")
@click.pass_context
def show(context: click.Context, key: str) -> None:
    """Print all that is recorded under KEY."""
    with _readable_errors():
        store = _store(context)
        record = store.get(key)
        if record is None:
            raise click.ClickException(f"nothing is recorded under {key}")
        click.echo(_fields({**record.to_fields(), "status": _status(record, store.now())}))


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
    store = _store(context)
    records = store.scan(status=Status(status) if status else None, task=task)
    with (
        _readable_errors(),
        click.progressbar(islice(records, limit), length=limit, label="reading", file=sys.stderr) as bar,
    ):
        found = list(bar)
        is_all = next(records, None) is None
        rows = _rows(sorted(found, key=lambda record: record.updated_at), store.now())
    click.echo(_table(rows, last=_HEADS.index("KEY")))
    if not is_all:
        click.echo(f"there are more than these {limit}; give --limit", err=True)


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
    store = _store(context)
    with _readable_errors():
        purged = (
            _counted("deleting outcomes", _purging(store, batch, most)) if isinstance(store, PurgeableStore) else None
        )
        released = None if days is None else _counted("deleting released", _deleting_released(store, days, most))
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
    store = _store(context) if _app(context).conf.get("idempotency_store") else None
    tables = [store.table, store.outbox] if isinstance(store, SQLStore) else []
    dialect = dialect or (store.dialect if isinstance(store, SQLStore) else None)
    if dialect is None:
        raise click.UsageError(f"idempotency_store is not an SQL store; give --dialect: {', '.join(_DIALECTS)}")
    click.echo(printed(dialect, *tables), nl=False)


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
    value = None if result is None else _json("--completed", result)
    runtime = runtime_of(_app(context))
    with _readable_errors():
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
    runtime = runtime_of(_app(context))
    with _readable_errors():
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
        click.echo(_fields({name: fields[name] for name in _SHOWN_BEFORE_A_VERDICT if fields.get(name)}))
        click.confirm(question, abort=True)


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


def _counted(label: str, totals: Iterator[int]) -> int:
    """The last of ``totals``, which are shown while they grow."""
    with click.progressbar(totals, label=label, item_show_func=_shown, show_percent=False, file=sys.stderr) as bar:
        return max(bar, default=0)


def _shown(total: int | None) -> str:
    return str(total or 0)


@idempotency.command()
@click.option("--once", is_flag=True, help="Publish what waits now, and end.")
@click.option("--every", default=1.0, show_default=True, metavar="SECONDS", help="Pause between two looks.")
@click.pass_context
def relay(context: click.Context, once: bool, every: float) -> None:
    """Publish messages that wait in the outbox of an SQL store.

    Workers do so, too, by idempotency_relay.
    """
    app = _app(context)
    with _readable_errors():
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
    store = _store(context)
    with _readable_errors():
        waiting = outbox.outbox_of(_app(context)).waiting(limit)
    now = store.now()
    rows = [("TASK ID", "AGE", "FAILURES", "NEXT TRY", "REASON")]
    for each in waiting:
        next_try = f"in {_duration(each.next_try - now)}" if each.next_try > now else "now"
        rows.append((each.id, _duration(now - each.created_at), str(each.failures), next_try, each.reason or ""))
    click.echo(_table(rows, last=rows[0].index("REASON")))


def _duration(milliseconds: int) -> str:
    return str(timedelta(seconds=max(milliseconds, 0) // 1000))


def _json(option: str, text: str, wanted: type = object) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        reason = f"{text!r} is not JSON: {error}; a text has quotes of its own: '\"ch_1\"'"
        raise click.BadParameter(reason, param_hint=option) from error
    if not isinstance(value, wanted):
        raise click.BadParameter(f"{text!r} is not a JSON {wanted.__name__}", param_hint=option)
    return value


def _app(context: click.Context) -> Celery:
    app = context.obj.app
    with _readable_errors():
        app.loader.import_default_modules()
    return app


def _store(context: click.Context) -> Store:
    with _readable_errors():
        return runtime_of(_app(context)).store


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except IdempotencyError as error:
        raise click.ClickException(str(error)) from error


def _status(record: Record, now: int) -> str:
    return shown_status(record.status, record.owner, record.lease_until, now)


def _rows(records: Iterable[Record], now: int) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [_HEADS]
    rows += [
        (_status(each, now), _time(each.updated_at, "seconds"), each.attempts, each.task, each.key, each.worker)
        for each in records
    ]
    return rows


def _table(rows: Iterable[Sequence[object]], *, last: int) -> str:
    cells: list[Row] = [tuple(map(one_line, row)) for row in rows]
    return table(cells, last=last, width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def _fields(fields: Mapping[str, Any]) -> str:
    return "\n".join(f"{name:>14}  {_readable(name, value)}" for name, value in fields.items())


def _readable(name: str, value: Any) -> str:
    if name in {"lease_until", "created_at", "updated_at"}:
        return _time(value)
    if name == "expires_at":
        return _time(value * 1000)
    return f"{len(value)} bytes" if name == "result" else one_line(value)


def _time(milliseconds: int, precision: str = "milliseconds") -> str:
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):  # after the year 9999: a damaged clock, or a test
        return str(milliseconds)
    return f"{moment.isoformat(timespec=precision)}Z"
