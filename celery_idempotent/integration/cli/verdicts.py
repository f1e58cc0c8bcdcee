"""Commands by which a person judges an operation, or many at once."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any

import click

from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.engine.verdicts import require
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration import verdicts
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency, json_value, readable_errors
from celery_idempotent.integration.cli.options import advise_on, filters
from celery_idempotent.integration.cli.records import print_records
from celery_idempotent.integration.cli.views import summary
from celery_idempotent.integration.display import status
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import Action, is_erased


@dataclass(frozen=True, slots=True)
class _Order:
    """What the command line says: on which records, by whom, why, and how."""

    key: str | None
    wanted: Filter
    dry_run: bool
    yes: bool
    by: str
    reason: str | None
    as_json: bool

    @property
    def is_bulk(self) -> bool:
        return self.key is None


@dataclass(slots=True)
class _Tally:
    """What became of the records that were meant."""

    judged: list[Record] = field(default_factory=list)
    refused: list[tuple[Record, str]] = field(default_factory=list)
    unclear: list[tuple[Record, str]] = field(default_factory=list)
    left: list[Record] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not (self.refused or self.unclear or self.left)


def _judging(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a key, the filters, and the options of a verdict, as one argument: ``order``."""

    @wraps(command)
    def gathered(*args: Any, **kwargs: Any) -> None:
        order = _Order(**{each.name: kwargs.pop(each.name) for each in fields(_Order)})
        command(*args, order=_checked(order), **kwargs)

    for decorate in reversed(
        (
            click.argument("key", required=False),
            filters,
            click.option("--dry-run", is_flag=True, help="Print what would be judged, and judge nothing."),
            click.option("--yes", is_flag=True, help="Confirm the action without prompting."),
            click.option("--by", default="", metavar="NAME", help="Who says so; default: the user of this process."),
            click.option("--reason", metavar="TEXT", help="Why; it is kept. Needed for many records at once."),
            as_json,
        )
    ):
        gathered = decorate(gathered)
    return gathered


def _checked(order: _Order) -> _Order:
    """Refuse what cannot be meant, before anything is looked up or asked."""
    if order.is_bulk and order.wanted == Filter():
        raise click.UsageError("give a KEY, or say which records by --status, --task, --label, --worker, --older-than")
    if not order.is_bulk and order.wanted != Filter(task=order.wanted.task):
        raise click.UsageError("give either a KEY or filters, not both; only --task says more of a KEY")
    if order.as_json and not (order.yes or order.dry_run):
        raise click.UsageError("--json asks no questions; give --yes or --dry-run, too")
    if order.is_bulk and not (order.reason or order.dry_run or screen.is_conversation()):
        raise click.UsageError("a verdict on many records needs a --reason")
    return order


@idempotency.command("resolve")
@click.option("--completed", "result", metavar="JSON", help="It happened; the result to replay, such as '\"ch_1\"'.")
@click.option("--rerun", is_flag=True, help="It did not happen; the next delivery runs the task.")
@_judging
@click.pass_context
def resolve_unknown(context: click.Context, order: _Order, result: str | None, rerun: bool) -> None:
    """Give your verdict on KEY, whose outcome is UNKNOWN.

    Or on all that the options ask for. KEY may also be the beginning of a key or of its hash, a task id, or a label.
    """
    if (result is None) == (not rerun):
        raise click.UsageError("give either --completed RESULT or --rerun")
    if result is None:
        _judge(context, order, Action.RERUN)
    else:
        _judge(context, order, Action.COMPLETED, json_value("--completed", result))


@idempotency.command()
@_judging
@click.pass_context
def release(context: click.Context, order: _Order) -> None:
    """Give back KEY, whose attempt never ended.

    The next delivery runs the task. This works once the lease and its grace are over. Under on_takeover="refuse" you
    state by it that the effect did not happen; under "rerun" the next delivery would run anyway.
    """
    _judge(context, order, Action.RELEASE)


@idempotency.command()
@_judging
@click.pass_context
def forget(context: click.Context, order: _Order) -> None:
    """Forget KEY on purpose: its result, error, label and steps.

    The next delivery of such a call is a new operation, and runs again. --label 'acme/*' erases all about a tenant;
    what is IN_PROGRESS or UNKNOWN is left, and named. Who has forgotten it and why stays until the store deletes it,
    which Redis does at once: keep the log event verdict_given.
    """
    _judge(context, order, Action.FORGET)


_RECEIVER = "Did you check with the receiver that the effect"

_QUESTIONS = {
    Action.COMPLETED: (f"{_RECEIVER} happened?", Status.UNKNOWN),
    Action.RERUN: (f"{_RECEIVER} did not happen, and will you publish the call again?", Status.UNKNOWN),
    Action.RELEASE: ("Did you check the receiver, and did the effect not happen?", Status.IN_PROGRESS),
    Action.FORGET: ("Shall it be forgotten? The next delivery runs again.", None),
}
"""What to ask before a verdict, and the status of those that are meant, where nothing else is asked for."""


def _judge(context: click.Context, order: _Order, action: Action, result: Any = None) -> None:
    app = app_of(context)
    runtime = runtime_of(app)
    question, status_of_many = _QUESTIONS[action]
    tally = _Tally()
    with readable_errors():
        records = _meant(order, status_of_many, runtime)
        now = runtime.store.now()
        for seen in records if order.dry_run or not order.is_bulk else ():
            try:
                require(action, seen, grace=runtime.policy_of(seen).grace_ms, now=now)
                tally.judged.append(seen)
            except PolicyError as error:
                if not order.dry_run:
                    raise
                tally.refused.append((seen, verdicts.refusal(error)))
    if order.dry_run:
        _tell(order, tally, now)
        return
    if not records:
        advise_on(order.wanted, app)
    elif not order.yes:
        _show(order, runtime, records, now)
    reason = order.reason if order.reason is not None or not records else _asked_reason(order)
    if records and not order.yes:
        click.confirm(f"{question} (of all {len(records)})" if order.is_bulk else question, abort=True)
    with readable_errors():
        tally = _given(records, action, result=result, by=order.by, reason=reason or "", app=app)
    _tell(order, tally, runtime.store.now())
    if not tally.is_whole:
        context.exit(1)


def _meant(order: _Order, status_of_many: Status | None, runtime: Runtime) -> list[Record]:
    if order.key is not None:
        return [looked_up(runtime.store, order.key, runtime.cipher, task=order.wanted.task)]
    wanted = replace(order.wanted, status=order.wanted.status or status_of_many)
    records = screen.counted("reading", found(runtime.store, wanted, runtime.cipher))
    return sorted((each for each in records if not is_erased(each)), key=lambda record: record.updated_at)


def _show(order: _Order, runtime: Runtime, records: Sequence[Record], now: int) -> None:
    if order.is_bulk:
        print_records(records, now)
    else:
        screen.lines(summary(records[0], now, runtime.policy_of(records[0])))


def _asked_reason(order: _Order) -> str:
    if not screen.is_conversation() or (order.yes and not order.is_bulk):
        return ""
    return str(click.prompt("Reason", default=None if order.is_bulk else "", show_default=False))


def _given(records: Sequence[Record], action: Action, **proof: Any) -> _Tally:
    """Give the verdict on each, as it was seen; end where it is not known what became of one."""
    tally = _Tally()
    try:
        judged = verdicts.judge_each(action, records, **proof)
        for seen, each in zip(records, screen.counted("judging", judged, total=len(records)), strict=True):
            if each.refusal:
                tally.refused.append((seen, each.refusal))
            else:
                tally.judged.append(each.record)
    except (StoreUnavailable, KeyboardInterrupt) as error:  # the latter may strike between two, where they are counted
        done = len(tally.judged) + len(tally.refused)
        tally.unclear.extend((each, str(error) or "interrupted") for each in records[done : done + 1])
        tally.left.extend(records[done + 1 :])
    return tally


def _tell(order: _Order, tally: _Tally, now: int) -> None:
    if order.as_json:
        echo_json(
            {
                "dry_run": order.dry_run,
                "judged": [{"key": each.key, "status": status(each, now)} for each in tally.judged],
                "refused": [{"key": each.key, "reason": reason} for each, reason in tally.refused],
                "unclear": [{"key": each.key, "reason": reason} for each, reason in tally.unclear],
                "left": [each.key for each in tally.left],
            }
        )
        return
    if not (order.is_bulk or order.dry_run) and tally.judged:
        (judged,) = tally.judged
        _echo(f"{judged.key} is {status(judged, now)}")
        return
    if order.dry_run and tally.judged:
        print_records(tally.judged, now)
    would = ("would judge", "would refuse") if order.dry_run else ("judged", "refused")
    _echo(f"{would[0]} {len(tally.judged)}, {would[1]} {len(tally.refused)}")
    by_reason: dict[str, list[tuple[Record, str]]] = {}
    for seen, reason in tally.refused:
        by_reason.setdefault(re.sub("[0-9]+", "0", reason), []).append((seen, reason))
    for alike in by_reason.values():
        _echo(f"  {len(alike)}: {alike[0][1]}")
        for seen, _ in alike:
            _echo(f"    {seen.status}  {seen.key}{f'  {seen.label}' if seen.label else ''}")
    for each, reason in tally.unclear:
        _echo(f"unclear what became of {each.key}: {reason}; look at it before you repeat", err=True)
    if tally.left:
        _echo(f"{len(tally.left)} after it were not judged; give the same command again", err=True)


def _echo(text: str, *, err: bool = False) -> None:
    click.echo(one_line(text), err=err)
