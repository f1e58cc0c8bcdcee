"""How long an operation stands still after its process, its worker or its machine has died.

A body is killed by SIGKILL before its effect; what counts is the time until the effect, by whoever runs it next. The
same on plain Celery, which asks nobody and so knows no shorter way; and on this library where a claim names no
process, which is how it was before claims did: there every death costs the rest of the lease.

A machine that died is a worker that took itself for one of another machine, killed; the next starts here at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median

from celery import Celery

from celery_idempotent import open_store
from celery_idempotent.errors import IdempotencyWarning
from celery_idempotent.protocol.record import Status
from lab.demo.ledger import Ledger, Row
from lab.demo.settings import Settings
from lab.embedded import EmbeddedAws, EmbeddedRedis
from lab.fleet import Fleet, until
from lab.folders import temporary_folder
from lab.proof.recovery_app import SHORT_LEASE, SYSTEM, System, elsewhere, make_app

__all__ = ["BROKERS", "Death", "Place", "Recovery", "plan", "run"]

CHILDREN = 4
DEFAULT_LEASE = 60
_PATIENCE = 120.0
"""Seconds until a worker has started, or an operation has its effect."""

_LONGEST_PAUSE = 0.5
"""Seconds before a kill, at most: it must not keep step with anybody's timer."""

Progress = Callable[[str], None]
"""Told how far it is, in one line."""


class Death(StrEnum):
    """Who dies."""

    CHILD = "pool process"
    WORKER = "worker, started again at once"
    MACHINE = "machine, a worker starts on another at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One death under one system.

    Args:
        system: Under what the body runs.
        death: Who dies.
        rounds: How often.
        at_once: How many bodies run then.
        lease: Seconds; None where there is none.
    """

    system: System
    death: Death
    rounds: int
    at_once: int
    lease: int | None

    @property
    def task(self) -> str:
        """The task with that lease."""
        return "execute_on_a_short_lease" if self.waits_for_lease else "execute"

    @property
    def waits_for_lease(self) -> bool:
        """Whether nobody can tell that the owner is gone; there the lease is short, to bound the measurement."""
        return self.lease == SHORT_LEASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What came of it.

    Args:
        part: What was done.
        broker: On which broker, and with which store.
        seconds: For each operation, from the kill to the effect.
        after_lease: For each operation that must wait for its lease, seconds from the lease's end to the effect.
        conflicts: Deliveries that met the claim of the dead and were postponed.
        wrong: Operations that had no effect, or more than one.
    """

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
        """As the page reads it."""
        return {
            "death": self.part.death,
            "system": self.part.system,
            "broker": self.broker,
            "lease": self.part.lease,
            "kills": self.part.rounds * (self.part.at_once if self.part.death is Death.CHILD else 1),
            "operations": len(self.seconds),
            "p50": round(median(self.seconds), 2),
            "p95": round(_nearest(self.seconds, 0.95), 2),
            "max": round(max(self.seconds), 2),
            "after lease": round(min(self.after_lease), 2) if self.after_lease else None,
            "conflicts": self.conflicts,
            "wrong": self.wrong,
            "seconds": [round(each, 3) for each in self.seconds],
        }


def _nearest(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that so large a share of them does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def plan(children: int = 20, workers: int = 4) -> tuple[Part, ...]:
    """All parts.

    Args:
        children: How many pool processes are killed where each costs a moment.
        workers: How many workers are killed.
    """
    some = max(1, workers // 2)
    part = partial(Part, at_once=CHILDREN)
    return (
        Part(system=System.OURS, death=Death.CHILD, rounds=children, at_once=1, lease=DEFAULT_LEASE),
        part(system=System.OURS, death=Death.WORKER, rounds=workers, lease=DEFAULT_LEASE),
        part(system=System.OURS, death=Death.MACHINE, rounds=some, lease=SHORT_LEASE),
        part(system=System.BEFORE, death=Death.CHILD, rounds=some, lease=SHORT_LEASE),
        part(system=System.BEFORE, death=Death.WORKER, rounds=some, lease=SHORT_LEASE),
        Part(system=System.PLAIN, death=Death.CHILD, rounds=children, at_once=1, lease=None),
        part(system=System.PLAIN, death=Death.WORKER, rounds=some, lease=None),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A broker and a store."""

    label: str
    broker_url: str
    store_url: str
    store_port: int


@contextlib.contextmanager
def _redis() -> Iterator[Place]:
    with EmbeddedRedis() as server:
        yield Place("Redis", server.url, server.url, server.port)


@contextlib.contextmanager
def _sqs() -> Iterator[Place]:
    with EmbeddedAws() as server:
        yield Place("SQS", server.broker_url, server.store_url("recovery"), server.port)


BROKERS: Mapping[str, Callable[[], contextlib.AbstractContextManager[Place]]] = {"redis": _redis, "sqs": _sqs}
"""By name: Redis (Valkey) with its store in the same server; SQS and DynamoDB (MiniStack)."""


def run(
    seed: int, progress: Progress, parts: Sequence[Part] | None = None, brokers: Sequence[str] = tuple(BROKERS)
) -> list[Recovery]:
    """Every part on every broker; the brokers at the same time, as nearly all of it is waiting.

    Args:
        seed: Of the moments of the kills.
        progress: Told how far it is.
        parts: Which; all of :func:`plan` if None.
        brokers: Which.

    Raises:
        Timeout: A worker did not start, or an operation never had its effect.
    """
    chosen = plan() if parts is None else parts
    with warnings.catch_warnings(), ThreadPoolExecutor(len(brokers)) as threads:
        warnings.simplefilter("ignore", IdempotencyWarning)  # a lease longer than that timeout is what is measured
        found = threads.map(lambda name: list(_on_broker(name, chosen, seed, progress)), brokers)
        return [each for recoveries in zip(*found, strict=True) for each in recoveries]


def _on_broker(name: str, parts: Sequence[Part], seed: int, progress: Progress) -> Iterator[Recovery]:
    chance = random.Random(f"{seed} {name}")
    with BROKERS[name]() as place, temporary_folder() as folder:
        with contextlib.closing(open_store(place.store_url)) as store:
            store.provision()
        for number, part in enumerate(parts):
            own = folder / f"{number}"
            own.mkdir()
            progress(f"{place.label}, {part.system}: {part.death}")
            yield _Trial(part, place, own, chance).run()


class _Trial:
    """One part on one broker, with a worker, a queue and a ledger of its own."""

    def __init__(self, part: Part, place: Place, folder: Path, chance: random.Random) -> None:
        queue = f"recovery-{folder.name}"
        self._part = part
        self._place = place
        self._settings = Settings(broker_url=place.broker_url, store_url=place.store_url, folder=folder, queue=queue)
        self._chance = chance
        self._ledger = Ledger(folder / "ledger.jsonl")
        self._leases: dict[str, float] = {}
        self._fleet = Fleet(
            "lab.proof.recovery_app",
            [queue],
            children=CHILDREN,
            environ={**self._settings.environ(), SYSTEM: part.system, "PYTHONWARNINGS": "ignore"},
            folder=folder,
        )

    def run(self) -> Recovery:
        """Do it, and measure."""
        app = make_app(self._part.system, self._settings)
        with contextlib.closing(app):
            self._be_elsewhere()
            with self._fleet:
                seconds = [each for number in range(self._part.rounds) for each in self._round(app, number)]
        rows = self._ledger.rows()
        effects = [row.order for row in rows if row.what == "effect"]
        return Recovery(
            part=self._part,
            broker=self._place.label,
            seconds=tuple(seconds),
            after_lease=tuple(
                row.time - self._leases[row.task_id]
                for row in rows
                if row.what == "effect" and row.task_id in self._leases
            ),
            conflicts=sum(row.what == "conflicted" for row in rows),
            wrong=sum(effects.count(each) != 1 for each in {row.order for row in rows if row.order}),
        )

    def _round(self, app: Celery, number: int) -> list[float]:
        if number and self._part.death is Death.MACHINE:
            self._be_elsewhere()
            self._kill_worker()
        self._until(lambda: bool(self._rows("ready")) and not self._fleet.dead(), "the worker")
        operations = [f"{self._settings.queue}-{number}-{each}" for each in range(self._part.at_once)]
        for operation in operations:
            app.tasks[self._part.task].apply_async(kwargs={"operation": operation})
        self._until(lambda: operations == sorted(self._of(operations, "run")), "the bodies to begin")
        killed = self._kill(self._of(operations, "run"))
        if self._part.waits_for_lease:
            self._leases |= self._leases_of_the_dead()
        self._until(lambda: operations == sorted(self._of(operations, "effect")), "the effects")
        return [row.time - killed[operation] for operation, row in self._of(operations, "effect").items()]

    def _leases_of_the_dead(self) -> dict[str, float]:
        """When the lease of each running operation ends, by the id of its message: nobody renews it any more."""
        with contextlib.closing(open_store(self._place.store_url)) as store:
            return {each.task_id: each.lease_until / 1000 for each in store.scan(status=Status.IN_PROGRESS)}

    def _be_elsewhere(self) -> None:
        if self._part.death is Death.MACHINE:
            elsewhere(self._settings.folder).touch()

    def _kill(self, running: Mapping[str, Row]) -> dict[str, float]:
        """When each of the operations lost its process."""
        time.sleep(self._chance.uniform(0, _LONGEST_PAUSE))
        if self._part.death is not Death.CHILD:
            elsewhere(self._settings.folder).unlink(missing_ok=True)
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
        until(condition, f"{what} ({self._place.label}, {self._part.system}, {self._part.death})", _PATIENCE)
