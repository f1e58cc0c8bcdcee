"""The same orders under the same fire, on plain Celery and on `IdempotentTask`; then six kinds of effect under fire.

One command, nothing left behind. It always embeds its store and its broker: it kills workers, kills the store if
that can come back, and counts charges, which is no way to treat real ones. The second act has stores of its own:
SQS and DynamoDB are emulated, the books are an SQLite file.

Exit status: 0 if every promise held and the fire was real, 1 if not (the reasons are printed).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console

from celery_idempotent import open_store
from lab import tether
from lab.demo import audit, column, faults, orders, report
from lab.demo.screen import announce, telling
from lab.demo.story import Story
from lab.folders import temporary_folder
from lab.kinds import column as kind
from lab.kinds import tally
from lab.servers import BROKERS, STORES, Servers

PLAIN, OURS = "plain Celery", "IdempotentTask"


@click.command(help=__doc__)
@click.option("--store", default=STORES[0], show_default=True, type=click.Choice(STORES), help="Of the first act.")
@click.option("--broker", default=BROKERS[0], show_default=True, type=click.Choice(BROKERS), help="Of the first act.")
@click.option(
    "--orders", "count", default=100, show_default=True, type=click.IntRange(min=20), help="Of the first act."
)
@click.option("--each", default=60, show_default=True, type=click.IntRange(min=10), help="Orders of the second act.")
@click.option("--only", type=click.Choice(["fire", "kinds"]), help="Show the first act alone, or the second.")
@click.option("--folder", type=click.Path(path_type=Path), help="A new folder for ledgers and worker logs.")
def main(store: str, broker: str, count: int, each: int, only: str | None, folder: Path | None) -> None:
    """Show both acts and judge them."""
    tether.unwind_on_signals()
    console = Console(highlight=False)
    with _folder(folder) as place:
        verdicts = [] if only == "kinds" else [_fire(console, store, broker, count, place)]
        verdicts += [] if only == "fire" else [_kinds(console, each, place)]
    sys.exit(_judge(console, verdicts))


def _fire(console: Console, store: str, broker: str, count: int, place: Path) -> report.Verdict:
    """The same orders under the same fire."""
    load = orders.make(count)
    announce(console, f"1. {count} orders, every third published twice: charge, stock and mail", column.VOICE.told)
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


def _kinds(console: Console, each: int, place: Path) -> report.Verdict:
    """Every kind of effect, each with its tool."""
    load = [f"order-{number:04}" for number in range(each)]
    announce(
        console, f"2. {each} orders with six effects each, processes killed at random around them", kind.VOICE.told
    )

    def run(title: str, module: str) -> dict[str, tally.Kind]:
        with telling(console, title, Story(kind.VOICE), len(tally.KINDS) * each) as hear:
            return kind.run(module, load, place / f"kinds-{module}", hear)

    plain, ours = run(PLAIN, "plain"), run(OURS, "tasks")
    console.print("", tally.table(plain, ours, each), "")
    return report.Verdict(
        summary=[tally.summary(ours)],
        broken=tally.broken_promises(ours),
        missing=tally.missing_evidence(plain, ours),
    )


def _judge(console: Console, verdicts: Sequence[report.Verdict]) -> int:
    """Say what was seen; the exit status."""
    reasons = [f"Broken promise: {it}." for verdict in verdicts for it in verdict.broken]
    reasons += [f"Proves nothing: {it}." for verdict in verdicts for it in verdict.missing]
    if not reasons:
        console.print("Every promise was kept.", style="bold green")
    for line in (line for verdict in verdicts for line in verdict.summary):
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
