"""Whether a store still knows what it has acknowledged after its server was killed and started again.

Threads execute tasks while the server is killed by SIGKILL, at random moments and for random times, and started
again on its data. No worker dies and no two deliveries of a task meet, so an effect that is repeated was forgotten
by the store. When every task has an outcome, the server is killed once more, and each task is delivered once
more: it must be told what it was told before.

The same over servers that are allowed to forget: there, effects must be repeated, or this campaign is blind.

A killed process is not a power failure: what the operating system has taken for the disk survives.
"""

import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from subprocess import Popen
from uuid import uuid4

import psycopg

from celery_idempotent.engine.claim import Claim, effect_key
from celery_idempotent.engine.delivery import ControlFlow, Delivery
from celery_idempotent.engine.events import Event, EventName
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.embedded import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedRedis, Server
from lab.proof.table import CONTROL, Row
from lab.proof.targets import DURABLE, TARGETS, Site, start
from lab.proof.verdicts import CODEC, PROMISES, Promise, Tally, Told, Verdict, operation, tell

__all__ = ["CONTROLS", "Control", "attack", "control", "run"]

CAMPAIGN = "store killed and restarted"

_THREADS = 8
_LEASE, _GRACE = 1.0, 100
"""Seconds. A claim whose reply was lost with the server holds off the next delivery that long."""

_UP, _DOWN = (0.2, 1.5), (0.0, 0.5)
"""Seconds for which the server runs between two kills, and is gone after one; the shortest and the longest."""

_PAUSE = 0.05
_STUCK_AFTER = 60.0
"""Seconds between two deliveries of a task, and until it is given up."""

Progress = Callable[[str], None]
"""Told how far it is, in one line."""


class _ForgetfulPostgres(EmbeddedPostgres):
    def start_program(self, *argv: str, user: str | None = None) -> Popen[bytes]:
        late = ("-c", "synchronous_commit=off", "-c", "wal_writer_delay=10s")
        return super().start_program(*argv, *late, user=user)


class _ForgetfulMariaDB(EmbeddedMariaDB):
    def start_program(self, *argv: str, user: str | None = None) -> Popen[bytes]:
        late = ("--innodb-flush-log-at-trx-commit=0", "--innodb-flush-log-at-timeout=10")
        return super().start_program(*argv, *late, user=user)


@contextmanager
def _forgetful_postgres() -> Iterator[Site]:
    with _ForgetfulPostgres() as server:
        with _without_warnings(), closing(open_store(server.url)) as store:
            store.provision()
        address = f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"
        with closing(psycopg.connect(address, autocommit=True)) as connection:
            connection.execute("CHECKPOINT")  # else it forgets even the table
        yield Site(server.url, server)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A forgetful server is what a control is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdempotencyWarning)
        yield


@contextmanager
def _on(make: Callable[[], EmbeddedRedis | EmbeddedMariaDB]) -> Iterator[Site]:
    with make() as server:
        yield Site(server.url, server)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A server that acknowledges what it may forget.

    Args:
        label: What the table says.
        start: Starts it.
    """

    label: str
    start: Callable[[], AbstractContextManager[Site]]


CONTROLS: Mapping[str, Control] = {
    "redis": Control(
        label=f"{TARGETS['redis'].label}, appendonly no",
        start=partial(_on, partial(EmbeddedRedis, options=("--appendonly", "no", "--save", ""))),
    ),
    "postgres": Control(
        label=f"{TARGETS['postgres'].label}, synchronous_commit off, 10 s",
        start=_forgetful_postgres,
    ),
    "mariadb": Control(
        label=f"{TARGETS['mariadb'].label}, innodb_flush_log_at_trx_commit 0, 10 s",
        start=partial(_on, _ForgetfulMariaDB),
    ),
}
"""By store, how its server is made forgetful."""


@dataclass(slots=True)
class _Task:
    """One task: what was done for it and what its callers were told."""

    key: str
    promise: Promise
    told: list[Told] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)
    events: Counter[EventName] = field(default_factory=Counter)

    def deliver(self, store: Store, heartbeat: Heartbeat) -> Told:
        """Deliver it once."""
        delivered = operation(self.key, self.promise, len(self.told))
        quick = replace(delivered, policy=replace(delivered.policy, lease=_LEASE), grace=_GRACE)
        self.told.append(tell(Delivery(quick, store, CODEC, heartbeat, ControlFlow(), self._observe), self._body))
        return self.told[-1]

    def _body(self, attempt: Claim | None) -> str:
        assert attempt is not None
        receipt = effect_key(attempt.key, "charge") if self.promise.keyed else uuid4().hex
        self.effects.append(receipt)
        return receipt

    def _observe(self, event: Event) -> None:
        self.events[event.name] += 1

    def verdict(self) -> Verdict:
        """What became of it."""
        unknown = self.told[-1].how == "OutcomeUnknown"
        return Verdict(
            task=f"{self.promise.name}, {self.key}",
            promise=self.promise.name,
            deliveries=len(self.told),
            faults={CAMPAIGN: 1},
            effects=len(set(self.effects)),
            unknown=unknown,
            unexplained=unknown and not self.events[EventName.STORE_UNAVAILABLE],
            stuck=not self._is_over(self.told[-1]),
            takeovers=self.events[EventName.TAKEN_OVER],
            problems=tuple(self._problems()),
        )

    def _problems(self) -> Iterator[str]:
        outcomes = {each for each in self.told if each.is_outcome}
        if len(self.effects) > 1:
            yield f"its body had its effect {len(self.effects)} times, and no worker died"
        if outcomes and not self.effects:
            yield "an outcome was reported and there was no effect"
        if not outcomes and self.told[-1].how != "OutcomeUnknown":
            yield f"it has no outcome: {self.told[-1]}"
        if len(outcomes) > 1:
            yield f"its callers were told different outcomes: {outcomes}"
        if self.told[-1] != self.told[-2]:
            yield f"after the last kill its caller was told {self.told[-1]}, and before {self.told[-2]}"

    def _is_over(self, told: Told) -> bool:
        return told.is_outcome or (told.how == "OutcomeUnknown" and self.promise.on_takeover == "refuse")

    def finish(self, store: Store, heartbeat: Heartbeat) -> None:
        """Deliver it until it has an outcome, as a broker does."""
        deadline = time.monotonic() + _STUCK_AFTER
        while not self._is_over(self.deliver(store, heartbeat)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)


class _Killer:
    """Kills the server again and again."""

    def __init__(self, server: Server, seed: int) -> None:
        self.kills = 0
        self._server = server
        self._chance = random.Random(seed)
        self._stopping = threading.Event()

    def strike(self, down: float = 0.0) -> None:
        """Kill it, and start it again."""
        self._server.kill()
        self.kills += 1
        time.sleep(down)
        self._server.revive()

    def run(self) -> None:
        """Until it is told to stop."""
        while not self._stopping.wait(self._chance.uniform(*_UP)):
            self.strike(self._chance.uniform(*_DOWN))

    def stop(self) -> None:
        """Strike no more."""
        self._stopping.set()


def attack(
    label: str, site: Site, promises: Sequence[Promise], *, seconds: float, seed: int, progress: Progress
) -> list[Row]:
    """One store under kills of its server: a row per promise.

    Args:
        label: What the table calls it.
        site: Where it is; its server is killed.
        promises: How the library is used, by turns.
        seconds: How long tasks are begun.
        seed: Of the moments of the kills.
        progress: Told how far it is.
    """
    assert site.server is not None
    started = time.monotonic()
    killer, heartbeat = _Killer(site.server, seed), Heartbeat()
    with closing(open_store(site.url)) as store, ThreadPoolExecutor(_THREADS) as threads:
        with _without_warnings():
            store.provision()
        killing = threading.Thread(target=killer.run)
        killing.start()

        def work(number: int) -> list[_Task]:
            done: list[_Task] = []
            while time.monotonic() < started + seconds:
                task = _Task(f"proof:1:{uuid4().hex}", promises[(number + len(done)) % len(promises)])
                task.finish(store, heartbeat)
                done.append(task)
                progress(f"{label}: {killer.kills} kills")
            return done

        try:
            tasks = [task for done in threads.map(work, range(_THREADS)) for task in done]
        finally:
            killer.stop()
            killing.join()
        killer.strike()
        progress(f"{label}: delivering {len(tasks)} tasks once more")
        list(threads.map(lambda task: task.deliver(store, heartbeat), tasks))
    tally = Tally()
    for task in tasks:
        tally.add(task.verdict())
    for verdict in tally.problems[:3]:
        progress(f"BROKEN {label}, {verdict.task}: {verdict.problems[0]}")
    rows = tally.rows(store=label, campaign=CAMPAIGN, seconds=time.monotonic() - started, seed=seed)
    return [replace(row, faults={CAMPAIGN: killer.kills}, healed=None, extra_requests=None) for row in rows]


def control(name: str, *, seconds: float, seed: int, progress: Progress) -> Row:
    """The same over a server that may forget; the row must show effects that were repeated."""

    def told(news: str) -> None:
        if not news.startswith("BROKEN"):
            progress(news)

    forgetful, promise = CONTROLS[name], PROMISES["at most once"]
    with forgetful.start() as site:
        (row,) = attack(forgetful.label, site, [promise], seconds=seconds, seed=seed, progress=told)
    return replace(row, system=CONTROL)


def run(name: str, *, seconds: float, seed: int, progress: Progress) -> list[Row]:
    """A store of :data:`lab.proof.targets.DURABLE` and its control.

    Args:
        name: The store.
        seconds: How long each is attacked.
        seed: Of the moments of the kills.
        progress: Told how far it is.

    Raises:
        KeyError: It is not durable.
    """
    assert name in DURABLE
    target = TARGETS[name]
    with start(name) as site:
        rows = attack(target.label, site, list(PROMISES.values()), seconds=seconds, seed=seed, progress=progress)
    return [*rows, control(name, seconds=seconds, seed=seed, progress=progress)]
