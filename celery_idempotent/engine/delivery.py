"""A delivery: runs a body at most once per claim and turns every ending into a recorded outcome.

It knows stores, policies and exceptions, and nothing of Celery. Whoever uses it says which exceptions are
its control flow, and maps what :meth:`Delivery.run` returns or raises to its own world.
"""

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar, assert_never

from kombu.exceptions import KombuError

from celery_idempotent import clock as local_clock
from celery_idempotent.clock import Clock
from celery_idempotent.engine.breaker import Breaker
from celery_idempotent.engine.claim import Claim, WriteResult, claim, end_lease
from celery_idempotent.engine.events import Event, EventName, Timed, event_of, timed
from celery_idempotent.engine.heartbeat import Heartbeat
from celery_idempotent.engine.processes import is_gone
from celery_idempotent.errors import (
    DeadlineExceeded,
    InFlight,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    ResultLost,
    SafeToRetry,
    StoreMisconfigured,
    StoreUnavailable,
    members,
)
from celery_idempotent.protocol.codec import Codec, Encoded, Kept, describe, own_failure
from celery_idempotent.protocol.contents import ContentLost, Slot, is_packed, outcome_slot, pack, unpack
from celery_idempotent.protocol.effects import in_words
from celery_idempotent.protocol.operation import (
    Answer,
    Ending,
    Mismatch,
    Operation,
    Replay,
    ReplayFailure,
    Run,
    Superseded,
    Unknown,
    Wait,
    Written,
    ending,
)
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status, process_of, trace_of
from celery_idempotent.protocol.store import RecordTooLarge, Store

_OUTCOMES = (Replay, ReplayFailure)

T = TypeVar("T")
E = TypeVar("E", DeadlineExceeded, OutcomeUnknown)

OUR_OWN = (LeaseLost, StoreUnavailable)
"""What a body raises when it asks its attempt. Recorded as an outcome and replayed, it would look like an
outage of the replay's own, and be tried again for ever."""

Body = Callable[[Claim | None], Any]
"""What is to happen once; it gets its claim, or None where the policy lets it run unprotected."""


class ControlFlow(NamedTuple):
    """Exceptions that a body raises to steer its caller, not to fail.

    By ``nothing_begun`` the author says that running again is right; ``no_outcome`` end the delivery without telling
    whether the effect happened. ``is_death`` tells what ends the body's own process, so that it is delivered again.
    ``is_stopped()`` once the process is to end, and what time there was for that is over.
    """

    nothing_begun: tuple[type[BaseException], ...] = ()
    no_outcome: tuple[type[BaseException], ...] = ()
    is_death: Callable[[BaseException], bool] = lambda error: False
    is_stopped: Callable[[], bool] = lambda: False

    @property
    def steering(self) -> tuple[type[BaseException], ...]:
        return (*self.nothing_begun, *self.no_outcome)


class Outcome(NamedTuple):
    """The operation has one; ``value`` is its result, of this delivery or of an earlier one."""

    value: Any


class Conflict(NamedTuple):
    """Another delivery, of ``task_id``, has been running the operation for ``running_for`` ms; nothing was done."""

    error: InFlight
    task_id: str
    running_for: int


class Delivery:
    """One delivery of an operation. ``tell`` is called with every event, in the thread that executes the body.

    Only that a deadline is over is told by whoever sees it first, which may be the heartbeat. ``until`` is, by
    ``clock``, when this process ends.
    """

    def __init__(
        self,
        operation: Operation,
        store: Store,
        codec: Codec,
        heartbeat: Heartbeat,
        control: ControlFlow,
        tell: Callable[[Event], None],
        clock: Clock = local_clock,
        breaker: Breaker | None = None,
        until: float = inf,
    ) -> None:
        self._operation, self._policy = operation, operation.policy
        self._store, self._codec, self._heartbeat = store, codec, heartbeat
        self._control, self._tell = control, tell
        self._clock, self._until = clock, until
        self._breaker = breaker or Breaker(repr(store), clock)
        self._beating: Claim | None = None
        # Written in C: no signal strikes while it is let go, as one can in whatever is written here.
        self._underway = threading.Lock()

    def run(self, body: Body) -> Outcome | Conflict:
        """Run ``body`` if nobody ran it, replay its outcome if somebody did.

        It raises what the body raised, now or, if that is a recorded outcome, earlier. Of its own, nothing ran after
        ``KeyReused`` and ``OutcomeUnknown``; after ``LeaseLost`` and ``StoreUnavailable`` report nothing as done.
        """
        with self._underway:
            try:
                try:
                    decision = self._decision(self._operation)
                except StoreUnavailable as error:
                    # Where somebody must mend something there is an answer, perhaps an outcome that cannot be read.
                    if self._policy.on_outage == "run" and not isinstance(error, StoreMisconfigured):
                        return Outcome(body(None))
                    raise
                return self._execute(decision, body) if isinstance(decision, Claim) else self._answer(decision)
            finally:
                if self._beating is not None:
                    self._heartbeat.stop(self._beating)

    def observe(self, body: Body) -> Any:
        """Run ``body`` in any case, report what :meth:`run` would have suppressed, and return its value untouched."""
        with self._underway:
            try:
                observed = self._operation._replace(policy=self._policy.observed)
                decision = self._quietly(partial(self._decision, observed))
                if not isinstance(decision, Claim):
                    if decision is not None:
                        self._read(decision, decision.record)
                    return body(None)
                try:
                    self._tell_of_claim(decision)
                    value = body(decision)
                except BaseException:
                    self._quietly(partial(decision.uninterrupted, self._try, decision, decision.release))
                    decision.raise_interruption()
                    raise
                decision.patience = 0  # to wait for a store that is away would change when the task ends
                self._quietly(partial(decision.uninterrupted, self._complete, decision, value))
                decision.raise_interruption()
                return value
            finally:
                if self._beating is not None:
                    self._heartbeat.stop(self._beating)

    def _quietly(self, act: Callable[[], T]) -> T | None:
        """``act()``, or None where it fails: whatever is wrong, observing changes nothing of what a task does."""
        try:
            return act()
        except OUR_OWN:
            pass  # it is told already
        except Exception as first:  # noqa: BLE001 - as above
            self._emit(EventName.STORE_UNAVAILABLE, None, describe(own_failure(act, first)))
        return None

    def _decision(self, operation: Operation) -> Claim | Answer:
        """The claim, or why there is none. One whose process is gone is not waited for."""
        try:
            while True:
                asked_at = self._clock.monotonic()
                asked = partial(timed, Timed.CLAIM, operation.task, claim, self._store, operation)
                decision: Run | Answer = self._breaker.ask(operation.identity.key, asked)
                if isinstance(decision, Run):
                    if claimed := self._claimed(decision.record, asked_at, operation.policy):
                        return claimed
                elif isinstance(decision, Wait) and is_gone(process_of(decision.record)):
                    end_lease(self._store, decision.record, self._clock)
                else:
                    return decision
        except StoreUnavailable as error:
            self._emit(event_of(error), None, str(error), is_one_of_many=self._breaker.is_open)
            raise

    def _claimed(self, record: Record, asked_at: float, policy: Policy) -> Claim | None:
        """The claim that was granted at ``asked_at``, which is renewed from now on; None where it is lost already."""
        claimed = Claim(
            self._store,
            record,
            lease=policy.lease_ms,
            retain=policy.retain_ms,
            claimed_at=asked_at,
            clock=self._clock,
            deadline=policy.deadline_ms,
            tell_late=self._tell_late,
            tell_waiting=self._tell_waiting,
            until=self._until,
            is_stopped=self._control.is_stopped,
            is_underway=self._underway.locked,
        )
        try:
            claimed.renew_if_half_over()
            self._beating = claimed  # first: a time limit may strike as soon as it beats, and before the body begins
            self._heartbeat.start(claimed)
        except LeaseLost:
            return None  # nothing has run here: ask who took over
        except StoreUnavailable:
            # A body whose lease nobody renews would soon run beside another.
            self._try(claimed, claimed.release)
            claimed.raise_interruption()
            raise
        return claimed

    def _tell_of_claim(self, claimed: Claim) -> None:
        self._emit(EventName.CLAIMED, claimed, f"attempt {claimed.number}")
        if claimed.is_takeover:
            self._emit(EventName.TAKEN_OVER, claimed, "the attempt before never ended")

    def _tell_late(self, claimed: Claim) -> None:
        assert self._policy.deadline is not None
        ran = f"the body has been running for {in_words(self._policy.deadline)}"
        self._emit(EventName.DEADLINE_EXCEEDED, claimed, f"{ran}; its lease is renewed no more")

    def _tell_waiting(self, claimed: Claim, error: StoreUnavailable) -> None:
        self._emit(event_of(error), claimed, f"its outcome waits: {error}", is_one_of_many=True)  # the claim logs it

    def _answer(self, answer: Answer) -> Outcome | Conflict:
        # First: without an answer about an outcome nothing is replayed.
        record = self._loaded(answer.record) if isinstance(answer, _OUTCOMES) else answer.record
        instead = self._read(answer, record)
        if isinstance(instead, Conflict):
            return instead
        if instead is None:
            instead = self._recorded(record)
        if isinstance(answer, Replay):
            return Outcome(instead)
        raise instead

    def _read(self, answer: Answer, record: Record) -> Conflict | Exception | None:
        """Tell what an answer means; what to return or raise for it, None where that is recorded."""
        instead: Conflict | Exception | None = None
        match answer:
            case Replay():
                event, reason = EventName.REPLAYED, "completed earlier"
            case ReplayFailure():
                event, reason = EventName.REPLAYED, f"failed earlier: {record.error}"
            case Wait(_, retry_after, running_for):
                event, reason = EventName.CONFLICTED, f"in flight for another {retry_after} ms"
                instead = Conflict(InFlight(record.key, retry_after, record.worker), record.task_id, running_for)
            case Mismatch():
                event, reason = EventName.KEY_REUSED, f"it belongs to other arguments: task id {record.task_id}"
                instead = KeyReused(record.key, record.task_id)
            case Unknown():
                event, reason = EventName.OUTCOME_UNKNOWN, record.error or ""
                instead = OutcomeUnknown(record.key, reason)
            case unreachable:
                assert_never(unreachable)
        self._emit(event, record, reason)
        return instead

    def _execute(self, claimed: Claim, body: Body) -> Outcome:
        try:
            self._tell_of_claim(claimed)  # to code that may end the process: from here on there is an end
            value = body(claimed)
        except BaseException as error:
            instead = claimed.uninterrupted(self._end, claimed, error)
            claimed.raise_interruption()
            if instead is not None:
                return instead
            # What the body met when it asked its attempt must come again, and not look like a failure.
            for each in members(error) if isinstance(error, ExceptionGroup) else ():
                if isinstance(each, OUR_OWN):
                    raise each from each.__cause__
            raise
        finished = claimed.uninterrupted(self._complete, claimed, value)
        claimed.raise_interruption()
        return finished

    def _complete(self, claimed: Claim, value: Any) -> Outcome:
        claimed.end_body()
        if claimed.committed is not None:
            return self._told_committed(claimed, claimed.committed, "committed")
        kept = self._codec.keep_outcome(value)

        def write() -> Written | Superseded:
            nonlocal kept
            settlement, kept = claimed.recorded(kept, lambda each: claimed.complete(each.encoded, each.lost))
            return settlement

        instead = self._settled(claimed, write, EventName.COMPLETED, "")
        if instead is not None:
            return instead
        if kept.lost:
            self._emit(EventName.RESULT_DROPPED, claimed, kept.lost)
        return Outcome(kept.value)

    def _told_committed(self, claimed: Claim, committed: Kept, reason: str) -> Outcome:
        self._emit(EventName.COMPLETED, claimed, reason)
        if committed.lost:
            self._emit(EventName.RESULT_DROPPED, claimed, committed.lost)
        return Outcome(committed.value)

    def _end(self, claimed: Claim, error: BaseException) -> Outcome | None:
        """Settle the claim of a body that raised; the outcome to report instead of ``error``, if there is one."""
        policy, kind = self._policy, type(error).__name__
        claimed.end_body()
        if claimed.committed is not None:
            # The effects are there and recorded: what went wrong after them changes nothing of that.
            outcome = self._told_committed(claimed, claimed.committed, f"{kind} after the commit")
            return outcome if isinstance(error, Exception) else None
        met = _own(OutcomeUnknown, error, claimed)
        doubt = claimed.doubt or (met and met.reason)
        raised = claimed.raised_before_effects
        before_effects = {id(each) for each in members(raised)} if raised else set()
        is_before_effects = all(id(each) in before_effects for each in members(error))
        match ending(
            error,
            on_takeover=policy.on_takeover,
            remember=policy.remember,
            nothing_begun=(SafeToRetry, *self._control.nothing_begun),
            no_outcome=(*OUR_OWN, *self._control.no_outcome),
            in_doubt=doubt is not None,
            before_effects=is_before_effects,
        ):
            case Ending.FAIL:
                failure = pack(self._store, self._codec.encode_failure(error), Slot(claimed.key, "failure")).encoded
                text = self._codec.summary(error)
                fail = _or_less(lambda: claimed.fail(failure, text), lambda: claimed.fail(None, kind))
                return self._settled(claimed, fail, EventName.FAILED, kind)
            case Ending.RELEASE:
                # What is too slow, or exits, again and again is to end UNKNOWN, as what is killed again and again.
                is_late = _own(DeadlineExceeded, error, claimed) is not None
                if (is_late and not is_before_effects) or self._control.is_death(error):
                    reason = f"{kind}; the next attempt is a takeover"
                    return self._without_outcome(claimed, error, claimed.abandon, EventName.RELEASED, reason)
                return self._without_outcome(claimed, error, claimed.release, EventName.RELEASED, kind)
            case Ending.GIVE_UP:
                is_told = doubt is not None and not policy.private
                reason = describe(doubt) if is_told else f"{kind} ended attempt {claimed.number}"
                give_up = _or_less(lambda: claimed.give_up(reason), lambda: claimed.give_up(kind))
                return self._without_outcome(claimed, error, give_up, EventName.OUTCOME_UNKNOWN, reason)
            case unreachable:
                assert_never(unreachable)

    def _without_outcome(
        self, claimed: Claim, error: BaseException, write: Callable[[], WriteResult], event: EventName, reason: str
    ) -> Outcome | None:
        """End a claim whose body has no outcome; the one to report instead of ``error``, if another recorded it."""
        settlement = self._try(claimed, write)
        if settlement is None:
            return None
        if isinstance(settlement, Written):
            self._emit(event, claimed, reason)
            return None
        self._emit(EventName.LEASE_LOST, claimed, "taken over before the body raised")
        if not isinstance(error, Exception) or isinstance(error, self._control.steering):
            return None  # the message is already on its way elsewhere
        if isinstance(settlement, Superseded):
            return Outcome(self._recorded(self._loaded(settlement.record)))
        raise LeaseLost(claimed.key, claimed.fencing_token) from error

    def _try(self, claimed: Claim, write: Callable[[], WriteResult]) -> WriteResult | None:
        """``write()``, or None where the store gave no answer: the lease then ends the claim by itself."""
        try:
            return write()
        except StoreUnavailable as error:
            self._emit(event_of(error), claimed, str(error))
            return None

    def _settled(
        self, claimed: Claim, write: Callable[[], Written | Superseded], event: EventName, reason: str
    ) -> Outcome | None:
        """Make an outcome certain; the outcome that counts instead, if another attempt recorded one."""
        try:
            settlement = write()
        except OUR_OWN as error:
            lost = EventName.LEASE_LOST
            self._emit(event_of(error) if isinstance(error, StoreUnavailable) else lost, claimed, str(error))
            raise
        if isinstance(settlement, Written):
            self._emit(event, claimed, reason)
            return None
        self._emit(EventName.LEASE_LOST, claimed, "completed by another attempt")
        return Outcome(self._recorded(self._loaded(settlement.record)))

    def _loaded(self, record: Record) -> Record:
        try:
            return load(self._store, record)
        except StoreUnavailable as error:
            self._emit(event_of(error), record, str(error))
            raise

    def _recorded(self, record: Record) -> Any:
        """The result in a record that was loaded, or the failure to raise."""
        try:
            return outcome_of(self._codec, self._policy, record, self._control)
        except ResultLost as error:
            self._emit(EventName.RESULT_LOST, record, error.reason)
            raise

    def _emit(
        self, name: EventName, bearer: Record | Claim | None, reason: str, *, is_one_of_many: bool = False
    ) -> None:
        key, _, label = self._operation.identity
        match bearer:
            case None:
                event = Event(name, key, None, reason, label, is_one_of_many)
            case Claim():
                event = Event(name, key, bearer.fencing_token, reason, bearer.label, is_one_of_many, bearer.number)
            case Record():
                about = bearer.task_id, trace_of(bearer), bearer.app
                event = Event(name, key, bearer.fencing_token, reason, bearer.label, False, bearer.attempts, *about)
            case unreachable:
                assert_never(unreachable)
        self._tell(event)


def _own(kind: type[E], error: BaseException, claimed: Claim) -> E | None:
    """What of ``error``, or in it, is of that kind and about this operation."""
    return next((each for each in members(error) if isinstance(each, kind) and each.key == claimed.key), None)


def _or_less(write: Callable[[], T], less: Callable[[], T]) -> Callable[[], T]:
    """``write``, or ``less`` where the store has no room for it."""

    def written() -> T:
        try:
            return write()
        except RecordTooLarge:
            return less()

    return written


def load(store: Store, record: Record) -> Record:
    """The record with its outcome as it was encoded; or without one, and why. Raises ``RecordUnreadable``."""
    encoded = _encoded(record)
    if encoded is None or not is_packed(store, encoded):
        return record
    try:
        outcome = unpack(store, encoded, outcome_slot(record))
    except ContentLost as error:
        return record.but(result=None, content_type=None, error=str(error))
    return record if outcome is encoded else record.but(result=outcome.data, content_type=outcome.content_type)


def outcome_of(codec: Codec, policy: Policy, record: Record, control: ControlFlow) -> Any:
    """The result in a record that was loaded, or the failure to raise; ``ResultLost`` if there is none to decode here.

    No failure steers a caller.
    """
    kept, is_failure = _encoded(record), record.status is Status.FAILED
    if kept is None and not is_failure:
        raise ResultLost(record.key, record.error or "no reason recorded")
    try:
        if kept is None or is_failure:
            never = (SafeToRetry, *OUR_OWN, *control.steering)
            return codec.decode_failure(kept, record.key, remembered=policy.outcomes, never=never)
        return codec.decode(kept)
    except KombuError as error:
        what = "its failure" if is_failure else "it"
        raise ResultLost(record.key, f"{what} cannot be decoded here: {codec.told(error)}") from error


def _encoded(record: Record) -> Encoded | None:
    if record.result is None or record.content_type is None:
        return None
    return Encoded(record.result, record.content_type)
