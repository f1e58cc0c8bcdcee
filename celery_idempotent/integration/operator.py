"""An operator's verdict in Python: ``resolve(key, completed=...)`` or ``resolve(key, rerun=True)``."""

from typing import Any

from celery import Celery, current_app

from celery_idempotent.engine import operator
from celery_idempotent.errors import PolicyError
from celery_idempotent.integration.settings import runtime_of
from celery_idempotent.protocol.record import Record

_NOT_GIVEN = object()


def resolve(key: str, *, completed: Any = _NOT_GIVEN, rerun: bool = False, app: Celery | None = None) -> Record:
    """Give the verdict on an operation whose outcome is UNKNOWN; the only way out of that state.

    First find out from the receiver whether the effect happened.

    Args:
        key: The idempotency key, as ``OutcomeUnknown.key``, the signal and ``idempotency list`` tell it.
        completed: It happened; every later delivery is answered with this, kept as the task's policy says.
        rerun: It did not happen; the next delivery runs the body, except for its finished steps.
        app: The Celery app; default: the current one.

    Returns:
        The record as it is now.

    Raises:
        PolicyError: Not exactly one verdict is given, the outcome is not UNKNOWN, or somebody else changed the
            record meanwhile.
        StoreUnavailable: No certain answer; look at the record before repeating.
    """
    if (completed is _NOT_GIVEN) is not rerun:
        raise PolicyError("resolve", repr(key), "give either completed=<its result> or rerun=True")
    runtime = runtime_of(app or current_app)
    if rerun:
        return operator.rerun(runtime.store, key)
    retain = runtime.policy_of(runtime.store.get(key)).retain_ms
    return operator.completed(runtime.store, runtime.codec, key, completed, retain=retain)
