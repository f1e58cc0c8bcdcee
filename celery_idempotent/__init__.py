"""Celery delivers a task at least once; this makes its effect happen once.

PYTEST_DONT_REWRITE: or pytest warns where this was imported before it, as the pytest plugin is of the same package.
"""

from celery_idempotent._version import __version__
from celery_idempotent.engine.attempt import Attempt, current_attempt
from celery_idempotent.errors import (
    DeadlineExceeded,
    IdempotencyError,
    IdempotencyWarning,
    InFlight,
    KeyMissing,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    PolicyError,
    ReplayedFailure,
    ResultLost,
    SafeToRetry,
    StoreMisconfigured,
    StoreUnavailable,
    WriteRefused,
)
from celery_idempotent.integration.operating.verdicts import forget, release, resolve
from celery_idempotent.integration.task.functions import idempotent
from celery_idempotent.integration.task.task import IdempotentMixin, IdempotentTask
from celery_idempotent.protocol.effects import AtLeastOnce, AtMostOnce, Committed, Fenced, Keyed
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.record import Record, Status
from celery_idempotent.protocol.store import Store
from celery_idempotent.stores import open_store

__all__ = [
    # the task
    "IdempotentTask",
    "IdempotentMixin",
    "idempotent",
    "Policy",
    "Attempt",
    "current_attempt",
    "resolve",
    "release",
    "forget",
    # kinds of effect, for Policy(effects=...)
    "Committed",
    "Keyed",
    "Fenced",
    "AtLeastOnce",
    "AtMostOnce",
    # the store
    "Store",
    "Record",
    "Status",
    "open_store",
    # errors
    "IdempotencyError",
    "PolicyError",
    "KeyMissing",
    "KeyReused",
    "InFlight",
    "LeaseLost",
    "DeadlineExceeded",
    "OutcomeUnknown",
    "ResultLost",
    "ReplayedFailure",
    "WriteRefused",
    "StoreUnavailable",
    "StoreMisconfigured",
    "SafeToRetry",
    "IdempotencyWarning",
    "__version__",
]
