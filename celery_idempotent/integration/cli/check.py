"""The command that checks a deployment before it goes out."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from typing import Any

import click
from celery import Celery
from celery.concurrency import ALIASES

from celery_idempotent.errors import IdempotencyError, IdempotencyWarning
from celery_idempotent.integration.binding import is_builtin, is_enforced, is_idempotent, problems_of_delivery
from celery_idempotent.integration.cli import bodies
from celery_idempotent.integration.cli.base import AMOUNT, Invocation, advise, command, number
from celery_idempotent.integration.operating import worker
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import describe
from celery_idempotent.protocol.store import Store


@command(
    "check",
    click.option("--strict", is_flag=True, help="Fail where anything warns, too."),
    number("--timeout", 5.0, AMOUNT, "SECONDS", "How long to wait for the broker."),
)
def check(call: Invocation, strict: bool, timeout: float) -> None:
    """Check tasks, settings, store and broker: the gate of a deploy.

    It runs the checks that a worker runs at its start, for the pool that worker_pool names, and asks the broker. It
    leaves nothing behind, except an object of a few bytes where large results are kept. A store or broker that does not
    answer is an error here; a worker would start and wait. It reads the source of tasks, too, and warns of what makes a
    duplicate another operation. --strict turns warnings into errors.
    """
    app: Celery = call.context.obj.app
    errors: list[str] = []
    broker, store, advice, tasks = "", None, [], []  # what cannot even be named stays empty

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except IdempotencyError as error:
            errors.extend([] if str(error) in errors else [str(error)])

    with noting():
        app.loader.import_default_modules()
    if not errors:
        with noting():
            pool = app.conf.worker_pool
            advice = [str(each) for each in worker.check(app, str(ALIASES.get(pool, pool)).partition(":")[0])]
        broker, trouble = _broker(app, timeout)
        errors += [one_line(f"the broker {broker} cannot be used: {trouble}")] if trouble else []
        with noting():
            store = runtime_of(app).store
            for finding in _findings(app):
                warnings.warn(IdempotencyWarning(finding, "body"), stacklevel=2)
            tasks = [_facts(app, each) for _, each in sorted(app.tasks.items()) if not is_builtin(type(each))]
    of_tasks = [one_line(f"{task['name']}: {each}") for task in tasks for each in task["warnings"]]
    warned = [*dict.fromkeys([*call.warned, *of_tasks])]
    problems = [{"level": "error", "text": each} for each in errors]
    problems += [{"level": "warning", "text": each} for each in warned]
    told = {"store": "" if store is None else repr(store), "broker": broker, "tasks": tasks}
    lines = [] if errors else map(one_line, _lines(store, broker, tasks))
    call.answer({**told, "problems": problems, "advice": advice}, *lines)
    if not call.as_json:
        for hint in advice:
            advise(hint)
        for error_text in errors:
            click.echo(f"Error: {one_line(error_text)}", err=True)
    if errors or (strict and warned):
        call.context.exit(1)


def _lines(store: Store | None, broker: str, tasks: list[dict[str, Any]]) -> Iterator[str]:
    way = getattr(store, "way", "")  # of a store that has more than one
    yield f"{store!r} answers and can be used{f' {way}' if way else ''}"
    yield from getattr(store, "notes", ())
    yield f"{broker} answers"
    for task in tasks:
        promise = task["guarantee"] if task["policy"] is not None else f"{task['name']}: {task['guarantee']}"
        yield from f"{'protected' if task['protected'] else 'NOT protected'}: {promise}".splitlines()


def _facts(app: Celery, task: Any) -> dict[str, Any]:
    """Whether the task's duplicates are suppressed, its policy by option, what it promises, and what weakens that."""
    policy = task.idempotency_policy if is_idempotent(task) else None
    return {
        "name": task.name,
        "protected": is_enforced(task),
        "policy": policy and {each.name: getattr(policy, each.name) for each in fields(policy)},
        "guarantee": task.guarantee() if policy else "nothing is promised: it is not an IdempotentTask",
        "warnings": [str(each) for each in problems_of_delivery(type(task), app)] if policy else [],
    }


def _findings(app: Celery) -> list[str]:
    try:
        return bodies.findings(app)
    except Exception as error:  # noqa: BLE001 - objects of strangers stand among the globals that are looked at
        return [f"the bodies of tasks cannot be read: {error!r}"]


def _broker(app: Celery, timeout: float) -> tuple[str, str]:
    """The broker's name, and why it cannot be used, if it cannot."""
    # It is asked in a thread of its own: what bounds the wait for a connection differs by transport, and for some
    # nothing does. A thread that hangs ends with the process.
    told = [f"no answer within {timeout:g} s"]

    def ask() -> None:
        try:
            with closing(app.connection_for_write()) as connection:
                connection.connect()
            told.append("")
        except Exception as error:  # noqa: BLE001 - whatever the transport raises; it is told, by its type and its text
            told.append(f"{type(error).__name__}: {describe(error)}")

    asking = threading.Thread(target=ask, daemon=True)
    connection = app.connection_for_write()
    name = connection.as_uri()
    if not connection.password:
        name = name.replace("//:**@", "//", 1).replace(":**@", "@", 1)
    asking.start()
    asking.join(timeout)
    return one_line(name), told[-1]


@command("effects", click.option("--task", metavar="TASK", help="Only of this task."))
def effects(call: Invocation, task: str | None) -> None:
    """Show what observed tasks sent out in the last day, by task and line, without keys first.

    Workers note it where idempotency_watch_effects is set and a policy has mode="observe". What a task sends outside of
    a step, or without an idempotency key, a second attempt sends again.
    """
    from celery_idempotent.integration.operating.watching import noted  # who does not watch imports nothing

    seen = [each for each in noted(call.runtime.store) if task in (None, each.task)]
    if not (seen or call.runtime.watch):
        advise("workers note nothing before idempotency_watch_effects = True")
    call.answer([asdict(each) for each in seen], *map(one_line, seen))
