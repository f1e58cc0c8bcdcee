"""The command that checks a deployment before it goes out."""

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any

import click
from celery import Celery
from celery.concurrency import ALIASES

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.integration.binding import is_builtin, is_enforced, is_idempotent, problems_of_delivery
from celery_idempotent.integration.broker.hints import Hint
from celery_idempotent.integration.cli.base import advise, as_json, echo_json, idempotency, warned_in
from celery_idempotent.integration.cli.options import seconds
from celery_idempotent.integration.operating import startup
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import describe


@dataclass(frozen=True, slots=True)
class TaskFound:
    """A task of the app's.

    Args:
        name: Its name.
        protected: Whether its duplicates are suppressed.
        policy: What its policy says, by option; None where it has none.
        guarantee: What it promises, for people.
        warnings: What makes that weaker than it looks.
    """

    name: str
    protected: bool
    policy: Mapping[str, Any] | None
    guarantee: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found. ``store`` and ``broker`` are names without passwords; empty where they cannot even be named."""

    store: str
    broker: str
    tasks: tuple[TaskFound, ...]
    errors: tuple[str, ...]
    advice: tuple[Hint, ...]


def inspected(app: Celery, pool: str, *, timeout: float) -> Inspection:
    """Check all that a worker of ``app`` needs; warns of the rest as a worker does.

    Args:
        app: The app, with its modules imported.
        pool: The module of the worker's pool.
        timeout: Seconds that the broker has for its answer.
    """
    errors: list[str] = []
    advice: list[Hint] = []
    tasks: tuple[TaskFound, ...] = ()
    store = ""
    try:
        advice = startup.check(app, pool)
    except IdempotencyError as error:
        errors.append(str(error))
    broker, trouble = _broker(app, timeout)
    errors += [trouble] if trouble else []
    try:
        store = repr(runtime_of(app).store)
        tasks = tuple(_found(app, each) for name, each in sorted(app.tasks.items()) if not is_builtin(type(each)))
    except IdempotencyError as error:
        errors += [] if str(error) in errors else [str(error)]
    return Inspection(store, broker, tasks, tuple(errors), tuple(advice))


def _found(app: Celery, task: Any) -> TaskFound:
    if not is_idempotent(task):
        return TaskFound(task.name, False, None, "nothing is promised: it is no idempotent task", ())
    policy = task.idempotency_policy
    options = {each.name: _plain(getattr(policy, each.name)) for each in fields(policy)}
    problems = tuple(str(each) for each in problems_of_delivery(type(task), app))
    return TaskFound(task.name, is_enforced(task), options, task.guarantee(), problems)


def _plain(value: Any) -> Any:
    """A policy's value as JSON has it; of a function or a type its name."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return getattr(value, "__qualname__", None) or str(value)


def _broker(app: Celery, timeout: float) -> tuple[str, str]:
    """The broker's name, and why it cannot be used; empty if it can.

    It is asked in a thread of its own: what bounds the wait for a connection differs by transport, and for some nothing
    does. A thread that hangs ends with the process.
    """
    told: list[str] = []

    def ask() -> None:
        try:
            with closing(app.connection_for_write()) as connection:
                connection.connect()
            told.append("")
        except Exception as error:  # noqa: BLE001 - whatever the transport raises; it is told, by its type and its text
            told.append(f"{type(error).__name__}: {describe(error)}")

    connection = app.connection_for_write()
    name = one_line(
        connection.as_uri()
        if connection.password
        else connection.as_uri().replace("//:**@", "//", 1).replace(":**@", "@", 1)
    )
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout)
    trouble = told[0] if told else f"no answer within {timeout:g} s"
    return name, one_line(f"the broker {name} cannot be used: {trouble}") if trouble else ""


@idempotency.command()
@click.option("--strict", is_flag=True, help="Fail where anything warns, too.")
@seconds("--timeout", 5.0, "How long to wait for the broker.")
@as_json
@click.pass_context
def check(context: click.Context, strict: bool, timeout: float, as_json: bool) -> None:
    """Check tasks, settings, store and broker: the gate of a deploy.

    The first three as a worker does at its start. Nothing that it writes stays, save an object of a few bytes where
    there is a place for large results. The pool is that of the setting worker_pool. A store or broker that does not
    answer is an error here; a worker would start, and wait. --strict: a warning is an error, too.
    """
    app = context.obj.app
    pool = app.conf.worker_pool
    try:
        app.loader.import_default_modules()
    except IdempotencyError as error:
        found = Inspection("", "", (), (str(error),), ())
    else:
        found = inspected(app, str(ALIASES.get(pool, pool)).partition(":")[0], timeout=timeout)
    of_tasks = [one_line(f"{task.name}: {each}") for task in found.tasks for each in task.warnings]
    warned = [*dict.fromkeys([*warned_in(context), *of_tasks])]
    if as_json:
        problems = [("error", each) for each in found.errors] + [("warning", each) for each in warned]
        echo_json(
            {
                "store": found.store,
                "broker": found.broker,
                "tasks": [asdict(each) for each in found.tasks],
                "problems": [{"level": level, "text": text} for level, text in problems],
                "advice": [str(each) for each in found.advice],
            }
        )
    else:
        if not found.errors:
            _print(found, runtime_of(app))
        for hint in found.advice:
            advise(str(hint))
        for error_text in found.errors:
            click.echo(f"Error: {one_line(error_text)}", err=True)
    if found.errors or (strict and warned):
        context.exit(1)


def _print(found: Inspection, runtime: Runtime) -> None:
    way = getattr(runtime.store, "way", "")  # of a store that has more than one
    click.echo(f"{found.store} answers and can be used{f' {way}' if way else ''}")
    for note in getattr(runtime.store, "notes", ()):
        click.echo(one_line(note))
    click.echo(f"{found.broker} answers")
    for task in found.tasks:
        promise = task.guarantee if task.policy is not None else f"{task.name}: {task.guarantee}"
        first, *rest = map(one_line, promise.splitlines())
        click.echo("\n".join([f"{'protected' if task.protected else 'NOT protected'}: {first}", *rest]))
