"""One column: a queue, two workers, a ledger, and the load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from celery import Celery

from lab.demo import audit
from lab.demo.ledger import Ledger, Row
from lab.demo.orders import Order, with_duplicates
from lab.demo.queues import queue_length
from lab.demo.screen import Hear
from lab.demo.settings import LEASE, Settings
from lab.demo.story import Ending, Voice
from lab.demo.watch import LOOKS, Watch
from lab.embedded import Server
from lab.fleet import Fleet
from lab.servers import Servers

WORKERS = 2
CHILDREN = 4  # of each worker
OUTAGE = LEASE / 3  # how long a killed store is away, and a little longer: short enough that leases survive it
MISSED = 10  # orders that are published meanwhile

WORDS = {audit.KEYED: ("charge", "charged"), "reserve_stock": ("stock", "reserved"), "send_receipt": ("mail", "mailed")}


def ending(end: Ending) -> str:
    """What to say of an operation that ended after a kill."""
    done = VOICE.done(end.task, end.times)
    if "taken_over" not in end.signs:
        return f"{end.pid} ran it again: {done}"
    known = "; the bank knew its key" if "recognised" in end.signs else ""
    excuse = " (it knows no key)" if end.times > 1 else ""
    return f"{end.pid} took over{known}: {done}{excuse}"


VOICE = Voice(WORDS, ending, told=2)


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run the load: by the tasks in the module `tasks`, with everything else in `folder`."""

    name: str
    tasks: str
    servers: Servers
    folder: Path

    def run(self, load: Sequence[Order], hear: Hear) -> audit.Tally:
        """Publish `load`, some of it twice, wait until nothing is left to do, count.

        Raises:
            click.ClickException: A worker ended, or something took far too long; the workers' logs are in it.
        """
        self.folder.mkdir(parents=True)
        published = with_duplicates(load)
        names = [f"{self.name}-{number}" for number in range(WORKERS)]
        environ = self._settings.environ()
        with Fleet("lab.demo.app", names, children=CHILDREN, environ=environ, folder=self.folder) as fleet:
            watch = Watch(self.folder, [fleet], hear)
            watch.until_ready()
            started = time.monotonic()
            self._publish_under_fire(watch, published)
            watch.until(lambda: self._is_drained(watch.rows), "the last message", looks=LOOKS)
            seconds = time.monotonic() - started
        ids = [order.id for order in load]
        return audit.tally(watch.rows, orders=ids, published=len(published), seconds=seconds)

    @property
    def _settings(self) -> Settings:
        return Settings(
            broker_url=self.servers.broker_url,
            store_url=self.servers.store_url,
            folder=self.folder,
            queue=self.name,
            faults=True,
        )

    def _publish_under_fire(self, watch: Watch, published: Sequence[Order]) -> None:
        """Publish all. A store that can, dies in the middle, with outcomes that are needed later, and comes back."""
        store = self.servers.durable_store
        if store is None:
            self._publish(watch, published)
            return
        half = len(published) // 2
        early = {order.id for order in published[:half]}
        self._publish(watch, published[:half])
        watch.until(lambda: len(_charged(watch.rows) & early) * 2 > len(early), "the first orders")
        self._without(store, lambda: self._publish(watch, published[half : half + MISSED]))
        self._publish(watch, published[half + MISSED :])

    def _without(self, store: Server, meanwhile: Callable[[], None]) -> None:
        store.kill()
        killed = time.monotonic()
        meanwhile()
        time.sleep(max(0.0, killed + OUTAGE - time.monotonic()))
        store.revive()
        Ledger(self.folder / "ledger.jsonl").append(Row(what="store_killed"))

    def _publish(self, watch: Watch, published: Sequence[Order]) -> None:
        # An app of its own that knows no tasks: a publisher needs their names only.
        publisher = Celery(set_as_current=False)
        publisher.conf.update(self._settings.celery())
        with publisher.producer_or_acquire() as producer:
            for order in published:
                for task, arguments in order.messages():
                    publisher.send_task(f"{self.tasks}.{task}", kwargs=arguments, producer=producer)
                watch.look()

    def _is_drained(self, rows: Sequence[Row]) -> bool:
        return queue_length(self.servers.broker_url, self.name) == 0 and audit.unended(rows) == 0


def _charged(rows: Sequence[Row]) -> set[str]:
    return {row.order for row in rows if row.what == "effect" and row.task == audit.KEYED}
