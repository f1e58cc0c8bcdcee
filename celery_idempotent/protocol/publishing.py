"""What a publisher does about the record it saw, under ``Policy(publish="once")``: one pure table, as for deliveries.

It is an optimisation and never a lock. Whoever executes asks :func:`~celery_idempotent.protocol.operation.decide`, so a
message too many costs a replay, and a message too few would lose an effect: in doubt it is sent.

A publisher records the operation as RELEASED, without an owner, before it sends. ``lease_until`` then says until when
that is evidence of a message on its way.
"""

import re
from dataclasses import dataclass
from typing import assert_never

from celery_idempotent.protocol.operation import (
    Operation,
    Replay,
    ReplayFailure,
    following,
    is_forgotten,
    is_of_others,
    is_reused,
)
from celery_idempotent.protocol.record import Record, Status, bounded, message_of
from celery_idempotent.protocol.verdicts import carried


@dataclass(frozen=True, slots=True)
class Announce:
    """Swap ``record`` in; if that wins, send the message under ``task_id``. ``seen`` is what it follows."""

    record: Record
    seen: Record | None
    task_id: str


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message under ``task_id``, and leave the record alone."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Underway:
    """The operation's message waits to be executed, or is: publish nothing."""

    record: Record


Known = Underway | Replay | ReplayFailure
"""What makes the message unnecessary."""

Publication = Announce | Send | Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What is to be published.

    Args:
        operation: Which operation; its ``task_id`` is the message's own.
        patience: Milliseconds after which a message that was not executed is in doubt.
        comes_back: Whether a message that is executed is delivered again when its worker dies.
        awaited: Whether something waits for this very message, as a chain or a callback does.
    """

    operation: Operation
    patience: int
    comes_back: bool = True
    awaited: bool = False


def publication(
    record: Record | None, outgoing: Outgoing, now: int, revision: str, *, is_gone: bool = False
) -> Publication:
    """What a publisher does about the record it saw.

    Args:
        record: What the store holds for the key, or None.
        outgoing: What is to be published.
        now: The store's clock in milliseconds.
        revision: Nonce of the write that this may lead to.
        is_gone: Whether the process that the record names has certainly ended.
    """
    operation = outgoing.operation
    announced = _announced(outgoing, now, revision)
    if record is None:
        return Announce(announced.but(revision=f"announced:{now}:{revision}"), None, operation.task_id)
    if is_forgotten(record, now):
        after_outcome = announced.but(fencing_token=record.fencing_token, verdict=carried(record, now))
        return Announce(after_outcome, record, operation.task_id)
    is_queued = record.status is Status.RELEASED and not record.owner and record.lease_until > now
    identity = operation.identity
    is_taken = is_reused(record, identity) or (is_queued and is_of_others(record, identity.fingerprint))
    if outgoing.awaited or is_taken:
        return Send(operation.task_id)
    match record.status:
        case Status.COMPLETED:
            return Replay(record)
        case Status.FAILED:
            return ReplayFailure(record)
        case Status.UNKNOWN:
            return Send(operation.task_id)
        case Status.IN_PROGRESS:
            return _of_a_body(record, outgoing, now, is_gone)
        case Status.RELEASED:
            return _of_a_message(record, outgoing, announced, is_queued, is_gone)
        case unreachable:
            assert_never(unreachable)


def announcement(operation: Operation) -> Record | None:
    """The record that a publisher made for the message of ``operation``, if the message tells and nothing preceded it.

    Who claims on top of it saves the request that would show it. A message may lie: then the record has another
    revision, and the claim loses as any other. No other record has a revision of this form, and all that a claim takes
    over from such a record stands in it.
    """
    found = _FIRST.fullmatch(operation.announced) if operation.announced else None
    if found is None:
        return None
    return _announced(Outgoing(operation=operation, patience=0), int(found[1]), operation.announced)


_FIRST = re.compile("announced:([0-9]{1,15}):[0-9a-f]{32}")


def shown_status(status: str, owner: str, lease_until: int, now: int) -> str:
    """The status as people read it: of what a publisher recorded, and no attempt, whether its message is on its way."""
    if status != Status.RELEASED or owner:
        return status
    return f"{status}, {'queued' if lease_until > now else 'message in doubt'}"


def _of_a_body(record: Record, outgoing: Outgoing, now: int, is_gone: bool) -> Send | Underway:
    if not outgoing.comes_back:
        return Send(outgoing.operation.task_id)  # and nobody would deliver it if its worker dies from here on
    owns = record.lease_until + outgoing.operation.policy.grace_ms > now and not is_gone
    # Under its own id: the other may have been revoked with its process killed, and workers drop what has such an id.
    return Underway(record) if owns and message_of(record) else Send(outgoing.operation.task_id)


def _of_a_message(
    record: Record, outgoing: Outgoing, announced: Record, is_queued: bool, is_gone: bool
) -> Announce | Send | Underway:
    """Of a message that was announced, or of an attempt that gave its claim back.

    A message that is published again under its id is no evidence of itself. Whoever does that cannot tell whether it
    was sent: a relay of an outbox that took over from another, or the next attempt of a body.

    Only a publisher that is gone is stood in for under its message's id. The result of one that was executed may be
    a failure already; one that was not for so long may have been revoked or have expired, and workers remember that.
    """
    again = following(record, announced).but(fencing_token=record.fencing_token, attempts=record.attempts)
    known = message_of(record)
    if not (is_queued and known):
        return Announce(again, record, outgoing.operation.task_id)
    if known == outgoing.operation.task_id:
        return Send(known)
    if not is_gone:
        return Underway(record)
    # Not for longer than its publisher meant: if that one has sent it after all, and people revoked it, it ends.
    standing_in = again.but(task_id=known, lease_until=record.lease_until)
    is_observed = outgoing.operation.policy.mode == "observe"
    return Announce(standing_in, record, outgoing.operation.task_id if is_observed else known)


def _announced(outgoing: Outgoing, now: int, revision: str) -> Record:
    operation = outgoing.operation
    return Record(
        key=operation.identity.key,
        status=Status.RELEASED,
        revision=revision,
        owner="",
        fencing_token=0,
        lease_until=now + outgoing.patience,
        fingerprint=operation.identity.fingerprint,
        attempts=0,
        created_at=now,
        updated_at=now,
        task=bounded(operation.task),
        task_id=bounded(operation.task_id),
        worker=bounded(operation.worker),
        app=bounded(operation.app),
        process=bounded(operation.process),
        label=operation.kept_label,
    )
