"""What happens to operations, told to logs and to receivers of signals."""

import logging
from functools import partial

from celery import Celery, Task

from celery_idempotent.engine.delivery import RESULT_LOST, Event, EventName
from celery_idempotent.integration import signals
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Record, bounded

logger = logging.getLogger(__name__)

_LEVELS = {
    EventName.CLAIMED: logging.DEBUG,
    EventName.COMPLETED: logging.DEBUG,
    EventName.TAKEN_OVER: logging.WARNING,
    EventName.KEY_REUSED: logging.WARNING,
    EventName.LEASE_LOST: logging.WARNING,
    EventName.DEADLINE_EXCEEDED: logging.WARNING,
    EventName.STORE_UNAVAILABLE: logging.WARNING,
    EventName.OUTCOME_UNKNOWN: logging.ERROR,
    EventName.VERDICT_GIVEN: logging.WARNING,
}
"""INFO for the rest."""


def report(task: Task, task_id: str | None, event: Event, *, observed: bool) -> None:
    """Log ``event``, and send its signal, if it has one.

    Args:
        task: Whose operation it is.
        task_id: Of the delivery, if there is one.
        event: What happened.
        observed: Whether it only would have happened.
    """
    level = logging.WARNING if event.reason.startswith(RESULT_LOST) else _LEVELS.get(event.name, logging.INFO)
    level = logging.DEBUG if event.is_one_of_many else level
    if logger.isEnabledFor(level):
        say(
            partial(logger.log, level),
            event.name,
            task=task.name,
            task_id=bounded(task_id or ""),
            key=event.key,
            label=event.label or None,
            token=event.fencing_token,
            observed=observed,
            reason=event.reason,
        )
    signal = signals.BY_EVENT.get(event.name)
    if signal is not None and signal.receivers:
        signal.send(
            sender=task,
            key=event.key,
            label=event.label,
            fencing_token=event.fencing_token,
            task_id=task_id,
            reason=event.reason,
            observed=observed,
        )


def report_verdict(app: Celery, record: Record) -> None:
    """Log the verdict that ``record`` carries, and send its signal.

    The sender is the record's task; None where this app has no such task.
    """
    verdict = record.verdict
    action, by, reason = verdict["action"], verdict["by"], verdict["reason"]
    say(
        partial(logger.log, _LEVELS[EventName.VERDICT_GIVEN]),
        EventName.VERDICT_GIVEN,
        task=record.task,
        key=record.key,
        label=record.label or None,
        action=action,
        status=verdict["status"],
        by=by,
        reason=reason,
    )
    signals.verdict_given.send(
        sender=app.tasks.get(record.task),
        key=record.key,
        label=record.label,
        fencing_token=record.fencing_token,
        task_id=record.task_id,
        reason=reason,
        observed=False,
        action=action,
        by=by,
        task=record.task,
    )
