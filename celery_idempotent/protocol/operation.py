"""The protocol: pure functions from what was seen to what happens next.

No clock, no randomness, no I/O: ``now`` and every nonce are arguments. The same inputs always give the
same decision, which is what lets all interleavings be explored without a broker, a clock or a database.

Safety never depends on a lease or a clock. A lease says when somebody else may *try*; the compare-and-swap
says who *wins*.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, assert_never

from celery_idempotent.errors import are_all, members
from celery_idempotent.protocol.codec import Encoded
from celery_idempotent.protocol.effects import Case, OnTakeover
from celery_idempotent.protocol.keys import Identity
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import BLANK, Record, Status, bounded, marked
from celery_idempotent.protocol.verdicts import beyond_outcome, carried, counts_until, kept_until


class Operation(NamedTuple):
    """One intended effect under its promise, and who asks for the right to have it.

    Names and ``trace`` are for people; ``process`` is for those who meet the claim later, to tell whether it is gone.
    ``grace`` is how long a takeover waits after a lease, in milliseconds, for clocks that differ a little.
    """

    identity: Identity
    policy: Policy
    task: str
    task_id: str
    worker: str
    app: str = ""
    process: str = ""
    trace: str = ""
    grace: int = 1000


@dataclass(frozen=True)
class Swap:
    """What is to be written; ``expected`` is the revision seen."""

    record: Record
    expected: str | None


@dataclass(frozen=True)
class Finding:
    """What follows from ``record``, which was seen."""

    record: Record


class Run(Swap):
    """Swap ``record`` in; if that wins, the body runs. ``expected`` is the revision seen."""


class GiveUp(Swap):
    """Swap ``record`` in: an attempt that must not be repeated never ended. Then ask again."""


class Wait(NamedTuple):
    """Somebody else's lease is running, for another ``retry_after`` ms; its body has been for ``running_for`` ms."""

    record: Record
    retry_after: int
    running_for: int


class Replay(Finding):
    """The operation is completed: answer with its result."""


class ReplayFailure(Finding):
    """The operation failed for good: answer with its failure."""


class Mismatch(Finding):
    """The key belongs to a call with other arguments."""


class Unknown(Finding):
    """Nobody can tell whether the effect happened."""


Answer = Replay | ReplayFailure | Wait | Mismatch | Unknown
"""Decisions that end a claim without running anything."""

Decision = Run | GiveUp | Answer


def is_forgotten(record: Record, now: int) -> bool:
    """Whether a record's outcome no longer counts, physically present or not (DynamoDB deletes days late)."""
    # Nearly no record has a verdict, and every delivery asks.
    until = counts_until(record) if record.verdict else record.expires_at and record.expires_at * 1000
    return until is not None and until <= now


def is_of_others(record: Record, fingerprint: str | None) -> bool:
    """Whether the record is of a call with other arguments, as far as both sides tell."""
    return bool(record.fingerprint and fingerprint and record.fingerprint != fingerprint)


def is_reused(record: Record, identity: Identity) -> bool:
    """Whether the record keeps its key from a call with these arguments, as it is of others.

    Arguments bind from the first step or outcome on, and while a body may run. A record that was given back without a
    step has had no effect that anybody recorded: the next call may bring others. A step that began binds, too.
    """
    if record.fingerprint == identity.fingerprint:
        return False  # nearly always
    is_bound = record.status is not Status.RELEASED or bool(record.steps)
    return is_bound and is_of_others(record, identity.fingerprint)


def decide(record: Record | None, operation: Operation, now: int, *, owner: str, revision: str) -> Decision:
    """What a delivery does about the record it saw; the whole decision table.

    ``now`` is the store's clock in milliseconds. ``owner`` is the nonce of this attempt, ``revision`` that of the write
    that the decision may lead to, and fresh for every decision.
    """
    policy = operation.policy
    if record is None:
        return Run(_claimed(operation, now, owner, revision), None)
    claimed = partial(_claimed, operation, now, owner, revision)
    if is_forgotten(record, now):
        return Run(_after(record, claimed()).but(verdict=carried(record, now)), record.revision)
    if is_reused(record, operation.identity):
        return Mismatch(record)
    match record.status:
        case Status.COMPLETED:
            return Replay(record)
        case Status.FAILED:
            return ReplayFailure(record)
        case Status.UNKNOWN:
            return Unknown(record)
        case Status.RELEASED:
            return Run(_reclaimed(record, claimed()), record.revision)
        case Status.IN_PROGRESS:
            wait = record.lease_until + operation.grace - now
            if wait > 0:
                return Wait(record, wait, max(0, now - record.fencing_token))  # a token is the time of its claim
            if policy.on_takeover == "rerun" and not _is_poison(record, policy):
                return Run(_reclaimed(record, claimed()), record.revision)
            return GiveUp(given_up(record, now, revision, _never_ended(record)), record.revision)
        case unreachable:
            assert_never(unreachable)


def _is_poison(record: Record, policy: Policy) -> bool:
    return policy.max_takeovers is not None and record.takeovers >= policy.max_takeovers


def _never_ended(record: Record) -> str:
    if not record.takeovers:
        return f"attempt {record.attempts} on {record.worker} ended without an outcome"
    return (
        f"{record.takeovers + 1} attempts in a row ended without an outcome, the last, number {record.attempts}, on "
        f"{record.worker}; perhaps the task kills its worker"
    )


def _claimed(operation: Operation, now: int, owner: str, revision: str) -> Record:
    return _FIRST_CLAIM.but(
        key=operation.identity.key,
        revision=revision,
        owner=owner,
        fencing_token=max(1, now),
        lease_until=now + operation.policy.lease_ms,
        fingerprint=operation.identity.fingerprint,
        created_at=now,
        updated_at=now,
        task=bounded(operation.task),
        task_id=bounded(operation.task_id),
        worker=bounded(operation.worker),
        app=bounded(operation.app),
        process=bounded(marked(operation.process, owner)),
        label=operation.identity.label,
        trace=marked(operation.trace, owner),
    )


_FIRST_CLAIM = BLANK.but(status=Status.IN_PROGRESS, attempts=1)


def _after(seen: Record, claimed: Record) -> Record:
    return claimed.but(fencing_token=max(seen.fencing_token + 1, claimed.fencing_token))


def _reclaimed(seen: Record, claimed: Record) -> Record:
    # Whether this is a takeover is written into the record: an attempt whose reply was lost
    # must be able to read it back, or it would take itself for the first one.
    return following(seen, _after(seen, claimed)).but(
        attempts=seen.attempts + 1, takeovers=seen.takeovers + 1 if seen.status is Status.IN_PROGRESS else 0
    )


def following(seen: Record, new: Record) -> Record:
    """``new`` with what it goes on with of ``seen``, which has no outcome; a label goes with its arguments."""
    label = "" if is_of_others(seen, new.fingerprint) else seen.label
    return new.but(created_at=seen.created_at, label=label or new.label, steps=seen.steps, verdict=seen.verdict)


def renewed(record: Record, now: int, lease: int, revision: str) -> Record:
    """The record with its lease extended to ``lease`` milliseconds from ``now``."""
    return record.but(revision=revision, lease_until=now + lease, updated_at=now)


def abandoned(record: Record, now: int, revision: str) -> Record:
    """The record of an attempt whose process is gone: its lease has ended, and its claim has not.

    So the next attempt is a takeover, and under ``refuse`` the operation is UNKNOWN, as if the lease had run out.
    """
    return record.but(revision=revision, lease_until=0, updated_at=now)


def checkpointed(
    record: Record, now: int, lease: int, revision: str, *, step: str, state: Mapping[str, Any] | None
) -> Record:
    """The record with the state of ``step``, or without it, and its lease extended as by :func:`renewed`."""
    steps = {name: each for name, each in record.steps.items() if name != step}
    return renewed(record, now, lease, revision).but(steps=steps if state is None else {**steps, step: state})


def released(record: Record, now: int, revision: str) -> Record:
    """The record given back: the next delivery runs at once, with the next fencing token."""
    return record.but(status=Status.RELEASED, revision=revision, lease_until=now, updated_at=now)


def ended(
    record: Record,
    status: Status,
    now: int,
    retain: int,
    revision: str,
    encoded: Encoded | None = None,
    error: str | None = None,
) -> Record:
    """The record with its outcome, which counts for ``retain`` milliseconds; its steps have served their purpose.

    What is retained for 0 has stopped to count, whatever another machine's clock says.

    ``error`` is the failure for people, or why a result could not be kept. A verdict can keep the record for longer.
    """
    until = now + retain if retain else max(0, now - _CLOCK_ERROR * 1000)
    return record.but(
        status=status,
        revision=revision,
        updated_at=now,
        steps={},
        # Rounded up: an outcome counts for at least as long as was promised.
        expires_at=-((max(until, kept_until(record)) if record.verdict else until) // -1000),
        verdict=beyond_outcome(record, until) if record.verdict else record.verdict,
        result=encoded.data if encoded else None,
        content_type=encoded.content_type if encoded else None,
        error=error,
    )


def given_up(record: Record, now: int, revision: str, reason: str) -> Record:
    """The record marked UNKNOWN: it never expires and is never claimed until somebody resolves it."""
    return record.but(status=Status.UNKNOWN, revision=revision, updated_at=now, error=reason)


def forgotten(record: Record, now: int, revision: str) -> Record:
    """The record as a mark that its operation was forgotten on purpose: it counts as absent, and nothing is left in it.

    Without an owner it is nobody's outcome, also for an attempt that comes late.
    It stays until the store deletes what is past its time, so that fencing tokens go on growing.
    """
    return record.but(
        status=Status.COMPLETED,
        revision=revision,
        owner="",
        updated_at=now,
        expires_at=max(0, now // 1000 - _CLOCK_ERROR),
        fingerprint=None,
        task_id="",
        process="",
        label="",
        trace="",
        steps={},
        result=None,
        content_type=None,
        error=None,
    )


_CLOCK_ERROR = 60
"""Seconds by which another machine's clock may be behind, and the record is forgotten there, too."""


class Written(Case):
    """The write is stored, whichever reply arrived."""


class Rebase(Finding):
    """The record is still this attempt's own, in a state that it may go on from; write again on top of ``record``."""


class Vanished(Case):
    """The store has forgotten the record: write it as if there had never been one. Who has claimed it since, wins."""


class Superseded(Finding):
    """Somebody else completed the operation with the same arguments; ``record`` has the result that counts."""


class Lost(Case):
    """The claim is gone: write nothing, report nothing as done."""


Settlement = Written | Rebase | Vanished | Superseded | Lost


def settle(write: Record, stored: Record | None) -> Settlement:
    """What became of ``write``, an owner's write after its claim, given what the store holds now."""
    if stored is None:
        return Vanished()
    if stored.revision == write.revision:
        return Written()
    if stored.owner == write.owner and _may_follow(write.status, stored.status):
        return Rebase(stored)
    # The key may have come to a call with other arguments since. Who cannot tell asks again, as a delivery.
    if stored.status is Status.COMPLETED and stored.owner and stored.fingerprint == write.fingerprint:
        return Superseded(stored)
    return Lost()


def _may_follow(write: Status, stored: Status) -> bool:
    """Whether the owner of a record may go on from what is stored. From UNKNOWN only by its outcome: nobody else can
    have run since, and who looks for that outcome finds it."""
    return stored is Status.IN_PROGRESS or (stored is Status.UNKNOWN and write in (Status.COMPLETED, Status.FAILED))


class Ending(Enum):
    """What becomes of a claim whose body raised."""

    RELEASE = "release"
    FAIL = "fail"
    GIVE_UP = "give up"


def ending(
    error: BaseException,
    *,
    on_takeover: OnTakeover,
    remember: tuple[type[BaseException], ...],
    nothing_begun: tuple[type[BaseException], ...],
    no_outcome: tuple[type[BaseException], ...],
    in_doubt: bool = False,
    before_effects: bool = False,
) -> Ending:
    """What becomes of the claim when the body raised ``error``.

    Under ``refuse`` nothing that may have begun is released. By ``nothing_begun`` the author states that running again
    is right; ``no_outcome`` end a delivery without telling whether the effect happened. ``in_doubt``: a step of this
    operation may have had its effect and must not be repeated, whatever was raised after that. ``before_effects``:
    ``error`` was raised where the author says that no effect had begun.

    What an author states must hold for all members of a group; one of them is enough for doubt.
    """
    if in_doubt:
        return Ending.GIVE_UP
    if before_effects or are_all(error, nothing_begun):
        return Ending.RELEASE
    tells_nothing = any(isinstance(each, no_outcome) for each in members(error))
    if (isinstance(error, remember) or are_all(error, remember)) and not tells_nothing:
        return Ending.FAIL
    if on_takeover == "rerun":
        return Ending.RELEASE
    return Ending.GIVE_UP if tells_nothing or not isinstance(error, Exception) else Ending.FAIL
