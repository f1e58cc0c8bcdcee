"""The command that checks a deployment before it goes out."""

from dataclasses import asdict
from typing import Any

import click
from celery.concurrency import ALIASES

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.integration.cli.base import advise, as_json, echo_json, idempotency, told_in
from celery_idempotent.integration.cli.options import Amount
from celery_idempotent.integration.inspection import Inspection, TaskFound, inspected
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.objects import LargeResults


@idempotency.command()
@click.option("--strict", is_flag=True, help="Fail where anything warns, too.")
@click.option(
    "--timeout",
    default=5.0,
    show_default=True,
    type=Amount("seconds"),
    metavar="SECONDS",
    help="How long to wait for the broker.",
)
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
    errors: tuple[str, ...] = ()
    found = Inspection("", "", (), (), ())
    try:
        app.loader.import_default_modules()
    except IdempotencyError as error:
        errors = (str(error),)
    else:
        found = inspected(app, str(ALIASES.get(pool, pool)).partition(":")[0], timeout=timeout)
        errors = found.errors
    warned = _warned(context, found)
    if as_json:
        echo_json(_plain(found, errors, warned))
    elif not errors:
        _print(found, getattr(runtime_of(app).store, "way", ""), runtime_of(app).large_results)
    if not as_json:
        for hint in found.advice:
            advise(str(hint))
        for each in errors:
            click.echo(f"Error: {one_line(each)}", err=True)
    if errors or (strict and warned):
        context.exit(1)


def _warned(context: click.Context, found: Inspection) -> list[str]:
    """All warnings, those included that Python has shown before this command began."""
    of_tasks = [f"{task.name}: {each}" for task in found.tasks for each in task.warnings]
    return [*dict.fromkeys([*told_in(context), *map(one_line, of_tasks)])]


def _plain(found: Inspection, errors: tuple[str, ...], warned: list[str]) -> dict[str, Any]:
    levels = (("error", errors), ("warning", warned))
    return {
        "store": found.store,
        "broker": found.broker,
        "tasks": [asdict(each) for each in found.tasks],
        "problems": [{"level": level, "text": text} for level, texts in levels for text in texts],
        "advice": [str(each) for each in found.advice],
    }


def _print(found: Inspection, way: str, large: LargeResults | None) -> None:
    """``way``: of a store that has more than one."""
    click.echo(f"{found.store} answers and can be used{f' {way}' if way else ''}")
    if large is not None:
        click.echo(one_line(f"{large.objects!r} takes results of more than {large.over} bytes"))
    click.echo(f"{found.broker} answers")
    for task in found.tasks:
        first, *rest = _guarantee(task).splitlines()
        click.echo(f"{'protected' if task.protected else 'NOT protected'}: {one_line(first)}")
        for line in rest:
            click.echo(one_line(line))


def _guarantee(task: TaskFound) -> str:
    return task.guarantee if task.policy is not None else f"{task.name}: {task.guarantee}"
