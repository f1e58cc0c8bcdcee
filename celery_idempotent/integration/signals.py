"""Celery signals, one for each thing that can happen to an operation, as :mod:`celery_idempotent.signals` tells."""

from celery.utils.dispatch import Signal

from celery_idempotent.engine.delivery import EventName

_ARGUMENTS = {"key", "label", "fencing_token", "task_id", "reason", "observed"}

claimed = Signal(name="claimed", providing_args=_ARGUMENTS)
"""An attempt owns the key; its body runs next."""

replayed = Signal(name="replayed", providing_args=_ARGUMENTS)
"""A recorded outcome was given again; the body did not run."""

conflicted = Signal(name="conflicted", providing_args=_ARGUMENTS)
"""Another delivery is running the operation; the body did not run."""

taken_over = Signal(name="taken_over", providing_args=_ARGUMENTS)
"""The claim follows an attempt that never ended; its effects may have happened. Comes after ``claimed``."""

completed = Signal(name="completed", providing_args=_ARGUMENTS)
"""The result is recorded. ``reason`` says so if it could not be kept."""

failed = Signal(name="failed", providing_args=_ARGUMENTS)
"""A failure is recorded as the outcome."""

released = Signal(name="released", providing_args=_ARGUMENTS)
"""The body raised and the claim was given back; ``reason`` is the exception's type."""

lease_lost = Signal(name="lease_lost", providing_args=_ARGUMENTS)
"""Somebody took over while the body ran. If you see these often, tasks or machines stop for whole leases."""

deadline_exceeded = Signal(name="deadline_exceeded", providing_args=_ARGUMENTS)
"""A body has been running for longer than its policy's ``deadline``; it begins nothing more, and others may take over.
Sent by the heartbeat's thread, or by the body's if that asks first."""

outcome_unknown = Signal(name="outcome_unknown", providing_args=_ARGUMENTS)
"""Nobody can tell whether the effect happened. Page somebody: only a person can resolve it."""

store_unavailable = Signal(name="store_unavailable", providing_args=_ARGUMENTS)
"""The store gave no certain answer. At a claim nothing runs, unless ``on_outage="run"``; later, nothing is
reported as done. Under ``publish="once"`` a message was sent all the same."""

publish_skipped = Signal(name="publish_skipped", providing_args=_ARGUMENTS)
"""Under ``publish="once"`` a message was not sent: the operation is queued, running or has an outcome. ``task_id`` is
the first message's."""

verdict_given = Signal(name="verdict_given", providing_args=_ARGUMENTS | {"action", "by", "task"})
"""A person has judged an operation: ``action`` is ``"completed"``, ``"rerun"``, ``"release"`` or ``"forget"``, ``by``
is who, ``reason`` why. ``sender`` is None where the app has no task called ``task``."""

# A reused key has none: it is an error of the caller's, which Celery tells by its own.
BY_EVENT: dict[EventName, Signal] = {
    EventName(each.name): each
    for each in (
        *(claimed, replayed, conflicted, taken_over, completed),
        *(failed, released, lease_lost, deadline_exceeded, outcome_unknown),
        *(store_unavailable, publish_skipped, verdict_given),
    )
}
