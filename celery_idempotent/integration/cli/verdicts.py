"""Commands by which a person judges an operation, or many at once."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any

import click
from celery import Celery

from celery_idempotent.engine.search import Filter, found, looked_up
from celery_idempotent.engine.verdicts import require_abandoned, require_forgettable, require_unknown
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration import verdicts as operator
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.asked import advise_on, filters
from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency, json_value, readable_errors
from celery_idempotent.integration.cli.records import print_records
from celery_idempotent.integration.cli.views import summary
from celery_idempotent.integration.display import status
from celery_idempotent.integration.settings import Runtime, runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.verdicts import is_erased


@dataclass(frozen=True, slots=True)
class _Plan:
    """A verdict to be given.

    Args:
        require: Refuses a record that it cannot be given on, at a time of the store's clock.
        give: Gives it on one record, as the person saw it.
        question: What to ask before.
        status: Of the records that are meant, where nothing else is asked for.
    """

    require: Callable[[Runtime, Record, int], None]
    give: Callable[..., Record]
    question: str
    status: Status | None = None


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
    verdict: dict[str, Any] = {"rerun": True} if result is None else {"completed": json_value("--completed", result)}

    def give(seen: Record, **told: Any) -> Record:
        return operator.resolve(seen.key, **verdict, **told)

    said = "did not happen, and will you publish the call again?" if rerun else "happened?"
    question = f"Did you check with the receiver that the effect {said}"
    _judge(context, order, _Plan(lambda _, seen, __: require_unknown(seen), give, question, Status.UNKNOWN))


@idempotency.command()
@_judging
@click.pass_context
def release(context: click.Context, order: _Order) -> None:
    """Give back KEY, whose attempt never ended.

    The next delivery runs the task. This works once the lease and its grace are over. Under on_takeover="refuse" you
    state by it that the effect did not happen; under "rerun" the next delivery would run anyway.
    """

    def require(runtime: Runtime, seen: Record, now: int) -> None:
        require_abandoned(seen, grace=runtime.policy_of(seen).grace_ms, now=now)

    def give(seen: Record, **told: Any) -> Record:
        return operator.release(seen.key, **told)

    question = "Did you check the receiver, and did the effect not happen?"
    _judge(context, order, _Plan(require, give, question, Status.IN_PROGRESS))


@idempotency.command()
@_judging
@click.pass_context
def forget(context: click.Context, order: _Order) -> None:
    """Forget KEY on purpose: its result, error, label and steps.

    The next delivery of such a call is a new operation, and runs again. --label 'acme/*' erases all about a tenant;
    what is IN_PROGRESS or UNKNOWN is left, and named. Who has forgotten it and why stays until the store deletes it,
    which Redis does at once: keep the log event verdict_given.
    """

    def give(seen: Record, **told: Any) -> Record:
        return operator.forget(seen.key, **told)

    question = "Shall it be forgotten? The next delivery runs again."
    _judge(context, order, _Plan(lambda _, seen, now: require_forgettable(seen, now=now), give, question))


def _judge(context: click.Context, order: _Order, plan: _Plan) -> None:
    app = app_of(context)
    runtime = runtime_of(app)
    with readable_errors():
        records = _meant(order, plan, runtime)
        now = runtime.store.now()
        if order.dry_run:
            _rehearse(order, plan, runtime, records, now)
            return
        if not order.is_bulk:
            plan.require(runtime, records[0], now)
    if not records:
        advise_on(order.wanted, app)
    elif not order.yes:
        _show(order, runtime, records, now)
    reason = order.reason if order.reason is not None or not records else _asked_reason(order)
    if records and not order.yes:
        about = f"{plan.question} (of all {len(records)})" if order.is_bulk else plan.question
        click.confirm(about, abort=True)
    tally = _given(app, plan, records, by=order.by, reason=reason or "")
    _tell(order, tally, runtime.store.now())
    if not tally.is_whole:
        context.exit(1)


def _meant(order: _Order, plan: _Plan, runtime: Runtime) -> list[Record]:
    if order.key is not None:
        return [looked_up(runtime.store, order.key, runtime.cipher, task=order.wanted.task)]
    wanted = replace(order.wanted, status=order.wanted.status or plan.status)
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


def _rehearse(order: _Order, plan: _Plan, runtime: Runtime, records: Sequence[Record], now: int) -> None:
    """Tell what would become of each, as far as can be known before."""
    tally = _Tally()
    for seen in records:
        try:
            plan.require(runtime, seen, now)
        except PolicyError as error:
            tally.refused.append((seen, _without_key(seen, str(error))))
        else:
            tally.judged.append(seen)
    if order.as_json:
        _tell(order, tally, now)
        return
    if tally.judged:
        print_records(tally.judged, now)
    _echo(f"would judge {len(tally.judged)}, would refuse {len(tally.refused)}")
    _tell_reasons(tally.refused)


def _given(app: Celery, plan: _Plan, records: Sequence[Record], *, by: str, reason: str) -> _Tally:
    """Give the verdict on each, as it was seen; end where it is not known what became of one."""

    def give(seen: Record) -> Record:
        return plan.give(seen, by=by, reason=reason, app=app, seen_revision=seen.revision)

    tally = _Tally()
    try:
        for seen in screen.counted("judging", records, total=len(records)):
            _try(seen, give, tally)
    except (StoreUnavailable, KeyboardInterrupt) as error:  # the latter may strike between two, where they are counted
        done = len(tally.judged) + len(tally.refused)
        tally.unclear.extend((each, str(error) or "interrupted") for each in records[done : done + 1])
        tally.left.extend(records[done + 1 :])
    return tally


def _try(seen: Record, give: Callable[[Record], Record], tally: _Tally) -> None:
    try:
        (judged,) = operator.judge_each([seen], give)
    except StoreMisconfigured as error:  # such as a damaged step of this one
        tally.refused.append((seen, str(error)))
    else:
        if judged.refusal:
            tally.refused.append((seen, _without_key(seen, judged.refusal)))
        else:
            tally.judged.append(judged.record)


def _without_key(seen: Record, refusal: str) -> str:
    """The reason alone, so that those of many records can be one."""
    return refusal.removeprefix(f"key={seen.key!r}:")


def _tell(order: _Order, tally: _Tally, now: int) -> None:
    if order.as_json:
        echo_json(
            {
                "dry_run": order.dry_run,
                "judged": [{"key": each.key, "status": status(each, now)} for each in tally.judged],
                "refused": [{"key": each.key, "reason": reason.strip()} for each, reason in tally.refused],
                "unclear": [{"key": each.key, "reason": reason} for each, reason in tally.unclear],
                "left": [each.key for each in tally.left],
            }
        )
        return
    if not order.is_bulk and tally.judged:
        (judged,) = tally.judged
        _echo(f"{judged.key} is {status(judged, now)}")
        return
    _echo(f"judged {len(tally.judged)}, refused {len(tally.refused)}")
    _tell_reasons(tally.refused)
    for each, reason in tally.unclear:
        _echo(f"unclear what became of {each.key}: {reason}; look at it before you repeat", err=True)
    if tally.left:
        _echo(f"{len(tally.left)} after it were not judged; give the same command again", err=True)


def _tell_reasons(refused: Sequence[tuple[Record, str]]) -> None:
    """Tell why, once for each reason, and of which records."""
    by_reason: dict[str, list[tuple[Record, str]]] = {}
    for seen, reason in refused:
        by_reason.setdefault(_NUMBERS.sub("0", reason), []).append((seen, reason))
    for alike in by_reason.values():
        _echo(f"  {len(alike)}: {alike[0][1].strip()}")
        for seen, _ in alike:
            _echo(f"    {seen.status}  {seen.key}{f'  {seen.label}' if seen.label else ''}")


def _echo(text: str, *, err: bool = False) -> None:
    click.echo(one_line(text), err=err)


_NUMBERS = re.compile("[0-9]+")
