"""How long an operation stands still after its process, its worker or its machine has died.

A body is killed by SIGKILL before its effect; what counts is the time until the effect, by whoever runs it next. The
same on plain Celery, which asks nobody and so knows no shorter way; and on this library where a claim names no
process, which is how it was before claims did: there every death costs the rest of the lease.

A machine that died is a worker that took itself for one of another machine, killed; the next starts here at once.

`celery -A lab.proof.recovery worker`, configured by the environment of `lab.demo.settings` and `SYSTEM`, executes.
"""

import contextlib
import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery, current_task

from celery_idempotent import IdempotentTask, Policy, open_store
from celery_idempotent.engine import processes
from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.protocol.record import Status
from lab.demo.settings import Settings
from lab.fleet import Fleet, until
from lab.folders import temporary_folder
from lab.ledger import Ledger, Row, is_first
from lab.proof.audit import judge_effects
from lab.proof.jobs import Progress
from lab.proof.recorder import record_if_wanted
from lab.proof.verdicts import PROMISES
from lab.servers import Servers
from lab.witness import observe

SYSTEM = "RECOVERY_SYSTEM"  # the environment variable that says under which system a worker runs the body
CHILDREN = 4
POLICY = Policy("operation")
DEFAULT_LEASE = 60
SHORT_LEASE = 10
"""Seconds. A minute, the default, would be all there is to measure where nothing ends a lease before its time."""

VISIBILITY_TIMEOUT = 6  # seconds until a broker gives the messages of a dead worker again
_PATIENCE = 120.0  # seconds until a worker has started, or an operation has its effect
_LONGEST_PAUSE = 0.5  # seconds before a kill, at most: it must not keep step with anybody's timer

BROKERS: Mapping[str, tuple[str, str]] = {"redis": ("Redis", "redis"), "sqs": ("SQS", "dynamodb")}
"""By name: how it is called, and the store beside it."""


class System(StrEnum):
    """Under what the body runs."""

    PLAIN = "plain Celery, acks_late, reject_on_worker_lost"
    BEFORE = "celery-idempotent, claims name no process"
    OURS = "celery-idempotent"


class Death(StrEnum):
    """Who dies."""

    CHILD = "pool process"
    WORKER = "worker, started again at once"
    MACHINE = "machine, a worker starts on another at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One death under one system, so many times, of so many bodies at once; the lease is None where there is none."""

    system: System
    death: Death
    rounds: int
    at_once: int = CHILDREN
    lease: int | None

    @property
    def waits_for_lease(self) -> bool:
        """Whether nobody can tell that the owner is gone; there the lease is short, to bound the measurement."""
        return self.lease == SHORT_LEASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What came of it: seconds to each effect, and from the end of its lease where that is waited for."""

    part: Part
    broker: str
    seconds: tuple[float, ...]
    after_lease: tuple[float, ...] = ()
    conflicts: int
    wrong: int

    @property
    def early(self) -> int:
        """Operations that somebody had before their lease was over."""
        return sum(each < 0 for each in self.after_lease)

    def as_json(self) -> dict[str, object]:
        """As the page reads it; p95 is the smallest that so large a share does not exceed."""
        part, seconds = self.part, sorted(self.seconds)
        return {
            "death": part.death,
            "system": part.system,
            "broker": self.broker,
            "lease": part.lease,
            "kills": part.rounds * (part.at_once if part.death is Death.CHILD else 1),
            "operations": len(seconds),
            "p50": round(median(seconds), 2),
            "p95": round(seconds[math.ceil(0.95 * len(seconds)) - 1], 2),
            "max": round(seconds[-1], 2),
            "after lease": round(min(self.after_lease), 2) if self.after_lease else None,
            "conflicts": self.conflicts,
            "wrong": self.wrong,
            "seconds": [round(each, 3) for each in self.seconds],
        }


def plan() -> tuple[Part, ...]:
    """All parts: many pool processes are killed where each costs a moment, and some workers."""
    children, workers, some = 20, 4, 2
    alone, short = partial(Part, rounds=children, at_once=1), partial(Part, rounds=some, lease=SHORT_LEASE)
    return (
        alone(system=System.OURS, death=Death.CHILD, lease=DEFAULT_LEASE),
        Part(system=System.OURS, death=Death.WORKER, rounds=workers, lease=DEFAULT_LEASE),
        short(system=System.OURS, death=Death.MACHINE),
        short(system=System.BEFORE, death=Death.CHILD),
        short(system=System.BEFORE, death=Death.WORKER),
        alone(system=System.PLAIN, death=Death.CHILD, lease=None),
        Part(system=System.PLAIN, death=Death.WORKER, rounds=some, lease=None),
    )


def run(
    seed: int, progress: Progress, parts: Sequence[Part] | None = None, brokers: Sequence[str] = tuple(BROKERS)
) -> list[Recovery]:
    """Every part on every broker; the brokers at the same time, as nearly all of it is waiting."""
    with warnings.catch_warnings(), ThreadPoolExecutor(len(brokers)) as threads:
        warnings.simplefilter("ignore", IdempotencyWarning)  # a lease longer than that timeout is what is measured
        found = threads.map(lambda name: list(_on_broker(name, parts or plan(), seed, progress)), brokers)
        return [each for recoveries in zip(*found, strict=True) for each in recoveries]


def _on_broker(name: str, parts: Sequence[Part], seed: int, progress: Progress) -> Iterator[Recovery]:
    chance, (label, store) = random.Random(f"{seed} {name}"), BROKERS[name]
    with temporary_folder() as folder, Servers(store, name, folder) as servers:
        with contextlib.closing(open_store(servers.store_url)) as opened:
            opened.provision()
        for number, part in enumerate(parts):
            progress(f"{label}, {part.system}: {part.death}")
            urls = {"broker_url": servers.broker_url, "store_url": servers.store_url}
            place, lease = folder / f"{number}", part.lease or DEFAULT_LEASE
            settings = Settings(**urls, folder=place, queue=f"recovery-{number}", lease=lease)
            yield _Trial(part, label, settings, chance).run()


class _Trial:
    """One part on one broker, with a worker, a queue and a ledger of its own."""

    def __init__(self, part: Part, broker: str, settings: Settings, chance: random.Random) -> None:
        self._part, self._broker, self._settings, self._chance = part, broker, settings, chance
        self._ledger = Ledger(settings.folder / "ledger.jsonl")
        self._leases: dict[str, float] = {}
        if part.death is Death.MACHINE:
            _elsewhere(settings.folder).touch()
        environ = {SYSTEM: part.system, "PYTHONWARNINGS": "ignore"} | settings.environ()
        self._fleet = Fleet(
            "lab.proof.recovery", [settings.queue], children=CHILDREN, environ=environ, folder=settings.folder
        )

    def run(self) -> Recovery:
        with contextlib.closing(_make_app(self._part.system, self._settings)) as app, self._fleet:
            seconds = [each for number in range(self._part.rounds) for each in self._round(app, number)]
        rows, effects = self._ledger.rows(), self._rows("effect")
        late = (row.time - self._leases[row.task_id] for row in effects if row.task_id in self._leases)
        verdicts = judge_effects({row.order: PROMISES["exactly once"] for row in rows if row.order}, rows)
        return Recovery(
            part=self._part,
            broker=self._broker,
            seconds=tuple(seconds),
            after_lease=tuple(late),
            conflicts=len(self._rows("conflicted")),
            wrong=sum(bool(each.problems) for each in verdicts),
        )

    def _round(self, app: Celery, number: int) -> list[float]:
        if number and self._part.death is Death.MACHINE:
            _elsewhere(self._settings.folder).touch()
            self._kill_worker()
        self._until(lambda: bool(self._rows("ready")) and not self._fleet.dead(), "the worker")
        operations = [f"{self._settings.queue}-{number}-{each}" for each in range(self._part.at_once)]
        for operation in operations:
            app.tasks["execute"].apply_async(kwargs={"operation": operation})
        self._until(lambda: operations == sorted(self._of(operations, "run")), "the bodies to begin")
        killed = self._kill(self._of(operations, "run"))
        if self._part.waits_for_lease:
            # When each lease ends, by the id of its message: nobody renews it any more.
            with contextlib.closing(open_store(self._settings.store_url)) as store:
                held = store.scan(status=Status.IN_PROGRESS)
                self._leases |= {each.task_id: each.lease_until / 1000 for each in held}
        self._until(lambda: operations == sorted(self._of(operations, "effect")), "the effects")
        return [row.time - killed[operation] for operation, row in self._of(operations, "effect").items()]

    def _kill(self, running: Mapping[str, Row]) -> dict[str, float]:
        """When each of the operations lost its process."""
        time.sleep(self._chance.uniform(0, _LONGEST_PAUSE))
        if self._part.death is not Death.CHILD:
            _elsewhere(self._settings.folder).unlink(missing_ok=True)
            return dict.fromkeys(running, self._kill_worker())
        killed = {}
        for operation, row in running.items():
            killed[operation] = time.time()
            os.kill(row.pid, signal.SIGKILL)
        return killed

    def _kill_worker(self) -> float:
        """Kill it with its pool, and start the next; when that was."""
        (name,) = self._fleet.names
        killed = time.time()
        os.killpg(self._fleet.group(name), signal.SIGKILL)
        until(lambda: bool(self._fleet.dead()), "the end of the worker", _PATIENCE)
        self._fleet.restart_dead()
        return killed

    def _rows(self, what: str) -> list[Row]:
        return [row for row in self._ledger.rows() if row.what == what]

    def _of(self, operations: Sequence[str], what: str) -> dict[str, Row]:
        return {row.order: row for row in reversed(self._rows(what)) if row.order in operations}

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, f"{what} ({self._broker}, {self._part.system}, {self._part.death})", _PATIENCE)


def _elsewhere(folder: Path) -> Path:
    """While this file exists, workers that start believe to be on a machine of their own."""
    return folder / "elsewhere"


def _make_app(system: System, settings: Settings) -> Celery:
    """An app whose body hangs in its first attempt, until somebody kills it."""
    app = Celery("recovery", set_as_current=False)
    app.conf.update(settings.celery())
    app.conf.broker_transport_options["visibility_timeout"] = VISIBILITY_TIMEOUT
    ledger = Ledger(settings.folder / "ledger.jsonl")

    def execute(operation: str) -> None:
        task_id = current_task.request.id
        ledger.append(Row(what="run", order=operation, task_id=task_id))
        if is_first(settings.folder / operation):
            time.sleep(600)
        ledger.append(Row(what="effect", order=operation, task_id=task_id))

    policy = replace(POLICY, lease=settings.lease)
    ours: dict[str, Any] = {} if system is System.PLAIN else {"base": IdempotentTask, "idempotent": policy}
    app.task(name="execute", shared=False, **ours)(execute)
    return app


if SYSTEM in os.environ:
    _settings, _system = Settings.from_environ(), System(os.environ[SYSTEM])
    if _system is System.BEFORE:
        processes._PROC = Path("/nonexistent")
    elif _elsewhere(_settings.folder).exists():
        processes._machine = cache(lambda: "f" * 16)
    record_if_wanted(_settings.store_url)
    app = _make_app(_system, _settings)
    app.set_current()
    observe(Ledger(_settings.folder / "ledger.jsonl"))
