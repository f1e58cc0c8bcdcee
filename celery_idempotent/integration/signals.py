"""Celery signals, one for each thing that can happen to an operation, as :mod:`celery_idempotent.signals` tells."""

from celery.utils.dispatch import Signal

from celery_idempotent.engine.events import EventName

_ARGUMENTS = {
    *("key", "label", "fencing_token", "task_id", "reason", "observed"),
    *("attempt", "done_by", "trace", "waited"),
}

claimed = Signal(name="claimed", providing_args=_ARGUMENTS)
"""An attempt owns the key; its body runs next."""

replayed = Signal(name="replayed", providing_args=_ARGUMENTS)
"""A recorded outcome was given again; the body did not run."""

conflicted = Signal(name="conflicted", providing_args=_ARGUMENTS)
"""Another delivery is running the operation; the body did not run."""

taken_over = Signal(name="taken_over", providing_args=_ARGUMENTS)
"""The claim follows an attempt that never ended; its effects may have happened. Comes after ``claimed``."""

key_reused = Signal(name="key_reused", providing_args=_ARGUMENTS)
"""The key belongs to a call with other arguments, of the task id ``done_by``; the delivery fails with ``KeyReused``."""

key_missing = Signal(name="key_missing", providing_args=_ARGUMENTS)
"""The call has no key, so ``key`` is empty; the delivery fails with ``KeyMissing``."""

completed = Signal(name="completed", providing_args=_ARGUMENTS)
"""The result is recorded, or that there is none: then ``result_dropped`` comes next."""

result_dropped = Signal(name="result_dropped", providing_args=_ARGUMENTS)
"""The operation is completed and its result could not be kept, for ``reason``: duplicates will fail with
``ResultLost``. Comes after ``completed``."""

result_lost = Signal(name="result_lost", providing_args=_ARGUMENTS)
"""A delivery fails with ``ResultLost``: its operation has an outcome that was not kept, or that cannot be decoded here.
Comes after ``replayed``, or after the ``lease_lost`` of an attempt whose successor recorded it."""

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

record_unreadable = Signal(name="record_unreadable", providing_args=_ARGUMENTS)
"""A record cannot be read: a newer version wrote it, or somebody else did, or it is damaged. A delivery that meets it
is postponed. A list or a purge passes it over; then ``sender`` is None."""

publish_skipped = Signal(name="publish_skipped", providing_args=_ARGUMENTS)
"""Under ``publish="once"`` a message was not sent: the operation is queued, running or has an outcome. ``task_id`` is
the first message's."""

verdict_given = Signal(name="verdict_given", providing_args=_ARGUMENTS | {"action", "by", "task"})
"""A person has judged an operation: ``action`` is ``"completed"``, ``"rerun"``, ``"release"`` or ``"forget"``, ``by``
is who, ``reason`` why. ``sender`` is None where the app has no task called ``task``."""

BY_EVENT: dict[EventName, Signal] = {
    EventName(each.name): each
    for each in (
        *(claimed, replayed, conflicted, taken_over, key_reused, key_missing),
        *(completed, result_dropped, result_lost, failed, released, lease_lost, deadline_exceeded, outcome_unknown),
        *(store_unavailable, record_unreadable, publish_skipped, verdict_given),
    )
}
