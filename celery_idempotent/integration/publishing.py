"""``Policy(publish="once")``: an operation that is queued, running or has an outcome is not published again.

Only what starts an operation is looked at. What continues one, such as a retry, has to be sent; so has a message that
somebody waits for under its own id, as canvas does: a result that was handed out must come.

What is wrong with a message, its delivery tells, as of any other. Celery publishes on its own account, for callbacks,
chains and schedules, as does the relay of an outbox, and there an exception would pass for an outage of the broker.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_never

from celery import Task, states
from celery.utils.time import maybe_make_aware

from celery_idempotent.engine.events import Event, EventName, event_of
from celery_idempotent.engine.objects import with_result
from celery_idempotent.engine.outcomes import failure_of, result_of
from celery_idempotent.engine.processes import this_process
from celery_idempotent.engine.publisher import announce, withdraw
from celery_idempotent.errors import ResultLost, StoreUnavailable
from celery_idempotent.integration import messages
from celery_idempotent.integration.binding import is_builtin
from celery_idempotent.integration.events import report
from celery_idempotent.integration.settings import CONTROL_FLOW, runtime_of
from celery_idempotent.integration.versions import comes_back_from_lost_worker
from celery_idempotent.printable import say
from celery_idempotent.protocol.cipher import Cipher, hidden_label, legible
from celery_idempotent.protocol.codec import describe
from celery_idempotent.protocol.operation import Operation, Replay, ReplayFailure
from celery_idempotent.protocol.publishing import Announce, Known, Outgoing, Send, Underway
from celery_idempotent.protocol.record import Record
from celery_idempotent.protocol.store import RecordTooLarge

logger = logging.getLogger(__name__)

_LONGEST = 10 * 365 * 86_400
"""Seconds that a message may be expected to wait; what is further away is a mistake, and fits no number."""


def starts_operation(task: Task, options: Mapping[str, Any], scope: str, task_id: str) -> bool:
    """Whether the message starts an operation that may have been published already.

    Not a retry or a postponed delivery, which continue one; nor what runs at once, in eager mode.
    """
    if options.get("retries") or task.app.conf.task_always_eager:
        return False
    return messages.carried(options.get("headers") or {}, scope, task_id) is None and not is_builtin(type(task))


def publish_once(
    task: Task, send: Callable[..., Any], args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str
) -> Any:
    """``send`` the message, or the result of the one that was sent before.

    Args:
        task: What is called.
        send: Publishes the message under the task id that it is given, with the revision of the record that was made
            for it or None, and returns its result.
        args: The call's arguments.
        kwargs: Its keyword arguments.
        options: Those of ``apply_async``, with an explicit key in the headers.
        task_id: The id that the message would have.

    Raises:
        PolicyError: The app has no usable store.
        Exception: What sending raises. Nothing is recorded then.
    """
    decision = _decided(task, args, kwargs, options, task_id)
    match decision:
        case _Answered(result):
            return _child(task, result, options)
        case Announce() | Send():
            try:
                return send(decision.task_id, decision.record.revision if isinstance(decision, Announce) else None)
            except BaseException:
                if isinstance(decision, Announce):
                    _withdraw(task, decision)
                raise
        case unreachable:
            assert_never(unreachable)


@dataclass(frozen=True, slots=True)
class _Answered:
    """Publish nothing: this is the result of the message that was sent before."""

    result: Any


def _decided(
    task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str
) -> Announce | Send | _Answered:
    """What becomes of the message. In doubt it is sent under its own id, as is every one that is only observed."""
    policy, own = task.idempotency_policy, Send(task_id)
    observed = policy.mode == "observe"
    try:
        outgoing = _outgoing(task, args, kwargs, options, task_id)
    except Exception as error:  # noqa: BLE001 - a function of the author's may raise anything; the delivery tells
        reason = type(error).__name__ if policy.redact_errors else describe(error)
        say(logger.warning, "not_announced", task=task.name, reason=reason)
        return own
    key = outgoing.operation.identity.key
    try:
        decision = announce(runtime_of(task.app).store, outgoing)
    except (StoreUnavailable, RecordTooLarge) as error:
        name = event_of(error) if isinstance(error, StoreUnavailable) else EventName.STORE_UNAVAILABLE
        _tell(task, task_id, name, key, f"published all the same: {error}", observed)
        return own
    if isinstance(decision, Announce | Send):
        return decision
    answer = _answer(task, decision, options)
    if answer is None:
        return own
    reason = _reason(decision, runtime_of(task.app).cipher)
    skipped = Event(EventName.PUBLISH_SKIPPED, key, None, reason, done_in=decision.record.app)
    report(task, decision.record.task_id, skipped, observed=observed)
    return own if observed else _Answered(answer)


def _outgoing(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any], task_id: str) -> Outgoing:
    received = messages.wire_form(task, args, kwargs, options.get("serializer"))
    headers = options.get("headers") or {}
    identity = task.idempotency_identity(*received, headers=headers, task_id=task_id)
    operation = Operation(
        identity=identity,
        policy=task.idempotency_policy,
        task=task.name,
        task_id=task_id,
        worker="",
        app=task.app.main or "",
        process=this_process(),
        hidden_label=hidden_label(runtime_of(task.app).cipher, identity.label, identity.key),
    )
    return Outgoing(
        operation=operation,
        patience=_patience(task, options),
        comes_back=comes_back_from_lost_worker(task),
        awaited=messages.is_awaited(options),
    )


def _patience(task: Task, options: Mapping[str, Any]) -> int:
    """Milliseconds within which a worker should have the message: one lease from when it is due, unless it expires."""
    due = max(_seconds(task, options.get("countdown")), _seconds(task, options.get("eta")))
    expires = options.get("expires", task.expires)
    patience = due * 1000 + task.idempotency_policy.lease_ms
    return int(patience if expires is None else min(patience, _seconds(task, expires) * 1000))


def _seconds(task: Task, value: Any) -> float:
    """Seconds from now to what Celery takes as a time; 0 for what it will refuse."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = (maybe_make_aware(value, task.app.timezone) - task.app.now()).total_seconds()
        return min(max(float(value or 0), 0.0), _LONGEST)
    except (TypeError, ValueError):
        return 0.0


def _answer(task: Task, decision: Known, options: Mapping[str, Any]) -> Any:
    """The result of the first message; None where only a delivery can tell it."""
    runtime = runtime_of(task.app)
    codec = runtime.codec_of(task.idempotency_policy)
    try:
        match decision:
            case Underway(record):
                result = task.AsyncResult(record.task_id)
                result.ignored = options.get("ignore_result", task.ignore_result)
                return result
            case Replay(record):
                whole = with_result(runtime.large_results, record)
                return _known(task, record, states.SUCCESS, result_of(codec, whole))
            case ReplayFailure(record):
                never = CONTROL_FLOW.steering
                return _known(
                    task, record, states.FAILURE, failure_of(codec, task.idempotency_policy, record, never=never)
                )
            case unreachable:
                assert_never(unreachable)
    except (ResultLost, StoreUnavailable):
        return None


def _known(task: Task, record: Record, state: str, value: Any) -> Any:
    """A result that needs no backend any more, and for the rest is like any other of the task."""
    result = task.AsyncResult(record.task_id)
    meta = {"task_id": record.task_id, "status": state, "result": value, "traceback": None, "children": None}
    result._maybe_set_cache(meta)
    return result


def _child(task: Task, result: Any, options: Mapping[str, Any]) -> Any:
    """``result``, known to the task that asked for it as what that task published, as Celery does it.

    No task is its own child: who walks through the results of its children would never come to an end.
    """
    parent = task.app.current_worker_task
    if parent and options.get("add_to_parent", True) and parent.request.id != result.id:
        parent.add_trail(result)
    return result


def _reason(decision: Known, cipher: Cipher | None) -> str:
    if isinstance(decision, Underway):
        return f"running on {decision.record.worker}" if decision.record.owner else "queued"
    if isinstance(decision, Replay):
        return "completed earlier"
    return f"failed earlier: {legible(cipher, decision.record).error}"


def _withdraw(task: Task, announced: Announce) -> None:
    """Undo the announcement, so that the next publisher sends. What went wrong with the broker is what people hear."""
    record = announced.record
    try:
        withdraw(runtime_of(task.app).store, announced)
    except Exception as error:  # noqa: BLE001 - nothing may hide the broker's error, and the record is soon in doubt
        told = f"the announcement of a message that was not sent stays: {describe(error)}"
        _tell(task, record.task_id, EventName.STORE_UNAVAILABLE, record.key, told, observed=False)


def _tell(task: Task, task_id: str, name: EventName, key: str, reason: str, observed: bool) -> None:
    report(task, task_id, Event(name, key, None, reason), observed=observed)
