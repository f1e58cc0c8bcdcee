"""Commands that look records up, and records as people read them, and as programs do."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import Any

import click

from celery_idempotent.engine.claim import effect_key
from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import (
    advise,
    advise_on,
    app_of,
    as_json,
    echo_json,
    filters,
    idempotency,
    json_value,
    limit,
    of_task,
)
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.operating import display
from celery_idempotent.integration.operating.display import beginning, duration, iso, names_of_effects, status
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.integration.task.task import IdempotentMixin
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import pointer_in
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Begun, Finished
from celery_idempotent.protocol.verdicts import counts_until


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
    try:
        derived = app.tasks[task].idempotency_key_for(*args, **kwargs)
    except TypeError as error:
        raise click.UsageError(f"{task} does not take these arguments: {error}") from error
    echo_json({"task": task, "key": derived}) if as_json else click.echo(derived)


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
    record = looked_up(runtime.store, key, task=task)
    now, policy = runtime.store.now(), runtime.policy_of(record)
    echo_json(_whole(record, now, policy)) if as_json else screen.lines(_everything(record, now, policy))


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
    try:
        record = looked_up(runtime.store, key, task=task)
    except PolicyError:
        if re.fullmatch(".+:[0-9a-f]{64}", key, re.DOTALL) is None:  # what every derived key looks like
            raise
    else:
        key = record.key
        known = names_of_effects(record, runtime.policy_of(record))
        if known and name not in known:
            advise(f"nothing is known of an effect called {name}; known are: {', '.join(known)}")
    made = effect_key(key, name)
    echo_json({"key": key, "name": name, "effect_key": made}) if as_json else click.echo(made)


@idempotency.command(name="list")
@filters
@limit("records")
@as_json
@click.pass_context
def list_records(context: click.Context, wanted: Filter, limit: int, as_json: bool) -> None:
    """List the records that were written longest ago, oldest first.

    Reads the whole store unless that has an index for what is asked: mind the cost of a large table. A terminal shows a
    page at a time, and of each key what show, resolve, release and forget take for it.
    """
    app = app_of(context)
    runtime = runtime_of(app)
    records = screen.counted("reading", found(runtime.store, wanted))
    oldest = nsmallest(limit + 1, records, key=lambda record: record.updated_at)
    listed, now = oldest[:limit], runtime.store.now()
    echo_json([_brief(each, now) for each in listed]) if as_json else print_records(listed, now)
    if len(oldest) > limit:
        click.echo(f"Warning: there are more than these {limit}; ask for fewer, or give --limit", err=True)
    if not listed:
        advise_on(wanted, app)


_CELLS: Mapping[str, Callable[[Record, int], object]] = {
    "STATUS": status,
    "AGE": lambda record, now: duration(now - record.updated_at),
    "UPDATED": lambda record, now: iso(record.updated_at, "seconds"),
    "ATTEMPTS": lambda record, now: record.attempts,
    "TASK": lambda record, now: record.task,
    "LABEL": lambda record, now: record.label,
    "KEY": lambda record, now: record.key,
    "WORKER": lambda record, now: record.worker,
}
"""By the head of a column, what stands in it."""


def print_records(records: Sequence[Record], now: int) -> None:
    """Print a table of records; a column for labels only where there is one.

    A terminal that is too narrow for whole keys is shown what names them, and no task where that is told by a key.
    """
    width = screen.width()
    left_out = {"AGE"} if width is None or width >= screen.NARROW else {"UPDATED", "ATTEMPTS", "WORKER"}
    left_out |= set() if any(each.label for each in records) else {"LABEL"}
    heads = [each for each in _CELLS if each not in left_out]
    rows = [{head: _CELLS[head](each, now) for head in heads} for each in records]
    longest = [max([len(head), *(len(one_line(row[head])) for row in rows)]) for head in heads]
    if width is not None and sum(longest) + 2 * len(longest) > width:
        if all(f"{each.task}:" in each.key for each in records):
            heads.remove("TASK")
        rows = [{**row, "KEY": beginning(each.key)} for each, row in zip(records, rows, strict=True)]
    cut, numbers = ("TASK", "LABEL", "WORKER"), () if width is None else ("ATTEMPTS",)
    columns = [Column(each, each in cut, each in numbers) for each in heads]
    screen.table(columns, [[row[head] for head in heads] for row in rows])


def _brief(record: Record, now: int) -> dict[str, Any]:
    """What a list tells programs of a record."""
    verdict = dict(record.verdict)
    times = {name: iso(verdict[name]) for name in ("at", "kept_until", "counts_until") if name in verdict}
    names = ("key", "label", "task", "task_id", "worker", "attempts", "error")
    return {
        **{name: getattr(record, name) for name in names},
        "status": status(record, now),
        "created_at": iso(record.created_at),
        "updated_at": iso(record.updated_at),
        "verdict": {**verdict, **times} if verdict else None,
    }


def _whole(record: Record, now: int, policy: Policy) -> dict[str, Any]:
    """All that is recorded, with the effect keys of its steps. Only JSON is decoded."""
    until = counts_until(record)
    steps = {name: _step(plain) for name, plain in record.steps.items()}
    return {
        **record.to_fields(),
        **_brief(record, now),
        "lease_until": iso(record.lease_until),
        "expires_at": None if until is None else iso(until),
        "content_type": record.content_type,
        "result": _decoded(record.result, record.content_type),
        "steps": {name: {**step, "effect_key": effect_key(record.key, name)} for name, step in steps.items()},
        "effect_keys": {name: effect_key(record.key, name) for name in names_of_effects(record, policy)},
    }


def _step(plain: Any) -> dict[str, Any]:
    match display.step_of(plain):
        case Begun(at, attempt):
            return {"state": "begun", "begun_at": iso(at), "attempt": attempt}
        case Finished(Encoded(data, content_type)):
            return {"state": "finished", "content_type": content_type, "result": _decoded(data, content_type)}
        case Finished(None, lost):
            return {"state": "finished", "lost": lost}
        case _:
            return {"state": "damaged"}


def _decoded(data: str | bytes | None, content_type: str | None) -> Any:
    """The value of JSON; of other formats, which can run code when they are read, how many bytes there are.

    Of a result that is an object, where that is.
    """
    if data is None:
        return None
    pointer = pointer_in(Encoded(data, content_type or ""))
    if pointer:
        return {"object": pointer.name, "bytes": pointer.size, "sha256": pointer.sha256, "of": pointer.content_type}
    if content_type == "application/json":
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            pass
    return {"bytes": len(data)}


def summary(record: Record, now: int, policy: Policy) -> Iterator[tuple[str, object]]:
    """What a person looks at before a verdict: what it is, and what to ask the receiver for."""
    yield "status", status(record, now)
    yield "key", record.key
    for name in ("label", "task", "task_id", "worker", "attempts"):
        if value := getattr(record, name):
            yield name, value
    yield "created_at", iso(record.created_at)
    yield "updated_at", iso(record.updated_at)
    if record.error:
        yield "error", record.error
    for name in names_of_effects(record, policy):
        known = "nothing recorded" if record.expires_at is None else "not known, as an outcome keeps no steps"
        if is_step := name in record.steps:
            known = display.step_state(record.steps[name], iso)
        yield "step" if is_step else "effect", f"{name}: {known}"
        yield "effect key", effect_key(record.key, name)
    if record.verdict:
        yield "verdict", display.verdict(record.verdict, iso)


_IN_SUMMARY = {
    *("status", "key", "label", "task", "task_id", "worker", "attempts"),
    *("created_at", "updated_at", "error", "steps", "verdict"),
}


def _everything(record: Record, now: int, policy: Policy) -> Iterator[tuple[str, object]]:
    """All that is recorded; of the result only its size, or where it is."""
    yield from summary(record, now, policy)
    for name, value in {**record.to_fields(), "expires_at": counts_until(record)}.items():
        if name in _IN_SUMMARY or value is None:
            continue
        if name == "result":
            is_object = pointer_in(Encoded(value, record.content_type or ""))
            yield name, display.outcome(value, record.content_type) if is_object else f"{len(value)} bytes"
        else:
            yield name, iso(value) if name in ("lease_until", "expires_at") else value
