"""The same orders under the same fire, on plain Celery and on `IdempotentTask`.

One command, nothing to install but Python packages, nothing left behind. It always embeds its AWS: it kills
workers and counts charges, which is no way to treat a real account.

Exit status: 0 if every promise held and the fire was real, 1 if not (the reasons are printed).
"""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import click
from celery import Celery
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from celery_idempotent.stores import open_store
from example_project import audit, faults, orders, report, tether
from example_project.embedded import REGION, EmbeddedAws
from example_project.ledger import Ledger, Row
from example_project.settings import TABLE, Settings

WORKERS = 2
CHILDREN = 4
START_TIMEOUT = 60.0
COLUMN_TIMEOUT = 240.0
POLL = 0.5


@click.command(help=__doc__)
@click.option("--orders", "count", default=200, show_default=True, type=click.IntRange(min=20))
@click.option("--folder", type=click.Path(path_type=Path), help="Keep ledgers and worker logs in this new folder.")
def main(count: int, folder: Path | None) -> None:
    """Run both columns, print the table, judge."""
    # A SIGTERM then unwinds the `with` blocks just as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    load = orders.make(count)
    with _folder(folder) as place, EmbeddedAws() as aws:
        open_store(aws.store_url(TABLE)).provision()
        with _progress(console, count) as show:
            plain = Column("plain", "example_project.plain", aws, place).run(load, show)
            idempotent = Column("idempotent", "example_project.tasks", aws, place).run(load, show)
    console.print(report.table(plain, idempotent))
    failures = [
        *(f"broken promise: {reason}" for reason in audit.broken_promises(idempotent)),
        *(
            f"nothing proved: {reason}"
            for reason in audit.missing_evidence(plain, idempotent, kills=faults.kills_planned(count))
        ),
    ]
    console.print(
        "\n".join(failures)
        or f"Every order charged exactly once, through {idempotent.kills} killed workers. "
        f"Plain Celery charged {plain.charged_more} of {count} orders more than once.",
        style="bold red" if failures else "bold green",
    )
    sys.exit(bool(failures))


Show = Callable[[str, int, str], None]


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run the load: its tasks, its queue, its workers, its ledger."""

    name: str
    tasks: str
    aws: EmbeddedAws
    place: Path

    @property
    def _folder(self) -> Path:
        return self.place / self.name

    def run(self, load: Sequence[orders.Order], show: Show) -> audit.Tally:
        """Publish `load`, wait until its queue is empty, count."""
        settings = Settings(
            broker_url=self.aws.broker_url,
            store_url=self.aws.store_url(TABLE),
            results_url="",
            folder=self._folder,
            queue=self.name,
            faults=True,
        )
        published = orders.with_duplicates(load)
        with self._workers(settings) as workers:
            self._until(workers, START_TIMEOUT, "workers to start", lambda: self._ready() == WORKERS)
            started = time.monotonic()
            self._publish(settings, published, show)
            self._until(workers, COLUMN_TIMEOUT, "the queue to run empty", lambda: self._drained(show))
            seconds = time.monotonic() - started
        return audit.tally(self._rows(), orders=[order.id for order in load], published=len(published), seconds=seconds)

    @contextlib.contextmanager
    def _workers(self, settings: Settings) -> Iterator[list[subprocess.Popen[bytes]]]:
        self._folder.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            workers = []
            for number in range(WORKERS):
                name = f"{self.name}-{number}"
                log = stack.enter_context((self._folder / f"{name}.log").open("wb"))
                workers.append(_worker(name, log.fileno(), settings))
                # The queue is empty, or we are giving up: there is nothing to wait for.
                stack.callback(tether.kill, workers[-1])
            yield workers

    def _publish(self, settings: Settings, published: Sequence[orders.Order], show: Show) -> None:
        publisher = Celery(set_as_current=False)
        publisher.conf.update(settings.celery())
        with publisher.producer_or_acquire() as producer:
            for number, order in enumerate(published):
                if number % 20 == 0:
                    self._show(show)
                for task, arguments in order.messages():
                    publisher.send_task(f"{self.tasks}.{task}", kwargs=arguments, producer=producer)

    def _until(
        self, workers: Sequence[subprocess.Popen[bytes]], timeout: float, what: str, done: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + timeout
        while not done():
            if any(worker.poll() is not None for worker in workers):
                raise click.ClickException(f"a worker ended early:\n{self._logs()}")
            if time.monotonic() > deadline:
                raise click.ClickException(f"waited {timeout:g} s for {what}:\n{self._logs()}")
            time.sleep(POLL)

    def _ready(self) -> int:
        return sum(row.what == "ready" for row in self._rows())

    def _drained(self, show: Show) -> bool:
        self._show(show)
        return _queue_length(self.aws.endpoint, self.name) == 0

    def _show(self, show: Show) -> None:
        rows = self._rows()
        charged = {row.order for row in rows if row.what == "effect" and row.task == audit.KEYED}
        deliveries, kills = (sum(row.what == what for row in rows) for what in ("delivery", "kill"))
        show(self.name, len(charged), f"{deliveries} deliveries, {kills} killed")

    def _rows(self) -> list[Row]:
        return [row for name in ("ledger", "bank") for row in Ledger(self._folder / f"{name}.jsonl").rows()]

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self._folder.glob("*.log"))


def _worker(name: str, log: int, settings: Settings) -> subprocess.Popen[bytes]:
    arguments = (
        f"-A example_project.app worker --pool prefork --concurrency {CHILDREN} --hostname {name}@%h"
        " --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
    )
    return tether.start(
        "celery", *arguments.split(), log=log, env=settings.environ() | {"TMPDIR": str(settings.folder)}
    )


@functools.cache
def _sqs(endpoint: str) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
    )


def _queue_length(endpoint: str, queue: str) -> int:
    """Messages waiting, delayed or being worked on."""
    sqs = _sqs(endpoint)
    url = sqs.get_queue_url(QueueName=queue)["QueueUrl"]
    lengths = sqs.get_queue_attributes(
        QueueUrl=url,
        AttributeNames=[
            "ApproximateNumberOfMessages",
            "ApproximateNumberOfMessagesDelayed",
            "ApproximateNumberOfMessagesNotVisible",
        ],
    )["Attributes"]
    return sum(int(length) for length in lengths.values())


@contextlib.contextmanager
def _folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="celery-idempotent-") as folder:
            yield Path(folder)
    else:
        wanted.mkdir(parents=True)
        yield wanted.resolve()


@contextlib.contextmanager
def _progress(console: Console, orders: int) -> Iterator[Show]:
    """Bars on a terminal; a line now and then anywhere else."""
    if not console.is_terminal:
        yield _plain_lines(console, orders)
        return
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("orders charged, {task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {name: progress.add_task(name, total=orders, note="", start=False) for name in ("plain", "idempotent")}

        def show(name: str, charged: int, note: str) -> None:
            progress.start_task(bars[name])
            progress.update(bars[name], completed=charged, note=note)

        yield show


def _plain_lines(console: Console, orders: int, every: float = 5.0) -> Show:
    last = 0.0

    def show(name: str, charged: int, note: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            console.print(f"{name}: {charged}/{orders} orders charged, {note}")

    return show


if __name__ == "__main__":
    main()
