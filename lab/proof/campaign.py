"""Faults between deliveries and their store, at every write on every store.

Deliveries are real, and so are the stores and their servers. At a write (:meth:`celery_idempotent.stores.Store.swap`,
the one method by which records change) the request is lost, its reply is, it arrives twice, it arrives after the
sender's next one or when all is over, the sender dies before, during or after it, or is cut off for good.

Besides, leases end early, over the dead and over the living. Every operation has a plan of its own by seed and number
(:func:`lab.proof.course.at_random`), which fixes its whole course; it needs no other operation to be reproduced. After
it come clean deliveries past the lease, everything that is still on the way lands, and the audit compares effects,
records and what every caller was told. An operation counts as *faulted* if at least one fault struck it.

The same over stores with one rule undone, and over none: there, promises must break, or this campaign is blind.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from lab.proof.course import Dead, OneDelivery, Operation, Strike, Task, at_random
from lab.proof.flaws import CONTROLS, FLAWS
from lab.proof.jobs import Progress, Report, fan_out
from lab.proof.table import CONTROL, Row
from lab.proof.targets import ALL, TARGETS, Site, start
from lab.proof.verdicts import Result, rows_of

STORES = (*ALL, "memory")
"""Where it can be done; in memory there is no server, and the library's own code is all that is attacked."""

_TASKS_PER_TABLE = 250
"""MiniStack counts all items of a table with every write."""


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


_DEATHS = (Fault.DIES_BEFORE, Fault.DIES_DURING, Fault.DIES_AFTER)
_LAST = frozenset({*_DEATHS, Fault.CUT_OFF})
"""No resend outlives these."""

_WEIGHTS: Mapping[Fault, int] = {each: 1 if each is Fault.CUT_OFF else 5 for each in Fault}
"""How often each is drawn; who is cut off tries again for ten minutes of its own clock, which takes long here, too."""

_TIMES = (1, 2, 3, 9)
"""Writes: one try, both tries of a claim, and some of a completion's."""


def at_a_write(rng: random.Random, operation: Operation, delivery: int | None) -> Strike:
    fault = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if operation is Operation.ANNOUNCEMENT and fault in _LAST:
        fault = Fault.HELD  # a publisher that dies sends no message, so there is nothing to deliver
    if fault in _LAST:
        return Strike(operation, fault, 1, delivery, lasts=True)
    return Strike(operation, fault, rng.choices(_TIMES, (12, 3, 1, 1))[0], delivery)


class _Writes:
    """One store, and the faults in front of it."""

    def __init__(self, stores: Iterator[Store], flaw: str) -> None:
        self._stores, self._flaw = stores, FLAWS[flaw]
        self._overtaken: dict[OneDelivery, Callable[[], object]] = {}
        self._cut_off: set[OneDelivery] = set()
        self.renew()

    def renew(self) -> None:
        """Go on in the next store, and without what deliveries have left behind."""
        self._overtaken.clear()
        self._cut_off.clear()
        self.store: Store = self._flaw(next(self._stores))

    def swap(self, delivery: OneDelivery, new: Record, expected: str | None) -> Record | None:
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
        if fate in _DEATHS:
            delivery.is_dead = True
            raise Dead
        if fate is Fault.OVERTAKEN:
            self._overtaken[delivery] = send
        elif fate is Fault.CUT_OFF:
            self._cut_off.add(delivery)
        raise StoreUnavailable("world", "swap", fate)


def _opened(target: str, url: str) -> Iterator[Store]:
    """The stores that a worker process uses one after another."""
    name = f"campaign-{uuid4().hex}"
    for number in itertools.count():
        if target == "memory":
            yield MemoryStore()
            continue
        has_tables = target == "dynamodb"
        if has_tables or not number:
            own = urlsplit(url)._replace(path=f"/{name}-{number}").geturl() if has_tables else url
            store = open_store(own)
            store.provision()
        yield store


def attack(
    target: str,
    site: Site,
    *,
    seed: int,
    faulted: int,
    progress: Progress = lambda done: None,
    processes: int = 1,
    flaw: str = "none",
    first: int = 0,
) -> Result:
    """Go on until ``faulted`` operations have met a fault."""
    began, verdicts = time.monotonic(), []
    given: dict[str, Any] = {"target": target, "url": site.url, "faulted": faulted, "seed": seed}
    for verdict in fan_out(_work, processes, **given, flaw=flaw, first=first):
        verdicts.append(verdict)
        progress(int(verdict.is_faulted))
    rows = rows_of(
        verdicts,
        store=TARGETS[target].label if target != "memory" else "memory",
        campaign="faults at every write",
        seconds=round(time.monotonic() - began, 1),
        seed=seed,
    )
    return Result(verdicts, rows)


def run(target: str, faulted: int, seed: int, progress: Progress, first: int = 0) -> Result:
    """One store: the fire and the controls."""
    with start(target) as site:
        found = attack(target, site, seed=seed, faulted=faulted, progress=progress, first=first)
    with start(target) as site:
        few = max(200, faulted // 500)
        blind = [_control(attack(target, site, seed=seed, faulted=few, flaw=flaw), flaw) for flaw in CONTROLS]
    return replace(found, rows=[*found.rows, *blind])


def _control(found: Result, flaw: str) -> Row:
    """One row for what is broken, summed over the promises."""
    first, *_ = found.rows
    named: dict[str, Any] = {name: getattr(first, name) for name in ("campaign", "seconds", "seed")}
    together = (replace(each, promise="all three") for each in found.verdicts)
    (row,) = rows_of(together, system=CONTROL, store=f"{first.store}, {flaw}", healed=None, **named)
    return row


def _work(
    report: Report, share: int, of: int, *, target: str, url: str, faulted: int, seed: int, flaw: str, first: int
) -> None:
    """In a worker process: attack its share of the operations until enough of them have met a fault."""
    world, left = _Writes(_opened(target, url), flaw), -(-faulted // of)
    for done in itertools.count():
        if done and done % _TASKS_PER_TABLE == 0:
            world.renew()
        verdict = Task(world, at_random(seed, first + share + done * of, at_a_write)).attack()
        report(verdict)
        left -= verdict.is_faulted
        if not left:
            return
