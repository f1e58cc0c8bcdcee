"""Every kind of effect under fire, on plain Celery and with the tool that keeps it to one.

Each order has six effects on six receivers. Processes are killed at random right before and right after them, and
every third order is published twice. SQS and DynamoDB are emulated, the ledger is an SQLite file.

Exit status: 0 if every promise held and the fire was real, 1 if not (the reasons are printed).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from celery import Celery
from rich.console import Console

from celery_idempotent import open_store
from celery_idempotent.stores.sql import SQLStore
from lab import tether
from lab.demo import audit
from lab.demo.ledger import Ledger, Row
from lab.demo.orders import DUPLICATED
from lab.demo.queues import queue_length
from lab.demo.settings import Settings
from lab.embedded import EmbeddedAws
from lab.kinds import tally
from lab.servers import TABLE

CHILDREN = 4
TIMEOUT = 240.0
POLL = 0.5
LOOKS = 4  # nothing is left for certain if that many looks in a row find nothing
APPS = ("shop", "books")
ARGUMENTS: dict[str, tuple[str, dict[str, int]]] = {
    "charge": ("shop", {"cents": 500}),
    "reserve": ("shop", {"units": 2}),
    "publish": ("shop", {}),
    "notify": ("shop", {}),
    "book": ("books", {"cents": 500}),
}
"""By task, its app and what it gets beside the order; `receipt` follows from `book`."""


@click.command(help=__doc__)
@click.option("--orders", "count", default=60, show_default=True, type=click.IntRange(min=10))
def main(count: int) -> None:
    """Run both columns, print the table, judge."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    plain, idempotent = run(console, count)
    console.print(tally.table(plain, idempotent, count))
    reasons = [f"Broken promise: {it}." for it in tally.broken_promises(idempotent)]
    reasons += [f"Proves nothing: {it}." for it in tally.missing_evidence(plain, idempotent)]
    for reason in reasons:
        console.print(reason, style="bold red")
    if reasons:
        sys.exit(1)
    console.print("Every promise was kept, by every kind of effect.", style="bold green")


def run(console: Console, count: int) -> tuple[dict[str, tally.Kind], dict[str, tally.Kind]]:
    """Both columns, plain Celery first."""
    orders = [f"order-{number:04}" for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="celery-idempotent-") as folder, console.status("") as status:

        def column(name: str) -> dict[str, tally.Kind]:
            with EmbeddedAws() as aws:
                return _Column(name, aws, Path(folder) / name).run(
                    orders, lambda news: status.update(f"{name}: {news}")
                )

        return column("plain"), column("tasks")


class _Column:
    """The same load on the tasks of one module, on servers of its own."""

    def __init__(self, module: str, aws: EmbeddedAws, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._module = f"lab.kinds.{module}"
        self._aws = aws
        self._folder = folder
        self._settings = Settings(
            broker_url=aws.broker_url, store_url=aws.store_url(TABLE), results_url="", folder=folder, faults=True
        )

    def run(self, orders: Sequence[str], show: Callable[[str], None]) -> dict[str, tally.Kind]:
        open_store(self._settings.store_url).provision()
        open_store(self._sql_url).provision()
        self._inquire("prepare")
        published = [*orders, *orders[::DUPLICATED]]
        with self._workers() as workers:
            self._until(workers, "the workers to start", lambda: self._count("ready") == len(APPS))
            self._publish(published)
            self._until(workers, "the last message", lambda: self._is_over(show), looks=LOOKS)
        return self._tally(orders)

    @property
    def _sql_url(self) -> str:
        return f"sqlite:///{self._folder.absolute()}/books.sqlite3"

    @contextlib.contextmanager
    def _workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        with contextlib.ExitStack() as stack:
            workers = []
            for app in APPS:
                options = (
                    f"-A {self._module}:{app} worker --pool prefork --concurrency {CHILDREN} --queues {app}"
                    f" --hostname {app}@%h --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
                )
                environ = self._settings.environ() | {"TMPDIR": str(self._folder)}
                with (self._folder / f"{app}.log").open("wb") as log:
                    workers.append(tether.start("celery", *options.split(), log=log, env=environ))
                stack.callback(tether.kill, workers[-1])
            yield workers

    def _publish(self, orders: Sequence[str]) -> None:
        publisher = Celery(set_as_current=False)
        publisher.conf.update(self._settings.celery())
        with publisher.producer_or_acquire() as producer:
            for order in orders:
                for task, (app, arguments) in ARGUMENTS.items():
                    name = f"{self._module}.{task}"
                    publisher.send_task(name, kwargs={"order": order, **arguments}, queue=app, producer=producer)

    def _is_over(self, show: Callable[[str], None]) -> bool:
        show(f"{self._count('delivery')} deliveries, {self._count('kill')} killed")
        if any(queue_length(self._settings.broker_url, app) for app in APPS) or audit.unended(self._rows()):
            return False
        waiting = SQLStore(self._sql_url)
        try:
            return not waiting.waiting(1)
        finally:
            waiting.close()

    def _until(
        self, workers: Sequence[subprocess.Popen[bytes]], what: str, done: Callable[[], bool], looks: int = 1
    ) -> None:
        deadline, seen = time.monotonic() + TIMEOUT, 0
        while (seen := seen + 1 if done() else 0) < looks:
            if any(worker.poll() is not None for worker in workers) or time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in self._folder.glob("*.log"))
                raise click.ClickException(f"waited for {what}:\n{logs}")
            time.sleep(POLL)

    def _tally(self, orders: Sequence[str]) -> dict[str, tally.Kind]:
        counts = {kind: Counter(found) for kind, found in json.loads(self._inquire("counts")).items()}
        kills = Counter(row.task for row in self._rows() if row.what == "kill")
        return tally.tally(counts, kills, json.loads(self._inquire("unknown", *orders)), orders)

    def _inquire(self, *what: str) -> str:
        """Ask the receivers in a process of its own, which is configured as the workers are."""
        command = [sys.executable, "-m", "lab.kinds.inquiry", *what]
        environ = {**os.environ, **self._settings.environ()}
        return subprocess.run(
            command, env=environ, check=True, stdout=subprocess.PIPE, text=True, cwd=tether.ROOT
        ).stdout

    def _count(self, what: str) -> int:
        return sum(row.what == what for row in self._rows())

    def _rows(self) -> list[Row]:
        return Ledger(self._folder / "ledger.jsonl").rows()


if __name__ == "__main__":
    main()
