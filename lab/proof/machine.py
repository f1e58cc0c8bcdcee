"""A hypothesis state machine: any store, driven through the protocol, beside a small oracle.

The oracle knows nothing of revisions, decisions or settlements. It is the protocol told once more, as a
person would tell it, and after every step replies and stored record must agree with it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import Phase, settings, stateful
from hypothesis import strategies as st

from celery_idempotent.engine.claim import Claim, claim, new_nonce
from celery_idempotent.errors import LeaseLost, StoreUnavailable
from celery_idempotent.protocol import operation
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.testing import FakeClock, FaultyStore
from celery_idempotent.testing.stores import Fault
from lab.proof.verdicts import OUTCOMES

LEASE, GRACE, RETAIN = 60_000, 1_000, 600_000

_MAX_TAKEOVERS = 2  # few, so that random runs come that far

_START = 4_000_000_000_000
"""Milliseconds; in the year 2096, as a server that deletes expired records by its own clock must not do so here."""

# Errors of one millisecond are found at boundaries, and hardly ever anywhere else.
_STEPS = sorted(
    {1, GRACE, *(limit + shift for limit in (LEASE, LEASE + GRACE, RETAIN, RETAIN + 999) for shift in (-1, 0, 1))}
)
_THEIRS = '"theirs"'
_FAULTS = st.sampled_from(["none", "none", "reply lost", "request lost"])


def _completing(value: str) -> Callable[[Claim], object]:
    return lambda attempt: attempt.complete(Encoded(value, "application/json"))


_ENDS: dict[tuple[Status, str | None], Callable[[Claim], object]] = {
    **{(Status.COMPLETED, value): _completing(value) for value in ("1", "null", '""', "[]", _THEIRS)},
    (Status.FAILED, "{}"): lambda attempt: attempt.fail(Encoded("{}", "application/json"), "boom"),
    (Status.RELEASED, None): lambda attempt: attempt.release(),
    (Status.UNKNOWN, None): lambda attempt: attempt.give_up("why"),
}
"""By status and result."""


class _Clocked(FaultyStore):
    """The store under test on a clock of ours, with planned faults and writes that land late."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        super().__init__(store)
        self.now = clock.now  # type: ignore[method-assign]
        self.late: list[tuple[Record, str | None]] = []

    def swap(self, new: Record, expected: str | None) -> Record | None:
        if self.faults and self.faults[0] == "request lost":
            self.late.append((new, expected))
        return super().swap(new, expected)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The oracle's record: what matters, and who holds it."""

    status: Status
    holder: int
    token: int
    lease_until: int
    fingerprint: str
    attempts: int
    takeovers: int
    result: str | bytes | None = None
    forget_at: int | None = None


def _entry_of(record: Record, holder: int) -> _Entry:
    """What a record says, field by field."""
    counted = (record.fingerprint or "", record.attempts, record.takeovers, record.result, record.expires_at)
    return _Entry(record.status, holder, record.fencing_token, record.lease_until, *counted)


@dataclass(frozen=True, slots=True)
class _Holder:
    number: int
    attempt: Claim


class StoreMachine(stateful.RuleBasedStateMachine):
    """Claims, endings, renewals, faults, losses and clock moves on one key."""

    make_store: Callable[[], Store]
    attempts = stateful.Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(_START)
        self.store = _Clocked(type(self).make_store(), self.clock)
        self.key = f"machine:{new_nonce()}"
        self.entry: _Entry | None = None
        #: By holder, the entry since its last write: it writes that again where a store forgets.
        self.remembered: dict[int, _Entry] = {}
        #: By holder that knows of its loss, what answered it then: for no outcome, it asks nothing any more.
        self.losses: dict[int, _Entry | None] = {}
        self.holders: dict[str, int] = {}
        self.count = 0

    @stateful.rule(target=attempts, fingerprint=st.sampled_from("aaab"), refuse=st.booleans(), fault=_FAULTS)
    def claim(self, fingerprint: str, refuse: bool, fault: Fault) -> Any:
        """One delivery asks; a single lost message changes nothing."""
        self.store.faults.append(fault)
        decision = claim(self.store, self._operation(fingerprint, refuse))
        self.store.faults.clear()

        entry = self._current()
        if entry and entry.fingerprint != fingerprint and entry.status is not Status.RELEASED:
            assert isinstance(decision, operation.Mismatch)
        elif entry is None or entry.status is Status.RELEASED or (self._may_be_taken_over(entry) and not refuse):
            assert isinstance(decision, operation.Run)
            return self._grant(decision, fingerprint, entry)
        elif entry.status is Status.IN_PROGRESS and not self._is_over(entry):
            assert isinstance(decision, operation.Wait)
            assert decision.retry_after == entry.lease_until + GRACE - self.clock.now()
        elif entry.status is Status.COMPLETED:
            assert isinstance(decision, operation.Replay)
            assert decision.record.result == entry.result
        elif entry.status is Status.FAILED:
            assert isinstance(decision, operation.ReplayFailure)
        else:
            assert isinstance(decision, operation.Unknown)
            self.entry = replace(entry, status=Status.UNKNOWN)
        return stateful.multiple()

    @stateful.precondition(lambda self: self._current() is None)
    @stateful.rule(landed=st.booleans())
    def claim_without_an_answer(self, landed: bool) -> None:
        """Two lost messages in a row are an outage; the claim may be stored all the same, and nobody runs."""
        self.store.faults.extend(["reply lost" if landed else "request lost", "request lost"])
        before = self.store.get(self.key)
        try:
            claim(self.store, self._operation("a", refuse=False))
        except StoreUnavailable:
            pass
        else:
            assert before is not None  # an expired record needs a second swap, which met no fault
        self.store.faults.clear()
        if self.store.get(self.key) != before:
            self._adopt()

    def _adopt(self) -> None:
        """Take over into the oracle what landed without an answer."""
        record = self.store.get(self.key)
        assert record is not None
        self.count += 1
        self.entry = _entry_of(record, self.holders.get(record.owner, -self.count))

    @stateful.rule(holder=attempts, fault=_FAULTS)
    def renew(self, holder: _Holder, fault: Fault) -> None:
        """A renewal extends the lease of the holder, and touches nobody else's and nothing that is not there."""
        entry = None if holder.attempt.is_over else self._own_entry(holder, Status.IN_PROGRESS)
        self.store.faults.append(fault)
        holder.attempt.renew()
        self.store.faults.clear()
        assert holder.attempt.is_over is (entry is None)
        if entry is None:
            self.losses.setdefault(holder.number, self._answer_to(holder))
        elif self.entry:
            self._write(holder, replace(entry, lease_until=self.clock.now() + LEASE))

    @stateful.rule(
        holder=stateful.consumes(attempts),
        fault=_FAULTS,
        end=st.sampled_from([each for each in _ENDS if each[1] != _THEIRS]),
    )
    def end(self, holder: _Holder, fault: Fault, end: tuple[Status, str | None]) -> None:
        """Only the holder's end is recorded; everybody else gets the result that counts, or nothing."""
        self._end(holder, fault, *end)

    def _end(self, holder: _Holder, fault: Fault, status: Status, result: str | None) -> None:
        asks = status in OUTCOMES or holder.number not in self.losses
        entry = self._own_entry(holder, status) if asks else None
        self.store.faults.append(fault)
        try:
            answer = _ENDS[status, result](holder.attempt)
        except LeaseLost:
            answer = None
        self.store.faults.clear()
        if entry:
            assert isinstance(answer, operation.Written)
            forget_at = -((self.clock.now() + RETAIN) // -1000) if status in OUTCOMES else None
            lease_until = self.clock.now() if status is Status.RELEASED else entry.lease_until
            self._write(
                holder, replace(entry, status=status, result=result, forget_at=forget_at, lease_until=lease_until)
            )
        elif theirs := self._answer_to(holder) if asks else self.losses[holder.number]:
            assert isinstance(answer, operation.Superseded)
            assert answer.record.result == theirs.result
        else:
            assert not isinstance(answer, operation.Written | operation.Superseded)

    def _answer_to(self, holder: _Holder) -> _Entry | None:
        """Another's result for the same arguments, if there is one."""
        theirs, mine = self.entry, self.remembered[holder.number]
        is_result = theirs is not None and theirs.status is Status.COMPLETED and theirs.fingerprint == mine.fingerprint
        return theirs if is_result else None

    @stateful.rule(step=st.sampled_from(_STEPS), back=st.sampled_from([False, False, False, True]))
    def clock_moves(self, step: int, back: bool) -> None:
        self.clock.advance(-step if back else step)

    @stateful.precondition(lambda self: self.entry is not None)
    @stateful.rule(error=st.sampled_from([-1, 0, 0, 1]))
    def clock_reaches_a_limit(self, error: int) -> None:
        """Time passes to the very millisecond at which a lease or an outcome is over, or to one beside it."""
        entry = self.entry
        assert entry is not None
        limit = entry.lease_until + GRACE if entry.forget_at is None else entry.forget_at * 1000
        self.clock.milliseconds = max(self.clock.milliseconds, limit + error)

    @stateful.precondition(lambda self: self.entry is not None and self.entry.status is Status.IN_PROGRESS)
    @stateful.rule(fault=_FAULTS)
    def somebody_else_finishes(self, fault: Fault) -> None:
        """The holder sleeps through its lease; a successor takes over and completes."""
        entry = self.entry
        assert entry is not None
        self.clock.milliseconds = max(self.clock.milliseconds, entry.lease_until + GRACE)
        if not self._may_be_taken_over(entry):
            return
        decision = claim(self.store, self._operation(entry.fingerprint, refuse=False))
        assert isinstance(decision, operation.Run)
        self._end(self._grant(decision, entry.fingerprint, entry), fault, Status.COMPLETED, _THEIRS)

    @stateful.rule()
    def late_write_lands(self) -> None:
        """A request thought lost arrives after all; it finds its revision gone and changes nothing, or it is first."""
        if self.store.late:
            before = self.store.get(self.key)
            late, expected = self.store.late.pop()
            self.store.store.swap(late, expected)
            if (before.revision if before else None) == expected:
                self._adopt()

    @stateful.precondition(lambda self: self.entry is not None)
    @stateful.rule()
    def store_forgets(self) -> None:
        """What has expired, late as always; or anything, by a fail-over to a copy that is behind or by hand."""
        record = self.store.get(self.key)
        assert record is not None
        assert self.store.delete(self.key, record.revision)
        self.entry = None

    @stateful.invariant()
    def stored_record_is_the_entry(self) -> None:
        """What is stored is what the oracle says, field by field."""
        record = self.store.get(self.key)
        if self.entry is None:
            assert record is None
            return
        assert record is not None
        assert _entry_of(record, self.entry.holder) == self.entry

    def teardown(self) -> None:
        self.store.close()

    def _operation(self, fingerprint: str, refuse: bool) -> operation.Operation:
        takeover: Any = "refuse" if refuse else "rerun"
        policy = Policy(lease=LEASE / 1000, on_takeover=takeover, max_takeovers=_MAX_TAKEOVERS)
        identity = Identity(self.key, fingerprint)
        return operation.Operation(identity=identity, policy=policy, task="t", task_id="id", worker="w", grace=GRACE)

    def _grant(self, decision: operation.Run, fingerprint: str, entry: _Entry | None) -> _Holder:
        now = self.clock.now()
        previous = self.entry.token if self.entry else 0
        self.count += 1
        takeovers = entry.takeovers + 1 if entry and entry.status is Status.IN_PROGRESS else 0
        attempts, token = entry.attempts + 1 if entry else 1, max(previous + 1, now)
        claimed = _Entry(Status.IN_PROGRESS, self.count, token, now + LEASE, fingerprint, attempts, takeovers)
        times: Any = {"lease": LEASE, "retain": RETAIN, "claimed_at": self.clock.monotonic(), "clock": self.clock}
        attempt = Claim(self.store, decision.record, **times)
        holder = _Holder(self.count, attempt)
        self.holders[decision.record.owner] = holder.number
        self._write(holder, claimed)
        return holder

    def _write(self, holder: _Holder, entry: _Entry) -> None:
        self.entry = self.remembered[holder.number] = entry

    def _current(self) -> _Entry | None:
        """The entry, unless its outcome is forgotten by now."""
        if self.entry and self.entry.forget_at is not None and self.entry.forget_at * 1000 <= self.clock.now():
            return None
        return self.entry

    def _is_over(self, entry: _Entry) -> bool:
        return entry.status is Status.IN_PROGRESS and self.clock.now() >= entry.lease_until + GRACE

    def _may_be_taken_over(self, entry: _Entry) -> bool:
        return self._is_over(entry) and entry.takeovers < _MAX_TAKEOVERS

    def _own_entry(self, holder: _Holder, status: Status) -> _Entry | None:
        """What ``holder`` may go on from to ``status``: what is its own, also where the store has forgotten it."""
        if self.entry is None:
            return self.remembered[holder.number]
        goes_on = self.entry.status is Status.IN_PROGRESS or (
            self.entry.status is Status.UNKNOWN and status in OUTCOMES
        )
        return self.entry if goes_on and self.entry.holder == holder.number else None


def run_machine(
    make_store: Callable[[], Store], *, examples: int, steps: int = 40, phases: Collection[Phase] = tuple(Phase)
) -> None:
    """Drive fresh stores through random runs; raises where a reply or the stored record differs from the oracle's."""
    machine = type("Machine", (StoreMachine,), {"make_store": staticmethod(make_store)})
    stateful.run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, phases=phases)
    )
