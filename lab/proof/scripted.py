"""Deliveries that stop at everything they ask of the world: the production code, with answers from outside.

A delivery is resumed by running it again from the start with the answers so far, which is possible because the
library takes clock and nonces from outside.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, NamedTuple
from unittest import mock

from celery_idempotent.engine import claim as claim_module
from celery_idempotent.engine import delivery as delivery_module
from celery_idempotent.engine.attempt import ProtectedAttempt
from celery_idempotent.engine.claim import Claim
from celery_idempotent.engine.delivery import Body, Conflict, ControlFlow, Delivery, Outcome
from celery_idempotent.errors import KeyReused, LeaseLost, OutcomeUnknown, StoreMisconfigured
from celery_idempotent.errors import StoreUnavailable as NoAnswer
from celery_idempotent.protocol.effects import AtMostOnce, Keyed
from celery_idempotent.protocol.effects import Effect as Declared
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Operation
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.steps import Step
from celery_idempotent.protocol.store import OutboxMessage, Transaction
from celery_idempotent.stores.memory import MemoryStore
from lab.proof.programs import Declined, Effect, Fault, Program
from lab.proof.verdicts import CODEC, NO_HEARTBEAT

ANY = "*"
"""As the expected revision: write whatever is stored. The library never says it; its mutants do."""


def publishers_nonce(besides: Sequence[Fault]) -> str:
    """The nonce of the next publisher, told by how many are still to come; it is no delivery's."""
    return f".{besides.count(Fault.PUBLISHED)}"


def arguments_of(number: int) -> str:
    """The fingerprint of the arguments of a delivery, by its number, where every other one has others."""
    return "ab"[number % 2]


KEY = "k"
"""Of the one operation."""

START = 1_800_000_000_000
"""The store's clock when everything begins, in milliseconds."""

FENCED_OFF = "fenced off"
"""What a receiver answers to a token that is older than its fence."""


class Struck(Exception):
    """An exception of somebody else's, such as a soft time limit."""


class CallFailed(Exception):
    """What a body's call raises when it gets no answer, or a refusal."""


class Swap(NamedTuple):
    """What a delivery asks of the store; ``commits`` an effect in the same step."""

    new: Record
    expected: str | None
    commits: bool = False


class Look(NamedTuple):
    """What a transaction asks of the store before it is committed."""


class Call(NamedTuple):
    """What a body asks of the receiver of its effect."""

    kind: Literal["act", "act once per key", "act if not fenced off", "fence", "probe"]
    key: str = ""
    token: int = 0


class Gone(NamedTuple):
    """What a delivery asks of its machine: whether the process of another delivery, by that one's number, is gone."""

    number: int


class Ended(NamedTuple):
    """How a delivery ended."""

    reported: str | None
    why: str
    has_done: bool = False


Request = Swap | Look | Call | Gone | Ended


class Answer(Enum):
    """In place of an answer; the first is before all others, and tells a delivery that begins later when that is."""

    BEGIN = "none yet"
    NONE = "the driver reports that there was none"
    NONE_ANY_MORE = "there is none, nor will there be one to what follows"
    STRUCK = "an exception of somebody else's"
    UNREADABLE = "something that cannot be read"
    IS_GONE = "the process is gone"
    IS_THERE = "the process is there"


class _Suspended(BaseException):
    """Unwinds a delivery that asked something to which there is no answer yet."""


class _Script:
    """One run of a delivery from its start: gives the known answers, then suspends it."""

    def __init__(self, number: int, answers: list[tuple[Any, int]], ahead: int = 0, *, has_time: bool = False) -> None:
        self.number = number
        self.has_done = False
        self.asks: Swap | Look | Call | Gone | None = None
        self._answers = iter(answers)
        self._ahead = ahead
        self._now = 0
        if answers and answers[0][0] is Answer.BEGIN:
            _, self._now = next(self._answers)
        elif answers and has_time:
            _, self._now = answers[0]  # it begins when its first request is answered, and has all of its time left
        self._slept = 0.0
        self._has_time = has_time
        self._is_cut_off = False
        self._nonces = 0

    def ask(self, request: Swap | Look | Call | Gone) -> Any:
        """The world's answer; raises what its absence means to a driver."""
        if self._is_cut_off:
            raise NoAnswer("world", "swap", "out of reach")
        if self.asks is not None:
            raise _Suspended
        try:
            answer, self._now = next(self._answers)
        except StopIteration:
            self.asks = request
            raise _Suspended from None
        if isinstance(request, Call):
            if answer in (Answer.NONE, FENCED_OFF):
                raise CallFailed(answer)
            return answer
        if isinstance(request, Gone):
            return answer is Answer.IS_GONE
        if isinstance(answer, Answer):
            self._raise(answer)
        return answer

    def _raise(self, answer: Answer) -> None:
        if answer is Answer.STRUCK:
            raise Struck
        if answer is Answer.UNREADABLE:
            raise StoreMisconfigured("world", "swap", "schema 2")
        self._is_cut_off = answer is Answer.NONE_ANY_MORE
        raise NoAnswer("world", "swap", "no answer")

    def nonce(self) -> str:
        self._nonces += 1
        return f"{self.number}.{self._nonces}"

    def now(self) -> int:
        return START + self._now + self._ahead

    def monotonic(self) -> float:
        return self._slept + self._now / 1000 * self._has_time

    def sleep(self, seconds: float, /) -> None:
        self._slept += 1_000  # past all patience, so that a delivery cut off comes to its end


class _WorldTransaction:
    """One write of the record that carries an effect; asked of the world when it is committed.

    What the world does with it is more than a database would: while it is on its way, others may write.
    """

    connection = None

    def __init__(self, script: _Script, looks: bool) -> None:
        self._script = script
        self._looks = looks
        self._write: tuple[Record, str | None] | None = None

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if self._looks:
            stored: Record | None = self._script.ask(Look())
            if (stored.revision if stored else None) != expected:
                return stored
        self._write = new, expected
        return new

    def enqueue(self, message: OutboxMessage) -> None:
        raise AssertionError

    def commit(self) -> None:
        assert self._write is not None
        new, expected = self._write
        stored = self._script.ask(Swap(new, expected, commits=True))
        if stored is None:
            raise NoAnswer("world", "commit", "the server went, and the transaction with it")
        if stored.revision != new.revision:
            raise CallFailed("the row was locked by another transaction")

    def rollback(self) -> None:
        pass


class _WorldStore(MemoryStore):
    def __init__(self, script: _Script, looks: bool) -> None:
        super().__init__(script.now)
        self._script = script
        self._looks = looks

    def swap(self, new: Record, expected: str | None) -> Record | None:
        stored: Record | None = self._script.ask(Swap(new, expected))
        return stored

    def swap_with(self, new: Record, expected: str | None, writes: Sequence[Mapping[str, Any]]) -> Record | None:
        stored: Record | None = self._script.ask(Swap(new, expected, commits=True))
        return stored

    def begin(self, using: Any = None) -> Transaction:
        return _WorldTransaction(self._script, self._looks)


class Deliveries:
    """The deliveries of one program; each is told by its number, and all are alike."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # A transaction sees that its record has gone; that it looks only makes more worlds where none can go.
        self._looks = Fault.FORGOTTEN in program.besides
        self._script = _Script(0, [])
        #: Milliseconds between the clocks of two deliveries: claims before and after a loss have different tokens.
        self.apart = int(self._looks)

    @contextmanager
    def numbered(self) -> Iterator[None]:
        """Within the block every nonce names the delivery that made it."""

        def nonce() -> str:
            return self._script.nonce()

        def is_gone(process: str) -> bool:
            return bool(process) and bool(self._script.ask(Gone(int(process))))

        nonces = mock.patch.object(claim_module, "new_nonce", nonce)
        with nonces, mock.patch.object(delivery_module, "is_gone", is_gone):
            yield

    def resume(self, number: int, answers: list[tuple[Any, int]]) -> Request:
        """What a delivery asks next, or how it ended."""
        has_time = self._program.policy.deadline is not None
        script = self._script = _Script(number, answers, number * self.apart, has_time=has_time)
        try:
            reported, why = self._told(script)
        except _Suspended:
            assert script.asks is not None
            return script.asks
        return Ended(reported, why, script.has_done)

    def _told(self, script: _Script) -> tuple[str | None, str]:
        program = self._program
        try:
            outcome = self._delivered(script)
        except (LeaseLost, NoAnswer, OutcomeUnknown, KeyReused, CallFailed, Struck) as error:
            return None, type(error).__name__
        except Declined as error:
            if program.raises is None:
                raise
            return f"failure {error}" if program.has_outcome else None, "raised"
        return (str(outcome.value), "finished") if isinstance(outcome, Outcome) else (None, "conflict")

    def _delivered(self, script: _Script) -> Outcome | Conflict:
        store, program = _WorldStore(script, self._looks), self._program
        operation = Operation(
            identity=Identity(KEY, arguments_of(script.number) if program.other_arguments else None),
            policy=program.policy,
            task="t",
            task_id="message" if program.one_message else f"message {script.number}",
            worker="w",
            process=str(script.number) if program.one_machine else "",
        )
        delivery = Delivery(operation, store, CODEC, NO_HEARTBEAT, ControlFlow(), lambda event: None, script)
        return delivery.run(self._body(script))

    def _body(self, script: _Script) -> Body:
        program = self._program

        def body(attempt: Claim | None) -> str:
            if attempt is None:
                script.ask(Call("act"))
                return f"by {script.number}, unprotected"
            if program.renews:
                attempt.renew()
                attempt.ensure_owned()
            handle = ProtectedAttempt(attempt, CODEC, effects=_DECLARED.get(program.effect))
            _have_effect(script, program.effect, handle)
            if program.asks:
                attempt.ensure_owned()
            script.has_done = True
            if program.raises and not (program.other_arguments and arguments_of(script.number) != arguments_of(0)):
                raise program.raises(f"by {script.number}")
            return f"by {script.number}"

        return body


_DECLARED: Mapping[Effect, Mapping[str, Declared]] = {
    Effect.REFUSED_STEP: {"effect": AtMostOnce()},
    Effect.WINDOWED_STEP: {"effect": Keyed(window=timedelta(days=1), on_takeover="refuse")},
}
"""What the policy says of the step; of the others nothing."""


def _have_effect(script: _Script, effect: Effect, handle: ProtectedAttempt) -> None:
    def ask(kind: Any) -> Callable[[Step], Any]:
        return lambda step: script.ask(Call(kind, step.key, step.fencing_token))

    match effect:
        case Effect.BARE:
            script.ask(Call("act"))
        case Effect.STEP | Effect.REFUSED_STEP:
            handle.step("effect", ask("act"))
        case Effect.KEYED_STEP | Effect.WINDOWED_STEP:
            handle.step("effect", ask("act once per key"))
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
