"""One column of the second act: the same load on the tasks of one module, on servers of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from celery import Celery

from celery_idempotent import open_store
from celery_idempotent.stores.sql import SQLStore
from lab import tether
from lab.demo import audit
from lab.demo.orders import DUPLICATED
from lab.demo.queues import queue_length
from lab.demo.screen import Hear
from lab.demo.settings import Settings
from lab.demo.story import Ending, Voice
from lab.demo.watch import LOOKS, Watch
from lab.embedded import EmbeddedAws
from lab.fleet import Fleet
from lab.kinds import tally
from lab.servers import TABLE

CHILDREN = 4
APPS = ("shop", "books")
ARGUMENTS: dict[str, tuple[str, dict[str, int]]] = {
    "charge": ("shop", {"cents": 500}),
    "reserve": ("shop", {"units": 2}),
    "publish": ("shop", {}),
    "notify": ("shop", {}),
    "book": ("books", {"cents": 500}),
}
"""By task, its app and what it gets beside the order; `receipt` follows from `book`."""

WORDS = {
    "charge": ("payment", "paid"),
    "reserve": ("stock", "reserved"),
    "book": ("ledger", "booked"),
    "receipt": ("receipt", "mailed"),
    "publish": ("index", "indexed"),
    "notify": ("text", "sent"),
}
BY_ITS_TOOL = {
    "charge": "gave the API the same key",
    "reserve": "stock and record in one transaction",
    "book": "row and record in one transaction",
    "receipt": "gave the mailer the same key",
    "publish": "raised the fence, probed, then acted",
    "notify": "sent it, as nobody had begun to",
}
"""What makes a second attempt harmless."""


def ending(end: Ending) -> str:
    """What to say of an operation that ended after a kill."""
    if "outcome_unknown" in end.signs:
        return "in doubt: not repeated, a person decides"
    if "replayed" in end.signs:
        return "was committed: got the recorded result, nothing ran again"
    if "taken_over" in end.signs:
        return f"{end.pid} took over: {BY_ITS_TOOL[end.task]}"
    return f"{end.pid} ran it again: {WORDS[end.task][1]}{' once more' if end.point == 'after' else ''}"


VOICE = Voice(WORDS, ending, told=1)


def run(module: str, orders: Sequence[str], folder: Path, hear: Hear) -> dict[str, tally.Kind]:
    """Publish the orders, some of them twice, wait until nothing is left to do, count.

    Raises:
        click.ClickException: A worker ended, or something took far too long; the workers' logs are in it.
    """
    folder.mkdir(parents=True)
    with EmbeddedAws() as aws:
        settings = Settings(broker_url=aws.broker_url, store_url=aws.store_url(TABLE), folder=folder, faults=True)
        return _Column(f"lab.kinds.{module}", settings).run(orders, hear)


class _Column:
    def __init__(self, module: str, settings: Settings) -> None:
        self._module = module
        self._settings = settings

    def run(self, orders: Sequence[str], hear: Hear) -> dict[str, tally.Kind]:
        open_store(self._settings.store_url).provision()
        open_store(self._sql_url).provision()
        self._inquire("prepare")
        shop, books = (self._fleet(app) for app in APPS)
        with shop, books:
            watch = Watch(self._settings.folder, [shop, books], hear)
            watch.until_ready()
            self._publish(watch, [*orders, *orders[::DUPLICATED]])
            watch.until(lambda: self._is_over(watch), "the last message", looks=LOOKS)
        return self._tally(watch, orders)

    @property
    def _sql_url(self) -> str:
        return f"sqlite:///{self._settings.folder.absolute()}/books.sqlite3"

    def _fleet(self, app: str) -> Fleet:
        environ, folder = self._settings.environ(), self._settings.folder
        return Fleet(f"{self._module}:{app}", [app], children=CHILDREN, environ=environ, folder=folder)

    def _publish(self, watch: Watch, orders: Sequence[str]) -> None:
        publisher = Celery(set_as_current=False)
        publisher.conf.update(self._settings.celery())
        with publisher.producer_or_acquire() as producer:
            for order in orders:
                for task, (app, arguments) in ARGUMENTS.items():
                    name = f"{self._module}.{task}"
                    publisher.send_task(name, kwargs={"order": order, **arguments}, queue=app, producer=producer)
                watch.look()

    def _is_over(self, watch: Watch) -> bool:
        if any(queue_length(self._settings.broker_url, app) for app in APPS) or audit.unended(watch.rows):
            return False
        waiting = SQLStore(self._sql_url)
        try:
            return not waiting.waiting(1)
        finally:
            waiting.close()

    def _tally(self, watch: Watch, orders: Sequence[str]) -> dict[str, tally.Kind]:
        counts = {kind: Counter(found) for kind, found in json.loads(self._inquire("counts")).items()}
        kills = Counter(row.task for row in watch.rows if row.what == "kill")
        return tally.tally(counts, kills, json.loads(self._inquire("unknown", *orders)), orders)

    def _inquire(self, *what: str) -> str:
        """Ask the receivers in a process of its own, which is configured as the workers are."""
        command = [sys.executable, "-m", "lab.kinds.inquiry", *what]
        environ = {**os.environ, **self._settings.environ()}
        return subprocess.run(
            command, env=environ, check=True, stdout=subprocess.PIPE, text=True, cwd=tether.ROOT
        ).stdout
