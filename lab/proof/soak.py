"""Real workers under real faults for minutes: nemeses strike, everything quiets down, the audit judges.

Two prefork workers take tasks from SQS, Redis or RabbitMQ, some published twice, some longer than the broker waits for
them. Messages are held, and dead owners are replaced at once. A seed chooses load and nemeses: SIGKILL of a pool
process, of a whole worker, or of the store's server, which is started again on its data; SIGSTOP for three leases; a
store that refuses, a store and a broker that hang, requests and replies that get lost. When a strike lands is up to
the machine, so a seed repeats what was tried and not every interleaving. A task of plain Celery is beside it, as a
control.

SQS and DynamoDB are held in memory (MiniStack), so they are stopped and never restarted; no more are RabbitMQ and the
Redis that is a broker. No whole worker is killed on Redis: kombu loses the message that it is fetching.

`celery -A lab.proof.soak worker`, configured by the environment of `lab.demo.settings`, executes.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from celery import Celery
from celery.signals import task_failure, task_success

from celery_idempotent import IdempotentTask, current_attempt, open_store
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing.stores import Fault
from lab.demo.gateway import Gateway
from lab.demo.queues import queue_length
from lab.demo.settings import BACKOFF, LEASE, Settings
from lab.fleet import POLL, Fleet, Freezer, Timeout, until
from lab.ledger import Ledger, rows_in
from lab.ledger import Row as LedgerRow
from lab.proof.audit import Evidence, Nemesis, deliveries, judge, judge_effects
from lab.proof.jobs import Progress
from lab.proof.recorder import record_if_wanted
from lab.proof.table import PLAIN, Row
from lab.proof.targets import TARGETS
from lab.proof.verdicts import PROMISES as PROMISED
from lab.proof.verdicts import Result, Verdict, rows_of
from lab.proxy import Proxy
from lab.servers import Servers
from lab.short_delays import ShortDelays
from lab.witness import note, observe

WORKERS = ("soak-0", "soak-1")
CHILDREN = 8  # enough to keep the queue short while half of them are dead, stopped or starting
QUEUE = "soak"
RATE = 4.0  # operations per second, those of the control included
VISIBILITY_TIMEOUT = 4  # seconds: most messages would come again that wait behind others, if nobody held them
QUIET = 5.0  # seconds between two lines of progress
EXIT, EXIT_TAKES = "worker ended by itself", 10.0
"""kombu cannot return a message whose visibility timeout is over, and then the worker ends (celery/kombu)."""

START_TIMEOUT, DRAIN_TIMEOUT = 120.0, 900.0
GRACE_MS = 1_000  # the default of a policy: nobody takes over earlier after the end of a lease
BARE = "bare"  # the task of plain Celery
PROMISES = {"keyed": PROMISED["exactly once"], "plain": PROMISED["at least once"], "refuse": PROMISED["at most once"]}
"""By task, what is promised for its effect."""

BROKERS = {"sqs": "SQS", "redis": "Redis", "rabbitmq": "RabbitMQ"}  # by name, as the table prints it


class Kind(StrEnum):
    """What a nemesis does."""

    KILL_CHILD = "child killed"
    KILL_WORKER = "worker killed"
    STOP_CHILD = "child stopped for 3 leases"
    STOP_WORKER = "worker stopped for 3 leases"
    REFUSE = "store refuses"
    HANG = "store and broker hang"
    LOSE_REPLIES = "reply lost"
    LOSE_REQUESTS = "request lost"
    KILL_STORE = "store killed and restarted"


_STOPPED = (3 * LEASE, 3 * LEASE + 1)
_DRAWS: Mapping[Kind, tuple[int, tuple[float, float]]] = {
    Kind.KILL_CHILD: (6, (0, 0)),
    Kind.KILL_WORKER: (2, (0, 0)),
    Kind.STOP_CHILD: (2, _STOPPED),
    Kind.STOP_WORKER: (1, _STOPPED),
    Kind.REFUSE: (2, (1, 8)),
    Kind.HANG: (1, (1, 6)),
    Kind.LOSE_REPLIES: (3, (0, 0)),
    Kind.LOSE_REQUESTS: (1, (0, 0)),
    Kind.KILL_STORE: (6, (0, 2)),
}
"""How often a kind strikes in one round, which is shuffled, and the bounds of how many seconds it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One message to publish."""

    at: float
    task: str
    operation: str
    task_id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One thing to do, ``at`` so many seconds from the start; ``draw``, from 0 to 1, chooses whom it hits."""

    at: float
    kind: Kind
    seconds: float
    draw: float

    def among(self, items: Sequence[Any]) -> Any:
        return items[int(self.draw * len(items))]


class Plan(NamedTuple):
    """Load and nemeses of one campaign."""

    publications: tuple[Publication, ...]
    strikes: tuple[Strike, ...]

    def operations(self, *tasks: str) -> dict[str, Publication]:
        return {each.operation: each for each in self.publications if each.task in tasks}


def kinds_of(store: str, broker: str) -> set[Kind]:
    absent = {Kind.KILL_STORE} if store == "dynamodb" else set()
    return set(Kind) - absent - ({Kind.KILL_WORKER} if broker == "redis" else set())


def plan(minutes: float, seed: int, store: str, broker: str) -> Plan:
    chance = random.Random(seed)
    publications = sorted(_publications(minutes * 60, chance), key=lambda each: each.at)
    return Plan(tuple(publications), tuple(_strikes(minutes * 60, chance, kinds_of(store, broker))))


def _publications(seconds: float, chance: random.Random) -> Iterator[Publication]:
    tasks = (*PROMISES, BARE)
    for number in range(round(seconds * RATE)):
        task = tasks[number % len(tasks)]
        first = uuid.UUID(int=chance.getrandbits(128)).hex
        # Every twentieth outlives lease and visibility timeout. Not so of plain Celery: nobody holds its message, and
        # SQS deletes none that came again meanwhile, so a long body would run again and again for ever.
        bounds = chance.choices(((0.02, 0.4), (1, 4), (11, 14)), (80, 15, 5))[0] if task != BARE else (0.02, 0.4)
        length = round(chance.uniform(*bounds), 3)
        at, operation = number / RATE, f"{task}-{number:05}"
        yield Publication(at=at, task=task, operation=operation, task_id=first, seconds=length)
        for _ in range(chance.choices((0, 1, 2), (5, 4, 1))[0]):
            # The same message again, as a broker does it, or another with the same intent, as people do it.
            again = chance.choice((first, uuid.UUID(int=chance.getrandbits(128)).hex))
            later = at + chance.choice((0.0, chance.uniform(0, 2), chance.uniform(5, 20)))
            yield Publication(at=later, task=task, operation=operation, task_id=again, seconds=length)


def _strikes(seconds: float, chance: random.Random, kinds: set[Kind]) -> Iterator[Strike]:
    at = 2.0
    while True:
        round_ = [kind for kind, (weight, _) in _DRAWS.items() if kind in kinds for _ in range(weight)]
        chance.shuffle(round_)
        for kind in round_:
            if at >= seconds:
                return
            lasts = chance.uniform(*_DRAWS[kind][1])
            yield Strike(at=at, kind=kind, seconds=lasts, draw=chance.random())
            at += chance.uniform(1, 4)


class Line(Proxy):
    """Between workers and a store: forwards, and cuts the next write that names a task of ours where it is told to."""

    _WRITE = re.compile(rb"soak\.\w+")

    def __init__(self, host: str, port: int) -> None:
        super().__init__(port, host=host)
        self._planned: list[Fault] = []

    def lose(self, what: Fault) -> None:
        """Cut the next write's connection before the server gets it, or when the server has answered it."""
        with self._lock:
            self._planned.append(what)

    def decide(self, request: bytes, before: bytes) -> Fault:
        return self._planned.pop(0) if self._planned and self._WRITE.search(request) else "none"


def run(
    minutes: float,
    seed: int,
    progress: Progress,
    folder: Path | None = None,
    store: str = "dynamodb",
    broker: str = "sqs",
) -> list[Row]:
    """A row per task, the last one of the control."""
    place = folder or Path(tempfile.mkdtemp(prefix="celery-idempotent-soak-"))
    place.mkdir(parents=True, exist_ok=True)
    found = _campaign(minutes, seed, place, progress, store, broker)
    for verdict in found.problems:
        progress(f"BROKEN {verdict.task} ({verdict.promise}): {'; '.join(verdict.problems)}")
    if found.problems or folder:
        progress(f"ledgers and logs are in {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    return found.rows


def _campaign(minutes: float, seed: int, folder: Path, progress: Progress, store: str, broker: str) -> Result:
    began, planned = time.monotonic(), plan(minutes, seed, store, broker)
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Servers(store, broker, folder))
        opened = stack.enter_context(contextlib.closing(open_store(servers.store_url)))
        opened.provision()
        address = urlsplit(servers.store_url)
        line = stack.enter_context(Line(str(address.hostname), address.port or 0))
        freezer = Freezer()
        stack.callback(freezer.thaw)
        store_url = line.on_the_way_to(servers.store_url)
        settings = Settings(broker_url=servers.broker_url, store_url=store_url, folder=folder, queue=QUEUE)
        environ = settings.environ()
        fleet = Fleet("lab.proof.soak", WORKERS, children=CHILDREN, environ=environ, folder=folder)
        stack.enter_context(fleet)
        evidence = _Soak(planned, servers, opened, line, freezer, fleet, settings, progress).run()
    verdicts = judge(evidence)
    common: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "seed": seed}
    common["faults"] = dict(Counter(nemesis.kind for nemesis in evidence.nemeses))
    bare = judge_effects(dict.fromkeys(planned.operations(BARE), PROMISED["exactly once"]), evidence.rows)
    hit = {each.operation for each in deliveries(evidence.rows) if any(map(each.is_hit_by, evidence.nemeses))}
    bare = [replace(each, faults={"hit": each.task in hit}) for each in bare]

    def row(task: str, found: Iterable[Verdict], **named: Any) -> Row:
        what = Counter(each.what for each in evidence.rows if each.task == task)
        campaign = f"soak on {BROKERS[broker]}: {task}, {minutes:g} min"
        (one,) = rows_of(found, campaign=campaign, **{"store": TARGETS[store].label, **common, **named})
        return replace(one, deliveries=what["delivery"], takeovers=what["taken_over"])

    ours = [row(task, [each for each in verdicts if each.task.startswith(task)]) for task in PROMISES]
    return Result(verdicts, [*ours, row(BARE, bare, system=PLAIN, store="none")])


@dataclass
class _Soak:
    """One campaign while it runs."""

    planned: Plan
    servers: Servers
    store: Store
    line: Line
    freezer: Freezer
    fleet: Fleet
    settings: Settings
    progress: Progress
    nemeses: list[Nemesis] = field(default_factory=list)
    _under_way: dict[Strike, contextlib.ExitStack] = field(default_factory=dict)
    _killed: set[str] = field(default_factory=set)
    _shown: float = -QUIET

    def run(self) -> Evidence:
        """Strike, quiet down, deliver everything once more."""
        app = Celery(set_as_current=False)
        app.conf.update(configuration(self.settings))
        with contextlib.closing(app), app.producer_or_acquire() as producer:

            def publish(each: Publication) -> None:
                arguments = {"operation": each.operation, "seconds": each.seconds}
                app.send_task(f"soak.{each.task}", kwargs=arguments, task_id=each.task_id, producer=producer)

            self.fleet.until_ready(START_TIMEOUT)
            self._play(publish)
            for strike in list(self._under_way):
                self._end(strike)
            self.freezer.thaw()
            self._drain("until the queue is empty")
            drained = self._records()
            for each in self.planned.operations(*PROMISES).values():
                publish(replace(each, task_id=uuid.uuid4().hex))
            self._drain("after one more delivery of everything")
        return Evidence(
            promises={each: PROMISES[of.task] for each, of in self.planned.operations(*PROMISES).items()},
            rows=self._rows(),
            nemeses=self.nemeses,
            drained=drained,
            final=self._records(),
        )

    def _play(self, publish: Callable[[Publication], None]) -> None:
        agenda = [(each.at, partial(publish, each)) for each in self.planned.publications]
        agenda += [(each.at, partial(self._strike, each)) for each in self.planned.strikes]
        agenda += [(each.at + each.seconds, partial(self._end, each)) for each in self.planned.strikes]
        agenda.sort(key=lambda each: each[0])
        started = time.monotonic()
        for at, act in agenda:
            while (early := started + at - time.monotonic()) > 0:
                time.sleep(min(early, POLL))
                self._supervise()
            act()
            self._show(f"{time.monotonic() - started:.0f} of {agenda[-1][0]:.0f} s")

    def _strike(self, strike: Strike) -> None:
        worker, kind = strike.among(WORKERS), strike.kind
        match kind:
            case Kind.KILL_CHILD | Kind.STOP_CHILD:
                if pid := self._busy_child(strike):
                    self._hit(strike, pid, {pid})
            case Kind.KILL_WORKER | Kind.STOP_WORKER:
                self._killed |= {worker} if kind is Kind.KILL_WORKER else set()
                self._hit(strike, -self.fleet.group(worker), filter(self.fleet.owns, self._pool(worker)))
            case Kind.HANG:
                self.freezer.freeze(strike.seconds, *self.servers.pids)
                self._note(kind, strike.seconds)
            case Kind.LOSE_REPLIES | Kind.LOSE_REQUESTS:
                self.line.lose("reply lost" if kind is Kind.LOSE_REPLIES else "request lost")
                self._note(kind, 0, ())
            case Kind.REFUSE:
                self._begin(strike).enter_context(self.line.down())
            case Kind.KILL_STORE if not any(each.kind is kind for each in self._under_way):
                assert self.servers.durable_store is not None
                self._begin(strike).callback(self.servers.durable_store.revive)
                self.servers.durable_store.kill()

    def _hit(self, strike: Strike, target: int, pids: Iterable[int]) -> None:
        """Kill or stop a process or a group ``-target``, and with it those pool processes."""
        self._note(strike.kind, strike.seconds, pids)
        if strike.kind in {Kind.KILL_CHILD, Kind.KILL_WORKER}:
            os.kill(target, signal.SIGKILL)
        else:
            self.freezer.freeze(strike.seconds, target)

    def _begin(self, strike: Strike) -> contextlib.ExitStack:
        """A strike that lasts until what this gives is closed."""
        began, self._under_way[strike] = time.time(), contextlib.ExitStack()
        self._under_way[strike].callback(lambda: self._note(strike.kind, 0, began=began))
        return self._under_way[strike]

    def _end(self, strike: Strike) -> None:
        self._under_way.pop(strike, contextlib.ExitStack()).close()

    def _note(self, kind: str, seconds: float, pids: Iterable[int] | None = None, began: float | None = None) -> None:
        now, who = time.time(), None if pids is None else frozenset(pids)
        self.nemeses.append(Nemesis(kind=kind, began=began or now, ended=now + seconds, pids=who))

    def _busy_child(self, strike: Strike) -> int | None:
        """A pool process with a delivery in it, or any, if there is no such."""
        for pids in ({each.pid for each in self._going_on()}, {row.pid for row in self._of("child")}):
            if alive := sorted(filter(self.fleet.owns, pids)):
                return int(strike.among(alive))
        return None

    def _pool(self, worker: str) -> frozenset[int]:
        return frozenset(row.pid for row in self._of("child") if row.task == worker)

    def _supervise(self) -> None:
        for worker in self.fleet.restart_dead():
            if worker in self._killed:
                self._killed.discard(worker)
                continue
            self._note(EXIT, 0, self._pool(worker), began=time.time() - EXIT_TAKES)

    def _drain(self, where: str) -> None:
        """Wait until nothing is queued, executed or leased."""
        try:
            until(partial(self._is_quiet, where), where, DRAIN_TIMEOUT)
        except Timeout:
            self.progress(f"not quiet after {DRAIN_TIMEOUT:g} s")

    def _is_quiet(self, where: str) -> bool:
        self._supervise()
        self._show(where)
        # What RabbitMQ tells is up to a second old.
        for _ in range(8 if self.settings.broker_url.startswith("amqp") else 1):
            if queue_length(self.settings.broker_url, QUEUE):
                return False
            time.sleep(POLL)
        leased = (each.lease_until + GRACE_MS > self.store.now() for each in self.store.scan(status=Status.IN_PROGRESS))
        return not any(self.fleet.owns(each.pid) for each in self._going_on()) and not any(leased)

    def _going_on(self) -> Iterator[Any]:
        return (each for each in deliveries(self._rows()) if each.ended == float("inf"))

    def _records(self) -> dict[str, Record]:
        operation = {row.key: row.order for row in self._rows() if row.key}
        return {operation[record.key]: record for record in self.store.scan() if record.key in operation}

    def _show(self, where: str) -> None:
        if time.monotonic() - self._shown >= QUIET:
            self._shown = time.monotonic()
            self.progress(f"{where}; {len(self._of('delivery'))} deliveries, {len(self.nemeses)} strikes")

    def _of(self, what: str) -> list[LedgerRow]:
        return [row for row in self._rows() if row.what == what]

    def _rows(self) -> list[LedgerRow]:
        return rows_in(self.settings.folder)


def configuration(settings: Settings) -> dict[str, Any]:
    """Of Celery, for everybody who may be the first to make a queue."""
    configuration = settings.celery() | {"idempotency_hold_messages": True}
    if "visibility_timeout" in configuration["broker_transport_options"]:
        configuration["broker_transport_options"]["visibility_timeout"] = VISIBILITY_TIMEOUT
    return configuration


class _Policy(ShortDelays):
    longest = 4_000


_RERUN = _Policy("operation", backoff=BACKOFF, max_takeovers=None)
_REFUSE = _Policy("operation", backoff=BACKOFF, on_takeover="refuse")
POLICIES = {"soak.keyed": _RERUN, "soak.plain": _RERUN, "soak.refuse": _REFUSE}


def _make_app(settings: Settings) -> Celery:
    """Three promises and a control, and a witness of everything."""
    app = Celery("soak", set_as_current=False)
    app.conf.update(configuration(settings))
    ledger, gateway = Ledger(settings.folder / "ledger.jsonl"), Gateway(Ledger(settings.folder / "bank.jsonl"))

    def body(task: Any, operation: str, seconds: float) -> str:
        time.sleep(seconds / 2)
        if task.name == "soak.keyed":
            attempt = current_attempt()
            key = attempt.effect_key("charge")
            gateway.charge(operation, idempotency_key=key, attempt=attempt.number, token=attempt.fencing_token)
        else:
            note(ledger, "effect", task)
        time.sleep(seconds / 2)
        return f"{operation} by {uuid.uuid4().hex}"  # different in every body: it shows whose result a caller was told

    record_if_wanted(settings.store_url)
    for name, rules in POLICIES.items():
        policy = replace(rules, lease=settings.lease)
        app.task(name=name, bind=True, shared=False, base=IdempotentTask, idempotent=policy)(body)
    app.task(name=f"soak.{BARE}", bind=True, shared=False)(body)

    def told(sender: Any, result: Any = "", exception: BaseException | None = None, **_: Any) -> None:
        """The caller is told a result, or a failure."""
        reference = type(exception).__name__ if exception else result
        note(ledger, "told failure" if exception else "told", sender, reference=reference)

    observe(ledger)
    for each in (task_success, task_failure):
        each.connect(told, weak=False)
    return app


if "LAB_FOLDER" in os.environ:
    app = _make_app(Settings.from_environ())
    app.set_current()
