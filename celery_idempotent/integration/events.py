"""What happens to operations, told to logs and to receivers of signals."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from celery import Celery, Task
from celery.utils.dispatch import Signal

from celery_idempotent.engine.events import Event, EventName
from celery_idempotent.integration.headers import waiting_since
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Record, bounded, trace_of
from celery_idempotent.stores import reading

logger = logging.getLogger(__name__)

_ARGUMENTS = {
    *("key", "label", "fencing_token", "task_id", "reason", "observed"),
    *("attempt", "done_by", "trace", "waited"),
}

SIGNALS: Mapping[str, Signal] = {
    each: Signal(
        name=str(each),
        providing_args=_ARGUMENTS | ({"action", "by", "task"} if each is EventName.VERDICT_GIVEN else set()),
    )
    for each in EventName
}
"""By event, also by its name."""

_ANSWERED = {EventName.REPLAYED, EventName.KEY_REUSED, EventName.OUTCOME_UNKNOWN}
"""What ends the wait of a delivery that is answered by a record; a body ends its wait by its claim."""


class Named(Protocol):
    """What has operations: a task, or something else that has a name."""

    name: str


def report(
    task: Named | None, task_id: str | None, event: Event, *, observed: bool, headers: Mapping[str, Any] | None = None
) -> None:
    """Log ``event``, and send its signal.

    Args:
        task: Whose operation it is; None if nobody knows.
        task_id: Of the delivery, if there is one.
        event: What happened.
        observed: Whether it only would have happened.
        headers: Those of the delivery's message.
    """
    level = logging.DEBUG if event.is_one_of_many else event.name.level
    if level == logging.ERROR and isinstance(task, Task) and not observed:
        level = logging.WARNING  # what a delivery raises Celery logs as an error: one alarm is enough
    if logger.isEnabledFor(level):
        say(
            partial(logger.log, level),
            event.name,
            task=task and task.name,
            task_id=task_id and bounded(task_id),
            key=event.key or None,
            label=event.label or None,
            token=event.fencing_token,
            attempt=event.attempt,
            done_by=event.done_by,
            observed=observed,
            reason=event.reason,
        )
    if event.done_in and isinstance(task, Task) and event.done_in != task.app.main:
        _tell_of_another_app(task, event)
    _send(task, task_id, event, observed, headers or {})


def _tell_of_another_app(task: Task, event: Event) -> None:
    """Two services that have a task of the same name in one store suppress each other; said once for each task."""
    if bounded(task.app.main or "") in ("", event.done_in) or task.name in _shared:
        return
    _shared.add(task.name)
    say(logger.warning, "another_app", task=task.name, app=task.app.main, done_in=event.done_in, key=event.key)


_shared: set[str] = set()
"""Tasks of which that has been said in this process."""


def _send(
    sender: Named | None, task_id: str | None, event: Event, observed: bool, headers: Mapping[str, Any], **more: Any
) -> None:
    signal = SIGNALS[event.name]
    if signal.receivers:
        signal.send(
            sender=sender,
            key=event.key,
            label=event.label,
            fencing_token=event.fencing_token,
            task_id=task_id,
            reason=event.reason,
            observed=observed,
            attempt=event.attempt,
            done_by=event.done_by,
            trace=event.trace,
            waited=_waited(event, headers),
            **more,
        )


def _waited(event: Event, headers: Mapping[str, Any]) -> float | None:
    """Seconds since the delivery was first postponed, by clocks of two workers; None if it was not, or waits on."""
    is_over = event.name is EventName.CLAIMED or (event.name in _ANSWERED and event.done_by is not None)
    since = waiting_since(headers) if is_over else None
    return None if since is None else max(time.time() - since / 1000, 0.0)


def report_verdict(app: Celery, record: Record) -> None:
    """Log the verdict that ``record`` carries, and send its signal.

    The sender is the record's task; None where this app has no such task.
    """
    verdict = record.verdict
    action, by, reason = verdict["action"], verdict["by"], verdict["reason"]
    say(
        partial(logger.log, EventName.VERDICT_GIVEN.level),
        EventName.VERDICT_GIVEN,
        task=record.task,
        key=record.key,
        label=record.label or None,
        action=action,
        status=verdict["status"],
        by=by,
        reason=reason,
    )
    event = Event(EventName.VERDICT_GIVEN, record.key, record.fencing_token, reason, record.label)
    event = replace(event, attempt=record.attempts, done_by=record.task_id, trace=trace_of(record))
    more = {"action": action, "by": by, "task": record.task}
    _send(app.tasks.get(record.task), record.task_id, event, observed=False, headers={}, **more)


def _pass_over(key: str, error: Exception) -> None:
    _send(None, None, Event(EventName.RECORD_UNREADABLE, key, None, str(error)), observed=False, headers={})


reading.listeners.append(_pass_over)  # a scan of a store knows nothing of Celery


_read_trace: Callable[[], str] = str


def read_trace_by(read: Callable[[], str] | None) -> None:
    """Have ``read`` tell the trace context (a W3C ``traceparent``) from now on; None: there is none."""
    global _read_trace
    _read_trace = read or str


def current_trace() -> str:
    """That of what runs now; empty if there is none, as without telemetry."""
    return _read_trace()
