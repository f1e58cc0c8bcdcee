"""What a publisher does about the record it saw, under ``Policy(publish="once")``: one pure table, as for deliveries.

It is an optimisation and never a lock. Whoever executes asks :func:`~celery_idempotent.protocol.operation.decide`, so a
message too many costs a replay, and a message too few would lose an effect: in doubt it is sent.

A publisher records the operation as RELEASED, without an owner, before it sends, and once more when it has sent.
``lease_until`` then says until when that is evidence of a message on its way.
"""

from typing import NamedTuple, assert_never

from celery_idempotent.protocol.effects import Case
from celery_idempotent.protocol.operation import (
    Finding,
    Operation,
    Replay,
    ReplayFailure,
    following,
    is_forgotten,
    is_of_others,
    is_reused,
)
from celery_idempotent.protocol.record import BLANK, Record, Status, bounded, message_of
from celery_idempotent.protocol.verdicts import carried


class Announce(NamedTuple):
    """Swap ``record`` in; if that wins, send the message, and confirm. ``seen`` is what it follows."""

    record: Record
    seen: Record | None


class Send(Case):
    """Send the message, and leave the record alone."""


class Underway(Finding):
    """The operation's message waits to be executed, or is: publish nothing."""


Known = Underway | Replay | ReplayFailure
"""What makes the message unnecessary."""

Publication = Announce | Send | Known


class Outgoing(NamedTuple):
    """What is to be published."""

    #: Which operation; its ``task_id`` is the message's own.
    operation: Operation
    #: Milliseconds for which the message counts as queued once it was sent.
    queued_for: int
    #: Whether a message that is executed is delivered again when its worker dies.
    comes_back: bool = True
    #: Whether something waits for this very message, as a chain or a callback does.
    awaited: bool = False


def publication(
    record: Record | None, outgoing: Outgoing, now: int, revision: str, *, is_gone: bool = False
) -> Publication:
    """What a publisher does about the record it saw, at ``now`` on the store's clock.

    ``revision`` is the nonce of the write that this may lead to; ``is_gone``: the process that the record names has
    certainly ended.
    """
    operation = outgoing.operation
    announced = _announced(outgoing, now, revision)
    if record is None:
        return Announce(announced, None)
    if is_forgotten(record, now):
        return Announce(announced.but(fencing_token=record.fencing_token, verdict=carried(record, now)), record)
    is_queued = record.status is Status.RELEASED and not record.owner and record.lease_until > now and not is_gone
    is_taken = is_reused(record, operation.identity) or (
        is_queued and is_of_others(record, operation.identity.fingerprint)
    )
    if outgoing.awaited or is_taken:
        return Send()
    known = message_of(record)
    match record.status:
        case Status.COMPLETED:
            return Replay(record)
        case Status.FAILED:
            return ReplayFailure(record)
        case Status.UNKNOWN:
            return Send()
        case Status.IN_PROGRESS:
            is_owned = record.lease_until + operation.grace > now and not is_gone
            return Underway(record) if is_owned and known and outgoing.comes_back else Send()
        case Status.RELEASED:
            # A message is no evidence of itself: who publishes it again, as a relay that takes over from another or
            # the next attempt of a body does, cannot tell whether it was sent.
            if is_queued and known and known != operation.task_id:
                return Underway(record)
            again = following(record, announced)
            return Announce(again.but(fencing_token=record.fencing_token, attempts=record.attempts), record)
        case unreachable:
            assert_never(unreachable)


def confirmed(announced: Record, outgoing: Outgoing, now: int, revision: str) -> Record:
    """The record of a message that the broker has: it counts as queued, also when its publisher has ended."""
    return announced.but(revision=revision, lease_until=now + outgoing.queued_for, updated_at=now, process="")


def shown_status(status: str, owner: str, lease_until: int, now: int) -> str:
    """The status as people read it: of what a publisher recorded, and no attempt, whether its message is on its way."""
    if status != Status.RELEASED or owner:
        return status
    return f"{status}, {'queued' if lease_until > now else 'message in doubt'}"


def _announced(outgoing: Outgoing, now: int, revision: str) -> Record:
    operation = outgoing.operation
    return BLANK.but(
        key=operation.identity.key,
        status=Status.RELEASED,
        revision=revision,
        lease_until=now + min(operation.policy.lease_ms, outgoing.queued_for),
        fingerprint=operation.identity.fingerprint,
        created_at=now,
        updated_at=now,
        task=bounded(operation.task),
        task_id=bounded(operation.task_id),
        worker=bounded(operation.worker),
        app=bounded(operation.app),
        process=bounded(operation.process),
        label=operation.identity.label,
    )
