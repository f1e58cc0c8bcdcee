"""``Policy(publish="once")``: an operation that is queued, running or has an outcome is not published again.

Only what starts an operation is looked at. What continues one, such as a retry, has to be sent; so has a message that
somebody waits for under its own id, as canvas does: a result that was handed out must come.

What is wrong with a message, its delivery tells, as of any other. Celery publishes on its own account, for callbacks,
chains and schedules, as does the relay of an outbox, and there an exception would pass for an outage of the broker.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, assert_never

from celery import Task, states
from celery.utils.time import maybe_make_aware

from celery_idempotent.engine.claim import announce, confirm, withdraw
from celery_idempotent.engine.delivery import load, outcome_of
from celery_idempotent.engine.events import Event, EventName, event_of
from celery_idempotent.engine.processes import this_process
from celery_idempotent.errors import ResultLost, StoreUnavailable
from celery_idempotent.integration.binding import is_builtin
from celery_idempotent.integration.events import report
from celery_idempotent.integration.headers import identity_in, is_awaited, wire_form
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.integration.versions import comes_back_from_lost_worker
from celery_idempotent.printable import say
from celery_idempotent.protocol.codec import describe
from celery_idempotent.protocol.operation import Operation, Replay, ReplayFailure
from celery_idempotent.protocol.publishing import Announce, Known, Outgoing, Underway
from celery_idempotent.protocol.store import RecordTooLarge

logger = logging.getLogger(__name__)


def publish_once(
    task: Task, publish: Callable[..., Any], args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str
) -> Any:
    """``publish`` the message, or give the result of the one that was sent before.

    ``publish`` is Celery's ``apply_async``, or that of another base; what it raises is raised, and nothing is recorded.
    The options have an explicit key in their headers. Raises ``PolicyError`` if the app has no usable store.
    """
    send = partial(publish, args, kwargs, task_id=task_id, **options)
    # A retry or a postponed delivery continues an operation; and in eager mode it runs at once.
    identity = identity_in(options.get("headers") or {}, task._scope, task_id)
    if options.get("retries") or identity is not None or task.app.conf.task_always_eager or is_builtin(type(task)):
        return send()
    store = runtime_of(task.app).store
    try:
        outgoing = _outgoing(task, args, kwargs, options, task_id)
    except Exception as error:  # noqa: BLE001 - a function of the author's may raise anything; the delivery tells
        reason = type(error).__name__ if task.idempotency_policy.private else describe(error)
        say(logger.warning, "not_announced", task=task.name, reason=reason)
        return send()
    try:
        decision = announce(store, outgoing)
    except (StoreUnavailable, RecordTooLarge) as error:
        _report(task, outgoing, "published all the same", error)
        return send()
    if not isinstance(decision, Announce):
        answer = _answer(task, decision, options) if isinstance(decision, Known) else None
        return send() if answer is None else answer
    try:
        sent = send()
    except BaseException:
        try:
            withdraw(store, decision)
        except Exception as error:  # noqa: BLE001 - nothing may hide the broker's error; the record is soon in doubt
            _report(task, outgoing, "the announcement of a message that was not sent stays", error)
        raise
    try:
        confirm(store, decision, outgoing)
    except (StoreUnavailable, RecordTooLarge) as error:
        _report(task, outgoing, "sent, and not confirmed, so it counts as queued for a lease", error)
    return sent


def _report(task: Task, outgoing: Outgoing, problem: str, error: Exception) -> None:
    name = event_of(error) if isinstance(error, StoreUnavailable) else EventName.STORE_UNAVAILABLE
    event = Event(name, outgoing.operation.identity.key, None, f"{problem}: {describe(error)}")
    report(task, outgoing.operation.task_id, event, observed=task.idempotency_policy.mode == "observe")


def _outgoing(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str) -> Outgoing:
    received = wire_form(task, args, kwargs, options.get("serializer"))
    operation = Operation(
        identity=task.idempotency_identity(*received, headers=options.get("headers") or {}, task_id=task_id),
        policy=task.idempotency_policy,
        task=task.name,
        task_id=task_id,
        worker="",
        app=task.app.main or "",
        process=this_process(),
        grace=runtime_of(task.app).grace,
    )
    due = max(_seconds(task, options.get("countdown")), _seconds(task, options.get("eta")))
    queued_for = due * 1000 + runtime_of(task.app).queued_for  # from when it is due
    expires = options.get("expires", task.expires)
    if expires is not None:
        queued_for = min(queued_for, _seconds(task, expires) * 1000)
    comes_back, awaited = comes_back_from_lost_worker(task), is_awaited(options)
    return Outgoing(operation=operation, queued_for=int(queued_for), comes_back=comes_back, awaited=awaited)


def _seconds(task: Task, value: Any) -> float:
    """Seconds from now to what Celery takes as a time; 0 for what it will refuse."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = (maybe_make_aware(value, task.app.timezone) - task.app.now()).total_seconds()
        return min(max(float(value or 0), 0.0), 10 * 365 * 86_400)  # further away is a mistake, and fits no number
    except (TypeError, ValueError):
        return 0.0


def _answer(task: Task, decision: Known, options: Mapping[str, Any]) -> Any:
    """The result of the first message; None where only a delivery can tell it, or where publishing is only observed."""
    runtime, policy, record = runtime_of(task.app), task.idempotency_policy, decision.record
    codec, observed = runtime.codec_of(policy), policy.mode == "observe"
    result = task.AsyncResult(record.task_id)
    state = value = None

    def recorded() -> Any:
        return outcome_of(codec, policy, load(runtime.store, record), CONTROL_FLOW)

    try:
        match decision:
            case Underway():
                result.ignored = options.get("ignore_result", task.ignore_result)
                reason = f"running on {record.worker}" if record.owner else "queued"
            case Replay():
                state, value, reason = states.SUCCESS, recorded(), "completed earlier"
            case ReplayFailure():
                state, value, reason = states.FAILURE, recorded(), f"failed earlier: {record.error}"
            case unreachable:
                assert_never(unreachable)
    except (ResultLost, StoreUnavailable):
        return None
    skipped = Event(EventName.PUBLISH_SKIPPED, record.key, None, reason, done_in=record.app)
    report(task, record.task_id, skipped, observed=observed)
    if observed:
        return None
    if state is not None:  # it needs no backend any more, and for the rest is like any other of the task
        meta = {"task_id": result.id, "status": state, "result": value, "traceback": None, "children": None}
        result._maybe_set_cache(meta)
    # As Celery does. No task is its own child: who walks through the results of its children would never end.
    parent = task.app.current_worker_task
    if parent and options.get("add_to_parent", True) and parent.request.id != result.id:
        parent.add_trail(result)
    return result
