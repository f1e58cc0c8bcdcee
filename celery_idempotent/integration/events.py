"""What happens to operations, told to logs and to receivers of signals."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.utils.dispatch import Signal

from celery_idempotent import stores
from celery_idempotent.engine.events import Event, EventName
from celery_idempotent.integration.headers import waiting_since
from celery_idempotent.printable import say
from celery_idempotent.protocol.record import Record, bounded, trace_of

logger = logging.getLogger(__name__)

SIGNALS: Mapping[str, Signal] = {each: Signal(name=str(each)) for each in EventName}
"""By event, also by its name."""

_ANSWERED = {EventName.REPLAYED, EventName.KEY_REUSED, EventName.OUTCOME_UNKNOWN}
"""What ends the wait of a delivery that is answered by a record; a body ends its wait by its claim."""


def report(
    task: Any, task_id: str | None, event: Event, *, observed: bool, headers: Mapping[str, Any] | None = None
) -> None:
    """Log ``event`` of a delivery, if there is one, and send its signal; ``observed``: it only would have happened."""
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
    main = bounded(task.app.main or "") if isinstance(task, Task) and event.done_in else ""
    if task and main not in ("", event.done_in) and task.name not in _shared:
        _shared.add(task.name)  # two services that have a task of the same name in one store suppress each other
        say(logger.warning, "another_app", task=task.name, app=main, done_in=event.done_in, key=event.key)
    if not SIGNALS[event.name].receivers:
        return
    # What was postponed has waited, by clocks of two workers, until it may run or is answered.
    is_over = event.name is EventName.CLAIMED or (event.name in _ANSWERED and event.done_by is not None)
    since = waiting_since(headers or {}) if is_over else None
    waited = None if since is None else max(time.time() - since / 1000, 0.0)
    _send(task, task_id, event, observed=observed, waited=waited)


_shared: set[str] = set()
"""Tasks of which it has been said in this process that another app has them, too."""


def _send(sender: Any, task_id: str | None, event: Event, *, observed: bool = False, **more: Any) -> None:
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
            **{"waited": None, **more},
        )


def report_verdict(app: Celery, record: Record) -> None:
    """Log the verdict that ``record`` carries, and send its signal, from the record's task if this app has it."""
    verdict = record.verdict
    given = {"action": verdict["action"], "by": verdict["by"], "task": record.task}
    say(
        partial(logger.log, EventName.VERDICT_GIVEN.level),
        EventName.VERDICT_GIVEN,
        task=record.task,
        key=record.key,
        label=record.label or None,
        action=verdict["action"],
        status=verdict["status"],
        by=verdict["by"],
        reason=verdict["reason"],
    )
    event = Event(EventName.VERDICT_GIVEN, record.key, record.fencing_token, verdict["reason"], record.label)
    event = event._replace(attempt=record.attempts, done_by=record.task_id, trace=trace_of(record))
    _send(app.tasks.get(record.task), record.task_id, event, **given)


# A scan of a store knows nothing of Celery.
stores.listeners.append(lambda key, error: _send(None, None, Event(EventName.RECORD_UNREADABLE, key, None, str(error))))

read_trace: Callable[[], str] = str
"""Tells the trace context (a W3C ``traceparent``) of what runs now; empty without telemetry, which replaces this."""
