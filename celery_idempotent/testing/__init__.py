"""For users' tests: a fake clock and store, planned faults, :func:`assert_effect_once`. For authors of stores: the
contract that every store passes. The pytest fixtures are in ``pytest_celery_idempotent``.
"""

from celery_idempotent.integration.operating.watching import SeenEffect, watch_effects
from celery_idempotent.testing.contract.capabilities import (
    CommittingContract,
    OutageContract,
    OutboxContract,
    PurgeableContract,
    TransactionalContract,
    VerifiableContract,
)
from celery_idempotent.testing.contract.store import StoreContract
from celery_idempotent.testing.coverage import Death, EffectCoverage, effect_coverage
from celery_idempotent.testing.effects import assert_effect_once
from celery_idempotent.testing.stores import FakeClock, FakeStore, FaultyStore, StoreWrapper

__all__ = [
    "CommittingContract",
    "Death",
    "EffectCoverage",
    "FakeClock",
    "FakeStore",
    "FaultyStore",
    "OutageContract",
    "OutboxContract",
    "PurgeableContract",
    "SeenEffect",
    "StoreContract",
    "StoreWrapper",
    "TransactionalContract",
    "VerifiableContract",
    "assert_effect_once",
    "effect_coverage",
    "watch_effects",
]
