"""Faults between deliveries and their store, at every write on every store, and at every HTTP request to DynamoDB.

Deliveries are real, and so are the stores and their servers. At a write (:meth:`celery_idempotent.stores.Store.swap`,
the one method by which records change) the request is lost, its reply is, it arrives twice, it arrives after the
sender's next one or when all is over, the sender dies before, during or after it, or is cut off for good. Requests go
through a proxy that does to each what its plan says (:mod:`lab.proof.wire`): first every operation with every fault
under every promise, then at random; botocore's pauses between its tries, and its budget of tries, which would let one
task depend on those before it, are switched off.

Besides, leases end early, over the dead and over the living. Every operation has a plan of its own by seed and number
(:func:`lab.proof.course.at_random`), which fixes its whole course; it needs no other operation to be reproduced. After
it come clean deliveries past the lease, everything that is still on the way lands, and the audit compares effects,
records and what every caller was told. An operation counts as *faulted* if at least one fault struck it.

The same over stores with one rule undone, and over none: there, promises must break, or this campaign is blind.
"""

import http.client
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import botocore.endpoint
from botocore.httpsession import URLLib3Session
from botocore.retries.quota import RetryQuota

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb.direct import HttpReply
from celery_idempotent.stores.dynamodb.direct import Wire as DirectWire
from celery_idempotent.stores.memory import MemoryStore
from lab.embedded import EmbeddedAws
from lab.proof.course import Dead, OneDelivery, Operation, Plan, Program, Strike, Task, at_random
from lab.proof.flaws import CONTROLS, FLAWS
from lab.proof.jobs import Progress, fan_out, job, report
from lab.proof.table import CONTROL, Row
from lab.proof.targets import ALL, TARGETS, Site, start
from lab.proof.verdicts import COUNTED, PROMISES, Result, Tally
from lab.proof.wire import ORDER, wire

REQUESTS = "requests"
"""The name of DynamoDB where faults strike at HTTP requests."""

STORES = (REQUESTS, *ALL, "memory")
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


class RequestFault(StrEnum):
    """What becomes of an HTTP request."""

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


_DEATHS = (Fault.DIES_BEFORE, Fault.DIES_DURING, Fault.DIES_AFTER)
_LAST = frozenset({*_DEATHS, Fault.CUT_OFF})
"""No resend outlives these."""

_WEIGHTS: Mapping[Fault, int] = {each: 1 if each is Fault.CUT_OFF else 5 for each in Fault}
"""How often each is drawn; who is cut off tries again for ten minutes of its own clock, which takes long here, too."""

_TIMES = (1, 2, 3, 9)
"""Writes: one try, both tries of a claim, and some of a completion's."""

_REQUEST_TIMES = (1, 4, 8, 12)
"""One try, that of the direct path and all of botocore, all of the library's claim too, and some of a completion's."""


def plan(target: str, seed: int, number: int) -> Plan:
    if target != REQUESTS:
        return at_random(seed, number, _at_a_write)
    return _SINGLES[number] if number < SINGLES else at_random(seed, number, _at_a_request)


def _at_a_write(rng: random.Random, operation: Operation, delivery: int | None) -> Strike:
    fault = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if operation is Operation.ANNOUNCEMENT and fault in _LAST:
        fault = Fault.HELD  # a publisher that dies sends no message, so there is nothing to deliver
    if fault in _LAST:
        return Strike(operation, fault, 1, delivery, lasts=True)
    return Strike(operation, fault, rng.choices(_TIMES, (12, 3, 1, 1))[0], delivery)


def _at_a_request(rng: random.Random, operation: Operation, delivery: int | None) -> Strike:
    return Strike(operation, rng.choice(list(RequestFault)), rng.choices(_REQUEST_TIMES, (12, 3, 1, 1))[0], delivery)


_REACHED_BY: Mapping[Operation, Program] = {
    Operation.RECLAIM: Program.STOPS_BEFORE,
    Operation.RENEWAL: Program.RENEWS,
    Operation.FAILURE: Program.REMEMBERED,
    Operation.RELEASE: Program.STOPS_BEFORE,
}
"""The program whose deliveries make such a request, where it is not the one that returns."""


def _singles() -> Iterator[Plan]:
    """Every operation with every fault, so and so often, under every promise."""
    for operation, fault, times, promise in itertools.product(
        Operation, RequestFault, _REQUEST_TIMES, PROMISES.values()
    ):
        if (operation, promise.on_takeover) in {(Operation.TAKEOVER, "refuse"), (Operation.GIVING_UP, "rerun")}:
            continue  # there is none
        alone = Plan(
            promise=promise,
            program=_REACHED_BY.get(operation, Program.RETURNS),
            strikes=(Strike(operation, fault, times),),
            is_announced=operation is Operation.ANNOUNCEMENT,
        )
        # Delivery 0 starts, claims and has its effect; then it is paused over the end of its lease while 1 comes.
        end = "dead" if operation is Operation.LEASE_END else "lease"
        match operation:
            case Operation.RECLAIM:
                yield replace(alone, deliveries=2)
            case Operation.TAKEOVER | Operation.GIVING_UP | Operation.LEASE_END:
                yield replace(alone, deliveries=2, moves=("0", "0", "0", end, "1!", "land", "0!"))
            case _:
                yield alone


_SINGLES = [replace(each, number=number) for number, each in enumerate(_singles())]
SINGLES = len(_SINGLES)
"""How many plans of requests there are with a single fault."""


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


_current: ContextVar[OneDelivery | None] = ContextVar("current", default=None)
"""The delivery whose swap the running greenlet executes."""

_exchange = DirectWire.exchange
_send = URLLib3Session.send


def _orders() -> Mapping[str, str]:
    delivery = _current.get()
    if delivery is None:
        return {}
    fault = delivery.fate()
    if fault is not RequestFault.HELD:
        return {ORDER: fault or "pass"}
    name, world = uuid4().hex, delivery.task.world
    assert isinstance(world, _Requests)
    delivery.task.hold(partial(world.land, name))
    return {ORDER: f"{fault} {name}"}


def _ordered(wire: DirectWire, headers: Mapping[str, str], body: bytes) -> HttpReply:
    """Send a request of the direct path with its order, if it is one of a delivery."""
    return _exchange(wire, {**headers, **_orders()}, body)


def _ordered_too(session: URLLib3Session, request: Any) -> Any:
    """The same of boto3's, and of those of the direct path for which no connection is idle, which have one."""
    if ORDER not in request.headers:
        request.headers.update(_orders())
    return _send(session, request)


class _Requests(_Writes):
    """DynamoDB behind the proxy: every request asks for its fate as it leaves."""

    def __init__(self, stores: Iterator[Store], flaw: str, port: int) -> None:
        vars(botocore.endpoint)["time"] = SimpleNamespace(sleep=lambda seconds: None)
        RetryQuota.acquire = lambda quota, capacity_amount: True  # type: ignore[assignment, method-assign]
        DirectWire.exchange = _ordered  # type: ignore[assignment, method-assign]
        URLLib3Session.send = _ordered_too  # type: ignore[assignment, method-assign]
        self._control = http.client.HTTPConnection("127.0.0.1", port)
        super().__init__(stores, flaw)

    def swap(self, delivery: OneDelivery, new: Record, expected: str | None) -> Record | None:
        before = _current.set(delivery)
        try:
            return self.store.swap(new, expected)
        finally:
            _current.reset(before)

    def land(self, name: str) -> None:
        self._control.request("POST", "/", headers={ORDER: f"land {name}", "Content-Length": "0"})
        self._control.getresponse().read()


def _opened(target: str, url: str) -> Iterator[Store]:
    """The stores that a worker process uses one after another."""
    name = f"campaign-{uuid4().hex}"
    for number in itertools.count():
        if target == "memory":
            yield MemoryStore()
            continue
        has_tables = target in {"dynamodb", REQUESTS}
        if has_tables or not number:
            own = urlsplit(url)._replace(path=f"/{name}-{number}").geturl() if has_tables else url
            store = open_store(own)
            store.provision()
        yield store


@contextmanager
def started(target: str) -> Iterator[Site]:
    """Where a campaign on a store of that name goes on."""
    if target != REQUESTS:
        with start(target) as site:
            yield site
        return
    with EmbeddedAws() as aws, wire(f"127.0.0.1:{aws.port}") as port:
        yield Site(aws.store_url("none").replace(f":{aws.port}/", f":{port}/"))


def attack(
    target: str,
    site: Site,
    *,
    seed: int,
    faulted: int = 0,
    tasks: int = 0,
    progress: Progress = lambda done: None,
    processes: int = 1,
    flaw: str = "none",
    first: int = 0,
    every: int = 1,
) -> Result:
    """Go on until ``faulted`` operations have met a fault, or for so many ``tasks``."""
    tally, reached = Tally(), Counter[str]()
    began = time.monotonic()
    common = {"target": target, "url": site.url, "faulted": faulted, "tasks": tasks, "seed": seed, "flaw": flaw}
    for found in fan_out("lab.proof.campaign", {**common, "first": first, "every": every}, processes):
        reached.update(found["struck"])
        progress(tally.merge(found))
    rows = tally.rows(
        store=TARGETS["dynamodb" if target == REQUESTS else target].label if target != "memory" else "memory",
        campaign="faults per request" if target == REQUESTS else "faults at every write",
        seconds=round(time.monotonic() - began, 1),
        seed=seed,
    )
    return Result(tally, rows, reached)


def run(target: str, faulted: int, seed: int, progress: Progress, first: int = 0) -> Result:
    """One store: the fire and, at writes, the controls."""
    with started(target) as site:
        processes = 2 if target == REQUESTS else 1
        found = attack(target, site, seed=seed, faulted=faulted, progress=progress, processes=processes, first=first)
    if target == REQUESTS:
        return found
    with started(target) as site:
        few = max(200, faulted // 500)
        blind = [_control(attack(target, site, seed=seed, faulted=few, flaw=flaw).rows, flaw) for flaw in CONTROLS]
    return replace(found, rows=[*found.rows, *blind])


def _control(rows: list[Row], flaw: str) -> Row:
    """One row for what is broken, summed over the promises."""
    first, *_ = rows
    added = {name: sum(getattr(row, name) for row in rows) for name in COUNTED if name != "healed"}
    kinds = sum((Counter(row.faults) for row in rows), Counter[str]())
    whole: dict[str, Any] = {**added, "faults": dict(kinds), "healed": None, "extra_requests": None}
    return replace(first, system=CONTROL, store=f"{first.store}, {flaw}", promise="all three", **whole)


def _work(given: Mapping[str, Any]) -> None:
    """In a worker process: attack its share of the operations until enough of them have met a fault."""
    share, of, target = given["share"], given["of"], given["target"]
    stores = _opened(target, given["url"])
    port = urlsplit(given["url"]).port
    world = _Requests(stores, given["flaw"], port or 0) if target == REQUESTS else _Writes(stores, given["flaw"])
    tally, struck = Tally(), Counter[str]()
    left, tasks = -(-given["faulted"] // of), len(range(share, given["tasks"], of)) or None
    for done in itertools.count(1):
        task = Task(world, plan(target, given["seed"], given["first"] + (share + (done - 1) * of) * given["every"]))
        left -= tally.add(task.attack())
        struck.update(task.struck)
        is_over = done == tasks if tasks else left <= 0
        if done % _TASKS_PER_REPORT == 0 or is_over:
            report({"struck": struck, **tally.to_json()})
            tally, struck = Tally(), Counter[str]()
        if is_over:
            return
        if done % _TASKS_PER_TABLE == 0:
            world.renew()


if __name__ == "__main__":
    _work(job())
