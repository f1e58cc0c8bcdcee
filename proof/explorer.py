"""Every interleaving of a few deliveries of one key, under every fault, on the production code.

Nothing is modelled but the world around the library: :func:`~celery_idempotent.attempt.claim`,
:class:`~celery_idempotent.attempt.Attempt` and :class:`~celery_idempotent.guard.Guard` run as they are. A
delivery stops at each thing it asks of the world (a swap, its effect); the explorer chooses what happens,
and resumes it by running it again from the start with the answers so far, which is possible because the
library takes clock and nonces from outside. Worlds that were seen before are not explored again.

At every step the world may: let any delivery go on; kill it before its request is sent, or with its request
still on the way, to land at any later time or never; lose a reply, or a request, which may land later too;
end the running lease. Faults are bounded, ends of leases are not.
"""

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal, NamedTuple
from unittest import mock

from celery_idempotent import attempt as attempt_module
from celery_idempotent import guard as guard_module
from celery_idempotent.attempt import Attempt
from celery_idempotent.codec import Codec
from celery_idempotent.errors import LeaseLost, OutcomeUnknown, StoreUnavailable
from celery_idempotent.guard import Conflict, ControlFlow, Finished, Guard, Operation
from celery_idempotent.keys import Identity
from celery_idempotent.policy import Policy
from celery_idempotent.protected import Protected
from celery_idempotent.record import Record, Status
from celery_idempotent.steps import Step
from celery_idempotent.store import OutboxMessage, Transaction
from celery_idempotent.stores.memory import MemoryStore

__all__ = ["ALONE", "ANY", "Declined", "Effect", "Exploration", "Fault", "Program", "Violation", "explore"]

_CODEC = Codec("json", frozenset({"application/json"}))
_FINAL = {Status.COMPLETED, Status.FAILED, Status.UNKNOWN}

ANY = "*"
"""As the expected revision: write whatever is stored. The library never says it; its mutants do."""


class Declined(Exception):
    """What a body raises where a program says so."""


class CallFailed(Exception):
    """What a body's call raises when it gets no answer, or a refusal."""


class Fault(StrEnum):
    """What the world may do to a delivery's request."""

    KILLED_BEFORE_SEND = "killed before send"
    KILLED_IN_FLIGHT = "killed, request in flight"
    KILLED_AFTER_EFFECT = "killed after effect"
    REPLY_LOST = "reply lost"
    REQUEST_LOST = "request lost"
    REQUEST_LATE = "request in flight, sender goes on"
    CUT_OFF = "store out of reach from here on"
    CALL_IN_FLIGHT = "killed, call in flight"
    CALL_LATE = "call timed out and lands later"


class Effect(StrEnum):
    """How a body has its effect."""

    BARE = "bare"
    STEP = "step"
    REFUSED_STEP = "step under refuse"
    KEYED_STEP = "step, receiver honours its key"
    WINDOWED_STEP = "step under refuse, receiver honours its key"
    FENCED_STEP = "fenced step"
    TOKEN_ALONE = "fencing token alone"
    PROBE_ALONE = "probe without a fence"
    COMMIT = "commit"
    TRANSACTION = "transaction"


_ONCE = {
    Effect.COMMIT,
    Effect.TRANSACTION,
    Effect.REFUSED_STEP,
    Effect.KEYED_STEP,
    Effect.WINDOWED_STEP,
    Effect.FENCED_STEP,
}
"""Where a second effect is a broken promise, whatever the policy says."""

ALONE = (Effect.TOKEN_ALONE, Effect.PROBE_ALONE)
"""Half of what a fenced step does, which is not enough."""


@dataclass(frozen=True, slots=True)
class Program:
    """What every delivery does.

    Args:
        policy: The task's policy.
        renews: Whether the body renews its lease before its effect, as the heartbeat does for a long one.
        raises: What the body raises after its effect, if it raises.
        effect: How it has its effect.
        claims_once: Whether it is claimed that there is at most one; by default where it is promised.
    """

    policy: Policy
    renews: bool = False
    raises: type[Exception] | None = None
    effect: Effect = Effect.BARE
    claims_once: bool | None = None

    @property
    def at_most_once(self) -> bool:
        """Whether a second effect breaks a rule."""
        if self.claims_once is not None:
            return self.claims_once
        return self.policy.on_takeover == "refuse" or self.effect in _ONCE

    @property
    def faults(self) -> set["Fault"]:
        """What the world may do to its deliveries."""
        calls = {Fault.CALL_IN_FLIGHT, Fault.CALL_LATE}
        match self.effect:
            case Effect.BARE:
                return set(Fault) - calls
            case Effect.COMMIT | Effect.TRANSACTION:
                return set(Fault) - calls - {Fault.KILLED_AFTER_EFFECT}
            case _:
                return set(Fault)

    @property
    def few_faults(self) -> int:
        """How many faults a quick look takes: fewer where each delivery does more."""
        return 1 if self.renews or self.effect not in {Effect.BARE, Effect.COMMIT, Effect.TRANSACTION} else 2

    @property
    def has_outcome(self) -> bool:
        """Whether what the body does is recorded: a result, or a failure that counts as one."""
        policy = self.policy
        return self.raises is None or policy.on_takeover == "refuse" or self.raises in policy.remember

    @property
    def name(self) -> str:
        """For the report."""
        parts: list[str] = [self.policy.on_takeover]
        parts += [] if self.effect is Effect.BARE else [self.effect]
        parts += ["renewing"] if self.renews else []
        parts += ["failing"] if self.raises else []
        parts += ["remembering"] if self.policy.remember else []
        return ", ".join(parts)


class Violation(Exception):
    """A rule does not hold; the trace is the way to the world that shows it."""

    def __init__(self, rule: str, trace: tuple[str, ...]) -> None:
        super().__init__(rule, trace)
        self.rule = rule
        self.trace = trace

    def __str__(self) -> str:
        return "\n".join([self.rule, *(f"  {number}. {step}" for number, step in enumerate(self.trace, 1))])


@dataclass(frozen=True, slots=True)
class _Swap:
    """What a delivery asks of the store; ``commits`` an effect in the same step."""

    new: Record
    expected: str | None
    commits: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """What a body asks of the receiver of its effect."""

    kind: Literal["act", "act once per key", "act if not fenced off", "fence", "probe"]
    key: str = ""
    token: int = 0


class Receiver(NamedTuple):
    """The outside world: it does what it is asked, as often as it is asked, by its own rules."""

    effects: int = 0
    keys: frozenset[str] = frozenset()
    fence: int = 0

    def receive(self, call: _Call) -> tuple["Receiver", Any]:
        """The receiver after the call, and its answer."""
        match call.kind:
            case "fence":
                return self._replace(fence=max(self.fence, call.token)), None
            case "probe":
                return self, "found" if call.key in self.keys else None
            case "act once per key" if call.key in self.keys:
                return self, "done"
            case "act if not fenced off" if call.token < self.fence:
                return self, _FENCED_OFF
            case _:
                return self._replace(effects=self.effects + 1, keys=self.keys | {call.key}), "done"


_FENCED_OFF = "fenced off"


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a delivery ended: a reported value, or a name of why it reported nothing."""

    reported: str | None
    why: str


class _Suspended(BaseException):
    """Unwinds a delivery that asked something to which there is no answer yet."""


_LOST = "lost"
"""In place of an answer: the delivery's driver reports that there was none."""

_CUT_OFF = "cut off"
"""In place of this answer and of all that would follow."""

_DEAD = "dead"


class _Script:
    """One run of a delivery from its start: gives the known answers, then suspends it."""

    def __init__(self, number: int, answers: list[tuple[Any, int]], program: Program) -> None:
        self.number = number
        self.program = program
        self._answers = iter(answers)
        self._tick = 0
        self._slept = 0.0
        self._cut_off = False
        self._nonces = 0
        self.asks: _Swap | _Call | None = None

    def ask(self, request: _Swap | _Call) -> Any:
        if self._cut_off:
            raise StoreUnavailable("world", "swap", "out of reach")
        if self.asks is None:
            try:
                answer, self._tick = next(self._answers)
            except StopIteration:
                self.asks = request
            else:
                self._cut_off = answer is _CUT_OFF
                if isinstance(request, _Call):
                    if answer in (_LOST, _FENCED_OFF):
                        raise CallFailed(answer)
                    return answer
                if answer in (_LOST, _CUT_OFF):
                    raise StoreUnavailable("world", "swap", "no answer")
                return answer
        raise _Suspended

    def nonce(self) -> str:
        self._nonces += 1
        return f"{self.number}.{self._nonces}"

    def now(self) -> int:
        return _now(self._tick, self.program.policy)

    def monotonic(self) -> float:
        return self._slept

    def sleep(self, seconds: float, /) -> None:
        self._slept += 1_000  # past all patience, so that a delivery cut off comes to its end

    def start(self, attempt: Attempt) -> None:
        pass

    def stop(self, attempt: Attempt) -> None:
        pass


class _WorldTransaction:
    """One write of the record that carries an effect; asked of the world when it is committed.

    What the world does with it is more than a database would: while it is on its way, others may write.
    """

    connection = None

    def __init__(self, script: _Script) -> None:
        self._script = script
        self._write: tuple[Record, str | None] | None = None

    def swap(self, new: Record, expected: str | None) -> Record | None:
        self._write = new, expected
        return new

    def enqueue(self, message: OutboxMessage) -> None:
        raise AssertionError

    def commit(self) -> None:
        assert self._write is not None
        new, expected = self._write
        stored = self._script.ask(_Swap(new, expected, commits=True))
        if stored is None or stored.revision != new.revision:
            raise CallFailed("the row was locked by another transaction")

    def rollback(self) -> None:
        pass


class _WorldStore(MemoryStore):
    def __init__(self, script: _Script) -> None:
        super().__init__(script.now)
        self._script = script

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored: Record | None = self._script.ask(_Swap(new, expected))
        return stored

    def swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        stored: Record | None = self._script.ask(_Swap(new, expected, commits=True))
        return stored

    def begin(self, using: Any = None) -> Transaction:
        return _WorldTransaction(self._script)


def _have_effect(script: _Script, effect: Effect, handle: Protected) -> None:
    def ask(kind: Any) -> Callable[[Step], Any]:
        return lambda step: script.ask(_Call(kind, step.key, step.fencing_token))

    match effect:
        case Effect.BARE:
            script.ask(_Call("act"))
        case Effect.STEP:
            handle.step("effect", ask("act"))
        case Effect.REFUSED_STEP:
            handle.step("effect", ask("act"), on_takeover="refuse")
        case Effect.KEYED_STEP:
            handle.step("effect", ask("act once per key"))
        case Effect.WINDOWED_STEP:
            handle.step("effect", ask("act once per key"), on_takeover="refuse", window=timedelta(days=1))
        case Effect.FENCED_STEP:
            handle.fenced_step("effect", fence=ask("fence"), probe=ask("probe"), act=ask("act if not fenced off"))
        case Effect.TOKEN_ALONE:
            handle.fenced_step("effect", fence=ask("fence"), probe=lambda step: None, act=ask("act if not fenced off"))
        case Effect.COMMIT:
            handle.commit(f"by {script.number}", writes=[])
        case Effect.TRANSACTION:
            with handle.transaction() as transaction:
                transaction.done(f"by {script.number}")
        case Effect.PROBE_ALONE:
            handle.fenced_step("effect", fence=lambda step: None, probe=ask("probe"), act=ask("act"))


def _now(tick: int, policy: Policy) -> int:
    # One tick is just enough for every lease granted before it to be over.
    return 1_800_000_000_000 + tick * (policy.lease_ms + policy.grace_ms)


def _resume(number: int, answers: list[tuple[Any, int]], program: Program) -> _Swap | _Call | _Ended:
    """What a delivery asks next, or how it ended, given its answers so far and the ticks at which it got them."""
    script = _Script(number, answers, program)
    guard = Guard(_WorldStore(script), _CODEC, script, ControlFlow(), lambda event: None, script)  # type: ignore[arg-type]
    operation = Operation(
        identity=Identity("k", None), policy=program.policy, task="t", task_id=f"delivery {number}", worker="w"
    )

    def body(attempt: Attempt | None) -> str:
        if program.renews and attempt:
            attempt.renew()
            attempt.ensure_owned()
        if attempt:
            _have_effect(script, program.effect, Protected(attempt, _CODEC))
        if program.raises:
            raise program.raises(f"by {number}")
        return f"by {number}"

    with (
        mock.patch.object(attempt_module, "new_nonce", script.nonce),
        mock.patch.object(guard_module, "new_nonce", script.nonce),
    ):
        try:
            outcome = guard.run(operation, body)
        except _Suspended:
            assert script.asks is not None
            return script.asks
        except (LeaseLost, StoreUnavailable, OutcomeUnknown, CallFailed) as error:
            return _Ended(None, type(error).__name__)
        except Exception as error:
            if program.raises is None or not isinstance(error, program.raises):
                raise
            return _Ended(f"failure {error}" if program.has_outcome else None, "raised")
    match outcome:
        case Finished(value):
            return _Ended(str(value), "finished")
        case Conflict():
            return _Ended(None, "conflict")


class _World(NamedTuple):
    record: int
    tick: int
    deliveries: tuple["int | str | _Ended", ...]
    in_flight: frozenset[tuple[int, str | None, bool] | _Call]
    faults_left: int
    receiver: Receiver


@dataclass(slots=True)
class Exploration:
    """What was seen; a run that reached no fault of some kind proved nothing about it."""

    program: Program
    deliveries: int
    faults: int
    states: int = 0
    transitions: int = 0
    most_effects: int = 0
    seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)


class _Explorer:
    """Worlds are small tuples: records and histories are kept once and named by numbers."""

    def __init__(self, program: Program, deliveries: int, faults: int) -> None:
        self.program = program
        self.found = Exploration(program, deliveries, faults)
        self._records: list[Record | None] = [None]
        self._record_numbers: dict[Hashable, int] = {None: 0}
        self._histories: list[tuple[int, Any, int] | None] = [None]
        self._history_numbers: dict[tuple[int, Any, int], int] = {}
        self._requests: dict[tuple[int, int], _Swap | _Call | _Ended] = {}
        self._answers_alone: dict[tuple[int, int], _Ended] = {}

    def explore(self) -> Exploration:
        """Visit every reachable world once.

        Raises:
            Violation: A rule does not hold in some world.
        """
        first = self._going_on(0, 0)
        start = _World(
            0, 0, tuple(first for _ in range(self.found.deliveries)), frozenset(), self.found.faults, Receiver()
        )
        came_from: dict[_World, tuple[_World, str] | None] = {start: None}
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
            except _Broken as broken:
                raise Violation(broken.rule, (*_trail(came_from, world), *broken.step)) from None
        self.found.states = len(came_from)
        return self.found

    def _steps(self, world: _World) -> Iterator[tuple[str, _World]]:
        for number, delivery in enumerate(world.deliveries):
            if isinstance(delivery, int):
                yield from self._steps_of(world, number, delivery)
            if delivery == 0:
                break  # they are all alike, so it is enough if they begin in their order
        record = self._records[world.record]
        if (
            record
            and record.status is Status.IN_PROGRESS
            and record.lease_until >= _now(world.tick, self.program.policy)
        ):
            yield "the lease ends", world._replace(tick=world.tick + 1)
        for late in world.in_flight:
            rest = world._replace(in_flight=world.in_flight - {late})
            if isinstance(late, _Call):
                yield f"a late call lands: {late.kind}", rest._replace(receiver=world.receiver.receive(late)[0])
            else:
                yield f"a late write lands: {self._show(late[0])}", self._applied(rest, *late)[0]

    def _steps_of(self, world: _World, number: int, history: int) -> Iterator[tuple[str, _World]]:
        request = self._request(number, history)
        match request:
            case _Swap(new, expected, commits):
                written = self._keep(new)
                after, answer = self._applied(world, written, expected, commits)
                label = f"delivery {number} swaps {self._show(written)}"
                yield label, self._answered(after, number, history, answer)
                late = world.in_flight | {(written, expected, commits)}
                outcomes = {
                    Fault.KILLED_BEFORE_SEND: self._killed(world, number),
                    Fault.KILLED_IN_FLIGHT: self._killed(world._replace(in_flight=late), number),
                    Fault.REPLY_LOST: self._answered(after, number, history, _LOST),
                    Fault.REQUEST_LOST: self._answered(world, number, history, _LOST),
                    Fault.CUT_OFF: self._answered(world, number, history, _CUT_OFF),
                    Fault.REQUEST_LATE: self._answered(world._replace(in_flight=late), number, history, _LOST),
                }
            case _Call(kind):
                label = f"delivery {number} calls: {kind}"
                receiver, answer = world.receiver.receive(request)
                after = world._replace(receiver=receiver)
                sent = world._replace(in_flight=world.in_flight | {request})
                yield label, self._answered(after, number, history, answer)
                outcomes = {
                    Fault.KILLED_BEFORE_SEND: self._killed(world, number),
                    Fault.KILLED_AFTER_EFFECT: self._killed(after, number),
                    Fault.CALL_IN_FLIGHT: self._killed(sent, number),
                    Fault.CALL_LATE: self._answered(sent, number, history, _LOST),
                }
            case _Ended():
                raise AssertionError("an ended delivery asks for nothing")
        if world.faults_left:
            for fault, following in outcomes.items():
                if fault not in self.program.faults:
                    continue
                self.found.reached[fault] += 1
                yield f"{label}: {fault}", following._replace(faults_left=world.faults_left - 1)

    def _applied(self, world: _World, new: int, expected: str | None, commits: bool) -> tuple[_World, int]:
        stored, record = self._records[world.record], self._records[new]
        assert record is not None
        if expected != ANY and (stored.revision if stored else None) != expected:
            return world, world.record
        self._check_write(stored, record)
        receiver = world.receiver.receive(_Call("act"))[0] if commits else world.receiver
        return world._replace(record=new, receiver=receiver), new

    def _check_write(self, stored: Record | None, new: Record) -> None:
        step = (f"{self._show(self._keep(stored))} is replaced by {self._show(self._keep(new))}",)
        if new.expires_at is not None and new.status not in (Status.COMPLETED, Status.FAILED):
            raise _Broken("a record that is no outcome got an expiry", step)
        if stored is None:
            return
        if new.revision == stored.revision:
            raise _Broken("a write reused a revision", step)
        if stored.status in _FINAL:
            raise _Broken("a final state was changed", step)
        if new.owner != stored.owner and new.status is Status.IN_PROGRESS and new.fencing_token <= stored.fencing_token:
            raise _Broken("the fencing token did not grow with a claim", step)
        claimed = new.status is Status.IN_PROGRESS and new.owner != stored.owner
        in_a_row = stored.takeovers + 1 if stored.status is Status.IN_PROGRESS else 0
        if claimed and new.takeovers != in_a_row:
            raise _Broken("a claim does not say rightly whether it is a takeover", step)
        if new.owner == stored.owner and new.fencing_token != stored.fencing_token:
            raise _Broken("the fencing token changed without a claim", step)
        if new.status is not Status.IN_PROGRESS and new.owner != stored.owner:
            raise _Broken("an attempt ended another one's claim", step)

    def _killed(self, world: _World, number: int) -> _World:
        return world._replace(deliveries=_with(world.deliveries, number, _DEAD))

    def _answered(self, world: _World, number: int, history: int, answer: Any) -> _World:
        known = (history, answer, world.tick)
        following = self._history_numbers.get(known)
        if following is None:
            following = self._history_numbers[known] = len(self._histories)
            self._histories.append(known)
        return world._replace(deliveries=_with(world.deliveries, number, self._going_on(number, following)))

    def _going_on(self, number: int, history: int) -> "int | _Ended":
        request = self._request(number, history)
        return request if isinstance(request, _Ended) else history

    def _request(self, number: int, history: int) -> _Swap | _Call | _Ended:
        known = (number, history)
        found = self._requests.get(known)
        if found is None:
            found = self._requests[known] = _resume(number, self._answers(history), self.program)
        return found

    def _answers(self, history: int) -> list[tuple[Any, int]]:
        answers = []
        while (entry := self._histories[history]) is not None:
            history, answer, tick = entry
            answers.append((self._records[answer] if isinstance(answer, int) else answer, tick))
        return answers[::-1]

    def _keep(self, record: Record | None) -> int:
        twin = None if record is None else json.dumps(record.to_fields())
        number = self._record_numbers.get(twin)
        if number is None:
            number = self._record_numbers[twin] = len(self._records)
            self._records.append(record)
        return number

    def _show(self, number: int) -> str:
        record = self._records[number]
        if record is None:
            return "nothing"
        return f"{record.status} (owner {record.owner}, revision {record.revision}, attempt {record.attempts})"

    def _check(self, world: _World) -> None:
        reported = {each.reported for each in world.deliveries if isinstance(each, _Ended) and each.reported}
        effects = world.receiver.effects
        self.found.most_effects = max(self.found.most_effects, effects)
        if len(reported) > 1:
            raise _Broken("two deliveries reported different results", ())
        if reported and not effects:
            raise _Broken("a result was reported and there was no effect", ())
        if effects > 1 and self.program.at_most_once:
            raise _Broken("an effect that must not be repeated was repeated", ())
        if not any(isinstance(each, int) for each in world.deliveries):
            self._check_end(world, reported)

    def _check_end(self, world: _World, reported: set[str]) -> None:
        """Somebody ran if nobody was hindered, and a clean delivery later gets an answer that fits."""
        ended = {each.why if isinstance(each, _Ended) else _DEAD for each in world.deliveries}
        if world.tick == 0 and ended <= {"conflict", "LeaseLost"}:
            raise _Broken("nobody ran, although nobody died and no lease was over", ())
        known = (world.record, world.tick)
        if known not in self._answers_alone:
            self._answers_alone[known] = self._alone(world)
        last = self._answers_alone[known]
        for each in (*world.deliveries, last):
            self.found.ended[each.why if isinstance(each, _Ended) else _DEAD] += 1
        if reported and {last.reported} != reported:
            raise _Broken(f"a later delivery ended otherwise: {last}", ())
        if last.reported is None and last.why != "OutcomeUnknown" and self.program.has_outcome:
            raise _Broken(f"the operation is stuck: a later delivery ended as {last.why}", ())

    def _alone(self, world: _World) -> _Ended:
        number = len(world.deliveries)
        alone = world._replace(tick=world.tick + 1, deliveries=(*world.deliveries, self._going_on(number, 0)))
        while isinstance(history := alone.deliveries[-1], int):
            _, alone = next(self._steps_of(alone._replace(faults_left=0), number, history))
        ended = alone.deliveries[-1]
        assert isinstance(ended, _Ended)
        left = self._records[alone.record]
        if ended.why == "OutcomeUnknown" and (left is None or left.status is not Status.UNKNOWN):
            raise _Broken("a delivery ended UNKNOWN and no record says so", ())
        return ended


class _Broken(Exception):
    def __init__(self, rule: str, step: tuple[str, ...]) -> None:
        super().__init__(rule)
        self.rule = rule
        self.step = step


def _with(deliveries: tuple[Any, ...], number: int, state: Any) -> tuple[Any, ...]:
    return (*deliveries[:number], state, *deliveries[number + 1 :])


def _trail(came_from: dict[_World, tuple[_World, str] | None], world: _World) -> tuple[str, ...]:
    labels = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return tuple(labels[::-1])


def explore(program: Program, *, deliveries: int, faults: int) -> Exploration:
    """Explore ``program`` exhaustively.

    Args:
        program: What every delivery does.
        deliveries: How many there are, all at once.
        faults: How many faults may happen in one world.

    Raises:
        Violation: A rule does not hold; it says which, and how to get there.
    """
    return _Explorer(program, deliveries, faults).explore()
