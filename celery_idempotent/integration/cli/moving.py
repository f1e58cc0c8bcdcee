"""The command that moves what is left of one store into another, while workers go on with both."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import click

from celery_idempotent.integration.cli.base import as_json, echo_json, idempotency, readable_errors
from celery_idempotent.stores import open_store, reading
from celery_idempotent.stores.dual import DualStore


@idempotency.command()
@click.argument("source")
@click.argument("target")
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and move nothing.")
@as_json
def copy(source: str, target: str, dry_run: bool, as_json: bool) -> None:
    """Move all operations from one store to another.

    SOURCE and TARGET are the URLs of the two. Workers may go on, if all of them have both: idempotency_store =
    "dual://?old=SOURCE&new=TARGET". Afterwards, SOURCE answers nobody any more. Exit status 1: something is left; run
    it again, before any worker has TARGET alone.
    """
    moved: Counter[str] = Counter()
    left = 0
    with readable_errors(), _unreadable() as unreadable:
        dual = DualStore(open_store(source), open_store(target))
        for record, can_move in dual.left():
            if can_move and (dry_run or dual.move(record)):
                moved[record.task] += 1
            else:
                left += 1
        dual.close()
    if as_json:
        echo_json({"to_move" if dry_run else "moved": moved, "left": left, "unreadable": unreadable})
    else:
        for task, count in sorted(moved.items()):
            click.echo(f"{count} of {task} {'to move' if dry_run else 'moved'}")
        nothing = f"nothing {'would be' if dry_run else 'is'} left"
        click.echo(f"{left} left: an attempt is running, or somebody wrote meanwhile" if left else nothing)
        if unreadable:
            click.echo(f"{len(unreadable)} left that cannot be read, named above; they would run again", err=True)
    if left or unreadable or (dry_run and moved):
        raise SystemExit(1)


@contextmanager
def _unreadable() -> Iterator[list[str]]:
    """The keys of the records that cannot be read meanwhile."""
    keys: list[str] = []
    told = reading.on_unreadable

    def noted(key: str, error: Exception) -> None:
        keys.append(key)
        told(key, error)

    reading.on_unreadable = noted
    try:
        yield keys
    finally:
        reading.on_unreadable = told
