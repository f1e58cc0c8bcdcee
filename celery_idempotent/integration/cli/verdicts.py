"""Commands by which a person judges an operation, or many at once."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import click

from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.engine.verdicts import require
from celery_idempotent.errors import PolicyError, StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import FILTERS, Invocation, advise_on, command, json_value
from celery_idempotent.integration.cli.records import print_record, print_records
from celery_idempotent.integration.operating import verdicts
from celery_idempotent.integration.operating.display import status
from celery_idempotent.integration.operating.verdicts import Judged
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import Action, is_erased

_OPTIONS = (
    click.argument("key", required=False),
    *FILTERS,
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
        _judge(call, Action.COMPLETED, json_value("--completed", result), **asked)


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
        records = [looked_up(store, key, task=wanted.task)]
    else:
        meant = found(store, replace(wanted, status=wanted.status or status_of_many))
        records = [each for each in screen.counted("reading", meant) if not is_erased(each)]
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
            advise_on(wanted, call.app)
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
