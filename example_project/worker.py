"""Only a worker. Start `python -m example_project.publish` in another terminal.

Unless a broker is configured (see `settings.py`), SQS and DynamoDB are embedded and end with this command.
"""

from __future__ import annotations

import contextlib

import click

from celery_idempotent import open_store
from example_project.app import app, settings
from example_project.embedded import EmbeddedAws
from example_project.settings import EMBEDDED_PORT


@click.command(help=__doc__)
@click.option("--concurrency", default=2, show_default=True, help="Child processes.")
@click.option("--loglevel", default="INFO", show_default=True, help="As in `celery worker --loglevel`.")
def main(concurrency: int, loglevel: str) -> None:
    """Work until Ctrl-C."""
    with EmbeddedAws(EMBEDDED_PORT) if settings.embedded else contextlib.nullcontext():
        open_store(settings.store_url).provision()
        click.echo(f"ledger, bank and results are in {settings.folder}")
        arguments = f"worker --pool prefork --concurrency {concurrency} --loglevel {loglevel}"
        app.worker_main([*arguments.split(), "--without-gossip", "--without-mingle", "--without-heartbeat"])


if __name__ == "__main__":
    main()
