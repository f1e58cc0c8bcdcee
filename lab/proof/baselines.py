"""The same load and the same faults on plain Celery, on its peers, on AWS Powertools, and on this library.

Every operation meets one fate: published or delivered twice, its child killed before or after the effect, a body that
outlives the visibility timeout, or a child that stands still for longer than any lease. The effect is a plain one, a
row in a ledger, except where the system's name says that it honours a key. Each system is set up as its own
documentation says.

`celery -A lab.proof.baselines worker`, configured by the environment of `lab.demo.settings` and `SYSTEM`, executes.
"""

import contextlib
import functools
import itertools
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from celery import Celery

from celery_idempotent import IdempotentTask, Policy, current_attempt, open_store
from lab.benchmarks.contenders import powertools
from lab.benchmarks.worker_app import Kind, base_of
from lab.demo.gateway import Gateway
from lab.demo.queues import queue_length
from lab.demo.settings import BACKOFF, LEASE, Settings
from lab.embedded import REGION, EmbeddedAws, EmbeddedRedis
from lab.fleet import Fleet, Freezer, Timeout, until
from lab.folders import temporary_folder
from lab.ledger import Ledger, is_first, rows_in
from lab.ledger import Row as LedgerRow
from lab.proof.audit import deliveries, judge_effects
from lab.proof.jobs import Progress
from lab.proof.table import Row
from lab.proof.verdicts import PROMISES, rows_of
from lab.witness import observe

SYSTEM, LOCKS = "BASELINE_SYSTEM", "BASELINE_LOCKS"
"""The environment variables that say under which system a worker runs the body, and the URL of its locks."""

EACH = 10  # operations of each fate
WORKERS = ("worker-0", "worker-1")
CHILDREN = 14  # enough that slow and stopped bodies keep nobody waiting
SLOW = 12.0  # seconds; longer than the visibility timeout and every lease that is not renewed
LONGEST_BODY = 15  # seconds that a body is said to take at most, where a system asks for it
STOPPED_FOR = LONGEST_BODY + 10
START_TIMEOUT = 120.0
DRAIN_TIMEOUT = 240.0
_ACCOUNT: dict[str, Any] = {"region_name": REGION, "aws_access_key_id": "test", "aws_secret_access_key": "test"}


class System(StrEnum):
    """Under what the body runs."""

    PLAIN = "plain Celery, acks_late"
    ONCE = Kind.ONCE.value
    SINGLETON = Kind.SINGLETON.value
    POWERTOOLS = "Powertools 3.37.0 in a task"
    OURS = "celery-idempotent, rerun"
    OURS_CHECKED = "celery-idempotent, rerun, ensure_owned() before the effect"
    OURS_KEYED = "celery-idempotent, rerun, effect honours a key"
    OURS_REFUSE = "celery-idempotent, refuse"


_PROMISES = {System.OURS_KEYED: "exactly once", System.OURS_REFUSE: "at most once"}
"""What is promised for the effect of an accepted message; at least once, where nothing is said here."""

_VARIANTS = {System.OURS_CHECKED: "ensure_owned() before the effect", System.OURS_KEYED: "effect honours a key"}
_STORES = {System.PLAIN: "none", System.ONCE: "Valkey", System.SINGLETON: "Valkey"}
"""How a system is used, where it can be used in several ways; and where it keeps its state, if not in DynamoDB."""


class Fate(StrEnum):
    """What happens to an operation."""

    DUPLICATED = "published or delivered twice"
    KILLED_BEFORE = "child killed before the effect"
    KILLED_AFTER = "child killed after the effect"
    SLOW = "body outlives the visibility timeout"
    STOPPED = "child stopped before the effect, longer than any lease"


def run(seed: int, progress: Progress, systems: Sequence[System] = tuple(System)) -> list[Row]:
    """Run the campaign on every system, one after the other: a row per system and fate; the seed orders the load."""
    with temporary_folder() as folder, EmbeddedAws() as aws, EmbeddedRedis() as locks:
        tried = (_campaign(system, seed, aws, locks.url, folder / system.name, progress) for system in systems)
        return list(itertools.chain.from_iterable(tried))


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
    system: System, seed: int, aws: EmbeddedAws, locks: str, folder: Path, progress: Progress
) -> Iterator[Row]:
    progress(system)
    began, load = time.monotonic(), _load(seed)
    # Every system starts with an empty table: the operations have the same names in all of them.
    queue = f"baselines-{system.name.lower().replace('_', '-')}"
    store = aws.endpoint if system is System.POWERTOOLS else aws.store_url(queue)
    if system is not System.POWERTOOLS:
        open_store(store).provision()
    settings = Settings(broker_url=aws.broker_url, store_url=store, folder=folder, queue=queue)
    environ = {**settings.environ(), SYSTEM: system, LOCKS: locks, "PYTHONWARNINGS": "ignore"}
    app = _make_app(system, settings, locks)
    fleet = Fleet("lab.proof.baselines", WORKERS, children=CHILDREN, environ=environ, folder=folder)
    with contextlib.ExitStack() as stack, contextlib.closing(app), fleet:
        freezer = Freezer()
        stack.callback(freezer.thaw)
        try:
            _Trial(load, settings, fleet, freezer, app).run()
        except Timeout:
            progress(f"{system}: not quiet after {DRAIN_TIMEOUT:g} s")
    rows, seconds = rows_in(folder), round(time.monotonic() - began, 1)
    for fate in Fate:
        yield _row(system, fate, load, rows, seed=seed, seconds=seconds)


@dataclass
class _Trial:
    """One system while it is tried."""

    load: Sequence[_Operation]
    settings: Settings
    fleet: Fleet
    freezer: Freezer
    app: Celery
    _later: dict[str, Callable[[], Any]] = field(default_factory=dict)
    _stopped: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Publish everything, strike, wait until the queue is empty; raises Timeout if it never is."""
        self.fleet.until_ready(START_TIMEOUT)
        for operation in self.load:
            self._publish(operation)
        until(self._is_over, "the queue to run empty", DRAIN_TIMEOUT)

    def _publish(self, operation: _Operation) -> None:
        arguments = {"operation": operation.id, "fate": operation.fate}
        first = uuid.uuid4().hex
        publish = partial(self.app.tasks["execute"].apply_async, kwargs=arguments)
        # Past apply_async, where some of them would refuse it: a broker does not ask.
        deliver = partial(self.app.send_task, "execute", kwargs=arguments, task_id=first)
        publish(task_id=first)
        how, _, when = operation.again.partition(" ")
        again = deliver if how == "delivered" else publish
        if when == "later":
            self._later[operation.id] = again
        elif when:
            again()

    def _is_over(self) -> bool:
        self.fleet.restart_dead()
        rows = rows_in(self.settings.folder)
        for row in rows:
            if row.what == "stop me" and row.order not in self._stopped and self.fleet.owns(row.pid):
                self._stopped.add(row.order)
                self.freezer.freeze(STOPPED_FOR, row.pid)
                (self.settings.folder / f"go-on-{row.order}").touch()
        for operation in {row.order for row in rows if row.what == "returned"} & self._later.keys():
            self._later.pop(operation)()
        # The queue can be empty while a copy whose message is gone still has its effect before it.
        busy = any(each.ended == float("inf") and self.fleet.owns(each.pid) for each in deliveries(rows))
        return not busy and not self._later and not queue_length(self.settings.broker_url, self.settings.queue)


def _row(
    system: System, fate: Fate, load: Sequence[_Operation], rows: Sequence[LedgerRow], *, seed: int, seconds: float
) -> Row:
    promise = PROMISES[_PROMISES.get(system, "at least once")]
    operations = {each.id: promise for each in load if each.fate is fate}
    here = [row for row in rows if row.order in operations]
    what = Counter(row.what for row in here)
    found = judge_effects(operations, here, {row.order for row in here if row.what == "outcome_unknown"})
    (row,) = rows_of(
        (replace(each, faults={fate: 1}, unexplained=False) for each in found),
        system="celery-idempotent" if system.name.startswith("OURS") else system,
        store=_STORES.get(system, "DynamoDB (MiniStack)"),
        campaign=f"{fate} ({_VARIANTS[system]})" if system in _VARIANTS else fate,
        seconds=seconds,
        seed=seed,
    )
    return replace(row, deliveries=what["delivery"], takeovers=what["taken_over"], stuck=0)


class _Body:
    """What every system executes; each fault strikes an operation once."""

    def __init__(self, folder: Path) -> None:
        self._ledger, self._bank = Ledger(folder / "ledger.jsonl"), Gateway(Ledger(folder / "bank.jsonl"))
        self._folder = folder

    def __call__(self, operation: str, fate: str, effect: str = "plain") -> str:
        if fate == Fate.KILLED_BEFORE and self._is_first("kill", operation):
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == Fate.STOPPED and self._is_first("stop", operation):
            self._row("stop me", operation)
            while not (self._folder / f"go-on-{operation}").exists():
                time.sleep(0.02)
        # Where late acknowledgements bring ever new copies, two slow runs show it and let the campaign end.
        if fate == Fate.SLOW and any(self._is_first(f"slow-{run}", operation) for run in (1, 2)):
            time.sleep(SLOW)
        time.sleep(0.3)
        if effect == "keyed":
            self._bank.charge(operation, idempotency_key=current_attempt().effect_key("charge"))
        else:
            if effect == "checked":
                current_attempt().ensure_owned()
            self._row("effect", operation)
        if fate == Fate.KILLED_AFTER and self._is_first("kill", operation):
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{operation} by {uuid.uuid4().hex}"

    def _row(self, what: str, operation: str) -> None:
        self._ledger.append(LedgerRow(what=what, order=operation))

    def _is_first(self, what: str, operation: str) -> bool:
        return is_first(self._folder / f"{what}-{operation}")


def _make_app(system: System, settings: Settings, locks: str) -> Celery:
    """The app of one system, with its one task, ``execute(operation, fate)``; some act when a task is published."""
    app = Celery("baselines", set_as_current=False)
    # "Celery will acknowledge after the task": acks_late and reject_on_worker_lost are among these.
    app.conf.update(settings.celery())
    body = _Body(settings.folder)
    options: dict[str, Any] = {}
    effect = {System.OURS_CHECKED: "checked", System.OURS_KEYED: "keyed"}.get(system, "plain")

    def execute(operation: str, fate: str) -> Any:
        if system is System.POWERTOOLS:
            return _powertools(body, settings)(payload={"operation": operation, "fate": fate})
        return body(operation, fate, effect)

    match system:
        case System.PLAIN:
            pass
        case System.ONCE:
            # Its README: graceful for "return None instead of raising", keys for "locking based on a subset".
            options = {"base": base_of(app, Kind.ONCE, locks), "once": {"graceful": True, "keys": ["operation"]}}
        case System.SINGLETON:
            # Its README: unique_on for a subset of the arguments.
            options = {"base": base_of(app, Kind.SINGLETON, locks), "unique_on": ["operation"]}
        case System.POWERTOOLS:
            from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError

            # A copy that meets the first one fails; like a Lambda's event source, Celery then tries again.
            options["autoretry_for"] = (IdempotencyAlreadyInProgressError,)
            options |= {"retry_kwargs": {"countdown": 2}, "max_retries": None}
        case _:
            refuses: Any = {"on_takeover": "refuse"} if system is System.OURS_REFUSE else {}
            policy = Policy(key="operation", lease=LEASE, backoff=BACKOFF, **refuses)
            options = {"base": IdempotentTask, "idempotent": policy}
    app.task(name="execute", shared=False, **options)(execute)
    return app


@functools.cache
def _powertools(body: _Body, settings: Settings) -> Any:
    """Made at the first call, so after the fork: one client for each process."""

    def execute(payload: dict[str, str]) -> str:
        return body(payload["operation"], payload["fate"])

    # Its documentation, "Idempotency": event_key_jmespath for a subset, raise_on_no_idempotency_key to make a
    # key required, a Lambda context so that an invocation that died does not block for an hour.
    options: dict[str, Any] = {"event_key_jmespath": "operation", "raise_on_no_idempotency_key": True}
    client = boto3.client("dynamodb", endpoint_url=settings.store_url, **_ACCOUNT)
    return powertools(client, execute, "payload", LONGEST_BODY, **options)


if SYSTEM in os.environ:
    _settings = Settings.from_environ()
    app = _make_app(System(os.environ[SYSTEM]), _settings, os.environ[LOCKS])
    app.set_current()
    observe(Ledger(_settings.folder / "ledger.jsonl"))
