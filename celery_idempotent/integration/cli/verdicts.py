"""Commands by which a person judges an operation, or many at once."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click

from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.engine.verdicts import require
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import (
    advise_on,
    app_of,
    as_json,
    echo_json,
    filters,
    idempotency,
    json_value,
)
from celery_idempotent.integration.cli.records import print_records, summary
from celery_idempotent.integration.operating import verdicts
from celery_idempotent.integration.operating.display import status
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import Action, is_erased

_OPTIONS = (
    click.argument("key", required=False),
    filters,
    click.option("--dry-run", is_flag=True, help="Print what would be judged, and judge nothing."),
    click.option("--yes", is_flag=True, help="Confirm the action without prompting."),
    click.option("--by", default="", metavar="NAME", help="Who says so; default: the user of this process."),
    click.option("--reason", metavar="TEXT", help="Why; it is kept. Needed for many records at once."),
    as_json,
    click.pass_context,
)


def _judging(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a key, the filters, and the options of a verdict."""
    for decorate in reversed(_OPTIONS):
        command = decorate(command)
    return command


@idempotency.command("resolve")
@click.option("--completed", "result", metavar="JSON", help="It happened; the result to replay, such as '\"ch_1\"'.")
@click.option("--rerun", is_flag=True, help="It did not happen; the next delivery runs the task.")
@_judging
def resolve_unknown(context: click.Context, result: str | None, rerun: bool, **asked: Any) -> None:
    """Give your verdict on KEY, whose outcome is UNKNOWN.

    Or on all that the options ask for. KEY may also be the beginning of a key or of its hash, a task id, or a label.
    """
    if (result is None) == (not rerun):
        raise click.UsageError("give either --completed RESULT or --rerun")
    if result is None:
        _judge(context, Action.RERUN, **asked)
    else:
        _judge(context, Action.COMPLETED, json_value("--completed", result), **asked)


@idempotency.command()
@_judging
def release(context: click.Context, **asked: Any) -> None:
    """Give back KEY, whose attempt never ended.

    The next delivery runs the task. This works once the lease and its grace are over. Under on_takeover="refuse" you
    state by it that the effect did not happen; under "rerun" the next delivery would run anyway.
    """
    _judge(context, Action.RELEASE, **asked)


@idempotency.command()
@_judging
def forget(context: click.Context, **asked: Any) -> None:
    """Forget KEY on purpose: its result, error, label and steps.

    The next delivery of such a call is a new operation, and runs again. --label 'acme/*' erases all about a tenant;
    what is IN_PROGRESS or UNKNOWN is left, and named. Who has forgotten it and why stays until the store deletes it,
    which Redis does at once: keep the log event verdict_given.
    """
    _judge(context, Action.FORGET, **asked)


_RECEIVER = "Did you check with the receiver that the effect"

_QUESTIONS = {
    Action.COMPLETED: (f"{_RECEIVER} happened?", Status.UNKNOWN),
    Action.RERUN: (f"{_RECEIVER} did not happen, and will you publish the call again?", Status.UNKNOWN),
    Action.RELEASE: ("Did you check the receiver, and did the effect not happen?", Status.IN_PROGRESS),
    Action.FORGET: ("Shall it be forgotten? The next delivery runs again.", None),
}
"""What to ask before a verdict, and the status of those that are meant, where nothing else is asked for."""


def _judge(
    context: click.Context,
    action: Action,
    result: Any = None,
    *,
    key: str | None,
    wanted: Filter,
    dry_run: bool,
    yes: bool,
    by: str,
    reason: str | None,
    as_json: bool,
) -> None:
    is_bulk = key is None
    if is_bulk and wanted == Filter():
        raise click.UsageError("give a KEY, or say which records by --status, --task, --label, --worker, --older-than")
    if not is_bulk and wanted != Filter(task=wanted.task):
        raise click.UsageError("give either a KEY or filters, not both; only --task says more of a KEY")
    if as_json and not (yes or dry_run):
        raise click.UsageError("--json asks no questions; give --yes or --dry-run, too")
    if is_bulk and not (reason or dry_run or screen.is_conversation()):
        raise click.UsageError("a verdict on many records needs a --reason")
    app = app_of(context)
    runtime = runtime_of(app)
    question, status_of_many = _QUESTIONS[action]
    tally = _Tally(is_bulk, dry_run)
    if key is not None:
        records = [looked_up(runtime.store, key, task=wanted.task)]
    else:
        meant = found(runtime.store, replace(wanted, status=wanted.status or status_of_many))
        records = [each for each in screen.counted("reading", meant) if not is_erased(each)]
        records.sort(key=lambda record: record.updated_at)
    now = runtime.store.now()
    for seen in records if dry_run or not is_bulk else ():
        try:
            require(action, seen, grace=runtime.policy_of(seen).grace_ms, now=now)
            tally.judged.append(seen)
        except PolicyError as error:
            if not dry_run:
                raise
            tally.refused.append((seen, verdicts.refusal(error)))
    if not dry_run:
        if not records:
            advise_on(wanted, app)
        elif not yes and is_bulk:
            print_records(records, now)
        elif not yes:
            screen.lines(summary(records[0], now, runtime.policy_of(records[0])))
        if records and reason is None and screen.is_conversation() and (is_bulk or not yes):
            reason = click.prompt("Reason", default=None if is_bulk else "", show_default=False)
        if records and not yes:
            click.confirm(f"{question} (of all {len(records)})" if is_bulk else question, abort=True)
        tally = _Tally(is_bulk, dry_run)
        tally.judge(records, action, result=result, by=by, reason=reason or "", app=app)
        now = runtime.store.now()
    echo_json(tally.plain(now)) if as_json else tally.print(now)
    if not dry_run and (tally.refused or tally.unclear or tally.left):
        context.exit(1)


@dataclass(slots=True)
class _Tally:
    """What became of the records that were meant, or would."""

    is_bulk: bool
    dry_run: bool
    judged: list[Record] = field(default_factory=list)
    refused: list[tuple[Record, str]] = field(default_factory=list)
    unclear: list[tuple[Record, str]] = field(default_factory=list)
    left: list[Record] = field(default_factory=list)

    def judge(self, records: Sequence[Record], action: Action, **proof: Any) -> None:
        """Give the verdict on each, as it was seen; end where it is not known what became of one."""
        try:
            judged = verdicts.judge_each(action, records, **proof)
            for seen, each in zip(records, screen.counted("judging", judged, total=len(records)), strict=True):
                if each.refusal:
                    self.refused.append((seen, each.refusal))
                else:
                    self.judged.append(each.record)
        except (StoreUnavailable, KeyboardInterrupt) as error:  # the latter may strike between two
            done = len(self.judged) + len(self.refused)
            self.unclear.extend((each, str(error) or "interrupted") for each in records[done : done + 1])
            self.left.extend(records[done + 1 :])

    def plain(self, now: int) -> dict[str, Any]:
        return {
            "dry_run": self.dry_run,
            "judged": [{"key": each.key, "status": status(each, now)} for each in self.judged],
            "refused": [{"key": each.key, "reason": reason} for each, reason in self.refused],
            "unclear": [{"key": each.key, "reason": reason} for each, reason in self.unclear],
            "left": [each.key for each in self.left],
        }

    def print(self, now: int) -> None:
        if self.judged and not (self.is_bulk or self.dry_run):
            _echo(f"{self.judged[0].key} is {status(self.judged[0], now)}")
            return
        if self.dry_run and self.judged:
            print_records(self.judged, now)
        would = ("would judge", "would refuse") if self.dry_run else ("judged", "refused")
        _echo(f"{would[0]} {len(self.judged)}, {would[1]} {len(self.refused)}")
        by_reason: dict[str, list[tuple[Record, str]]] = {}
        for seen, reason in self.refused:
            by_reason.setdefault(re.sub("[0-9]+", "0", reason), []).append((seen, reason))
        for alike in by_reason.values():
            _echo(f"  {len(alike)}: {alike[0][1]}")
            for seen, _ in alike:
                _echo(f"    {seen.status}  {seen.key}{f'  {seen.label}' if seen.label else ''}")
        for each, reason in self.unclear:
            _echo(f"unclear what became of {each.key}: {reason}; look at it before you repeat", err=True)
        if self.left:
            _echo(f"{len(self.left)} after it were not judged; give the same command again", err=True)


def _echo(text: str, *, err: bool = False) -> None:
    click.echo(one_line(text), err=err)
