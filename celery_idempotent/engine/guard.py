"""The guard: runs a body at most once per claim and turns every ending into a recorded outcome.

It knows stores, policies and exceptions, and nothing of Celery. Whoever uses it says which exceptions are
its control flow, and maps what :meth:`Guard.run` returns or raises to its own world.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, assert_never

from kombu.exceptions import KombuError

from celery_idempotent.engine.attempt import Attempt, Clock, claim, new_nonce
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.errors import (
    InFlight,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    ResultLost,
    SafeToRetry,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.protocol import operation as protocol
from celery_idempotent.protocol.codec import Codec, Encoded, describe
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.operation import Ending, Lost, Request, Superseded, Verdict, Written
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, bounded
from celery_idempotent.protocol.store import RecordTooLarge, Store

__all__ = ["RESULT_LOST", "Body", "Conflict", "ControlFlow", "Event", "EventName", "Finished", "Guard", "Operation"]

RESULT_LOST = "result lost"
"""How the reason of a completion begins whose result could not be kept."""

_OUR_OWN = (LeaseLost, StoreUnavailable)
"""What a body raises when it asks its attempt. Recorded as an outcome and replayed, it would look like an
outage of the replay's own, and be tried again for ever."""

T = TypeVar("T")

Body = Callable[[Attempt | None], Any]
"""What is to happen once; it gets its attempt, or None where the policy lets it run unprotected."""


class EventName(StrEnum):
    """What can be observed; also the names of the signals and of the log events."""

    CLAIMED = "claimed"
    REPLAYED = "replayed"
    CONFLICTED = "conflicted"
    TAKEN_OVER = "taken_over"
    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    LEASE_LOST = "lease_lost"
    OUTCOME_UNKNOWN = "outcome_unknown"
    STORE_UNAVAILABLE = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an operation; never carries arguments or results.

    Args:
        name: What happened.
        key: The idempotency key.
        fencing_token: Of the attempt concerned, if there is one.
        reason: Why, for people.
    """

    name: EventName
    key: str
    fencing_token: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One delivery of one call.

    Args:
        identity: Which effect, with which arguments.
        policy: Under which promise.
        task: Task name, for people.
        task_id: Task id, for people.
        worker: Who executes it, for people.
        app: The app that it belongs to, for people.
    """

    identity: Identity
    policy: Policy
    task: str
    task_id: str
    worker: str
    app: str = ""


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """Exceptions that a body raises to steer its caller, not to fail.

    Args:
        nothing_begun: The author says that running again is right.
        no_outcome: They end the delivery without telling whether the effect happened.
    """

    nothing_begun: tuple[type[BaseException], ...] = ()
    no_outcome: tuple[type[BaseException], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The operation has an outcome; ``value`` is its result, of this delivery or of an earlier one."""

    value: Any


@dataclass(frozen=True, slots=True)
class Conflict:
    """Another delivery is running the operation; nothing was done.

    Args:
        error: Who holds the key, and for how long.
        task_id: Task id of the delivery that holds it.
    """

    error: InFlight
    task_id: str


class Guard:
    """Runs bodies under claims.

    Args:
        store: Where the records live.
        codec: How outcomes are kept.
        heartbeat: Who renews the leases.
        control: The caller's control flow.
        observe: Called with every event, in the thread that executes the body.
        clock: The local clock.
    """

    def __init__(
        self,
        store: Store,
        codec: Codec,
        heartbeat: Heartbeat,
        control: ControlFlow,
        observe: Callable[[Event], None],
        clock: Clock = time,
    ) -> None:
        self._store = store
        self._codec = codec
        self._heartbeat = heartbeat
        self._control = control
        self._observe = observe
        self._clock = clock

    def run(self, operation: Operation, body: Body) -> Finished | Conflict:
        """Run ``body`` if nobody ran it, replay its outcome if somebody did.

        Raises:
            KeyReused: The key belongs to other arguments; nothing ran.
            OutcomeUnknown: An earlier attempt must not be repeated and never ended; nothing ran.
            ResultLost: The effect happened earlier; its result was not kept.
            LeaseLost: The body ran, and somebody took over meanwhile; report nothing as done.
            StoreUnavailable: No certain answer; report nothing as done.
            BaseException: What the body raised, now or, if it is a recorded outcome, earlier.
        """
        try:
            decision = self._claimed(operation, operation.policy.on_takeover)
        except StoreMisconfigured as error:
            # There is an answer, and it may be an outcome: whoever cannot read it must not run the body.
            self._emit(EventName.STORE_UNAVAILABLE, operation, None, str(error))
            raise
        except StoreUnavailable as error:
            self._emit(EventName.STORE_UNAVAILABLE, operation, None, str(error))
            if operation.policy.on_outage == "run":
                return Finished(body(None))
            raise
        if isinstance(decision, Attempt):
            return self._execute(operation, decision, body)
        return self._answer(operation, decision)

    def observe(self, operation: Operation, body: Body) -> Any:
        """Run ``body`` in any case and report what :meth:`run` would have suppressed.

        Returns:
            What the body returns, untouched.
        """
        attempt = self._observed(operation)
        if attempt is None:
            return body(None)
        try:
            self._announce(operation, attempt)
            value = body(attempt)
        except BaseException:
            self._quietly(operation, attempt, attempt.release)
            raise
        else:
            attempt.patience = 0  # to wait for a store that is away would change when the task ends
            self._quietly(operation, attempt, lambda: self._complete(operation, attempt, value))
            return value
        finally:
            self._heartbeat.stop(attempt)

    def _observed(self, operation: Operation) -> Attempt | None:
        """The attempt that :meth:`run` would have made, if it would have made one and that can be known."""
        try:
            decision = self._claimed(operation, "rerun")
        except Exception as error:  # noqa: BLE001 - whatever is wrong, observing changes nothing of what a task does
            self._emit(EventName.STORE_UNAVAILABLE, operation, None, describe(error))
            return None
        if isinstance(decision, Attempt):
            return decision
        self._report(operation, decision)
        return None

    def _quietly(self, operation: Operation, attempt: Attempt, end: Callable[[], object]) -> None:
        try:
            end()
            attempt.raise_struck()
        except Exception as error:  # noqa: BLE001 - as above
            self._emit(EventName.STORE_UNAVAILABLE, operation, None, describe(error))

    def _claimed(self, operation: Operation, on_takeover: protocol.OnTakeover) -> Attempt | Verdict:
        asked_at = self._clock.monotonic()
        decision = claim(self._store, _request(operation, on_takeover))
        if not isinstance(decision, protocol.Run):
            return decision
        attempt = self._attempt(operation, decision.record, asked_at)
        try:
            attempt.ensure_time()
            self._heartbeat.start(attempt)
        except LeaseLost:
            return self._claimed(operation, on_takeover)  # nothing has run here: ask who took over
        except StoreUnavailable:
            # A body whose lease nobody renews would soon run beside another.
            self._try(operation, attempt, attempt.release)
            attempt.raise_struck()
            raise
        return attempt

    def _announce(self, operation: Operation, attempt: Attempt) -> None:
        self._emit_of(EventName.CLAIMED, operation, attempt, f"attempt {attempt.number}")
        if attempt.is_takeover:
            self._emit_of(EventName.TAKEN_OVER, operation, attempt, "the attempt before never ended")

    def _attempt(self, operation: Operation, record: Record, asked_at: float) -> Attempt:
        policy = operation.policy
        return Attempt(
            self._store,
            record,
            lease=policy.lease_ms,
            retain=policy.retain_ms,
            claimed_at=asked_at,
            clock=self._clock,
        )

    def _answer(self, operation: Operation, verdict: Verdict) -> Finished | Conflict:
        self._report(operation, verdict)
        record = verdict.record
        match verdict:
            case protocol.Replay():
                return Finished(self._result(record))
            case protocol.ReplayFailure():
                raise self._failure(operation.policy, record)
            case protocol.InFlight(_, retry_after):
                return Conflict(InFlight(record.key, retry_after, record.worker), record.task_id)
            case protocol.KeyReused():
                raise KeyReused(record.key, record.task_id)
            case protocol.Unknown():
                raise OutcomeUnknown(record.key, record.error or "")
            case unreachable:
                assert_never(unreachable)

    def _report(self, operation: Operation, verdict: Verdict) -> None:
        record = verdict.record
        match verdict:
            case protocol.Replay():
                self._emit(EventName.REPLAYED, operation, record, "completed earlier")
            case protocol.ReplayFailure():
                self._emit(EventName.REPLAYED, operation, record, f"failed earlier: {record.error}")
            case protocol.InFlight(_, retry_after):
                self._emit(EventName.CONFLICTED, operation, record, f"in flight for another {retry_after} ms")
            case protocol.KeyReused():
                self._emit(EventName.CONFLICTED, operation, record, "key reused with other arguments")
            case protocol.Unknown():
                self._emit(EventName.OUTCOME_UNKNOWN, operation, record, record.error or "")
            case unreachable:
                assert_never(unreachable)

    def _execute(self, operation: Operation, attempt: Attempt, body: Body) -> Finished:
        try:
            try:
                self._announce(operation, attempt)  # to code that may end the process: from here on there is an end
                value = body(attempt)
            except BaseException as error:
                instead = self._end(operation, attempt, error)
                attempt.raise_struck()
                if instead is None:
                    raise
                return instead
            finished = attempt.unstruck(lambda: self._complete(operation, attempt, value))
            attempt.raise_struck()
            return finished
        finally:
            self._heartbeat.stop(attempt)

    def _complete(self, operation: Operation, attempt: Attempt, value: Any) -> Finished:
        if attempt.committed is not None:
            self._emit_of(EventName.COMPLETED, operation, attempt, attempt.committed.lost or "committed")
            return Finished(attempt.committed.value)
        kept = self._codec.keep(value)
        write = _or_less(
            lambda: attempt.complete(kept.encoded, kept.lost), lambda error: attempt.complete(None, str(error))
        )
        lost = f"{RESULT_LOST}: {kept.lost}" if kept.lost else ""
        instead = self._settled(operation, attempt, write, EventName.COMPLETED, lost)
        return instead or Finished(kept.value)

    def _end(self, operation: Operation, attempt: Attempt, error: BaseException) -> Finished | None:
        """Settle the claim of a body that raised; the outcome to report instead of ``error``, if there is one."""
        policy = operation.policy
        if attempt.committed is not None:
            # The effects are there and recorded: what went wrong after them changes nothing of that.
            self._emit_of(EventName.COMPLETED, operation, attempt, f"{type(error).__name__} after the commit")
            return Finished(attempt.committed.value) if isinstance(error, Exception) else None
        match protocol.ending(
            error,
            on_takeover=policy.on_takeover,
            remember=policy.remember,
            nothing_begun=(SafeToRetry, *self._control.nothing_begun),
            no_outcome=(*_OUR_OWN, *self._control.no_outcome),
            in_doubt=isinstance(error, OutcomeUnknown) and error.key == attempt.key,
            before_effects=error is attempt.excused,
        ):
            case Ending.FAIL:
                failure, text = self._codec.encode_failure(error), self._codec.summary(error)
                write = _or_less(
                    lambda: attempt.fail(failure, text), lambda _: attempt.fail(None, type(error).__name__)
                )
                return self._settled(operation, attempt, write, EventName.FAILED, type(error).__name__)
            case Ending.RELEASE:
                return self._without_outcome(
                    operation, attempt, error, attempt.release, EventName.RELEASED, type(error).__name__
                )
            case Ending.GIVE_UP:
                reason = (
                    error.reason
                    if isinstance(error, OutcomeUnknown) and not policy.redact_errors
                    else f"{type(error).__name__} ended attempt {attempt.number}"
                )
                give_up = _or_less(lambda: attempt.give_up(reason), lambda _: attempt.give_up(type(error).__name__))
                return self._without_outcome(operation, attempt, error, give_up, EventName.OUTCOME_UNKNOWN, reason)
            case unreachable:
                assert_never(unreachable)

    def _without_outcome(
        self,
        operation: Operation,
        attempt: Attempt,
        error: BaseException,
        write: Callable[[], Written | Superseded | Lost],
        event: EventName,
        reason: str,
    ) -> Finished | None:
        """End a claim whose body has no outcome; the one to report instead of ``error``, if another recorded it."""
        settlement = self._try(operation, attempt, write)
        if settlement is None:
            return None
        if isinstance(settlement, Written):
            self._emit_of(event, operation, attempt, reason)
            return None
        self._emit_of(EventName.LEASE_LOST, operation, attempt, "taken over before the body raised")
        if not isinstance(error, Exception) or isinstance(error, self._steering):
            return None  # the message is already on its way elsewhere
        if isinstance(settlement, Superseded):
            return Finished(self._result(settlement.record))
        raise LeaseLost(attempt.key, attempt.fencing_token) from error

    @property
    def _steering(self) -> tuple[type[BaseException], ...]:
        return (*self._control.nothing_begun, *self._control.no_outcome)

    def _try(
        self, operation: Operation, attempt: Attempt, write: Callable[[], Written | Superseded | Lost]
    ) -> Written | Superseded | Lost | None:
        """``write()``, or None where the store gave no answer: the lease then ends the claim by itself."""
        try:
            return write()
        except StoreUnavailable as error:
            self._emit_of(EventName.STORE_UNAVAILABLE, operation, attempt, str(error))
            return None

    def _settled(
        self,
        operation: Operation,
        attempt: Attempt,
        write: Callable[[], Written | Superseded],
        event: EventName,
        reason: str,
    ) -> Finished | None:
        """Make an outcome certain; the outcome that counts instead, if another attempt recorded one."""
        try:
            settlement = write()
        except LeaseLost as error:
            self._emit_of(EventName.LEASE_LOST, operation, attempt, str(error))
            raise
        except StoreUnavailable as error:
            self._emit_of(EventName.STORE_UNAVAILABLE, operation, attempt, str(error))
            raise
        match settlement:
            case Written():
                self._emit_of(event, operation, attempt, reason)
                return None
            case Superseded(record):
                self._emit_of(EventName.LEASE_LOST, operation, attempt, "completed by another attempt")
                return Finished(self._result(record))
            case unreachable:
                assert_never(unreachable)

    def _result(self, record: Record) -> Any:
        kept = _encoded(record)
        if kept is None:
            raise ResultLost(record.key, record.error or "no reason recorded")
        try:
            return self._codec.decode(kept)
        except KombuError as error:
            raise ResultLost(record.key, f"it cannot be decoded here: {self._codec.told(error)}") from error

    def _failure(self, policy: Policy, record: Record) -> Exception:
        never = (SafeToRetry, *_OUR_OWN, *self._steering)
        try:
            return self._codec.decode_failure(_encoded(record), record.key, remembered=policy.outcomes, never=never)
        except KombuError as error:
            raise ResultLost(record.key, f"its failure cannot be decoded here: {self._codec.told(error)}") from error

    def _emit(self, name: EventName, operation: Operation, record: Record | None, reason: str) -> None:
        token = None if record is None else record.fencing_token
        self._observe(Event(name, operation.identity.key, token, reason))

    def _emit_of(self, name: EventName, operation: Operation, attempt: Attempt, reason: str) -> None:
        self._observe(Event(name, operation.identity.key, attempt.fencing_token, reason))


def _or_less(write: Callable[[], T], less: Callable[[RecordTooLarge], T]) -> Callable[[], T]:
    """``write``, or ``less`` where the store has no room for it."""

    def written() -> T:
        try:
            return write()
        except RecordTooLarge as error:
            return less(error)

    return written


def _request(operation: Operation, on_takeover: protocol.OnTakeover) -> Request:
    policy = operation.policy
    return Request(
        key=operation.identity.key,
        fingerprint=operation.identity.fingerprint,
        owner=new_nonce(),
        revision="",  # claim() gives every write its own
        lease=policy.lease_ms,
        grace=policy.grace_ms,
        on_takeover=on_takeover,
        max_takeovers=policy.max_takeovers,
        task=bounded(operation.task),
        task_id=bounded(operation.task_id),
        worker=bounded(operation.worker),
        app=bounded(operation.app),
    )


def _encoded(record: Record) -> Encoded | None:
    if record.result is None or record.content_type is None:
        return None
    return Encoded(record.result, record.content_type)
