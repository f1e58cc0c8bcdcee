"""Faults by the hundred thousand, on every store: what a campaign through a proxy is too slow for.

Deliveries are real, and so are the stores and their servers. The fault strikes between the two, at
:meth:`celery_idempotent.stores.Store.swap`, the one method by which records change: the request is lost, its reply is,
it arrives twice, it arrives after the sender's next one or when all is over, the sender dies before, during or after
it, or is cut off for good. Besides, leases end early, over the dead and over the living. Every operation has a plan of
its own by seed and number (:func:`lab.proof.course.at_random`), which fixes its whole course; it needs no other
operation to be reproduced. After it come clean deliveries past the lease, everything that is still on the way lands,
and an audit compares effects, records and what every caller was told.

An operation counts as *faulted* if at least one fault struck it: a plan whose fault found nothing to strike does not.

The same over stores with one rule undone, and over none: there, promises must break, or this campaign is blind.
"""

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from greenlet import getcurrent, greenlet

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from lab.proof.course import Dead, OneDelivery, Operation, Plan, Strike, Task, Turns, at_random
from lab.proof.flaws import FLAWS
from lab.proof.fleet import Progress, fan_out, job, report
from lab.proof.table import CONTROL, Row
from lab.proof.targets import ALL, TARGETS, Site, start
from lab.proof.verdicts import COUNTED, Result, Tally

__all__ = ["CONTROLS", "STORES", "Fault", "Result", "attack", "controls", "plan", "run"]

CAMPAIGN = "faults at every write"

STORES = (*ALL, "memory")
"""Where it can be done; in memory there is no server, and the library's own code is all that is attacked."""

_TASKS_PER_TABLE = 250
"""MiniStack counts all items of a table with every write."""

_TASKS_PER_REPORT = 100


class Fault(StrEnum):
    """What becomes of a write, or of its sender."""

    REQUEST_LOST = "request-lost"
    REPLY_LOST = "reply-lost"
    DOUBLED = "doubled"
    OVERTAKEN = "overtaken"
    HELD = "held"
    DIES_BEFORE = "sender-dies-before"
    DIES_DURING = "sender-dies-during"
    DIES_AFTER = "sender-dies-after"
    CUT_OFF = "sender-cut-off"


_LAST = frozenset({Fault.DIES_BEFORE, Fault.DIES_DURING, Fault.DIES_AFTER, Fault.CUT_OFF})
"""No resend outlives these."""

_WEIGHTS: Mapping[Fault, int] = {each: 1 if each is Fault.CUT_OFF else 5 for each in Fault}
"""How often each is drawn; who is cut off tries again for ten minutes of its own clock, which takes long here, too."""

_TIMES = (1, 2, 3, 9)
"""One try, both tries of a claim, and some of a completion's."""


def plan(seed: int, number: int) -> Plan:
    """The plan of one operation."""
    drawn = at_random(seed, number, _strike)
    is_announced = drawn.is_announced or any(each.operation is Operation.ANNOUNCEMENT for each in drawn.strikes)
    return replace(drawn, is_announced=is_announced, free=False, group=f"number {number}")


def _strike(rng: random.Random, operation: Operation, delivery: int | None) -> Strike:
    fault = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if operation is Operation.ANNOUNCEMENT and fault in _LAST:
        fault = Fault.HELD  # a publisher that dies sends no message, so there is nothing to deliver
    if fault in _LAST:
        return Strike(operation, fault, 1, delivery, lasts=True)
    return Strike(operation, fault, rng.choices(_TIMES, (12, 3, 1, 1))[0], delivery)


class _Greenlets(Turns):
    """Deliveries are greenlets: to hand over costs a microsecond."""

    def __init__(self, plan: Plan, task: Task) -> None:
        super().__init__(plan, task)
        self._conductor = getcurrent()
        self._deliveries = [greenlet(partial(task.deliver, number, self)) for number in range(plan.deliveries)]

    def begin(self) -> None:
        """See :meth:`lab.proof.course.Turns.begin`."""
        for each in self._deliveries:
            each.switch()

    def step(self, number: int) -> None:
        """See :meth:`lab.proof.course.Turns.step`."""
        self._deliveries[number].switch()

    def wait(self, number: int) -> None:
        """See :meth:`lab.proof.course.Turns.wait`."""
        self._conductor.switch()


class _World:
    """One store, and the faults in front of it."""

    def __init__(self, stores: Iterator[Store], flaw: str) -> None:
        self._stores = stores
        self._flaw = _FLAWS[flaw]
        self._overtaken: dict[OneDelivery, Callable[[], object]] = {}
        self._cut_off: set[OneDelivery] = set()
        self.renew()

    def renew(self) -> None:
        """Go on in the next store, and without what deliveries have left behind."""
        self._overtaken.clear()
        self._cut_off.clear()
        self.store = self._flaw(next(self._stores))

    def turns(self, plan: Plan, task: Task) -> Turns:
        """See :meth:`lab.proof.course.World.turns`."""
        return _Greenlets(plan, task)

    def swap(self, delivery: OneDelivery, new: Record, expected: str | None) -> Record | None:
        """See :meth:`lab.proof.course.World.swap`."""
        if delivery in self._cut_off:
            raise StoreUnavailable("world", "swap", "cut off")
        send = partial(self.store.swap, new, expected)
        fate = delivery.fate()
        late = self._overtaken.pop(delivery, None)
        try:
            return self._sent(delivery, send, fate)
        finally:
            if late:
                delivery.task.land(late)

    def _sent(self, delivery: OneDelivery, send: Callable[[], Record | None], fate: StrEnum | None) -> Record | None:
        match fate:
            case None:
                return send()
            case Fault.DOUBLED:
                send()
                return send()
            case Fault.REPLY_LOST | Fault.DIES_AFTER:
                send()
            case Fault.HELD | Fault.OVERTAKEN | Fault.DIES_DURING:
                delivery.task.hold(send)
        match fate:
            case Fault.DIES_BEFORE | Fault.DIES_DURING | Fault.DIES_AFTER:
                delivery.is_dead = True
                raise Dead
            case Fault.OVERTAKEN:
                self._overtaken[delivery] = send
            case Fault.CUT_OFF:
                self._cut_off.add(delivery)
        raise StoreUnavailable("world", "swap", fate)


class _GrantsEverything(MemoryStore):
    """What a task has that uses no such library."""

    def swap(self, new: Record, expected: str | None) -> Record | None:
        """See :meth:`celery_idempotent.stores.Store.swap`."""
        return new


_NO_STORE = "no store at all"

_FLAWS: Mapping[str, Callable[[Store], Store]] = {**FLAWS, _NO_STORE: lambda store: _GrantsEverything()}

CONTROLS = (
    _NO_STORE,
    "completes unconditionally",
    "forgets its own writes",
    "drops completions",
    "takes over at once",
)
"""What is put in the place of a store, or in front of it, to see whether somebody notices."""


def _opened(target: str, url: str, name: str) -> Iterator[Store]:
    """The stores that a worker process uses one after another."""
    if target == "memory":
        for _ in itertools.count():
            yield MemoryStore()
    if target == "dynamodb":
        for number in itertools.count():
            table = open_store(urlsplit(url)._replace(path=f"/{name}-{number}").geturl())
            table.provision()
            yield table
    store = open_store(url)
    store.provision()
    while True:
        yield store


@contextmanager
def _started(target: str) -> Iterator[Site]:
    if target == "memory":
        yield Site("")
    else:
        with start(target) as site:
            yield site


def attack(
    target: str,
    site: Site,
    faulted: int,
    seed: int,
    progress: Progress = lambda done: None,
    *,
    processes: int = 1,
    flaw: str = "none",
    first: int = 0,
) -> Result:
    """Go on until ``faulted`` operations have met a fault.

    Args:
        target: Which store, of :data:`STORES`.
        site: Where it is.
        faulted: How many.
        seed: Of the plans.
        progress: Called as operations are done that met a fault.
        processes: How many attackers share one server.
        flaw: What is broken on purpose, by its name in :data:`CONTROLS`.
        first: The number of the first plan.
    """
    tally, reached = Tally(), Counter[str]()
    began = time.monotonic()
    common = {"target": target, "url": site.url, "faulted": faulted, "seed": seed, "flaw": flaw, "first": first}
    for found in fan_out("lab.proof.multitude", common, processes):
        reached.update(found["struck"])
        progress(tally.merge(Tally.from_json(found)))
    label = TARGETS[target].label if target in TARGETS else "memory"
    rows = tally.rows(store=label, campaign=CAMPAIGN, seconds=time.monotonic() - began, seed=seed)
    return Result(tally, rows, reached)


def controls(target: str, site: Site, faulted: int, seed: int) -> list[Row]:
    """The same over what is broken: a row for each, summed over the promises."""
    return [_control(attack(target, site, faulted, seed, flaw=flaw).rows, flaw) for flaw in CONTROLS]


def _control(rows: list[Row], flaw: str) -> Row:
    first, *_ = rows
    added = {name: sum(getattr(row, name) for row in rows) for name in COUNTED if name != "healed"}
    kinds = sum((Counter(row.faults) for row in rows), Counter[str]())
    whole: dict[str, Any] = {**added, "faults": dict(kinds), "healed": None, "extra_requests": None}
    return replace(first, system=CONTROL, store=f"{first.store}, {flaw}", promise="all three", **whole)


def run(target: str, faulted: int, seed: int, progress: Progress, first: int = 0) -> Result:
    """One store: the controls, and the fire.

    Args:
        target: Which store, of :data:`STORES`.
        faulted: How many operations are to meet a fault.
        seed: Of the plans.
        progress: Called as operations are done that met a fault.
        first: The number of the first plan.
    """
    with _started(target) as site:
        blind = controls(target, site, max(200, faulted // 500), seed)
    with _started(target) as site:
        found = attack(target, site, faulted, seed, progress, first=first)
    return replace(found, rows=[*found.rows, *blind])


def _work(given: Mapping[str, Any]) -> None:
    """In a worker process: attack its share of the operations until enough of them have met a fault."""
    logging.getLogger("celery_idempotent").setLevel(logging.CRITICAL)  # outages are what is wanted here
    share, of = given["share"], given["of"]
    name = f"multitude-{uuid4().hex}"
    world = _World(_opened(given["target"], given["url"], name), given["flaw"])
    tally, struck, left = Tally(), Counter[str](), -(-given["faulted"] // of)
    for done, number in enumerate(itertools.count(given["first"] + share, of), 1):
        task = Task(world, plan(given["seed"], number))
        left -= tally.add(task.attack())
        struck.update({f"{fault} at {operation}": count for (operation, fault), count in task.struck.items()})
        if done % _TASKS_PER_REPORT == 0 or left <= 0:
            report({"struck": struck, **tally.to_json()})
            tally, struck = Tally(), Counter[str]()
        if left <= 0:
            return
        if done % _TASKS_PER_TABLE == 0:
            world.renew()


if __name__ == "__main__":
    _work(job())
