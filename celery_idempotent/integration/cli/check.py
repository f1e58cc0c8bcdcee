"""The command that checks a deployment before it goes out."""

from dataclasses import asdict

import click
from celery.concurrency import ALIASES

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.integration.cli.base import advise, as_json, echo_json, idempotency, warned_in
from celery_idempotent.integration.cli.options import seconds
from celery_idempotent.integration.inspection import Inspection, inspected
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.printable import one_line


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
