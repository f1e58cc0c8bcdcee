"""Celery signals, one for each thing that can happen to an operation.

Receivers get the task as ``sender``, and as keyword arguments ``key``, ``label`` (empty where the policy has none),
``fencing_token`` and ``attempt`` (which one, from 1; None where there is none), ``task_id``, ``reason``, ``observed``
(True in ``mode="observe"``), ``done_by`` (where a record answers the delivery: the task id of the delivery that wrote
it), ``trace`` (likewise its W3C trace context, where telemetry is on) and ``waited`` (seconds since the delivery was
first postponed; None if it never was, or is postponed again). Take ``**kwargs``. They never get arguments or results,
save by the policy's ``label``, and what they raise is logged by Celery and goes no further.

All are sent by the thread that executes the task; of a publisher's, by the thread that publishes; a verdict's, where it
is given: by the command, the page or the process that called ``resolve()``; and ``deadline_exceeded``, if the body does
not ask, by a thread of the heartbeat.
"""

from celery_idempotent.integration.events import SIGNALS

__all__ = [
    "claimed",
    "completed",
    "conflicted",
    "deadline_exceeded",
    "failed",
    "key_missing",
    "key_reused",
    "lease_lost",
    "outcome_unknown",
    "publish_skipped",
    "record_unreadable",
    "released",
    "replayed",
    "result_dropped",
    "result_lost",
    "store_unavailable",
    "taken_over",
    "verdict_given",
]

claimed = SIGNALS["claimed"]
completed = SIGNALS["completed"]
conflicted = SIGNALS["conflicted"]
deadline_exceeded = SIGNALS["deadline_exceeded"]
failed = SIGNALS["failed"]
key_missing = SIGNALS["key_missing"]
key_reused = SIGNALS["key_reused"]
lease_lost = SIGNALS["lease_lost"]
outcome_unknown = SIGNALS["outcome_unknown"]
publish_skipped = SIGNALS["publish_skipped"]
record_unreadable = SIGNALS["record_unreadable"]
released = SIGNALS["released"]
replayed = SIGNALS["replayed"]
result_dropped = SIGNALS["result_dropped"]
result_lost = SIGNALS["result_lost"]
store_unavailable = SIGNALS["store_unavailable"]
taken_over = SIGNALS["taken_over"]
verdict_given = SIGNALS["verdict_given"]
