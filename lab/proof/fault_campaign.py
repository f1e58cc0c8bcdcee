"""Faults between worker and store, request by request, at scale.

Deliveries are real: the library's delivery, its store and HTTP, through a proxy that
does to each request what its plan says (:mod:`lab.proof.wire`). The deliveries of one task are threads that go in turn
(:mod:`lab.proof.course`); some plans let them run freely instead.

An operation may be announced first, as by a publisher that publishes once, and a lease be ended for a process that is
taken for dead, while it lives.

First every operation with every fault under every promise, then pairs of those and random plans by seed.
After each task come clean deliveries past the lease, everything that is still on the way lands, and an audit
compares effects, records and what every caller was told.

Nothing waits: leases end because the store's clock is moved, and botocore's pauses between its tries and
its budget of tries, which would let one task depend on those before it, are switched off.
"""

import http.client
import itertools
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import botocore.endpoint
from botocore.httpsession import URLLib3Session
from botocore.retries.quota import RetryQuota

from celery_idempotent.protocol.record import Record
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.direct import HttpReply
from celery_idempotent.stores.dynamodb.direct import Wire as DirectWire
from lab.embedded import EmbeddedAws
from lab.proof.course import OneDelivery, Operation, Plan, Program, Strike, Task, Threads, Turns, at_random
from lab.proof.flaws import FLAWS
from lab.proof.fleet import Progress, fan_out, job, report
from lab.proof.table import Row
from lab.proof.verdicts import (
    PROMISES,
    Promise,
    Result,
    Tally,
    Verdict,
)
from lab.proof.wire import ORDER, Wire

__all__ = ["SINGLES", "Fault", "Result", "campaign", "plans", "run"]

CAMPAIGN = "faults per request"

_TASKS_PER_TABLE = 250


class Fault(StrEnum):
    """What becomes of a request."""

    REQUEST_LOST = "request-lost"
    REPLY_LOST = "reply-lost"
    RESET = "reset"
    TORN = "torn"
    DUPLICATED = "duplicated"
    DELAYED = "delayed"
    HELD = "held"
    THROTTLED = "throttled"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"


class _Current(threading.local):
    """The delivery whose swap the calling thread executes."""

    delivery: OneDelivery | None = None


_current = _Current()


def _always(quota: RetryQuota, capacity_amount: int) -> bool:
    return True


_exchange = DirectWire.exchange
_send = URLLib3Session.send


def _ordered(wire: DirectWire, headers: Mapping[str, str], body: bytes) -> HttpReply:
    """Send a request of the direct path with its order, if it is one of a delivery."""
    return _exchange(wire, {**headers, **_orders()}, body)


def _ordered_too(session: URLLib3Session, request: Any) -> Any:
    """The same of boto3's, and of those of the direct path for which no connection is idle, which have one."""
    if ORDER not in request.headers:
        request.headers.update(_orders())
    return _send(session, request)


def _orders() -> Mapping[str, str]:
    delivery = _current.delivery
    return {ORDER: _order(delivery) or "pass"} if delivery else {}


def _order(delivery: OneDelivery) -> str:
    fault = delivery.fate()
    if fault is not Fault.HELD:
        return fault or ""
    name, world = uuid4().hex, delivery.task.world
    assert isinstance(world, _World)
    delivery.task.hold(partial(world.land, name))
    return f"{fault} {name}"


class _World:
    """A worker process: one way to the proxy for all its tasks, and a table for some hundred of them."""

    def __init__(self, port: int, name: str, flaw: str) -> None:
        vars(botocore.endpoint)["time"] = SimpleNamespace(sleep=lambda seconds: None)
        RetryQuota.acquire = _always  # type: ignore[assignment]
        DirectWire.exchange = _ordered  # type: ignore[assignment, method-assign]
        URLLib3Session.send = _ordered_too  # type: ignore[assignment, method-assign]
        endpoint = f"http://127.0.0.1:{port}"
        self._stores = (DynamoDBStore(f"{name}-{number}", endpoint_url=endpoint) for number in itertools.count())
        self._wrapped = FLAWS[flaw]
        self._control = http.client.HTTPConnection("127.0.0.1", port)
        self.renew_table()

    def renew_table(self) -> None:
        """Go on in a table of its own: MiniStack counts all items of a table with every write."""
        table = next(self._stores)
        table.provision()
        assert not table._indirect_for
        self.store = self._wrapped(table)

    def turns(self, plan: Plan, task: Task) -> Turns:
        """See :meth:`lab.proof.course.World.turns`."""
        return Threads(plan, task)

    def swap(self, delivery: OneDelivery, new: Record, expected: str | None) -> Record | None:
        """See :meth:`lab.proof.course.World.swap`; every request asks for its fate as it leaves (:func:`_ordered`)."""
        _current.delivery = delivery
        try:
            return self.store.swap(new, expected)
        finally:
            _current.delivery = None

    def land(self, name: str) -> None:
        """Let a held request reach the store now."""
        self._control.request("POST", "/", headers={ORDER: f"land {name}", "Content-Length": "0"})
        self._control.getresponse().read()


_REACHED_BY: Mapping[Operation, Program] = {
    Operation.CLAIM: Program.RETURNS,
    Operation.TAKEOVER: Program.RETURNS,
    Operation.RECLAIM: Program.STOPS_BEFORE,
    Operation.RENEWAL: Program.RENEWS,
    Operation.COMPLETION: Program.RETURNS,
    Operation.FAILURE: Program.REMEMBERED,
    Operation.RELEASE: Program.STOPS_BEFORE,
    Operation.GIVING_UP: Program.RETURNS,
    Operation.LEASE_END: Program.RETURNS,
    Operation.ANNOUNCEMENT: Program.RETURNS,
}

_TIMES = (1, 4, 8, 12)
"""One try, that of the direct path and all of botocore, all of the library's claim too, and some of a completion's."""

_TAKEN_OVER = ("0", "0", "0", "lease", "1!", "land", "0!")
"""Delivery 0 starts, claims and has its effect; then it is paused over the end of its lease while 1 comes."""

_BURIED = ("0", "0", "0", "dead", "1!", "land", "0!")
"""The same, and somebody has taken delivery 0 for dead."""


def _singles() -> Iterator[Plan]:
    """Every operation with every fault, so and so often, under every promise."""
    for operation_, fault, times, promise in itertools.product(Operation, Fault, _TIMES, PROMISES.values()):
        if operation_ is Operation.TAKEOVER and promise.on_takeover == "refuse":
            continue  # there is none
        if operation_ is Operation.GIVING_UP and promise.on_takeover == "rerun":
            continue
        yield _around(promise, operation_, (Strike(operation_, fault, times),), "singles")


def _pairs() -> Iterator[Plan]:
    """Every two operations of one task, each with every fault."""
    operations = list(itertools.combinations(Operation, 2))
    for (one, other), first, second in itertools.product(operations, Fault, Fault):
        for promise, times in itertools.product(PROMISES.values(), (1, 4)):
            strikes = (Strike(one, first, times), Strike(other, second, times))
            yield _around(promise, other if _needs_two(other) else one, strikes, "pairs")


def _needs_two(operation_: Operation) -> bool:
    return operation_ in (Operation.TAKEOVER, Operation.RECLAIM, Operation.GIVING_UP, Operation.LEASE_END)


def _around(promise: Promise, operation_: Operation, strikes: tuple[Strike, ...], group: str) -> Plan:
    struck = {each.operation for each in strikes}
    plan = Plan(
        promise=promise,
        program=_REACHED_BY[operation_],
        strikes=strikes,
        is_announced=Operation.ANNOUNCEMENT in struck,
        group=group,
    )
    if operation_ is Operation.RECLAIM:
        return replace(plan, deliveries=2)
    moves = _BURIED if Operation.LEASE_END in struck else _TAKEN_OVER
    return replace(plan, deliveries=2, moves=moves) if _needs_two(operation_) else plan


def _strike(rng: random.Random, operation_: Operation, delivery: int | None) -> Strike:
    return Strike(operation_, rng.choice(list(Fault)), rng.choices(_TIMES, (12, 3, 1, 1))[0], delivery)


def plans(tasks: int, seed: int) -> Iterator[Plan]:
    """The plans of a campaign: all single faults, then pairs and random plans in turn; of pairs, as many as fit."""
    pairs = list(_pairs())
    random.Random(seed).shuffle(pairs)
    drawn = (at_random(seed, number, _strike) for number in itertools.count())
    in_turn = itertools.chain(itertools.chain.from_iterable(zip(pairs, drawn, strict=False)), drawn)
    yield from itertools.islice(itertools.chain(_singles(), in_turn), tasks)


SINGLES = sum(1 for _ in _singles())
"""How many plans there are with a single fault."""


def campaign(
    tasks: int,
    seed: int,
    progress: Progress = lambda done: None,
    *,
    processes: int = 2,
    flaw: str = "none",
    skip: int = 0,
    every: int = 1,
    within: float = math.inf,
) -> Result:
    """Attack ``tasks`` tasks.

    Args:
        tasks: How many.
        seed: Of the random plans.
        progress: Called as tasks are done.
        processes: How many attackers.
        flaw: What is broken on purpose, by its name in :data:`lab.proof.flaws.FLAWS`.
        skip: How many plans to leave out at the beginning.
        every: Take only every so-manieth plan.
        within: Seconds after which no further task is begun.
    """
    tally, reached = Tally(), Counter[str]()
    with EmbeddedAws() as aws, Wire(f"127.0.0.1:{aws.port}") as wire:
        started = time.monotonic()
        common = {
            "tasks": tasks,
            "seed": seed,
            "port": wire.port,
            "flaw": flaw,
            "skip": skip,
            "every": every,
            "within": within,
        }
        for found in fan_out("lab.proof.fault_campaign", common, processes):
            reached.update(found.pop("struck"))
            tally.add(Verdict.from_json(found))
            progress(1)
        seconds = time.monotonic() - started
    rows = tally.rows(store="DynamoDB (MiniStack)", campaign=CAMPAIGN, seconds=seconds, seed=seed)
    return Result(tally, rows, reached)


def run(tasks: int, seed: int, progress: Progress) -> list[Row]:
    """The campaign, as rows of the table.

    Args:
        tasks: How many tasks are attacked.
        seed: Of the random plans.
        progress: Called as tasks are done.
    """
    return campaign(tasks, seed, progress).rows


def _work(given: Mapping[str, Any]) -> None:
    """In a worker process: attack this share of the tasks."""
    world = _World(given["port"], f"faults-{given['share']}", given["flaw"])
    chosen = itertools.islice(plans(given["tasks"], given["seed"]), given["skip"], None, given["every"])
    mine = itertools.islice(chosen, given["share"], None, given["of"])
    end = time.monotonic() + given["within"]
    for done, plan in enumerate(itertools.takewhile(lambda _: time.monotonic() < end, mine), 1):
        if done % _TASKS_PER_TABLE == 0:
            world.renew_table()
        task = Task(world, plan)
        verdict = task.attack()
        report(verdict.to_json() | {"struck": {f"{fault} at {op}": n for (op, fault), n in task.struck.items()}})


if __name__ == "__main__":
    _work(job())
