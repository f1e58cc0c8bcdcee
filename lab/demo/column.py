"""One column of the table: a queue, two workers, a ledger, and the load."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from celery import Celery

from lab import tether
from lab.demo import audit
from lab.demo.ledger import Ledger, Row
from lab.demo.orders import Order, with_duplicates
from lab.demo.progress import Show
from lab.demo.queues import queue_length
from lab.demo.settings import LEASE, Settings
from lab.embedded import Server
from lab.servers import Servers

WORKERS = 2
CHILDREN = 4  # of each worker
START_TIMEOUT = 60.0
TIMEOUT = 240.0
POLL = 0.5
LOOKS = 3  # nothing is left for certain if that many looks in a row find nothing

OUTAGE = LEASE / 3  # how long a killed store is away, and a little longer: short enough that leases survive it
MISSED = 10  # orders that are published meanwhile


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run the load: by the tasks in the module `tasks`, with everything else in `folder`."""

    name: str
    tasks: str
    servers: Servers
    folder: Path

    def run(self, load: Sequence[Order], show: Show) -> audit.Tally:
        """Publish `load`, some of it twice, wait until nothing is left to do, count.

        Raises:
            click.ClickException: A worker ended, or something took far too long; the workers' logs are in it.
        """
        self.folder.mkdir(parents=True)
        published = with_duplicates(load)
        with self._workers() as workers:
            self._until(workers, START_TIMEOUT, "the workers to start", self._all_ready)
            started = time.monotonic()
            self._publish_under_fire(workers, published, show)
            self._until(workers, TIMEOUT, "the last message", lambda: self._drained(show), looks=LOOKS)
            seconds = time.monotonic() - started
        return audit.tally(self._rows(), orders=[order.id for order in load], published=len(published), seconds=seconds)

    @property
    def _settings(self) -> Settings:
        return Settings(
            broker_url=self.servers.broker_url,
            store_url=self.servers.store_url,
            results_url="",  # the ledger knows more
            folder=self.folder,
            queue=self.name,
            faults=True,
        )

    @contextlib.contextmanager
    def _workers(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        with contextlib.ExitStack() as stack:
            workers = []
            for number in range(WORKERS):
                workers.append(self._worker(f"{self.name}-{number}"))
                # The queue is empty, or we are giving up: there is nothing to wait for.
                stack.callback(tether.kill, workers[-1])
            yield workers

    def _worker(self, name: str) -> subprocess.Popen[bytes]:
        arguments = (
            f"-A lab.demo.app worker --pool prefork --concurrency {CHILDREN} --hostname {name}@%h"
            " --without-gossip --without-mingle --without-heartbeat --loglevel WARNING"
        )
        # Killed processes leave temporary files behind; let them do so where they are removed with the rest.
        environ = self._settings.environ() | {"TMPDIR": str(self.folder)}
        with (self.folder / f"{name}.log").open("wb") as log:
            return tether.start("celery", *arguments.split(), log=log, env=environ)

    def _publish_under_fire(
        self, workers: Sequence[subprocess.Popen[bytes]], published: Sequence[Order], show: Show
    ) -> None:
        """Publish all. A store that can, dies in the middle, with outcomes that are needed later, and comes back."""
        store = self.servers.durable_store
        if store is None:
            self._publish(published, show)
            return
        half = len(published) // 2
        early = {order.id for order in published[:half]}
        self._publish(published[:half], show)
        self._until(workers, TIMEOUT, "the first orders", lambda: len(self._charged() & early) * 2 > len(early))
        self._without(store, lambda: self._publish(published[half : half + MISSED], show))
        self._publish(published[half + MISSED :], show)

    def _without(self, store: Server, meanwhile: Callable[[], None]) -> None:
        store.kill()
        killed = time.monotonic()
        meanwhile()
        time.sleep(max(0.0, killed + OUTAGE - time.monotonic()))
        store.revive()
        Ledger(self.folder / "ledger.jsonl").append(Row(what="store_killed"))

    def _publish(self, published: Sequence[Order], show: Show) -> None:
        # An app of its own that knows no tasks: a publisher needs their names only.
        publisher = Celery(set_as_current=False)
        publisher.conf.update(self._settings.celery())
        with publisher.producer_or_acquire() as producer:
            for number, order in enumerate(published):
                if number % 20 == 0:
                    self._show(show)
                for task, arguments in order.messages():
                    publisher.send_task(f"{self.tasks}.{task}", kwargs=arguments, producer=producer)

    def _until(
        self,
        workers: Sequence[subprocess.Popen[bytes]],
        timeout: float,
        what: str,
        done: Callable[[], bool],
        looks: int = 1,
    ) -> None:
        deadline = time.monotonic() + timeout
        seen = 0
        while (seen := seen + 1 if done() else 0) < looks:
            if any(worker.poll() is not None for worker in workers):
                raise click.ClickException(f"a worker ended early:\n{self._logs()}")
            if time.monotonic() > deadline:
                raise click.ClickException(f"waited {timeout:g} s for {what}:\n{self._logs()}")
            time.sleep(POLL)

    def _all_ready(self) -> bool:
        return sum(row.what == "ready" for row in self._rows()) == WORKERS

    def _drained(self, show: Show) -> bool:
        self._show(show)
        return queue_length(self.servers.broker_url, self.name) == 0 and audit.unended(self._rows()) == 0

    def _show(self, show: Show) -> None:
        rows = self._rows()
        deliveries, kills = (sum(row.what == what for row in rows) for what in ("delivery", "kill"))
        show(self.name, len(self._charged()), f"{deliveries} deliveries, {kills} killed")

    def _charged(self) -> set[str]:
        return {row.order for row in self._rows() if row.what == "effect" and row.task == audit.KEYED}

    def _rows(self) -> list[Row]:
        return [row for name in ("ledger", "bank") for row in Ledger(self.folder / f"{name}.jsonl").rows()]

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))
