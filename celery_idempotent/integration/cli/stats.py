"""Commands that count: how many records there are of which kind, and what waits."""

import time
from dataclasses import dataclass

import click
from celery import Celery

from celery_idempotent.engine.search import Summary, summary
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.cli import screen
from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency, seconds
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.cli.store import MOST_COUNTED
from celery_idempotent.integration.operating.display import duration, iso
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Outbox


@idempotency.command()
@as_json
@click.pass_context
def stats(context: click.Context, as_json: bool) -> None:
    """Count the records by status and task; reads the whole store.

    With the age of the oldest, what waits in the outbox, and how far the store's clock is ahead of this machine's.
    """
    numbers = _count(app_of(context))
    numbers.echo_json(indent=2) if as_json else numbers.print()


@idempotency.command()
@seconds("--every", 2.0, "Pause between two looks.")
@as_json
@click.pass_context
def watch(context: click.Context, every: float, as_json: bool) -> None:
    """Show what stats counts, again and again.

    Each look reads the whole store. --json prints a line for each.
    """
    app = app_of(context)
    numbers: _Numbers | None = _count(app)  # an error at once ends it; after a later one the next look may fare better
    while True:
        if numbers and as_json:
            numbers.echo_json(indent=None)
        elif numbers:
            click.clear()  # of a terminal
            numbers.print(paged=False)
        time.sleep(every)
        try:
            numbers = _count(app)
        except StoreUnavailable as error:
            click.echo(f"Warning: {error}", err=True)
            numbers = None


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What was counted, at ``now`` on the store's clock, which is ``offset`` ms ahead of this machine's.

    ``waiting`` is how many messages wait in the outbox, and for how many milliseconds the oldest one has.
    """

    counted: Summary
    waiting: tuple[int, int | None] | None
    now: int
    offset: int

    def echo_json(self, indent: int | None) -> None:
        depth, age = self.waiting or (0, None)
        oldest = {status: iso(when) for status, when in self.counted.oldest.items()}
        echo_json(
            {
                "at": iso(self.now),
                "by_status": dict(self.counted.by_status),
                "by_task": {task: dict(counts) for task, counts in self.counted.by_task.items()},
                "oldest": oldest,
                "oldest_in_progress": oldest.get(Status.IN_PROGRESS),
                "outbox": self.waiting and {"depth": depth, "oldest_age": None if age is None else age / 1000},
                "clock_offset_ms": self.offset,
            },
            indent=indent,
        )

    def print(self, *, paged: bool = True) -> None:
        by_status = sorted(self.counted.by_status.items())
        oldest = self.counted.oldest
        columns = [Column("STATUS"), Column("RECORDS", is_number=True), Column("OLDEST WRITE", is_number=True)]
        rows = [(status, count, duration(self.now - oldest[status])) for status, count in by_status]
        screen.table(columns, rows, paged=paged)
        click.echo()
        columns = [Column("TASK", is_cut=True), *(Column(status, is_number=True) for status, _ in by_status)]
        by_task = sorted(self.counted.by_task.items())
        tasks = [(task, *(counts.get(status, 0) for status, _ in by_status)) for task, counts in by_task]
        screen.table(columns, tasks, paged=paged)
        rest = f"the store's clock is {abs(self.offset)} ms {'ahead' if self.offset >= 0 else 'behind'}"
        if self.waiting is not None:
            depth, age = self.waiting
            rest = f"outbox: {depth} wait{'' if age is None else f', the oldest for {duration(age)}'}; {rest}"
        click.echo(f"\n{rest}")


def _count(app: Celery) -> _Numbers:
    store = runtime_of(app).store
    counted = summary(store)
    now, here = store.now(), time.time_ns() // 1_000_000
    waiting = store.waiting(MOST_COUNTED) if isinstance(store, Outbox) else None
    oldest = now - waiting[0].created_at if waiting else None
    return _Numbers(counted, None if waiting is None else (len(waiting), oldest), now, now - here)
