"""Commands that look records up, print them as people and programs read them, and judge one or many at once."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from typing import Any, TypeAlias

import click
from celery import Celery

from celery_idempotent.engine.claim import effect_key
from celery_idempotent.engine.search import FORGOTTEN, Filter, find, look_up, reads_all
from celery_idempotent.engine.verdicts import require
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration.binding import idempotent_tasks
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import Invocation, advise, command, number
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.operating import display, verdicts
from celery_idempotent.integration.operating.display import beginning, duration, iso, names_of_effects, status
from celery_idempotent.integration.operating.verdicts import Judged
from celery_idempotent.integration.task.task import IdempotentMixin
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.contents import pointer_in
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.steps import Begun, Finished
from celery_idempotent.protocol.store import Store
from celery_idempotent.protocol.verdicts import Action, counts_until, is_erased


def _age(text: str) -> int:
    """The milliseconds that an age such as ``2d`` is."""
    written = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])", text, re.IGNORECASE)
    if written is None:
        raise click.BadParameter(f"must be an age such as 30m, 1h or 2d (s, m, h, d, w), and is {text!r}")
    units = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
    return round(float(written[1]) * units[written[2].lower()])


_OF_TASK = click.option("--task", metavar="TASK", help="Only of this task.")

_FILTERS = (
    click.option(
        "--status",
        type=click.Choice([*map(str, Status), FORGOTTEN], case_sensitive=False),
        metavar="STATUS",
        help=f"Only in this status: {', '.join([*Status, FORGOTTEN])}; upper or lower case.",
    ),
    _OF_TASK,
    click.option("--label", metavar="LABEL", help="Only with this label; 'acme/*' stands for all that begin so."),
    click.option("--worker", metavar="NAME", help="Only those whose last attempt ran there."),
    click.option("--older-than", type=_age, metavar="AGE", help="Only those last written so long ago: 30m, 1h, 2d."),
)
"""The options that say which records are meant: what :class:`Filter` takes."""


_AS_JSON = {object: "'\"ch_1\"', with its quotes", list: "'[1, \"ord-1\"]'", dict: "'{\"order_id\": 1}'"}


def _json_value(option: str, text: str, wanted: type[object] = object) -> Any:
    """The value that an option's text is, as JSON."""
    try:
        value = verdicts.json_of(text)
    except ValueError as error:
        reason = f"{text!r} is not JSON: {error}; write it as {_AS_JSON[wanted]}"
        raise click.BadParameter(reason, param_hint=option) from error
    if not isinstance(value, wanted):
        raise click.BadParameter(f"{text!r} is not a JSON {wanted.__name__}", param_hint=option)
    return value


def _advise_on(wanted: Filter, app: Celery) -> None:
    """Where nothing was found, tell what may have been meant: another task, or all labels that begin so."""
    if wanted.label and wanted.whole_label:
        advise(f"a label counts as a whole; '{wanted.label.rstrip('/')}/*' stands for all that begin so")
    if wanted.task is not None and wanted.task not in app.tasks:
        advise(_no_such_task(wanted.task, app))


def _no_such_task(name: str, app: Celery) -> str:
    known = ", ".join(sorted(each.name for each in idempotent_tasks(app)))
    return f"this app has no task {name}; its idempotent tasks: {known or 'none'}"


@command(
    "key",
    click.argument("task"),
    click.option("--args", "arguments", default="[]", help="Positional arguments, as a JSON list."),
    click.option("--kwargs", "keywords", default="{}", help="Keyword arguments, as a JSON object."),
)
def key(call: Invocation, task: str, arguments: str, keywords: str) -> None:
    """Print the idempotency key that a call of TASK would have."""
    args, kwargs = _json_value("--args", arguments, list), _json_value("--kwargs", keywords, dict)
    tasks = call.app.tasks
    if task not in tasks:
        raise click.BadParameter(_no_such_task(task, call.app))
    if not isinstance(tasks[task], IdempotentMixin):
        raise click.BadParameter(f"{task} is not idempotent: its base is not IdempotentTask")
    try:
        derived = tasks[task].idempotency_key_for(*args, **kwargs)
    except TypeError as error:
        raise click.UsageError(f"{task} does not take these arguments: {error}") from error
    call.answer({"task": task, "key": derived}, derived)


@command("show", click.argument("key"), _OF_TASK)
def show(call: Invocation, key: str, task: str | None) -> None:
    """Print all that is recorded under KEY.

    KEY may also be the beginning of a key or of its hash, a task id, or a label. For these the whole store is read.
    Where it fits several, --task says which is meant.
    """
    runtime = call.runtime
    record = _look_up(runtime.store, key, task)
    now, policy = runtime.store.now(), runtime.policy_of(record)
    if call.as_json:
        call.answer(_facts(record, now, policy))
    else:
        print_record(record, now, policy, is_whole=True)


@command("effect-key", click.argument("key"), click.argument("name"), _OF_TASK)
def print_effect_key(call: Invocation, key: str, name: str, task: str | None) -> None:
    """Print the key by which the operation KEY calls a receiver.

    NAME is that of the step, or what the body gave to attempt.effect_key(). KEY is as for show; a whole key need not be
    recorded any more.
    """
    try:
        record = _look_up(call.runtime.store, key, task)
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


@command("list", *_FILTERS, number("--limit", 100, click.IntRange(1), "N", "At most that many records."))
def list_records(call: Invocation, limit: int, **filters: Any) -> None:
    """List the records that were written longest ago, oldest first.

    Reads the whole store unless that has an index for what is asked: mind the cost of a large table. A terminal shows a
    page at a time, and of each key what show, resolve, release and forget take for it.
    """
    wanted = Filter(**filters)
    store = call.runtime.store
    records = _reading(store, wanted, find(store, wanted, oldest=limit + 1 if limit < 1_000 else None))
    oldest = nsmallest(limit + 1, records, key=lambda record: record.updated_at)
    listed, now = oldest[:limit], call.runtime.store.now()
    if call.as_json:
        call.answer([_facts(each, now) for each in listed])
    else:
        print_records(listed, now)
    if len(oldest) > limit:
        click.echo(f"Warning: there are more than these {limit}; narrow the filters, or raise --limit", err=True)
    if not listed:
        _advise_on(wanted, call.app)


def _reading(store: Store, wanted: Filter, records: Iterable[Record]) -> Iterator[Record]:
    """``records``, while a terminal is told how many were found, and whether all there are must be read for them."""
    doing = "reading all records, as no index tells which are meant" if reads_all(store, wanted) else "reading"
    return screen.counted(f"{doing}; found", records)


def _look_up(store: Store, key: str, task: str | None) -> Record:
    return look_up(store, key, task=task, reading=partial(_reading, store, Filter(key=key, task=task)))


_HEADS = ("STATUS", "AGE", "UPDATED", "ATTEMPTS", "TASK", "LABEL", "KEY", "WORKER")


def print_records(records: Sequence[Record], now: int) -> None:
    """Print a table of records; a column for labels only where there is one."""
    # A terminal that is too narrow for whole keys is shown what names them, and no task where that is told by a key.
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
    columns = [Column(each, each in {"TASK", "LABEL", "WORKER"}, each == "ATTEMPTS") for each in heads]
    screen.table(columns, [[row[head] for head in heads] for row in rows])


def _facts(record: Record, now: int, policy: Policy | None = None) -> dict[str, Any]:
    """What programs are told of a record in a list; with its policy, all that is recorded. Only JSON is decoded."""
    verdict = dict(record.verdict)
    verdict |= {name: iso(verdict[name]) for name in ("at", "kept_until", "counts_until") if name in verdict}
    brief = {
        "status": status(record, now),
        **{name: getattr(record, name) for name in ("key", "label", "task", "task_id", "worker", "attempts")},
        "created_at": iso(record.created_at),
        "updated_at": iso(record.updated_at),
        "error": record.error,
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
    """The value of JSON, or where it is kept; of other formats, which can run code, how many bytes there are."""
    if data is None:
        return None
    pointer = pointer_in(Encoded(data, content_type or ""))
    if pointer:
        return {"object": pointer.name, "bytes": pointer.size, "sha256": pointer.sha256, "of": pointer.content_type}
    with suppress(ValueError, RecursionError):
        if content_type == "application/json":
            return json.loads(data)
    return {"bytes": len(data)}


def print_record(record: Record, now: int, policy: Policy, *, is_whole: bool = False) -> None:
    """Print what a person looks at before a verdict, or all of it; of the result only its size, or where it is."""
    facts = _facts(record, now)
    rows = [(name, value) for name, value in facts.items() if value and name != "verdict"]
    for name in names_of_effects(record, policy):
        known = "nothing recorded" if record.expires_at is None else "not known, as an outcome keeps no steps"
        if is_step := name in record.steps:
            known = display.step_state(record.steps[name], iso)
        rows += [("step" if is_step else "effect", f"{name}: {known}"), ("effect key", effect_key(record.key, name))]
    if record.verdict:
        rows.append(("verdict", display.verdict(record.verdict, iso)))
    whole = {**record.to_fields(), "expires_at": counts_until(record)} if is_whole else {}
    for name in [each for each in whole if each not in {*facts, "steps"} and whole[each] is not None]:
        value = whole[name]
        if name == "result":
            is_object = pointer_in(Encoded(value, record.content_type or ""))
            value = display.outcome(value, record.content_type) if is_object else f"{len(value)} bytes"
        rows.append((name, iso(value) if name in ("lease_until", "expires_at") else value))
    screen.lines(rows)


_OPTIONS = (
    click.argument("key", required=False),
    *_FILTERS,
    click.option("--dry-run", is_flag=True, help="Print what would be judged, and judge nothing."),
    click.option("--yes", is_flag=True, help="Confirm the action without prompting."),
    click.option("--by", default="", metavar="NAME", help="Who says so; default: the user of this process."),
    click.option("--reason", metavar="TEXT", help="Why; it is kept. Needed for many records at once."),
)


@command(
    "resolve",
    click.option(
        "--completed", "result", metavar="JSON", help="It happened; the result to replay, such as '\"ch_1\"'."
    ),
    click.option("--rerun", is_flag=True, help="It did not happen; the next delivery runs the task."),
    *_OPTIONS,
)
def resolve_unknown(call: Invocation, result: str | None, rerun: bool, **asked: Any) -> None:
    """Give your verdict on KEY, whose outcome is UNKNOWN.

    Or on all that the options ask for. KEY may also be the beginning of a key or of its hash, a task id, or a label.
    """
    if (result is None) == (not rerun):
        raise click.UsageError("give either --completed RESULT or --rerun")
    if result is None:
        _judge(call, Action.RERUN, **asked)
    else:
        _judge(call, Action.COMPLETED, _json_value("--completed", result), **asked)


@command("release", *_OPTIONS)
def release(call: Invocation, **asked: Any) -> None:
    """Give back KEY, whose attempt never ended.

    The next delivery runs the task. This works once the lease and its grace are over. Under on_takeover="refuse" you
    state by it that the effect did not happen; under "rerun" the next delivery would run anyway.
    """
    _judge(call, Action.RELEASE, **asked)


@command("forget", *_OPTIONS)
def forget(call: Invocation, **asked: Any) -> None:
    """Forget KEY on purpose: its result, error, label and steps.

    The next delivery of such a call is a new operation, and runs again. --label 'acme/*' erases all about a tenant;
    what is IN_PROGRESS or UNKNOWN is left, and named. Who has forgotten it and why stays until the store deletes it,
    which Redis does at once: keep the log event verdict_given.
    """
    _judge(call, Action.FORGET, **asked)


_RECEIVER = "Did you check with the receiver that the effect"

_QUESTIONS = {
    Action.COMPLETED: (f"{_RECEIVER} happened?", Status.UNKNOWN),
    Action.RERUN: (f"{_RECEIVER} did not happen, and will you publish the call again?", Status.UNKNOWN),
    Action.RELEASE: ("Did you check the receiver, and did the effect not happen?", Status.IN_PROGRESS),
    Action.FORGET: ("Shall it be forgotten? The next delivery runs again.", None),
}
"""What to ask before a verdict, and the status of those that are meant, where nothing else is asked for."""


_Fates: TypeAlias = dict[str, list[Judged]]
"""What became of the records that were meant, or would: ``judged``, ``refused``, ``unclear`` or ``left``."""


def _judge(
    call: Invocation,
    action: Action,
    result: Any = None,
    *,
    key: str | None,
    dry_run: bool,
    yes: bool,
    by: str,
    reason: str | None,
    **filters: Any,
) -> None:
    wanted, is_bulk = Filter(**filters), key is None
    if is_bulk and wanted == Filter():
        raise click.UsageError("give a KEY, or say which records by --status, --task, --label, --worker, --older-than")
    if not is_bulk and wanted != Filter(task=wanted.task):
        raise click.UsageError("give either a KEY or filters, not both; only --task says more of a KEY")
    if call.as_json and not (yes or dry_run):
        raise click.UsageError("--json asks no questions; give --yes or --dry-run, too")
    if is_bulk and not (reason or dry_run or screen.is_conversation()):
        raise click.UsageError("a verdict on many records needs a --reason")
    store, policy_of = call.runtime.store, call.runtime.policy_of
    question, status_of_many = _QUESTIONS[action]
    if key is not None:
        records = [_look_up(store, key, wanted.task)]
    else:
        meant = replace(wanted, status=wanted.status or status_of_many)
        records = [each for each in _reading(store, meant, find(store, meant)) if not is_erased(each)]
        records.sort(key=lambda record: record.updated_at)
    now = store.now()
    fates: _Fates = {"judged": [], "refused": [], "unclear": [], "left": []}
    for seen in records if dry_run or not is_bulk else ():
        try:
            require(action, seen, grace=call.runtime.grace, now=now)
            fates["judged"].append(Judged(seen))
        except PolicyError as error:
            if not dry_run:
                raise
            fates["refused"].append(Judged(seen, verdicts.refusal(error)))
    if not dry_run:
        if not records:
            _advise_on(wanted, call.app)
        elif not yes and is_bulk:
            print_records(records, now)
        elif not yes:
            print_record(records[0], now, policy_of(records[0]))
        if records and reason is None and screen.is_conversation() and (is_bulk or not yes):
            reason = click.prompt("Reason", default=None if is_bulk else "", show_default=False)
        if records and not yes:
            click.confirm(f"{question} (of all {len(records)})" if is_bulk else question, abort=True)
        fates["judged"].clear()
        _give(fates, records, action, result=result, by=by, reason=reason or "", app=call.app)
        now = store.now()
    if call.as_json:
        judged = [{"key": each.record.key, "status": status(each.record, now)} for each in fates["judged"]]
        reasons = {
            fate: [{"key": each.record.key, "reason": each.refusal} for each in fates[fate]]
            for fate in ("refused", "unclear")
        }
        left = [each.record.key for each in fates["left"]]
        call.answer({"dry_run": dry_run, "judged": judged, **reasons, "left": left})
    elif fates["judged"] and not (is_bulk or dry_run):
        only = fates["judged"][0].record
        _echo(f"{only.key} is {status(only, now)}")
    else:
        _print(fates, dry_run, now)
    if not dry_run and (fates["refused"] or fates["unclear"] or fates["left"]):
        call.context.exit(1)


def _give(fates: _Fates, records: Sequence[Record], action: Action, **proof: Any) -> None:
    """Give the verdict on each, as it was seen; end where it is not known what became of one."""
    try:
        judged = verdicts.judge_each(action, records, **proof)
        for each in screen.counted("judging", judged, total=len(records)):
            fates["refused" if each.refusal else "judged"].append(each)
    except (StoreUnavailable, KeyboardInterrupt) as error:  # the latter may strike between two
        done = len(fates["judged"]) + len(fates["refused"])
        fates["unclear"] = [Judged(each, str(error) or "interrupted") for each in records[done : done + 1]]
        fates["left"] = [Judged(each) for each in records[done + 1 :]]


def _print(fates: _Fates, dry_run: bool, now: int) -> None:
    if dry_run and fates["judged"]:
        print_records([each.record for each in fates["judged"]], now)
    would = ("would judge", "would refuse") if dry_run else ("judged", "refused")
    _echo(f"{would[0]} {len(fates['judged'])}, {would[1]} {len(fates['refused'])}")
    by_reason: dict[str, list[Judged]] = {}
    for each in fates["refused"]:
        by_reason.setdefault(re.sub("[0-9]+", "0", each.refusal), []).append(each)
    for alike in by_reason.values():
        _echo(f"  {len(alike)}: {alike[0].refusal}")
        for seen in (each.record for each in alike):
            _echo(f"    {seen.status}  {seen.key}{f'  {seen.label}' if seen.label else ''}")
    for each in fates["unclear"]:
        _echo(f"unclear what became of {each.record.key}: {each.refusal}; look at it before you repeat", err=True)
    if fates["left"]:
        _echo(f"{len(fates['left'])} after it were not judged; give the same command again", err=True)


def _echo(text: str, *, err: bool = False) -> None:
    click.echo(one_line(text), err=err)
