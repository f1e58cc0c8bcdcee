"""One column: a queue, two workers, a ledger, and the load."""

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from celery import Celery

from lab.demo import audit, shop
from lab.demo.queues import queue_length
from lab.demo.settings import LEASE, Settings
from lab.fleet import Fleet, Hear, Watch
from lab.ledger import Ledger, Row
from lab.servers import Servers

WORKERS = 2
CHILDREN = 4  # of each worker
OUTAGE = LEASE / 3  # how long a killed store is away, and a little longer: short enough that leases survive it
MISSED = 10  # orders that are published meanwhile
DUPLICATED = 3  # every third order is published twice, as by a double click or a webhook sent again
LOOKS = 8  # nothing is left for certain if that many looks in a row find nothing
PATIENCE = 240.0


def published(count: int) -> list[str]:
    """The orders, every third one twice, in an arbitrary but repeatable sequence."""
    ids = shop.orders(count)
    sent = [*ids, *ids[::DUPLICATED]]
    random.Random(42).shuffle(sent)
    return sent


def run(name: str, count: int, servers: Servers, folder: Path, hear: Hear) -> audit.Figures:
    """Publish the load, wait until nothing is left to do, count."""
    folder.mkdir(parents=True)
    settings = Settings(broker_url=servers.broker_url, store_url=servers.store_url, folder=folder, queue=name)
    names, sent = [f"{name}-{number}" for number in range(WORKERS)], published(count)
    with Fleet("lab.demo.shop", names, children=CHILDREN, environ=settings.environ(), folder=folder) as fleet:
        watch = Watch(fleet, hear)
        fleet.until_ready(PATIENCE)
        started = time.monotonic()
        _publish_under_fire(name, watch, servers, settings, sent)
        queued = partial(queue_length, settings.broker_url, settings.queue)
        watch.until(lambda: not (queued() or audit.unended(watch.rows)), "the last message", PATIENCE, looks=LOOKS)
        seconds = time.monotonic() - started
    return audit.figures(watch.rows, orders=shop.orders(count), published=len(sent), seconds=round(seconds, 1))


def _publish_under_fire(name: str, watch: Watch, servers: Servers, settings: Settings, sent: Sequence[str]) -> None:
    """Publish all. A store that can, dies in the middle, with outcomes that are needed later, and comes back."""
    # An app of its own that knows no tasks: a publisher needs their names only.
    publisher = Celery(set_as_current=False)
    publisher.conf.update(settings.celery())

    def publish(some: Sequence[str]) -> None:
        with publisher.producer_or_acquire() as producer:
            for order in some:
                for task, arguments in shop.messages(order):
                    publisher.send_task(f"{name}.{task}", kwargs=arguments, producer=producer)
                watch.look()

    store, half = servers.durable_store, len(sent) // 2
    if store is None:
        publish(sent)
        return
    publish(sent[:half])
    early = set(sent[:half])
    watch.until(lambda: len(_charged(watch.rows) & early) * 2 > len(early), "the first orders", PATIENCE)
    store.kill()
    killed = time.monotonic()
    publish(sent[half : half + MISSED])
    time.sleep(max(0.0, killed + OUTAGE - time.monotonic()))
    store.revive()
    Ledger(settings.folder / "ledger.jsonl").append(Row(what="store_killed"))
    publish(sent[half + MISSED :])


def _charged(rows: Sequence[Row]) -> set[str]:
    return {row.order for row in rows if row.what == "effect" and row.task == shop.CHARGE}
