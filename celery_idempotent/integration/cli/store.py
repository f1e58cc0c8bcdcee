"""Commands that make and keep a store: its tables, what it deletes, what a copy takes, what it and its outbox hold."""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import click
from kombu.exceptions import OperationalError

from celery_idempotent.engine.events import EventName
from celery_idempotent.engine.search import summarised
from celery_idempotent.engine.verdicts import Fate, sweep_abandoned, sweep_released
from celery_idempotent.errors import PolicyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import AMOUNT, Invocation, command, number
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.events import SIGNALS
from celery_idempotent.integration.messages import outbox
from celery_idempotent.integration.operating.display import duration, iso
from celery_idempotent.integration.operating.worker import policies_of
from celery_idempotent.printable import not_installed, one_line
from celery_idempotent.protocol.operation import is_forgotten
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Outbox, PurgeableStore, RecordTooLarge, Store, VerifiableStore
from celery_idempotent.protocol.verdicts import kept_until
from celery_idempotent.stores import open_store
from celery_idempotent.stores.wrappers import innermost

_MOST_COUNTED = 100_000
"""Messages that wait; where there are more, nobody needs to know how many."""


@command("stats")
def stats(call: Invocation) -> None:
    """Count the records by status and task; reads the whole store.

    With the age of the oldest, what waits in the outbox, and how far the store's clock is ahead of this machine's.
    """
    _look(call)


@command("watch", number("--every", 2.0, AMOUNT, "SECONDS", "Pause between two looks."))
def watch(call: Invocation, every: float) -> None:
    """Show what stats counts, again and again.

    Each look reads the whole store. --json prints a line for each.
    """
    _look(call, again=True)  # an error at once ends it; after a later one the next look may fare better
    while True:
        time.sleep(every)
        try:
            _look(call, again=True)
        except StoreUnavailable as error:
            click.echo(f"Warning: {error}", err=True)


def _look(call: Invocation, *, again: bool = False) -> None:
    """Count, and print it; what is printed ``again`` is a line of JSON, and clears the terminal."""
    store = call.runtime.store
    counted = summarised(screen.counted("reading all records; read", store.scan()), store.now())
    now, here = store.now(), time.time_ns() // 1_000_000
    waiting = store.waiting(_MOST_COUNTED) if isinstance(store, Outbox) else None
    age = now - waiting[0].created_at if waiting else None
    if call.as_json:
        oldest = {status: iso(when) for status, when in counted.oldest.items()}
        seconds = None if age is None else age / 1000
        numbers = {
            "at": iso(now),
            "by_status": counted.by_status,
            "by_task": counted.by_task,
            "oldest": oldest,
            "oldest_in_progress": oldest.get(Status.IN_PROGRESS),
            "outbox": None if waiting is None else {"depth": len(waiting), "oldest_age": seconds},
            "clock_offset_ms": now - here,
        }
        call.answer(numbers, indent=None if again else 2)
        return
    if again:
        click.clear()  # of a terminal
    by_status = sorted(counted.by_status.items())
    columns = [Column("STATUS"), Column("RECORDS", is_number=True), Column("OLDEST WRITE", is_number=True)]
    rows = [(status, count, duration(now - counted.oldest[status])) for status, count in by_status]
    screen.table(columns, rows, paged=not again)
    click.echo()
    columns = [Column("TASK", is_cut=True), *(Column(status, is_number=True) for status, _ in by_status)]
    by_task = sorted(counted.by_task.items())
    tasks = [(task, *(counts.get(status, 0) for status, _ in by_status)) for task, counts in by_task]
    screen.table(columns, tasks, paged=not again)
    rest = f"the store's clock is {abs(now - here)} ms {'ahead' if now >= here else 'behind'}"
    if waiting is not None:
        rest = f"outbox: {len(waiting)} wait{'' if age is None else f', the oldest for {duration(age)}'}; {rest}"
    click.echo(f"\n{rest}")


@command(
    "relay",
    click.option("--once", is_flag=True, help="Publish what waits now, and end."),
    number("--every", 1.0, AMOUNT, "SECONDS", "Pause between two looks."),
)
def relay(call: Invocation, once: bool, every: float) -> None:
    """Publish messages that wait in the outbox of an SQL store.

    Workers do so, too, by idempotency_relay.
    """
    total = 0
    waiting = outbox.outbox_of(call.app)
    while True:
        try:
            published = outbox.relay(call.app)
        except OperationalError as error:
            raise click.ClickException(f"the broker did not answer: {error}") from error
        total += published
        if not published and once:
            break
        if not published:
            time.sleep(every)
        elif not (call.as_json and once):
            call.answer({"published": published}, f"published {published}", indent=None)
    left = len(waiting.waiting(_MOST_COUNTED))  # messages that could not be published, or are taken
    empty = [] if total else ["the outbox is empty"]
    call.answer({"published": total, "waiting": left}, *([f"{left} still wait; 'outbox' says why"] if left else empty))


@command("outbox", number("--limit", 100, click.IntRange(1), "N", "At most that many messages."))
def list_outbox(call: Invocation, limit: int) -> None:
    """List messages that wait in the outbox, the oldest first.

    How often and why they failed, and when they are tried next.
    """
    waiting = outbox.outbox_of(call.app).waiting(limit)
    now = call.runtime.store.now()
    if call.as_json:
        facts = [
            {
                "task_id": each.id,
                "created_at": iso(each.created_at),
                "failures": each.failures,
                "next_try": iso(each.next_try) if each.next_try else None,
                "reason": each.reason,
            }
            for each in waiting
        ]
        call.answer(facts)
        return
    rows = []
    for each in waiting:
        next_try = f"in {duration(each.next_try - now)}" if each.next_try > now else "now"
        rows.append((each.id, duration(now - each.created_at), each.failures, next_try, each.reason or ""))
    heads = ("TASK ID", "AGE", "FAILURES", "NEXT TRY")
    screen.table([*map(Column, heads), Column("REASON", is_cut=True)], rows)


@command("provision")
def provision(call: Invocation) -> None:
    """Create the table or schema if it is missing; safe to repeat."""
    store, lacking = call.runtime.store, None
    try:
        if isinstance(store, VerifiableStore):
            store.verify()
    except StoreMisconfigured as error:
        lacking = error.reason
    store.provision()
    done = "what was missing is there now" if lacking else "nothing that workers need was missing"
    call.answer({"store": repr(store), "lacked": lacking}, f"{store!r} is ready; {done}")


_DIALECTS = ["postgresql", "mysql", "mariadb", "sqlite"]


@command(
    "ddl",
    click.option("--dialect", type=click.Choice(_DIALECTS), help="For which database; default: that of the store."),
)
def ddl(call: Invocation, dialect: str | None) -> None:
    """Print the statements that create the tables of an SQL store.

    Needs no database.
    """
    try:
        from celery_idempotent.stores.sql import SQLStore
        from celery_idempotent.stores.sql.schema import ddl as statements_for
    except ModuleNotFoundError as error:
        raise click.ClickException(not_installed(error, "sql")) from error
    store = innermost(call.runtime.store) if call.app.conf.get("idempotency_store") else None
    tables, whose = [], "idempotency_store, where it names no others"
    if isinstance(store, SQLStore):
        tables, whose, dialect = [store.table, store.outbox], repr(store), dialect or store.dialect
    if dialect is None:
        raise click.UsageError(f"idempotency_store is not an SQL store; give --dialect: {', '.join(_DIALECTS)}")
    statements = statements_for(dialect, *tables)
    call.answer(
        {"dialect": dialect, "store": repr(store) if tables else None, "sql": statements},
        f"-- for {dialect}: the tables of {one_line(whose)}",
        statements.removesuffix("\n"),
    )


_DAY = 86_400_000


@command(
    "purge",
    number("--batch", 1000, click.IntRange(1, 10_000), "N", "Delete N at a time."),
    click.option("--max", "most", default=sys.maxsize, type=click.IntRange(1), metavar="N", help="Stop after N."),
    number(
        "--released-before",
        None,
        AMOUNT,
        "DAYS",
        "Delete RELEASED records, too, that were not touched for DAYS. They never expire by themselves, as they hold "
        "the finished steps and the fingerprint of an operation that may be delivered again; both are forgotten then.",
    ),
    number(
        "--abandoned-before",
        None,
        AMOUNT,
        "DAYS",
        "End what is IN_PROGRESS, too, if its lease has been over for DAYS: its message was lost. It is deleted, with "
        'steps and fingerprint. Under on_takeover="refuse", and where a step began and did not end, it becomes '
        "UNKNOWN. What another app has begun, or a task that this one lacks, stays.",
    ),
)
def purge(
    call: Invocation, batch: int, most: int, released_before: float | None, abandoned_before: float | None
) -> None:
    """Delete outcomes that are no longer kept.

    Run it once a day; workers do not mind, and can do it themselves, by idempotency_purge. Some stores delete them by
    themselves. With --released-before and --abandoned-before the whole store may be read.
    """
    store = call.runtime.store
    done: dict[str, Any] = {"store": repr(store), "outcomes": None, "released": None, "abandoned": None}
    lines = [f"{store!r} deletes outcomes by itself"]
    if isinstance(store, PurgeableStore):
        done["outcomes"] = sum(1 for _ in screen.counted("deleting outcomes", _purge(store, batch, most)))
        lines = [f"{done['outcomes']} outcomes deleted"]
    if released_before is not None:
        swept = islice(sweep_released(store, age=round(released_before * _DAY)), most)
        done["released"] = sum(1 for _ in screen.counted("deleting released", swept))
        lines.append(f"{done['released']} released records deleted")
    if abandoned_before is not None:
        age = round(abandoned_before * _DAY) + call.runtime.grace
        left_behind = sweep_abandoned(store, policies_of(call.app), age=age)
        fates = Counter(fate for _, fate in islice(left_behind, most))
        deleted, in_doubt = fates[Fate.DELETED], fates[Fate.IN_DOUBT]
        done["abandoned"] = {"deleted": deleted, "in_doubt": in_doubt}
        lines.append(f"{deleted} abandoned records deleted, {in_doubt} in doubt now (UNKNOWN)")
    call.answer(done, *lines)


def _purge(store: PurgeableStore, batch: int, most: int) -> Iterator[None]:
    """Delete batch by batch; yields for each record."""
    while most and (deleted := store.purge(min(batch, most))):
        most -= deleted
        yield from [None] * deleted


@command(
    "copy",
    click.argument("source"),
    click.argument("target"),
    click.option("--dry-run", is_flag=True, help="Say what would be copied, and write nothing."),
)
def copy(call: Invocation, source: str, target: str, dry_run: bool) -> None:
    """Copy all operations to another store, while no worker runs.

    SOURCE and TARGET are the URLs of the two. Exit status 1: something is left; run it again, before any worker has
    TARGET.
    """
    copied: Counter[str] = Counter()
    left = 0
    unreadable: list[str] = []

    def note(key: str, **_: Any) -> None:
        unreadable.append(key)

    SIGNALS[EventName.RECORD_UNREADABLE].connect(note)
    if source == target:
        raise click.UsageError("SOURCE and TARGET are one store")
    with closing(_open(source, "SOURCE")) as old, closing(_open(target, "TARGET")) as new:
        now = old.now()
        for record in old.scan():
            if is_forgotten(record, now) and kept_until(record) <= now:
                continue
            is_running = record.status is Status.IN_PROGRESS and record.lease_until > now
            if not is_running and _put(new, record, dry_run):
                copied[record.task] += 1
            else:
                left += 1
    done, rest = ("to copy", "nothing would be left") if dry_run else ("copied", "nothing is left")
    rest = f"{left} left: an attempt is running, or TARGET has another record or no room" if left else rest
    lines = [f"{count} of {task} {done}" for task, count in sorted(copied.items())]
    call.answer({done.replace(" ", "_"): copied, "left": left, "unreadable": unreadable}, *lines, rest)
    if unreadable and not call.as_json:
        click.echo(f"{len(unreadable)} left that cannot be read, named above; they would run again", err=True)
    if left or unreadable or (dry_run and copied):
        raise SystemExit(1)


def _open(url: str, argument: str) -> Store:
    try:
        return open_store(url)
    except PolicyError as error:
        raise click.BadParameter(error.remedy, param_hint=argument) from error


def _put(store: Store, record: Record, dry_run: bool) -> bool:
    """Whether ``record`` is in ``store`` now, written by this call or by one before; or would be."""
    try:
        stored = store.get(record.key) if dry_run else store.swap(record, None)
    except RecordTooLarge as error:
        if record.result is None:
            return False
        # It has happened all the same; of a result that a store has no room for, duplicates are told so.
        return _put(store, record.but(result=None, content_type=None, error=str(error)), dry_run)
    return (dry_run and stored is None) or (stored is not None and stored.revision == record.revision)
