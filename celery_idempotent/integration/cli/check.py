"""The command that checks a deployment before it goes out."""

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import click
from celery import Celery
from celery.concurrency import ALIASES

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.integration.binding import is_builtin, is_enforced, is_idempotent, problems_of_delivery
from celery_idempotent.integration.cli.base import advise, as_json, echo_json, idempotency, seconds, warned_in
from celery_idempotent.integration.operating import startup
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import describe
from celery_idempotent.protocol.store import Store


@dataclass(slots=True)
class _Found:
    """What was found. ``store`` and ``broker`` are names without passwords; empty where they cannot even be named."""

    store: str = ""
    broker: str = ""
    tasks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def inspect(self, app: Celery, *, timeout: float) -> None:
        """Check all that a worker of ``app`` needs, and warn of the rest as it does; its broker has ``timeout`` s."""
        pool = app.conf.worker_pool
        try:
            app.loader.import_default_modules()
        except IdempotencyError as error:
            self.errors.append(str(error))
            return
        try:
            self.advice = [str(each) for each in startup.check(app, str(ALIASES.get(pool, pool)).partition(":")[0])]
        except IdempotencyError as error:
            self.errors.append(str(error))
        self.broker, trouble = _broker(app, timeout)
        if trouble:
            self.errors.append(one_line(f"the broker {self.broker} cannot be used: {trouble}"))
        try:
            self.store = repr(runtime_of(app).store)
            self.tasks = [_facts(app, each) for _, each in sorted(app.tasks.items()) if not is_builtin(type(each))]
        except IdempotencyError as error:
            self.errors += [] if str(error) in self.errors else [str(error)]


def _facts(app: Celery, task: Any) -> dict[str, Any]:
    """Whether the task's duplicates are suppressed, its policy by option, what it promises, and what weakens that."""
    if not is_idempotent(task):
        promise = "nothing is promised: it is no idempotent task"
        return {"name": task.name, "protected": False, "policy": None, "guarantee": promise, "warnings": []}
    policy = task.idempotency_policy
    return {
        "name": task.name,
        "protected": is_enforced(task),
        "policy": {each.name: _plain(getattr(policy, each.name)) for each in fields(policy)},
        "guarantee": task.guarantee(),
        "warnings": [str(each) for each in problems_of_delivery(type(task), app)],
    }


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
    """The broker's name, and why it cannot be used, if it cannot.

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
    return name, told[0] if told else f"no answer within {timeout:g} s"


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
    app, found = context.obj.app, _Found()
    found.inspect(app, timeout=timeout)
    of_tasks = [one_line(f"{task['name']}: {each}") for task in found.tasks for each in task["warnings"]]
    warned = [*dict.fromkeys([*warned_in(context), *of_tasks])]
    if as_json:
        problems = [("error", each) for each in found.errors] + [("warning", each) for each in warned]
        echo_json(
            {
                "store": found.store,
                "broker": found.broker,
                "tasks": found.tasks,
                "problems": [{"level": level, "text": text} for level, text in problems],
                "advice": found.advice,
            }
        )
    else:
        if not found.errors:
            _print(found, runtime_of(app).store)
        for hint in found.advice:
            advise(hint)
        for error_text in found.errors:
            click.echo(f"Error: {one_line(error_text)}", err=True)
    if found.errors or (strict and warned):
        context.exit(1)


def _print(found: _Found, store: Store) -> None:
    way = getattr(store, "way", "")  # of a store that has more than one
    click.echo(f"{found.store} answers and can be used{f' {way}' if way else ''}")
    for note in getattr(store, "notes", ()):
        click.echo(one_line(note))
    click.echo(f"{found.broker} answers")
    for task in found.tasks:
        promise = task["guarantee"] if task["policy"] is not None else f"{task['name']}: {task['guarantee']}"
        first, *rest = map(one_line, promise.splitlines())
        click.echo("\n".join([f"{'protected' if task['protected'] else 'NOT protected'}: {first}", *rest]))
