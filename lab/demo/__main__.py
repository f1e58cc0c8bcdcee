"""The same orders under the same fire, on plain Celery and on `IdempotentTask`.

One command, nothing left behind. It always embeds its store and its broker: it kills workers, kills the store if
that can come back, and counts charges, which is no way to treat real ones.

Exit status: 0 if every promise held and the fire was real, 1 if not (the reasons are printed).
"""

import contextlib
import sys
from pathlib import Path

import click
from rich.console import Console

from celery_idempotent import open_store
from lab import tether
from lab.demo import audit, column, shop
from lab.demo.story import telling
from lab.folders import temporary_folder
from lab.servers import BROKERS, STORES, Servers


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--store", default=STORES[0], type=click.Choice(STORES), help="Where records are kept.")
@click.option("--broker", default=BROKERS[0], type=click.Choice(BROKERS), help="Where messages wait.")
@click.option("--orders", default=100, type=click.IntRange(min=20), help="How many.")
@click.option("--folder", type=click.Path(path_type=Path), help="A new folder for ledgers and worker logs.")
def main(store: str, broker: str, orders: int, folder: Path | None) -> None:
    """Show it and judge it."""
    tether.unwind_on_signals()
    console = Console(highlight=False)
    console.print(f"{orders} orders, every third published twice: charge, stock and mail", style="bold")
    console.print("Of each kind the first 2 kills: seconds, operation, what its processes did.", style="dim")
    with contextlib.ExitStack() as stack:
        if folder:
            folder.mkdir(parents=True)
        place = folder.resolve() if folder else stack.enter_context(temporary_folder())
        servers = stack.enter_context(Servers(store, broker, place))
        open_store(servers.store_url).provision()
        found = {}
        for name, title in audit.COLUMNS.items():
            with telling(console, title, 3 * orders) as hear:
                found[name] = column.run(name, orders, servers, place / name, hear)
        can_be_killed = servers.durable_store is not None
    console.print("", audit.table(found, orders, store, broker), "")
    broken = audit.broken_promises(found)
    missing = audit.missing_evidence(found, kills=shop.kills_planned(orders), store_kills=int(can_be_killed))
    reasons = [f"Broken promise: {it}." for it in broken] + [f"Proves nothing: {it}." for it in missing]
    if not reasons:
        console.print("Every promise was kept.", style="bold green")
    for line in audit.summary(found, orders):
        console.print(f"  {line}")
    for reason in reasons:
        console.print(reason, style="bold red")
    sys.exit(1 if reasons else 0)


if __name__ == "__main__":
    main()
