"""For users' tests and for authors of stores: a fake clock, and the contract that every store passes."""

from celery_idempotent.testing.clock import FakeClock
from celery_idempotent.testing.contract import OutageContract, StoreContract
from celery_idempotent.testing.faults import FaultyStore, StoreWrapper

__all__ = ["FakeClock", "FaultyStore", "OutageContract", "StoreContract", "StoreWrapper"]
