"""Every interleaving of a few deliveries of one operation, under every fault, on the production code.

Nothing is modelled but the world around the library: claims and deliveries run as they are. A delivery stops at each
thing it asks of the world (a swap, its effect); the explorer chooses what happens. Worlds that were seen before are not
explored again.

At every step the world may let any delivery go on; kill it before its request is sent, or with its request on the way,
to land at any later time or never; lose a reply, or a request, which may land later; end the running lease. Where a
program says so it may also forget what is not finished, let an exception of somebody else's strike in a write, answer
what cannot be read, or let a publisher record the operation, and confirm or take that back at any later time. Faults
are bounded, ends of leases are not.

Deliveries are all alike. So each may be another message of the operation, or the same one that a broker gives again
while its body lives on. Who knows for certain that a child is dead may end its lease, which any step may do.
"""

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation, abandoned
from celery_idempotent.protocol.publishing import Announce, Outgoing, confirmed, publication
from celery_idempotent.protocol.record import Record, Status
from lab.proof.programs import OF_PUBLISHERS, Effect, Fault, Program
from lab.proof.scripted import (
    ANY,
    FENCED_OFF,
    KEY,
    START,
    Answer,
    Call,
    Deliveries,
    Ended,
    Gone,
    Look,
    Swap,
    arguments_of,
    publishers_nonce,
)
from lab.proof.verdicts import OUTCOMES

_FORGETTING = 100
"""Milliseconds that pass while a store forgets: claims before and after it have different tokens."""

_DEAD = "dead"

_Fates = Mapping[Fault, tuple[Literal["before", "sent", "after"], Answer | None]]
"""By fault: whether the request is lost, on its way, or done; and what its sender is answered, or None if killed."""

_OF_WRITES: _Fates = {
    Fault.KILLED_BEFORE_SEND: ("before", None),
    Fault.KILLED_IN_FLIGHT: ("sent", None),
    Fault.REPLY_LOST: ("after", Answer.NONE),
    Fault.REQUEST_LOST: ("before", Answer.NONE),
    Fault.CUT_OFF: ("before", Answer.NONE_ANY_MORE),
    Fault.REQUEST_LATE: ("sent", Answer.NONE),
    Fault.STRUCK_BEFORE_SEND: ("before", Answer.STRUCK),
    Fault.STRUCK_IN_FLIGHT: ("sent", Answer.STRUCK),
    Fault.STRUCK_AFTER_WRITE: ("after", Answer.STRUCK),
    Fault.UNREADABLE: ("before", Answer.UNREADABLE),
}
_OF_CALLS: _Fates = {
    Fault.KILLED_BEFORE_SEND: ("before", None),
    Fault.KILLED_AFTER_EFFECT: ("after", None),
    Fault.CALL_IN_FLIGHT: ("sent", None),
    Fault.CALL_LATE: ("sent", Answer.NONE),
}


class Violation(Exception):
    """A rule does not hold; the trace is the way to the world that shows it, and what was done there."""

    def __init__(self, rule: str, trace: tuple[str, ...] = ()) -> None:
        super().__init__(rule, trace)
        self.rule = rule
        self.trace = trace

    def __str__(self) -> str:
        return "\n".join([self.rule, *(f"  {number}. {step}" for number, step in enumerate(self.trace, 1))])


class _Receiver(NamedTuple):
    """The outside world: it does what it is asked, as often as it is asked, by its own rules."""

    effects: int = 0
    keys: frozenset[str] = frozenset()
    fence: int = 0

    def receive(self, call: Call) -> tuple["_Receiver", Any]:
        match call.kind:
            case "fence":
                return self._replace(fence=max(self.fence, call.token)), None
            case "probe":
                return self, "found" if call.key in self.keys else None
            case "act once per key" if call.key in self.keys:
                return self, "done"
            case "act if not fenced off" if call.token < self.fence:
                return self, FENCED_OFF
            case _:
                return self._replace(effects=self.effects + 1, keys=self.keys | {call.key}), "done"


class Write(NamedTuple):
    """A swap, with its record by number."""

    record: int
    expected: str | None
    commits: bool


class World(NamedTuple):
    """Everything that can be different; records and histories are numbers."""

    deliveries: tuple["int | str | Ended", ...]
    faults_left: int
    besides: tuple[Fault, ...]
    record: int = 0
    now: int = 0
    in_flight: frozenset[Write | Call] = frozenset()
    receiver: _Receiver = _Receiver()


@dataclass(slots=True)
class Exploration:
    """What was seen; a run that reached no fault of some kind proved nothing about it."""

    program: Program
    deliveries: int
    faults: int
    states: int = 0
    transitions: int = 0
    most_effects: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, object]:
        scope = {"program": self.program.name, "deliveries": self.deliveries, "faults": self.faults}
        counted = {"states": self.states, "transitions": self.transitions, "most effects": self.most_effects}
        return {**scope, **counted, "faults reached": dict(self.reached), "endings": dict(self.ended)}

    @property
    def missed(self) -> set[Fault]:
        return (self.program.faults if self.faults else set(self.program.besides)) - set(self.reached)


class Explorer:
    """Worlds are small tuples: records and histories are kept once and named by numbers."""

    def __init__(self, program: Program, deliveries: int, faults: int) -> None:
        self.program = program
        self.found = Exploration(program, deliveries, faults)
        self._deliveries = Deliveries(program)
        self._ordinary = program.ordinary_faults
        self._is_bare = program.effect is Effect.BARE and not program.renews
        # Enough for every lease granted so far to be over, and no more than that where all clocks are equal.
        self._lease = program.policy.lease_ms + 1000 + self._deliveries.apart * deliveries
        self._deadline = program.policy.deadline_ms
        self._records: list[Record | None] = [None]
        self._record_numbers: dict[Hashable, int] = {None: 0}
        self._histories: list[tuple[int, Any, int] | None] = [None]
        self._history_numbers: dict[tuple[int, Any, int], int] = {}
        self._request = cache(self._resumed)
        self._answers_alone: dict[Hashable, Ended] = {}

    def numbered(self) -> AbstractContextManager[None]:
        """Within the block its deliveries can be run."""
        return self._deliveries.numbered()

    def start(self) -> World:
        """Where everything begins; only within ``numbered()``."""
        deliveries = tuple(self._going_on(number, 0) for number in range(self.found.deliveries))
        return World(deliveries, self.found.faults, self.program.besides)

    def explore(self) -> Exploration:
        """Visit every reachable world once; only within ``numbered()``."""
        start = self.start()
        came_from: dict[World, tuple[World, str] | None] = {start: None}
        waiting = [start]
        while waiting:
            world = waiting.pop()
            try:
                self._check(world)
                for label, following in self._steps(world):
                    self.found.transitions += 1
                    if following not in came_from:
                        came_from[following] = (world, label)
                        waiting.append(following)
            except Violation as broken:
                raise Violation(broken.rule, (*_trail(came_from, world), *broken.trace)) from None
        self.found.states = len(came_from)
        return self.found

    def _steps(self, world: World) -> Iterator[tuple[str, World]]:
        for number, delivery in enumerate(world.deliveries):
            if isinstance(delivery, int):
                yield from self._steps_of(world, number, delivery)
            if delivery == 0:
                break  # they are all alike, so it is enough if they begin in their order
        yield from self._ends_of_leases(world)
        yield from self._losses(world)
        yield from self._announcements(world)
        for late in world.in_flight:
            rest = world._replace(in_flight=world.in_flight - {late})
            if isinstance(late, Call):
                yield f"a late call lands: {late.kind}", rest._replace(receiver=world.receiver.receive(late)[0])
            else:
                yield f"a late write lands: {self._show(late.record)}", self._applied(rest, late)[0]

    def _ends_of_leases(self, world: World) -> Iterator[tuple[str, World]]:
        record = self._records[world.record]
        if record and record.status is Status.IN_PROGRESS and record.lease_until >= START + world.now:
            is_dead = (_author(record.owner), _DEAD) in zip("0123456789", world.deliveries, strict=False)
            self.found.noted[f"a lease ends, its owner {'is dead' if is_dead else 'lives'}"] += 1
            yield "the lease ends", world._replace(now=world.now + self._lease)

    def _losses(self, world: World) -> Iterator[tuple[str, World]]:
        record = self._records[world.record]
        if Fault.FORGOTTEN in world.besides and record is not None and record.status not in OUTCOMES:
            emptied = world._replace(record=0, now=world.now + _FORGETTING)
            yield f"the store forgets {self._show(world.record)}", self._spent(emptied, Fault.FORGOTTEN)

    def _announcements(self, world: World) -> Iterator[tuple[str, World]]:
        """By somebody who is no delivery; the message is one of those that are delivered."""
        if not OF_PUBLISHERS.intersection(world.besides):
            return
        record, shown = self._records[world.record], self._show(world.record)
        message, policy = f"message {world.besides.count(Fault.PUBLISHED)}", self.program.policy
        operation = Operation(identity=Identity(KEY, None), policy=policy, task="t", task_id=message, worker="")
        outgoing = Outgoing(operation=operation, queued_for=2 * policy.lease_ms)
        if record is not None and record.revision.startswith(".") and "confirmed" not in record.revision:
            if Fault.CONFIRMED in world.besides:
                new = confirmed(record, outgoing, START + world.now, f"{record.revision} confirmed")
                following = world._replace(record=self._keep(new))
                yield f"a publisher confirms {shown}", self._spent(following, Fault.CONFIRMED)
            if not record.attempts and Fault.WITHDRAWN in world.besides:
                yield f"a publisher withdraws {shown}", self._spent(world._replace(record=0), Fault.WITHDRAWN)
        if Fault.PUBLISHED not in world.besides:
            return
        decision = publication(record, outgoing, START + world.now, publishers_nonce(world.besides))
        if isinstance(decision, Announce):
            if record is not None and decision.record.fencing_token < record.fencing_token:
                raise Violation("the fencing token shrank", (f"a publisher records over {shown}",))
            announced = self._keep(decision.record)
            following = world._replace(record=announced)
            yield f"a publisher records {self._show(announced)}", self._spent(following, Fault.PUBLISHED)

    def _steps_of(self, world: World, number: int, history: int) -> Iterator[tuple[str, World]]:
        """What a delivery may do next; first what happens if nothing goes wrong."""
        match request := self._request(number, history):
            case Write() | Call():
                yield from self._asked(world, number, history, request)
            case Look():
                yield f"delivery {number} looks", self._answered(world, number, history, world.record)
            case Gone(other):
                answer = Answer.IS_GONE if world.deliveries[other] == _DEAD else Answer.IS_THERE
                label = f"delivery {number} asks for the process of delivery {other}: {answer.value}"
                yield label, self._answered(world, number, history, answer)
            case Ended():
                raise AssertionError("an ended delivery asks for nothing")

    def _asked(self, world: World, number: int, history: int, request: Write | Call) -> Iterator[tuple[str, World]]:
        if isinstance(request, Call):
            label, fates = f"delivery {number} calls: {request.kind}", _OF_CALLS
            receiver, answer = world.receiver.receive(request)
            after = world._replace(receiver=receiver)
        else:
            label, fates = f"delivery {number} swaps {self._show(request.record)}", _OF_WRITES
            after, answer = self._applied(world, request)
        yield label, self._answered(after, number, history, answer)
        if not world.faults_left and not world.besides:
            return
        worlds = {"before": world, "sent": world._replace(in_flight=world.in_flight | {request}), "after": after}
        for fault, (when, answer) in fates.items():
            if (world.faults_left and fault in self._ordinary) or fault in world.besides:
                following = worlds[when]
                if answer is None:
                    following = following._replace(deliveries=_with(following.deliveries, number, _DEAD))
                else:
                    following = self._answered(following, number, history, answer)
                yield f"{label}: {fault}", self._spent(following, fault)

    def _spent(self, world: World, fault: Fault) -> World:
        self.found.reached[fault] += 1
        if fault in self._ordinary:
            return world._replace(faults_left=world.faults_left - 1)
        place = world.besides.index(fault)
        return world._replace(besides=world.besides[:place] + world.besides[place + 1 :])

    def _applied(self, world: World, write: Write) -> tuple[World, int]:
        """The world after ``write``, and what is stored then."""
        number = world.record
        stored, record = self._records[number], self._records[write.record]
        assert record is not None
        if write.expected != ANY and (stored.revision if stored else None) != write.expected:
            return world, number
        self._check_write(world, stored, record)
        receiver = world.receiver.receive(Call("act"))[0] if write.commits else world.receiver
        return world._replace(record=write.record, receiver=receiver), write.record

    def _check_write(self, world: World, stored: Record | None, new: Record) -> None:
        step = (f"{self._show(self._keep(stored))} is replaced by {self._show(self._keep(new))}",)
        if new.status in OUTCOMES and new.steps:
            raise Violation("an outcome kept its steps", step)
        if new.status not in OUTCOMES and new.expires_at is not None:
            raise Violation("a record that is no outcome got an expiry", step)
        if stored is None:
            self.found.noted["an outcome is written where there is nothing"] += new.status in OUTCOMES
            return
        if stored.status in OUTCOMES:
            raise Violation("a final state was changed", step)
        if new.revision == stored.revision:
            raise Violation("a write reused a revision", step)
        if stored.status is Status.UNKNOWN:
            if new.status not in OUTCOMES or not _is_by_owner(new) or new.owner != stored.owner:
                raise Violation("a final state was changed", step)
            self.found.noted["the owner completes what was UNKNOWN"] += 1
        if new.status is Status.IN_PROGRESS and (new.owner, new.attempts) != (stored.owner, stored.attempts):
            self._check_claim(stored, new, step)
        elif new == abandoned(stored, new.updated_at, new.revision):
            is_dead = world.deliveries[int(_author(stored.owner))] == _DEAD
            is_late = _is_by_owner(new) and world.now >= self._deadline
            if not (is_dead or is_late):
                raise Violation("the lease of a living process was ended", step)
        elif new.owner != stored.owner or not (_is_by_owner(new) or new.status is Status.UNKNOWN):
            raise Violation("an attempt ended another one's claim", step)
        elif new.fencing_token != stored.fencing_token:
            raise Violation("the fencing token changed without a claim", step)
        elif new.status is Status.UNKNOWN and not _is_by_owner(new):
            self._check_giving_up(stored, step)

    def _check_claim(self, stored: Record, new: Record, step: tuple[str, ...]) -> None:
        most = self.program.policy.max_takeovers
        if new.fencing_token <= stored.fencing_token:
            raise Violation("the fencing token did not grow with a claim", step)
        if new.takeovers != (stored.takeovers + 1 if stored.status is Status.IN_PROGRESS else 0):
            raise Violation("a claim does not say rightly whether it is a takeover", step)
        if new.fingerprint != stored.fingerprint and not _is_free(stored):
            raise Violation("a claim took the key from other arguments, which bind it", step)
        if most is not None and new.takeovers > most:
            raise Violation("an operation was taken over more often than its policy says", step)

    def _check_giving_up(self, stored: Record, step: tuple[str, ...]) -> None:
        """By somebody who is not the owner."""
        policy = self.program.policy
        is_poison = policy.max_takeovers is not None and stored.takeovers >= policy.max_takeovers
        if policy.on_takeover == "rerun" and not is_poison:
            raise Violation("an operation was given up that may run again", step)

    def _answered(self, world: World, number: int, history: int, answer: Any) -> World:
        known = (history, answer, world.now)
        following = self._history_numbers.setdefault(known, len(self._histories))
        if following == len(self._histories):
            self._histories.append(known)
        state = self._going_on(number, following)
        if answer is not Answer.BEGIN and isinstance(asked := self._request(number, history), Write):
            self._check_answer(world, number, asked, state)
        return world._replace(deliveries=_with(world.deliveries, number, state))

    def _check_answer(self, world: World, number: int, write: Write, state: "int | Ended") -> None:
        """What a delivery does after a write fits what is stored."""
        new, stored = self._records[write.record], self._records[world.record]
        assert new is not None
        if isinstance(state, int):
            is_claim = self._is_bare and stored == new and new.attempts == 1 and new.updated_at == new.created_at
            if is_claim and isinstance(self._request(number, state), Call) and new.lease_until <= START + world.now:
                raise Violation("a body began under a lease that was over when it was granted")
        elif state.why == "LeaseLost":
            has_gone = stored is not None and _author(stored.owner) != str(number)
            if new.status in OUTCOMES and not has_gone:
                raise Violation("an outcome was given up, and nobody had taken over")
        elif state.why == "Struck":
            is_kept = stored is not None and stored.status in OUTCOMES
            if state.has_done and self.program.has_outcome and not is_kept:
                raise Violation("an exception that struck in a write cost a body's outcome")

    def _going_on(self, number: int, history: int) -> "int | Ended":
        request = self._request(number, history)
        return request if isinstance(request, Ended) else history

    def _resumed(self, number: int, history: int) -> Write | Look | Call | Gone | Ended:
        answers = self._answers(history)
        asked = self._deliveries.resume(number, answers)
        if isinstance(asked, Ended) and asked.why == "KeyReused" and _is_free(answers[-1][0]):
            raise Violation("other arguments were refused a key that nothing binds")
        return Write(self._keep(asked.new), asked.expected, asked.commits) if isinstance(asked, Swap) else asked

    def _answers(self, history: int) -> list[tuple[Any, int]]:
        answers = []
        while (entry := self._histories[history]) is not None:
            history, answer, now = entry
            answers.append((self._records[answer] if isinstance(answer, int) else answer, now))
        return answers[::-1]

    def _keep(self, record: Record | None) -> int:
        twin = None if record is None else json.dumps(record.to_fields())
        number = self._record_numbers.setdefault(twin, len(self._records))
        if number == len(self._records):
            self._records.append(record)
        return number

    def _show(self, number: int) -> str:
        record = self._records[number]
        if record is None:
            return "nothing"
        return f"{record.status} (owner {record.owner}, revision {record.revision}, attempt {record.attempts})"

    def _check(self, world: World) -> None:
        reported = {each.reported for each in world.deliveries if isinstance(each, Ended) and each.reported}
        for number, each in enumerate(world.deliveries if self.program.other_arguments else ()):
            told = each.reported if isinstance(each, Ended) else None
            if told and arguments_of(int(told.rpartition(" ")[2])) != arguments_of(number):
                raise Violation("a delivery reported the result of other arguments")
        effects = world.receiver.effects
        self.found.most_effects = max(self.found.most_effects, effects)
        most = self.program.policy.max_takeovers
        if most is not None and effects > most + 1 and self.program.raises is None:
            raise Violation("a body that does not end ran more often than its policy says")
        ended = [each for each in world.deliveries if isinstance(each, Ended)]
        if any(each.has_done and each.why == "DeadlineExceeded" for each in ended):
            raise Violation("the outcome of a late body was thrown away")
        if len(reported) > 1:
            raise Violation("two deliveries reported different results")
        if reported and not effects:
            raise Violation("a result was reported and there was no effect")
        if effects > 1 and (self.program.at_most_once or len(world.deliveries) == 1):
            raise Violation("an effect that must not be repeated was repeated")
        if not any(isinstance(each, int) for each in world.deliveries):
            self._check_end(world, reported)

    def _check_end(self, world: World, reported: set[str]) -> None:
        """Somebody ran if nobody was hindered, and a clean delivery later gets an answer that fits."""
        ended = {each.why if isinstance(each, Ended) else _DEAD for each in world.deliveries}
        spent = Counter(self.program.besides) - Counter(world.besides)
        stored = self._records[world.record]
        is_announced = stored is not None and not stored.owner  # and the message is still to come
        is_late = world.now >= self._lease
        is_hindered = is_late or is_announced or bool(spent.keys() - {Fault.PUBLISHED, Fault.CONFIRMED})
        if not is_hindered and ended <= {"conflict", "LeaseLost"}:
            raise Violation("nobody ran, although nobody died and no lease was over")
        known = (world.record, world.now, world.receiver)
        if known not in self._answers_alone:
            self._answers_alone[known] = self._alone(world)
        last = self._answers_alone[known]
        for each in (*world.deliveries, last):
            self.found.ended[each.why if isinstance(each, Ended) else _DEAD] += 1
        if last.why == "KeyReused" and self.program.other_arguments:
            return
        if reported and {last.reported} != reported:
            raise Violation(f"a later delivery ended otherwise: {last}")
        if last.reported is None and last.why != "OutcomeUnknown" and self.program.has_outcome:
            raise Violation(f"the operation is stuck: a later delivery ended as {last.why}")

    def _alone(self, world: World) -> Ended:
        number = len(world.deliveries)
        later = world._replace(now=world.now + self._lease, faults_left=0, besides=())
        alone = self._answered(later._replace(deliveries=(*world.deliveries, 0)), number, 0, Answer.BEGIN)
        while isinstance(history := alone.deliveries[-1], int):
            _, alone = next(self._steps_of(alone, number, history))
        ended = alone.deliveries[-1]
        assert isinstance(ended, Ended)
        if alone.receiver.effects > 1 and self.program.at_most_once:
            raise Violation("an effect that must not be repeated was repeated by a later delivery")
        left = self._records[alone.record]
        if ended.why == "OutcomeUnknown" and not (left and left.status is Status.UNKNOWN):
            raise Violation("a delivery ended UNKNOWN and no record says so")
        return ended


def _author(nonce: str) -> str:
    """The number of the delivery that made ``nonce``."""
    return nonce.partition(".")[0]


def _is_free(record: Any) -> bool:
    """Whether no arguments bind the key: it was given back without a step."""
    return isinstance(record, Record) and record.status is Status.RELEASED and not record.steps


def _is_by_owner(record: Record) -> bool:
    """Whether the delivery that owns the record wrote it."""
    return _author(record.revision) == _author(record.owner)


def _with(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    return (*items[:number], item, *items[number + 1 :])


def _trail(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    labels = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return tuple(labels[::-1])


def explore(program: Program, deliveries: int, faults: int) -> Exploration:
    """Explore ``program`` exhaustively; a rule that does not hold is raised as a Violation, with the way there."""
    explorer = Explorer(program, deliveries, faults)
    with explorer.numbered():
        return explorer.explore()
