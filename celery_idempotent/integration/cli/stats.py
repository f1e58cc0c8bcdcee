"""Commands that count: how many records there are of which kind, and what waits."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from celery import Celery

from celery_idempotent.engine.search import Summary, summary
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.integration.cli import options, screen
from celery_idempotent.integration.cli.base import app_of, as_json, echo_json, idempotency, readable_errors
from celery_idempotent.integration.cli.outbox import MOST_COUNTED
from celery_idempotent.integration.cli.screen import Column
from celery_idempotent.integration.display import duration, iso
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.printable import one_line
from celery_idempotent.protocol.record import Status
from celery_idempotent.protocol.store import Outbox

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What was counted, at ``now`` on the store's clock, which is ``offset`` ms ahead of this machine's.

    ``waiting`` is how many messages wait in the outbox, and for how many milliseconds the oldest one has.
    """

    counted: Summary
    waiting: tuple[int, int | None] | None
    now: int
    offset: int


@idempotency.command()
@as_json
@click.pass_context
def stats(context: click.Context, as_json: bool) -> None:
    """Count the records by status and task; reads the whole store.

    With the age of the oldest, what waits in the outbox, and how far the store's clock is ahead of this machine's.
    """
    with readable_errors():
        numbers = _numbers(app_of(context))
    if as_json:
        echo_json(_plain(numbers))
        return
    _print(numbers)


@idempotency.command()
@options.every(2.0)
@as_json
@click.pass_context
def watch(context: click.Context, every: float, as_json: bool) -> None:
    """Show what stats counts, again and again.

    Each look reads the whole store. --json prints a line for each.
    """
    app = app_of(context)
    with readable_errors():
        numbers = _numbers(app)  # an error at once ends it; a later one is shown, and the next look may fare better
        if as_json or not screen.is_terminal():
            while True:
                echo_json(_plain(numbers), indent=None) if as_json else _print(numbers)
                time.sleep(every)
                numbers = _numbers(app)
        with screen.live() as draw:
            draw(_drawn(numbers))
            while True:
                time.sleep(every)
                try:
                    numbers = _numbers(app)
                    draw(_drawn(numbers))
                except StoreUnavailable as error:
                    draw(_drawn(numbers, str(error)))


def _numbers(app: Celery) -> _Numbers:
    store = runtime_of(app).store
    counted = summary(store)
    now, here = store.now(), time.time_ns() // 1_000_000
    waiting = store.waiting(MOST_COUNTED) if isinstance(store, Outbox) else None
    oldest = now - waiting[0].created_at if waiting else None
    return _Numbers(counted, None if waiting is None else (len(waiting), oldest), now, now - here)


def _plain(numbers: _Numbers) -> dict[str, Any]:
    oldest = {status: iso(when) for status, when in numbers.counted.oldest.items()}
    outbox = None
    if numbers.waiting is not None:
        depth, age = numbers.waiting
        outbox = {"depth": depth, "oldest_age": None if age is None else age / 1000}
    return {
        "at": iso(numbers.now),
        "by_status": dict(numbers.counted.by_status),
        "by_task": {task: dict(counts) for task, counts in numbers.counted.by_task.items()},
        "oldest": oldest,
        "oldest_in_progress": oldest.get(Status.IN_PROGRESS),
        "outbox": outbox,
        "clock_offset_ms": numbers.offset,
    }


_BY_STATUS = (Column("STATUS"), Column("RECORDS", is_number=True), Column("OLDEST WRITE", is_number=True))


def _rows(numbers: _Numbers) -> list[list[str]]:
    counted = numbers.counted
    return [
        [status, f"{count}", duration(numbers.now - counted.oldest[status])]
        for status, count in sorted(counted.by_status.items())
    ]


def _columns(numbers: _Numbers) -> list[Column]:
    statuses = sorted(numbers.counted.by_status)
    return [Column("TASK", is_cut=True), *(Column(each, is_number=True) for each in statuses)]


def _rows_by_task(numbers: _Numbers) -> list[list[str]]:
    statuses = sorted(numbers.counted.by_status)
    return [
        [one_line(task), *(f"{counts.get(each, 0)}" for each in statuses)]
        for task, counts in sorted(numbers.counted.by_task.items())
    ]


def _rest(numbers: _Numbers) -> str:
    clock = f"the store's clock is {abs(numbers.offset)} ms {'ahead' if numbers.offset >= 0 else 'behind'}"
    if numbers.waiting is None:
        return clock
    depth, age = numbers.waiting
    return f"outbox: {depth} wait{'' if age is None else f', the oldest for {duration(age)}'}; {clock}"


def _print(numbers: _Numbers) -> None:
    screen.table(_BY_STATUS, _rows(numbers))
    click.echo()
    screen.table(_columns(numbers), _rows_by_task(numbers))
    click.echo(f"\n{_rest(numbers)}")


def _drawn(numbers: _Numbers, trouble: str = "") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(iso(numbers.now, "seconds"), "bold"),
        screen.drawn(_BY_STATUS, _rows(numbers)),
        Text(),
        screen.drawn(_columns(numbers), _rows_by_task(numbers)),
        Text(f"\n{_rest(numbers)}"),
        Text(trouble, "bold red"),
    )
