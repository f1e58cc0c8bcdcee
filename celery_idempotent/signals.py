"""Celery signals, one for each thing that can happen to an operation.

Receivers get the task as ``sender``, and ``key``, ``label`` (empty where the policy has none), ``fencing_token`` (None
where there is no attempt), ``task_id``, ``reason`` and ``observed`` (True in ``mode="observe"``) as keyword arguments;
take ``**kwargs``. They never get arguments or results, save by the policy's ``label``, and what they raise is logged by
Celery and goes no further.

All are sent by the thread that executes the task; of a publisher's, by the thread that publishes; a verdict's, where it
is given: by the command, the page or the process that called ``resolve()``; and ``deadline_exceeded``, if the body does
not ask, by a thread of the heartbeat.
"""

from celery_idempotent.integration.signals import (
    claimed,
    completed,
    conflicted,
    deadline_exceeded,
    failed,
    lease_lost,
    outcome_unknown,
    publish_skipped,
    released,
    replayed,
    store_unavailable,
    taken_over,
    verdict_given,
)

__all__ = [
    "claimed",
    "completed",
    "conflicted",
    "deadline_exceeded",
    "failed",
    "lease_lost",
    "outcome_unknown",
    "publish_skipped",
    "released",
    "replayed",
    "store_unavailable",
    "taken_over",
    "verdict_given",
]
