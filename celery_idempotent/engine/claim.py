"""The claim: what one attempt owns, from the write that granted it to its last.

Every write after the first expects the revision that this attempt wrote last. When such a write does not
win, :func:`celery_idempotent.protocol.operation.settle` says what that means; nothing here decides anything.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import inf
from typing import Any, TypeVar, TypeVarTuple, assert_never
from weakref import WeakSet

from celery_idempotent import clock as local_clock
from celery_idempotent.clock import Clock
from celery_idempotent.engine.processes import is_gone
from celery_idempotent.errors import DeadlineExceeded, IdempotencyError, LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import ANY_TEXT, Encoded, Kept
from celery_idempotent.protocol.contents import Slot, pack, pack_small, require_readable
from celery_idempotent.protocol.operation import (
    Answer,
    GiveUp,
    Lost,
    Operation,
    Rebase,
    Run,
    Superseded,
    Vanished,
    Written,
    abandoned,
    checkpointed,
    decide,
    ended,
    given_up,
    released,
    renewed,
    settle,
)
from celery_idempotent.protocol.publishing import Announce, Outgoing, Publication, Underway, confirmed, publication
from celery_idempotent.protocol.record import Record, Status, process_of
from celery_idempotent.protocol.steps import Begun, Finished, from_plain, to_plain
from celery_idempotent.protocol.store import CommittingStore, RecordTooLarge, Store, Transaction, WriteFailed

logger = logging.getLogger(__name__)

MAX_RACES = 100
"""Lost races before a claim gives up. Every one of them means that another delivery advanced the record, so
a real store never gets near it; a store that breaks ``swap`` would otherwise loop for ever."""

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0
"""Seconds between tries of a final write that got no certain answer."""

_CONFIRM_FOR = 600.0
"""Seconds, or one lease if that is longer, for which a final write is tried. The effect has happened, so
giving up means that it happens again or stays unknown: worth more patience than any fail-over takes."""

_LAST_WRITE = 0.5
"""Seconds for which :func:`end_lease` waits."""

_MAX_STRIKES = 3
"""How often one write may be struck by an exception of somebody else's before that is taken for the store's own."""

T = TypeVar("T")
Args = TypeVarTuple("Args")

WriteResult = Written | Superseded | Lost

_Swap = Callable[[Record, str | None], Record | None]

_Transition = Callable[[Record], Record]
"""From a record that this attempt wrote to the next one. Made again on a newer record, it has the same revision."""


class _Forgotten(Exception):
    """The store has no record of a living attempt."""


def new_nonce() -> str:
    """128 random bits: identifies one attempt or one write, on every machine, for ever."""
    return os.urandom(16).hex()


def effect_key(key: str, name: str) -> str:
    """A key for a receiver that honours idempotency keys: 64 hexadecimal digits, the same on every attempt."""
    return sha256(f"{key}\0{name}".encode(*ANY_TEXT)).hexdigest()


def claim(store: Store, operation: Operation) -> Run | Answer:
    """Ask for the right to run: ``Run`` means it was granted and is stored; the rest says why not.

    After ``StoreUnavailable`` nothing may run. A claim may have been stored all the same; it then ends with its lease,
    or at once where the store knows, and no earlier attempt is in doubt.
    """
    seen: Record | None = None
    owner = new_nonce()
    for race in range(MAX_RACES):
        decision = decide(seen, operation, store.now(), owner=owner, revision=f"{owner}.{race}")
        if not isinstance(decision, _TO_WRITE):
            return decision
        if seen is not None and isinstance(decision, Run):
            require_readable(store, decision.record)
        try:
            seen = _twice(store.swap, decision.record, decision.expected)
        except RecordTooLarge as error:
            why = f"the record's steps leave no room to claim it again ({error}); resolve it"
            raise StoreMisconfigured(type(store).__name__, "claim", why) from error
        except StoreUnavailable as error:
            if error.is_stored and isinstance(decision, Run) and not decision.record.takeovers:
                with suppress(StoreUnavailable):
                    store.swap(released(decision.record, store.now(), new_nonce()), decision.record.revision)
            raise
        if isinstance(decision, Run) and seen is not None and seen.revision == decision.record.revision:
            return decision
    raise StoreUnavailable(type(store).__name__, "claim", f"{MAX_RACES} races lost in a row")


_TO_WRITE = (Run, GiveUp)  # to make a union for each question takes longer than to answer it


def announce(store: Store, outgoing: Outgoing) -> Publication:
    """Record what is to be published, or say why there is nothing to publish; an ``Announce`` is stored.

    A write is sent once: what a lost reply leaves open, the message answers. After an error send it.
    """
    seen: Record | None = None
    for _ in range(MAX_RACES):
        asked = partial(publication, seen, outgoing, store.now(), new_nonce())
        decision = asked()
        if isinstance(decision, Underway) and is_gone(process_of(decision.record)):
            decision = asked(is_gone=True)
        if not isinstance(decision, Announce):
            return decision
        try:
            seen = store.swap(decision.record, decision.seen.revision if decision.seen else None)
        except (StoreUnavailable, RecordTooLarge):
            raise
        except BaseException:  # of somebody else's, such as a soft time limit: nothing will be sent
            with suppress(Exception):
                withdraw(store, decision)
            raise
        if seen is not None and seen.revision == decision.record.revision:
            return decision
    raise StoreUnavailable(type(store).__name__, "announce", f"{MAX_RACES} races lost in a row")


def confirm(store: Store, announced: Announce, outgoing: Outgoing) -> None:
    """Record that the message was sent, unless somebody has written the record since, as who executes it does.

    After an error the message may count for a lease only.
    """
    store.swap(confirmed(announced.record, outgoing, store.now(), new_nonce()), announced.record.revision)


def withdraw(store: Store, announced: Announce) -> None:
    """Leave the record as it was before, unless somebody has written it since: the message could not be sent.

    After an error the record is in doubt once its time is over.
    """
    if announced.seen is None:
        store.delete(announced.record.key, announced.record.revision)
    else:
        store.swap(replace(announced.seen, revision=new_nonce()), announced.record.revision)


def end_lease(store: Store, record: Record, clock: Clock = local_clock) -> None:
    """End the lease of ``record``, whose process is gone, unless somebody has written it meanwhile.

    It waits a moment for what that process sent last. Compare-and-swap keeps the record right without it, but then a
    completion under way would come too late, and a body that had ended run again. The kernel still delivers what a dead
    process has sent, and a lost packet once more, which takes the wait: the shortest retransmission of Linux is 200 ms.
    After ``StoreUnavailable`` the lease ends by itself.
    """
    clock.sleep(_LAST_WRITE)
    _twice(store.swap, abandoned(record, store.now(), new_nonce()), record.revision)


def _twice(swap: _Swap, new: Record, expected: str | None) -> Record | None:
    """``swap(new, expected)``, asked once more when the answer is lost: the same revision makes that safe."""
    try:
        return swap(new, expected)
    except StoreMisconfigured:
        raise
    except StoreUnavailable:
        return swap(new, expected)


class Claim:
    """The right of one attempt to run: extended and ended here, by its delivery, its attempt and the heartbeat.

    ``lease``, ``retain`` and ``deadline`` are milliseconds; ``claimed_at`` is the local clock, in seconds, before the
    claim was sent. ``tell_late`` is called once, by the thread that first sees that the deadline is over;
    ``tell_waiting`` once for each outcome that waits for the store. ``until`` is, by that clock, when the process ends:
    no write extends the lease beyond it, and none is tried for longer, or once ``is_stopped()``. ``is_underway`` says
    whether the delivery still runs that the claim is for; afterwards nobody renews it, and no call passes for a part of
    its body.
    """

    _settled = False
    #: What a write met that did not win: whatever the body does then, there is nothing left to give back.
    _lost: Superseded | Lost | None = None
    _interruption: BaseException | None = None
    #: Undoes a transaction that the body has left open, as a signal struck before it could be ended.
    undo: Callable[[], None] | None = None
    #: What left the block in which the author says that no effect had begun.
    raised_before_effects: BaseException | None = None
    #: Why nobody can tell whether a step had its effect: whatever the body raises after it, that is in doubt.
    doubt: str | None = None
    #: What was committed; whatever the body does afterwards, this is the outcome.
    committed: Kept | None = None

    def __init__(
        self,
        store: Store,
        record: Record,
        *,
        lease: int,
        retain: int,
        claimed_at: float,
        clock: Clock = local_clock,
        deadline: float = inf,
        tell_late: Callable[["Claim"], None] = lambda claim: None,
        tell_waiting: Callable[["Claim", StoreUnavailable], None] = lambda claim, error: None,
        until: float = inf,
        is_stopped: Callable[[], bool] = lambda: False,
        is_underway: Callable[[], bool] = lambda: True,
    ) -> None:
        self.store = store
        self._record = record
        # The same for as long as the claim is ours.
        self.key, self.task, self.label = record.key, record.task, record.label
        self.fencing_token, self.number, self.is_takeover = record.fencing_token, record.attempts, record.takeovers > 0
        self.lease, self._lease_ms, self._retain = lease / 1000, lease, retain
        self._clock = clock
        self._owned_until = claimed_at + self.lease
        #: By the local clock, in seconds, when the deadline is over; infinite where there is none.
        self.late_at = claimed_at + deadline / 1000
        self._tell_late, self._on_waiting = tell_late, tell_waiting
        self._until, self._is_stopped, self.is_underway = until, is_stopped, is_underway
        self._told_late = threading.Lock()  # taken once, for good, so that one thread tells
        # An attempt ends once, and has one revision for that, however often it is written.
        self._last = f"{record.owner}.end"
        #: Seconds for which a final write is tried.
        self.patience = max(self.lease, _CONFIRM_FOR)
        # The heartbeat renews while the body's thread settles; each write must expect the other's revision.
        self._writing = threading.Lock()

    def ensure_owned(self) -> None:
        """Return if this attempt still owns its key; it asks the store once the lease is over by the local clock."""
        if self._lost is None:
            self._ensure_early()
            if self._clock.monotonic() >= self._owned_until:
                self._go_on(self._renewal())
        if self._lost is not None:
            raise LeaseLost(self.key, self.fencing_token)

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, None if there is none."""
        return None if self.late_at == inf else max(0.0, self.late_at - self._clock.monotonic())

    def is_late(self) -> bool:
        """Whether the deadline is over. The first to see it tells."""
        is_late = self._clock.monotonic() >= self.late_at
        if is_late and self._told_late.acquire(blocking=False):
            self._tell_late(self)
        return is_late

    def _ensure_early(self) -> None:
        if self.is_late():
            raise DeadlineExceeded(self.key, self.fencing_token)

    def end_body(self) -> None:
        """The body has ended: unless it was late, its deadline counts no more, however long its outcome takes."""
        if self.late_at != inf and not self.is_late():
            self.late_at = inf

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to renew: the attempt is settled, lost, or known to be late."""
        return self._settled or self._lost is not None or self._told_late.locked()

    def renew_if_half_over(self) -> None:
        """Renew a lease that is half over when the reply to the claim arrives: the clock had fallen behind."""
        if self._record.lease_until - self.store.now() < self._lease_ms / 2:
            self._require_ours(self._go_on(self._renewal()))

    def renew(self) -> None:
        """Extend the lease, for the heartbeat. A loss is remembered, not raised: the body asks, or meets it at the end.

        A record that vanished is left to the body's own writes. In a database it may only be invisible from here, in a
        transaction that the body's thread is in, and to write it would wait for that one's end, and the end for this.
        Past the deadline nothing is extended.
        """

        def replace_only(new: Record, expected: str | None) -> Record | None:
            if expected is None:
                raise _Forgotten
            return _twice(self.store.swap, new, expected)

        if not self.is_late():
            with suppress(_Forgotten):
                self._go_on(self._renewal(), replace_only)

    def step_state(self, name: str) -> Begun | Finished | None:
        """What is recorded of the step called ``name``, by this attempt or an earlier one."""
        return from_plain(self._record.steps.get(name))  # no damaged one was claimed

    def begin_step(self, name: str) -> None:
        """Record that the call of a step is about to be made. Only then may it be; after an error, make no call."""
        self._ensure_early()
        self._require_ours(self._go_on(self._checkpoint(name, Begun(self.store.now(), self.number))))

    def finish_step(self, name: str, finished: Finished | None) -> None:
        """Record that the call of a step returned, or, by None, that it had no effect; return once that is certain.

        Also past the deadline, or the next attempt would repeat it; the lease is not extended then.
        After ``RecordTooLarge`` finish it without its result; after ``LeaseLost`` another attempt may repeat the call.
        """
        self._require_ours(self._until_certain(self._go_on, self._checkpoint(name, finished)))
        self.raise_interruption()

    def recorded(self, kept: Kept, write: Callable[[Kept], T], step: str = "") -> tuple[T, Kept]:
        """What ``write`` gave for a result, of ``step`` if any, and as much of it as there was room to record.

        What its store needs is written first. Where that cannot be, or there is no room for what it gives, the effect
        has happened all the same: the result is lost, and the reason recorded.
        """
        lost = kept.lost
        for small in (False, True):
            packed = self.packed(kept, step, is_final=True, small=small)
            lost = packed.lost or lost
            if packed.encoded is None:
                break
            try:
                return write(packed), packed
            except RecordTooLarge as error:
                lost = str(error)
        kept = kept._replace(encoded=None, lost=lost)
        return write(kept), kept

    def packed(self, kept: Kept, step: str = "", *, is_final: bool, small: bool = False) -> Kept:
        """``kept`` in the form that its store gives a result; or without its result, and why.

        Only what has happened already is worth waiting for: unless ``is_final``, no answer is ``StoreUnavailable``.
        """
        if kept.encoded is None or not hasattr(self.store, "pack"):
            return kept  # only a store around another one has a form of its own
        prepare = partial(pack_small if small else pack, self.store, kept.encoded, Slot(self.key, "result", step))
        packed = self.uninterrupted(prepare) if is_final else prepare()
        if packed is None:
            return kept._replace(encoded=None)
        try:
            if packed.write is not None:
                self._patiently(packed.write) if is_final else packed.write()
            return kept if packed.encoded is kept.encoded else kept._replace(encoded=packed.encoded)
        except StoreUnavailable as error:
            if is_final or isinstance(error, StoreMisconfigured):
                return kept._replace(encoded=None, lost=str(error))
            raise

    def complete(self, encoded: Encoded | None, lost: str | None = None) -> Written | Superseded:
        """Record the result, or why there is none; return once it is certain, or say whose result counts instead.

        After ``RecordTooLarge`` complete again without the result; after any other error report nothing as done.
        """
        return self._until_certain(self._end, self._ended(Status.COMPLETED, self._last, encoded, lost))

    def fail(self, encoded: Encoded | None, error: str) -> Written | Superseded:
        """Record a failure that is an outcome; as :meth:`complete`."""
        return self._until_certain(self._end, self._ended(Status.FAILED, self._last, encoded, error))

    def commit(self, store: CommittingStore, kept: Kept, writes: Sequence[Mapping[str, Any]]) -> None:
        """Record the result and make the user's ``writes`` in one atomic step.

        Nothing is written after ``WriteFailed``, with which the claim is still ours, ``RecordTooLarge``, after which to
        commit without the result, and ``LeaseLost``. After ``StoreUnavailable`` report nothing as done.
        """
        completion = self._ended(Status.COMPLETED, new_nonce(), kept.encoded, kept.lost)
        swap = partial(_twice, partial(store.swap_with, writes=writes))
        self._require_ours(self._until_certain(self._end, completion, swap))
        self.committed = kept
        self.raise_interruption()

    def commit_in(self, transaction: Transaction, kept: Kept, taken: Callable[[], None] = lambda: None) -> None:
        """Record the result within ``transaction`` and commit it; ends the transaction in any case.

        ``taken`` is called once its end is no more the caller's, whatever strikes.

        A commit without a certain answer is made certain: a renewal of the claim either meets the committed result, or
        wins, and then the transaction is undone for good, as it had the row. So nothing was committed after an error of
        the store's or of the database's; only a ``StoreUnavailable`` that outlasted ten minutes leaves it open.
        """
        revision = new_nonce()
        completion = self._ended(Status.COMPLETED, revision, kept.encoded, kept.lost)
        with self._writing:
            before = self._record
            try:
                taken()
                self._require_ours(self._write(completion, transaction.swap))
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except StoreUnavailable:
                self._record = before
                if not self._was_committed(revision):
                    raise
            except BaseException:
                self._record = before
                transaction.rollback()  # unless it was ended, and not struck before it could be
                raise
            self._settled = True
        self.committed = kept

    def _was_committed(self, revision: str) -> bool:
        """Whether the transaction that wrote ``revision`` was committed; if not, it never will be."""
        settlement = self._until_certain(self._write, self._renewal())
        if isinstance(settlement, Superseded) and settlement.record.revision != revision:
            raise LeaseLost(self.key, self.fencing_token)
        return isinstance(settlement, Superseded)

    def release(self) -> WriteResult:
        """Give the claim back, if it is still ours; after ``StoreUnavailable`` it ends with its lease at the latest."""
        return self._give_back(lambda record: released(record, self.store.now(), self._last))

    def abandon(self) -> WriteResult:
        """End the claim as if its process had died: the next attempt is a takeover; raises as :meth:`release` does."""
        revision = new_nonce()  # it changes no status, so by the other one it would pass for every end
        return self._give_back(lambda record: abandoned(record, self.store.now(), revision))

    def give_up(self, reason: str) -> WriteResult:
        """Mark the outcome UNKNOWN, if the claim is still ours; raises as :meth:`release` does."""
        return self._give_back(lambda record: given_up(record, self.store.now(), self._last, reason))

    def _checkpoint(self, name: str, state: Begun | Finished | None) -> _Transition:
        plain = None if state is None else to_plain(state)
        return self._extended(partial(checkpointed, revision=new_nonce(), step=name, state=plain))

    def _renewal(self) -> _Transition:
        return self._extended(partial(renewed, revision=new_nonce()))

    def _extended(self, transition: Callable[..., Record]) -> _Transition:
        """Every write that does not end the claim extends the lease, until the deadline is over."""

        def extend(record: Record) -> Record:
            now, asked_at = self.store.now(), self._clock.monotonic()
            held = record.lease_until - now
            if asked_at >= self.late_at:
                return transition(record, now, held)
            left = (self._until - asked_at) * 1000
            return transition(record, now, self._lease_ms if self._lease_ms <= left else max(held, round(left)))

        return extend

    def _ended(self, status: Status, revision: str, encoded: Encoded | None, error: str | None) -> _Transition:
        return lambda record: ended(record, status, self.store.now(), self._retain, revision, encoded, error)

    def _require_ours(self, settlement: WriteResult) -> None:
        if not isinstance(settlement, Written):
            raise LeaseLost(self.key, self.fencing_token)

    def _until_certain(self, write: Callable[[*Args], WriteResult], *args: *Args) -> Written | Superseded:
        settlement, waited = self._patiently(write, *args)
        if isinstance(settlement, Lost):
            raise LeaseLost(self.key, self.fencing_token)
        if waited is not None and isinstance(settlement, Written):
            label, seconds = self.label or None, round(waited, 1)
            self.uninterrupted(
                lambda: say(logger.warning, "result_recorded", key=self.key, label=label, seconds=seconds)
            )
        return settlement

    def _patiently(self, act: Callable[[*Args], T], *args: *Args) -> tuple[T, float | None]:
        """``act(*args)``, again while it gets no answer; and for how many seconds, if people were told of it."""
        asked_at = self._clock.monotonic()
        ends_at = min(asked_at + self.patience, self._until)
        pause, is_told = _FIRST_PAUSE, False
        try:
            while True:
                try:
                    done = self.uninterrupted(act, *args)
                    return done, self._clock.monotonic() - asked_at if is_told else None
                except StoreMisconfigured:
                    raise
                except StoreUnavailable as error:
                    if self._clock.monotonic() >= ends_at or self._is_stopped():
                        raise
                    if not is_told:
                        is_told = True
                        self.uninterrupted(self._tell_waiting, error, ends_at - asked_at)
                self.uninterrupted(self._clock.sleep, pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            if is_told:
                waiting.discard(self)  # also after giving up: an exception's traceback keeps the claim for a while

    def _tell_waiting(self, error: StoreUnavailable, patience: float) -> None:
        """Say, once for each write, that what has happened is not recorded yet: until it is, nobody may be told."""
        waiting.add(self)
        self._on_waiting(self, error)
        label = self.label or None
        say(logger.warning, "result_waits", key=self.key, label=label, seconds=round(patience, 1), reason=error)

    def uninterrupted(self, act: Callable[[*Args], T], *args: *Args) -> T:
        """``act(*args)``, again when a signal or a timeout of somebody else's strikes in it.

        The effect has happened, and an unfinished write would make it happen again. A write that is made twice has one
        revision, so it counts once.
        """
        for _ in range(_MAX_STRIKES):
            try:
                return act(*args)
            except (IdempotencyError, RecordTooLarge, WriteFailed):
                raise
            except BaseException as error:  # noqa: BLE001 - raise_interruption() raises it after the write
                # A limit that follows an exit must not take its place.
                if self._interruption is None or isinstance(self._interruption, Exception):
                    self._interruption = error
        struck, self._interruption = self._interruption, None
        assert struck is not None
        raise struck

    def raise_interruption(self) -> None:
        """Raise what struck in a write that has been made certain since, such as a soft time limit, if anything did."""
        struck, self._interruption = self._interruption, None
        if struck is not None:
            raise struck

    def _go_on(self, transition: _Transition, swap: _Swap | None = None) -> WriteResult:
        """Write without ending the claim."""
        with self._writing:
            if self._settled or self._lost is not None:
                return Lost()
            asked_at, now = self._clock.monotonic(), self.store.now()
            settlement = self._write(transition, swap)
            if isinstance(settlement, Written):
                left = (self._record.lease_until - now) / 1000
                self._owned_until = min(asked_at + min(left, self.lease), self._until)
            elif self._lost is None:
                self._settled = True  # our own completion, whose reply was lost
            return settlement

    def _give_back(self, transition: _Transition) -> WriteResult:
        """End without an outcome. A claim that is known to be lost is nobody's to give back, so nothing is asked."""
        return self.uninterrupted(partial(self._end, transition, is_outcome=False))

    def _end(self, transition: _Transition, swap: _Swap | None = None, *, is_outcome: bool = True) -> WriteResult:
        if self.undo is not None:
            self.undo()
        with self._writing:
            lost = None if is_outcome else self._lost
            settlement = lost or self._write(transition, swap)
            self._settled = True
            return settlement

    def _write(self, transition: _Transition, swap: _Swap | None = None) -> WriteResult:
        current = self._record
        if current.status is not Status.IN_PROGRESS:
            # An attempt ends once, and what it wrote last is final, also for itself: unless this is that very write.
            again = transition(current)
            times = {"updated_at", "expires_at", "lease_until", "verdict"}
            timed = replace(current, **{name: getattr(again, name) for name in times})
            return Written() if again == timed else Lost()
        expected: str | None = current.revision
        for _ in range(MAX_RACES):
            write = transition(current)
            stored = swap(write, expected) if swap else _twice(self.store.swap, write, expected)
            settlement = settle(write, stored)
            match settlement:
                case Written():
                    assert stored is not None
                    self._record = stored  # perhaps by an earlier try, whose lease ends earlier
                    return settlement
                case Rebase(record):
                    current, expected = record, record.revision
                case Vanished():
                    expected = None
                case Superseded(record) if record.owner == current.owner:
                    return settlement
                case Superseded() | Lost():
                    self._lost = settlement
                    return settlement
                case unreachable:
                    assert_never(unreachable)
        raise StoreUnavailable(type(self.store).__name__, "write", f"{MAX_RACES} races lost in a row")


waiting: "WeakSet[Claim]" = WeakSet()
"""Those of this process whose outcome waits for the store."""
