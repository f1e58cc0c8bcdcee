"""Faults between deliveries and their store, at every write on every store.

Deliveries are real, and so are the stores and their servers. Every operation has a plan of its own by store, seed and
number (:func:`lab.proof.course.at_random`), which fixes its whole course, so that it can be reproduced alone. After it
come clean deliveries past the lease, everything that is still on the way lands, and the audit compares effects,
records and what every caller was told. An operation counts as *faulted* if at least one fault struck it.

The same over stores with one rule undone, and over none: there, promises must break, or this campaign is blind.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.memory import MemoryStore
from lab.proof.course import Task, at_random
from lab.proof.flaws import CONTROLS, FLAWS
from lab.proof.jobs import Progress, Report, fan_out
from lab.proof.table import CONTROL, Row
from lab.proof.targets import TARGETS, start
from lab.proof.verdicts import Result, rows_of

_TASKS_PER_TABLE = 250  # MiniStack counts all items of a table with every write


def opened(target: str, url: str) -> Iterator[Store]:
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
    url: str,
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
    given: dict[str, Any] = {"target": target, "url": url, "faulted": faulted, "seed": seed}
    for verdict in fan_out(_work, processes, **given, flaw=flaw, first=first):
        verdicts.append(verdict)
        progress(int(verdict.is_faulted))
    rows = rows_of(
        verdicts,
        store=TARGETS[target].label,
        campaign="faults at every write",
        seconds=round(time.monotonic() - began, 1),
        seed=seed,
    )
    return Result(verdicts, rows)


def run(target: str, faulted: int, seed: int, progress: Progress, first: int = 0) -> Result:
    """One store: the fire and the controls."""
    with start(target) as url:
        found = attack(target, url, seed=seed, faulted=faulted, progress=progress, first=first)
    with start(target) as url:
        few = max(200, faulted // 500)
        blind = [_control(attack(target, url, seed=seed, faulted=few, flaw=flaw), flaw) for flaw in CONTROLS]
    return replace(found, rows=[*found.rows, *blind])


def _control(found: Result, flaw: str) -> Row:
    """One row for what is broken, summed over the promises."""
    first, *_ = found.rows
    named: dict[str, Any] = {name: getattr(first, name) for name in ("campaign", "seconds", "seed")}
    together = (replace(each, promise="all three") for each in found.verdicts)
    (row,) = rows_of(together, system=CONTROL, store=f"{first.store}, {flaw}", **named)
    return row


def _work(
    report: Report, share: int, of: int, *, target: str, url: str, faulted: int, seed: int, flaw: str, first: int
) -> None:
    stores, left = map(FLAWS[flaw], opened(target, url)), -(-faulted // of)
    for done in itertools.count():
        if done % _TASKS_PER_TABLE == 0:
            store = next(stores)
        verdict = Task(store, at_random(target, seed, first + share + done * of)).attack()
        report(verdict)
        left -= verdict.is_faulted
        if not left:
            return
