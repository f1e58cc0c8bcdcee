"""Commands that look records up, and records as people read them, and as programs do."""

import json
import re
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

import click

from celery_idempotent.engine.claim import effect_key
from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import (
    FILTERS,
    Invocation,
    advise,
    advise_on,
    command,
    json_value,
    number,
    of_task,
)
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.operating import display
from celery_idempotent.integration.operating.display import beginning, duration, iso, names_of_effects, status
from celery_idempotent.integration.task.task import IdempotentMixin
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import pointer_in
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Begun, Finished
from celery_idempotent.protocol.verdicts import counts_until


@command(
    "key",
    click.argument("task"),
    click.option("--args", "arguments", default="[]", help="Positional arguments, as a JSON list."),
    click.option("--kwargs", "keywords", default="{}", help="Keyword arguments, as a JSON object."),
)
def key(call: Invocation, task: str, arguments: str, keywords: str) -> None:
    """Print the idempotency key that a call of TASK would have."""
    args, kwargs = json_value("--args", arguments, list), json_value("--kwargs", keywords, dict)
    tasks = call.app.tasks
    if task not in tasks:
        raise click.BadParameter(f"this app has no task {task}; it has: {', '.join(sorted(tasks))}")
    if not isinstance(tasks[task], IdempotentMixin):
        raise click.BadParameter(f"{task} is not idempotent: its base is not IdempotentTask")
    try:
        derived = tasks[task].idempotency_key_for(*args, **kwargs)
    except TypeError as error:
        raise click.UsageError(f"{task} does not take these arguments: {error}") from error
    call.answer({"task": task, "key": derived}, derived)


@command("show", click.argument("key"), of_task)
def show(call: Invocation, key: str, task: str | None) -> None:
    """Print all that is recorded under KEY.

    KEY may also be the beginning of a key or of its hash, a task id, or a label. For these the whole store is read.
    Where it fits several, --task says which is meant.
    """
    runtime = call.runtime
    record = looked_up(runtime.store, key, task=task)
    now, policy = runtime.store.now(), runtime.policy_of(record)
    if call.as_json:
        call.answer(_facts(record, now, policy))
    else:
        print_record(record, now, policy, is_whole=True)


@command("effect-key", click.argument("key"), click.argument("name"), of_task)
def print_effect_key(call: Invocation, key: str, name: str, task: str | None) -> None:
    """Print the key by which the operation KEY calls a receiver.

    NAME is that of the step, or what the body gave to attempt.effect_key(). KEY is as for show; a whole key need not be
    recorded any more.
    """
    try:
        record = looked_up(call.runtime.store, key, task=task)
    except PolicyError:
        if re.fullmatch(".+:[0-9a-f]{64}", key, re.DOTALL) is None:  # what every derived key looks like
            raise
    else:
        key = record.key
        known = names_of_effects(record, call.runtime.policy_of(record))
        if known and name not in known:
            advise(f"nothing is known of an effect called {name}; known are: {', '.join(known)}")
    made = effect_key(key, name)
    call.answer({"key": key, "name": name, "effect_key": made}, made)


@command("list", *FILTERS, number("--limit", 100, click.IntRange(1), "N", "At most that many records."))
def list_records(call: Invocation, limit: int, **filters: Any) -> None:
    """List the records that were written longest ago, oldest first.

    Reads the whole store unless that has an index for what is asked: mind the cost of a large table. A terminal shows a
    page at a time, and of each key what show, resolve, release and forget take for it.
    """
    wanted = Filter(**filters)
    records = screen.counted("reading", found(call.runtime.store, wanted))
    oldest = nsmallest(limit + 1, records, key=lambda record: record.updated_at)
    listed, now = oldest[:limit], call.runtime.store.now()
    if call.as_json:
        call.answer([_facts(each, now) for each in listed])
    else:
        print_records(listed, now)
    if len(oldest) > limit:
        click.echo(f"Warning: there are more than these {limit}; ask for fewer, or give --limit", err=True)
    if not listed:
        advise_on(wanted, call.app)


_HEADS = ("STATUS", "AGE", "UPDATED", "ATTEMPTS", "TASK", "LABEL", "KEY", "WORKER")


def print_records(records: Sequence[Record], now: int) -> None:
    """Print a table of records; a column for labels only where there is one.

    A terminal that is too narrow for whole keys is shown what names them, and no task where that is told by a key.
    """
    width = screen.width()
    left_out = {"AGE"} if width is None or width >= screen.NARROW else {"UPDATED", "ATTEMPTS", "WORKER"}
    left_out |= set() if any(each.label for each in records) else {"LABEL"}
    heads = [each for each in _HEADS if each not in left_out]
    rows: list[dict[str, object]] = []
    for each in records:
        age, updated = duration(now - each.updated_at), iso(each.updated_at, "seconds")
        cells = (status(each, now), age, updated, each.attempts, each.task, each.label, each.key, each.worker)
        rows.append(dict(zip(_HEADS, cells, strict=True)))
    longest = [max([len(head), *(len(one_line(row[head])) for row in rows)]) for head in heads]
    if width is not None and sum(longest) + 2 * len(longest) > width:
        if all(f"{each.task}:" in each.key for each in records):
            heads.remove("TASK")
        rows = [{**row, "KEY": beginning(each.key)} for each, row in zip(records, rows, strict=True)]
    cut, numbers = ("TASK", "LABEL", "WORKER"), () if width is None else ("ATTEMPTS",)
    columns = [Column(each, each in cut, each in numbers) for each in heads]
    screen.table(columns, [[row[head] for head in heads] for row in rows])


def _facts(record: Record, now: int, policy: Policy | None = None) -> dict[str, Any]:
    """What programs are told of a record in a list; with its policy, all that is recorded. Only JSON is decoded."""
    verdict = dict(record.verdict)
    verdict |= {name: iso(verdict[name]) for name in ("at", "kept_until", "counts_until") if name in verdict}
    names = ("key", "label", "task", "task_id", "worker", "attempts", "error")
    brief = {
        **{name: getattr(record, name) for name in names},
        "status": status(record, now),
        "created_at": iso(record.created_at),
        "updated_at": iso(record.updated_at),
        "verdict": verdict or None,
    }
    if policy is None:
        return brief
    until = counts_until(record)
    steps = {name: {**_step(plain), "effect_key": effect_key(record.key, name)} for name, plain in record.steps.items()}
    return {
        **record.to_fields(),
        **brief,
        "lease_until": iso(record.lease_until),
        "expires_at": None if until is None else iso(until),
        "content_type": record.content_type,
        "result": _decoded(record.result, record.content_type),
        "steps": steps,
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


_SHOWN = ("status", "key", "label", "task", "task_id", "worker", "attempts", "created_at", "updated_at", "error")


def print_record(record: Record, now: int, policy: Policy, *, is_whole: bool = False) -> None:
    """Print what a person looks at before a verdict: what it is, and what to ask the receiver for; or all of it.

    Of the result only its size, or where it is.
    """
    facts = _facts(record, now)
    rows = [(name, facts[name]) for name in _SHOWN if facts[name]]
    for name in names_of_effects(record, policy):
        known = "nothing recorded" if record.expires_at is None else "not known, as an outcome keeps no steps"
        if is_step := name in record.steps:
            known = display.step_state(record.steps[name], iso)
        rows += [("step" if is_step else "effect", f"{name}: {known}"), ("effect key", effect_key(record.key, name))]
    if record.verdict:
        rows.append(("verdict", display.verdict(record.verdict, iso)))
    for name, value in {**record.to_fields(), "expires_at": counts_until(record)}.items() if is_whole else ():
        if name in (*_SHOWN, "steps", "verdict") or value is None:
            continue
        if name == "result":
            is_object = pointer_in(Encoded(value, record.content_type or ""))
            value = display.outcome(value, record.content_type) if is_object else f"{len(value)} bytes"
        rows.append((name, iso(value) if name in ("lease_until", "expires_at") else value))
    screen.lines(rows)
