"""The whole course of one task: a plan, its deliveries, what is seen of them, and the audit.

The deliveries of one task go one step at a time: before each write that leaves, and before each effect, a delivery
waits for its turn. So a plan fixes who goes when, which write meets which fault, when leases end, and when a request
that was held up lands after all. At a write (:meth:`celery_idempotent.stores.Store.swap`, the one method by which
records change) the request is lost, its reply is, it arrives twice, it arrives after the sender's next one or when all
is over, the sender dies before, during or after it, or is cut off for good.

Nothing waits: leases end because the store's clock is moved, and deliveries are greenlets, so that it costs a
microsecond to hand over.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any
from uuid import uuid4

from greenlet import getcurrent, greenlet

from celery_idempotent.engine.claim import Claim, announce, confirm, effect_key, end_lease
from celery_idempotent.engine.delivery import ControlFlow, Delivery
from celery_idempotent.engine.events import Event, EventName
from celery_idempotent.errors import SafeToRetry, StoreUnavailable
from celery_idempotent.protocol.publishing import Announce, Outgoing
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import StoreWrapper
from lab.proof import verdicts
from lab.proof.verdicts import CODEC, FINAL, NO_HEARTBEAT, PROMISES, Promise, Remembered, Seen, Told, Verdict, operation


class Purpose(StrEnum):
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


class Behaviour(StrEnum):
    """What a body does after its effect."""

    RETURNS = "returns"
    RENEWS = "renews before and after its effect, and returns"
    REMEMBERED = "fails for good"
    FAILS = "fails"
    STOPS_BEFORE = "stops before its effect"
    EXITS = "is shut down"


class Fault(StrEnum):
    """What becomes of a write, or of its sender."""

    REQUEST_LOST = "request lost"
    REPLY_LOST = "reply lost"
    DOUBLED = "doubled"
    OVERTAKEN = "overtaken"
    HELD = "held"
    DIES_BEFORE = "sender dies before"
    DIES_DURING = "sender dies during"
    DIES_AFTER = "sender dies after"
    CUT_OFF = "sender cut off"


_DEATHS = (Fault.DIES_BEFORE, Fault.DIES_DURING, Fault.DIES_AFTER)
_LAST = frozenset({*_DEATHS, Fault.CUT_OFF})  # no resend outlives these
_WEIGHTS: Mapping[Fault, int] = {each: 1 if each is Fault.CUT_OFF else 5 for each in Fault}
"""How often each is drawn; who is cut off tries again for ten minutes of its own clock, which takes long here, too."""

_TIMES = (1, 2, 3, 9)  # writes: one try, both tries of a claim, and some of a completion's


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault, and so many times in a row where it strikes whom."""

    purpose: Purpose
    fault: Fault
    times: int = 1
    delivery: int | None = None

    def __str__(self) -> str:
        whose = "" if self.delivery is None else f" of delivery {self.delivery}"
        return f"{self.times} x {self.fault} at {self.purpose}{whose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole course of one task: deliveries at once, and then clean ones.

    Of the moves, ``"0"`` is one step of delivery 0, ``"0!"`` all of it, ``"lease"`` the lease's end, ``"dead"`` its end
    by somebody who takes its owner for dead, ``"land"`` held requests land. What is left afterwards goes in order.
    Where no clock follows, a worker's own stands still while a lease ends, as in a process that was stopped.
    """

    promise: Promise
    behaviour: Behaviour = Behaviour.RETURNS
    strikes: tuple[Strike, ...] = ()
    deliveries: int = 1
    moves: tuple[str, ...] = ()
    is_announced: bool = False
    clock_follows: bool = False
    number: int = 0

    def __str__(self) -> str:
        parts = [f"plan {self.number}, {self.promise.name}, {self.deliveries} deliveries, the body {self.behaviour}"]
        parts += [*map(str, self.strikes), " ".join(self.moves), "announced" * self.is_announced]
        return "; ".join(filter(None, (*parts, "clock follows" * self.clock_follows)))

    @property
    def heals(self) -> bool:
        """Whether a resend outlives every fault, so that the first delivery must end well with one effect."""
        ends_well = self.behaviour in (Behaviour.RETURNS, Behaviour.RENEWS, Behaviour.REMEMBERED)
        is_alone = self.deliveries == 1 and not self.moves and ends_well
        are_apart = len({each.purpose for each in self.strikes}) == len(self.strikes)
        return is_alone and are_apart and all(each.times == 1 and each.fault not in _LAST for each in self.strikes)


class Clock:
    """A worker's own clock: sleeping moves it at once."""

    def __init__(self, task: "Task") -> None:
        self._task = task
        self._slept = 0.0

    def monotonic(self) -> float:
        return self._slept + (self._task.ahead / 1000 if self._task.plan.clock_follows else 0.0)

    def sleep(self, seconds: float, /) -> None:
        self._slept += seconds


PUBLISHER, PARENT = -1, -2
"""Who else writes, by number. They have no turns, and are struck all the same."""


class Dead(BaseException):
    """Unwinds a delivery whose process was killed; nothing that it asks for afterwards reaches the store."""


class OneDelivery(StoreWrapper):
    """One delivery, as the store that it is given: sees every swap, and does to it what the plan says."""

    def __init__(self, task: "Task", number: int, turn: Callable[[], object] | None = None) -> None:
        super().__init__(task.store)
        self.task = task
        self.number = number
        self.turn = turn or (lambda: None)
        self._is_struck = turn is not None or number < 0
        self._is_dead = self._is_cut_off = False
        self._overtaken: Callable[[], object] | None = None
        self._token = 0

    def now(self) -> int:
        return self.store.now() + self.task.ahead

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if self._is_dead:
            raise Dead
        self.task.is_on = True
        self.task.grant(new, expected)
        stored = self._sent(self._name(new), partial(self.store.swap, new, expected))
        if stored is not None and stored.revision == new.revision and new.status is Status.IN_PROGRESS:
            self._token = new.fencing_token
        self.task.note(new, stored)
        return stored

    def _sent(self, doing: Purpose, send: Callable[[], Record | None]) -> Record | None:
        if self._is_cut_off:
            raise StoreUnavailable("world", "swap", "cut off")
        self.turn()
        fault = self.task.fate(doing, self.number) if self._is_struck else None
        late, self._overtaken = self._overtaken, None
        try:
            return self._meet(fault, send)
        finally:
            if late:
                self.task.land(late)

    def _meet(self, fault: Fault | None, send: Callable[[], Record | None]) -> Record | None:
        match fault:
            case None:
                return send()
            case Fault.DOUBLED:
                send()
                return send()
            case Fault.REPLY_LOST | Fault.DIES_AFTER:
                send()
            case Fault.HELD | Fault.OVERTAKEN | Fault.DIES_DURING:
                self.task.hold(send)
        if fault in _DEATHS:
            self._is_dead = True
            raise Dead
        self._overtaken = send if fault is Fault.OVERTAKEN else None
        self._is_cut_off = fault is Fault.CUT_OFF
        raise StoreUnavailable("world", "swap", fault)

    def _name(self, new: Record) -> Purpose:
        if self.number < 0:
            return Purpose.ANNOUNCEMENT if self.number == PUBLISHER else Purpose.LEASE_END
        if new.status is not Status.IN_PROGRESS:
            return _ENDS[new.status]
        if new.fencing_token == self._token:
            return Purpose.RENEWAL
        return Purpose.CLAIM if new.attempts == 1 else Purpose.TAKEOVER if new.takeovers else Purpose.RECLAIM


_ENDS = {
    Status.COMPLETED: Purpose.COMPLETION,
    Status.FAILED: Purpose.FAILURE,
    Status.RELEASED: Purpose.RELEASE,
    Status.UNKNOWN: Purpose.GIVING_UP,
}


class Task:
    """One task: its plan, its ledger, and everything that was seen of it."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.plan = plan
        self.store = store
        self.ahead = 0
        self.is_on = False
        self.faults: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.effects: list[tuple[str, int]] = []
        self.begun: list[int] = []
        self.claims: dict[int, tuple[int, str]] = {}
        self.finals: list[Record] = []
        self.told: list[Told] = []
        self.problems: list[str] = []
        self._key = f"proof:1:{uuid4().hex}"
        self._left = [each.times for each in plan.strikes]
        self._held: list[Callable[[], object]] = []
        self._granted: dict[str | None, tuple[str, int]] = {}
        self._lease = plan.promise.policy.lease_ms + 1_001

    def attack(self) -> Verdict:
        if self.plan.is_announced:
            self._announce()
        self._conduct()
        self.end_lease(planned=False)
        clean = [self.deliver(self.plan.deliveries)]
        while len(clean) < _MOST_CLEAN and (self._held or self.events[_CLEAN_RUN] >= len(clean)):
            self.land()
            clean.append(self.deliver(self.plan.deliveries + len(clean)))
        return self._verdict(clean)

    def _conduct(self) -> None:
        """Let one delivery go at a time: each waits for its turn before everything it does to the world."""
        conductor = getcurrent()
        going: list[Any] = [
            greenlet(partial(self.deliver, number, conductor.switch)) for number in range(self.plan.deliveries)
        ]
        for each in going:
            each.switch()
        for move in (*self.plan.moves, *(f"{number}!" for number in range(self.plan.deliveries))):
            match move:
                case "lease":
                    self.end_lease()
                case "dead":
                    self._bury()
                case "land":
                    self.land()
                case _:
                    one = going[int(move.rstrip("!"))]
                    if not one.dead:
                        one.switch()
                    while move.endswith("!") and not one.dead:
                        one.switch()

    def deliver(self, number: int, turn: Callable[[], object] | None = None) -> Told:
        """One delivery, clean if it takes no turns."""
        delivery = OneDelivery(self, number, turn)
        try:
            delivery.turn()
            told = self._told(delivery, clean=turn is None)
        except Dead:
            told = _DIED
        except BaseException as error:  # noqa: BLE001 - whatever it is, a caller must never meet it
            told = Told(f"{type(error).__name__}: {error}")
            self.problems.append(f"delivery {number} raised {told.how}")
        self.told.append(told)
        return told

    def end_lease(self, *, planned: bool = True) -> None:
        """Move the store's clock past every lease granted so far."""
        self.ahead += self._lease
        self.faults["lease ended early"] += planned and self.is_on and not self.finals

    def _bury(self) -> None:
        """End the lease of whoever has the claim, as the parent of a process does that died; this one lives."""
        record = self.store.get(self._key)
        if record is not None and record.status is Status.IN_PROGRESS:
            self.faults["lease ended by another"] += 1
            with contextlib.suppress(StoreUnavailable, Dead):
                end_lease(OneDelivery(self, PARENT), record, Clock(self))

    def _announce(self) -> None:
        """Record the operation and confirm it, as a publisher does; in any case the message is sent."""
        outgoing = Outgoing(operation=operation(self._key, self.plan.promise, PUBLISHER), queued_for=self._lease)
        publisher = OneDelivery(self, PUBLISHER)
        with contextlib.suppress(StoreUnavailable):
            decision = announce(publisher, outgoing)
            if isinstance(decision, Announce):
                confirm(publisher, decision, outgoing)
            else:
                self.problems.append(f"the first publisher was told {decision}")

    def hold(self, late: Callable[[], object]) -> None:
        """Keep a request back until :meth:`land`, or until ``late`` is given to it."""
        self._held.append(late)

    def land(self, late: Callable[[], object] | None = None) -> None:
        """Let every held request, or the one called ``late`` if it is still held, reach the store now."""
        landing = [each for each in self._held if late in (None, each)]
        self._held = [each for each in self._held if each not in landing]
        for each in landing:
            each()
        self.faults["landed late"] += len(landing)

    def fate(self, doing: Purpose, number: int) -> Fault | None:
        for index, strike in enumerate(self.plan.strikes):
            if strike.purpose is doing and self._left[index] and strike.delivery in (None, number):
                self._left[index] -= 1
                self.faults[strike.fault] += 1
                self.struck[f"{strike.fault} at {strike.purpose}"] += 1
                return strike.fault
        return None

    def grant(self, new: Record, expected: str | None) -> None:
        """Keep in mind who first asks for a lease at which time; nobody asks for another's that has not ended."""
        if new.status is Status.IN_PROGRESS and new.lease_until:
            owner, since = self._granted.get(expected, (new.owner, 0))
            if owner != new.owner and since == self.ahead:
                self.problems.append(f"attempt {new.attempts} took over while a lease ran")
            self._granted.setdefault(new.revision, (new.owner, self.ahead))

    def note(self, new: Record, stored: Record | None) -> None:
        if stored is None:
            self.problems.append("the record vanished")
            return
        known = self.claims.setdefault(stored.attempts, (stored.fencing_token, stored.owner))
        if known != (stored.fencing_token, stored.owner) and stored.status is not Status.UNKNOWN:
            self.problems.append(f"attempt {stored.attempts} is {known} and {stored.fencing_token, stored.owner}")
        if stored.status in FINAL:
            self.finals.append(stored)

    def _told(self, delivery: OneDelivery, *, clean: bool) -> Told:
        delivered = operation(self._key, self.plan.promise, delivery.number)

        def observe(event: Event) -> None:
            self.events[event.name] += 1

        def body(attempt: Claim | None) -> str:
            assert attempt is not None
            self.events[_CLEAN_RUN] += clean
            self.begun.append(attempt.fencing_token)
            return self._act(attempt, delivery, clean)

        try:
            return verdicts.tell(
                Delivery(delivered, delivery, CODEC, NO_HEARTBEAT, ControlFlow(), observe, Clock(self)), body
            )
        except _Failed as failure:
            # An outcome only where the policy records it; elsewhere the claim was given back.
            return Told("failed" if self.plan.promise.on_takeover == "refuse" else "raised", str(failure))
        except (SafeToRetry, SystemExit):
            return Told("raised")

    def _act(self, attempt: Claim, delivery: OneDelivery, clean: bool) -> str:
        behaviour = self.plan.behaviour
        if behaviour is Behaviour.STOPS_BEFORE and not clean:
            raise SafeToRetry
        self._renew(attempt)
        delivery.turn()
        receipt = effect_key(attempt.key, "charge") if self.plan.promise.keyed else f"by {delivery.number}"
        self.effects.append((receipt, attempt.fencing_token))
        if behaviour is Behaviour.REMEMBERED:
            raise Remembered(receipt)
        if behaviour is Behaviour.FAILS and not clean:
            raise _Failed(receipt)
        if behaviour is Behaviour.EXITS and not clean:
            raise SystemExit(receipt)
        self._renew(attempt)
        return receipt

    def _renew(self, attempt: Claim) -> None:
        if self.plan.behaviour is Behaviour.RENEWS:
            attempt.renew()
            attempt.ensure_owned()

    def _verdict(self, clean: list[Told]) -> Verdict:
        ends = {verdicts.snapshot(each): each for each in self.finals}
        outcomes = [each for each in ends.values() if each.status is not Status.UNKNOWN]
        # UNKNOWN may be left, for what its owner recorded after all.
        if max(len(outcomes), len(ends) - len(outcomes), len({each.owner for each in ends.values()})) > 1:
            self.problems.append(f"a final state was changed: {list(ends)}")
        end = next(iter((*outcomes, *ends.values())), None)
        seen = self.seen(clean, end.status if end else None)
        faults = {kind: count for kind, count in self.faults.items() if count}
        return Verdict(
            task=str(self.plan),
            promise=self.plan.promise.name,
            deliveries=len(self.told),
            faults=faults,
            reached=self.struck,
            effects=seen.effects,
            unknown=seen.unknown,
            unexplained=seen.unknown and not faults and self.plan.behaviour is not Behaviour.EXITS,
            stuck=seen.stuck,
            takeovers=self.events[EventName.TAKEN_OVER],
            problems=(*self.problems, *self.breaches(seen)),
        )

    def seen(self, clean: list[Told], status: Status | None) -> Seen:
        receipts = [receipt for receipt, _ in self.effects]
        may_repeat = self._may_repeat()
        return Seen(
            promise=self.plan.promise,
            effects=len(set(receipts)) if self.plan.promise.keyed else len(receipts),
            told=self.told,
            clean=clean,
            status=status,
            tokens=[token for _, (token, _) in sorted(self.claims.items())],
            excused=None if may_repeat else 0,
            may_be_unknown=may_repeat,
        )

    def breaches(self, seen: Seen) -> Iterator[str]:
        """The rules of the audit, and what is known only here."""
        yield from verdicts.breaches(seen)
        if seen.excused == 0 and len(self.effects) > 1 == seen.effects:
            yield f"the effect was repeated without a cause: {self.effects}"
        if len(set(self.begun)) < len(self.begun):
            yield f"two bodies ran under one fencing token: {self.begun}"
        if not set(self.begun) <= {token for token, _ in self.claims.values()}:
            yield f"a body ran without a stored claim: {self.begun}, {self.claims}"
        if self.plan.heals and (len(self.effects) != 1 or not self.told[0].is_outcome):
            yield f"a fault that a resend outlives left a trace: {len(self.effects)} effects, told {self.told}"

    def _may_repeat(self) -> bool:
        """Whether an attempt's end may have been unknown to the next: a lease ended early, or it was not recorded."""
        return (
            not {"lease", "dead"}.isdisjoint(self.plan.moves)
            or self.plan.behaviour in (Behaviour.FAILS, Behaviour.EXITS)
            or bool(self.events[EventName.STORE_UNAVAILABLE])
            or _DIED in self.told
            or Told("StoreUnavailable") in self.told  # a body may meet it, too, when it renews
        )


class _Failed(Exception):
    pass


_CLEAN_RUN = "a clean delivery ran the body"
_MOST_CLEAN = 5  # deliveries afterwards: if each of them runs its body, something is broken, and the audit says so
_DIED = Told("died")


def at_random(target: str, seed: int, number: int) -> Plan:
    """A plan of its own for every store, ``seed`` and ``number``: what many stores went through adds up."""
    rng = random.Random(f"{target}:{seed}:{number}")
    behaviour = rng.choices(list(Behaviour), (8, 3, 2, 2, 2, 1))[0]
    deliveries = rng.choices((1, 2, 3), (6, 4, 1))[0]
    moves: tuple[str, ...] = ()
    if deliveries > 1 or rng.random() < 0.2:
        moves = tuple(_random_move(rng, deliveries) for _ in range(rng.randint(3, 14)))
    later = [Purpose.TAKEOVER, Purpose.GIVING_UP, Purpose.LEASE_END] if deliveries > 1 else []
    struck = [Purpose.ANNOUNCEMENT, Purpose.CLAIM, *_ENDED_BY[behaviour], *later]
    strikes = tuple(
        _strike(rng, rng.choice(struck), rng.randrange(deliveries) if rng.random() < 0.3 else None)
        for _ in range(rng.choices((1, 2, 3), (6, 3, 1))[0])
    )
    return Plan(
        promise=rng.choice(list(PROMISES.values())),
        behaviour=behaviour,
        strikes=strikes,
        deliveries=deliveries,
        moves=moves,
        is_announced=rng.random() < 0.3 or any(each.purpose is Purpose.ANNOUNCEMENT for each in strikes),
        clock_follows=rng.random() < 0.5,
        number=number,
    )


def _strike(rng: random.Random, purpose: Purpose, delivery: int | None) -> Strike:
    fault = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    if purpose is Purpose.ANNOUNCEMENT and fault in _LAST:
        fault = Fault.HELD  # a publisher that dies sends no message, so there is nothing to deliver
    times = 1 if fault in _LAST else rng.choices(_TIMES, (12, 3, 1, 1))[0]
    return Strike(purpose, fault, times, delivery)


def _random_move(rng: random.Random, deliveries: int) -> str:
    drawn = rng.random()
    for name, limit in (("dead", 0.06), ("lease", 0.12), ("land", 0.2)):
        if drawn < limit:
            return name
    return str(rng.randrange(deliveries)) + ("!" if drawn > 0.9 else "")


_ENDED_BY: Mapping[Behaviour, tuple[Purpose, ...]] = {
    Behaviour.RETURNS: (Purpose.COMPLETION,),
    Behaviour.RENEWS: (Purpose.RENEWAL, Purpose.COMPLETION),
    Behaviour.REMEMBERED: (Purpose.FAILURE,),
    Behaviour.FAILS: (Purpose.RELEASE, Purpose.FAILURE),
    Behaviour.STOPS_BEFORE: (Purpose.RELEASE, Purpose.RECLAIM),
    Behaviour.EXITS: (Purpose.RELEASE, Purpose.GIVING_UP),
}
