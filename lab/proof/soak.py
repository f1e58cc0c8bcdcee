"""Real workers under real faults for minutes: nemeses strike, everything quiets down, the audit judges.

Two prefork workers take tasks from SQS, Redis or RabbitMQ, some published twice, most of the rest by a publisher that
publishes once, some longer than the broker waits for them; two beats send the ticks of one schedule. Messages are held,
and dead owners are replaced at once. A seed chooses load and nemeses: SIGKILL of a pool process, of a whole worker, of
a beat, of the publisher between what it records and its message, or of the store's server, which is started again on
its data; SIGSTOP for three leases; clocks set wrong by seconds and minutes in both directions; a store that refuses, a
store and a broker that hang, requests and replies that get lost. When a strike lands is up to the machine, so a seed
repeats what was tried and not every interleaving. A task of plain Celery is beside it, as a control.

SQS and DynamoDB are held in memory (MiniStack), so they are stopped and never restarted; no more are RabbitMQ and the
Redis that is a broker. A worker is killed on Redis while it waits for a message: kombu loses the one that it is
fetching, and the audit would call that a loss of ours.
SQLite has no server: there is nobody to kill and no line to cut; instead somebody else keeps its file locked. All
its users are on one machine, so no clock of theirs is wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from celery import Celery
from redis import Redis

from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from lab.demo.queues import queue_length
from lab.demo.settings import Settings
from lab.embedded import EmbeddedAws, EmbeddedRabbitMQ, EmbeddedRedis, Server
from lab.fleet import POLL, Fleet, Freezer, Programs, Timeout, until
from lab.ledger import Row as LedgerRow
from lab.ledger import rows_in
from lab.proof.audit import Evidence, Nemesis, deliveries, judge, judge_effects, recoveries
from lab.proof.line import Line
from lab.proof.soak_settings import LEASE, TICK, celery, doom_file, skew_file
from lab.proof.table import PLAIN, Row
from lab.proof.targets import TARGETS, Site, start
from lab.proof.verdicts import PROMISES as PROMISED
from lab.proof.verdicts import Promise, Tally, Verdict
from lab.servers import IMPATIENT

WORKERS = ("soak-0", "soak-1")
BEATS = ("beat-0", "beat-1")
PUBLISHER = "publisher"
CHILDREN = 8  # enough to keep the queue short while half of them are dead, stopped or starting
QUEUE = "soak"
RATE = 4.0
"""Operations per second, those of the control included."""

QUIET = 5.0  # seconds between two lines of progress
EXIT, EXIT_TAKES = "worker ended by itself", 10.0
"""kombu cannot return a message whose visibility timeout is over, and then the worker ends (celery/kombu)."""
INFINITY = float("inf")
STARTS_AFTER = 10.0
"""Seconds after the start of the workers at which the publisher begins: as long as they take, about."""

PATIENCE = 3.0
"""Seconds for which one tries to kill a worker while it waits for a message."""

START_TIMEOUT = 120.0
DRAIN_TIMEOUT = 900.0
"""Seconds. A claim made under a clock that is minutes ahead holds others off for those minutes, if its owner
dies before its first renewal."""

GRACE_MS = 1_000
"""The default of a policy: nobody takes over earlier after the end of a lease."""

Progress = Callable[[str], None]
"""Told how far it is, in one line."""

BARE, SCHEDULED = "bare", "tick"
"""The task of plain Celery; and that of the schedule."""

PROMISES = {
    "keyed": PROMISED["exactly once"],
    "plain": PROMISED["at least once"],
    "refuse": PROMISED["at most once"],
    SCHEDULED: PROMISED["exactly once"],
}
"""By task of `soak_app`, what is promised for its effect."""

CAMPAIGNS = {
    "keyed": "rerun, effect honours a key",
    "plain": "rerun, plain effect, repeated only where hit",
    "refuse": "refuse",
    SCHEDULED: "ticks of two beats, effect honours a key",
    BARE: "plain effect",
}

_LOADED = (*(task for task in PROMISES if task != SCHEDULED), BARE)
"""The tasks that somebody publishes, in turns."""


class Kind(StrEnum):
    """What a nemesis does."""

    KILL_CHILD = "child killed"
    KILL_WORKER = "worker killed"
    STOP_CHILD = "child stopped for 3 leases"
    STOP_WORKER = "worker stopped for 3 leases"
    SKEW_SECONDS = "clock off by seconds"
    SKEW_MINUTES = "clock off by minutes"
    REFUSE = "store refuses"
    HANG = "store and broker hang"
    LOSE_REPLIES = "reply lost"
    LOSE_REQUESTS = "request lost"
    KILL_STORE = "store killed and restarted"
    KILL_BEAT = "beat killed"
    KILL_PUBLISHER = "publisher killed before its message"


@dataclass(frozen=True, slots=True)
class _Draw:
    """How often a kind strikes in one round, which is shuffled, so that short campaigns meet every kind, too.

    Args:
        seconds: The bounds of how long it lasts.
        skew: The bounds, in milliseconds, by which a clock is set wrong, in either direction.
        ends: Whether somebody has to end it.
    """

    weight: int
    seconds: tuple[float, float] = (0, 0)
    skew: tuple[int, int] = (0, 0)
    ends: bool = False


_STOPPED = (3 * LEASE, 3 * LEASE + 1)
_DRAWS = {
    Kind.KILL_CHILD: _Draw(6),
    Kind.KILL_WORKER: _Draw(2),
    Kind.STOP_CHILD: _Draw(2, _STOPPED),
    Kind.STOP_WORKER: _Draw(1, _STOPPED),
    Kind.SKEW_SECONDS: _Draw(2, (4, 15), (500, 10_000), ends=True),
    Kind.SKEW_MINUTES: _Draw(2, (4, 15), (60_000, 180_000), ends=True),
    Kind.REFUSE: _Draw(2, (1, 8), ends=True),
    Kind.HANG: _Draw(1, (1, 6)),
    Kind.LOSE_REPLIES: _Draw(3),
    Kind.LOSE_REQUESTS: _Draw(1),
    Kind.KILL_STORE: _Draw(6, (0, 2), ends=True),
    Kind.KILL_BEAT: _Draw(2),
    Kind.KILL_PUBLISHER: _Draw(4),
}

BROKERS = {"sqs": "SQS", "redis": "Redis", "rabbitmq": "RabbitMQ"}
"""By name, as the table prints it."""

_OF_SERVERS = {
    *(Kind.KILL_STORE, Kind.REFUSE, Kind.LOSE_REPLIES, Kind.LOSE_REQUESTS),
    *(Kind.SKEW_SECONDS, Kind.SKEW_MINUTES),
}
STORES: Mapping[str, frozenset[Kind]] = {
    "dynamodb": frozenset(Kind) - {Kind.KILL_STORE},
    **dict.fromkeys(("redis", "postgres", "mariadb"), frozenset(Kind)),
    "sqlite": frozenset(Kind) - _OF_SERVERS,
}
"""By store, what can be done to it and its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One message to publish."""

    at: float
    task: str
    operation: str
    task_id: str
    seconds: float
    is_once: bool

    @property
    def task_name(self) -> str:
        return f"lab.proof.soak_app.{self.task}"

    @property
    def arguments(self) -> dict[str, Any]:
        return {"operation": self.operation, "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One thing to do to the workers.

    Args:
        at: When, in seconds from the start.
        seconds: For how long, where it lasts.
        skew: Milliseconds by which a clock is set wrong.
        draw: From 0 to 1; chooses among whoever can be hit.
    """

    at: float
    kind: Kind
    seconds: float
    skew: int
    draw: float

    def among(self, items: Sequence[Any]) -> Any:
        return items[int(self.draw * len(items))]


@dataclass(frozen=True, slots=True)
class Plan:
    """Load and nemeses of one campaign."""

    publications: tuple[Publication, ...]
    strikes: tuple[Strike, ...]

    @property
    def promises(self) -> dict[str, Promise]:
        """By operation, what is promised for its effect."""
        return {each.operation: PROMISES[each.task] for each in self.publications if each.task in PROMISES}

    @property
    def published_once(self) -> list[Publication]:
        """What the publisher publishes that publishes once."""
        return [each for each in self.publications if each.is_once]

    @property
    def bare(self) -> set[str]:
        return {each.operation for each in self.publications if each.task == BARE}


_NAMES_KEY = {"claimed", "conflicted", "replayed", "outcome_unknown"}
"""Rows that tell an operation's key."""


def plan(minutes: float, seed: int, store: str = "dynamodb") -> Plan:
    """The load and the nemeses that a seed chooses for a store."""
    chance = random.Random(seed)
    return Plan(
        tuple(sorted(_publications(minutes * 60, chance), key=lambda each: each.at)),
        tuple(_strikes(minutes * 60, chance, STORES[store])),
    )


def _publications(seconds: float, chance: random.Random) -> Iterator[Publication]:
    for number in range(round(seconds * RATE)):
        task = _LOADED[number % len(_LOADED)]
        first = uuid.UUID(int=chance.getrandbits(128)).hex
        # Every twentieth outlives lease and visibility timeout. Not so of plain Celery: nobody holds its message, and
        # SQS deletes none that came again meanwhile, so a long body would run again and again for ever.
        bounds = chance.choices(((0.02, 0.4), (1, 4), (11, 14)), (80, 15, 5))[0] if task != BARE else (0.02, 0.4)
        original = Publication(
            at=number / RATE,
            task=task,
            operation=f"{task}-{number:05}",
            task_id=first,
            seconds=round(chance.uniform(*bounds), 3),
            is_once=task != BARE and number // len(_LOADED) % 2 == 1,
        )
        yield original
        for _ in range(chance.choices((0, 1, 2), (5, 4, 1))[0]):
            # The same message again, as a broker does it, or another with the same intent, as people do it.
            again = chance.choice((first, uuid.UUID(int=chance.getrandbits(128)).hex))
            later = chance.choice((0.0, chance.uniform(0, 2), chance.uniform(5, 20)))
            yield replace(original, at=original.at + later, task_id=again)


def _strikes(seconds: float, chance: random.Random, kinds: Collection[Kind]) -> Iterator[Strike]:
    at = 2.0
    while True:
        round_ = [kind for kind, draw in _DRAWS.items() if kind in kinds for _ in range(draw.weight)]
        chance.shuffle(round_)
        for kind in round_:
            if at >= seconds:
                return
            draw = _DRAWS[kind]
            skew = chance.choice((-1, 1)) * round(chance.uniform(*draw.skew))
            yield Strike(at=at, kind=kind, seconds=chance.uniform(*draw.seconds), skew=skew, draw=chance.random())
            at += chance.uniform(1, 4)


def run(
    minutes: float,
    seed: int,
    progress: Progress,
    folder: Path | None = None,
    store: str = "dynamodb",
    broker: str = "sqs",
) -> list[Row]:
    """Run one campaign: a row per task, the last one of the control.

    Raises:
        Timeout: The workers did not start.
    """
    place = folder or Path(tempfile.mkdtemp(prefix="celery-idempotent-soak-"))
    place.mkdir(parents=True, exist_ok=True)
    is_kept = True
    try:
        rows, verdicts = _campaign(minutes, seed, place, progress, store, broker)
        for verdict in verdicts:
            for rule in verdict.problems:
                progress(f"BROKEN {verdict.task} ({verdict.promise}): {rule}")
        is_kept = folder is not None or any(each.problems for each in verdicts)
        return rows
    finally:
        if is_kept:
            progress(f"ledgers and logs are in {place}")
        else:
            shutil.rmtree(place, ignore_errors=True)


def _campaign(
    minutes: float, seed: int, folder: Path, progress: Progress, store: str, broker: str
) -> tuple[list[Row], list[Verdict]]:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        aws = stack.enter_context(EmbeddedAws())
        queues: Any = aws
        if broker != "sqs":
            other: Any = EmbeddedRedis() if broker == "redis" else EmbeddedRabbitMQ(settings=IMPATIENT)
            queues = stack.enter_context(other)
        site = Site(aws.store_url("soak")) if store == "dynamodb" else stack.enter_context(start(store))
        opened = stack.enter_context(contextlib.closing(open_store(site.url)))
        opened.provision()
        address = urlsplit(site.url)
        line = Line(str(address.hostname), address.port or 0, r"proof\.soak_app\.(\w+)") if address.port else None
        if line:
            stack.enter_context(line)
        freezer = Freezer()
        stack.callback(freezer.thaw)
        settings = Settings(
            broker_url=queues.url if broker == "redis" else queues.broker_url,
            store_url=line.on_the_way_to(site.url) if line else site.url,
            folder=folder,
            queue=QUEUE,
        )
        environ = settings.environ()
        fleet = Fleet("lab.proof.soak_app", WORKERS, children=CHILDREN, environ=environ, folder=folder)
        stack.enter_context(fleet)
        senders = stack.enter_context(_Senders((minutes, seed, store), environ=environ, folder=folder))
        planned = plan(minutes, seed, store)
        soak = _Soak(planned, {aws, queues}, site, opened, line, freezer, fleet, senders, settings, progress)
        evidence = soak.run()
    verdicts = judge(evidence)
    common: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "seed": seed, "extra_requests": None}
    common["faults"] = dict(Counter(nemesis.kind for nemesis in evidence.nemeses))
    bare = judge_effects(dict.fromkeys(planned.bare, PROMISED["exactly once"]), evidence.rows)
    hit = {each.operation for each in deliveries(evidence.rows) if any(map(each.is_hit_by, evidence.nemeses))}
    bare = [replace(each, faults={"hit": each.task in hit}) for each in bare]

    def row(task: str, found: Iterable[Verdict], **more: Any) -> Row:
        tally = Tally()
        for verdict in found:
            tally.add(verdict)
        what = Counter(each.what for each in evidence.rows if each.task == task)
        campaign = f"soak on {BROKERS[broker]}: {CAMPAIGNS[task]}, {minutes:g} min"
        counted = {"deliveries": what["delivery"], "takeovers": what["taken_over"]}
        counted["not_published"] = what["publish_skipped"]
        (one,) = tally.rows(store=TARGETS[store].label, campaign=campaign, **common)
        return replace(one, **{**counted, **more})

    def ours(task: str) -> Row:
        found = [each for each in verdicts if each.task.startswith(task)]
        extra = line and round(soak.requests[task] / len(found) - 2, 2)
        healed = line and line.healed.get(task, 0)
        return row(task, found, healed=healed, recovery=_recovery(evidence, task), extra_requests=extra)

    return [*map(ours, PROMISES), row(BARE, bare, system=PLAIN, store="none", healed=None)], verdicts


def _recovery(evidence: Evidence, task: str) -> tuple[float, float, float] | None:
    kills = [each for each in evidence.nemeses if each.kind in {Kind.KILL_CHILD, Kind.KILL_WORKER}]
    took = [each / LEASE for each in sorted(recoveries(evidence, kills, task))]
    if not took:
        return None
    return round(took[len(took) // 2], 2), round(took[int(len(took) * 0.95)], 2), round(took[-1], 2)


class _Senders(Programs):
    """The beats, and the publisher of what is published once; `planned` is minutes, seed and store of the plan."""

    def __init__(self, planned: tuple[float, int, str], *, environ: Mapping[str, str], folder: Path) -> None:
        super().__init__((*BEATS, PUBLISHER), environ=environ, folder=folder)
        self._arguments = (*map(str, planned), str(time.time() + STARTS_AFTER))

    def command(self, name: str) -> Sequence[str]:
        if name == PUBLISHER:
            return ("lab.proof.soak_publisher", *self._arguments)
        scheduler = ("--scheduler", "celery_idempotent.beat:PersistentScheduler")
        files = ("--schedule", str(self.folder / name), "--pidfile=", "--loglevel", "WARNING")
        return ("celery", "-A", "lab.proof.soak_app", "beat", *scheduler, *files)


@dataclass
class _Soak:
    """One campaign while it runs."""

    planned: Plan
    hosts: set[Server]
    site: Site
    store: Store
    line: Line | None
    freezer: Freezer
    fleet: Fleet
    senders: _Senders
    settings: Settings
    progress: Progress
    nemeses: list[Nemesis] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    _skewed: dict[str, Strike] = field(default_factory=dict)
    _under_way: dict[Strike, tuple[float, contextlib.ExitStack]] = field(default_factory=dict)
    _killed: set[str] = field(default_factory=set)
    _shown: float = -INFINITY

    def run(self) -> Evidence:
        """Strike, quiet down, deliver everything once more."""
        with self._publisher() as publish:
            until(self._is_ready, "the workers to start", START_TIMEOUT)
            self._play(publish)
            self._heal()
            until(self._is_published, "the publisher to end", DRAIN_TIMEOUT)
            scheduled_until = time.time()
            self.senders.stop()
            self._drain("until the queue is empty")
            if self.line:
                self.requests.update(self.line.by_task)
            drained = self._records()
            self._deliver_once_more(publish)
            self._drain("after one more delivery of everything")
        return Evidence(
            promises=self.planned.promises | ticks(self._rows(), scheduled_until),
            rows=self._rows(),
            nemeses=self.nemeses,
            drained=drained,
            final=self._records(),
        )

    @contextlib.contextmanager
    def _publisher(self) -> Iterator[Callable[[Publication], None]]:
        app = Celery(set_as_current=False)
        app.conf.update(celery(self.settings))
        with app.producer_or_acquire() as producer:

            def publish(each: Publication) -> None:
                app.send_task(each.task_name, kwargs=each.arguments, task_id=each.task_id, producer=producer)

            yield publish
        app.close()

    def _play(self, publish: Callable[[Publication], None]) -> None:
        agenda = [(each.at, partial(publish, each)) for each in self.planned.publications if not each.is_once]
        agenda += [(each.at, partial(self._strike, each)) for each in self.planned.strikes]
        ended = [each for each in self.planned.strikes if _DRAWS[each.kind].ends]
        agenda += [(each.at + each.seconds, partial(self._end, each)) for each in ended]
        agenda.sort(key=lambda each: each[0])
        started = time.monotonic()
        for at, act in agenda:
            while (early := started + at - time.monotonic()) > 0:
                time.sleep(min(early, POLL))
                self._supervise()
            act()
            self._show(f"{time.monotonic() - started:.0f} of {agenda[-1][0]:.0f} s")

    def _deliver_once_more(self, publish: Callable[[Publication], None]) -> None:
        of_ours = {each.operation: each for each in self.planned.publications if each.task != BARE}
        for each in of_ours.values():
            publish(replace(each, task_id=uuid.uuid4().hex))
            self._show("delivering everything once more")

    def _strike(self, strike: Strike) -> None:
        worker = strike.among(self.fleet.names)
        match strike.kind:
            case Kind.KILL_CHILD | Kind.STOP_CHILD:
                pid = self._busy_child(strike)
                if pid is None:
                    return
                if strike.kind is Kind.KILL_CHILD:
                    os.kill(pid, signal.SIGKILL)
                else:
                    self.freezer.freeze(strike.seconds, pid)
                self._note(strike.kind, strike.seconds, pids={pid})
            case Kind.KILL_WORKER:
                if self._fetches_nothing(worker):
                    self._killed.add(worker)
                    self._note(strike.kind, pids=self._pool(worker))
                    os.killpg(self.fleet.group(worker), signal.SIGKILL)
            case Kind.STOP_WORKER:
                self.freezer.freeze(strike.seconds, -self.fleet.group(worker))
                self._note(strike.kind, strike.seconds, pids=self._pool(worker))
            case Kind.SKEW_SECONDS | Kind.SKEW_MINUTES:
                self._skewed[worker] = strike
                self._set_clock(worker, strike.skew, strike.kind)
            case Kind.REFUSE:
                self._under_way[strike] = (time.time(), contextlib.ExitStack())
                self._under_way[strike][1].enter_context(self._line.down())
            case Kind.HANG:
                self._hang(strike)
            case Kind.LOSE_REPLIES | Kind.LOSE_REQUESTS:
                self._line.lose("reply lost" if strike.kind is Kind.LOSE_REPLIES else "request lost")
                self._note(strike.kind, pids=())
            case Kind.KILL_STORE:
                if not any(each.kind is Kind.KILL_STORE for each in self._under_way):
                    assert self.site.server is not None
                    self._under_way[strike] = (time.time(), contextlib.ExitStack())
                    self._under_way[strike][1].callback(self.site.server.revive)
                    self.site.server.kill()
            case Kind.KILL_BEAT:
                if self._named("beating") == set(BEATS):
                    os.killpg(self.senders.group(strike.among(BEATS)), signal.SIGKILL)
                    self._note(strike.kind, pids=())
            case Kind.KILL_PUBLISHER:
                doom_file(self.settings.folder).touch()
                self._note(strike.kind, pids=())

    def _fetches_nothing(self, worker: str) -> bool:
        """Whether the worker may be killed; one that fetches from a Redis is stopped while it waits for a message."""
        url, pid = self.settings.broker_url, self.fleet.group(worker)
        if not url.startswith("redis") or not self.fleet.owns(pid):
            return True

        def caught() -> bool:
            os.kill(pid, signal.SIGSTOP)
            if waits_no_more(url, pid):
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        try:
            until(caught, "the worker to wait for a message", PATIENCE)
        except Timeout:
            return False
        return True

    def _end(self, strike: Strike) -> None:
        if strike in self._under_way:
            began, lasting = self._under_way.pop(strike)
            lasting.close()
            self.nemeses.append(Nemesis(kind=strike.kind, began=began, ended=time.time()))
        for worker in [worker for worker, latest in self._skewed.items() if latest is strike]:
            del self._skewed[worker]
            self._set_clock(worker, 0, "clock set right again")

    def _hang(self, strike: Strike) -> None:
        """Stop store and broker; a store without a server hangs if somebody keeps its file locked."""
        self.freezer.freeze(strike.seconds, *(pid for host in self.hosts for pid in host.pids))
        if self.site.server:
            self.freezer.freeze(strike.seconds, *self.site.server.pids)
        elif self.line is None:
            _keep_locked(self.site.url.removeprefix("sqlite:///"), strike.seconds)
        self._note(strike.kind, strike.seconds)

    @property
    def _line(self) -> Line:
        assert self.line is not None
        return self.line

    def _set_clock(self, worker: str, skew: int, kind: str) -> None:
        path = skew_file(self.settings.folder, worker)
        fresh = path.with_suffix(".new")
        fresh.write_text(str(skew))
        fresh.replace(path)
        now = time.time()
        self.nemeses.append(Nemesis(kind=kind, began=now, ended=now, skewed=worker))

    def _heal(self) -> None:
        for strike in self.planned.strikes:
            self._end(strike)
        self.freezer.thaw()

    def _note(self, kind: str, seconds: float = 0.0, pids: Iterable[int] | None = None) -> None:
        now = time.time()
        who = None if pids is None else frozenset(pids)
        self.nemeses.append(Nemesis(kind=kind, began=now, ended=now + seconds, pids=who))

    def _busy_child(self, strike: Strike) -> int | None:
        """A pool process with a delivery in it, or any, if there is no such."""
        rows = self._rows()
        busy = sorted({each.pid for each in deliveries(rows) if each.ended == INFINITY})
        idle = sorted({row.pid for row in rows if row.what == "child"})
        for pids in (busy, idle):
            alive = [pid for pid in pids if self.fleet.owns(pid)]
            if alive:
                return int(strike.among(alive))
        return None

    def _pool(self, worker: str) -> frozenset[int]:
        return frozenset(
            row.pid for row in self._rows() if row.what == "child" and row.task == worker and self.fleet.owns(row.pid)
        )

    def _supervise(self) -> None:
        self.senders.restart_dead()
        for worker in self.fleet.restart_dead():
            if worker in self._killed:
                self._killed.discard(worker)
                continue
            pids = frozenset(row.pid for row in self._rows() if row.what == "child" and row.task == worker)
            now = time.time()
            self.nemeses.append(Nemesis(kind=EXIT, began=now - EXIT_TAKES, ended=now, pids=pids))

    def _drain(self, where: str) -> None:
        """Wait until nothing is queued, executed or leased."""
        try:
            until(partial(self._is_quiet, where), where, DRAIN_TIMEOUT)
        except Timeout:
            self.progress(f"not quiet after {DRAIN_TIMEOUT:g} s")

    def _is_quiet(self, where: str) -> bool:
        self._supervise()
        self._show(where)
        if self._is_queued():
            return False
        busy = any(each.ended == INFINITY and self.fleet.owns(each.pid) for each in deliveries(self._rows()))
        return not busy and not any(map(self._is_leased, self.store.scan(status=Status.IN_PROGRESS)))

    def _is_queued(self) -> bool:
        # What RabbitMQ tells is up to a second old.
        looks = 8 if self.settings.broker_url.startswith("amqp") else 1
        for _ in range(looks):
            if queue_length(self.settings.broker_url, QUEUE):
                return True
            time.sleep(POLL)
        return False

    def _is_leased(self, record: Record) -> bool:
        return record.lease_until + GRACE_MS > self.store.now()

    def _records(self) -> dict[str, Record]:
        operation = {row.key: row.order for row in self._rows() if row.what in _NAMES_KEY}
        return {operation[record.key]: record for record in self.store.scan() if record.key in operation}

    def _is_published(self) -> bool:
        self._supervise()
        return sum(row.what == "published" for row in self._rows()) >= len(self.planned.published_once)

    def _named(self, what: str) -> set[str]:
        """The programs that have said so and are alive."""
        said = [row for row in self._rows() if row.what == what]
        return {row.task for row in said if self.senders.owns(row.pid) or self.fleet.owns(row.pid)}

    def _is_ready(self) -> bool:
        return self._named("ready") == set(self.fleet.names)

    def _show(self, where: str) -> None:
        if time.monotonic() - self._shown >= QUIET:
            self._shown = time.monotonic()
            what = Counter(row.what for row in self._rows())
            self.progress(f"{where}; {what['delivery']} deliveries, {len(self.nemeses)} strikes")

    def _rows(self) -> list[LedgerRow]:
        return rows_in(self.settings.folder)


def ticks(rows: Iterable[LedgerRow], end: float) -> dict[str, Promise]:
    """What is promised for each tick, from the first that came on, whether it came or not.

    What was due shortly before ``end``, when the beats were stopped, may not have been sent.
    """
    sent = [row.order for row in rows if row.what == "delivery" and row.task == SCHEDULED]
    first = min((datetime.fromisoformat(each.partition("@")[2]).timestamp() for each in sent), default=end)
    due = (datetime.fromtimestamp(at, UTC).isoformat() for at in range(round(first), int(end - TICK), TICK))
    return dict.fromkeys([*sent, *(f"{SCHEDULED}@{each}" for each in due)], PROMISES[SCHEDULED])


def waits_no_more(url: str, pid: int) -> bool:
    """Whether a stopped process waited for a message of a Redis; if so it gets none any more."""
    ports = {each.laddr.port for each in psutil.Process(pid).net_connections()}
    with Redis.from_url(url, decode_responses=True) as client:
        ours = [each for each in client.client_list() if int(each["addr"].rpartition(":")[2]) in ports]
        return any(client.client_unblock(int(each["id"])) for each in ours)


def _keep_locked(path: str, seconds: float) -> None:
    """Hold the lock on an SQLite file for some seconds, as a backup or a person's shell does."""

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)

    threading.Thread(target=hold, daemon=True).start()
