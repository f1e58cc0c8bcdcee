"""Only a worker. Start `python -m lab.demo.publish` in another terminal.

The store and the broker that are not configured elsewhere (see `settings.py`) are embedded and end with this
command: EXAMPLE_STORE=redis EXAMPLE_BROKER=redis, for example, for both terminals.
"""

from __future__ import annotations

import click

from celery_idempotent import open_store
from lab.demo.app import app, settings
from lab.servers import Servers


@click.command(help=__doc__)
@click.option("--concurrency", default=2, show_default=True, help="Child processes.")
@click.option("--loglevel", default="INFO", show_default=True, help="As in `celery worker --loglevel`.")
def main(concurrency: int, loglevel: str) -> None:
    """Work until Ctrl-C."""
    with Servers(settings.embedded_store, settings.embedded_broker, settings.folder, fixed_ports=True):
        open_store(settings.store_url).provision()
        click.echo(f"ledger, bank and results are in {settings.folder}")
        arguments = f"worker --pool prefork --concurrency {concurrency} --loglevel {loglevel}"
        app.worker_main([*arguments.split(), "--without-gossip", "--without-mingle", "--without-heartbeat"])


if __name__ == "__main__":
    main()
