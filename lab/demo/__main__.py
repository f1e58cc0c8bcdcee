"""The same orders under the same fire, on plain Celery and on `IdempotentTask`.

One command, nothing left behind. It always embeds its store and its broker: it kills workers, kills the store if
that can come back, and counts charges, which is no way to treat real ones.

Exit status: 0 if every promise held and the fire was real, 1 if not (the reasons are printed).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from celery_idempotent import open_store
from lab import tether
from lab.demo import audit, column, faults, orders, report
from lab.demo.screen import announce, telling
from lab.demo.story import Story
from lab.folders import temporary_folder
from lab.servers import BROKERS, STORES, Servers

PLAIN, OURS = "plain Celery", "IdempotentTask"


@click.command(help=__doc__)
@click.option(
    "--store", default=STORES[0], show_default=True, type=click.Choice(STORES), help="Where records are kept."
)
@click.option(
    "--broker", default=BROKERS[0], show_default=True, type=click.Choice(BROKERS), help="Where messages wait."
)
@click.option("--orders", "count", default=100, show_default=True, type=click.IntRange(min=20), help="How many.")
@click.option("--folder", type=click.Path(path_type=Path), help="A new folder for ledgers and worker logs.")
def main(store: str, broker: str, count: int, folder: Path | None) -> None:
    """Show it and judge it."""
    tether.unwind_on_signals()
    console = Console(highlight=False)
    with _folder(folder) as place:
        verdict = _fire(console, store, broker, count, place)
    sys.exit(_judge(console, verdict))


def _fire(console: Console, store: str, broker: str, count: int, place: Path) -> report.Verdict:
    """The same orders under the same fire."""
    load = orders.make(count)
    announce(console, f"{count} orders, every third published twice: charge, stock and mail", column.VOICE.told)
    with Servers(store, broker, place) as servers:
        open_store(servers.store_url).provision()

        def run(title: str, name: str, tasks: str) -> audit.Tally:
            with telling(console, title, Story(column.VOICE), 3 * count) as hear:
                return column.Column(name, tasks, servers, place / name).run(load, hear)

        plain = run(PLAIN, "plain", "lab.demo.plain")
        ours = run(OURS, "idempotent", "lab.demo.tasks")
        store_kills = int(servers.durable_store is not None)
    console.print("", report.table(plain, ours, store, broker), "")
    return report.Verdict(
        summary=report.summary(plain, ours),
        broken=audit.broken_promises(ours),
        missing=audit.missing_evidence(plain, ours, kills=faults.kills_planned(count), store_kills=store_kills),
    )


def _judge(console: Console, verdict: report.Verdict) -> int:
    """Say what was seen; the exit status."""
    reasons = [f"Broken promise: {it}." for it in verdict.broken] + [f"Proves nothing: {it}." for it in verdict.missing]
    if not reasons:
        console.print("Every promise was kept.", style="bold green")
    for line in verdict.summary:
        console.print(f"  {line}")
    for reason in reasons:
        console.print(reason, style="bold red")
    return 1 if reasons else 0


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with temporary_folder() as folder:
            yield folder
    else:
        wanted.mkdir(parents=True)
        yield wanted.resolve()


if __name__ == "__main__":
    main()
