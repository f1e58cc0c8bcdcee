"""The same orders under the same fire, on plain Celery and on `IdempotentTask`.

One command, nothing left behind. It always embeds its store and its broker: it kills workers, kills the store if
that can come back, and counts charges, which is no way to treat real ones.

Exit status: 0 if every promise held and the fire was real, 1 if not (the reasons are printed).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from celery_idempotent import open_store
from lab.demo import audit, faults, orders, report
from lab.demo.column import Column
from lab.demo.progress import progress
from lab.servers import BROKERS, STORES, Servers

COLUMNS = {"plain": "lab.demo.plain", "idempotent": "lab.demo.tasks"}


@click.command(help=__doc__)
@click.option("--store", default=STORES[0], show_default=True, envvar="EXAMPLE_STORE", type=click.Choice(STORES))
@click.option("--broker", default=BROKERS[0], show_default=True, envvar="EXAMPLE_BROKER", type=click.Choice(BROKERS))
@click.option("--orders", "count", default=200, show_default=True, type=click.IntRange(min=20))
@click.option("--folder", type=click.Path(path_type=Path), help="A new folder for ledgers and worker logs.")
def main(store: str, broker: str, count: int, folder: Path | None) -> None:
    """Run both columns, print the table, judge."""
    # Both then unwind the `with` blocks. A shell starts what is put in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    with _folder(folder) as place:
        servers = Servers(store, broker, place)
        plain, idempotent = _run(console, servers, count, place)
    console.print(report.table(plain, idempotent, store, broker))
    broken = audit.broken_promises(idempotent)
    missing = audit.missing_evidence(
        plain,
        idempotent,
        kills=faults.kills_planned(count),
        store_kills=int(servers.durable_store is not None),
    )
    if broken or missing:
        for reason in [*(f"Broken promise: {it}." for it in broken), *(f"Proves nothing: {it}." for it in missing)]:
            console.print(reason, style="bold red")
        sys.exit(1)
    console.print(
        f"Every order was charged exactly once, through {idempotent.kills} killed worker processes. "
        f"Plain Celery charged {plain.charged_more} of {count} orders more than once.",
        style="bold green",
    )


def _run(console: Console, servers: Servers, count: int, place: Path) -> tuple[audit.Tally, audit.Tally]:
    load = orders.make(count)
    with servers, progress(console, list(COLUMNS), count) as show:
        open_store(servers.store_url).provision()
        plain, idempotent = (
            Column(name, tasks, servers, place / name).run(load, show) for name, tasks in COLUMNS.items()
        )
    return plain, idempotent


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="celery-idempotent-") as folder:
            yield Path(folder)
    else:
        wanted.mkdir(parents=True)
        yield wanted.resolve()


if __name__ == "__main__":
    main()
