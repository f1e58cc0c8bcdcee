"""Faults between worker and store, request by request, at scale.

Deliveries are real: the library's delivery, its store and HTTP, through a proxy that
does to each request what its plan says (:mod:`lab.proof.wire`). The deliveries of one task are threads; before
each request that leaves and before each effect they wait for their turn, so that a plan fixes the whole
course of its task: who goes when, which request meets which fault, when leases end, when a request that was
held up lands after all. Some plans let the threads run freely instead.

An operation may be announced first, as by a publisher that publishes once, and a lease be ended for a process that is
taken for dead, while it lives.

First every operation with every fault under every promise, then pairs of those and random plans by seed.
After each task come clean deliveries past the lease, everything that is still on the way lands, and an audit
compares effects, records and what every caller was told.

Nothing waits: leases end because the store's clock is moved, and botocore's pauses between its tries and
its budget of tries, which would let one task depend on those before it, are switched off.
"""

import contextlib
import http.client
import itertools
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from botocore.retries.quota import RetryQuota

from celery_idempotent.engine.claim import Claim, effect_key, end_lease
from celery_idempotent.engine.delivery import ControlFlow, Delivery, Event, EventName
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.engine.publisher import announce
from celery_idempotent.errors import SafeToRetry, StoreUnavailable
from celery_idempotent.protocol.publishing import Announce, Outgoing
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores.dynamodb import DynamoDBStore, direct
from celery_idempotent.stores.dynamodb.wire import HttpReply
from celery_idempotent.stores.dynamodb.wire import Wire as DirectWire
from celery_idempotent.testing import StoreWrapper
from lab.embedded import EmbeddedAws
from lab.proof.flaws import FLAWS
from lab.proof.fleet import Progress, fan_out, job, report
from lab.proof.table import Row
from lab.proof.verdicts import (
    CODEC,
    FINAL,
    PROMISES,
    Promise,
    Remembered,
    Tally,
    Told,
    Verdict,
    ending,
    operation,
    tell,
)
from lab.proof.wire import ORDER, Wire

__all__ = ["SINGLES", "Fault", "Operation", "Plan", "Program", "Result", "Strike", "campaign", "plans", "run"]

CAMPAIGN = "faults per request"

_TASKS_PER_TABLE = 250

_HUNG_AFTER = 60.0
"""Seconds without a step of a delivery whose turn it is."""


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


class Operation(StrEnum):
    """What a request is for."""

    CLAIM = "claim"
    TAKEOVER = "takeover claim"
    RECLAIM = "claim after release"
    RENEWAL = "renewal"
    COMPLETION = "completion"
    FAILURE = "failure"
    RELEASE = "release"
    GIVING_UP = "giving up"
    LEASE_END = "end of a lease for the dead"
    ANNOUNCEMENT = "announcement"


class Program(StrEnum):
    """What a body does after its effect."""

    RETURNS = "returns"
    RENEWS = "renews before and after its effect, and returns"
    REMEMBERED = "fails for good"
    FAILS = "fails"
    STOPS_BEFORE = "stops before its effect"
    EXITS = "is shut down"


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault and where it strikes.

    Args:
        operation: Which requests.
        fault: What becomes of them.
        times: How many in a row, from the first: botocore tries three times, and then the library does again.
        delivery: Of which delivery; None: whichever comes.
    """

    operation: Operation
    fault: Fault
    times: int = 1
    delivery: int | None = None

    def __str__(self) -> str:
        whose = "" if self.delivery is None else f" of delivery {self.delivery}"
        return f"{self.times} x {self.fault} at {self.operation}{whose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole course of one task.

    Args:
        promise: How the library is used.
        program: What the bodies do.
        strikes: The faults.
        deliveries: How many there are before the clean ones, all at once.
        moves: Who goes when: ``"0"`` one step of delivery 0, ``"0!"`` all of it, ``"lease"`` the lease ends,
            ``"dead"`` somebody ends it who takes its owner for dead, ``"land"`` held requests land. What is left
            afterwards goes in order.
        is_announced: Whether a publisher records the operation before its first delivery.
        clock_follows: Whether the workers' own clocks see the time that ends a lease, or stand still as in a
            process that was stopped.
        free: Whether the deliveries run freely instead; only the plan is then reproducible.
        group: Under which heading it counts.
    """

    promise: Promise
    program: Program = Program.RETURNS
    strikes: tuple[Strike, ...] = ()
    deliveries: int = 1
    moves: tuple[str, ...] = ()
    is_announced: bool = False
    clock_follows: bool = False
    free: bool = False
    group: str = ""

    def __str__(self) -> str:
        parts = [f"{self.promise.name}, {self.deliveries} deliveries, the body {self.program}", *map(str, self.strikes)]
        parts += [" ".join(self.moves)] if self.moves else []
        parts += ["announced"] if self.is_announced else []
        parts += [f"clock follows: {self.clock_follows}, free: {self.free}"]
        return "; ".join(parts)

    @property
    def heals(self) -> bool:
        """Whether a resend outlives every fault, so that the first delivery must end well with one effect."""
        return (
            self.deliveries == 1
            and not self.moves
            and self.program in (Program.RETURNS, Program.RENEWS, Program.REMEMBERED)
            and all(each.times == 1 for each in self.strikes)
            and len({each.operation for each in self.strikes}) == len(self.strikes)
        )


class _Turns:
    """Lets one delivery go at a time: each waits for its turn before everything it does to the world."""

    def __init__(self, plan: Plan, task: "_Task") -> None:
        self._plan = plan
        self._task = task
        self._go = [threading.Semaphore(0) for _ in range(plan.deliveries)]
        self._yielded = threading.Semaphore(0)
        self._over = [False] * plan.deliveries

    def wait(self, number: int) -> None:
        """In a delivery: hand over, and return when it is its turn."""
        if not self._plan.free:
            self._yielded.release()
            self._go[number].acquire()

    def leave(self, number: int) -> None:
        """In a delivery: it is over."""
        self._over[number] = True
        self._yielded.release()

    def conduct(self) -> None:
        """Let everything happen."""
        threads = [
            threading.Thread(target=self._task.deliver, args=(number, self), daemon=True)
            for number in range(self._plan.deliveries)
        ]
        for thread in threads:
            thread.start()
        if not self._plan.free:
            self._await(len(threads))
            for move in self._plan.moves:
                self._make(move)
            for number in range(len(threads)):
                self._make(f"{number}!")
        for thread in threads:
            thread.join(_HUNG_AFTER)
            if thread.is_alive():
                raise TimeoutError(f"a delivery hangs: {self._plan}")

    def _make(self, move: str) -> None:
        if move == "lease":
            self._task.end_lease()
        elif move == "dead":
            self._task.bury()
        elif move == "land":
            self._task.land()
        else:
            number = int(move.rstrip("!"))
            self._step(number)
            while move.endswith("!") and not self._over[number]:
                self._step(number)

    def _step(self, number: int) -> None:
        if not self._over[number]:
            self._go[number].release()
            self._await(1)

    def _await(self, steps: int) -> None:
        for _ in range(steps):
            if not self._yielded.acquire(timeout=_HUNG_AFTER):
                raise TimeoutError(f"a delivery hangs: {self._plan}")


class _Clock:
    """A worker's own clock: sleeping moves it at once."""

    def __init__(self, task: "_Task") -> None:
        self._task = task
        self._slept = 0.0

    def monotonic(self) -> float:
        return self._slept + (self._task.ahead / 1000 if self._task.plan.clock_follows else 0.0)

    def sleep(self, seconds: float, /) -> None:
        self._slept += seconds


_PUBLISHER, _PARENT = -1, -2
"""Who else writes, by number."""


class _Delivery(StoreWrapper):
    """One delivery, as the store that it is given: sees every swap, and orders the fate of every request.

    The same for a publisher, and for the parent of a process: they have no turns, and are struck all the same.
    """

    def __init__(self, store: Store, task: "_Task", number: int, turns: _Turns | None) -> None:
        super().__init__(store)
        self.task = task
        self.number = number
        self._turns = turns
        self._doing: Operation | None = None
        self._token = 0

    def now(self) -> int:
        return self.store.now() + self.task.ahead

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self._doing = self._name(new)
        _current.delivery = self
        try:
            stored = self.store.swap(new, expected)
        finally:
            _current.delivery = None
        won = stored is not None and stored.revision == new.revision
        if won and new.status is Status.IN_PROGRESS:
            self._token = new.fencing_token
        self.task.note(self, new, stored)
        return stored

    def turn(self) -> None:
        """Wait for this delivery's turn."""
        if self._turns:
            self._turns.wait(self.number)

    def order(self) -> str:
        """What is to become of the request that is about to leave."""
        self.turn()
        assert self._doing is not None
        return self.task.order(self._doing, self.number if self._turns or self.number < 0 else None)

    def _name(self, new: Record) -> Operation:
        if self.number < 0:
            return Operation.ANNOUNCEMENT if self.number == _PUBLISHER else Operation.LEASE_END
        if new.status is not Status.IN_PROGRESS:
            return _ENDS[new.status]
        if new.fencing_token == self._token:
            return Operation.RENEWAL
        return Operation.CLAIM if new.attempts == 1 else Operation.TAKEOVER if new.takeovers else Operation.RECLAIM


_ENDS = {
    Status.COMPLETED: Operation.COMPLETION,
    Status.FAILED: Operation.FAILURE,
    Status.RELEASED: Operation.RELEASE,
    Status.UNKNOWN: Operation.GIVING_UP,
}


class _Current(threading.local):
    """The delivery whose swap the calling thread executes."""

    delivery: _Delivery | None = None


_current = _Current()


def _always(quota: RetryQuota, capacity_amount: int) -> bool:
    return True


_exchange = DirectWire.exchange


def _ordered(wire: DirectWire, headers: Mapping[str, str], body: bytes) -> HttpReply:
    """Send a request with its order, if it is one of a delivery."""
    delivery = _current.delivery
    order = delivery.order() if delivery else ""
    return _exchange(wire, {**headers, ORDER: order} if order else headers, body)


class _World:
    """A worker process: one way to the proxy for all its tasks, and a table for some hundred of them."""

    def __init__(self, port: int, name: str, flaw: str) -> None:
        vars(direct)["time"] = SimpleNamespace(sleep=lambda seconds: None)
        RetryQuota.acquire = _always  # type: ignore[assignment]
        DirectWire.exchange = _ordered  # type: ignore[assignment, method-assign]
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

    def land(self, name: str) -> None:
        """Let a held request reach the store now."""
        self._control.request("POST", "/", headers={ORDER: f"land {name}", "Content-Length": "0"})
        self._control.getresponse().read()


class _Task:
    """One task: its plan, its ledger, and everything that was seen of it."""

    def __init__(self, world: _World, plan: Plan) -> None:
        self.plan = plan
        self.ahead = 0
        self.requests = 0
        self.healed = 0
        self.faults: Counter[str] = Counter()
        self.struck: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.effects: list[tuple[str, int]] = []
        self.begun: list[int] = []
        self.claims: dict[int, tuple[int, str]] = {}
        self.finals: list[Record] = []
        self.told: list[Told] = []
        self.problems: list[str] = []
        self._world = world
        self._key = f"proof:1:{uuid4().hex}"
        self._left = [each.times for each in plan.strikes]
        self._held: list[str] = []
        self._announced = ""
        self._lock = threading.Lock()
        self._lease = plan.promise.policy.lease_ms + plan.promise.policy.grace_ms + 1

    def attack(self) -> Verdict:
        """Everything, from the first delivery to the audit."""
        if self.plan.is_announced:
            self._announce()
        _Turns(self.plan, self).conduct()
        self.end_lease(planned=False)
        clean = [self.deliver(self.plan.deliveries)]
        while self._held or self.events[_CLEAN_RUN] >= len(clean):
            self.land()
            clean.append(self.deliver(self.plan.deliveries + len(clean)))
        return _audit(self, clean)

    def deliver(self, number: int, turns: _Turns | None = None) -> Told:
        """One delivery, clean if it takes no turns."""
        delivery = _Delivery(self._world.store, self, number, turns)
        try:
            delivery.turn()
            told = self._told(delivery, clean=turns is None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, a caller must never meet it
            told = Told(f"{type(error).__name__}: {error}")
            self.problems.append(f"delivery {number} raised {told.how}")
        self.told.append(told)
        if turns:
            turns.leave(number)
        return told

    def end_lease(self, *, planned: bool = True) -> None:
        """Move the store's clock past every lease granted so far."""
        self.ahead += self._lease
        self.faults["lease ended early"] += planned

    def bury(self) -> None:
        """End the lease of whoever has the claim, as the parent of a process does that died; this one lives."""
        record = self._world.store.get(self._key)
        if record is not None and record.status is Status.IN_PROGRESS:
            self.faults["lease ended by another"] += 1
            with contextlib.suppress(StoreUnavailable):
                end_lease(_Delivery(self._world.store, self, _PARENT, None), record, _Clock(self))

    def _announce(self) -> None:
        """Record the operation, as a publisher does; without a certain answer the message is sent all the same."""
        outgoing = Outgoing(operation=operation(self._key, self.plan.promise, _PUBLISHER), patience=self._lease)
        with contextlib.suppress(StoreUnavailable):
            decision = announce(_Delivery(self._world.store, self, _PUBLISHER, None), outgoing)
            if isinstance(decision, Announce):
                self._announced = decision.record.revision
            else:
                self.problems.append(f"the first publisher was told {decision}")

    def land(self) -> None:
        """Let every held request reach the store now."""
        held, self._held = self._held, []
        for name in held:
            self._world.land(name)
        self.faults["landed late"] += len(held)

    def order(self, doing: Operation, number: int | None) -> str:
        """What becomes of a request; ``number`` is None for clean deliveries, which nothing strikes."""
        with self._lock:
            self.requests += 1
            for index, strike in enumerate(self.plan.strikes if number is not None else ()):
                if strike.operation is doing and self._left[index] and strike.delivery in (None, number):
                    self._left[index] -= 1
                    return self._strike(strike)
        return ""

    def note(self, delivery: _Delivery, new: Record, stored: Record | None) -> None:
        """Look at what a swap returned."""
        with self._lock:
            if stored is None:
                self.problems.append("the record vanished")
                return
            self.healed += stored is not new and stored.revision == new.revision
            known = self.claims.setdefault(stored.attempts, (stored.fencing_token, stored.owner))
            if known != (stored.fencing_token, stored.owner) and stored.status is not Status.UNKNOWN:
                self.problems.append(f"attempt {stored.attempts} is {known} and {stored.fencing_token, stored.owner}")
            if stored.status in FINAL:
                self.finals.append(stored)

    def _strike(self, strike: Strike) -> str:
        self.faults[strike.fault.replace("-", " ")] += 1
        self.struck[strike.operation, strike.fault] += 1
        if strike.fault is not Fault.HELD:
            return strike.fault
        name = uuid4().hex
        self._held.append(name)
        return f"{strike.fault} {name}"

    def _told(self, delivery: _Delivery, *, clean: bool) -> Told:
        # As the message tells it: to the first delivery, and to all that come after the claim.
        delivered = replace(operation(self._key, self.plan.promise, delivery.number), announced=self._announced)
        ours = Delivery(delivered, delivery, CODEC, _HEARTBEAT, ControlFlow(), self._observe, _Clock(self))

        def body(attempt: Claim | None) -> str:
            assert attempt is not None
            self.events[_CLEAN_RUN] += clean
            self.begun.append(attempt.fencing_token)
            return self._act(attempt, delivery, clean)

        try:
            return tell(ours, body)
        except _Failed as failure:
            # An outcome only where the policy records it; elsewhere the claim was given back.
            return Told("failed" if self.plan.promise.on_takeover == "refuse" else "raised", str(failure))
        except (SafeToRetry, SystemExit):
            return Told("raised")

    def _act(self, attempt: Claim, delivery: _Delivery, clean: bool) -> str:
        program = self.plan.program
        if program is Program.STOPS_BEFORE and not clean:
            raise SafeToRetry
        self._renew(attempt)
        delivery.turn()
        receipt = effect_key(attempt.key, "charge") if self.plan.promise.keyed else f"by {delivery.number}"
        self.effects.append((receipt, attempt.fencing_token))
        if program is Program.REMEMBERED:
            raise Remembered(receipt)
        if program is Program.FAILS and not clean:
            raise _Failed(receipt)
        if program is Program.EXITS and not clean:
            raise SystemExit(receipt)
        self._renew(attempt)
        return receipt

    def _renew(self, attempt: Claim) -> None:
        if self.plan.program is Program.RENEWS:
            attempt.renew()
            attempt.ensure_owned()

    def _observe(self, event: Event) -> None:
        self.events[event.name] += 1


class _Failed(Exception):
    pass


class _PlannedRenewals(Heartbeat):
    """Renews nothing by real time: bodies renew when their plan says so."""

    def start(self, attempt: Claim) -> None:
        pass


_HEARTBEAT = _PlannedRenewals()


_CLEAN_RUN = "a clean delivery ran the body"


def _audit(task: _Task, clean: list[Told]) -> Verdict:
    plan = task.plan
    effects = len({receipt for receipt, _ in task.effects}) if plan.promise.keyed else len(task.effects)
    try:
        end = ending(task.finals)
    except ValueError as changed:
        end = task.finals[-1]
        task.problems.append(str(changed))
    status = end.status if end else None
    faults = {kind: count for kind, count in task.faults.items() if count}
    unexplained = status is Status.UNKNOWN and not faults and plan.program is not Program.EXITS
    return Verdict(
        task=str(plan),
        promise=plan.promise.name,
        group=plan.group,
        deliveries=len(task.told),
        faults=faults,
        effects=effects,
        unknown=status is Status.UNKNOWN,
        unexplained=unexplained,
        stuck=not _ends_well(clean[0], plan),
        takeovers=task.events[EventName.TAKEN_OVER],
        healed=task.healed,
        requests=task.requests,
        problems=tuple(itertools.chain(task.problems, _problems(task, clean, effects, status))),
    )


def _ends_well(told: Told, plan: Plan) -> bool:
    return told.is_outcome or (told.how == "OutcomeUnknown" and plan.promise.on_takeover == "refuse")


def _problems(task: _Task, clean: list[Told], effects: int, status: Status | None) -> Iterator[str]:
    outcomes = {each for each in task.told if each.is_outcome}
    if not task.plan.promise.allows(effects):
        yield f"{effects} effects"
    if len(outcomes) > 1:
        yield f"deliveries were told different outcomes: {outcomes}"
    if outcomes and not task.effects:
        yield "an outcome was reported and there was no effect"
    if outcomes and status is Status.UNKNOWN:
        yield "an outcome was reported and the record says UNKNOWN"
    if len(set(clean)) > 1 or not _ends_well(clean[0], task.plan):
        yield f"clean deliveries were told {clean}"
    if status is None:
        yield "the operation has no end"
    if status is Status.UNKNOWN and task.plan.promise.on_takeover == "rerun":
        yield "UNKNOWN where it may run again"
    if status is Status.UNKNOWN and not _may_repeat(task):
        yield "UNKNOWN without a cause"
    if len(task.effects) > 1 and not _may_repeat(task):
        yield f"the effect was repeated without a cause: {task.effects}"
    if len(set(task.begun)) < len(task.begun):
        yield f"two bodies ran under one fencing token: {task.begun}"
    if not set(task.begun) <= {token for token, _ in task.claims.values()}:
        yield f"a body ran without a stored claim: {task.begun}, {task.claims}"
    tokens = [token for _, (token, _) in sorted(task.claims.items())]
    if any(later <= earlier for earlier, later in itertools.pairwise(tokens)):
        yield f"fencing tokens did not grow: {tokens}"
    if task.plan.heals and (len(task.effects) != 1 or not task.told[0].is_outcome):
        yield f"a fault that a resend outlives left a trace: {len(task.effects)} effects, told {task.told}"


def _may_repeat(task: _Task) -> bool:
    """Whether an attempt's end may have been unknown to the next: a lease ended early, or an end was not recorded."""
    return (
        not {"lease", "dead"}.isdisjoint(task.plan.moves)
        or task.plan.program in (Program.FAILS, Program.EXITS)
        or bool(task.events[EventName.STORE_UNAVAILABLE])
        or Told("StoreUnavailable") in task.told  # a body may meet it, too, when it renews
    )


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

_TIMES = (1, 3, 6, 9)
"""One try, all tries of botocore, all of the library's claim too, and some of a completion's."""

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
        for promise, times in itertools.product(PROMISES.values(), (1, 3)):
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


def _random(seed: int, number: int) -> Plan:
    rng = random.Random(f"{seed}:{number}")
    program = rng.choices(list(Program), (8, 3, 2, 2, 2, 1))[0]
    deliveries = rng.choices((1, 2, 3), (6, 4, 1))[0]
    promise = rng.choice(list(PROMISES.values()))
    free = deliveries > 1 and rng.random() < 0.1
    moves: tuple[str, ...] = ()
    if not free and (deliveries > 1 or rng.random() < 0.2):
        moves = tuple(_random_move(rng, deliveries) for _ in range(rng.randint(3, 14)))
    return Plan(
        promise=promise,
        program=program,
        strikes=tuple(_random_strike(rng, program, deliveries) for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])),
        deliveries=deliveries,
        moves=moves,
        is_announced=rng.random() < 0.3,
        clock_follows=rng.random() < 0.5,
        free=free,
        group="random",
    )


def _random_move(rng: random.Random, deliveries: int) -> str:
    drawn = rng.random()
    if drawn < 0.06:
        return "dead"
    if drawn < 0.12:
        return "lease"
    if drawn < 0.2:
        return "land"
    return str(rng.randrange(deliveries)) + ("!" if drawn > 0.9 else "")


def _random_strike(rng: random.Random, program: Program, deliveries: int) -> Strike:
    ends = {
        Program.REMEMBERED: [Operation.FAILURE],
        Program.RENEWS: [Operation.RENEWAL, Operation.COMPLETION],
        Program.FAILS: [Operation.RELEASE, Operation.FAILURE],
        Program.STOPS_BEFORE: [Operation.RELEASE],
        Program.EXITS: [Operation.RELEASE, Operation.GIVING_UP],
    }.get(program, [Operation.COMPLETION])
    later = [Operation.TAKEOVER, Operation.GIVING_UP, Operation.LEASE_END] if deliveries > 1 else []
    return Strike(
        rng.choice([Operation.ANNOUNCEMENT, Operation.CLAIM, *ends, *later]),
        rng.choice(list(Fault)),
        rng.choices(_TIMES, (12, 3, 1, 1))[0],
        rng.randrange(deliveries) if rng.random() < 0.3 else None,
    )


def plans(tasks: int, seed: int) -> Iterator[Plan]:
    """The plans of a campaign: all single faults, then pairs and random plans in turn; of pairs, as many as fit."""
    pairs = list(_pairs())
    random.Random(seed).shuffle(pairs)
    at_random = (_random(seed, number) for number in itertools.count())
    in_turn = itertools.chain(itertools.chain.from_iterable(zip(pairs, at_random, strict=False)), at_random)
    yield from itertools.islice(itertools.chain(_singles(), in_turn), tasks)


SINGLES = sum(1 for _ in _singles())
"""How many plans there are with a single fault."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a campaign found.

    Args:
        tally: The verdicts.
        rows: Their sum, by promise.
        reached: How often each fault struck each operation.
        seconds: Wall time.
    """

    tally: Tally
    rows: list[Row]
    reached: Mapping[str, int]
    seconds: float


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
    return Result(tally, rows, reached, seconds)


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
        task = _Task(world, plan)
        verdict = task.attack()
        report(verdict.to_json() | {"struck": {f"{fault} at {op}": n for (op, fault), n in task.struck.items()}})


if __name__ == "__main__":
    _work(job())
